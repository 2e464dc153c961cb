//! Linear layers: matrix times packed weight (prefill) and vector times packed weight (decode).
//!
//! May not touch the order of additions, which [`tile`](super::tile) fixes: a row of GEMM equals GEMV bit for bit.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use std::borrow::Borrow;

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pack::{PANEL, PackedWeight},
    pool::{Kernel, Worker},
    scratch,
    tile::{AHEAD, Border, NEXT_ROWS, PANEL_AHEAD, Rows, multiply, multiply_panel},
    view::{Dst, Src},
};

/// Where a product goes: rounded once to bf16, or as the f32 it was summed in.
#[derive(Debug, Clone, Copy)]
pub enum Out {
    /// Rounded to nearest even.
    Bf16(Dst<bf16>),
    /// Not rounded.
    F32(Dst<f32>),
}

impl Out {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Out::Bf16(c) => c.len(),
            Out::F32(c) => c.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Dst<bf16>> for Out {
    fn from(c: Dst<bf16>) -> Out {
        Out::Bf16(c)
    }
}

impl From<Dst<f32>> for Out {
    fn from(c: Dst<f32>) -> Out {
        Out::F32(c)
    }
}

/// `C = A · Wᵀ`.
///
/// Shapes: `a` [M, K], `w` [N, K] packed, `c` [M, N]; M is `a.len() / K`. `W` is `&PackedWeight` or
/// `Arc<PackedWeight>`.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<W> {
    /// Left operand, row-major.
    pub a: Src<bf16>,
    /// Weight.
    pub w: W,
    /// Product, row-major; may not overlap `a`.
    pub c: Out,
    /// Instruction set.
    pub isa: Isa,
}

/// `y = W · x`, reading the weight at memory speed.
///
/// Shapes: `x` [K], `w` [N, K] packed, `y` [N].
#[derive(Debug, Clone, Copy)]
pub struct Gemv<W> {
    /// Vector.
    pub x: Src<bf16>,
    /// Weight.
    pub w: W,
    /// Product; may not overlap `x`.
    pub y: Out,
    /// Instruction set.
    pub isa: Isa,
}

/// `y = W · x` for several vectors, reading the weight once for all; each product has the bits of [`Gemv`]'s.
///
/// Shapes: each `x` [K], `w` [N, K] packed, each `y` [N].
#[derive(Debug, Clone)]
pub struct Gemvs<W> {
    /// Vectors, each with its product, which may not overlap any other view here.
    pub vectors: Vec<(Src<bf16>, Out)>,
    /// Weight.
    pub w: W,
    /// Instruction set.
    pub isa: Isa,
}

/// Bytes of A whose rows meet the panels one after the other: they stay in the L2 cache meanwhile.
const BLOCK_BYTES: usize = 256 << 10;
/// Rows of the largest tile of any instruction set.
const TILE: usize = 12;
/// Weight bytes a task of [`Gemv`] reads at least: enough to hide taking it.
const TASK_BYTES: usize = 32 << 10;

// SAFETY: tasks are disjoint blocks of rows and columns of `c`, each claimed once.
unsafe impl<W: Borrow<PackedWeight> + Sync> Kernel for Gemm<W> {
    fn run(&self, worker: &Worker<'_>) {
        let w: &PackedWeight = self.w.borrow();
        let m = self.c.len() / w.n().max(1);
        assert_eq!(self.c.len(), m * w.n(), "gemm: c is not [M, {}]", w.n());
        assert_eq!(self.a.len(), m * w.k(), "gemm: a is not [{m}, {}]", w.k());
        self.isa.dispatch(GemmShare { a: self.a, w, c: self.c, m, worker });
    }
}

// SAFETY: tasks are disjoint ranges of `y`, each claimed once.
unsafe impl<W: Borrow<PackedWeight> + Sync> Kernel for Gemv<W> {
    fn run(&self, worker: &Worker<'_>) {
        let w: &PackedWeight = self.w.borrow();
        assert_eq!(self.x.len(), w.k(), "gemv: x is not [{}]", w.k());
        assert_eq!(self.y.len(), w.n(), "gemv: y is not [{}]", w.n());
        self.isa.dispatch(GemvShare { x: self.x, w, y: self.y, worker });
    }
}

