//! The passes of attention over one block of keys and values.
//!
//! May not know threads: which rows a task takes never shows in its results.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use std::ops::Range;

use half::bf16;

use super::border::{Contexts, Probabilities, Scores, probability};
use super::positions::{Layout, VALUE_PANEL};
use super::scratch::{self, Scratch};
use super::{Attention, DecodeAttention, Sight, Split};
use crate::compute::{
    lanes::{LANES, Lanes, Lanewise},
    pack::PANEL,
    pool::Worker,
    scratch::LINE,
    tile::{NOTHING, PANEL_AHEAD, Rows, multiply_panel},
};

/// Positions of a block; part of the arithmetic, since rows start over at blocks.
pub(super) const KV_BLOCK: usize = 128;
/// Tokens of a task, with all heads of a group.
const Q_BLOCK: usize = 96;
/// Rows that go through scores, softmax and context while their scores are in the L1 cache.
pub(super) const CHUNK: usize = 24;

/// Rows of queries of one kv head, and the positions they see.
struct Task {
    /// Row 0 of band 0; a band is one head (prefill) or all heads of the one token (decode).
    q: *const bf16,
    out: *mut bf16,
    bands: usize,
    band_stride: usize,
    rows: usize,
    row_stride: usize,
    positions: Positions,
    scale: f32,
    sight: Sight,
}

/// The packed keys and values of one head.
struct Positions {
    layout: Layout,
    /// The first block.
    start: *const u32,
    /// How many there are: beside an odd last one stands 0.
    count: usize,
    /// For each block whether all of its values are finite; none where all rows see the same.
    finite: Option<*const u32>,
}

pub(super) struct Prefill<'a> {
    pub(super) kernel: &'a Attention,
    pub(super) rows: usize,
    pub(super) worker: &'a Worker<'a>,
}

pub(super) struct Decode<'a> {
    pub(super) kernel: &'a DecodeAttention<'a>,
    pub(super) worker: &'a Worker<'a>,
}

impl Lanewise for Prefill<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Attention { q, positions, out, first, seq, heads, kv_heads, head_dim, scale, causal, .. } = *self.kernel;
        let group = heads / kv_heads;
        let split = Split { rows: self.rows, first, seq, block: Q_BLOCK, heads, kv_heads, head_dim, causal };
        let layout = Layout::new(kv_heads, head_dim, seq);
        let scratch = Scratch::take(scratch::Layout::new(head_dim, group * Q_BLOCK));
        while let Some(piece) = split.piece(self.worker.claim()) {
            // SAFETY: the piece's tokens, the heads of its group and its kv head exist; the rows of these heads are written
            // by this task only.
            unsafe {
                let positions = Positions {
                    layout,
                    start: positions.ptr().add(layout.block(piece.kv_head, 0)),
                    count: seq,
                    finite: Some(positions.ptr().add(layout.len() + piece.kv_head * layout.blocks)),
                };
                let task = Task {
                    q: q.ptr().add(piece.q),
                    out: out.ptr().add(piece.q),
                    bands: group,
                    band_stride: head_dim,
                    rows: piece.rows,
                    row_stride: heads * head_dim,
                    positions,
                    scale,
                    sight: piece.sight,
                };
                attend::<L, { NOTHING }>(l, &task, &scratch);
            }
        }
    }
}

impl Lanewise for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let DecodeAttention { q, cache, out, heads, scale, .. } = *self.kernel;
        let layout @ Layout { kv_heads, head_dim, .. } = cache.layout();
        let group = heads / kv_heads;
        let scratch = Scratch::take(scratch::Layout::new(head_dim, group));
        loop {
            let head = self.worker.claim();
            if head >= kv_heads {
                break;
            }
            // SAFETY: the heads of the group exist in `q` and `out` and are written by this task only.
            unsafe {
                let start = cache.start().add(layout.block(head, 0)).cast_const();
                let task = Task {
                    q: q.ptr().add(head * group * head_dim),
                    out: out.ptr().add(head * group * head_dim),
                    bands: 1,
                    band_stride: 0,
                    rows: group,
                    row_stride: head_dim,
                    positions: Positions { layout, start, count: cache.len(), finite: None },
                    scale,
                    sight: Sight { seen: cache.len(), step: 0 },
                };
                // Each panel is read once.
                attend::<L, { PANEL_AHEAD }>(l, &task, &scratch);
            }
        }
    }
}

