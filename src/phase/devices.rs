//! What a process computes with: its worker pool, its instruction set, and devices by their labels.

use std::sync::{Arc, OnceLock};
#[cfg(feature = "xrt")]
use std::sync::{Mutex, PoisonError};

use crate::compute::{Isa, Pool};
use crate::device::emu::EmuDevice;
use crate::device::{Arithmetic, Device};
use crate::error::{Error, Result};
use crate::settings;

/// The process's worker pool.
pub fn pool() -> Result<Arc<Pool>> {
    static POOL: OnceLock<Arc<Pool>> = OnceLock::new();
    if let Some(pool) = POOL.get() {
        return Ok(pool.clone());
    }
    let threads = settings::threads()?;
    Ok(POOL.get_or_init(|| Arc::new(Pool::new(threads))).clone())
}

/// The instruction set in force: `PHASEGATE_ISA` or the best this CPU has.
///
/// Errors: [`Error::Usage`] for an unknown one, [`Error::Unavailable`] for one this CPU lacks.
pub fn isa() -> Result<Isa> {
    let Some(forced) = settings::isa() else { return Ok(Isa::detect()) };
    let isa: Isa = forced.parse().map_err(|_| Error::Usage {
        what: settings::ISA.into(),
        found: forced.clone(),
        expected: "portable, avx2, avx512f or avx512bf16".into(),
    })?;
    if isa.supported() {
        Ok(isa)
    } else {
        Err(Error::Unavailable { what: format!("instruction set {isa}"), why: "this CPU does not have it".into() })
    }
}

/// Opens a device by its label.
///
/// Errors: [`Error::Unavailable`] for one this build or machine does not have, [`Error::Unknown`] for any other name; for
/// an NPU also those of its kernel cache.
pub fn open_device(label: &str) -> Result<Box<dyn Device>> {
    match label {
        "emu" => Ok(Box::new(EmuDevice::new(isa()?, pool()?, Arithmetic::Ieee))),
        "emu_npu2" => Ok(Box::new(EmuDevice::new(isa()?, pool()?, Arithmetic::Npu2))),
        _ => xrt::open(label),
    }
}

/// Why the device of this label cannot be opened here, if it cannot. Cheap: opens nothing.
pub fn unavailable(label: &str) -> Option<Error> {
    if matches!(label, "emu" | "emu_npu2") { None } else { xrt::unavailable(label) }
}

fn unknown_device(label: &str) -> Error {
    Error::Unknown { kind: "device", name: label.into(), known: "emu, emu_npu2, vnpu, npu".into() }
}

/// Memory and swap of this machine, where the system tells (Linux).
///
/// Units: bytes.
pub fn memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((kib("MemTotal:")? + kib("SwapTotal:").unwrap_or(0)) * 1024)
}

/// The devices behind XRT.
#[cfg(feature = "xrt")]
mod xrt {
    use super::*;
    use crate::device::lock::LockOptions;
    use crate::device::npu::{self, Label, NpuDevice};
    use crate::kernel::cache::KernelCache;

    pub(super) fn open(label: &str) -> Result<Box<dyn Device>> {
        let label = Label::of(label).ok_or_else(|| unknown_device(label))?;
        if let Some(error) = npu::unavailable(label) {
            return Err(error);
        }
        let timeout = settings::npu_timeout()?;
        Ok(Box::new(NpuDevice::open(label, kernels()?, timeout, &LockOptions::default())?))
    }

    pub(super) fn unavailable(label: &str) -> Option<Error> {
        Label::of(label).map_or_else(|| Some(unknown_device(label)), npu::unavailable)
    }

    /// The kernel cache of this process, opened once; its warnings go to stderr.
    fn kernels() -> Result<Arc<KernelCache>> {
        static KERNELS: Mutex<Option<Arc<KernelCache>>> = Mutex::new(None);
        let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = &*kernels {
            return Ok(kernels.clone());
        }
        let dir = settings::kernels().ok_or_else(|| Error::Unavailable {
            what: "kernel cache".into(),
            why: format!("{} names no folder of compiled ELFs", settings::KERNELS),
        })?;
        let opened = Arc::new(KernelCache::open(&dir, settings::sealed_only())?);
        opened.warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
        Ok(kernels.insert(opened).clone())
    }
}

/// Without them.
#[cfg(not(feature = "xrt"))]
mod xrt {
    use super::*;

    pub(super) fn open(label: &str) -> Result<Box<dyn Device>> {
        Err(unavailable(label).unwrap_or_else(|| unknown_device(label)))
    }

    pub(super) fn unavailable(label: &str) -> Option<Error> {
        Some(match label {
            "npu" | "vnpu" => Error::Unavailable {
                what: format!("device {label}"),
                why: "this binary is built without the feature xrt".into(),
            },
            _ => unknown_device(label),
        })
    }
}
