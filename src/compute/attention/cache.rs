//! Keys and values of one layer, packed as they are written.
//!
//! Prefill packs its rows, multiplies them and lets them go; decode reads all of them again at every step, and to pack them each
//! time would cost more than the products do. Rows come back bit for bit.

use std::mem::MaybeUninit;

use half::bf16;

use super::block::KV_BLOCK;
use super::positions::{Keys, Layout, Piece, VALUE_PANEL, Values};
use crate::compute::{
    Isa, Pool,
    arena::{self, Region},
    lanes::LANES,
    pack::PANEL,
};

/// The KV cache of one layer, for [`DecodeAttention`](super::DecodeAttention).
///
/// What nobody has written is NaN, but for the value beside an odd last one and the columns that pad the values of a head: 0.
pub struct PackedCache {
    layout: Layout,
    capacity: usize,
    len: usize,
    /// Where the keys end that were written last.
    keys: usize,
    /// Positions from here on hold nothing of any prompt.
    touched: usize,
    region: Region,
}

impl PackedCache {
    /// Empty caches of `layers` layers, in memory that goes with the last of them.
    ///
    /// Panics if `head_dim` is odd.
    pub fn of_layers(layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> Vec<PackedCache> {
        assert!(head_dim.is_multiple_of(2), "cache: head_dim {head_dim} is not even");
        let layout = Layout::new(kv_heads, head_dim, capacity);
        let regions = arena::regions(layers, layout.len() * size_of::<u32>());
        let empty = |region| {
            let mut cache = PackedCache { layout, capacity, len: 0, keys: 0, touched: 0, region };
            (0..kv_heads).for_each(|head| cache.forget(head, 0, layout.blocks));
            cache
        };
        regions.into_iter().map(empty).collect()
    }

    /// One empty cache with room for `capacity` positions.
    ///
    /// Panics if `head_dim` is odd.
    pub fn new(kv_heads: usize, head_dim: usize, capacity: usize) -> PackedCache {
        PackedCache::of_layers(1, kv_heads, head_dim, capacity).pop().expect("one was asked for")
    }

    /// Memory of a cache: whole blocks and panels.
    ///
    /// Units: bytes.
    pub fn bytes(kv_heads: usize, head_dim: usize, capacity: usize) -> usize {
        Layout::new(kv_heads, head_dim, capacity).len() * size_of::<u32>()
    }

    /// Elements of a row: KV heads times head_dim.
    pub fn width(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// The first block of the first head.
    pub(super) fn start(&self) -> *mut u32 {
        self.region.start().as_ptr().cast()
    }

    /// Fills `count` blocks of a head with NaN.
    fn forget(&mut self, head: usize, block: usize, count: usize) {
        const NAN: u32 = 0x7fc0_7fc0;
        // SAFETY: the blocks lie within the region one after the other, and nobody else sees them.
        let words = unsafe {
            let start = self.start().add(self.layout.block(head, block)).cast::<MaybeUninit<u32>>();
            std::slice::from_raw_parts_mut(start, count * self.layout.block_len())
        };
        words.fill(MaybeUninit::new(NAN));
    }

    /// Forgets everything, for a prompt of `rows` positions: those behind it hold NaN again.
    pub fn restart(&mut self, rows: usize) {
        if rows < self.touched {
            let (first, end) = (rows / KV_BLOCK, self.touched.div_ceil(KV_BLOCK));
            (0..self.layout.kv_heads).for_each(|head| self.forget(head, first, end - first));
            self.touched = rows;
        }
        (self.len, self.keys) = (0, 0);
    }

    /// Writes the keys of the positions from `position` on, where the cache ends until their values are written, too.
    ///
    /// Shapes: `rows` [n, kv_heads * head_dim].
    ///
    /// Panics if the rows leave a gap or do not fit.
    pub fn write_keys(&mut self, pool: &Pool, position: usize, rows: &[bf16]) {
        self.keys = self.write::<true>(pool, position, rows);
        self.len = position;
    }

    /// Writes the values of the positions whose keys were written last; then they are there.
    ///
    /// Shapes: as [`PackedCache::write_keys`].
    ///
    /// Panics for any other positions.
    pub fn write_values(&mut self, pool: &Pool, position: usize, rows: &[bf16]) {
        let end = position + rows.len() / self.width().max(1);
        assert!(
            (position, end) == (self.len, self.keys),
            "cache: values {position}..{end}, keys {}..{}",
            self.len,
            self.keys
        );
        self.len = self.write::<false>(pool, position, rows);
    }

    fn write<const KEYS: bool>(&mut self, pool: &Pool, position: usize, rows: &[bf16]) -> usize {
        let (width, layout) = (self.width(), self.layout);
        let end = position + rows.len() / width.max(1);
        assert_eq!(rows.len(), (end - position) * width, "cache: rows are not [n, {width}]");
        assert!(position <= self.len && end <= self.capacity, "cache: {position}..{end} behind {}", self.len);
        self.touched = self.touched.max(end);
        let (isa, cache) = (Isa::detect(), &*self);
        let piece = |block: usize, head: usize| {
            let (first, start) = (position.max(block * KV_BLOCK), block * KV_BLOCK);
            let from = rows[(first - position) * width..].as_ptr().wrapping_add(head * layout.head_dim);
            let positions = (first - start, end.min(start + KV_BLOCK) - start);
            // SAFETY: block, head and positions exist, each pair of block and head is dealt out once, and nobody else sees the
            // cache: it is borrowed for this call. The rows lie within the slice; `new` has refused an odd head_dim.
            let piece = unsafe {
                let to = cache.start().add(layout.block(head, block));
                Piece::new(to, from, width, layout, positions)
            };
            match KEYS {
                true => isa.dispatch(Keys(piece)),
                false => drop(isa.dispatch(Values(piece))),
            }
        };
        let (blocks, heads) = (position / KV_BLOCK..end.div_ceil(KV_BLOCK), layout.kv_heads);
        // To wake a worker costs more than the few rows that a step writes.
        if end - position <= LANES {
            blocks.for_each(|block| (0..heads).for_each(|head| piece(block, head)));
        } else {
            pool.for_each(blocks.len() * heads, |i| piece(blocks.start + i / heads, i % heads));
        }
        end
    }

    /// Appends the keys and the values of one position.
    ///
    /// Shapes: [kv_heads * head_dim] each.
    ///
    /// Panics if it is not written.
    pub fn read(&self, position: usize, keys: &mut Vec<bf16>, values: &mut Vec<bf16>) {
        assert!(position < self.len, "cache: position {position} of {}", self.len);
        let (layout, at) = (self.layout, position % KV_BLOCK);
        for head in 0..layout.kv_heads {
            let block = layout.block(head, position / KV_BLOCK);
            for i in 0..layout.head_dim {
                let key = at / PANEL * layout.key_panel() + i / 2 * PANEL + at % PANEL;
                let value = layout.keys_len() + i / PANEL * VALUE_PANEL + at / 2 * PANEL + i % PANEL;
                // SAFETY: within the panels of a block that exists, all of which is initialised.
                unsafe {
                    keys.push(half_of(*self.start().add(block + key), i));
                    values.push(half_of(*self.start().add(block + value), at));
                }
            }
        }
    }
}

impl std::fmt::Debug for PackedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PackedCache { layout: Layout { kv_heads, head_dim, .. }, capacity, len, .. } = self;
        write!(f, "PackedCache {{ {kv_heads} heads of {head_dim}, {len} of {capacity} positions }}")
    }
}

/// The even or the odd one of a pair.
fn half_of(pair: u32, i: usize) -> bf16 {
    bf16::from_bits((pair >> (16 * (i % 2))) as u16)
}

#[cfg(test)]
mod tests;
