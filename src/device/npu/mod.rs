//! The NPU through XRT, or the virtual one below the same XRT: buffers, compiled dispatches, and a completion that is
//! checked every time.
//!
//! Only here is XRT used. Nothing that a dispatch wrote is handed out unless the dispatch completed; after a time-out no
//! later result of this process is.

mod contexts;
pub mod handles;
mod memory;
mod open;
pub mod run;

use std::mem::ManuallyDrop;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use xrt_sys::Failure;

use self::contexts::{Contexts, Loaded};
use self::handles::{Device as XrtDevice, ElfImage, Kernel};
use self::memory::{Memory, Place};
use self::run::{Ended, Run};
use super::launch::check_launch;
use super::lock::DeviceLock;
use super::{BoundLaunch, BufferHandle, BufferSpec, Completed, Counters, Device, DeviceInfo, DispatchHandle};
use crate::error::{Error, Result};
use crate::kernel::cache::KernelCache;
use crate::kernel::contract::{ArgumentLayout, ArgumentRole, Contract};

pub use open::{Label, unavailable};

/// OS/ABI of an ELF for AIE2P.
const AIE2P: u32 = 69;

/// A dispatch bound to buffers.
struct Prepared {
    name: String,
    contract: Contract,
    /// Of the contract.
    hash: String,
    /// By argument.
    buffers: Vec<BufferHandle>,
}

/// Everything that must outlive a run which never ended.
struct Inner {
    contexts: Contexts,
    memory: Memory,
    device: XrtDevice,
    _lock: Option<Arc<DeviceLock>>,
}

/// A device behind XRT.
pub struct NpuDevice {
    info: DeviceInfo,
    cache: Arc<KernelCache>,
    timeout: Duration,
    inner: ManuallyDrop<Inner>,
    /// A run of this device is in flight for ever: nothing it uses may be freed.
    hung: bool,
    prepared: Vec<Prepared>,
    counters: Counters,
}

