//! Speed of the compute library on the shapes of SmolLM2-135M, next to the limits of the machine it runs on.
//!
//! `ceiling` measures what the silicon gives: pair products out of registers, a stream out of memory. A kernel's figure
//! means something only as a ratio to the ceiling of the same run. Items are floating-point operations (a multiply-add
//! is two), bytes are bytes of weights or caches read.
//!
//! `cargo bench --bench kernels -- gemv` runs one group; `PHASEGATE_ISA` and `PHASEGATE_THREADS` hold as everywhere.

use std::{hint::black_box, sync::LazyLock};

use divan::{
    Bencher,
    counter::{BytesCount, ItemsCount},
};
use half::bf16;
use phasegate::{
    compute::{Call, Isa, PackedWeight, Pool},
    settings,
};

fn main() {
    divan::main();
}

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::new(settings::threads().expect("PHASEGATE_THREADS")));

static ISA: LazyLock<Isa> =
    LazyLock::new(|| settings::isa().map_or_else(Isa::detect, |name| name.parse().expect("PHASEGATE_ISA")));

fn call() -> Call<'static> {
    Call { pool: &POOL, isa: *ISA }
}

/// Values of order one, all different from their neighbours.
fn values(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0)).collect()
}

fn weight(n: usize, k: usize) -> PackedWeight {
    PackedWeight::pack(&POOL, &values(n * k), n, k)
}

/// Enough copies of a weight that no cache keeps them: decoding reads each once per token.
fn cold_weights(n: usize, k: usize) -> Vec<PackedWeight> {
    let rows = values(n * k);
    let copies = (192usize << 20).div_ceil(rows.len() * 2);
    (0..copies).map(|_| PackedWeight::pack(&POOL, &rows, n, k)).collect()
}

/// (n, k) of SmolLM2's projections: q and o, k and v, gate and up, down.
const PROJECTIONS: [(usize, usize); 4] = [(576, 576), (192, 576), (1536, 576), (576, 1536)];

const LM_HEAD: (usize, usize) = (49152, 576);

#[divan::bench(args = PROJECTIONS, consts = [128, 512])]
fn gemm<const M: usize>(bencher: Bencher, (n, k): (usize, usize)) {
    let (a, w, mut c) = (values(M * k), weight(n, k), vec![bf16::ZERO; M * n]);
    bencher.counter(ItemsCount::new(2 * M * n * k)).bench_local(|| call().gemm(black_box(&a), &w, &mut c));
}

/// One pass over weights that are in no cache.
#[divan::bench(args = [PROJECTIONS[0], PROJECTIONS[1], PROJECTIONS[2], PROJECTIONS[3], LM_HEAD])]
fn gemv(bencher: Bencher, (n, k): (usize, usize)) {
    let (x, weights, mut y) = (values(k), cold_weights(n, k), vec![bf16::ZERO; n]);
    let bytes: usize = weights.iter().map(PackedWeight::bytes).sum();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        for w in &weights {
            call().gemv(black_box(&x), w, &mut y);
        }
    });
}

const HEADS: (usize, usize, usize) = (9, 3, 64);

#[divan::bench(args = [128, 512, 2048])]
fn attention(bencher: Bencher, rows: usize) {
    let (q, k, v) = (values(rows * 576), values(rows * 192), values(rows * 192));
    let mut out = vec![bf16::ZERO; rows * 576];
    // Two products of 64 for every seen position of every head.
    let flops = 2 * 2 * 64 * 9 * rows * (rows + 1) / 2;
    bencher
        .counter(ItemsCount::new(flops))
        .bench_local(|| call().attention(black_box(&q), &k, &v, HEADS, 0.125, true, &mut out));
}

#[divan::bench(args = [128, 1024])]
fn decode_attention(bencher: Bencher, len: usize) {
    let (q, k, v) = (values(576), values(len * 192), values(len * 192));
    let mut out = vec![bf16::ZERO; 576];
    bencher
        .counter(BytesCount::new(2 * 2 * len * 192))
        .bench_local(|| call().decode_attention(black_box(&q), &k, &v, HEADS, 0.125, &mut out));
}

/// The kernels between the products, for 1 and 512 tokens.
mod rowwise {
    use super::*;

    #[divan::bench(args = [1, 512])]
    fn rms_norm(bencher: Bencher, rows: usize) {
        let (x, w, mut y) = (values(rows * 576), values(576), vec![bf16::ZERO; rows * 576]);
        bencher.counter(ItemsCount::new(x.len())).bench_local(|| call().rms_norm(black_box(&x), &w, 1e-5, &mut y));
    }

