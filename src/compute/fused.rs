//! The launches that decode fuses: a projection with the residual, and SwiGLU of a product whose rows are gate and up in
//! turn.

use std::borrow::Borrow;

use half::bf16;

use super::{
    Isa, Out, PackedWeight,
    elementwise::{Function, SiluTimes},
    gemm::Store,
    lanes::{LANES, Lanes, Lanewise},
    pack::PANEL,
    pool::{Kernel, Worker},
    rounding::narrow,
    tile::{AHEAD, Border, PANEL_AHEAD, Rows, multiply},
    view::{Dst, Src},
};

/// `y = W · x + r`, rounded once to nearest even; between every `narrow` of K the sum is rounded, too, if that is set, as
/// the NPU2's kernel keeps it in bf16.
///
/// Shapes: `x` [K], `w` [N, K] packed, `r`, `y` [N].
///
/// Source: mlir-air's `mv_bf16.cc`.
#[derive(Debug, Clone, Copy)]
pub struct GemvAdd<W> {
    /// Vector.
    pub x: Src<bf16>,
    /// Weight.
    pub w: W,
    /// Added to the product.
    pub r: Src<bf16>,
    /// Sum; may not overlap an input.
    pub y: Dst<bf16>,
    /// An even number of columns.
    pub narrow: Option<usize>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint ranges of `y`, each claimed once.
unsafe impl<W: Borrow<PackedWeight> + Sync> Kernel for GemvAdd<W> {
    fn run(&self, worker: &Worker<'_>) {
        let w: &PackedWeight = self.w.borrow();
        assert_eq!(self.x.len(), w.k(), "gemv_add: x is not [{}]", w.k());
        assert!(self.y.len() == w.n() && self.r.len() == w.n(), "gemv_add: y or r is not [{}]", w.n());
        assert!(self.narrow.is_none_or(|n| n > 0 && n.is_multiple_of(2)), "gemv_add: narrow {:?}", self.narrow);
        self.isa.dispatch(GemvAddShare { x: self.x, w, r: self.r, y: self.y, narrow: self.narrow, worker });
    }
}

struct GemvAddShare<'a> {
    x: Src<bf16>,
    w: &'a PackedWeight,
    r: Src<bf16>,
    y: Dst<bf16>,
    narrow: Option<usize>,
    worker: &'a Worker<'a>,
}

impl Lanewise for GemvAddShare<'_> {
    type Output = ();

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]
    fn with<L: Lanes>(self, l: L) {
        const VECS: usize = PANEL / LANES;
        let (n, k) = (self.w.n(), self.w.k());
        loop {
            let p = self.worker.claim();
            if p >= self.w.panels() {
                break;
            }
            let column = p * PANEL;
            let (mut sums, step) = ([[l.splat(0.0); VECS]], self.narrow.unwrap_or(k).max(1));
            let mut residual = [bf16::ZERO; PANEL];
            // SAFETY: pieces of the one row of `k` elements and of a panel of `k`; columns are cut at `n`.
            unsafe {
                for first in (0..k).step_by(step) {
                    let mut part = [[l.splat(0.0); VECS]];
                    let rows = Rows { first: self.x.ptr().add(first), stride: k };
                    let panel = self.w.panel(p).add(first / 2 * PANEL);
                    multiply::<L, 1, VECS, PANEL_AHEAD>(l, rows, panel, step.min(k - first), AHEAD, &mut part);
                    for v in 0..VECS {
                        sums[0][v] = l.add(sums[0][v], part[0][v]);
                        if self.narrow.is_some() {
                            sums[0][v] = l.round_nearest(sums[0][v]);
                        }
                    }
                }
                let columns = PANEL.min(n - column);
                residual.as_mut_ptr().copy_from_nonoverlapping(self.r.ptr().add(column), columns);
                for v in 0..VECS {
                    sums[0][v] = l.add(sums[0][v], l.load_bf16(residual.as_ptr().add(v * LANES)));
                }
                Store { c: Out::Bf16(self.y), n, row: 0, column }.finish(l, 0, 0, &sums);
            }
        }
    }
}

/// `out[i] = silu(sums[2i]) * sums[2i + 1]`, in f32 with one rounding at the end; on the NPU2 gate and up are rounded to bf16
/// toward minus infinity and SiLU is [`SiluMul`](super::SiluMul)'s.
///
/// Source: mlir-air's `matvec_swiglu_rms.py`, which never sets the rounding mode.
///
/// Shapes: `sums` [2 * N], `out` [N].
#[derive(Debug, Clone, Copy)]
pub struct Swiglu<const NPU2: bool> {
    /// Gate and up in turn.
    pub sums: Src<f32>,
    /// Product.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for Swiglu<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let (sums, out) = (self.sums, self.out);
        assert_eq!(sums.len(), 2 * out.len(), "swiglu: sums is not [2, {}]", out.len());
        self.isa.dispatch(PairShare::<NPU2> { sums, out, worker });
    }
}

/// One worker's share.
struct PairShare<'a, const NPU2: bool> {
    sums: Src<f32>,
    out: Dst<bf16>,
    worker: &'a Worker<'a>,
}

/// Pairs of a task.
const TASK: usize = 4096;

impl<const NPU2: bool> Lanewise for PairShare<'_, NPU2> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let len = self.out.len();
        loop {
            let first = self.worker.claim() * TASK;
            if first >= len {
                break;
            }
            for i in (first..(first + TASK).min(len)).step_by(LANES) {
                let count = LANES.min(len - i);
                let (mut even, mut odd, mut value) = ([0.0; LANES], [0.0; LANES], [bf16::ZERO; LANES]);
                // SAFETY: `count` pairs from `i` on exist, and their outputs are claimed by this worker only.
                unsafe {
                    for j in 0..count {
                        even[j] = *self.sums.ptr().add(2 * (i + j));
                        odd[j] = *self.sums.ptr().add(2 * (i + j) + 1);
                    }
                    let [gate, up] = [even, odd].map(|v| narrow::<L, NPU2>(l, l.load(v.as_ptr())));
                    let result = SiluTimes::<NPU2>.of(l, gate, up);
                    l.store_bf16(value.as_mut_ptr(), result);
                    self.out.ptr().add(i).copy_from_nonoverlapping(value.as_ptr(), count);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
