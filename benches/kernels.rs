//! Speed of the compute library on the shapes of SmolLM2-135M, next to the limits of the machine it runs on.
//!
//! The first line says what the silicon gives: pair products out of registers, a stream out of memory. A kernel's figure
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
    compute::{Call, Ceiling, Isa, PackedCache, PackedWeight, Pool},
    settings,
};

fn main() {
    let ceiling = Ceiling::new(&POOL, *ISA, 256 << 20);
    let best = |rate: &dyn Fn() -> f64| (0..5).map(|_| rate()).fold(0.0, f64::max) / 1e9;
    let (products, stream) = (best(&|| ceiling.products()), best(&|| ceiling.stream()));
    println!("ceilings: {products:.1} Gitem/s of pair products, {stream:.1} GB/s of stream ({})", *ISA);
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

/// One pass over caches that are in no cache of the CPU: as decoding finds those of each layer.
#[divan::bench(args = [128, 1024])]
fn decode_attention(bencher: Bencher, len: usize) {
    let bytes = PackedCache::bytes(HEADS.1, HEADS.2, len);
    let layers: Vec<_> = (0..(192usize << 20).div_ceil(bytes)).map(|_| cache(len)).collect();
    let (q, mut out) = (values(576), vec![bf16::ZERO; 576]);
    bencher.counter(BytesCount::new(bytes * layers.len())).bench_local(|| {
        for cache in &layers {
            call().decode_attention(black_box(&q), cache, HEADS.0, 0.125, &mut out);
        }
    });
}

fn cache(len: usize) -> PackedCache {
    let mut cache = PackedCache::new(HEADS.1, HEADS.2, len);
    cache.write_keys(&POOL, 0, &values(len * 192));
    cache.write_values(&POOL, 0, &values(len * 192));
    cache
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
