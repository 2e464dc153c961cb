//! LayerNorm over rows, on both datapaths: the steps are the same, and only one of them rounds between.
//!
//! Source of the NPU2's: mlir-air's `layer_norm.py`, which never sets the rounding mode.

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes},
    norm::{NormRow, Share},
    pool::{ALONE, Kernel, Worker},
    rounding::narrow,
    view::{Dst, Src},
};

/// `y = (x - mean) * rstd * w + b`, `rstd = 1 / sqrt(mean((x - mean)^2) + eps)`, in f32 with one rounding at the end; on
/// the NPU2 with mean, difference, square, rstd, normalised value and output each rounded to bf16 toward minus infinity.
///
/// Shapes: `x`, `y` [rows, cols], `params` [2, cols], w over b. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<const NPU2: bool> {
    /// Rows.
    pub x: Src<bf16>,
    /// Scale, then shift of every column.
    pub params: Src<bf16>,
    /// Added to the variance.
    pub eps: f32,
    /// Normalised rows.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for LayerNorm<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let LayerNorm { x, params, eps, y, isa } = *self;
        assert!(params.len().is_multiple_of(2) && !params.is_empty(), "layer_norm: params is not [2, cols]");
        Share { x, weight: params, y, cols: params.len() / 2, row: Steps::<NPU2> { eps }, worker }.run(isa);
    }

    fn alone(&self) -> bool {
        self.y.len() <= ALONE
    }
}

struct Steps<const NPU2: bool> {
    eps: f32,
}

impl<const NPU2: bool> NormRow for Steps<NPU2> {
    #[inline(always)]
    unsafe fn norm<L: Lanes>(&self, l: L, x: *const bf16, weight: *const bf16, y: *mut bf16, cols: usize) {
        // SAFETY: the caller's; a LayerNorm's weights are two rows.
        unsafe { normalise::<L, NPU2>(l, x, weight, self.eps, y, cols) }
    }
}

/// # Safety
/// `x` and `y` are valid for `cols` elements, `params` for twice as many; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn normalise<L: Lanes, const NPU2: bool>(
    l: L,
    x: *const bf16,
    params: *const bf16,
    eps: f32,
    y: *mut bf16,
    cols: usize,
) {
    let whole = cols - cols % LANES;
    let rest = cols - whole;
    let mut tails = [[bf16::ZERO; LANES]; 3];
    // SAFETY: fewer than LANES elements are left from `whole` on; full vectors end at `whole`.
    unsafe {
        for (tail, from) in tails.iter_mut().zip([x, params, params.add(cols)]) {
            tail.as_mut_ptr().copy_from_nonoverlapping(from.add(whole), rest);
        }
        let [tail_x, tail_w, tail_b] = tails.each_ref().map(|tail| tail.as_ptr());
        let mut sums = l.load_bf16(tail_x);
        for i in (0..whole).step_by(LANES) {
            sums = l.add(sums, l.load_bf16(x.add(i)));
        }
        let mean = narrow::<L, NPU2>(l, l.splat(l.sum(sums) / cols as f32));
        let away = |x: *const bf16| narrow::<L, NPU2>(l, l.sub(l.load_bf16(x), mean));
        let square = |d: L::F| narrow::<L, NPU2>(l, l.mul(d, d));
        let mut squares = square(l.keep_first(away(tail_x), rest, 0.0));
        for i in (0..whole).step_by(LANES) {
            squares = l.add(squares, square(away(x.add(i))));
        }
        let variance = l.sum(squares) / cols as f32;
        let rstd = narrow::<L, NPU2>(l, l.splat(1.0 / (variance + eps).sqrt()));
        let value = |x: *const bf16, w: *const bf16, b: *const bf16| {
            let normed = narrow::<L, NPU2>(l, l.mul(away(x), rstd));
            narrow::<L, NPU2>(l, l.add(l.mul(normed, l.load_bf16(w)), l.load_bf16(b)))
        };
        for i in (0..whole).step_by(LANES) {
            l.store_bf16(y.add(i), value(x.add(i), params.add(i), params.add(cols + i)));
        }
        if rest > 0 {
            let mut tail = [bf16::ZERO; LANES];
            l.store_bf16(tail.as_mut_ptr(), value(tail_x, tail_w, tail_b));
            y.add(whole).copy_from_nonoverlapping(tail.as_ptr(), rest);
        }
    }
}
