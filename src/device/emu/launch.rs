//! One launch as compute kernels over the device's memory, in either arithmetic.
//!
//! May not decide what is valid: `prepare` has checked every argument before.

use half::bf16;

use super::{Dispatch, EmuDevice};
use crate::compute::{
    Add, Attention, BiasAdd, Dst, GeluTanh, Gemm, Gemv, GemvAdd, Gemvs, Kernel as Compute, LayerNorm, Out,
    PackPositions, RmsNorm, Rope, SiluMul, Src, Swiglu, Together, npu2,
};
use crate::device::{Arithmetic, BoundLaunch, BufferHandle};
use crate::kernel::{Dtype, Kernel, Rows, attention_scale};

/// K of a tile of the first level, by which the low tier of a GEMM rounds its sum.
const LOW_TILE_K: usize = 32;

/// Columns after which decode's projection rounds its sum.
const NARROW: usize = 512;

/// A weight, and the vectors it is multiplied by with where each product goes.
type Products = (BufferHandle, Vec<(Src<bf16>, Out)>);

/// Bytes of `len` bf16, up to the next cache line.
fn row_bytes(len: usize) -> usize {
    (len * Dtype::Bf16.bytes()).next_multiple_of(64)
}

/// What a launch keeps between its steps.
///
/// Units: bytes.
pub(super) fn scratch_bytes(kernel: &Kernel, arithmetic: Arithmetic) -> usize {
    match (kernel, arithmetic) {
        (&(Kernel::Gemm { m, k, .. } | Kernel::GemmLow { m, k, .. }), Arithmetic::Npu2) => row_bytes(m * k),
        (&Kernel::SwigluRms { m, k, .. }, _) => row_bytes(k) + 2 * m * Dtype::F32.bytes(),
        (&Kernel::Attention { seq, kv_heads, head_dim, .. }, Arithmetic::Ieee) => {
            PackPositions::len(kv_heads, head_dim, seq) * size_of::<u32>()
        }
        _ => 0,
    }
}

impl EmuDevice {
    fn src(&self, handle: BufferHandle) -> Src<bf16> {
        self.src_rows(handle, None)
    }

    fn dst<T: Copy>(&self, handle: BufferHandle) -> Dst<T> {
        self.dst_rows(handle, None)
    }

    /// All of a buffer, or these rows of it.
    fn src_rows(&self, handle: BufferHandle, rows: Option<Rows>) -> Src<bf16> {
        let (memory, (first, len)) = (self.memory(handle), self.range(handle, rows));
        // SAFETY: within a buffer that is 64-byte aligned, initialised, and alive as long as this device; kernels of a dispatch
        // run under `&mut self`, so nobody else writes meanwhile, and `prepare` allows an output that is also an input only
        // where the kernel does.
        unsafe { Src::new(memory.content().cast::<bf16>().add(first), len) }
    }

    /// As [`EmuDevice::src_rows`].
    fn dst_rows<T: Copy>(&self, handle: BufferHandle, rows: Option<Rows>) -> Dst<T> {
        let (memory, (first, len)) = (self.memory(handle), self.range(handle, rows));
        // SAFETY: as `src_rows`; buffers do not overlap, and `prepare` checked the dtype.
        unsafe { Dst::new(memory.content().cast::<T>().add(first), len) }
    }

    /// First element and number of elements of these rows.
    fn range(&self, handle: BufferHandle, rows: Option<Rows>) -> (usize, usize) {
        let len = self.buffers[handle.0].spec.len();
        rows.map_or((0, len), |Rows { first, count, of }| {
            assert!(first + count <= of && len.is_multiple_of(of), "prepare checked the shape");
            (first * (len / of), count * (len / of))
        })
    }

    /// Where the product of a GEMM goes.
    fn product(&self, out: Dtype, c: BufferHandle, rows: Option<Rows>) -> Out {
        match out {
            Dtype::Bf16 => Out::Bf16(self.dst_rows(c, rows)),
            Dtype::F32 => Out::F32(self.dst_rows(c, rows)),
        }
    }