impl Task {
    /// Of the scores, for softmax as a power of two.
    #[inline(always)]
    fn factor(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }

    /// Positions that any row sees.
    #[inline(always)]
    fn end(&self) -> usize {
        self.sight.of(self.rows - 1)
    }

    #[inline(always)]
    fn block(&self, index: usize) -> Block {
        let start = index * KV_BLOCK;
        let panels = self.positions.start.wrapping_add(self.positions.layout.block(0, index));
        Block { start, len: KV_BLOCK.min(self.end() - start), panels }
    }
}

struct Block {
    start: usize,
    len: usize,
    /// Its keys, and behind them its values.
    panels: *const u32,
}

impl Block {
    /// Positions of the block that a row with `seen` positions sees.
    #[inline(always)]
    fn seen(&self, seen: usize) -> usize {
        (seen - self.start).min(self.len)
    }
}

/// Rows of a band that go through scores, softmax and context together.
#[derive(Clone, Copy)]
struct Chunk {
    band: usize,
    row: usize,
    count: usize,
    /// Of its first row in the scratch.
    state: usize,
}

/// # Safety
/// The task's pointers are valid for what it says, and nobody else writes its rows of `out`; the scratch is laid out
/// for its head_dim and at least its rows. `ASK` is what its products ask the caches for.
#[inline(always)]
unsafe fn attend<L: Lanes, const ASK: u8>(l: L, task: &Task, scratch: &Scratch) {
    scratch.reset(task.bands * task.rows);
    let blocks = task.end().div_ceil(KV_BLOCK);
    for index in 0..blocks {
        if ASK == NOTHING && index + 1 < blocks {
            ask_for_block(l, &task.positions, index + 1);
        }
        let block = task.block(index);
        for band in 0..task.bands {
            let first = task.sight.first_to_see(block.start, 0, task.rows);
            for row in (first..task.rows).step_by(CHUNK) {
                let chunk = Chunk { band, row, count: CHUNK.min(task.rows - row), state: band * task.rows + row };
                // SAFETY: these rows exist, and all see the block's first position.
                unsafe {
                    if index > 0 && block.seen(task.sight.of(row)) == KV_BLOCK {
                        probabilities_at_once::<L, ASK>(l, task, scratch, &block, chunk);
                    } else {
                        scores::<L, ASK>(l, task, scratch, &block, chunk);
                        probabilities(l, task, scratch, &block, chunk);
                    }
                    add_up::<L, ASK>(l, task, scratch, &block, chunk);
                    contexts::<L, ASK>(l, task, scratch, &block, chunk);
                }
            }
        }
    }
    for band in 0..task.bands {
        for row in 0..task.rows {
            let at = band * task.band_stride + row * task.row_stride;
            // SAFETY: row `row` of the band exists in `out`.
            unsafe { scratch.write_row(l, band * task.rows + row, task.out.add(at), task.positions.layout.head_dim) };
        }
    }
}

/// Asks for a block while the one before it is multiplied, by many rows.
#[inline(always)]
fn ask_for_block<L: Lanes>(l: L, positions: &Positions, block: usize) {
    let start = positions.start.wrapping_add(positions.layout.block(0, block));
    for line in (0..positions.layout.block_len()).step_by(LINE) {
        l.prefetch_stream(start.wrapping_add(line));
    }
}

