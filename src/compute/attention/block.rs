//! The passes of attention over one block of keys and values.
//!
//! May not know threads: which rows a task takes never shows in its results.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use half::bf16;

use super::{Attention, DecodeAttention, PackedCache, Sight, Split};
use crate::compute::{
    exp::exp2,
    lanes::{LANES, Lanes, Lanewise},
    pack::{PANEL, pack_panel},
    pool::Worker,
    tile::{NOTHING, PANEL_AHEAD, Rows, multiply_panel},
};

use super::border::{Contexts, Scores};
use super::scratch::{Layout, Scratch};

/// Positions of a block; part of the arithmetic, since each block rescales what came before.
pub(super) const KV_BLOCK: usize = 128;
/// Tokens of a task; all heads of the group share its packed blocks. Long sequences take larger ones: there are tasks enough.
const Q_BLOCK: usize = 96;
const LONG_Q_BLOCK: usize = 192;
/// Tokens from which a sequence is long.
const LONG: usize = 1024;
/// Rows that go through scores, softmax and context while their scores are in the L1 cache.
pub(super) const CHUNK: usize = 24;

/// Rows of queries of one kv head, and the positions they see.
struct Task<P> {
    /// Row 0 of band 0; a band is one head (prefill) or all heads of the one token (decode).
    q: *const bf16,
    out: *mut bf16,
    bands: usize,
    band_stride: usize,
    rows: usize,
    row_stride: usize,
    positions: P,
    head_dim: usize,
    scale: f32,
    sight: Sight,
}

/// Where keys and values come from.
trait Positions {
    /// What their products ask the caches for.
    const ASK: u8;

    /// The block of positions that starts at `start`, a multiple of KV_BLOCK, packed; `end` is where the task's positions end.
    ///
    /// # Safety
    /// The positions below `end` exist, and `start` is one of them; the scratch is laid out for `head_dim`.
    unsafe fn block<L: Lanes>(&self, l: L, scratch: &Scratch, head_dim: usize, start: usize, end: usize) -> Block;

    /// The values of the first `seen` positions of a block in the scratch's spare panels, zeros behind them.
    ///
    /// # Safety
    /// As [`Positions::block`]; not all rows see the same.
    unsafe fn spare<L: Lanes>(&self, l: L, scratch: &Scratch, head_dim: usize, start: usize, seen: usize);
}

/// Rows `stride` elements apart.
struct Plain {
    k: *const bf16,
    v: *const bf16,
    stride: usize,
}

/// One head of a cache.
struct Cached<'a> {
    cache: &'a PackedCache,
    head: usize,
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
        let Attention { q, k, v, out, heads, kv_heads, head_dim, scale, causal, .. } = *self.kernel;
        let group = heads / kv_heads;
        let block = if self.rows < LONG { Q_BLOCK } else { LONG_Q_BLOCK };
        let split = Split { rows: self.rows, block, heads, kv_heads, head_dim, causal };
        let scratch = Scratch::take(Layout::new(head_dim, group * block));
        while let Some(piece) = split.piece(self.worker.claim()) {
            // SAFETY: the piece's tokens, the heads of its group and its kv head exist; the rows of these heads are written
            // by this task only.
            unsafe {
                let task = Task {
                    q: q.ptr().add(piece.q),
                    out: out.ptr().add(piece.q),
                    bands: group,
                    band_stride: head_dim,
                    rows: piece.rows,
                    row_stride: heads * head_dim,
                    positions: Plain {
                        k: k.ptr().add(piece.kv),
                        v: v.ptr().add(piece.kv),
                        stride: kv_heads * head_dim,
                    },
                    head_dim,
                    scale,
                    sight: piece.sight,
                };
                attend(l, &task, &scratch);
            }
        }
    }
}

impl Lanewise for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let DecodeAttention { q, cache, out, heads, scale, .. } = *self.kernel;
        let (kv_heads, head_dim) = (cache.kv_heads(), cache.head_dim());
        let group = heads / kv_heads;
        let scratch = Scratch::take(Layout::new(head_dim, group));
        loop {
            let head = self.worker.claim();
            if head >= kv_heads {
                break;
            }
            // SAFETY: the heads of the group exist in `q` and `out` and are written by this task only.
            unsafe {
                let task = Task {
                    q: q.ptr().add(head * group * head_dim),
                    out: out.ptr().add(head * group * head_dim),
                    bands: 1,
                    band_stride: 0,
                    rows: group,
                    row_stride: head_dim,
                    positions: Cached { cache, head },
                    head_dim,
                    scale,
                    sight: Sight { seen: cache.len(), step: 0 },
                };
                attend(l, &task, &scratch);
            }
        }
    }
}

impl Positions for Plain {
    const ASK: u8 = NOTHING;

