//! The passes of attention over one block of keys and values, and over the stages.
//!
//! May not know threads: which rows a task takes never shows in its results.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use half::bf16;

use super::Attention;
use super::border::{Contexts, Scores};
use super::scratch::Scratch;
use super::state::{LOWEST, State, factor};
use crate::compute::{
    attention::{Sight, Split, pack_values},
    lanes::{LANES, Lanes, Lanewise},
    npu2::bfp16::{quantise, quantise_panel, quantise_row},
    pack::{PANEL, pack_panel},
    pool::Worker,
    tile::{NOTHING, Rows, multiply_panel},
};

/// Positions of a block, the kernel's `lkp`.
pub(super) const KV_BLOCK: usize = 64;
/// Elements of a head that one product takes; the score is rounded after each.
const HEAD_PIECE: usize = 64;
/// Cores of the cascade.
const STAGES: usize = 4;
/// Tokens of a task; all heads of the group share its packed blocks.
const Q_BLOCK: usize = 48;
/// Rows that go through scores, softmax and context while their scores are in the L1 cache.
pub(super) const CHUNK: usize = 24;

/// Vectors of a row of scores.
const VECS: usize = KV_BLOCK / LANES;

/// One worker's share.
pub(super) struct Share<'a> {
    pub(super) kernel: &'a Attention,
    pub(super) rows: usize,
    pub(super) worker: &'a Worker<'a>,
}

/// Rows of queries of one kv head, and the positions they see.
struct Task {
    /// Row 0 of head 0 of the group; heads stand side by side.
    q: *const bf16,
    out: *mut bf16,
    heads: usize,
    rows: usize,
    row_stride: usize,
    k: *const bf16,
    v: *const bf16,
    kv_stride: usize,
    /// Positions there are.
    positions: usize,
    head_dim: usize,
    /// log2(e) times the scale, in bf16.
    c: f32,
    sight: Sight,
}

impl Lanewise for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Attention { q, k, v, out, heads, kv_heads, head_dim, scale, causal, .. } = *self.kernel;
        let group = heads / kv_heads;
        let (rows, block) = (self.rows, Q_BLOCK);
        let split = Split { rows, first: 0, seq: rows, block, heads, kv_heads, head_dim, causal };
        let scratch = Scratch::take(head_dim, group * Q_BLOCK);
        while let Some(piece) = split.piece(self.worker.claim()) {
            // SAFETY: the piece's tokens, the heads of its group and its kv head exist; the rows of these heads are written
            // by this task only.
            unsafe {
                let task = Task {
                    q: q.ptr().add(piece.q),
                    out: out.ptr().add(piece.q),
                    heads: group,
                    rows: piece.rows,
                    row_stride: heads * head_dim,
                    k: k.ptr().add(piece.kv_head * head_dim),
                    v: v.ptr().add(piece.kv_head * head_dim),
                    kv_stride: kv_heads * head_dim,
                    positions: self.rows,
                    head_dim,
                    c: bf16::from_f32(scale * std::f32::consts::LOG2_E).to_f32(),
                    sight: piece.sight,
                };
                attend(l, &task, &scratch);
            }
        }
    }
}

