//! Packing of linear weights, once, into the layout that both [`Gemm`](super::Gemm) and [`Gemv`](super::Gemv) stream.
//!
//! A panel is [`PANEL`] output columns; inside it, for every pair of `k`, the pairs `(w[n][2k], w[n][2k+1])` of the
//! panel's columns stand side by side as u32 with the even element in the low half. So one load gives a vector of
//! columns, the whole weight is read front to back, and nothing depends on the instruction set. Columns beyond `n` and
//! the odd half of a last pair are zero. The module may not round or reorder values: `unpack` gives back the bits.

use half::bf16;

use super::{
    Isa,
    arena::{self, Region},
    lanes::{LANES, Lanes, Lanewise},
    pool::Pool,
};

/// Columns of a panel.
pub(super) const PANEL: usize = 32;

/// A linear layer's weight `[n, k]` in packed form.
pub struct PackedWeight {
    n: usize,
    k: usize,
    region: Region,
}

impl PackedWeight {
    /// Packs a Hugging Face linear weight.
    ///
    /// Shapes: `rows` [n, k] row-major (n outputs, k inputs).
    ///
    /// Panics if `rows` has not `n * k` elements.
    pub fn pack(pool: &Pool, rows: &[bf16], n: usize, k: usize) -> PackedWeight {
        assert_eq!(rows.len(), n * k, "a weight [{n}, {k}] has another number of elements");
        let (panels, panel_len) = (n.div_ceil(PANEL), k.div_ceil(2) * PANEL);
        let region = arena::region(panels * panel_len * size_of::<u32>());
        let start = Panels(region.start().cast::<u32>().as_ptr());
        let isa = Isa::detect();
        pool.for_each(panels, |p| {
            let columns = PANEL.min(n - p * PANEL);
            // SAFETY: panel `p` lies within the region and is written by this call only; its `columns` rows of `k`
            // elements lie within `rows`.
            unsafe {
                let panel = start.at(p * panel_len);
                isa.dispatch(Pack { panel, rows: rows.as_ptr().add(p * PANEL * k), columns, k });
            }
        });
        PackedWeight { n, k, region }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes a pass over the weight reads, padding included.
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_len() * size_of::<u32>()
    }

    /// Row `i` of the weight as it was before packing: `[k]`.
    ///
    /// Panics if there is no row `i`.
    pub fn row(&self, i: usize) -> Vec<bf16> {
        assert!(i < self.n, "row {i} of a weight with {} rows", self.n);
        let panel = self.panel(i / PANEL);
        // SAFETY: `panel` has `panel_len` u32, all written by `pack`.
        let pair = |j: usize| unsafe { *panel.add(j / 2 * PANEL + i % PANEL) };
        (0..self.k).map(|j| bf16::from_bits((pair(j) >> (16 * (j % 2))) as u16)).collect()
    }

    /// The weight as it was before packing: `[n, k]`.
    pub fn unpack(&self) -> Vec<bf16> {
        (0..self.n).flat_map(|i| self.row(i)).collect()
    }

    /// Number of panels.
    pub(super) fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// u32 in a panel.
    pub(super) fn panel_len(&self) -> usize {
        self.k.div_ceil(2) * PANEL
    }

    /// The first u32 of panel `p`, with `panel_len` behind it.
    pub(super) fn panel(&self, p: usize) -> *const u32 {
        debug_assert!(p < self.panels().max(1));
        // SAFETY: the region has `panels * panel_len` u32.
        unsafe { self.region.start().cast::<u32>().as_ptr().add(p * self.panel_len()) }
    }
}

impl std::fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedWeight").field("n", &self.n).field("k", &self.k).finish()
    }
}

/// The start of the panels, shared by the packing workers.
struct Panels(*mut u32);

// SAFETY: each worker writes panels of its own.
unsafe impl Sync for Panels {}

impl Panels {
    /// # Safety
    /// `offset` lies within the region.
    unsafe fn at(&self, offset: usize) -> *mut u32 {
        // SAFETY: the caller's.
        unsafe { self.0.add(offset) }
    }
}