    #[inline(always)]
    unsafe fn block<L: Lanes>(&self, l: L, scratch: &Scratch, head_dim: usize, start: usize, end: usize) -> Block {
        let len = KV_BLOCK.min(end - start);
        self.ask_for_rows(l, head_dim, start + len, end.min(start + len + KV_BLOCK));
        // SAFETY: the caller's; the scratch holds a block.
        let finite = unsafe {
            let (k, v) = (self.k.add(start * self.stride), self.v.add(start * self.stride));
            for p in 0..len.div_ceil(PANEL) {
                let rows = k.add(p * PANEL * self.stride);
                let columns = PANEL.min(len - p * PANEL);
                pack_panel(l, scratch.keys().add(p * key_panel(head_dim)), rows, self.stride, columns, head_dim);
            }
            pack_values::<L, KV_BLOCK>(l, scratch.values(), v, self.stride, len, head_dim)
        };
        Block { start, len, keys: scratch.keys(), values: scratch.values(), finite }
    }

    #[inline(always)]
    unsafe fn spare<L: Lanes>(&self, l: L, scratch: &Scratch, head_dim: usize, start: usize, seen: usize) {
        // SAFETY: the caller's; the spare panels hold a block.
        unsafe {
            let v = self.v.add(start * self.stride);
            pack_values::<L, KV_BLOCK>(l, scratch.spare(), v, self.stride, seen, head_dim);
        }
    }
}

impl Plain {
    /// Asks for the keys and values of positions `from..to`: their rows lie too far apart for the CPU to foresee them.
    #[inline(always)]
    fn ask_for_rows<L: Lanes>(&self, l: L, head_dim: usize, from: usize, to: usize) {
        const LINE: usize = 64 / size_of::<bf16>();
        for position in from..to {
            for first in (0..head_dim).step_by(LINE) {
                let at = position * self.stride + first;
                l.prefetch(self.k.wrapping_add(at).cast());
                l.prefetch(self.v.wrapping_add(at).cast());
            }
        }
    }
}

impl Positions for Cached<'_> {
    const ASK: u8 = PANEL_AHEAD;

    #[inline(always)]
    unsafe fn block<L: Lanes>(&self, _: L, _: &Scratch, _: usize, start: usize, end: usize) -> Block {
        let (keys, values) = self.cache.block(self.head, start / KV_BLOCK);
        Block { start, len: KV_BLOCK.min(end - start), keys, values, finite: false }
    }

    #[inline(always)]
    unsafe fn spare<L: Lanes>(&self, _: L, _: &Scratch, _: usize, _: usize, _: usize) {
        unreachable!("the heads of one token see the same")
    }
}

/// u32 of a panel of packed keys, PANEL positions.
#[inline(always)]
fn key_panel(head_dim: usize) -> usize {
    head_dim / 2 * PANEL
}

/// # Safety
/// The task's pointers are valid for what it says, and nobody else writes its rows of `out`; the scratch is laid out
/// for its head_dim and at least its rows.
#[inline(always)]
unsafe fn attend<L: Lanes, P: Positions>(l: L, task: &Task<P>, scratch: &Scratch) {
    let rows = task.bands * task.rows;
    scratch.reset(rows);
    let end = task.sight.of(task.rows - 1);
    for start in (0..end).step_by(KV_BLOCK) {
        // SAFETY: the positions that the last row sees exist.
        let block = unsafe { task.positions.block(l, scratch, task.head_dim, start, end) };
        for band in 0..task.bands {
            let first = task.sight.first_to_see(start, 0, task.rows);
            for row in (first..task.rows).step_by(CHUNK) {
                let count = CHUNK.min(task.rows - row);
                // SAFETY: rows `row..row + count` of the band exist, and all see position `start`.
                unsafe {
                    scores(l, task, scratch, &block, band, row, count);
                    softmax(l, task, scratch, &block, band, row, count);
                    contexts(l, task, scratch, &block, band, row, count);
                }
            }
        }
    }
    for band in 0..task.bands {
        for row in 0..task.rows {
            let at = band * task.band_stride + row * task.row_stride;
            // SAFETY: row `row` of the band exists in `out`.
            unsafe { scratch.write_row(l, band * task.rows + row, task.out.add(at), task.head_dim) };
        }
    }
}

