//! The emulated NPU: its buffers, its dispatches and (on request) its arithmetic, on the CPU.
//!
//! Good enough to work on all day, never an oracle. Two datapaths: `ieee`, and `npu2`, the silicon's own arithmetic. Every buffer is born NaN between guards, a dispatch costs one
//! wake-up of the worker pool however many launches it has, and a damaged guard fails the dispatch that damaged it.

mod buffer;
mod launch;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use half::bf16;

use self::buffer::GuardedMemory;
use self::launch::scratch_bytes;
use super::launch::check_launch;
use super::{
    Arithmetic, BoundLaunch, BufferHandle, BufferSpec, Completed, Counters, Device, DeviceInfo, DispatchHandle, Layout,
};
use crate::compute::{Isa, Kernel as Compute, PackedWeight, Pool};
use crate::error::{Error, Result};
use crate::kernel::{Dtype, Rows};
use crate::tensor;

enum Storage {
    Rows(GuardedMemory),
    /// A linear weight, packed for GEMM and GEMV alike; none until it is written.
    Packed(Option<PackedWeight>),
}

struct Buffer {
    spec: BufferSpec,
    storage: Storage,
}

struct Dispatch {
    name: String,
    launches: Vec<BoundLaunch>,
}

/// The emulated device.
pub struct EmuDevice {
    info: DeviceInfo,
    isa: Isa,
    pool: Arc<Pool>,
    buffers: Vec<Buffer>,
    dispatches: Vec<Dispatch>,
    counters: Counters,
    /// What a launch keeps between its steps; as long as any prepared one needs.
    scratch: GuardedMemory,
}

impl EmuDevice {
    /// A device with no buffers that computes on `pool` as `arithmetic` says.
    pub fn new(isa: Isa, pool: Arc<Pool>, arithmetic: Arithmetic) -> EmuDevice {
        let description = format!("emulated NPU, {} arithmetic, {isa}, {} threads", arithmetic.label(), pool.threads());
        let label = match arithmetic {
            Arithmetic::Ieee => "emu",
            Arithmetic::Npu2 => "emu_npu2",
        };
        EmuDevice {
            info: DeviceInfo { label: label.into(), arithmetic, description },
            isa,
            pool,
            buffers: vec![],
            dispatches: vec![],
            counters: Counters::default(),
            scratch: GuardedMemory::new(0),
        }
    }

    fn fail<T>(&self, why: String) -> Result<T> {
        Err(Error::Device { device: self.info.label.clone(), why })
    }

    fn buffer(&self, handle: BufferHandle) -> Result<&Buffer> {
        match self.buffers.get(handle.0) {
            Some(buffer) => Ok(buffer),
            None => self.fail(format!("buffer {} does not exist", handle.0)),
        }
    }

    fn memory(&self, handle: BufferHandle) -> &GuardedMemory {
        match &self.buffers[handle.0].storage {
            Storage::Rows(memory) => memory,
            Storage::Packed(_) => unreachable!("prepare binds packed weights to weight arguments only"),
        }
    }

    fn weight(&self, handle: BufferHandle) -> &PackedWeight {
        match &self.buffers[handle.0].storage {
            Storage::Packed(Some(weight)) => weight,
            _ => unreachable!("run checks that every weight is written"),
        }
    }
}

impl EmuDevice {
    /// Runs dispatches in one call of the pool; a single one may do with some rows.
    fn complete(&mut self, handles: &[DispatchHandle], rows: Option<Rows>) -> Result<Completed> {
        let mut dispatches = Vec::with_capacity(handles.len());
        for handle in handles {
            let Some(dispatch) = self.dispatches.get(handle.0) else {
                return self.fail(format!("dispatch {} does not exist", handle.0));
            };
            for &arg in dispatch.launches.iter().flat_map(|l| &l.args) {
                if let Storage::Packed(None) = &self.buffers[arg.0].storage {
                    return self.fail(format!(
                        "{}: weight {} was never written",
                        dispatch.name, self.buffers[arg.0].spec.name
                    ));
                }
            }
            dispatches.push(dispatch);
        }
        self.disjoint(&dispatches)?;
        let started = Instant::now();
        {
            let boxed = self.work(&dispatches, rows);
            let kernels: Vec<&dyn Compute> = boxed.iter().map(|k| &**k).collect();
            self.pool.run(&kernels);
        }
        let elapsed_ns = started.elapsed().as_nanos() as u64;
        for dispatch in &dispatches {
            for launch in &dispatch.launches {
                let out = launch.output();
                if let Some(at) = self.memory(out).damage() {
                    let spec = &self.buffers[out.0].spec;
                    return self.fail(format!("{}: guard of {} overwritten at byte {at}", dispatch.name, spec.name));
                }
            }
        }
        if let Some(at) = self.scratch.damage() {
            return self.fail(format!("{}: guard of the scratch memory overwritten at byte {at}", dispatches[0].name));
        }
        let launches: usize = dispatches.iter().map(|dispatch| dispatch.launches.len()).sum();
        self.counters.dispatches += dispatches.len() as u64;
        self.counters.launches += launches as u64;
        Ok(Completed { elapsed_ns })
    }