/// `scores[r][p] = q[r] · k[p]`, for the panels that a row sees any position of.
#[inline(always)]
unsafe fn scores<L: Lanes, const ASK: u8>(l: L, task: &Task, scratch: &Scratch, block: &Block, chunk: Chunk) {
    let layout = task.positions.layout;
    let Chunk { band, row, count, .. } = chunk;
    for p in 0..block.len.div_ceil(PANEL) {
        let first = task.sight.first_to_see(block.start + p * PANEL, row, row + count);
        // SAFETY: the caller's: these rows exist, and the panel is packed.
        unsafe {
            let at = band * task.band_stride + first * task.row_stride;
            let rows = Rows { first: task.q.add(at), stride: task.row_stride };
            let border = Scores { scores: scratch.scores().add((first - row) * KV_BLOCK + p * PANEL) };
            let panel = block.panels.add(p * layout.key_panel());
            multiply_panel::<L, ASK>(l, rows, row + count - first, panel, PANEL, layout.head_dim, &border);
        }
    }
}

/// Turns scores into probabilities, relative to the row's largest score of its first block. A later block raises that only
/// when its sum passes [`LIMIT`] ([`raise`]): bf16 and f32 are as exact at 2^16 as at 1, and probabilities that need
/// not wait for their block's maximum can be made where the scores are ([`probabilities_at_once`]).
#[inline(always)]
unsafe fn probabilities<L: Lanes>(l: L, task: &Task, scratch: &Scratch, block: &Block, chunk: Chunk) {
    // First all maxima, then all exponentials: within a row one waits for the other, between rows nothing does.
    if block.start == 0 {
        for base in (0..chunk.count).step_by(LANES) {
            // SAFETY: the rows have scores; their state and the scratch's arrays are padded by a vector. Lanes behind them are other
            // rows', which have their first block yet to come.
            unsafe {
                for i in 0..LANES.min(chunk.count - base) {
                    let seen = block.seen(task.sight.of(chunk.row + base + i));
                    let top = top_of_row(l, scratch.scores().add((base + i) * KV_BLOCK), seen);
                    l.store(scratch.partial().add(i * LANES), top);
                }
                // A NaN that `max` drops comes back with its own exponential below.
                l.store(scratch.maximum().add(chunk.state + base), l.largest_of_each(scratch.partial()));
            }
        }
    }
    for i in 0..chunk.count {
        // SAFETY: the row has scores, probabilities and a sum.
        unsafe {
            let (seen, top) = (block.seen(task.sight.of(chunk.row + i)), *scratch.maximum().add(chunk.state + i));
            let (scores, to) = (scratch.scores().add(i * KV_BLOCK), scratch.probabilities().add(i * KV_BLOCK));
            let sum = exponentials(l, scores, to, seen, task.factor(), top);
            l.store(scratch.partial().add(i * LANES), sum);
        }
    }
}

/// [`scores`] and [`probabilities`] of a later block that all rows see all of: scores stay in registers, since the store of a
/// vector takes up to two products' time beside them.
#[inline(always)]
unsafe fn probabilities_at_once<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    block: &Block,
    chunk: Chunk,
) {
    let layout = task.positions.layout;
    for p in 0..KV_BLOCK / PANEL {
        // SAFETY: the caller's: these rows exist and have maxima, and the panel is packed.
        unsafe {
            let at = chunk.band * task.band_stride + chunk.row * task.row_stride;
            let rows = Rows { first: task.q.add(at), stride: task.row_stride };
            let border = Probabilities {
                maxima: scratch.maximum().add(chunk.state),
                factor: task.factor(),
                probabilities: scratch.probabilities().add(p * PANEL),
                sums: scratch.partial(),
                first: p == 0,
            };
            let panel = block.panels.add(p * layout.key_panel());
            multiply_panel::<L, ASK>(l, rows, chunk.count, panel, PANEL, layout.head_dim, &border);
        }
    }
}

/// The largest sum of a block's probabilities that lets a row's maximum be: the scores of a row that passes it are computed
/// again. Contexts of values up to 2^100 stay finite with 2^10 blocks of it.
const LIMIT: f32 = 65536.0;

