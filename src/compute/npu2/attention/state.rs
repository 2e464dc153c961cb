//! Softmax state of the rows of a task, all of it bf16 kept as f32, and how two stages become one.

use half::bf16;

use crate::compute::{
    lanes::{LANES, Lanes},
    npu2::unit::exp2,
};

/// What stands for minus infinity: bf16's lowest number, whose difference to itself is no NaN.
pub(super) const LOWEST: f32 = f32::from_bits(0xff7f_0000);

/// Maximum, sum and unnormalised context of every row; a context is padded to whole panels.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) maximum: *mut f32,
    pub(super) total: *mut f32,
    pub(super) contexts: *mut f32,
    pub(super) stride: usize,
}

/// `exp2(difference * c)` as between two running maxima, or a score and its maximum.
#[inline(always)]
pub(super) fn factor<L: Lanes>(l: L, difference: L::F, c: f32) -> L::F {
    exp2(l, l.mul(l.max(l.splat(LOWEST), l.round_nearest(difference)), l.splat(c)))
}

impl State {
    /// Nothing seen, for `rows` rows.
    ///
    /// # Safety
    /// The state holds that many rows.
    #[inline(always)]
    pub(super) unsafe fn reset(&self, rows: usize) {
        // SAFETY: the caller's.
        unsafe {
            for row in 0..rows {
                self.maximum.add(row).write(LOWEST);
                self.total.add(row).write(0.0);
            }
            self.contexts.write_bytes(0, rows * self.stride);
        }
    }

    /// Takes up the state of a later stage, which has seen other keys of the same rows.
    ///
    /// # Safety
    /// Both hold `rows` rows, rounded up to LANES.
    #[inline(always)]
    pub(super) unsafe fn merge<L: Lanes>(&self, l: L, later: &State, rows: usize, c: f32) {
        for first in (0..rows).step_by(LANES) {
            // SAFETY: the caller's.
            unsafe {
                let (own, other) = (l.load(self.maximum.add(first)), l.load(later.maximum.add(first)));
                let maximum = l.max(own, other);
                let (of_own, of_other) = (factor(l, l.sub(own, maximum), c), factor(l, l.sub(other, maximum), c));
                let total = l.round_nearest(l.mul(l.load(later.total.add(first)), of_other));
                let total = l.round_nearest(l.add(l.mul(l.load(self.total.add(first)), of_own), total));
                l.store(self.maximum.add(first), maximum);
                l.store(self.total.add(first), total);
                let (mut factors, mut later_factors) = ([0.0f32; LANES], [0.0f32; LANES]);
                l.store(factors.as_mut_ptr(), of_own);
                l.store(later_factors.as_mut_ptr(), of_other);
                for row in first..rows.min(first + LANES) {
                    let (own, other) = (l.splat(factors[row - first]), l.splat(later_factors[row - first]));
                    for i in (0..self.stride).step_by(LANES) {
                        let at = row * self.stride + i;
                        let rescaled = l.round_nearest(l.mul(l.load(self.contexts.add(at)), own));
                        let added = l.round_nearest(l.mul(l.load(later.contexts.add(at)), other));
                        l.store(self.contexts.add(at), l.round_nearest(l.add(rescaled, added)));
                    }
                }
            }
        }
    }

    /// Multiplies the context of a row by the inverse of its sum and writes it.
    ///
    /// # Safety
    /// The state holds row `row`, whose context has `head_dim` elements; `out` is valid for writes of them.
    #[inline(always)]
    pub(super) unsafe fn write_row<L: Lanes>(&self, l: L, row: usize, out: *mut bf16, head_dim: usize) {
        // SAFETY: the caller's; contexts are padded to whole vectors, `out` is cut at `head_dim`.
        unsafe {
            let inverse = l.round_nearest(l.div(l.splat(1.0), l.splat(*self.total.add(row))));
            for i in (0..head_dim).step_by(LANES) {
                let value = l.mul(l.load(self.contexts.add(row * self.stride + i)), inverse);
                if i + LANES <= head_dim {
                    l.store_bf16(out.add(i), value);
                } else {
                    let mut whole = [bf16::ZERO; LANES];
                    l.store_bf16(whole.as_mut_ptr(), value);
                    out.add(i).copy_from_nonoverlapping(whole.as_ptr(), head_dim - i);
                }
            }
        }
    }
}
