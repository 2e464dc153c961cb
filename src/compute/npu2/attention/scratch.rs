//! Working memory of attention, one per thread, kept from call to call.
//!
//! Holds addresses only; what lies where and when is up to `block`.

use std::cell::RefCell;

use half::bf16;

use super::block::{CHUNK, KV_BLOCK};
use super::state::State;
use crate::compute::{lanes::LANES, pack::PANEL};

/// A cache line, so that whole vectors never straddle two.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "reached through pointers")] [u32; LINE]);

const LINE: usize = 16;

thread_local! {
    static MEMORY: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

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
        let parts = [
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
        ];
        let base = MEMORY.with_borrow_mut(|memory| {
            let lines = parts.iter().map(|part| part.div_ceil(LINE)).sum::<usize>();
            if memory.len() < lines {
                memory.resize(lines, Line([0; LINE]));
            }
            memory.as_mut_ptr().cast::<u32>()
        });
        let mut offset = 0;
        let mut next = parts.iter().map(|part| {
            // SAFETY: the parts, each rounded up to whole lines, lie within `lines` lines one after the other.
            let at = unsafe { base.add(offset) };
            offset += part.next_multiple_of(LINE);
            at
        });
        let mut part = || next.next().expect("a part per field");
        Scratch {
            rows,
            key_panel,
            query_stride,
            queries: part().cast(),
            keys: part(),
            values: part(),
            spare: part(),
            scores: part().cast(),
            probabilities: part().cast(),
            rescale: part().cast(),
            states: [(); 2].map(|()| State {
                maximum: part().cast(),
                total: part().cast(),
                contexts: part().cast(),
                stride,
            }),
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
