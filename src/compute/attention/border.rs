//! Where the two products of attention start and end.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use crate::compute::{
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

/// Starts from the rescaled contexts, stores the new ones.
pub(super) struct Contexts {
    pub(super) contexts: *mut f32,
    pub(super) stride: usize,
    pub(super) rescale: *const f32,
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
                // SAFETY: row `row + m` has a factor and a context, padded to whole panels.
                tile[m][v] = unsafe { l.mul(l.load(self.contexts.add(at)), l.splat(*self.rescale.add(row + m))) };
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
