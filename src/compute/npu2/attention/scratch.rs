//! Working memory of attention, one per thread, kept from call to call.
//!
//! Holds addresses only; what lies where and when is up to `block`.

use half::bf16;

use super::block::{CHUNK, KV_BLOCK};
use super::state::State;
use crate::compute::{
    lanes::LANES,
    pack::PANEL,
    scratch::{self, LINE},
};

/// The parts of this thread's memory, valid until the thread takes it again.
pub(super) struct Scratch {
    /// Rows of maxima, totals, contexts and queries.
    pub(super) rows: usize,
    /// u32 of a panel of keys.
    key_panel: usize,
    /// bf16 from one quantised query to the next.
    pub(super) query_stride: usize,
    pub(super) queries: *mut bf16,
    keys: *mut u32,
    values: *mut u32,
    spare: *mut u32,
    /// Scores of a chunk: [CHUNK, KV_BLOCK].
    pub(super) scores: *mut f32,
    /// Probabilities of a chunk: [CHUNK, KV_BLOCK].
    pub(super) probabilities: *mut bf16,
    /// Factors of a chunk's earlier contexts.
    pub(super) rescale: *mut f32,
    /// The stage under way, and those behind it.
    pub(super) states: [State; 2],
}

impl Scratch {
    /// This thread's memory, laid out for heads of `head_dim` and up to `rows` rows.
    pub(super) fn take(head_dim: usize, rows: usize) -> Scratch {
        let rows = rows.next_multiple_of(LINE);
        let key_panel = head_dim / 2 * PANEL;
        let query_stride = head_dim.next_multiple_of(LANES);
        let stride = head_dim.next_multiple_of(PANEL);
        let values = head_dim.div_ceil(PANEL) * (KV_BLOCK / 2 * PANEL);
        let parts = scratch::take([
            rows * query_stride / 2,
            KV_BLOCK / PANEL * key_panel,
            values,
            values,
            CHUNK * KV_BLOCK,
            CHUNK * KV_BLOCK / 2,
            CHUNK.next_multiple_of(LANES),
            rows,
            rows,
            rows * stride,
            rows,
            rows,
            rows * stride,
        ]);
        let [queries, keys, values, spare, scores, probabilities, rescale, states @ ..] = parts;
        let state =
            |of: &[*mut u32]| State { maximum: of[0].cast(), total: of[1].cast(), contexts: of[2].cast(), stride };
        Scratch {
            rows,
            key_panel,
            query_stride,
            queries: queries.cast(),
            keys,
            values,
            spare,
            scores: scores.cast(),
            probabilities: probabilities.cast(),
            rescale: rescale.cast(),
            states: [state(&states[..3]), state(&states[3..])],
        }
    }

    /// Panel `p` of packed keys, PANEL positions.
    #[inline(always)]
    pub(super) fn key_panel(&self, p: usize) -> *mut u32 {
        self.keys.wrapping_add(p * self.key_panel)
    }

    /// Panel `p` of packed values, PANEL columns of a head.
    #[inline(always)]
    pub(super) fn value_panel(&self, p: usize) -> *mut u32 {
        self.values.wrapping_add(p * (KV_BLOCK / 2 * PANEL))
    }

    /// As [`Scratch::value_panel`], for one row's own copy.
    #[inline(always)]
    pub(super) fn spare_panel(&self, p: usize) -> *mut u32 {
        self.spare.wrapping_add(p * (KV_BLOCK / 2 * PANEL))
    }
}
