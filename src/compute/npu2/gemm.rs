//! The matrix product of the NPU2: BFP16 operands, f32 or (low tier) bf16 sums, one rounding to nearest even.
//!
//! The weight stays packed as it is for GEMV, which has no block arithmetic: its panels are quantised on the way, into
//! memory of the thread, and then serve many rows. That costs a few percent of a long prefill and spares a second copy of
//! every weight. May not quantise the activations: a [`Blocks`](super::Blocks) of K columns before it does.

use std::borrow::Borrow;

use half::bf16;

use super::bfp16::quantise_panel;
use crate::compute::{
    Isa, Out,
    gemm::Store,
    lanes::{LANES, Lanes, Lanewise},
    pack::{PANEL, PackedWeight},
    pool::{Kernel, Worker},
    scratch,
    tile::{Border, NOTHING, Rows, multiply_panel, zeros},
    view::Src,
};

/// How a product is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In f32.
    High,
    /// In a bf16 accumulator that is rounded to nearest even every `tile_k` elements of K.
    ///
    /// The registry's prose has it truncated once per tile of the second level (256 to 512 of K); its figures, from
    /// K = 512 to 8192, are those of one rounding to nearest per tile of the first level (32), whatever the second is.
    Low {
        /// `tile_k_l1`, a multiple of 8.
        tile_k: usize,
    },
}

/// `C = A · Wᵀ` with `a` quantised already.
///
/// Shapes: `a` [M, K], `w` [N, K] packed, `c` [M, N]; M is `a.len() / K`. `W` is `&PackedWeight` or `Arc<PackedWeight>`.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<W> {
    /// Left operand, row-major, every row in [`Blocks`](super::Blocks).
    pub a: Src<bf16>,
    /// Weight, as it is.
    pub w: W,
    /// Product, row-major; may not overlap `a`.
    pub c: Out,
    /// How it is summed.
    pub tier: Tier,
    /// Instruction set.
    pub isa: Isa,
}

/// Rows a task takes: enough to share the cost of quantising a panel.
const TASK_ROWS: usize = 480;

// SAFETY: tasks are disjoint blocks of rows and columns of `c`, each claimed once.
unsafe impl<W: Borrow<PackedWeight> + Sync> Kernel for Gemm<W> {
    fn run(&self, worker: &Worker<'_>) {
        let w: &PackedWeight = self.w.borrow();
        let m = self.c.len() / w.n().max(1);
        assert_eq!(self.c.len(), m * w.n(), "gemm: c is not [M, {}]", w.n());
        assert_eq!(self.a.len(), m * w.k(), "gemm: a is not [{m}, {}]", w.k());
        let tile_k = match self.tier {
            Tier::High => w.k(),
            Tier::Low { tile_k } => tile_k,
        };
        assert!(self.tier == Tier::High || tile_k > 0 && tile_k.is_multiple_of(8), "gemm: tile_k {tile_k}");
        self.isa.dispatch(Share { a: self.a, w, c: self.c, m, tile_k, worker });
    }
}

struct Share<'a> {
    a: Src<bf16>,
    w: &'a PackedWeight,
    c: Out,
    m: usize,
    tile_k: usize,
    worker: &'a Worker<'a>,
}

impl Lanewise for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let (n, k, panels) = (self.w.n(), self.w.k(), self.w.panels());
        let tasks = self.m.div_ceil(TASK_ROWS) * panels;
        let rows = Rows { first: self.a.ptr(), stride: k };
        let low = self.tile_k < k;
        let sums_len = if low { TASK_ROWS * PANEL } else { 0 };
        let panel_len = self.w.panel_len();
        let [panel, sums] = scratch::take([panel_len, sums_len]);
        let sums = sums.cast::<f32>();
        loop {
            let task = self.worker.claim();
            if task >= tasks {
                break;
            }
            let (row, p) = (task / panels * TASK_ROWS, task % panels);
            let (count, column) = (TASK_ROWS.min(self.m - row), p * PANEL);
            let columns = PANEL.min(n - column);
            let store = Store { c: self.c, n, row, column };
            // SAFETY: rows `row..row + count` of `a` and `c` exist, the panel's columns are cut at `n`, and this thread's
            // memory holds a panel and, in the low tier, the sums of a task.
            unsafe {
                quantise_panel(l, self.w.panel(p), panel, panel_len / PANEL);
                if !low {
                    multiply_panel::<L, NOTHING>(l, rows.from(row), count, panel, columns, k, &store);
                    continue;
                }
                for first in (0..k).step_by(self.tile_k) {
                    let len = self.tile_k.min(k - first);
                    let rows = Rows { first: rows.from(row).first.add(first), stride: k };
                    let narrow = Narrow { sums, fresh: first == 0 };
                    multiply_panel::<L, NOTHING>(l, rows, count, panel.add(first / 2 * PANEL), columns, len, &narrow);
                }
                finish(l, &store, sums, count, columns);
            }
        }
    }
}

/// Starts from the accumulators, if they are not fresh, and rounds them to bf16: [rows, PANEL] f32.
struct Narrow {
    sums: *mut f32,
    fresh: bool,
}

impl Border for Narrow {
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]
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
                    // SAFETY: row `row + m` has PANEL accumulators.
                    tile[m][v] = unsafe { l.load(self.sums.add((row + m) * PANEL + column + v * LANES)) };
                }
            }
        }
        tile
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]
    unsafe fn finish<L: Lanes, const M: usize, const V: usize>(
        &self,
        l: L,
        row: usize,
        column: usize,
        tile: &[[L::F; V]; M],
    ) {
        for m in 0..M {
            for v in 0..V {
                let at = (row + m) * PANEL + column + v * LANES;
                // SAFETY: row `row + m` has PANEL accumulators.
                unsafe { l.store(self.sums.add(at), l.round_nearest(tile[m][v])) };
            }
        }
    }
}

/// Hands the accumulators to `store`, row by row.
///
/// # Safety
/// `sums` has `count` rows of PANEL numbers, and `store` is made for these rows and `columns` columns.
#[inline(always)]
unsafe fn finish<L: Lanes>(l: L, store: &Store, sums: *const f32, count: usize, columns: usize) {
    for row in 0..count {
        for column in (0..columns).step_by(LANES) {
            // SAFETY: the caller's.
            unsafe { store.finish(l, row, column, &[[l.load(sums.add(row * PANEL + column))]]) };
        }
    }
}
