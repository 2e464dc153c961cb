//! What the machine at hand gives: pair products out of registers, a stream out of memory.
//!
//! A kernel's rate means something only as a share of a ceiling measured in the same run. May not be used to judge
//! results: it measures the silicon and whoever else uses it now.
#![allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]

use std::hint::black_box;
use std::time::Instant;

use half::bf16;

use super::{
    Isa,
    arena::{self, Region},
    lanes::{LANES, Lanes, Lanewise},
    pool::Pool,
};

/// Pair products of one piece of [`Ceiling::products`], per accumulator: some ten microseconds.
const ROUNDS: usize = 2_000;
/// Pieces of each worker: some milliseconds, beside which waking a worker up is nothing.
const PIECES: usize = 256;
/// Bytes of one piece of [`Ceiling::stream`].
const PIECE: usize = 256 << 10;
/// How far ahead the stream asks for cache lines, in u32.
const AHEAD: usize = 1024;

/// Memory and workers to measure with.
pub struct Ceiling<'a> {
    pool: &'a Pool,
    isa: Isa,
    region: Region,
    bytes: usize,
}

impl<'a> Ceiling<'a> {
    /// With `bytes` of memory to stream from (rounded to whole pieces), which should be many times what caches hold.
    pub fn new(pool: &'a Pool, isa: Isa, bytes: usize) -> Ceiling<'a> {
        let bytes = bytes.next_multiple_of(PIECE);
        let region = arena::region(bytes);
        // SAFETY: the region has that many bytes; written once, so that no page of it is the shared page of zeros.
        unsafe { region.start().write_bytes(1, bytes) };
        Ceiling { pool, isa, region, bytes }
    }

    /// Rate of multiply-adds of bf16 pairs into f32 when nothing leaves the registers, on all workers at once.
    ///
    /// Units: FLOP/s, a multiply-add being two.
    pub fn products(&self) -> f64 {
        let pieces = self.pool.threads() * PIECES;
        let started = Instant::now();
        self.pool.for_each(pieces, |_| self.isa.dispatch(Products));
        let accumulators = self.isa.dispatch(Accumulators);
        (pieces * ROUNDS * accumulators * 4 * LANES) as f64 / started.elapsed().as_secs_f64()
    }

    /// Rate of one pass over the memory.
    ///
    /// Units: bytes/s.
    pub fn stream(&self) -> f64 {
        let start = Start(self.region.start().cast::<u32>().as_ptr());
        let started = Instant::now();
        self.pool.for_each(self.bytes / PIECE, |i| {
            // SAFETY: piece `i` lies within the region, all of which was written by `new`.
            self.isa.dispatch(Stream { from: unsafe { start.piece(i) } });
        });
        self.bytes as f64 / started.elapsed().as_secs_f64()
    }
}

/// The start of the region, shared by the workers.
struct Start(*const u32);

// SAFETY: workers only read.
unsafe impl Sync for Start {}

impl Start {
    /// # Safety
    /// Piece `i` lies within the region.
    unsafe fn piece(&self, i: usize) -> *const u32 {
        // SAFETY: the caller's.
        unsafe { self.0.add(i * (PIECE / size_of::<u32>())) }
    }
}

/// Accumulators that stay in registers: enough to hide the latency of a product.
const fn accumulators<L: Lanes>() -> usize {
    if L::TILE_ROWS >= 12 { 24 } else { 4 }
}

struct Accumulators;

impl Lanewise for Accumulators {
    type Output = usize;

    #[inline(always)]
    fn with<L: Lanes>(self, _: L) -> usize {
        accumulators::<L>()
    }
}

struct Products;

impl Lanewise for Products {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        if accumulators::<L>() == 24 { products::<L, 24>(l) } else { products::<L, 4>(l) }
    }
}

#[inline(always)]
fn products<L: Lanes, const N: usize>(l: L) {
    let ones = black_box([bf16::ONE; 2 * LANES]);
    // SAFETY: two bf16, and sixteen pairs of them.
    let (a, w) = unsafe { (l.pair(ones.as_ptr()), l.pairs(ones.as_ptr().cast())) };
    let mut sums = [l.splat(0.0); N];
    for _ in 0..ROUNDS {
        for i in 0..N {
            sums[i] = l.dot(sums[i], a, w);
        }
    }
    let mut total = sums[0];
    for i in 1..N {
        total = l.add(total, sums[i]);
    }
    black_box(l.sum(total));
}

struct Stream {
    from: *const u32,
}

impl Lanewise for Stream {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        const LINES: usize = 4;
        let mut sums = [l.splat(0.0); LINES];
        for i in (0..PIECE / size_of::<u32>()).step_by(LINES * LANES) {
            for v in 0..LINES {
                let at = self.from.wrapping_add(i + v * LANES);
                l.prefetch(at.wrapping_add(AHEAD));
                // SAFETY: the piece has sixteen f32 from here on.
                sums[v] = l.max(sums[v], unsafe { l.load(at.cast()) });
            }
        }
        for v in 1..LINES {
            sums[0] = l.max(sums[0], sums[v]);
        }
        black_box(l.sum(sums[0]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_both_ceilings() {
        let pool = Pool::new(2);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let ceiling = Ceiling::new(&pool, isa, 3 << 20);
            for rate in [ceiling.products(), ceiling.stream()] {
                // Between a thousandth and a thousand times of what machines give: work was done, and was counted.
                assert!((1e7..1e15).contains(&rate), "{isa}: {rate}");
            }
        }
    }
}