/// # Safety
/// The task's pointers are valid for what it says, and nobody else writes its rows of `out`; the scratch is laid out
/// for its head_dim and at least its rows.
#[inline(always)]
unsafe fn attend<L: Lanes>(l: L, task: &Task, scratch: &Scratch) {
    let rows = task.heads * task.rows;
    assert!(rows <= scratch.rows);
    for head in 0..task.heads {
        for row in 0..task.rows {
            // SAFETY: row `row` of the head exists, and the scratch has a query for it.
            unsafe {
                let from = task.q.add(head * task.head_dim + row * task.row_stride);
                let to = scratch.queries.add((head * task.rows + row) * scratch.query_stride);
                quantise_row(l, from, to, task.head_dim);
            }
        }
    }
    let end = task.sight.of(task.rows - 1);
    let stage_len = task.positions.div_ceil(STAGES * KV_BLOCK) * KV_BLOCK;
    let last = (end - 1) / stage_len;
    let [mut own, mut later] = scratch.states;
    // A stage none of whose keys are seen would leave the others as they are.
    for stage in (0..=last).rev() {
        // SAFETY: the states hold the task's rows, rounded up to whole vectors.
        unsafe {
            own.reset(rows);
            for start in (stage * stage_len..end.min((stage + 1) * stage_len)).step_by(KV_BLOCK) {
                pass(l, task, scratch, &own, start, end);
            }
            if stage < last {
                own.merge(l, &later, rows, task.c);
            }
        }
        std::mem::swap(&mut own, &mut later);
    }
    for head in 0..task.heads {
        for row in 0..task.rows {
            let at = head * task.head_dim + row * task.row_stride;
            // SAFETY: row `row` of the head exists in `out`.
            unsafe { later.write_row(l, head * task.rows + row, task.out.add(at), task.head_dim) };
        }
    }
}

struct Block {
    start: usize,
    /// Positions that any row of the task sees.
    len: usize,
    /// Positions there are, of which the values' exponents are made.
    filled: usize,
    /// Whether no value is infinite or NaN.
    finite: bool,
}

impl Block {
    /// Positions of the block that a row with `seen` positions sees.
    #[inline(always)]
    fn seen(&self, seen: usize) -> usize {
        (seen - self.start).min(self.len)
    }
}

/// One block of keys and values past all rows that see any of it.
///
/// # Safety
/// As [`attend`]; positions `start..end` exist.
#[inline(always)]
unsafe fn pass<L: Lanes>(l: L, task: &Task, scratch: &Scratch, state: &State, start: usize, end: usize) {
    let len = KV_BLOCK.min(end - start);
    let filled = KV_BLOCK.min(task.positions - start);
    // SAFETY: positions `start..start + filled` exist; the scratch holds a block.
    let finite = unsafe {
        let (k, v) = (task.k.add(start * task.kv_stride), task.v.add(start * task.kv_stride));
        for p in 0..len.div_ceil(PANEL) {
            let (panel, rows) = (scratch.key_panel(p), k.add(p * PANEL * task.kv_stride));
            pack_panel(l, panel, rows, task.kv_stride, PANEL.min(len - p * PANEL), task.head_dim);
            quantise_panel(l, panel, panel, task.head_dim / 2);
        }
        let finite = fill_values(l, scratch.value_panel(0), v, task.kv_stride, filled, task.head_dim);
        quantise_values(l, scratch.value_panel(0), task.head_dim);
        finite
    };
    let block = Block { start, len, filled, finite };
    for head in 0..task.heads {
        let first = task.sight.first_to_see(start, 0, task.rows);
        for row in (first..task.rows).step_by(CHUNK) {
            let count = CHUNK.min(task.rows - row);
            // SAFETY: rows `row..row + count` of the head exist, and all see position `start`.
            unsafe {
                scores(l, task, scratch, &block, head, row, count);
                softmax(l, task, scratch, state, &block, head * task.rows + row, row, count);
                contexts(l, task, scratch, state, &block, head * task.rows + row, row, count);
            }
        }
    }
}

/// Quantises packed values along the positions.
///
/// # Safety
/// `panels` is what [`fill_values`] wrote.
#[inline(always)]
unsafe fn quantise_values<L: Lanes>(l: L, panels: *mut u32, head_dim: usize) {
    for p in 0..head_dim.div_ceil(PANEL) {
        // SAFETY: the caller's.
        unsafe {
            let panel = panels.add(p * (KV_BLOCK / 2 * PANEL));
            quantise_panel(l, panel, panel, KV_BLOCK / 2);
        }
    }
}