    /// `len` elements of the scratch memory from byte `offset` on: to write, and to read afterwards.
    fn scratch<T: Copy>(&self, offset: usize, len: usize) -> (Dst<T>, Src<T>) {
        assert!(offset + len * size_of::<T>() <= self.scratch.bytes().len(), "prepare made the scratch long enough");
        // SAFETY: within the memory, and aligned, for `offset` is a multiple of a cache line; as in `src_rows`, the kernels of a
        // dispatch run one after the other.
        unsafe {
            let start = self.scratch.content().add(offset).cast::<T>();
            (Dst::new(start, len), Src::new(start, len))
        }
    }

    /// Row `row` of a buffer of rows of `cols`.
    fn row(&self, handle: BufferHandle, row: usize, cols: usize) -> Src<bf16> {
        assert!((row + 1) * cols <= self.buffers[handle.0].spec.len(), "prepare checked the shape");
        // SAFETY: as `src_rows`, and the row lies within the buffer.
        unsafe { Src::new(self.memory(handle).content().cast::<bf16>().add(row * cols), cols) }
    }

    /// The compute kernels of dispatches that do not touch each other's memory.
    pub(super) fn work<'a>(&'a self, dispatches: &[&Dispatch], rows: Option<Rows>) -> Vec<Box<dyn Compute + 'a>> {
        let mut kernels = vec![];
        if let [dispatch] = dispatches {
            let rows = rows.filter(|rows| dispatch.launches.iter().all(|launch| launch.kernel.can_be_cut(*rows)));
            dispatch.launches.iter().for_each(|launch| self.kernels(launch, rows, &mut kernels));
            return kernels;
        }
        let most = dispatches.iter().map(|dispatch| dispatch.launches.len()).max().unwrap_or(0);
        for at in 0..most {
            let launches = dispatches.iter().filter_map(|dispatch| dispatch.launches.get(at));
            self.abreast(launches, &mut kernels);
        }
        kernels
    }

    /// Launches of several dispatches: one reading of a weight serves all that multiply by it.
    fn abreast<'a, 'l>(
        &'a self,
        launches: impl Iterator<Item = &'l BoundLaunch>,
        kernels: &mut Vec<Box<dyn Compute + 'a>>,
    ) {
        let mut together: Vec<Box<dyn Compute + 'a>> = vec![];
        let mut products: Vec<Products> = vec![];
        for launch in launches {
            let a = &launch.args;
            match launch.kernel {
                Kernel::Gemv { .. } => {
                    let vector = (self.src(a[1]), Out::Bf16(self.dst(a[2])));
                    match products.iter_mut().find(|(weight, _)| *weight == a[0]) {
                        Some((_, vectors)) => vectors.push(vector),
                        None => products.push((a[0], vec![vector])),
                    }
                }
                // The scratch memory is one for all: these wait for each other.
                ref kernel if scratch_bytes(kernel, self.info.arithmetic) > 0 => self.kernels(launch, None, kernels),
                _ => {
                    let before = together.len();
                    self.kernels(launch, None, &mut together);
                    assert_eq!(together.len(), before + 1, "{}: steps need scratch memory between them", launch.kernel);
                }
            }
        }
        for (weight, vectors) in products {
            together.push(Box::new(Gemvs { vectors, w: self.weight(weight), isa: self.isa }));
        }
        if !together.is_empty() {
            // SAFETY: `disjoint` has checked that no dispatch writes what another touches, these are launches of different
            // ones (those of a weight only read it), and none of them uses the scratch memory.
            kernels.push(Box::new(unsafe { Together::new(together) }));
        }
    }

    /// Appends the compute kernels of one launch, over this device's memory: of all rows or of these.
    fn kernels<'a>(&'a self, launch: &BoundLaunch, rows: Option<Rows>, kernels: &mut Vec<Box<dyn Compute + 'a>>) {
        match (&launch.kernel, self.info.arithmetic) {
            (&Kernel::SwigluRms { m, k, eps }, _) => self.swiglu_rms(launch, (m, k), eps.value(), kernels),
            (Kernel::Attention { .. }, Arithmetic::Ieee) => self.attention(launch, rows, kernels),
            (_, Arithmetic::Ieee) => kernels.push(self.ieee(launch, rows)),
            (_, Arithmetic::Npu2) => self.npu2(launch, kernels),
        }
    }

    /// RMSNorm, GEMV and SwiGLU, one after the other.
    fn swiglu_rms<'a>(
        &'a self,
        launch: &BoundLaunch,
        (m, k): (usize, usize),
        eps: f32,
        kernels: &mut Vec<Box<dyn Compute + 'a>>,
    ) {
        let (a, isa) = (&launch.args, self.isa);
        let (x, weight, out) = (self.row(a[0], 0, k), self.row(a[0], 1, k), self.dst(a[2]));
        let (y, normed) = self.scratch(0, k);
        let (sums, product) = self.scratch(row_bytes(k), 2 * m);
        kernels.push(match self.info.arithmetic {
            Arithmetic::Ieee => Box::new(RmsNorm::<false> { isa, x, weight, y, eps }),
            // Sums in f32, unlike decode's norm of its own.
            Arithmetic::Npu2 => Box::new(RmsNorm::<true> { isa, x, weight, y, eps }),
        });
        kernels.push(Box::new(Gemv { isa, x: normed, w: self.weight(a[1]), y: Out::F32(sums) }));
        kernels.push(match self.info.arithmetic {
            Arithmetic::Ieee => Box::new(Swiglu::<false> { isa, sums: product, out }),
            Arithmetic::Npu2 => Box::new(Swiglu::<true> { isa, sums: product, out }),
        });
    }

    /// Keys and values are packed, then every query attends to them.
    fn attention<'a>(&'a self, launch: &BoundLaunch, rows: Option<Rows>, kernels: &mut Vec<Box<dyn Compute + 'a>>) {
        let Kernel::Attention { seq, heads, kv_heads, head_dim, causal } = launch.kernel else {
            unreachable!("asked for attention only")
        };
        let (a, isa) = (&launch.args, self.isa);
        let (first, seq) = rows.map_or((0, seq), |rows| (rows.first, rows.end()));
        // No query sees a position behind its own.
        let seen = rows.map(|rows| Rows { first: 0, count: seq, ..rows });
        let (to, positions) = self.scratch(0, PackPositions::len(kv_heads, head_dim, seq));
        let (q, k, v) = (self.src_rows(a[0], rows), self.src_rows(a[1], seen), self.src_rows(a[2], seen));
        let out = self.dst_rows(a[3], rows);
        kernels.push(Box::new(PackPositions { k, v, to, kv_heads, head_dim, isa }));
        let scale = attention_scale(head_dim);
        kernels.push(Box::new(Attention {
            q,
            positions,
            out,
            first,
            seq,
            heads,
            kv_heads,
            head_dim,
            scale,
            causal,
            isa,
        }));
    }

    /// A projection with its residual; the silicon rounds its sum between pieces of K.
    fn gemv_add<'a>(&'a self, a: &[BufferHandle], narrow: Option<usize>) -> Box<dyn Compute + 'a> {
        let (x, r, y) = (self.src(a[1]), self.src(a[2]), self.dst(a[3]));
        Box::new(GemvAdd { isa: self.isa, x, w: self.weight(a[0]), r, y, narrow })
    }

    fn ieee<'a>(&'a self, launch: &BoundLaunch, rows: Option<Rows>) -> Box<dyn Compute + 'a> {
        let (a, isa) = (&launch.args, self.isa);
        match launch.kernel {
            Kernel::Gemm { out, .. } => Box::new(Gemm {
                isa,
                a: self.src_rows(a[0], rows),
                w: self.weight(a[1]),
                c: self.product(out, a[2], rows),
            }),
            // The low tier is the silicon's accumulator, which this datapath has not.
            Kernel::GemmLow { .. } => {
                let c = self.product(Dtype::Bf16, a[2], rows);
                Box::new(Gemm { isa, a: self.src_rows(a[0], rows), w: self.weight(a[1]), c })
            }
            Kernel::Gemv { .. } => self.gemv(a),
            Kernel::GemvAdd { .. } => self.gemv_add(a, None),
            _ => self.rounded::<false>(launch, rows),
        }
    }

    fn gemv<'a>(&'a self, a: &[BufferHandle]) -> Box<dyn Compute + 'a> {
        Box::new(Gemv { isa: self.isa, x: self.src(a[1]), w: self.weight(a[0]), y: Out::Bf16(self.dst(a[2])) })
    }

    /// The kernels that differ in nothing but their roundings.
    fn rounded<'a, const NPU2: bool>(&'a self, launch: &BoundLaunch, rows: Option<Rows>) -> Box<dyn Compute + 'a> {
        let (a, isa) = (&launch.args, self.isa);
        let (src, dst) = (|at: usize| self.src_rows(a[at], rows), |at: usize| self.dst_rows(a[at], rows));
        match launch.kernel {
            Kernel::LayerNorm { eps, .. } => {
                Box::new(LayerNorm::<NPU2> { isa, x: src(0), params: self.src(a[1]), y: dst(2), eps: eps.value() })
            }
            Kernel::RmsNorm { eps, .. } | Kernel::QkNorm { eps, .. } => {
                Box::new(RmsNorm::<NPU2> { isa, x: src(0), weight: self.src(a[1]), y: dst(2), eps: eps.value() })
            }
            Kernel::Rope { head_dim, .. } => {
                Box::new(Rope::<NPU2> { isa, x: src(0), lut: src(1), y: dst(2), head_dim })
            }
            Kernel::Add { .. } => Box::new(Add::<NPU2> { isa, a: src(0), b: src(1), out: dst(2) }),
            Kernel::BiasAdd { .. } => Box::new(BiasAdd::<NPU2> { isa, x: src(0), bias: self.src(a[1]), y: dst(2) }),
            Kernel::SiluMul { .. } => Box::new(SiluMul::<NPU2> { isa, gate: src(0), up: src(1), out: dst(2) }),
            Kernel::GeluTanh { .. } => Box::new(GeluTanh::<NPU2> { isa, x: src(0), y: dst(1) }),
            Kernel::Gemm { .. }
            | Kernel::GemmLow { .. }
            | Kernel::Gemv { .. }
            | Kernel::GemvAdd { .. }
            | Kernel::Attention { .. }
            | Kernel::SwigluRms { .. } => unreachable!("each datapath has its own"),
        }
    }

    /// The left operand in BFP16 blocks, and the product of those.
    fn blocks<'a>(
        &'a self,
        a: &[BufferHandle],
        (m, k): (usize, usize),
        c: Out,
        tier: npu2::Tier,
        kernels: &mut Vec<Box<dyn Compute + 'a>>,
    ) -> Box<dyn Compute + 'a> {
        let (y, quantised) = self.scratch(0, m * k);
        kernels.push(Box::new(npu2::Blocks { isa: self.isa, x: self.src(a[0]), y, cols: k }));
        Box::new(npu2::Gemm { isa: self.isa, a: quantised, w: self.weight(a[1]), c, tier })
    }

    fn npu2<'a>(&'a self, launch: &BoundLaunch, kernels: &mut Vec<Box<dyn Compute + 'a>>) {
        let (a, isa) = (&launch.args, self.isa);
        let kernel: Box<dyn Compute + 'a> = match launch.kernel {
            Kernel::Gemm { m, k, out, .. } => {
                self.blocks(a, (m, k), self.product(out, a[2], None), npu2::Tier::High, kernels)
            }
            Kernel::GemmLow { m, k, .. } => {
                self.blocks(a, (m, k), Out::Bf16(self.dst(a[2])), npu2::Tier::Low { tile_k: LOW_TILE_K }, kernels)
            }
            // No block arithmetic: an f32 sum and one rounding to nearest even, as on ieee.
            Kernel::Gemv { .. } => self.gemv(a),
            Kernel::GemvAdd { .. } => self.gemv_add(a, Some(NARROW)),
            // One row is decode's norm, a kernel of its own. (The fused decode FFN normalises in f32 again; the leaf
            // kernel is what a plan names.)
            Kernel::RmsNorm { rows: 1, eps, .. } => {
                let (x, weight, y) = (self.src(a[0]), self.src(a[1]), self.dst(a[2]));
                Box::new(npu2::RmsNormDecode { isa, x, weight, y, eps: eps.value() })
            }
            Kernel::Attention { heads, kv_heads, head_dim, causal, .. } => Box::new(npu2::Attention {
                isa,
                q: self.src(a[0]),
                k: self.src(a[1]),
                v: self.src(a[2]),
                out: self.dst(a[3]),
                heads,
                kv_heads,
                head_dim,
                scale: attention_scale(head_dim),
                causal,
            }),
            _ => self.rounded::<true>(launch, None),
        };
        kernels.push(kernel);
    }
}
