//! A bound launch against its kernel: what every device checks before it prepares a dispatch.

use super::{BoundLaunch, BufferHandle, BufferSpec, Layout};
use crate::error::{Error, Result};
use crate::kernel::{ArgRole, Kernel};

/// Checks number, dtype, size and layout of the arguments, and that none is forbidden aliasing.
///
/// Errors: [`Error::Device`] naming the dispatch `name`, the kernel and the argument.
pub(super) fn check_launch<'a>(
    device: &str,
    name: &str,
    launch: &BoundLaunch,
    spec: impl Fn(BufferHandle) -> Option<&'a BufferSpec>,
) -> Result<()> {
    let fail =
        |why: String| Err(Error::Device { device: device.into(), why: format!("{name}: {}: {why}", launch.kernel) });
    let args = launch.kernel.args();
    if args.len() != launch.args.len() {
        return fail(format!("found {} arguments, expected {}", launch.args.len(), args.len()));
    }
    for (arg, &handle) in args.iter().zip(&launch.args) {
        let Some(spec) = spec(handle) else { return fail(format!("buffer {} does not exist", handle.0)) };
        let layout = if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
        let shape_fits = match layout {
            Layout::LinearWeight => (spec.rows, spec.cols) == (arg.rows, arg.cols),
            Layout::Rows => spec.len() == arg.rows * arg.cols,
        };
        if !shape_fits || spec.dtype != arg.dtype || spec.layout != layout {
            return fail(format!(
                "argument {}: found {} {:?} {:?} [{}, {}], expected {:?} {layout:?} [{}, {}]",
                arg.name, spec.name, spec.dtype, spec.layout, spec.rows, spec.cols, arg.dtype, arg.rows, arg.cols
            ));
        }
    }
    let (out, inputs) = launch.args.split_last().expect("every kernel has an output");
    let elementwise = match launch.kernel {
        Kernel::Add { .. }
        | Kernel::BiasAdd { .. }
        | Kernel::SiluMul { .. }
        | Kernel::GeluTanh { .. }
        | Kernel::Rope { .. }
        | Kernel::RmsNorm { .. }
        | Kernel::QkNorm { .. }
        | Kernel::LayerNorm { .. } => true,
        Kernel::Gemm { .. }
        | Kernel::GemmLow { .. }
        | Kernel::Gemv { .. }
        | Kernel::GemvAdd { .. }
        | Kernel::SwigluRms { .. }
        | Kernel::Attention { .. } => false,
    };
    if inputs.contains(out) && !elementwise {
        return fail("writes its own input".into());
    }
    Ok(())
}