/// Makes infinity and NaN 0 in packed values at and behind position `seen`.
///
/// # Safety
/// As [`quantise_values`].
unsafe fn clear(panels: *mut u32, head_dim: usize, seen: usize) {
    const EXPONENT: u32 = 0x7f80;
    for p in 0..head_dim.div_ceil(PANEL) {
        for position in seen..KV_BLOCK {
            for column in 0..PANEL {
                // SAFETY: the caller's: KV_BLOCK positions of PANEL columns each.
                unsafe {
                    let at = panels.add((p * (KV_BLOCK / 2) + position / 2) * PANEL + column);
                    let shift = 16 * (position % 2);
                    if *at >> shift & EXPONENT == EXPONENT {
                        *at &= !(0xffff << shift);
                    }
                }
            }
        }
    }
}

/// `scores[r][p] = q[r] · k[p]`, for the panels that a row sees any position of.
#[inline(always)]
unsafe fn scores<L: Lanes>(l: L, task: &Task, scratch: &Scratch, block: &Block, head: usize, row: usize, count: usize) {
    for p in 0..block.len.div_ceil(PANEL) {
        let first = task.sight.first_to_see(block.start + p * PANEL, row, row + count);
        for piece in (0..task.head_dim).step_by(HEAD_PIECE) {
            // SAFETY: the caller's: these rows exist, and the panel is packed.
            unsafe {
                let at = (head * task.rows + first) * scratch.query_stride + piece;
                let rows = Rows { first: scratch.queries.add(at), stride: scratch.query_stride };
                let scores = scratch.scores.add((first - row) * KV_BLOCK + p * PANEL);
                let border = Scores { scores, fresh: piece == 0 };
                let panel = scratch.key_panel(p).add(piece / 2 * PANEL);
                let len = HEAD_PIECE.min(task.head_dim - piece);
                multiply_panel::<L, NOTHING>(l, rows, row + count - first, panel, PANEL, len, &border);
            }
        }
    }
}

/// Turns scores into quantised probabilities relative to the running maximum, and updates maximum, sum and rescaling
/// factor. `base` is row `row` of the task in the state.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call site's loop body")]
unsafe fn softmax<L: Lanes>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    state: &State,
    block: &Block,
    base: usize,
    row: usize,
    count: usize,
) {
    const PADDED: usize = CHUNK.next_multiple_of(LANES);
    let mut shift = [0.0f32; PADDED];
    let mut sums = [0.0f32; PADDED];
    let mut totals = [0.0f32; PADDED];
    for i in 0..count {
        let seen = block.seen(task.sight.of(row + i));
        // SAFETY: row `i` of the chunk has KV_BLOCK scores and probabilities; it has a running maximum.
        unsafe {
            let scores = scratch.scores.add(i * KV_BLOCK);
            let mut s = [l.load(scores); VECS];
            for v in 1..VECS {
                s[v] = l.load(scores.add(v * LANES));
            }
            if seen < KV_BLOCK {
                for v in 0..VECS {
                    s[v] = l.keep_first(s[v], seen.saturating_sub(v * LANES), f32::NEG_INFINITY);
                }
            }
            // A NaN that `max` drops comes back with its own exponential below.
            let mut top = s[0];
            for v in 1..VECS {
                top = l.max(top, s[v]);
            }
            let top = l.largest(top);
            let top = if top > LOWEST { top } else { LOWEST };
            let running = state.maximum.add(base + i);
            let new = if *running > top { *running } else { top };
            shift[i] = *running - new;
            *running = new;
            totals[i] = *state.total.add(base + i);
            let new = l.splat(new);
            for v in 0..VECS {
                s[v] = factor(l, l.sub(s[v], new), task.c);
            }
            let mut sum = s[0];
            for v in 1..VECS {
                sum = l.add(sum, s[v]);
            }
            sums[i] = l.sum(sum);
            for v in 0..VECS {
                l.store_bf16(scratch.probabilities.add(i * KV_BLOCK + v * LANES), quantise(l, s[v]));
            }
        }
    }
    for i in (0..count).step_by(LANES) {
        // SAFETY: the arrays and the factors are padded to whole vectors.
        unsafe {
            let rescale = factor(l, l.load(shift.as_ptr().add(i)), task.c);
            l.store(scratch.rescale.add(i), rescale);
            let sum = l.round_nearest(l.load(sums.as_ptr().add(i)));
            let total = l.round_nearest(l.add(l.mul(l.load(totals.as_ptr().add(i)), rescale), sum));
            l.store(totals.as_mut_ptr().add(i), total);
        }
    }
    for i in 0..count {
        // SAFETY: the state has a sum for each row.
        unsafe { *state.total.add(base + i) = totals[i] };
    }
}