/// Packed positions: panels of keys with pairs along head_dim, panels of values with pairs along the positions.
struct Block {
    start: usize,
    len: usize,
    keys: *const u32,
    values: *const u32,
    /// Whether no value is known to be infinite or NaN.
    finite: bool,
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
unsafe fn scores<L: Lanes, P: Positions>(
    l: L,
    task: &Task<P>,
    scratch: &Scratch,
    block: &Block,
    band: usize,
    row: usize,
    count: usize,
) {
    for p in 0..block.len.div_ceil(PANEL) {
        let first = task.sight.first_to_see(block.start + p * PANEL, row, row + count);
        // SAFETY: the caller's: these rows exist, and the panel is packed.
        unsafe {
            let at = band * task.band_stride + first * task.row_stride;
            let rows = Rows { first: task.q.add(at), stride: task.row_stride };
            let scores = scratch.scores().add((first - row) * KV_BLOCK + p * PANEL);
            let border = Scores { scores };
            let panel = block.keys.add(p * key_panel(task.head_dim));
            match P::ASK {
                NOTHING => {
                    multiply_panel::<L, NOTHING>(l, rows, row + count - first, panel, PANEL, task.head_dim, &border)
                }
                _ => {
                    multiply_panel::<L, PANEL_AHEAD>(l, rows, row + count - first, panel, PANEL, task.head_dim, &border)
                }
            }
        }
    }
}

/// Turns scores into probabilities relative to the running maximum, and updates maximum, sum and rescaling factor.
#[inline(always)]
unsafe fn softmax<L: Lanes, P>(
    l: L,
    task: &Task<P>,
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
unsafe fn contexts<L: Lanes, P: Positions>(
    l: L,
    task: &Task<P>,
    scratch: &Scratch,
    block: &Block,
    band: usize,
    row: usize,
    count: usize,
) {
    // No row of the chunk sees more than the last; what the others do not see has probability 0.
    let seen = block.seen(task.sight.of(row + count - 1));
    let partial = block.seen(task.sight.of(row)) < seen;
    if partial && !block.finite {
        // 0 * NaN is NaN: each row gets its own copy of the values, zero where it does not see them.
        for i in 0..count {
            let seen = block.seen(task.sight.of(row + i));
            // SAFETY: the caller's.
            unsafe {
                task.positions.spare(l, scratch, task.head_dim, block.start, seen);
                product(l, task, scratch, band * task.rows + row, i, 1, seen, scratch.spare());
            }
        }
    } else {
        // SAFETY: the caller's.
        unsafe { product(l, task, scratch, band * task.rows + row, 0, count, seen, block.values) };
    }
}

/// The product for rows `i..i + count` of the chunk that starts at row `base` of the scratch, over `seen` positions.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call site's loop body, twice")]
unsafe fn product<L: Lanes, P: Positions>(
    l: L,
    task: &Task<P>,
    scratch: &Scratch,
    base: usize,
    i: usize,
    count: usize,
    seen: usize,
    values: *const u32,
) {
    for p in 0..task.head_dim.div_ceil(PANEL) {
        // SAFETY: the caller's: the rows exist in the scratch, the panels are packed. Positions come in pairs, the odd
        // one out has probability 0 and value 0 or finite.
        unsafe {
            let rows = Rows { first: scratch.probabilities().add(i * KV_BLOCK), stride: KV_BLOCK };
            let panel = values.add(p * (KV_BLOCK / 2 * PANEL));
            let border = Contexts {
                contexts: scratch.context(base + i).add(p * PANEL),
                stride: scratch.context_stride(),
                rescale: scratch.rescale().add(i),
            };
            match P::ASK {
                NOTHING => {
                    multiply_panel::<L, NOTHING>(l, rows, count, panel, PANEL, seen.next_multiple_of(2), &border)
                }
                _ => multiply_panel::<L, PANEL_AHEAD>(l, rows, count, panel, PANEL, seen.next_multiple_of(2), &border),
            }
        }
    }
}

/// Packs `len` rows of values, pairs along the positions, zero behind them; gives whether all are finite.
///
/// # Safety
/// `panels` is valid for `head_dim.div_ceil(PANEL)` panels of BLOCK positions, `rows` for reads of `len` rows of
/// `head_dim` elements, `stride` apart; `len <= BLOCK`, which is even.
#[inline(always)]
pub(in crate::compute) unsafe fn pack_values<L: Lanes, const BLOCK: usize>(
    l: L,
    panels: *mut u32,
    rows: *const bf16,
    stride: usize,
    len: usize,
    head_dim: usize,
) -> bool {
    // The largest power of two, lane by lane: infinite where a value is infinite or NaN.
    let mut top = l.splat(0.0);
    for p in 0..head_dim.div_ceil(PANEL) {
        for pair in 0..BLOCK / 2 {
            for column in (0..PANEL).step_by(LANES) {
                let first = p * PANEL + column;
                let columns = head_dim.saturating_sub(first).min(LANES);
                // SAFETY: the caller's: `columns` elements from `first` on of the rows below `len`, and a vector of
                // the panel.
                unsafe {
                    let row = |r: usize| match r < len {
                        true => load_padded(l, rows.add(r * stride + first), columns),
                        false => l.splat(0.0),
                    };
                    let (even, odd) = (row(2 * pair), row(2 * pair + 1));
                    top = l.max(top, l.max(l.power(even), l.power(odd)));
                    l.store_pairs(panels.add((p * (BLOCK / 2) + pair) * PANEL + column), even, odd);
                }
            }
        }
    }
    l.largest(top) < f32::INFINITY
}

/// `columns` elements, zeros behind them.
///
/// # Safety
/// `p` is valid for reads of `columns` elements, of which there are at most [`LANES`].
#[inline(always)]
pub(super) unsafe fn load_padded<L: Lanes>(l: L, p: *const bf16, columns: usize) -> L::F {
    // SAFETY: the caller's.
    unsafe {
        match columns {
            LANES => l.load_bf16(p),
            0 => l.splat(0.0),
            _ => {
                let mut whole = [bf16::ZERO; LANES];
                whole.as_mut_ptr().copy_from_nonoverlapping(p, columns);
                l.load_bf16(whole.as_ptr())
            }
        }
    }
}