    #[divan::bench(args = [1, 512])]
    fn rope(bencher: Bencher, rows: usize) {
        let (x, lut, mut y) = (values(rows * 576), values(rows * 576), vec![bf16::ZERO; rows * 576]);
        bencher.counter(ItemsCount::new(x.len())).bench_local(|| call().rope(black_box(&x), &lut, 64, &mut y));
    }

    #[divan::bench(args = [1, 512])]
    fn silu_mul(bencher: Bencher, rows: usize) {
        let (gate, up, mut out) = (values(rows * 1536), values(rows * 1536), vec![bf16::ZERO; rows * 1536]);
        bencher.counter(ItemsCount::new(up.len())).bench_local(|| call().silu_mul(black_box(&gate), &up, &mut out));
    }

    #[divan::bench(args = [1, 512])]
    fn add(bencher: Bencher, rows: usize) {
        let (a, b, mut out) = (values(rows * 576), values(rows * 576), vec![bf16::ZERO; rows * 576]);
        bencher.counter(ItemsCount::new(a.len())).bench_local(|| call().add(black_box(&a), &b, &mut out));
    }
}

/// What a wake-up and a barrier cost.
#[divan::bench]
fn empty_dispatch(bencher: Bencher) {
    bencher.bench_local(|| POOL.for_each(1, |i| _ = black_box(i)));
}

/// Packing of the LM head, bytes of the packed weight.
#[divan::bench(sample_count = 10)]
fn pack(bencher: Bencher) {
    let (n, k) = LM_HEAD;
    let rows = values(n * k);
    bencher.counter(BytesCount::new(2 * n * k)).bench_local(|| PackedWeight::pack(&POOL, black_box(&rows), n, k));
}

/// The limits of the machine.
#[cfg(target_arch = "x86_64")]
mod ceiling {
    use std::{
        arch::x86_64::*,
        sync::atomic::{AtomicU64, Ordering},
    };

    use super::*;

    /// Pair products on registers, on all cores at once.
    #[divan::bench]
    fn vdpbf16ps(bencher: Bencher) {
        const ROUNDS: usize = 20_000;
        if !Isa::Avx512bf16.supported() {
            return;
        }
        let flops = POOL.threads() * ROUNDS * 24 * 64;
        // SAFETY: the CPU has the instructions.
        let body = |_| unsafe { pair_products(ROUNDS) };
        bencher.counter(ItemsCount::new(flops)).bench_local(|| POOL.for_each(POOL.threads(), body));
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pair_products(rounds: usize) {
        let one = black_box(_mm512_set1_epi32(0x3f80_3f80));
        // SAFETY: both are 64 bytes without invalid values.
        let one = unsafe { std::mem::transmute::<__m512i, __m512bh>(one) };
        let mut sums = [_mm512_setzero_ps(); 24];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, one, one);
            }
        }
        black_box(sums);
    }

    /// A read of memory that is in no cache, in huge pages where the system gives them, with software prefetch.
    #[divan::bench]
    fn stream(bencher: Bencher) {
        if !Isa::Avx2.supported() {
            return;
        }
        // A packed weight is exactly such memory.
        let weights = cold_weights(49152, 1024);
        let bytes: usize = weights.iter().map(PackedWeight::bytes).sum();
        let pieces: Vec<&[u8]> = weights.iter().flat_map(|w| w.as_bytes().chunks(256 << 10)).collect();
        let total = AtomicU64::new(0);
        // SAFETY: the CPU has the instructions.
        let body = |i: usize| total.fetch_add(unsafe { sum(pieces[i]) }, Ordering::Relaxed);
        bencher.counter(BytesCount::new(bytes)).bench_local(|| POOL.for_each(pieces.len(), |i| _ = body(i)));
        black_box(total);
    }

    #[target_feature(enable = "avx2")]
    fn sum(piece: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 4];
        for chunk in piece.chunks_exact(128) {
            let at = chunk.as_ptr();
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(4096).cast());
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(4096 + 64).cast());
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: 32 bytes of the chunk.
                let v = unsafe { _mm256_loadu_si256(at.add(32 * i).cast()) };
                *sum = _mm256_xor_si256(*sum, v);
            }
        }
        let all = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
        _mm256_extract_epi64::<0>(all) as u64 ^ _mm256_extract_epi64::<3>(all) as u64
    }
}
