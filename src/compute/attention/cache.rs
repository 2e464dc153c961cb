//! Keys and values of one layer in the layout that attention multiplies, packed as they are written.
//!
//! Prefill packs a block of its rows, multiplies it and lets it go; decode reads all of them again at every step, and to pack
//! them each time would cost more than the products do. May not round or reorder values: rows come back bit for bit.

use half::bf16;

use super::block::{KV_BLOCK, load_padded};
use crate::compute::{
    Isa, Pool,
    arena::{self, Region},
    lanes::{LANES, Lanes, Lanewise},
    pack::{PANEL, pack_panel},
};

/// The KV cache of one layer, for [`DecodeAttention`](super::DecodeAttention).
///
/// Each kv head has its blocks of KV_BLOCK positions one after the other: first the panels of the keys (pairs along head_dim,
/// PANEL positions each), then those of the values (pairs of positions, PANEL columns each). What nobody has written is NaN, but
/// for the value beside an odd last one: products read pairs, so it is 0.
pub struct PackedCache {
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    len: usize,
    /// Positions from here on hold nothing of any prompt.
    touched: usize,
    region: Region,
}

impl PackedCache {
    /// An empty cache with room for `capacity` positions.
    ///
    /// Panics if `head_dim` is odd.
    pub fn new(kv_heads: usize, head_dim: usize, capacity: usize) -> PackedCache {
        assert!(head_dim.is_multiple_of(2), "cache: head_dim {head_dim} is not even");
        let region = arena::region(PackedCache::bytes(kv_heads, head_dim, capacity));
        let mut cache = PackedCache { kv_heads, head_dim, capacity, len: 0, touched: 0, region };
        (0..kv_heads).for_each(|head| cache.forget(head, 0, capacity.div_ceil(KV_BLOCK)));
        cache
    }

    /// Memory of a cache: whole blocks and panels.
    ///
    /// Units: bytes.
    pub fn bytes(kv_heads: usize, head_dim: usize, capacity: usize) -> usize {
        kv_heads * capacity.div_ceil(KV_BLOCK) * block_len(head_dim) * size_of::<u32>()
    }

    /// Elements of a row: KV heads times head_dim.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
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

    pub(super) fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    pub(super) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Keys and values of one block of a head.
    pub(super) fn block(&self, head: usize, block: usize) -> (*const u32, *const u32) {
        let keys = self.start(head, block).cast_const();
        (keys, keys.wrapping_add(key_len(self.head_dim)))
    }

    fn start(&self, head: usize, block: usize) -> *mut u32 {
        let at = (head * self.capacity.div_ceil(KV_BLOCK) + block) * block_len(self.head_dim);
        self.region.start().as_ptr().cast::<u32>().wrapping_add(at)
    }

    /// Fills `count` blocks of a head with NaN.
    fn forget(&mut self, head: usize, block: usize, count: usize) {
        const NAN: u32 = 0x7fc0_7fc0;
        // SAFETY: the blocks lie within the region one after the other, and nobody else sees them.
        let words = unsafe {
            let (start, len) = (self.start(head, block), count * block_len(self.head_dim));
            std::slice::from_raw_parts_mut(start.cast::<std::mem::MaybeUninit<u32>>(), len)
        };
        words.fill(std::mem::MaybeUninit::new(NAN));
    }

    /// Forgets everything, for a prompt of `rows` positions: those behind it hold NaN again.
    pub fn restart(&mut self, rows: usize) {
        if rows < self.touched {
            let (first, end) = (rows / KV_BLOCK, self.touched.div_ceil(KV_BLOCK));
            (0..self.kv_heads).for_each(|head| self.forget(head, first, end - first));
            self.touched = rows;
        }
        self.len = 0;
    }

    /// Writes the keys of the positions from `position` on; they are there once their values are, too.
    ///
    /// Shapes: `rows` [n, kv_heads * head_dim].
    ///
    /// Panics if the rows leave a gap or do not fit.
    pub fn write_keys(&mut self, pool: &Pool, position: usize, rows: &[bf16]) {
        self.write::<true>(pool, position, rows);
    }

    /// Writes the values of the positions from `position` on, with which the cache ends from now on.
    ///
    /// Shapes, panics: as [`PackedCache::write_keys`].
    pub fn write_values(&mut self, pool: &Pool, position: usize, rows: &[bf16]) {
        self.len = self.write::<false>(pool, position, rows);
    }

