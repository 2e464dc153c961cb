//! The kernels that only phase 1 and decode's fused launches use, step by step, on every instruction set.

use proptest::prelude::*;

use super::*;
use crate::compute::{
    Call, Pool, npu2,
    testing::{BF16, THREADS, assert_close, bits, isas, noise},
};

/// bf16 toward minus infinity.
fn down(x: f64) -> f64 {
    let near = bf16::from_f64(x);
    if near.to_f64() <= x { near.to_f64() } else { below(near).to_f64() }
}

fn below(x: bf16) -> bf16 {
    match x.to_bits() {
        0x0000 | 0x8000 => bf16::from_bits(0x8001),
        bits if bits & 0x8000 == 0 => bf16::from_bits(bits - 1),
        bits => bf16::from_bits(bits + 1),
    }
}

/// LayerNorm with every step rounded as `round` does.
fn layer_norm(x: &[bf16], params: &[bf16], eps: f64, round: fn(f64) -> f64) -> Vec<f64> {
    let (w, b) = params.split_at(params.len() / 2);
    let each_row = |row: &[bf16]| {
        let mean = round(row.iter().map(|x| x.to_f64()).sum::<f64>() / row.len() as f64);
        let away: Vec<f64> = row.iter().map(|x| round(x.to_f64() - mean)).collect();
        let variance = away.iter().map(|d| round(d * d)).sum::<f64>() / row.len() as f64;
        let rstd = round(1.0 / (variance + eps).sqrt());
        let value = |((d, w), b): ((&f64, &bf16), &bf16)| round(round(d * rstd) * w.to_f64() + b.to_f64());
        away.iter().zip(w).zip(b).map(value).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(each_row).collect()
}

/// A kernel's output on every instruction set and any number of threads: once, for they are all the same.
fn everywhere(len: usize, run: impl Fn(Call<'_>, Dst<bf16>)) -> Vec<bf16> {
    let mut first: Option<Vec<bf16>> = None;
    for isa in isas() {
        for threads in THREADS {
            let mut y = vec![bf16::NAN; len];
            // SAFETY: `y` outlives the run, and nobody else has it.
            run(Call { pool: &Pool::new(threads), isa }, unsafe { Dst::of(&mut y) });
            let first = first.get_or_insert_with(|| y.clone());
            assert_eq!(bits(first), bits(&y), "{isa}, {threads} threads");
        }
    }
    first.unwrap()
}

fn src<T: Copy>(x: &[T]) -> Src<T> {
    // SAFETY: the tests hold what they hand over until the run is over.
    unsafe { Src::of(x) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn layer_norm_matches_its_steps(rows in 1usize..20, cols in 2usize..300, seed in any::<u64>()) {
        let (x, params) = (noise(rows * cols, seed), noise(2 * cols, !seed));
        let run = |call: Call<'_>, y| {
            call.pool.run(&[&crate::compute::LayerNorm::<false> { x: src(&x), params: src(&params), eps: 1e-5, y, isa: call.isa }]);
        };
        assert_close("ieee", &everywhere(x.len(), run), &layer_norm(&x, &params, 1e-5, |x| x), BF16, 1e-5);
        let run = |call: Call<'_>, y| {
            call.pool.run(&[&crate::compute::LayerNorm::<true> { x: src(&x), params: src(&params), eps: 1e-5, y, isa: call.isa }]);
        };
        // A sum that falls on the other side of a bf16 moves its whole row by a step: each is 2^-7 of what it moves.
        let expected = layer_norm(&x, &params, 1e-5, down);
        assert_close("npu2", &everywhere(x.len(), run), &expected, 0.02, 0.12);
    }

    #[test]
    fn swiglu_matches_its_steps(len in 1usize..200, seed in any::<u64>()) {
        let sums: Vec<f32> = noise(2 * len, seed).iter().map(|x| x.to_f32() * 1.0009).collect();
        let run = |call: Call<'_>, out| call.pool.run(&[&Swiglu::<false> { sums: src(&sums), out, isa: call.isa }]);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let expected: Vec<f64> = sums.chunks(2).map(|pair| silu(f64::from(pair[0])) * f64::from(pair[1])).collect();
        let ieee = isas().map(|isa| {
            let mut y = vec![bf16::NAN; len];
            // SAFETY: as in `everywhere`.
            run(Call { pool: &Pool::new(2), isa }, unsafe { Dst::of(&mut y) });
            y
        });
        ieee.for_each(|y| assert_close("ieee", &y, &expected, BF16, 1e-30));
        // The NPU2's is its SiLU of the halves, rounded down.
        let halves = |first: usize| -> Vec<bf16> {
            sums[first..].iter().step_by(2).map(|&x| bf16::from_f64(down(f64::from(x)))).collect()
        };
        let (gate, up) = (halves(0), halves(1));
        let fused = everywhere(len, |call, out| {
            call.pool.run(&[&Swiglu::<true> { sums: src(&sums), out, isa: call.isa }]);
        });
        let apart = everywhere(len, |call, out| {
            call.pool.run(&[&npu2::SiluMul { gate: src(&gate), up: src(&up), out, isa: call.isa }]);
        });
        prop_assert_eq!(bits(&fused), bits(&apart));
    }

    #[test]
    fn gemv_add_rounds_where_it_says(n in 1usize..100, k in 1usize..300, narrow in 1usize..60, seed in any::<u64>()) {
        let (w, x, r, pool) = (noise(n * k, seed), noise(k, !seed), noise(n, seed ^ 7), Pool::new(2));
        let packed = PackedWeight::pack(&pool, &w, n, k);
        let dot = |row: usize, from: usize, to: usize| -> f64 {
            (from..to).map(|i| w[row * k + i].to_f64() * x[i].to_f64()).sum()
        };
        let whole: Vec<f64> = (0..n).map(|row| dot(row, 0, k) + r[row].to_f64()).collect();
        let narrow = 2 * narrow;
        let pieces: Vec<f64> = (0..n)
            .map(|row| {
                let partial = (0..k).step_by(narrow).fold(0.0, |sum, first| {
                    bf16::from_f64(sum + dot(row, first, (first + narrow).min(k))).to_f64()
                });
                partial + r[row].to_f64()
            })
            .collect();
        for isa in isas() {
            let mut y = vec![bf16::NAN; n];
            Call { pool: &pool, isa }.gemv_add(&x, &packed, &r, &mut y);
            assert_close(&format!("{isa}"), &y, &whole, BF16, 1e-4);
            // SAFETY: as in `everywhere`.
            let out = unsafe { Dst::of(&mut y) };
            pool.run(&[&GemvAdd { x: src(&x), w: &packed, r: src(&r), y: out, narrow: Some(narrow), isa }]);
            // A tie that an f32 sum decides otherwise is 2^-8 of a partial sum, which may be a few times the output.
            assert_close(&format!("{isa} narrow"), &y, &pieces, BF16, 0.3);
            let apart = y.iter().zip(&pieces).filter(|(y, p)| (y.to_f64() - **p).abs() > BF16 * p.abs() + 1e-3).count();
            prop_assert!(apart <= 1 + n / 20, "{}: {} of {} differ", isa, apart, n);
        }
    }
}

#[test]
fn nan_stays_in_its_row() {
    let (rows, cols) = (9, 77);
    let mut x = noise(rows * cols, 1);
    x[4 * cols + 76] = bf16::NAN;
    let params = noise(2 * cols, 2);
    for isa in isas() {
        let mut y = vec![bf16::ZERO; x.len()];
        Call { pool: &Pool::new(2), isa }.layer_norm(&x, &params, 1e-5, &mut y);
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i / cols == 4)), "{isa}");
    }
}