/// Adds the sums of a block to those of the rows, which are raised where they are too large.
#[inline(always)]
unsafe fn add_up<L: Lanes, const ASK: u8>(l: L, task: &Task, scratch: &Scratch, block: &Block, chunk: Chunk) {
    for base in (0..chunk.count).step_by(LANES) {
        let mut sums = [0.0; LANES];
        // SAFETY: the rows have sums, padded to LANES rows, and totals.
        unsafe {
            l.store(sums.as_mut_ptr(), l.sum_of_each(scratch.partial().add(base * LANES)));
            for (i, &sum) in (base..chunk.count).zip(&sums) {
                // Not of a NaN, which stays one.
                let sum = if sum > LIMIT { raise::<L, ASK>(l, task, scratch, block, chunk, i) } else { sum };
                *scratch.total().add(chunk.state + i) += sum;
            }
        }
    }
}

/// Makes row `i` of the chunk relative to the largest score of this block, with all it has so far; gives the new sum of this
/// block's probabilities.
#[inline(always)]
unsafe fn raise<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    block: &Block,
    chunk: Chunk,
    i: usize,
) -> f32 {
    let to = scratch.probabilities().wrapping_add(i * KV_BLOCK);
    let chunk = Chunk { row: chunk.row + i, count: 1, state: chunk.state + i, ..chunk };
    // SAFETY: the caller's; the row has a state, and the chunk's scores are not needed any more.
    unsafe {
        scores::<L, ASK>(l, task, scratch, block, chunk);
        let (seen, factor) = (block.seen(task.sight.of(chunk.row)), task.factor());
        let (maximum, total) = (scratch.maximum().add(chunk.state), scratch.total().add(chunk.state));
        let top = l.largest(top_of_row(l, scratch.scores(), seen));
        let rescale = probability(l, l.splat(*maximum), top, factor);
        *maximum = top;
        *total *= l.largest(rescale);
        for at in (0..scratch.context_stride()).step_by(LANES) {
            let context = scratch.context(chunk.state).add(at);
            l.store(context, l.mul(l.load(context), rescale));
        }
        l.sum(exponentials(l, scratch.scores(), to, seen, factor, top))
    }
}

const VECS: usize = KV_BLOCK / LANES;

/// The largest of the first `seen` scores of a row, lane by lane.
///
/// # Safety
/// `scores` is valid for reads of KV_BLOCK elements.
#[inline(always)]
unsafe fn top_of_row<L: Lanes>(l: L, scores: *const f32, seen: usize) -> L::F {
    // SAFETY: the caller's.
    unsafe {
        let mut s = [l.load(scores); VECS];
        for v in 1..VECS {
            s[v] = l.load(scores.add(v * LANES));
        }
        if seen < KV_BLOCK {
            for v in 0..VECS {
                s[v] = l.keep_first(s[v], seen.saturating_sub(v * LANES), f32::NEG_INFINITY);
            }
        }
        let mut top = s[0];
        for v in 1..VECS {
            top = l.max(top, s[v]);
        }
        top
    }
}

/// Writes `2^(factor * (score - top))` of the first `seen` scores of a row, and zeros; gives their sum, lane by lane.
///
/// # Safety
/// `scores` is valid for reads of KV_BLOCK elements, `to` for writes of as many.
#[inline(always)]
unsafe fn exponentials<L: Lanes>(l: L, scores: *const f32, to: *mut bf16, seen: usize, factor: f32, top: f32) -> L::F {
    // SAFETY: the caller's.
    unsafe {
        if seen < KV_BLOCK {
            // The vectors that a row sees anything of; zeros behind them.
            let mut sum = l.splat(0.0);
            for v in 0..VECS {
                let mut p = l.splat(0.0);
                if v * LANES < seen {
                    p = l.keep_first(probability(l, l.load(scores.add(v * LANES)), top, factor), seen - v * LANES, 0.0);
                }
                sum = l.add(sum, p);
                l.store_bf16(to.add(v * LANES), p);
            }
            return sum;
        }
        let mut s = [l.splat(0.0); VECS];
        for v in 0..VECS {
            s[v] = probability(l, l.load(scores.add(v * LANES)), top, factor);
        }
        let mut sum = s[0];
        l.store_bf16(to, s[0]);
        for v in 1..VECS {
            sum = l.add(sum, s[v]);
            l.store_bf16(to.add(v * LANES), s[v]);
        }
        sum
    }
}

