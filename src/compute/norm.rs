//! RMSNorm over rows; also QK-norm, where a row is one head of one token.
//!
//! Statistics in f32, one rounding at the end. The sum of squares has one order for all instruction sets.

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// Elements of a task.
const TASK: usize = 8192;

/// `y = x * rstd * weight`, `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// Shapes: `x`, `y` [rows, cols], `weight` [cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm {
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
unsafe impl Kernel for RmsNorm {
    fn run(&self, worker: &Worker<'_>) {
        assert_eq!(self.x.len(), self.y.len(), "rms_norm: x and y differ in length");
        let cols = self.weight.len();
        assert!(self.x.len().is_multiple_of(cols), "rms_norm: x is not [rows, {cols}]");
        self.isa.dispatch(Share { kernel: self, worker });
    }
}

struct Share<'a> {
    kernel: &'a RmsNorm,
    worker: &'a Worker<'a>,
}

impl Lanewise for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let RmsNorm { x, weight, eps, y, .. } = *self.kernel;
        let cols = weight.len();
        let rows = x.len() / cols.max(1);
        let step = TASK.div_ceil(cols.max(1));
        loop {
            let first = self.worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                // SAFETY: row `row` exists in `x` and `y`, and is claimed by this worker only.
                unsafe { normalise(l, x.ptr().add(row * cols), weight.ptr(), eps, y.ptr().add(row * cols), cols) };
            }
        }
    }
}

/// # Safety
/// `x`, `weight` and `y` are valid for `cols` elements; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn normalise<L: Lanes>(l: L, x: *const bf16, weight: *const bf16, eps: f32, y: *mut bf16, cols: usize) {
    let whole = cols - cols % LANES;
    let (mut tail_x, mut tail_w) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES]);
    // SAFETY: fewer than LANES elements are left from `whole` on; full vectors end at `whole`.
    unsafe {
        tail_x.as_mut_ptr().copy_from_nonoverlapping(x.add(whole), cols - whole);
        tail_w.as_mut_ptr().copy_from_nonoverlapping(weight.add(whole), cols - whole);
        // Two chains hide the latency of the addition; a product of bf16 is exact, so FMA or not gives the same sum.
        let mut squares = [l.splat(0.0); 2];
        for i in (0..whole).step_by(LANES) {
            let v = l.load_bf16(x.add(i));
            squares.swap(0, 1);
            squares[0] = l.mul_add(v, v, squares[0]);
        }
        let v = l.load_bf16(tail_x.as_ptr());
        squares[0] = l.mul_add(v, v, squares[0]);
        let mean = l.sum(l.add(squares[0], squares[1])) / cols as f32;
        let rstd = l.splat(1.0 / (mean + eps).sqrt());
        let scaled = |x: *const bf16, w: *const bf16| l.mul(l.mul(l.load_bf16(x), rstd), l.load_bf16(w));
        for i in (0..whole).step_by(LANES) {
            l.store_bf16(y.add(i), scaled(x.add(i), weight.add(i)));
        }
        if whole < cols {
            let value = scaled(tail_x.as_ptr(), tail_w.as_ptr());
            l.store_bf16(tail_x.as_mut_ptr(), value);
            y.add(whole).copy_from_nonoverlapping(tail_x.as_ptr(), cols - whole);
        }
    }
}

#[cfg(test)]
mod tests;
