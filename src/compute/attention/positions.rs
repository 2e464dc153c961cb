//! Keys and values in the layout that attention multiplies.
//!
//! Each kv head has its blocks of KV_BLOCK positions one after the other: first the panels of the keys (pairs along head_dim, PANEL
//! positions each), then those of the values (pairs of positions, PANEL columns each). May not round or reorder values.

use half::bf16;

use super::block::KV_BLOCK;
use crate::compute::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pack::{PANEL, pack_panel},
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// What lies where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Blocks of a head.
    pub(super) blocks: usize,
}

impl Layout {
    /// Room for `positions`.
    pub(super) fn new(kv_heads: usize, head_dim: usize, positions: usize) -> Layout {
        Layout { kv_heads, head_dim, blocks: positions.div_ceil(KV_BLOCK) }
    }

    /// Units: u32; as all lengths and offsets here.
    pub(super) fn len(self) -> usize {
        self.kv_heads * self.blocks * self.block_len()
    }

    pub(super) fn block_len(self) -> usize {
        self.keys_len() + self.head_dim.div_ceil(PANEL) * VALUE_PANEL
    }

    pub(super) fn keys_len(self) -> usize {
        KV_BLOCK / PANEL * self.key_panel()
    }

    /// A panel of keys.
    #[inline(always)]
    pub(super) fn key_panel(self) -> usize {
        self.head_dim / 2 * PANEL
    }

    /// Where a block starts.
    #[inline(always)]
    pub(super) fn block(self, head: usize, block: usize) -> usize {
        (head * self.blocks + block) * self.block_len()
    }
}

/// A panel of values.
pub(super) const VALUE_PANEL: usize = KV_BLOCK / 2 * PANEL;

/// Packs all keys and values of a sequence for [`Attention`](super::Attention).
///
/// Shapes: `k`, `v` [S, kv_heads * head_dim], row-major; `to` [[`PackPositions::len`]]. Running it panics where they are not.
#[derive(Debug, Clone, Copy)]
pub struct PackPositions {
    /// Keys.
    pub k: Src<bf16>,
    /// Values.
    pub v: Src<bf16>,
    /// The packed ones; may not overlap an input.
    pub to: Dst<u32>,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Length of a head; even.
    pub head_dim: usize,
    /// Instruction set.
    pub isa: Isa,
}

impl PackPositions {
    /// Packed length of `rows` positions: the panels, and for each block whether all of its values are finite.
    ///
    /// Units: u32.
    pub fn len(kv_heads: usize, head_dim: usize, rows: usize) -> usize {
        let layout = Layout::new(kv_heads, head_dim, rows);
        layout.len() + kv_heads * layout.blocks
    }
}

// SAFETY: tasks are disjoint blocks of `to`, each claimed once.
unsafe impl Kernel for PackPositions {
    fn run(&self, worker: &Worker<'_>) {
        let PackPositions { k, v, to, kv_heads, head_dim, isa } = *self;
        assert!(head_dim.is_multiple_of(2), "attention: head_dim {head_dim} is not even");
        let width = kv_heads * head_dim;
        let rows = k.len() / width.max(1);
        assert!(k.len() == rows * width && v.len() == k.len(), "attention: k or v is not [{rows}, {width}]");
        assert_eq!(to.len(), PackPositions::len(kv_heads, head_dim, rows), "attention: packed positions");
        let layout = Layout::new(kv_heads, head_dim, rows);
        loop {
            let task = worker.claim();
            if task >= kv_heads * layout.blocks {
                break;
            }
            let (block, head) = (task / kv_heads, task % kv_heads);
            let first = block * KV_BLOCK;
            let at = first * width + head * head_dim;
            // SAFETY: the block and its flag lie within `to`, and are this task's; its rows lie within `k` and `v`.
            unsafe {
                let (start, positions) = (to.ptr().add(layout.block(head, block)), (0, KV_BLOCK.min(rows - first)));
                let piece = |from: *const bf16| Piece::new(start, from.add(at), width, layout, positions);
                isa.dispatch(Keys(piece(k.ptr())));
                let finite = isa.dispatch(Values(piece(v.ptr())));
                to.ptr().add(layout.len() + head * layout.blocks + block).write(finite.into());
            }
        }
    }
}

