//! The matrix product in registers: a few rows times a few vectors of columns of one panel.
//!
//! Every element has one chain of additions, over the pairs of `k` from front to back, whatever the tile's size: that
//! is why a row of GEMM equals GEMV and why neither threads nor tails show in a result. May not reorder that chain.
//!
//! Loops over the tile count indices: a closure or an iterator adapter that is not inlined into the function compiled
//! with the instruction set (which depends on how the crate is split for code generation) costs a factor of nine.
#![allow(clippy::needless_range_loop)]

use half::bf16;

use super::{
    lanes::{LANES, Lanes},
    pack::PANEL,
};

/// How far ahead cache lines of a panel are asked for, in u32.
pub(super) const AHEAD: isize = 1024;

/// What a product asks the caches for while it computes: nothing, the panel's lines ahead of its loads, or the left operand's rows
/// of the next tile, which lie too far apart for the CPU to foresee them. Flags.
pub(super) const NOTHING: u8 = 0;
pub(super) const PANEL_AHEAD: u8 = 1;
pub(super) const NEXT_ROWS: u8 = 2;

/// Pairs of one cache line.
const LINE: usize = 16;

/// Rows `[.., k]` of the left operand, `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: *const bf16,
    pub(super) stride: usize,
}

impl Rows {
    /// The rows from row `i` on.
    ///
    /// # Safety
    /// Row `i` exists or is one past the last.
    #[inline(always)]
    pub(super) unsafe fn from(self, i: usize) -> Rows {
        // SAFETY: the caller's.
        Rows { first: unsafe { self.first.add(i * self.stride) }, stride: self.stride }
    }
}

/// Adds the product of `M` rows and `V` vectors of columns to `acc`: `acc[m][v] += sum over k of a[m][k] * w[k][v]`.
///
/// With [`PANEL_AHEAD`] in `ASK`, the cache line `ahead` u32 from each load of the panel is asked for.
///
/// # Safety
/// `rows` has `M` rows of `k` elements; `panel` points to a vector of columns of a panel of `k` and `V` vectors do not
/// leave the panel's row.
#[inline(always)]
pub(super) unsafe fn multiply<L: Lanes, const M: usize, const V: usize, const ASK: u8>(
    l: L,
    rows: Rows,
    panel: *const u32,
    k: usize,
    ahead: isize,
    acc: &mut [[L::F; V]; M],
) {
    let mut sums = *acc;
    let step = if ASK & NEXT_ROWS != 0 { LINE } else { (k / 2).max(1) };
    for first in (0..k / 2).step_by(step) {
        if ASK & NEXT_ROWS != 0 && M == L::TILE_ROWS {
            for m in M..2 * M {
                l.prefetch(rows.first.wrapping_add(m * rows.stride + 2 * first).cast());
            }
        }
        for pair in first..(k / 2).min(first + step) {
            // SAFETY: `pair` is a pair of the panel and of every row.
            unsafe {
                let at = panel.add(pair * PANEL);
                if ASK & PANEL_AHEAD != 0 {
                    for v in 0..V {
                        l.prefetch_stream(at.wrapping_offset(ahead).wrapping_add(v * LANES));
                    }
                }
                let mut columns = [l.pairs(at); V];
                for v in 1..V {
                    columns[v] = l.pairs(at.add(v * LANES));
                }
                // From row to row by addition: with a multiple of the stride for each row the compiler computes all of them
                // ahead of the loop, loads all rows at once and spills the sums.
                let mut row = rows.first.add(2 * pair);
                for m in 0..M {
                    let a = l.pair(row);
                    row = row.wrapping_add(rows.stride);
                    for v in 0..V {
                        sums[m][v] = l.dot(sums[m][v], a, columns[v]);
                    }
                }
            }
        }
    }
    if k % 2 == 1 {
        // SAFETY: the last pair of the panel has a zero odd half; element `k - 1` is the last of every row.
        unsafe {
            let at = panel.add(k / 2 * PANEL);
            for m in 0..M {
                let a = l.half_pair(*rows.first.add(m * rows.stride + k - 1));
                for v in 0..V {
                    sums[m][v] = l.dot(sums[m][v], a, l.pairs(at.add(v * LANES)));
                }
            }
        }
    }
    *acc = sums;
}

