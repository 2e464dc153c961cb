//! RMSNorm over rows; also QK-norm, where a row is one head of one token.
//!
//! Statistics in f32 and one rounding at the end, or the NPU2's own steps ([`npu2`](super::npu2)). The sum of squares has one
//! order for all instruction sets.

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    npu2,
    pool::{ALONE, Kernel, Worker, stretch},
    view::{Dst, Src},
};

/// `y = x * rstd * weight`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// Shapes: `x`, `y` [rows, cols], `weight` [cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<const NPU2: bool> {
    /// Rows.
    pub x: Src<bf16>,
    /// Scale of every column.
    pub weight: Src<bf16>,
    /// Added to the mean square.
    pub eps: f32,
    /// Normalised rows.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for RmsNorm<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let RmsNorm { x, weight, eps, y, isa } = *self;
        Share { x, weight, y, cols: weight.len(), row: Row::<NPU2> { eps }, worker }.run(isa);
    }

    fn alone(&self) -> bool {
        self.y.len() <= ALONE
    }
}

/// What is done with one row.
pub(super) trait NormRow {
    /// # Safety
    /// `x` and `y` are valid for `cols` elements, `weight` for a whole number of rows of as many, as the kernel has them;
    /// `y` is `x` or overlaps neither.
    unsafe fn norm<L: Lanes>(&self, l: L, x: *const bf16, weight: *const bf16, y: *mut bf16, cols: usize);
}

struct Row<const NPU2: bool> {
    eps: f32,
}

impl<const NPU2: bool> NormRow for Row<NPU2> {
    #[inline(always)]
    unsafe fn norm<L: Lanes>(&self, l: L, x: *const bf16, weight: *const bf16, y: *mut bf16, cols: usize) {
        // SAFETY: the caller's.
        unsafe {
            if NPU2 {
                npu2::rms_norm::<L, false>(l, x, weight, self.eps, y, cols);
            } else {
                normalise(l, x, weight, self.eps, y, cols);
            }
        }
    }
}

/// One worker's share of the rows.
pub(super) struct Share<'a, R> {
    pub(super) x: Src<bf16>,
    pub(super) weight: Src<bf16>,
    pub(super) y: Dst<bf16>,
    pub(super) cols: usize,
    pub(super) row: R,
    pub(super) worker: &'a Worker<'a>,
}

impl<R: NormRow> Share<'_, R> {
    /// Panics if the views do not fit each other.
    pub(super) fn run(self, isa: Isa) {
        let cols = self.cols;
        assert_eq!(self.x.len(), self.y.len(), "norm: x and y differ in length");
        assert!(self.weight.len().is_multiple_of(cols), "norm: {} weights for {cols} columns", self.weight.len());
        assert!(self.x.len().is_multiple_of(cols), "norm: x is not [rows, {cols}]");
        isa.dispatch(self);
    }
}

impl<R: NormRow> Lanewise for Share<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Share { x, weight, y, cols, row: norm, worker } = self;
        let rows = x.len() / cols.max(1);
        let step = stretch(y.len()).div_ceil(cols.max(1));
        loop {
            let first = worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                // SAFETY: row `row` exists in `x` and `y`, and is claimed by this worker only.
                unsafe { norm.norm(l, x.ptr().add(row * cols), weight.ptr(), y.ptr().add(row * cols), cols) };
            }
        }
    }
}

/// # Safety
/// `x`, `weight` and `y` are valid for `cols` elements; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn normalise<L: Lanes>(l: L, x: *const bf16, weight: *const bf16, eps: f32, y: *mut bf16, cols: usize) {
    const STEP: usize = 2 * LANES;
    let whole = cols - cols % STEP;
    let (mut tail_x, mut tail_w) = ([bf16::ZERO; STEP], [bf16::ZERO; STEP]);
    // SAFETY: fewer than STEP elements are left from `whole` on; steps of sixteen pairs end at `whole`.
    unsafe {
        tail_x.as_mut_ptr().copy_from_nonoverlapping(x.add(whole), cols - whole);
        tail_w.as_mut_ptr().copy_from_nonoverlapping(weight.add(whole), cols - whole);
        // Even and odd elements apart: two chains hide the latency of the addition. A product of bf16 is exact, so FMA or not gives
        // the same sum.
        let (mut even, mut odd) = (l.splat(0.0), l.splat(0.0));
        for i in (0..whole).step_by(STEP) {
            let v = l.load_pairs(x.add(i).cast());
            (even, odd) = (l.mul_add(v.0, v.0, even), l.mul_add(v.1, v.1, odd));
        }
        let v = l.load_pairs(tail_x.as_ptr().cast());
        (even, odd) = (l.mul_add(v.0, v.0, even), l.mul_add(v.1, v.1, odd));
        let mean = l.sum(l.add(even, odd)) / cols as f32;
        let rstd = l.splat(1.0 / (mean + eps).sqrt());
        for i in (0..whole).step_by(STEP) {
            scale(l, x.add(i), rstd, weight.add(i), y.add(i));
        }
        if whole < cols {
            let mut tail_y = [bf16::ZERO; STEP];
            scale(l, tail_x.as_ptr(), rstd, tail_w.as_ptr(), tail_y.as_mut_ptr());
            y.add(whole).copy_from_nonoverlapping(tail_y.as_ptr(), cols - whole);
        }
    }
}

/// `y = x * rstd * weight` for sixteen pairs.
///
/// # Safety
/// `x` and `weight` are valid for reads of sixteen pairs, `y` for writes of as many.
#[inline(always)]
unsafe fn scale<L: Lanes>(l: L, x: *const bf16, rstd: L::F, weight: *const bf16, y: *mut bf16) {
    // SAFETY: the caller's.
    unsafe {
        let (x, w) = (l.load_pairs(x.cast()), l.load_pairs(weight.cast()));
        l.store_bf16_pairs(y, l.mul(l.mul(x.0, rstd), w.0), l.mul(l.mul(x.1, rstd), w.1));
    }
}

#[cfg(test)]
mod tests;