// SAFETY: tasks are disjoint ranges of columns, the same of every `y`, each claimed once.
unsafe impl<W: Borrow<PackedWeight> + Sync> Kernel for Gemvs<W> {
    fn run(&self, worker: &Worker<'_>) {
        let w: &PackedWeight = self.w.borrow();
        for (x, y) in &self.vectors {
            assert_eq!(x.len(), w.k(), "gemvs: an x is not [{}]", w.k());
            assert_eq!(y.len(), w.n(), "gemvs: a y is not [{}]", w.n());
        }
        self.isa.dispatch(GemvsShare { vectors: &self.vectors, w, worker });
    }
}

/// Rows of a block of A of `m` rows: blocks of much the same size, in whole tiles.
fn block_rows(m: usize, k: usize) -> usize {
    let most = (BLOCK_BYTES / (k.max(1) * size_of::<bf16>())).max(TILE);
    m.div_ceil(m.div_ceil(most).max(1)).next_multiple_of(TILE)
}

struct GemmShare<'a> {
    a: Src<bf16>,
    w: &'a PackedWeight,
    c: Out,
    m: usize,
    worker: &'a Worker<'a>,
}

impl Lanewise for GemmShare<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let (n, k) = (self.w.n(), self.w.k());
        let panels = self.w.panels();
        let block = block_rows(self.m, k);
        let rows = Rows { first: self.a.ptr(), stride: k };
        loop {
            // A task is one panel times one block of rows; neighbours share their rows.
            let task = self.worker.claim();
            let row = task / panels.max(1) * block;
            if row >= self.m || panels == 0 {
                break;
            }
            let count = block.min(self.m - row);
            let p = task % panels;
            let border = Store { c: self.c, n, row, column: p * PANEL };
            // SAFETY: rows `row..row + count` of `a` and `c` exist, and the panel's columns are cut at `n`.
            unsafe {
                let columns = PANEL.min(n - p * PANEL);
                multiply_panel::<L, { PANEL_AHEAD | NEXT_ROWS }>(
                    l,
                    rows.from(row),
                    count,
                    self.w.panel(p),
                    columns,
                    k,
                    &border,
                );
            }
        }
    }
}

struct GemvShare<'a> {
    x: Src<bf16>,
    w: &'a PackedWeight,
    y: Out,
    worker: &'a Worker<'a>,
}

impl Lanewise for GemvShare<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let (n, k, panels) = (self.w.n(), self.w.k(), self.w.panels());
        let step = TASK_BYTES.div_ceil(self.w.panel_len().max(1) * size_of::<u32>());
        let mut task = self.worker.claim();
        let mut p = task * step;
        while p < panels {
            // The next piece is taken before this one is read, so that its first lines can be asked for in time.
            let mut next = p + 1;
            if next == (task + 1) * step {
                task = self.worker.claim();
                next = task * step;
            }
            let border = Store { c: self.y, n, row: 0, column: p * PANEL };
            // SAFETY: one row of `k` elements, a panel of `k`, columns cut at `n`; the next panel is only asked for.
            unsafe {
                let sums = whole_panel(l, self.x.ptr(), self.w.panel(p), k, self.w.panel(next.min(panels - 1)));
                border.finish(l, 0, 0, &sums);
            }
            p = next;
        }
    }
}

/// The product of one row and one panel, asking for the lines of this panel and then for the first ones of `next`.
///
/// # Safety
/// `x` has `k` elements, `panel` is a panel of `k`.
#[inline(always)]
unsafe fn whole_panel<L: Lanes>(
    l: L,
    x: *const bf16,
    panel: *const u32,
    k: usize,
    next: *const u32,
) -> [[L::F; PANEL / LANES]; 1] {
    const TAIL: usize = AHEAD as usize / PANEL;
    let body = (k / 2).saturating_sub(TAIL);
    let mut sums = [[l.splat(0.0); PANEL / LANES]];
    // SAFETY: the caller's; the body is whole pairs.
    unsafe {
        let rows = Rows { first: x, stride: k };
        multiply::<L, 1, { PANEL / LANES }, PANEL_AHEAD>(l, rows, panel, 2 * body, AHEAD, &mut sums);
        let (rows, tail) = (Rows { first: x.add(2 * body), stride: k }, panel.add(body * PANEL));
        let ahead = (next.addr() as isize - tail.addr() as isize) / size_of::<u32>() as isize;
        multiply::<L, 1, { PANEL / LANES }, PANEL_AHEAD>(l, rows, tail, k - 2 * body, ahead, &mut sums);
    }
    sums
}