/// A tile of zeros in registers. Zeros that the compiler knows become a call of `memset` and loads.
#[inline(always)]
pub(super) fn zeros<L: Lanes, const M: usize, const V: usize>(l: L) -> [[L::F; V]; M] {
    [[l.splat(std::hint::black_box(0.0)); V]; M]
}

/// What is done with a tile: where it starts from and where it goes.
pub(super) trait Border {
    /// The tile's values before the product, for rows from `row` on and columns from `column` on: zeros, where it does not
    /// go on with others.
    ///
    /// # Safety
    /// The tile is within what the border was made for.
    #[inline(always)]
    unsafe fn start<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        _row: usize,
        _column: usize,
    ) -> [[L::F; V]; M] {
        zeros(l)
    }

    /// Takes the finished tile.
    ///
    /// # Safety
    /// As [`Border::start`].
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    );
}

/// Multiplies `count` rows by one panel of `columns` columns, tile by tile; with [`PANEL_AHEAD`] in `ASK` the first tile asks for
/// the panel's lines, which are at hand for the others.
///
/// # Safety
/// `rows` has `count` rows of `k` elements, `panel` is a panel of `k`, `border` is made for `count` rows and `columns`.
#[inline(always)]
pub(super) unsafe fn multiply_panel<L: Lanes, const ASK: u8>(
    l: L,
    rows: Rows,
    count: usize,
    panel: *const u32,
    columns: usize,
    k: usize,
    border: &impl Border,
) {
    if count == 0 {
        return;
    }
    // SAFETY: `count` rows, later as many as are left; a strip takes no more than that.
    unsafe {
        let mut row = strip::<L, ASK>(l, rows, 0, count, panel, columns, k, border);
        while row < count {
            row += match ASK & NEXT_ROWS {
                NOTHING => strip::<L, NOTHING>(l, rows, row, count - row, panel, columns, k, border),
                _ => strip::<L, NEXT_ROWS>(l, rows, row, count - row, panel, columns, k, border),
            };
        }
    }
}

/// As many of the `left` rows from `row` on as fit the instruction set's largest tile; gives their number.
///
/// # Safety
/// As [`multiply_panel`], with `left` rows from `row` on.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "inlined: a struct of these would live in memory")]
unsafe fn strip<L: Lanes, const ASK: u8>(
    l: L,
    rows: Rows,
    row: usize,
    left: usize,
    panel: *const u32,
    columns: usize,
    k: usize,
    border: &impl Border,
) -> usize {
    // SAFETY: `left` rows are left, and a step takes no more than that.
    unsafe {
        if L::TILE_ROWS >= 12 && left >= 12 {
            step::<L, 12, 2, ASK>(l, rows, row, panel, columns, k, border)
        } else if L::TILE_ROWS >= 12 && left >= 8 {
            step::<L, 8, 2, ASK>(l, rows, row, panel, columns, k, border)
        } else if L::TILE_ROWS >= 12 && left >= 4 {
            step::<L, 4, 2, ASK>(l, rows, row, panel, columns, k, border)
        } else if L::TILE_ROWS >= 12 && left == 3 {
            step::<L, 3, 2, ASK>(l, rows, row, panel, columns, k, border)
        } else if L::TILE_ROWS >= 12 && left >= 2 {
            step::<L, 2, 2, ASK>(l, rows, row, panel, columns, k, border)
        } else if L::TILE_ROWS >= 4 && left >= 4 {
            step::<L, 4, 1, ASK>(l, rows, row, panel, columns, k, border)
        } else if left >= 2 {
            step::<L, 2, 1, ASK>(l, rows, row, panel, columns, k, border)
        } else {
            step::<L, 1, 2, ASK>(l, rows, row, panel, columns, k, border)
        }
    }
}

/// One tile of `M` rows over all columns of the panel; gives `M`.
#[inline(always)]
unsafe fn step<L: Lanes, const M: usize, const V: usize, const ASK: u8>(
    l: L,
    rows: Rows,
    row: usize,
    panel: *const u32,
    columns: usize,
    k: usize,
    border: &impl Border,
) -> usize {
    for column in (0..columns).step_by(V * LANES) {
        // SAFETY: the caller's; the panel is padded to PANEL columns, a multiple of the step.
        unsafe {
            let mut tile = border.start::<L, M, V>(l, row, column);
            multiply::<L, M, V, ASK>(l, rows.from(row), panel.add(column), k, AHEAD, &mut tile);
            border.finish(l, row, column, &tile);
        }
    }
    M
}
