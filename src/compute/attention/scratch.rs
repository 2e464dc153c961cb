//! Working memory of attention, one per thread, kept from call to call.
//!
//! Holds addresses only; what lies where and when is up to `block`.

use half::bf16;

use crate::compute::{
    lanes::{LANES, Lanes},
    pack::PANEL,
    scratch::{self, LINE},
};

use super::block::{CHUNK, KV_BLOCK};
use super::positions::VALUE_PANEL;

/// Sizes of the parts, in u32.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    value_panels: usize,
    context_stride: usize,
    /// Rows of maxima, totals and contexts, padded by a vector.
    rows: usize,
}

impl Layout {
    /// For heads of `head_dim` and up to `rows` rows.
    pub(super) fn new(head_dim: usize, rows: usize) -> Layout {
        Layout {
            value_panels: head_dim.div_ceil(PANEL),
            context_stride: head_dim.next_multiple_of(PANEL),
            rows: (rows + LANES).next_multiple_of(LINE),
        }
    }
}

/// The parts of this thread's memory, valid until the thread takes it again.
pub(super) struct Scratch {
    layout: Layout,
    spare: *mut u32,
    scores: *mut f32,
    probabilities: *mut bf16,
    partial: *mut f32,
    maximum: *mut f32,
    total: *mut f32,
    contexts: *mut f32,
}

impl Scratch {
    /// This thread's memory, laid out anew.
    pub(super) fn take(layout: Layout) -> Scratch {
        let [spare, scores, probabilities, partial, maximum, total, contexts] = scratch::take([
            layout.value_panels * VALUE_PANEL,
            CHUNK * KV_BLOCK,
            CHUNK * KV_BLOCK / 2,
            CHUNK.next_multiple_of(LANES) * LANES,
            layout.rows,
            layout.rows,
            layout.rows * layout.context_stride,
        ]);
        Scratch {
            layout,
            spare,
            scores: scores.cast(),
            probabilities: probabilities.cast(),
            partial: partial.cast(),
            maximum: maximum.cast(),
            total: total.cast(),
            contexts: contexts.cast(),
        }
    }

    /// Empties sums and contexts of the first `rows` rows.
    #[inline(always)]
    pub(super) fn reset(&self, rows: usize) {
        assert!(rows + LANES <= self.layout.rows, "state of {rows} rows, padded by a vector");
        // SAFETY: the parts hold `layout.rows` rows.
        unsafe {
            self.total.write_bytes(0, rows);
            self.contexts.write_bytes(0, rows * self.layout.context_stride);
        }
    }

    /// Values of a block, for one row's own copy.
    #[inline(always)]
    pub(super) fn spare(&self) -> *mut u32 {
        self.spare
    }

    /// Scores of a chunk: [CHUNK, KV_BLOCK].
    #[inline(always)]
    pub(super) fn scores(&self) -> *mut f32 {
        self.scores
    }

    /// Probabilities of a chunk: [CHUNK, KV_BLOCK].
    #[inline(always)]
    pub(super) fn probabilities(&self) -> *mut bf16 {
        self.probabilities
    }

    /// Maxima or sums of the rows of a chunk, lane by lane: [CHUNK, LANES], padded to LANES rows.
    #[inline(always)]
    pub(super) fn partial(&self) -> *mut f32 {
        self.partial
    }

    /// The scores that the rows' probabilities are relative to, once their first block has come.
    #[inline(always)]
    pub(super) fn maximum(&self) -> *mut f32 {
        self.maximum
    }

    /// Running sums of the rows.
    #[inline(always)]
    pub(super) fn total(&self) -> *mut f32 {
        self.total
    }

    /// Unnormalised context of row `row`, padded to whole panels.
    #[inline(always)]
    pub(super) fn context(&self, row: usize) -> *mut f32 {
        self.contexts.wrapping_add(row * self.layout.context_stride)
    }

    /// f32 from one context to the next.
    #[inline(always)]
    pub(super) fn context_stride(&self) -> usize {
        self.layout.context_stride
    }

    /// The context of a row over its sum, rounded.
    ///
    /// # Safety
    /// `out` is valid for writes of `head_dim` elements, and this is the layout's head_dim.
    #[inline(always)]
    pub(super) unsafe fn write_row<L: Lanes>(&self, l: L, row: usize, out: *mut bf16, head_dim: usize) {
        // SAFETY: row `row` has a sum and a context padded to whole vectors; `out` is cut at `head_dim`.
        unsafe {
            // A sum is at least the 1 of the score that it is relative to.
            let inverse = l.reciprocal(l.splat(*self.total.add(row)));
            for i in (0..head_dim).step_by(LANES) {
                let value = l.mul(l.load(self.context(row).add(i)), inverse);
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