struct GemvsShare<'a> {
    vectors: &'a [(Src<bf16>, Out)],
    w: &'a PackedWeight,
    worker: &'a Worker<'a>,
}

impl Lanewise for GemvsShare<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let (n, k, panels) = (self.w.n(), self.w.k(), self.w.panels());
        let count = self.vectors.len();
        // A tile's rows lie at one distance: each worker lays its own copy of the vectors out like that.
        let stride = k.next_multiple_of(2 * scratch::LINE);
        let [first] = scratch::take([count * stride / 2]);
        let first = first.cast::<bf16>();
        for (i, (x, _)) in self.vectors.iter().enumerate() {
            // SAFETY: row `i` of the `count` rows taken just now; `x` has `k` elements.
            unsafe { first.add(i * stride).copy_from_nonoverlapping(x.ptr(), k) };
        }
        let rows = Rows { first, stride };
        let step = TASK_BYTES.div_ceil(self.w.panel_len().max(1) * size_of::<u32>());
        loop {
            let from = self.worker.claim() * step;
            if from >= panels {
                break;
            }
            for p in from..panels.min(from + step) {
                let border = Spread { vectors: self.vectors, n, column: p * PANEL };
                // SAFETY: `count` rows of `k` elements, each with a product of its own, columns cut at `n`.
                unsafe {
                    let columns = PANEL.min(n - p * PANEL);
                    multiply_panel::<L, PANEL_AHEAD>(l, rows, count, self.w.panel(p), columns, k, &border);
                }
            }
        }
    }
}

/// As [`Store`], each row to a product of its own.
struct Spread<'a> {
    vectors: &'a [(Src<bf16>, Out)],
    n: usize,
    column: usize,
}

impl Border for Spread<'_> {
    #[inline(always)]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        for m in 0..M {
            let border = Store { c: self.vectors[row + m].1, n: self.n, row: 0, column: self.column };
            // SAFETY: the caller's; a product is one row.
            unsafe { border.finish(l, 0, column, &[tile[m]]) };
        }
    }
}

/// Starts at zero and stores to C, cutting the columns that are padding.
pub(super) struct Store {
    pub(super) c: Out,
    pub(super) n: usize,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl Border for Store {
    #[inline(always)]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        let (left, at) =
            (self.n.saturating_sub(self.column + column), (self.row + row) * self.n + self.column + column);
        // Short loops without a branch are unrolled, and then the tile never leaves the registers.
        // SAFETY: `left` elements, or as many as the tile is wide, from each row's `at` on belong to C, and to this task.
        unsafe {
            match self.c {
                Out::Bf16(c) if left >= V * LANES => {
                    for m in 0..M {
                        for v in 0..V {
                            l.store_bf16(c.ptr().add(at + m * self.n + v * LANES), tile[m][v]);
                        }
                    }
                }
                Out::F32(c) if left >= V * LANES => {
                    for m in 0..M {
                        for v in 0..V {
                            l.store(c.ptr().add(at + m * self.n + v * LANES), tile[m][v]);
                        }
                    }
                }
                Out::Bf16(c) => {
                    let mut whole = [[[bf16::ZERO; LANES]; V]; M];
                    for m in 0..M {
                        for v in 0..V {
                            l.store_bf16(whole[m][v].as_mut_ptr(), tile[m][v]);
                        }
                    }
                    for m in 0..M {
                        c.ptr().add(at + m * self.n).copy_from_nonoverlapping(whole[m].as_ptr().cast(), left);
                    }
                }
                Out::F32(c) => {
                    let mut whole = [[[0.0; LANES]; V]; M];
                    for m in 0..M {
                        for v in 0..V {
                            l.store(whole[m][v].as_mut_ptr(), tile[m][v]);
                        }
                    }
                    for m in 0..M {
                        c.ptr().add(at + m * self.n).copy_from_nonoverlapping(whole[m].as_ptr().cast(), left);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