    fn write<const KEYS: bool>(&mut self, pool: &Pool, position: usize, rows: &[bf16]) -> usize {
        let (width, head_dim, kv_heads) = (self.width(), self.head_dim, self.kv_heads);
        let end = position + rows.len() / width.max(1);
        assert_eq!(rows.len(), (end - position) * width, "cache: rows are not [n, {width}]");
        assert!(position <= self.len && end <= self.capacity, "cache: {position}..{end} behind {}", self.len);
        self.touched = self.touched.max(end);
        let (isa, cache) = (Isa::detect(), &*self);
        let piece = |block: usize, head: usize| {
            let (first, start) = (position.max(block * KV_BLOCK), block * KV_BLOCK);
            let to = cache.start(head, block).wrapping_add(if KEYS { 0 } else { key_len(head_dim) });
            let from = rows[(first - position) * width..].as_ptr().wrapping_add(head * head_dim);
            let positions = (first - start, end.min(start + KV_BLOCK) - start);
            isa.dispatch(Piece::<KEYS> { to, from, stride: width, head_dim, positions });
        };
        let blocks = position / KV_BLOCK..end.div_ceil(KV_BLOCK);
        // A worker's call costs more than the few rows that a step writes.
        if end - position <= LANES {
            blocks.for_each(|block| (0..kv_heads).for_each(|head| piece(block, head)));
        } else {
            pool.for_each(blocks.len() * kv_heads, |i| piece(blocks.start + i / kv_heads, i % kv_heads));
        }
        end
    }

    /// The keys and the values of one position.
    ///
    /// Shapes: [kv_heads * head_dim] each.
    ///
    /// Panics if it is not written.
    pub fn row(&self, position: usize) -> (Vec<bf16>, Vec<bf16>) {
        assert!(position < self.len, "cache: position {position} of {}", self.len);
        let at = position % KV_BLOCK;
        let (mut keys, mut values) = (Vec::with_capacity(self.width()), Vec::with_capacity(self.width()));
        for head in 0..self.kv_heads {
            let (k, v) = self.block(head, position / KV_BLOCK);
            for i in 0..self.head_dim {
                let key = (at / PANEL * (self.head_dim / 2) + i / 2) * PANEL + at % PANEL;
                let value = (i / PANEL * (KV_BLOCK / 2) + at / 2) * PANEL + i % PANEL;
                // SAFETY: within the panels of a block that exists, all of which is initialised.
                unsafe {
                    keys.push(half_of(*k.add(key), i));
                    values.push(half_of(*v.add(value), at));
                }
            }
        }
        (keys, values)
    }
}

impl std::fmt::Debug for PackedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PackedCache { kv_heads, head_dim, capacity, len, .. } = self;
        write!(f, "PackedCache {{ {kv_heads} heads of {head_dim}, {len} of {capacity} positions }}")
    }
}

/// The even or the odd one of a pair.
fn half_of(pair: u32, i: usize) -> bf16 {
    bf16::from_bits((pair >> (16 * (i % 2))) as u16)
}

/// Units: u32.
fn key_len(head_dim: usize) -> usize {
    KV_BLOCK * head_dim / 2
}

/// Units: u32.
fn block_len(head_dim: usize) -> usize {
    key_len(head_dim) + head_dim.div_ceil(PANEL) * (KV_BLOCK / 2 * PANEL)
}

/// Rows of one head that go to one block.
struct Piece<const KEYS: bool> {
    to: *mut u32,
    from: *const bf16,
    stride: usize,
    head_dim: usize,
    /// Where in the block.
    positions: (usize, usize),
}

impl<const KEYS: bool> Lanewise for Piece<KEYS> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        // SAFETY: `write` has checked that the positions lie within the block and the rows within its slice, and deals each block
        // out once.
        unsafe { if KEYS { self.keys(l) } else { self.values(l) } }
    }
}

impl<const KEYS: bool> Piece<KEYS> {
    #[inline(always)]
    unsafe fn keys<L: Lanes>(&self, l: L) {
        let (mut position, end) = self.positions;
        let first = position;
        while position < end {
            let (panel, column) = (position / PANEL, position % PANEL);
            // SAFETY: the caller's.
            unsafe {
                let to = self.to.add(panel * (self.head_dim / 2) * PANEL);
                let from = self.from.add((position - first) * self.stride);
                if column == 0 && position + PANEL <= end {
                    pack_panel(l, to, from, self.stride, PANEL, self.head_dim);
                    position += PANEL;
                } else {
                    for pair in 0..self.head_dim / 2 {
                        let element = |i: usize| u32::from((*from.add(2 * pair + i)).to_bits());
                        to.add(pair * PANEL + column).write(element(0) | element(1) << 16);
                    }
                    position += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<L: Lanes>(&self, l: L) {
        let (first, end) = self.positions;
        for p in 0..self.head_dim.div_ceil(PANEL) {
            for pair in first / 2..end.div_ceil(2) {
                for column in (p * PANEL..(p + 1) * PANEL).step_by(LANES) {
                    let columns = self.head_dim.saturating_sub(column).min(LANES);
                    // SAFETY: the caller's; a row's columns are cut at `head_dim`, a panel has all of PANEL.
                    unsafe {
                        let to = self.to.add((p * (KV_BLOCK / 2) + pair) * PANEL + column % PANEL);
                        let row = self.from.wrapping_add(column);
                        let even = match 2 * pair < first {
                            true => l.load_pairs(to).0,
                            false => load_padded(l, row.wrapping_add((2 * pair - first) * self.stride), columns),
                        };
                        let odd = match 2 * pair + 1 < end {
                            true => load_padded(l, row.wrapping_add((2 * pair + 1 - first) * self.stride), columns),
                            false => l.splat(0.0),
                        };
                        l.store_pairs(to, even, odd);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