/// The arguments of [`pack_panel`], for a weight's rows.
struct Pack {
    panel: *mut u32,
    rows: *const bf16,
    columns: usize,
    k: usize,
}

impl Lanewise for Pack {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        // SAFETY: `pack` makes this of what `pack_panel` asks for.
        unsafe { pack_panel(l, self.panel, self.rows, self.k, self.columns, self.k) }
    }
}

/// Writes one panel: `columns` rows of `k` elements, `stride` apart, and zeros for the rest of the panel.
///
/// # Safety
/// `panel` is valid for writes of `k.div_ceil(2) * PANEL` u32, `rows` for reads of the rows; `columns <= PANEL`.
#[inline(always)]
pub(super) unsafe fn pack_panel<L: Lanes>(
    l: L,
    panel: *mut u32,
    rows: *const bf16,
    stride: usize,
    columns: usize,
    k: usize,
) {
    // Sixteen pairs are one cache line of a row: go over the rows in such steps, so that lines are read once.
    for first in (0..k.div_ceil(2)).step_by(LANES) {
        for column in (0..PANEL).step_by(LANES) {
            // SAFETY: sixteen columns and up to sixteen pairs of the panel, and as much of the rows as there is.
            unsafe {
                let to = panel.add(first * PANEL + column);
                let from = rows.wrapping_add(column * stride + 2 * first);
                if column + LANES <= columns && 2 * (first + LANES) <= k {
                    l.transpose(from, stride, to, PANEL);
                } else {
                    let filled = columns.saturating_sub(column).min(LANES);
                    pack_edge(to, from, stride, filled, (k - 2 * first).min(2 * LANES));
                }
            }
        }
    }
}

/// As [`pack_panel`] for up to sixteen columns and pairs: `filled` rows of `len` elements, zeros in the other columns.
///
/// # Safety
/// As [`pack_panel`].
#[inline(always)]
unsafe fn pack_edge(to: *mut u32, from: *const bf16, stride: usize, filled: usize, len: usize) {
    for pair in 0..len.div_ceil(2) {
        for column in 0..LANES {
            // SAFETY: elements `2 * pair` and, if there is one, the next of a row that exists.
            unsafe {
                let element = |i: usize| {
                    let exists = column < filled && i < len;
                    if exists { u32::from((*from.add(column * stride + i)).to_bits()) } else { 0 }
                };
                to.add(pair * PANEL + column).write(element(2 * pair) | element(2 * pair + 1) << 16);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::compute::testing::noise;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn unpack_gives_back_the_bits(n in 0usize..100, k in 0usize..70, threads in 1usize..4) {
            let rows = noise(n * k, 7);
            let packed = PackedWeight::pack(&Pool::new(threads), &rows, n, k);
            prop_assert_eq!(packed.unpack(), rows.clone());
            for i in 0..n {
                prop_assert_eq!(packed.row(i), &rows[i * k..(i + 1) * k]);
            }
        }
    }

    #[test]
    fn padding_is_zero() {
        let (n, k) = (33, 5);
        let packed = PackedWeight::pack(&Pool::new(2), &vec![bf16::NAN; n * k], n, k);
        assert_eq!(packed.bytes(), 2 * 3 * 32 * 4);
        // SAFETY: all panels were written by `pack`.
        let words = unsafe { std::slice::from_raw_parts(packed.panel(0), packed.bytes() / 4) };
        for (i, &word) in words.iter().enumerate() {
            let (panel, pair, column) = (i / 96, i % 96 / 32, i % 32);
            let expected = match (panel * 32 + column < n, pair) {
                (false, _) => 0,
                (true, 2) => u32::from(bf16::NAN.to_bits()),
                (true, _) => u32::from(bf16::NAN.to_bits()) * 0x1_0001,
            };
            assert_eq!(word, expected, "word {i}");
        }
    }
}