/// `context[r] += probabilities[r] · v`.
#[inline(always)]
unsafe fn contexts<L: Lanes, const ASK: u8>(l: L, task: &Task, scratch: &Scratch, block: &Block, chunk: Chunk) {
    // No row of the chunk sees more than the last; what the others do not see has probability 0, and so has what stands beside
    // an odd last one.
    let seen = block.seen(task.sight.of(chunk.row + chunk.count - 1));
    let read = seen.next_multiple_of(2).min(task.positions.count - block.start);
    let partial = block.seen(task.sight.of(chunk.row)) < read;
    let layout = task.positions.layout;
    let values = block.panels.wrapping_add(layout.keys_len());
    // SAFETY: there is a flag for each block.
    let finite = task.positions.finite.is_none_or(|finite| unsafe { *finite.add(block.start / KV_BLOCK) } != 0);
    if partial && !finite {
        // 0 * NaN is NaN: each row gets its own copy of the values, zero where it does not see them.
        for i in 0..chunk.count {
            let seen = block.seen(task.sight.of(chunk.row + i));
            // SAFETY: the caller's.
            unsafe {
                keep_seen(l, scratch.spare(), values, seen, layout.head_dim);
                product::<L, ASK>(l, task, scratch, chunk, i..i + 1, seen, scratch.spare());
            }
        }
    } else {
        // SAFETY: the caller's.
        unsafe { product::<L, ASK>(l, task, scratch, chunk, 0..chunk.count, seen, values) };
    }
}

/// The product for some rows of the chunk, over `seen` positions.
#[inline(always)]
unsafe fn product<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    chunk: Chunk,
    of: Range<usize>,
    seen: usize,
    values: *const u32,
) {
    for p in 0..task.positions.layout.head_dim.div_ceil(PANEL) {
        // SAFETY: the caller's: the rows exist in the scratch, the panels are packed. Positions come in pairs: what stands beside an
        // odd last one has probability 0, and its value is 0 or, as `contexts` sees to it, finite.
        unsafe {
            let rows = Rows { first: scratch.probabilities().add(of.start * KV_BLOCK), stride: KV_BLOCK };
            let contexts = scratch.context(chunk.state + of.start).add(p * PANEL);
            let border = Contexts { contexts, stride: scratch.context_stride() };
            let panel = values.add(p * VALUE_PANEL);
            multiply_panel::<L, ASK>(l, rows, of.len(), panel, PANEL, seen.next_multiple_of(2), &border);
        }
    }
}

/// Copies the values of the first `seen` positions of a block, with zeros behind them.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of a block's values.
#[inline(always)]
unsafe fn keep_seen<L: Lanes>(l: L, to: *mut u32, from: *const u32, seen: usize, head_dim: usize) {
    for p in 0..head_dim.div_ceil(PANEL) {
        for pair in 0..KV_BLOCK / 2 {
            for column in (0..PANEL).step_by(LANES) {
                let at = p * VALUE_PANEL + pair * PANEL + column;
                // SAFETY: the caller's.
                unsafe {
                    let (mut even, mut odd) = l.load_pairs(from.add(at));
                    if 2 * pair >= seen {
                        even = l.splat(0.0);
                    }
                    if 2 * pair + 1 >= seen {
                        odd = l.splat(0.0);
                    }
                    l.store_pairs(to.add(at), even, odd);
                }
            }
        }
    }
}
