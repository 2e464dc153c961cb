//! One kernel bound on a device: written, run, read, and run again.

use half::bf16;
use ndarray::Array2;

use super::inputs::Inputs;
use crate::device::{BoundLaunch, BufferHandle, BufferSpec, Device, DispatchHandle, Layout, Role};
use crate::error::{Error, Result};
use crate::kernel::{Arg, ArgRole, Dtype, Kernel, oracle};
use crate::tensor;

/// Length of the vectors of the other kernel.
const OTHER: usize = 96;

/// The other kernel.
pub(super) const OTHER_KERNEL: Kernel = Kernel::Add { rows: 1, cols: OTHER };

/// A kernel with its buffers, and another one with its own to run in between.
pub(super) struct Bound {
    device: Box<dyn Device>,
    kernel: Kernel,
    args: Vec<BufferHandle>,
    run: DispatchHandle,
    other: DispatchHandle,
}

impl Bound {
    /// Errors: those of the device.
    pub(super) fn open(mut device: Box<dyn Device>, kernel: &Kernel) -> Result<Bound> {
        let args = kernel.args().iter().map(|arg| create(&mut *device, arg)).collect::<Result<Vec<_>>>()?;
        let run = device.prepare(&kernel.to_string(), vec![launch(kernel, &args)])?;
        let add = OTHER_KERNEL;
        let others = add.args().iter().map(|arg| create(&mut *device, arg)).collect::<Result<Vec<_>>>()?;
        for &input in &others[..2] {
            device.write(input, 0, tensor::bytes_of(&[bf16::from_f32(-3.5); OTHER]))?;
        }
        let other = device.prepare("another kernel", vec![launch(&add, &others)])?;
        Ok(Bound { device, kernel: kernel.clone(), args, run, other })
    }

    /// Writes every input.
    ///
    /// Errors: those of the device.
    pub(super) fn write(&mut self, inputs: &Inputs) -> Result<()> {
        for (&arg, input) in self.args.iter().zip(inputs) {
            self.device.write(arg, 0, tensor::bytes_of(input))?;
        }
        Ok(())
    }

    /// The output of one run, in a buffer that held NaN before: what was not written still does.
    ///
    /// Errors: [`Error::Incomplete`]; [`Error::Device`] for a damaged guard.
    pub(super) fn run(&mut self) -> Result<Array2<f32>> {
        let shape = oracle::output_shape(&self.kernel);
        Array2::from_shape_vec(shape, self.widened()?)
            .map_err(|e| Error::comparison("output", e.to_string(), "its shape"))
    }

    fn widened(&mut self) -> Result<Vec<f32>> {
        let Some(&out) = self.args.last() else { return Ok(vec![]) };
        self.device.poison(out)?;
        self.device.run(self.run)?;
        let (bytes, dtype) = (self.device.spec(out).bytes(), self.device.spec(out).dtype);
        let bytes = self.device.read(out, 0, bytes)?;
        Ok(match dtype {
            Dtype::Bf16 => tensor::bf16_from_le_bytes(bytes).iter().map(|x| x.to_f32()).collect(),
            Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }

    /// The first output, and what differs: cold, warm, and after another kernel with every buffer but the weight
    /// poisoned and written again.
    ///
    /// Errors: as [`Bound::run`].
    pub(super) fn three_times(&mut self, inputs: &Inputs) -> Result<(Array2<f32>, Option<String>)> {
        let cold = self.run()?;
        let warm = self.run()?;
        for (&arg, input) in self.args.iter().zip(inputs) {
            if self.device.spec(arg).layout == Layout::Rows {
                self.device.poison(arg)?;
                self.device.write(arg, 0, tensor::bytes_of(input))?;
            }
        }
        self.device.run(self.other)?;
        let after = self.run()?;
        let differs = [("warm", &warm), ("after another kernel", &after)].into_iter().find_map(|(when, again)| {
            let ((row, col), _) = cold.indexed_iter().find(|&(at, x)| x.to_bits() != again[at].to_bits())?;
            let (cold, again) = (cold[[row, col]], again[[row, col]]);
            Some(format!("NONDETERMINISTIC: {when} [{row}, {col}] is {again}, cold {cold}"))
        });
        Ok((cold, differs))
    }
}

fn launch(kernel: &Kernel, args: &[BufferHandle]) -> BoundLaunch {
    BoundLaunch { site: kernel.to_string(), kernel: kernel.clone(), args: args.to_vec() }
}

fn create(device: &mut dyn Device, arg: &Arg) -> Result<BufferHandle> {
    let (role, layout) = match arg.role {
        ArgRole::Input => (Role::Input, Layout::Rows),
        ArgRole::LinearWeight => (Role::Input, Layout::LinearWeight),
        ArgRole::Output => (Role::Output, Layout::Rows),
    };
    let (dtype, rows, cols) = (arg.dtype, arg.rows, arg.cols);
    device.create(BufferSpec { name: arg.name.into(), dtype, rows, cols, role, layout })
}