/// `context[r] = rescale[r] * context[r] + probabilities[r] · v`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call site's loop body")]
unsafe fn contexts<L: Lanes>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    state: &State,
    block: &Block,
    base: usize,
    row: usize,
    count: usize,
) {
    if !block.finite && block.seen(task.sight.of(row)) < block.filled {
        // 0 * NaN is NaN: each row gets its own copy of the values, without what is not finite and not seen.
        for i in 0..count {
            let seen = block.seen(task.sight.of(row + i));
            // SAFETY: the caller's; the spare panels hold a block.
            unsafe {
                let v = task.v.add(block.start * task.kv_stride);
                fill_values(l, scratch.spare_panel(0), v, task.kv_stride, block.filled, task.head_dim);
                clear(scratch.spare_panel(0), task.head_dim, seen);
                quantise_values(l, scratch.spare_panel(0), task.head_dim);
                product(l, task, scratch, state, base + i, i, 1, seen, true);
            }
        }
    } else {
        // No row of the chunk sees more than the last; what the others do not see has probability 0.
        let seen = block.seen(task.sight.of(row + count - 1));
        // SAFETY: the caller's.
        unsafe { product(l, task, scratch, state, base, 0, count, seen, false) };
    }
}

/// The product for rows `i..i + count` of the chunk, which are those of the state from `base` on, over `seen` positions.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call site's loop body, twice")]
unsafe fn product<L: Lanes>(
    l: L,
    task: &Task,
    scratch: &Scratch,
    state: &State,
    base: usize,
    i: usize,
    count: usize,
    seen: usize,
    spare: bool,
) {
    for p in 0..task.head_dim.div_ceil(PANEL) {
        // SAFETY: the caller's: the rows exist in the scratch, the panels are packed. Positions come in pairs, the odd
        // one out has probability 0 and value 0 or finite.
        unsafe {
            let rows = Rows { first: scratch.probabilities.add(i * KV_BLOCK), stride: KV_BLOCK };
            let panel = if spare { scratch.spare_panel(p) } else { scratch.value_panel(p) };
            let border = Contexts {
                contexts: state.contexts.add(base * state.stride + p * PANEL),
                stride: state.stride,
                rescale: scratch.rescale.add(i),
            };
            multiply_panel::<L, NOTHING>(l, rows, count, panel, PANEL, seen.next_multiple_of(2), &border);
        }
    }
}

/// Packs the values of a block's first `filled` positions, zeros behind them; gives whether all are finite.
///
/// # Safety
/// `panels` is valid for `head_dim.div_ceil(PANEL)` panels of KV_BLOCK positions, `rows` for reads of `filled` rows of `head_dim`
/// elements, `stride` apart; `filled <= KV_BLOCK`.
#[inline(always)]
unsafe fn fill_values<L: Lanes>(
    l: L,
    panels: *mut u32,
    rows: *const bf16,
    stride: usize,
    filled: usize,
    head_dim: usize,
) -> bool {
    const PANEL_LEN: usize = KV_BLOCK / 2 * PANEL;
    // SAFETY: the caller's.
    unsafe {
        for p in 0..head_dim.div_ceil(PANEL) {
            let packed = filled.div_ceil(2) * PANEL;
            panels.add(p * PANEL_LEN + packed).write_bytes(0, PANEL_LEN - packed);
        }
        pack_values(l, (panels, PANEL_LEN), (rows, stride), head_dim, (0, filled))
    }
}
