//! The passes of attention over one block of keys and values.
//!
//! May not know threads: which rows a task takes never shows in its results.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use half::bf16;

use super::border::{Contexts, Scores};
use super::positions::{Layout, VALUE_PANEL};
use super::scratch::{self, Scratch};
use super::{Attention, DecodeAttention, Sight, Split};
use crate::compute::{
    exp::exp2,
    lanes::{LANES, Lanes, Lanewise},
    pack::PANEL,
    pool::Worker,
    scratch::LINE,
    tile::{NOTHING, PANEL_AHEAD, Rows, multiply_panel},
};

/// Positions of a block; part of the arithmetic, since each block rescales what came before.
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

/// # Safety
/// The task's pointers are valid for what it says, and nobody else writes its rows of `out`; the scratch is laid out
/// for its head_dim and at least its rows. `ASK` is what its products ask the caches for.
#[inline(always)]
unsafe fn attend<L: Lanes, const ASK: u8>(l: L, task: &Task, scratch: &Scratch) {
    let rows = task.bands * task.rows;
    scratch.reset(rows);
    let end = task.sight.of(task.rows - 1);
    for start in (0..end).step_by(KV_BLOCK) {
        if ASK == NOTHING && start + KV_BLOCK < end {
            ask_for_block(l, &task.positions, start / KV_BLOCK + 1);
        }
        let block = Block {
            start,
            len: KV_BLOCK.min(end - start),
            panels: task.positions.start.wrapping_add(task.positions.layout.block(0, start / KV_BLOCK)),
        };
        for band in 0..task.bands {
            let first = task.sight.first_to_see(start, 0, task.rows);
            for row in (first..task.rows).step_by(CHUNK) {
                let count = CHUNK.min(task.rows - row);
                // SAFETY: rows `row..row + count` of the band exist, and all see position `start`.
                unsafe {
                    scores::<L, ASK>(l, task, scratch, &block, band, row, count);
                    softmax(l, task, scratch, &block, band, row, count);
                    contexts::<L, ASK>(l, task, scratch, &block, band, row, count);
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

/// `scores[r][p] = q[r] · k[p]`, for the panels that a row sees any position of.
#[inline(always)]
unsafe fn scores<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    block: &Block,
    band: usize,
    row: usize,
    count: usize,
) {
    let layout = task.positions.layout;
    for p in 0..block.len.div_ceil(PANEL) {
        let first = task.sight.first_to_see(block.start + p * PANEL, row, row + count);
        // SAFETY: the caller's: these rows exist, and the panel is packed.
        unsafe {
            let at = band * task.band_stride + first * task.row_stride;
            let rows = Rows { first: task.q.add(at), stride: task.row_stride };
            let scores = scratch.scores().add((first - row) * KV_BLOCK + p * PANEL);
            let border = Scores { scores };
            let panel = block.panels.add(p * layout.key_panel());
            multiply_panel::<L, ASK>(l, rows, row + count - first, panel, PANEL, layout.head_dim, &border);
        }
    }
}

/// Turns scores into probabilities relative to the running maximum, and updates maximum, sum and rescaling factor.
#[inline(always)]
unsafe fn softmax<L: Lanes>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    block: &Block,
    band: usize,
    row: usize,
    count: usize,
) {
    // Of a power of two, which is what softmax is made of.
    let factor = task.scale * std::f32::consts::LOG2_E;
    // First all maxima, then all exponentials: within a row one waits for the other, between rows nothing does.
    for base in (0..count).step_by(LANES) {
        let rows = LANES.min(count - base);
        // SAFETY: rows `base..base + rows` of the chunk have scores; the state of the rows and the scratch's arrays are padded by
        // a vector. Lanes behind them are other rows': their maxima and sums stay, but for a maximum that is NaN, and then their
        // sums are NaN already.
        unsafe {
            for i in 0..rows {
                let seen = block.seen(task.sight.of(row + base + i));
                let top = top_of_row(l, scratch.scores().add((base + i) * KV_BLOCK), seen);
                l.store(scratch.partial().add(i * LANES), top);
            }
            let top = l.keep_first(l.largest_of_each(scratch.partial()), rows, f32::NEG_INFINITY);
            let state = band * task.rows + row + base;
            let running = l.load(scratch.maximum().add(state));
            // A NaN that `max` drops comes back with its own exponential below.
            let new = l.max(running, top);
            l.store(scratch.maximum().add(state), new);
            let shift = l.mul(l.sub(running, new), l.splat(factor));
            l.store(scratch.rescale().add(base), exp2(l, shift));
        }
    }
    for base in (0..count).step_by(LANES) {
        let rows = LANES.min(count - base);
        // SAFETY: as above; the rows have probabilities, too.
        unsafe {
            for i in 0..rows {
                let seen = block.seen(task.sight.of(row + base + i));
                let scores = scratch.scores().add((base + i) * KV_BLOCK);
                let to = scratch.probabilities().add((base + i) * KV_BLOCK);
                let top = *scratch.maximum().add(band * task.rows + row + base + i);
                l.store(scratch.partial().add(i * LANES), exponentials(l, scores, to, seen, factor, top));
            }
            let sums = l.keep_first(l.sum_of_each(scratch.partial()), rows, 0.0);
            let rescale = l.keep_first(l.load(scratch.rescale().add(base)), rows, 1.0);
            let total = scratch.total().add(band * task.rows + row + base);
            l.store(total, l.add(l.mul(l.load(total), rescale), sums));
        }
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
                    p = l.keep_first(probability(l, scores.add(v * LANES), factor, top), seen - v * LANES, 0.0);
                }
                sum = l.add(sum, p);
                l.store_bf16(to.add(v * LANES), p);
            }
            return sum;
        }
        let mut s = [l.splat(0.0); VECS];
        for v in 0..VECS {
            s[v] = probability(l, scores.add(v * LANES), factor, top);
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

/// `2^(factor * (score - top))`.
///
/// # Safety
/// `scores` is valid for reads of LANES elements.
#[inline(always)]
unsafe fn probability<L: Lanes>(l: L, scores: *const f32, factor: f32, top: f32) -> L::F {
    // The difference first: of large numbers, `factor * score - factor * top` is far from 0 at the top itself.
    // SAFETY: the caller's.
    exp2(l, l.mul(l.sub(unsafe { l.load(scores) }, l.splat(top)), l.splat(factor)))
}

/// `context[r] = rescale[r] * context[r] + probabilities[r] · v`.
#[inline(always)]
unsafe fn contexts<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    block: &Block,
    band: usize,
    row: usize,
    count: usize,
) {
    // No row of the chunk sees more than the last; what the others do not see has probability 0, and so has what stands beside
    // an odd last one.
    let seen = block.seen(task.sight.of(row + count - 1));
    let read = seen.next_multiple_of(2).min(task.positions.count - block.start);
    let partial = block.seen(task.sight.of(row)) < read;
    let layout = task.positions.layout;
    let values = block.panels.wrapping_add(layout.keys_len());
    // SAFETY: there is a flag for each block.
    let finite = task.positions.finite.is_none_or(|finite| unsafe { *finite.add(block.start / KV_BLOCK) } != 0);
    if partial && !finite {
        // 0 * NaN is NaN: each row gets its own copy of the values, zero where it does not see them.
        for i in 0..count {
            let seen = block.seen(task.sight.of(row + i));
            // SAFETY: the caller's.
            unsafe {
                keep_seen(l, scratch.spare(), values, seen, layout.head_dim);
                product::<L, ASK>(l, task, scratch, band * task.rows + row, i, 1, seen, scratch.spare());
            }
        }
    } else {
        // SAFETY: the caller's.
        unsafe { product::<L, ASK>(l, task, scratch, band * task.rows + row, 0, count, seen, values) };
    }
}

/// The product for rows `i..i + count` of the chunk that starts at row `base` of the scratch, over `seen` positions.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call site's loop body, twice")]
unsafe fn product<L: Lanes, const ASK: u8>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    base: usize,
    i: usize,
    count: usize,
    seen: usize,
    values: *const u32,
) {
    for p in 0..task.positions.layout.head_dim.div_ceil(PANEL) {
        // SAFETY: the caller's: the rows exist in the scratch, the panels are packed. Positions come in pairs: what stands beside an
        // odd last one has probability 0, and its value is 0 or, as `contexts` sees to it, finite.
        unsafe {
            let rows = Rows { first: scratch.probabilities().add(i * KV_BLOCK), stride: KV_BLOCK };
            let panel = values.add(p * VALUE_PANEL);
            let border = Contexts {
                contexts: scratch.context(base + i).add(p * PANEL),
                stride: scratch.context_stride(),
                rescale: scratch.rescale().add(i),
            };
            multiply_panel::<L, ASK>(l, rows, count, panel, PANEL, seen.next_multiple_of(2), &border);
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
