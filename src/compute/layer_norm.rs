//! LayerNorm over rows, on both datapaths: the steps are the same, and only one of them rounds between.

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// Elements of a task.
const TASK: usize = 8192;

/// `y = (x - mean) * rstd * w + b`, `rstd = 1 / sqrt(mean((x - mean)^2) + eps)`, in f32 with one rounding at the end.
///
/// Shapes: `x`, `y` [rows, cols], `params` [2, cols], w over b. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm {
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
unsafe impl Kernel for LayerNorm {
    fn run(&self, worker: &Worker<'_>) {
        let LayerNorm { x, params, eps, y, isa } = *self;
        isa.dispatch(Share::<false>::new(x, params, eps, y, worker));
    }
}

/// One worker's share; `NARROW` if mean, difference, square, rstd, normalised value and output are each rounded to bf16
/// toward minus infinity, as the NPU2 does.
pub(super) struct Share<'a, const NARROW: bool> {
    x: Src<bf16>,
    params: Src<bf16>,
    eps: f32,
    y: Dst<bf16>,
    worker: &'a Worker<'a>,
}

impl<'a, const NARROW: bool> Share<'a, NARROW> {
    /// Panics where the shapes do not fit.
    pub(super) fn new(x: Src<bf16>, params: Src<bf16>, eps: f32, y: Dst<bf16>, worker: &'a Worker<'a>) -> Self {
        assert_eq!(x.len(), y.len(), "layer_norm: x and y differ in length");
        assert!(params.len().is_multiple_of(2) && !params.is_empty(), "layer_norm: params is not [2, cols]");
        let cols = params.len() / 2;
        assert!(x.len().is_multiple_of(cols), "layer_norm: x is not [rows, {cols}]");
        Share { x, params, eps, y, worker }
    }
}

impl<const NARROW: bool> Lanewise for Share<'_, NARROW> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Share { x, params, eps, y, worker } = self;
        let cols = params.len() / 2;
        let rows = x.len() / cols;
        let step = TASK.div_ceil(cols);
        loop {
            let first = worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                // SAFETY: row `row` exists in `x` and `y`, and is claimed by this worker only; `params` has two rows.
                unsafe {
                    let (x, y) = (x.ptr().add(row * cols), y.ptr().add(row * cols));
                    normalise::<L, NARROW>(l, x, params.ptr(), eps, y, cols);
                }
            }
        }
    }
}

/// `v`, rounded to bf16 toward minus infinity if `NARROW`.
#[inline(always)]
fn narrow<L: Lanes, const NARROW: bool>(l: L, v: L::F) -> L::F {
    if NARROW { l.round_down(v) } else { v }
}

/// # Safety
/// `x` and `y` are valid for `cols` elements, `params` for twice as many; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn normalise<L: Lanes, const NARROW: bool>(
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
        let mean = narrow::<L, NARROW>(l, l.splat(l.sum(sums) / cols as f32));
        let away = |x: *const bf16| narrow::<L, NARROW>(l, l.sub(l.load_bf16(x), mean));
        let square = |d: L::F| narrow::<L, NARROW>(l, l.mul(d, d));
        let mut squares = square(l.keep_first(away(tail_x), rest, 0.0));
        for i in (0..whole).step_by(LANES) {
            squares = l.add(squares, square(away(x.add(i))));
        }
        let variance = l.sum(squares) / cols as f32;
        let rstd = narrow::<L, NARROW>(l, l.splat(1.0 / (variance + eps).sqrt()));
        let value = |x: *const bf16, w: *const bf16, b: *const bf16| {
            let normed = narrow::<L, NARROW>(l, l.mul(away(x), rstd));
            narrow::<L, NARROW>(l, l.add(l.mul(normed, l.load_bf16(w)), l.load_bf16(b)))
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
