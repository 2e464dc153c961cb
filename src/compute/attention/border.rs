//! Where the two products of attention start and end.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use half::bf16;

use crate::compute::{
    exp::exp2,
    lanes::{LANES, Lanes},
    tile::{Border, zeros},
};

use super::block::KV_BLOCK;

/// Starts at zero, stores scores.
pub(super) struct Scores {
    pub(super) scores: *mut f32,
}

impl Border for Scores {
    #[inline(always)]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        for m in 0..M {
            for v in 0..V {
                let at = (row + m) * KV_BLOCK + column + v * LANES;
                // SAFETY: the scores of the chunk have KV_BLOCK columns, and panels divide it.
                unsafe { l.store(self.scores.add(at), tile[m][v]) };
            }
        }
    }
}

/// Starts at zero, turns scores into probabilities and adds them up.
pub(super) struct Probabilities {
    /// The rows' maxima, to which they are relative.
    pub(super) maxima: *const f32,
    /// Of the scores, for a power of two.
    pub(super) factor: f32,
    pub(super) probabilities: *mut bf16,
    /// Of each row, lane by lane: [rows, LANES].
    pub(super) sums: *mut f32,
    /// Whether these are the first of their block.
    pub(super) first: bool,
}

impl Probabilities {
    #[inline(always)]
    unsafe fn row<L: Lanes, const V: usize>(&self, l: L, row: usize, column: usize, scores: [L::F; V]) {
        // SAFETY: the row has a maximum and a sum; the probabilities of the chunk have KV_BLOCK columns, and panels divide it.
        unsafe {
            let (top, sum) = (*self.maxima.add(row), self.sums.add(row * LANES));
            let mut p = scores;
            for v in 0..V {
                p[v] = probability(l, scores[v], top, self.factor);
            }
            let mut total = if self.first && column == 0 { p[0] } else { l.add(l.load(sum), p[0]) };
            for v in 1..V {
                total = l.add(total, p[v]);
            }
            l.store(sum, total);
            let to = self.probabilities.add(row * KV_BLOCK + column);
            match V {
                2 => l.store_bf16_wide(to, p[0], p[1]),
                _ => {
                    for v in 0..V {
                        l.store_bf16(to.add(v * LANES), p[v]);
                    }
                }
            }
        }
    }
}

impl Border for Probabilities {
    #[inline(always)]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        // Row by row by hand: out of a loop that stays one, the tile would go through memory.
        macro_rules! rows {
            ($($m:literal)*) => {$(
                if $m < M {
                    // SAFETY: the caller's.
                    unsafe { self.row(l, row + $m, column, tile[if $m < M { $m } else { 0 }]) };
                }
            )*};
        }
        const { assert!(M <= 12, "the rows below") };
        rows!(0 1 2 3 4 5 6 7 8 9 10 11);
    }
}

/// `2^(factor * (score - top))`, lane by lane.
#[inline(always)]
pub(super) fn probability<L: Lanes>(l: L, score: L::F, top: f32, factor: f32) -> L::F {
    // The difference first: of large numbers, `factor * score - factor * top` is far from 0 at the top itself.
    exp2(l, l.mul(l.sub(score, l.splat(top)), l.splat(factor)))
}

/// Starts from the contexts, stores the new ones.
pub(super) struct Contexts {
    pub(super) contexts: *mut f32,
    pub(super) stride: usize,
}

impl Border for Contexts {
    #[inline(always)]
    unsafe fn start<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
    ) -> [[L::F; V]; M] {
        let mut tile = zeros(l);
        for m in 0..M {
            for v in 0..V {
                let at = (row + m) * self.stride + column + v * LANES;
                // SAFETY: row `row + m` has a context, padded to whole panels.
                tile[m][v] = unsafe { l.load(self.contexts.add(at)) };
            }
        }
        tile
    }

    #[inline(always)]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        for m in 0..M {
            for v in 0..V {
                let at = (row + m) * self.stride + column + v * LANES;
                // SAFETY: as in `start`.
                unsafe { l.store(self.contexts.add(at), tile[m][v]) };
            }
        }
    }
}
