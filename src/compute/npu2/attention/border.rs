//! Where the two products of attention start and end.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use super::block::KV_BLOCK;
use crate::compute::{
    lanes::{LANES, Lanes},
    tile::{Border, zeros},
};

/// Starts at zero or, for a further piece of the head, from the scores so far; stores bf16 scores as f32.
pub(super) struct Scores {
    pub(super) scores: *mut f32,
    pub(super) fresh: bool,
}

impl Border for Scores {
    #[inline(always)]
    unsafe fn start<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
    ) -> [[L::F; V]; M] {
        let mut tile = zeros(l);
        if !self.fresh {
            for m in 0..M {
                for v in 0..V {
                    let at = (row + m) * KV_BLOCK + column + v * LANES;
                    // SAFETY: as in `finish`.
                    tile[m][v] = unsafe { l.load(self.scores.add(at)) };
                }
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
                let at = (row + m) * KV_BLOCK + column + v * LANES;
                // SAFETY: the scores of the chunk have KV_BLOCK columns, and panels divide it.
                unsafe { l.store(self.scores.add(at), l.round_nearest(tile[m][v])) };
            }
        }
    }
}

/// Starts from the rescaled contexts, stores the new ones: bf16 as f32.
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
                let (old, factor) = unsafe { (l.load(self.contexts.add(at)), l.splat(*self.rescale.add(row + m))) };
                tile[m][v] = l.round_nearest(l.mul(old, factor));
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
                unsafe { l.store(self.contexts.add(at), l.round_nearest(tile[m][v])) };
            }
        }
    }
}