    /// That no dispatch writes what another one touches: they run at once.
    fn disjoint(&self, dispatches: &[&Dispatch]) -> Result<()> {
        if dispatches.len() < 2 {
            return Ok(());
        }
        let mut writers = HashMap::new();
        for (at, dispatch) in dispatches.iter().enumerate() {
            writers.extend(dispatch.launches.iter().map(|launch| (launch.output(), at)));
        }
        for (at, dispatch) in dispatches.iter().enumerate() {
            for arg in dispatch.launches.iter().flat_map(|launch| &launch.args) {
                if let Some(writer) = writers.get(arg).filter(|writer| **writer != at) {
                    let (name, spec, other) = (&dispatch.name, &self.buffers[arg.0].spec, &dispatches[*writer].name);
                    return self.fail(format!("{name}: {} is written by {other} at the same time", spec.name));
                }
            }
        }
        Ok(())
    }
}

impl Device for EmuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn create(&mut self, spec: BufferSpec) -> Result<BufferHandle> {
        let storage = match spec.layout {
            Layout::Rows => Storage::Rows(GuardedMemory::new(spec.bytes())),
            Layout::LinearWeight if spec.dtype == Dtype::Bf16 => Storage::Packed(None),
            Layout::LinearWeight => return self.fail(format!("{}: a linear weight must be bf16", spec.name)),
        };
        self.counters.buffers_created += 1;
        self.buffers.push(Buffer { spec, storage });
        Ok(BufferHandle(self.buffers.len() - 1))
    }

    fn spec(&self, buffer: BufferHandle) -> &BufferSpec {
        &self.buffers[buffer.0].spec
    }

    fn write(&mut self, handle: BufferHandle, offset: usize, content: &[u8]) -> Result<()> {
        let spec = &self.buffer(handle)?.spec;
        let whole = spec.bytes();
        if offset.checked_add(content.len()).is_none_or(|end| end > whole) {
            let end = offset.saturating_add(content.len());
            return self.fail(format!("{}: write of bytes {offset}..{end} into {whole}", spec.name));
        }
        let is_static = spec.role.is_static();
        match &mut self.buffers[handle.0] {
            Buffer { storage: Storage::Rows(memory), .. } => {
                memory.bytes_mut()[offset..offset + content.len()].copy_from_slice(content);
            }
            Buffer { storage: Storage::Packed(weight), spec } => {
                if content.len() != whole {
                    let why =
                        format!("{}: found {} bytes, expected the whole weight of {whole}", spec.name, content.len());
                    return self.fail(why);
                }
                let packed = match bytemuck::try_cast_slice::<u8, bf16>(content) {
                    Ok(rows) => PackedWeight::pack(&self.pool, rows, spec.rows, spec.cols),
                    // A checkpoint may store a tensor at an odd offset.
                    Err(_) => {
                        PackedWeight::pack(&self.pool, &tensor::bf16_from_le_bytes(content), spec.rows, spec.cols)
                    }
                };
                *weight = Some(packed);
            }
        }
        self.counters.bytes_written += content.len() as u64;
        self.counters.static_uploads += u64::from(is_static);
        Ok(())
    }

    fn read(&mut self, handle: BufferHandle, offset: usize, len: usize) -> Result<&[u8]> {
        let Buffer { spec, storage } = self.buffer(handle)?;
        if offset.checked_add(len).is_none_or(|end| end > spec.bytes()) {
            let end = offset.saturating_add(len);
            return self.fail(format!("{}: read of bytes {offset}..{end} of {}", spec.name, spec.bytes()));
        }
        if matches!(storage, Storage::Packed(_)) {
            return self.fail(format!("{}: a packed weight cannot be read back", spec.name));
        }
        self.counters.bytes_read += len as u64;
        Ok(&self.memory(handle).bytes()[offset..offset + len])
    }

    fn poison(&mut self, handle: BufferHandle) -> Result<()> {
        match &mut self.buffers[handle.0].storage {
            Storage::Rows(memory) => memory.fill_nan_with(&self.pool),
            Storage::Packed(weight) => *weight = None,
        }
        Ok(())
    }

    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle> {
        for launch in &launches {
            check_launch(&self.info.label, name, launch, |handle| self.buffers.get(handle.0).map(|b| &b.spec))?;
            let needed = scratch_bytes(&launch.kernel, self.info.arithmetic);
            if self.scratch.bytes().len() < needed {
                self.scratch = GuardedMemory::new(needed);
            }
        }
        self.dispatches.push(Dispatch { name: name.into(), launches });
        Ok(DispatchHandle(self.dispatches.len() - 1))
    }

    fn run(&mut self, handle: DispatchHandle) -> Result<Completed> {
        self.complete(&[handle], None)
    }

    /// The other datapath's blocks and tiles are not cut.
    fn cuts_rows(&self) -> bool {
        self.info.arithmetic == Arithmetic::Ieee
    }

    fn run_rows(&mut self, handle: DispatchHandle, rows: Rows) -> Result<Completed> {
        let rows = Some(rows).filter(|_| self.cuts_rows());
        self.complete(&[handle], rows)
    }

    fn run_all(&mut self, handles: &[DispatchHandle]) -> Result<()> {
        self.complete(handles, None).map(drop)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
