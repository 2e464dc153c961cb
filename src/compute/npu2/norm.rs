//! RMSNorm as prefill and decode have it: two kernels, the second of which sums in bf16.
//!
//! All roundings are toward minus infinity: neither kernel sets the rounding mode.
//! Source: mlir-air's `weighted_rms_norm` and the decode builder's `_build_rms_1d`.

use half::bf16;

use crate::compute::{
    Isa,
    lanes::{LANES, Lanes},
    norm::{NormRow, Share},
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// [`RmsNorm`](super::RmsNorm) of one row with everything but the root in bf16: sixteen sums of squares, their sum by halves, the mean and
/// `mean + eps`. The sums stop growing where a square is below their last place, so the result is too large: 7 % at 2048.
///
/// Shapes: `x`, `weight`, `y` [cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct RmsNormDecode {
    /// The row.
    pub x: Src<bf16>,
    /// Scale of every column.
    pub weight: Src<bf16>,
    /// Added to the mean square, in bf16.
    pub eps: f32,
    /// Normalised row.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: the one row is claimed once.
unsafe impl Kernel for RmsNormDecode {
    fn run(&self, worker: &Worker<'_>) {
        let RmsNormDecode { x, weight, eps, y, isa } = *self;
        assert!(x.len() == weight.len(), "rms_norm: x is not [{}]", weight.len());
        Share { x, weight, y, cols: weight.len(), row: Decode { eps }, worker }.run(isa);
    }

    fn alone(&self) -> bool {
        true
    }
}

struct Decode {
    eps: f32,
}

impl NormRow for Decode {
    #[inline(always)]
    unsafe fn norm<L: Lanes>(&self, l: L, x: *const bf16, weight: *const bf16, y: *mut bf16, cols: usize) {
        // SAFETY: the caller's.
        unsafe { rms_norm::<L, true>(l, x, weight, self.eps, y, cols) }
    }
}

/// One row, `y = bf16(bf16(x * rstd) * weight)`: squares in bf16, their sum, mean and `1 / sqrt(mean + eps)` in f32, or in
/// bf16 if `NARROW`, rstd in bf16.
///
/// # Safety
/// `x`, `weight` and `y` are valid for `cols` elements; `y` is `x` or overlaps neither.
#[inline(always)]
pub(in crate::compute) unsafe fn rms_norm<L: Lanes, const NARROW: bool>(
    l: L,
    x: *const bf16,
    weight: *const bf16,
    eps: f32,
    y: *mut bf16,
    cols: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let sums = squares::<L, NARROW>(l, x, cols);
        let rstd = if NARROW { rstd_narrow(l, sums, cols, eps) } else { rstd(l, sums, cols, eps) };
        scale(l, x, weight, rstd, y, cols);
    }
}

/// Sixteen sums of squares, the squares rounded, the sums rounded if `NARROW`.
///
/// # Safety
/// `x` is valid for reads of `cols` elements.
#[inline(always)]
unsafe fn squares<L: Lanes, const NARROW: bool>(l: L, x: *const bf16, cols: usize) -> L::F {
    let whole = cols - cols % LANES;
    let mut tail = [bf16::ZERO; LANES];
    let mut sums = l.splat(0.0);
    // SAFETY: full vectors end at `whole`, fewer than LANES elements are left.
    unsafe {
        tail.as_mut_ptr().copy_from_nonoverlapping(x.add(whole), cols - whole);
        for i in (0..whole).step_by(LANES) {
            let v = l.load_bf16(x.add(i));
            sums = l.add(sums, l.round_down(l.mul(v, v)));
            if NARROW {
                sums = l.round_down(sums);
            }
        }
        let v = l.load_bf16(tail.as_ptr());
        sums = l.add(sums, l.round_down(l.mul(v, v)));
    }
    if NARROW { l.round_down(sums) } else { sums }
}

/// `1 / sqrt(sum / cols + eps)` in f32, rounded once.
#[inline(always)]
fn rstd<L: Lanes>(l: L, sums: L::F, cols: usize, eps: f32) -> L::F {
    let mean = l.sum(sums) / cols as f32;
    l.round_down(l.splat(1.0 / (mean + eps).sqrt()))
}

/// [`rstd`] in bf16: every addition and the division rounded.
#[inline(always)]
fn rstd_narrow<L: Lanes>(l: L, sums: L::F, cols: usize, eps: f32) -> L::F {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: sixteen numbers.
    unsafe { l.store(lanes.as_mut_ptr(), sums) };
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = down(lanes[i] + lanes[i + half]);
        }
        half /= 2;
    }
    let mean = down(lanes[0] / cols as f32);
    let shifted = down(mean + bf16::from_f32(eps).to_f32());
    l.round_down(l.splat(1.0 / shifted.sqrt()))
}

/// One number rounded to bf16 toward minus infinity; [`Lanes::round_down`] without lanes.
#[inline(always)]
fn down(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = if x < 0.0 { 0xffff } else { 0 };
    f32::from_bits(if x.is_nan() { bits } else { bits.wrapping_add(up) & 0xffff_0000 })
}

/// # Safety
/// `x`, `weight` and `y` are valid for `cols` elements; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn scale<L: Lanes>(l: L, x: *const bf16, weight: *const bf16, rstd: L::F, y: *mut bf16, cols: usize) {
    let whole = cols - cols % LANES;
    // SAFETY: full vectors end at `whole`, fewer than LANES elements are left; all are read before they are written.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let normed = l.round_down(l.mul(l.load_bf16(x.add(i)), rstd));
            l.store_bf16(y.add(i), l.round_down(l.mul(normed, l.load_bf16(weight.add(i)))));
        }
        if whole < cols {
            let (mut tail_x, mut tail_w) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES]);
            tail_x.as_mut_ptr().copy_from_nonoverlapping(x.add(whole), cols - whole);
            tail_w.as_mut_ptr().copy_from_nonoverlapping(weight.add(whole), cols - whole);
            let normed = l.round_down(l.mul(l.load_bf16(tail_x.as_ptr()), rstd));
            l.store_bf16(tail_x.as_mut_ptr(), l.round_down(l.mul(normed, l.load_bf16(tail_w.as_ptr()))));
            y.add(whole).copy_from_nonoverlapping(tail_x.as_ptr(), cols - whole);
        }
    }
}