impl Drop for NpuDevice {
    fn drop(&mut self) {
        if !self.hung {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl NpuDevice {
    fn fail<T>(&self, why: String) -> Result<T> {
        Err(Error::Device { device: self.info.label.clone(), why })
    }

    fn prepared(&self, handle: DispatchHandle) -> Result<&Prepared> {
        match self.prepared.get(handle.0) {
            Some(prepared) => Ok(prepared),
            None => self.fail(format!("dispatch {} does not exist", handle.0)),
        }
    }

    /// Where a dispatch's ELF stands in the list of loaded ones, which is its end.
    ///
    /// Errors: those of the kernel cache, and of an ELF that is not what its contract says.
    fn load(&self, handle: DispatchHandle, loaded: &mut Vec<Loaded>) -> Result<usize> {
        let prepared = self.prepared(handle)?;
        if let Some(at) = loaded.iter().position(|known| known.hash == prepared.hash) {
            loaded[at..].rotate_left(1);
            return Ok(loaded.len() - 1);
        }
        let arguments = prepared.contract.args.len();
        let (image, kernel_name) = self.image(prepared)?;
        let made = contexts::create(&self.inner.device, &image, loaded).and_then(|context| {
            let kernel = Kernel::of_elf(&context, &kernel_name)?;
            let run = Some(Run::new(&kernel, arguments)?);
            let (hash, bound) = (prepared.hash.clone(), vec![None; arguments]);
            Ok(Loaded { hash, run, bound, _kernel: kernel, _context: context })
        });
        let what = || format!("{} ({})", prepared.name, prepared.contract.describe());
        loaded.push(made.map_err(|failure| self.explain(&what(), &failure))?);
        Ok(loaded.len() - 1)
    }

    /// A dispatch's ELF, held against its contract, and the kernel to open in it.
    fn image(&self, prepared: &Prepared) -> Result<(ElfImage, String)> {
        let elf = self.cache.elf(&prepared.contract)?;
        let bad = |why: String| Error::Malformed { path: elf.path.clone(), why };
        let image = ElfImage::from_bytes(&elf.bytes).map_err(|failure| bad(failure.to_string()))?;
        let platform = image.platform().map_err(|failure| bad(failure.to_string()))?;
        if platform != AIE2P {
            return Err(bad(format!("ELF for platform {platform}, expected {AIE2P} (aie2p)")));
        }
        if !image.is_full().map_err(|failure| bad(failure.to_string()))? {
            return Err(bad("ELF without a configuration of the array: not a full ELF".into()));
        }
        let kernels = image.kernels().map_err(|failure| bad(failure.to_string()))?;
        // `kernel:instance` where the instance must be told.
        let base = elf.kernel.split(':').next().unwrap_or_default();
        let Some((_, arguments)) = kernels.iter().find(|(name, _)| name == base) else {
            let known = kernels.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
            return Err(bad(format!("no kernel {base} in it, only {known}")));
        };
        let expected = prepared.contract.args.len();
        if *arguments != expected {
            let what = prepared.contract.describe();
            return Err(bad(format!("kernel {base} has {arguments} arguments, the contract of {what} {expected}")));
        }
        Ok((image, elf.kernel))
    }

    /// What XRT said, and what it means where that is known.
    fn explain(&self, what: &str, failure: &Failure) -> Error {
        Error::Device { device: self.info.label.clone(), why: format!("{what}: {}", open::meaning(failure)) }
    }

    fn incomplete(&self, dispatch: &str, state: String, elapsed: Duration) -> Error {
        Error::Incomplete {
            device: self.info.label.clone(),
            dispatch: dispatch.into(),
            state,
            elapsed_us: elapsed.as_micros() as u64,
        }
    }

    /// Sets what has changed since the last run of the same ELF.
    fn bind(&self, loaded: &mut Loaded, places: Vec<Place>) -> std::result::Result<(), Failure> {
        let Loaded { run: Some(run), bound, .. } = loaded else { return Ok(()) };
        for (argument, place) in places.into_iter().enumerate() {
            if bound[argument] != Some(place) {
                bound[argument] = None;
                run.set(argument, self.inner.memory.bo(place))?;
                bound[argument] = Some(place);
            }
        }
        Ok(())
    }
}

impl Device for NpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn create(&mut self, spec: BufferSpec) -> Result<BufferHandle> {
        let name = spec.name.clone();
        let Inner { memory, device, .. } = &mut *self.inner;
        match memory.create(device, spec) {
            Ok(handle) => {
                self.counters.buffers_created += 1;
                Ok(handle)
            }
            Err(failure) => Err(self.explain(&format!("buffer {name}"), &failure)),
        }
    }

    fn spec(&self, buffer: BufferHandle) -> &BufferSpec {
        self.inner.memory.spec(buffer)
    }

    fn write(&mut self, buffer: BufferHandle, offset: usize, content: &[u8]) -> Result<()> {
        if let Some(why) = self.inner.memory.misuse(buffer, offset, content.len(), true) {
            return self.fail(why);
        }
        match self.inner.memory.write(buffer, offset, content) {
            Ok(sent) => {
                let is_static = self.inner.memory.spec(buffer).role.is_static();
                self.counters.bytes_written += sent as u64;
                self.counters.static_uploads += u64::from(sent > 0 && is_static);
                Ok(())
            }
            Err(failure) => Err(self.explain("write", &failure)),
        }
    }

    fn read(&mut self, buffer: BufferHandle, offset: usize, len: usize) -> Result<&[u8]> {
        if let Some(why) = self.inner.memory.misuse(buffer, offset, len, false) {
            return self.fail(why);
        }
        if let Err(failure) = self.inner.memory.fetch(buffer, offset, len) {
            return Err(self.explain("read", &failure));
        }
        self.counters.bytes_read += len as u64;
        Ok(self.inner.memory.content(buffer, offset, len))
    }

    fn poison(&mut self, buffer: BufferHandle) -> Result<()> {
        self.inner.memory.poison(buffer).map_err(|failure| self.explain("poison", &failure))
    }

    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle> {
        let memory = &self.inner.memory;
        for launch in &launches {
            check_launch(&self.info.label, name, launch, |handle| memory.find(handle))?;
        }
        let bound: Vec<_> = launches.into_iter().map(|launch| (launch.kernel, launch.args)).collect();
        let (contract, buffers) = Contract::of(&bound)?;
        let Inner { memory, device, .. } = &mut *self.inner;
        for (argument, &buffer) in contract.args.iter().zip(&buffers) {
            if argument.layout == ArgumentLayout::Transposed {
                match memory.transpose(device, buffer) {
                    Ok(sent) => self.counters.bytes_written += sent as u64,
                    Err(failure) => return Err(self.explain(name, &failure)),
                }
            }
        }
        let hash = contract.hash();
        // What is missing is said now and not in the middle of a run.
        if !self.prepared.iter().any(|other| other.hash == hash) {
            self.cache.elf(&contract)?;
        }
        self.prepared.push(Prepared { name: name.into(), contract, hash, buffers });
        Ok(DispatchHandle(self.prepared.len() - 1))
    }

    fn run(&mut self, dispatch: DispatchHandle) -> Result<Completed> {
        if let Some(earlier) = open::taint() {
            let name = self.prepared(dispatch)?.name.clone();
            return Err(self.incomplete(&name, earlier, Duration::ZERO));
        }
        let contexts = self.inner.contexts.clone();
        let mut loaded = contexts.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.load(dispatch, &mut loaded)?;
        let prepared = &self.prepared[dispatch.0];
        let places = match self.inner.memory.places(&prepared.contract, &prepared.buffers) {
            Ok(places) => places,
            Err(unwritten) => return self.fail(format!("{}: {unwritten}", prepared.name)),
        };
        let name = prepared.name.clone();
        if let Err(failure) = self.bind(&mut loaded[at], places) {
            loaded.remove(at);
            return Err(self.explain(&name, &failure));
        }
        let Some(run) = loaded[at].run.take() else {
            return self.fail(format!("{name}: already in flight"));
        };
        let in_flight = match run.start() {
            Ok(in_flight) => in_flight,
            Err((_, why)) => {
                loaded.remove(at);
                return Err(self.incomplete(&name, format!("not started: {why}"), Duration::ZERO));
            }
        };
        match in_flight.wait(self.timeout) {
            Ended::Completed(run, elapsed) => {
                loaded[at].run = Some(run);
                let prepared = &self.prepared[dispatch.0];
                for (argument, &buffer) in prepared.contract.args.iter().zip(&prepared.buffers) {
                    if matches!(argument.role, ArgumentRole::Output | ArgumentRole::InOut) {
                        self.inner.memory.written_by_device(buffer);
                    }
                }
                self.counters.dispatches += 1;
                self.counters.launches += prepared.contract.launches.len() as u64;
                Ok(Completed { elapsed_ns: elapsed.as_nanos() as u64 })
            }
            Ended::Failed { run, state, elapsed, reset } => {
                // Its context goes with it: the next run of this ELF gets a fresh one.
                drop(run);
                loaded.remove(at);
                if reset {
                    open::set_taint(&format!("{name}: {state}"));
                }
                Err(self.incomplete(&name, state, elapsed))
            }
            Ended::Hung { state, elapsed } => {
                self.hung = true;
                open::set_taint(&format!("{name}: no end after {:.1} s ({state})", elapsed.as_secs_f64()));
                Err(self.incomplete(&name, format!("no end, still {state}"), elapsed))
            }
        }
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
