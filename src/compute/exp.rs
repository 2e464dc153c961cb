//! The exponential on sixteen lanes: whole part, fraction and polynomial, no table, no library call.
//!
//! May not hide NaN.

use super::lanes::Lanes;

/// `2^x`: within 9e-5 of its value for -125 < x < 127, exactly 1 for 0; below that at most 1e-37 (0 or
/// not, as the instruction set has it), infinity from 128 on, NaN for NaN.
/// What it makes is rounded to bf16, which keeps 2e-3, alone or in a sum; a power more would cost 1 to 2 % of attention.
#[inline(always)]
pub(super) fn exp2<L: Lanes>(l: L, x: L::F) -> L::F {
    let (n, r) = l.whole_and_fraction(x);
    // 2^r = 1 + r P(r), 0 <= r <= 1: the P of its degree whose largest relative error is smallest (Lawson's iteration).
    let p = l.splat(7.706_714e-2);
    let p = l.mul_add(p, r, l.splat(2.276_448_9e-1));
    let p = l.mul_add(p, r, l.splat(6.951_168e-1));
    l.scale(l.mul_add(p, r, l.splat(1.0)), n)
}
