//! The exponential on sixteen lanes: range reduction and polynomial, no table, no library call.
//!
//! May not hide NaN.

use super::lanes::Lanes;

/// `e^x`, within 2 ulp for -87 < x < 88; below that at most 1e-38, infinity from 88.4 or 88.7 on, NaN for NaN.
#[inline(always)]
pub(super) fn exp<L: Lanes>(l: L, x: L::F) -> L::F {
    // The bounds keep the exponent in -127..=128. `x` is the second operand, so NaN passes.
    let x = l.max(l.splat(-88.0), x);
    let x = l.min(l.splat(89.0), x);
    // x = n ln 2 + r with |r| <= ln 2 / 2; the upper part of ln 2 has few bits, so n times it is exact without FMA too.
    let n = l.round(l.mul(x, l.splat(std::f32::consts::LOG2_E)));
    let r = l.mul_add(n, l.splat(-0.693_359_4), x);
    let r = l.mul_add(n, l.splat(2.121_944_4e-4), r);
    // Cephes' expf: e^r = 1 + r + r^2 P(r).
    let p = l.splat(1.987_569_1e-4);
    let p = l.mul_add(p, r, l.splat(1.398_199_9e-3));
    let p = l.mul_add(p, r, l.splat(8.333_452e-3));
    let p = l.mul_add(p, r, l.splat(4.166_579_6e-2));
    let p = l.mul_add(p, r, l.splat(1.666_666_5e-1));
    let p = l.mul_add(p, r, l.splat(5e-1));
    let p = l.mul_add(p, l.mul(r, r), r);
    l.scale(l.add(p, l.splat(1.0)), n)
}

/// `2^x` for `x` that is not above 0, or only by rounding: within 3e-6 of its value for x > -125, below that at most 1e-37, NaN for
/// NaN. What it is for is rounded to bf16, which keeps 2e-3; two powers more would cost a tenth of a softmax.
#[inline(always)]
pub(super) fn exp2_negative<L: Lanes>(l: L, x: L::F) -> L::F {
    let x = l.max(l.splat(-126.0), x);
    let n = l.round(x);
    let r = l.sub(x, n);
    // 2^r = 1 + r P(r), |r| <= 1/2: the P of its degree whose largest relative error is smallest (Lawson's iteration).
    let p = l.splat(9.582_853e-3);
    let p = l.mul_add(p, r, l.splat(5.590_642_6e-2));
    let p = l.mul_add(p, r, l.splat(2.402_409_9e-1));
    let p = l.mul_add(p, r, l.splat(6.931_242e-1));
    l.scale(l.mul_add(p, r, l.splat(1.0)), n)
}