/// Rows of one head that go to one block.
pub(super) struct Piece {
    to: *mut u32,
    from: *const bf16,
    stride: usize,
    layout: Layout,
    positions: (usize, usize),
}

impl Piece {
    /// For the positions from one on, to another one, of the block that starts at `block`; `from` is the head in the first row, and
    /// the rows lie `stride` apart.
    ///
    /// # Safety
    /// Until it is packed, the block is valid for writes by this piece alone and the rows are valid for reads; the positions lie
    /// within a block, and head_dim is even.
    pub(super) unsafe fn new(
        block: *mut u32,
        from: *const bf16,
        stride: usize,
        layout: Layout,
        positions: (usize, usize),
    ) -> Piece {
        Piece { to: block, from, stride, layout, positions }
    }
}

/// Writes keys; those beside them stay as they are.
pub(super) struct Keys(pub(super) Piece);

/// Writes values, and 0 beside an odd last one, since products read pairs; says whether all that it wrote are finite.
pub(super) struct Values(pub(super) Piece);

impl Lanewise for Keys {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Piece { to, from, stride, layout, positions: (first, end) } = self.0;
        let mut position = first;
        while position < end {
            let (panel, column) = (position / PANEL, position % PANEL);
            // SAFETY: that of `Piece::new`.
            unsafe {
                let to = to.add(panel * layout.key_panel());
                let from = from.add((position - first) * stride);
                if column == 0 && position + PANEL <= end {
                    pack_panel(l, to, from, stride, PANEL, layout.head_dim);
                    position += PANEL;
                } else {
                    for pair in 0..layout.head_dim / 2 {
                        let element = |i: usize| u32::from((*from.add(2 * pair + i)).to_bits());
                        to.add(pair * PANEL + column).write(element(0) | element(1) << 16);
                    }
                    position += 1;
                }
            }
        }
    }
}

impl Lanewise for Values {
    type Output = bool;

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> bool {
        let Piece { to, from, stride, layout, positions } = self.0;
        // SAFETY: that of `Piece::new`; values follow the block's keys.
        unsafe { pack_values(l, (to.add(layout.keys_len()), VALUE_PANEL), (from, stride), layout.head_dim, positions) }
    }
}

/// Writes the values of positions `first..end` in pairs, 0 beside an odd last one; an even half that is there already stays. Says
/// whether all of these pairs are finite.
///
/// Shapes: `to` is the first of a block's panels and u32 from one to the next, `from` the first row and elements to the next.
///
/// # Safety
/// The rows are valid for reads of `head_dim` elements, the panels for writes of the pairs, up to whole vectors.
#[inline(always)]
pub(in crate::compute) unsafe fn pack_values<L: Lanes>(
    l: L,
    (to, panel): (*mut u32, usize),
    (from, stride): (*const bf16, usize),
    head_dim: usize,
    (first, end): (usize, usize),
) -> bool {
    // The largest power of two, lane by lane: infinite where a value is infinite or NaN.
    let mut top = l.splat(0.0);
    for p in 0..head_dim.div_ceil(PANEL) {
        for pair in first / 2..end.div_ceil(2) {
            for column in (p * PANEL..(p + 1) * PANEL).step_by(LANES) {
                let columns = head_dim.saturating_sub(column).min(LANES);
                // SAFETY: the caller's; a row's columns are cut at `head_dim`, a panel has all of PANEL.
                unsafe {
                    let to = to.add(p * panel + pair * PANEL + column % PANEL);
                    let from = from.wrapping_add(column);
                    let even = match 2 * pair < first {
                        true => l.load_pairs(to).0,
                        false => load_padded(l, from.wrapping_add((2 * pair - first) * stride), columns),
                    };
                    let odd = match 2 * pair + 1 < end {
                        true => load_padded(l, from.wrapping_add((2 * pair + 1 - first) * stride), columns),
                        false => l.splat(0.0),
                    };
                    top = l.max(top, l.max(l.power(even), l.power(odd)));
                    l.store_pairs(to, even, odd);
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
unsafe fn load_padded<L: Lanes>(l: L, p: *const bf16, columns: usize) -> L::F {
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
