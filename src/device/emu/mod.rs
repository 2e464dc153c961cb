//! The emulated NPU: its buffers, its dispatches and (on request) its arithmetic, on the CPU.
//!
//! Good enough to work on all day, never an oracle. Two datapaths: `ieee`, and `npu2`, the silicon's own arithmetic. Every buffer is born NaN between guards, a dispatch costs one
//! wake-up of the worker pool however many launches it has, and a damaged guard fails the dispatch that damaged it.

mod buffer;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use half::bf16;

use self::buffer::GuardedMemory;
use super::{
    Arithmetic, BoundLaunch, BufferHandle, BufferSpec, Completed, Counters, Device, DeviceInfo, DispatchHandle, Layout,
};
use crate::compute::{
    Add, Attention, BiasAdd, Dst, Gemm, Gemv, Isa, Kernel as Compute, Out, PackedWeight, Pool, RmsNorm, Rope, SiluMul,
    Src, npu2,
};
use crate::error::{Error, Result};
use crate::kernel::{ArgRole, Dtype, Kernel, attention_scale};
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
    /// The left operand of a GEMM in BFP16 blocks; as long as any prepared one needs.
    blocks: GuardedMemory,
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
            blocks: GuardedMemory::new(0),
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

    fn src(&self, handle: BufferHandle) -> Src<bf16> {
        let memory = self.memory(handle);
        // SAFETY: 64-byte aligned, initialised, and alive as long as this device; kernels of a dispatch run under
        // `&mut self`, so nobody else writes meanwhile, and `prepare` allows an output that is also an input only
        // where the kernel does.
        unsafe { Src::new(memory.content().cast(), self.buffers[handle.0].spec.len()) }
    }

    fn dst<T: Copy>(&self, handle: BufferHandle) -> Dst<T> {
        let memory = self.memory(handle);
        // SAFETY: as `src`; buffers do not overlap, and `prepare` checked the dtype.
        unsafe { Dst::new(memory.content().cast(), self.buffers[handle.0].spec.len()) }
    }

    /// Where the product of a GEMM goes.
    fn product(&self, out: Dtype, c: BufferHandle) -> Out {
        match out {
            Dtype::Bf16 => Out::Bf16(self.dst(c)),
            Dtype::F32 => Out::F32(self.dst(c)),
        }
    }

    /// Appends the compute kernels of one launch, over this device's memory.
    fn kernels<'a>(&'a self, launch: &BoundLaunch, kernels: &mut Vec<Box<dyn Compute + 'a>>) {
        match self.info.arithmetic {
            Arithmetic::Ieee => kernels.push(self.ieee(launch)),
            Arithmetic::Npu2 => self.npu2(launch, kernels),
        }
    }

    fn ieee<'a>(&'a self, launch: &BoundLaunch) -> Box<dyn Compute + 'a> {
        let (a, isa) = (&launch.args, self.isa);
        match launch.kernel {
            Kernel::Gemm { out, .. } => {
                Box::new(Gemm { isa, a: self.src(a[0]), w: self.weight(a[1]), c: self.product(out, a[2]) })
            }
            Kernel::Gemv { .. } => {
                Box::new(Gemv { isa, x: self.src(a[1]), w: self.weight(a[0]), y: Out::Bf16(self.dst(a[2])) })
            }
            Kernel::RmsNorm { eps, .. } | Kernel::QkNorm { eps, .. } => {
                let (x, weight, y) = (self.src(a[0]), self.src(a[1]), self.dst(a[2]));
                Box::new(RmsNorm { isa, x, weight, y, eps: eps.value() })
            }
            Kernel::Rope { head_dim, .. } => {
                Box::new(Rope { isa, x: self.src(a[0]), lut: self.src(a[1]), y: self.dst(a[2]), head_dim })
            }
            Kernel::Attention { heads, kv_heads, head_dim, .. } => Box::new(Attention {
                isa,
                q: self.src(a[0]),
                k: self.src(a[1]),
                v: self.src(a[2]),
                out: self.dst(a[3]),
                heads,
                kv_heads,
                head_dim,
                scale: attention_scale(head_dim),
                causal: true,
            }),
            Kernel::Add { .. } => Box::new(Add { isa, a: self.src(a[0]), b: self.src(a[1]), out: self.dst(a[2]) }),
            Kernel::BiasAdd { .. } => {
                Box::new(BiasAdd { isa, x: self.src(a[0]), bias: self.src(a[1]), y: self.dst(a[2]) })
            }
            Kernel::SiluMul { .. } => {
                Box::new(SiluMul { isa, gate: self.src(a[0]), up: self.src(a[1]), out: self.dst(a[2]) })
            }
        }
    }

    fn npu2<'a>(&'a self, launch: &BoundLaunch, kernels: &mut Vec<Box<dyn Compute + 'a>>) {
        let (a, isa) = (&launch.args, self.isa);
        let kernel: Box<dyn Compute + 'a> = match launch.kernel {
            Kernel::Gemm { m, k, out, .. } => {
                // SAFETY: `prepare` made it long enough; as in `src`, the kernels of a dispatch run one after the other.
                let (y, quantised) = unsafe {
                    let blocks = self.blocks.content().cast::<bf16>();
                    (Dst::new(blocks, m * k), Src::new(blocks, m * k))
                };
                kernels.push(Box::new(npu2::Blocks { isa, x: self.src(a[0]), y, cols: k }));
                let (w, c, tier) = (self.weight(a[1]), self.product(out, a[2]), npu2::Tier::High);
                Box::new(npu2::Gemm { isa, a: quantised, w, c, tier })
            }
            // No block arithmetic: an f32 sum and one rounding to nearest even, as on ieee.
            Kernel::Gemv { .. } => self.ieee(launch),
            // One row is decode's norm, a kernel of its own. (The fused decode FFN normalises in f32 again; the leaf
            // kernel is what a plan names.)
            Kernel::RmsNorm { rows: 1, eps, .. } => {
                let (x, weight, y) = (self.src(a[0]), self.src(a[1]), self.dst(a[2]));
                Box::new(npu2::RmsNormDecode { isa, x, weight, y, eps: eps.value() })
            }
            Kernel::RmsNorm { eps, .. } | Kernel::QkNorm { eps, .. } => {
                let (x, weight, y) = (self.src(a[0]), self.src(a[1]), self.dst(a[2]));
                Box::new(npu2::RmsNorm { isa, x, weight, y, eps: eps.value() })
            }
            Kernel::Rope { head_dim, .. } => {
                Box::new(npu2::Rope { isa, x: self.src(a[0]), lut: self.src(a[1]), y: self.dst(a[2]), head_dim })
            }
            Kernel::Attention { heads, kv_heads, head_dim, .. } => Box::new(npu2::Attention {
                isa,
                q: self.src(a[0]),
                k: self.src(a[1]),
                v: self.src(a[2]),
                out: self.dst(a[3]),
                heads,
                kv_heads,
                head_dim,
                scale: attention_scale(head_dim),
                causal: true,
            }),
            Kernel::Add { .. } => {
                Box::new(npu2::Add { isa, a: self.src(a[0]), b: self.src(a[1]), out: self.dst(a[2]) })
            }
            Kernel::BiasAdd { .. } => {
                Box::new(npu2::BiasAdd { isa, x: self.src(a[0]), bias: self.src(a[1]), y: self.dst(a[2]) })
            }
            Kernel::SiluMul { .. } => {
                Box::new(npu2::SiluMul { isa, gate: self.src(a[0]), up: self.src(a[1]), out: self.dst(a[2]) })
            }
        };
        kernels.push(kernel);
    }

    /// Checks one launch against its kernel: number, dtype, size and layout of the arguments, and no forbidden aliasing.
    fn check_launch(&self, name: &str, launch: &BoundLaunch) -> Result<()> {
        let args = launch.kernel.args();
        if args.len() != launch.args.len() {
            let (found, expected) = (launch.args.len(), args.len());
            return self.fail(format!("{name}: {}: found {found} arguments, expected {expected}", launch.kernel));
        }
        for (arg, &handle) in args.iter().zip(&launch.args) {
            let spec = &self.buffer(handle)?.spec;
            let layout = if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
            let shape_fits = match layout {
                Layout::LinearWeight => (spec.rows, spec.cols) == (arg.rows, arg.cols),
                Layout::Rows => spec.len() == arg.rows * arg.cols,
            };
            if !shape_fits || spec.dtype != arg.dtype || spec.layout != layout {
                return self.fail(format!(
                    "{name}: {}: argument {}: found {} {:?} {:?} [{}, {}], expected {:?} {layout:?} [{}, {}]",
                    launch.kernel,
                    arg.name,
                    spec.name,
                    spec.dtype,
                    spec.layout,
                    spec.rows,
                    spec.cols,
                    arg.dtype,
                    arg.rows,
                    arg.cols
                ));
            }
        }
        let (out, inputs) = launch.args.split_last().expect("every kernel has an output");
        let elementwise =
            matches!(launch.kernel.id(), "add" | "bias_add" | "silu_mul" | "rope" | "rms_norm" | "qk_norm");
        if inputs.contains(out) && !elementwise {
            return self.fail(format!("{name}: {}: writes its own input", launch.kernel));
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
            Storage::Rows(memory) => memory.fill_nan(),
            Storage::Packed(weight) => *weight = None,
        }
        Ok(())
    }

    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle> {
        for launch in &launches {
            self.check_launch(name, launch)?;
            if let (Kernel::Gemm { m, k, .. }, Arithmetic::Npu2) = (&launch.kernel, self.info.arithmetic) {
                let needed = m * k * Dtype::Bf16.bytes();
                if self.blocks.bytes().len() < needed {
                    self.blocks = GuardedMemory::new(needed);
                }
            }
        }
        self.dispatches.push(Dispatch { name: name.into(), launches });
        Ok(DispatchHandle(self.dispatches.len() - 1))
    }

    fn run(&mut self, handle: DispatchHandle) -> Result<Completed> {
        let Some(dispatch) = self.dispatches.get(handle.0) else {
            return self.fail(format!("dispatch {} does not exist", handle.0));
        };
        for &arg in dispatch.launches.iter().flat_map(|l| &l.args) {
            if let Storage::Packed(None) = &self.buffers[arg.0].storage {
                return self
                    .fail(format!("{}: weight {} was never written", dispatch.name, self.buffers[arg.0].spec.name));
            }
        }
        let started = Instant::now();
        {
            let mut boxed: Vec<Box<dyn Compute + '_>> = vec![];
            for launch in &dispatch.launches {
                self.kernels(launch, &mut boxed);
            }
            let kernels: Vec<&dyn Compute> = boxed.iter().map(|k| &**k).collect();
            self.pool.run(&kernels);
        }
        let elapsed_ns = started.elapsed().as_nanos() as u64;
        for launch in &dispatch.launches {
            let out = *launch.args.last().expect("checked by prepare");
            if let Some(at) = self.memory(out).damage() {
                let spec = &self.buffers[out.0].spec;
                return self.fail(format!("{}: guard of {} overwritten at byte {at}", dispatch.name, spec.name));
            }
        }
        self.counters.dispatches += 1;
        self.counters.launches += dispatch.launches.len() as u64;
        Ok(Completed { elapsed_ns })
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
