//! Every kernel against its steps written out naively, on every instruction set and for any number of threads.

use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use super::unit::tests::{naive_exp2, naive_tanh};
use super::*;
use crate::compute::{
    self, Dst, Isa, PackedWeight, Pool, Src,
    testing::{THREADS, assert_close, bits, isas, noise},
};

fn call(pool: &Pool, isa: Isa) -> Call<'_> {
    Call(compute::Call { pool, isa })
}

/// Toward minus infinity, by search: the bf16 next below unless the nearest is already not above.
fn down(x: f64) -> f64 {
    let nearest = bf16::from_f64(x);
    if x.is_nan() || nearest.to_f64() <= x {
        return nearest.to_f64();
    }
    let bits = nearest.to_bits();
    let below = if nearest.to_f64() > 0.0 { bits - 1 } else { bits + 1 };
    bf16::from_bits(below).to_f64()
}

fn nearest(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

/// One block as its definition has it.
fn naive_block(block: &[f64]) -> Vec<f64> {
    let largest = block.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let step = (largest.max(2f64.powi(-114)).log2().floor() - 6.0).exp2();
    block.iter().map(|x| (x / step).round_ties_even().clamp(-128.0, 127.0) * step).collect()
}

fn naive_blocks(x: &[bf16], cols: usize) -> Vec<f64> {
    let rows = x.chunks(cols.max(1));
    rows.flat_map(|row| {
        let row: Vec<f64> = row.iter().map(|x| x.to_f64()).collect();
        row.chunks(BLOCK).flat_map(naive_block).collect::<Vec<_>>()
    })
    .collect()
}

fn blocks(x: &[bf16], cols: usize, isa: Isa, threads: usize) -> Vec<bf16> {
    let mut y = vec![bf16::ONE; x.len()];
    call(&Pool::new(threads), isa).blocks(x, cols, &mut y);
    y
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn blocks_are_the_naive_ones(cols in 1usize..70, rows in 1usize..6, seed in any::<u64>(), spread in 0i32..40) {
        // Values of very different size share a block.
        let x: Vec<_> = noise(rows * cols, seed)
            .into_iter()
            .enumerate()
            .map(|(i, x)| x * bf16::from_f64(2f64.powi((i as i32 * 7) % (spread + 1) - spread / 2)))
            .collect();
        let expected = naive_blocks(&x, cols);
        for isa in isas() {
            let y = blocks(&x, cols, isa, 2);
            for (i, (y, expected)) in y.iter().zip(&expected).enumerate() {
                prop_assert_eq!(y.to_f64(), *expected, "{} {} of {}", isa, i, cols);
            }
        }
    }

    #[test]
    fn blocks_are_exact_in_bf16_and_keep_their_largest(seed in any::<u64>()) {
        let x = noise(64, seed);
        for isa in isas() {
            let once = blocks(&x, 64, isa, 1);
            let twice = blocks(&once, 64, isa, 1);
            for (i, (x, y)) in x.chunks(BLOCK).zip(once.chunks(BLOCK)).enumerate() {
                let largest = |v: &[bf16]| v.iter().map(|v| v.to_f64().abs()).fold(0.0, f64::max);
                // Half a step, of which the largest has 64 or more.
                prop_assert!((largest(x) - largest(y)).abs() <= largest(x) / 128.0, "{}: block {}", isa, i);
                // -255 / 2 is -128 and makes the next exponent larger.
                if x.iter().all(|v| v.to_bits() & 0x807f != 0x807f) {
                    prop_assert_eq!(bits(y), bits(&twice[i * BLOCK..][..BLOCK]), "{}: block {}", isa, i);
                }
            }
        }
    }

    #[test]
    fn rounding_is_toward_minus_infinity(values in prop::collection::vec(any::<(u16, u16)>(), 1..60)) {
        let (a, b): (Vec<_>, Vec<_>) = values.into_iter().map(|(a, b)| (bf16::from_bits(a), bf16::from_bits(b))).unzip();
        let pool = Pool::new(1);
        for isa in isas() {
            let mut out = vec![bf16::ZERO; a.len()];
            call(&pool, isa).add(&a, &b, &mut out);
            for ((a, b), out) in a.iter().zip(&b).zip(out) {
                // The f32 sum is what is rounded; below bf16's normal numbers it may be flushed.
                let sum = f64::from(a.to_f32() + b.to_f32());
                let expected = if sum.is_infinite() { sum } else { down(sum) };
                let same = out.to_f64() == expected || (out.is_nan() && sum.is_nan());
                prop_assert!(same || sum.abs() < 1e-37, "{} {:?} + {:?} = {:?}, expected {}", isa, a, b, out, expected);
            }
        }
    }
}

#[test]
fn an_infinity_or_nan_makes_its_block_nan_and_no_other() {
    for bad in [bf16::INFINITY, bf16::NEG_INFINITY, bf16::NAN] {
        let mut x = noise(40, 1);
        x[11] = bad;
        for isa in isas() {
            let y = blocks(&x, 40, isa, 1);
            assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (8..16).contains(&i)), "{isa} {bad}: {y:?}");
        }
    }
}

#[test]
fn zeros_and_the_largest_and_smallest_numbers_are_blocks_too() {
    let x = [0.0, -0.0, f32::MAX, f32::MIN, 3e38, 1e-38, 1.0, -1.0].map(bf16::from_f32);
    let largest = bf16::MAX;
    for isa in isas() {
        let y = blocks(&[x[0]; 8], 8, isa, 1);
        assert!(y.iter().all(|y| y.to_f32() == 0.0), "{isa}");
        let y = blocks(&[x[5]; 8], 8, isa, 1);
        assert!(y.iter().all(|y| y.to_f32() == 0.0), "{isa}: below every exponent");
        let y = blocks(&[largest, largest, -largest, x[6], x[7], x[0], x[0], x[0]], 8, isa, 1);
        assert!(y.iter().all(|y| y.is_finite()), "{isa}: {y:?}");
        assert!(y[0].to_f64() >= largest.to_f64() * 0.99, "{isa}: {y:?}");
    }
}

/// `a · wᵀ` of quantised operands in f64.
fn naive_product(a: &[bf16], w: &[bf16], k: usize) -> Vec<f64> {
    let (a, w) = (naive_blocks(a, k), naive_blocks(w, k));
    a.chunks(k).flat_map(|a| w.chunks(k).map(move |w| a.iter().zip(w).map(|(a, w)| a * w).sum::<f64>())).collect()
}

#[rstest]
#[case(1, 1, 1)]
#[case(3, 33, 64)]
#[case(13, 65, 17)]
#[case(29, 100, 131)]
#[case(500, 40, 24)]
#[case(64, 576, 192)]
fn gemm_is_the_product_of_quantised_operands(#[case] m: usize, #[case] n: usize, #[case] k: usize) {
    let (a, w) = (noise(m * k, 1), noise(n * k, 2));
    let expected = naive_product(&a, &w, k);
    let packed = PackedWeight::pack(&Pool::new(1), &w, n, k);
    for isa in isas() {
        let mut first: Option<(Vec<u16>, Vec<f32>)> = None;
        for threads in THREADS {
            let pool = Pool::new(threads);
            let (mut c, mut wide) = (vec![bf16::NAN; m * n], vec![f32::NAN; m * n]);
            call(&pool, isa).gemm(&a, &packed, Tier::High, &mut c);
            call(&pool, isa).gemm_f32(&a, &packed, Tier::High, &mut wide);
            let name = format!("{isa} {m}x{n}x{k}, {threads} threads");
            for (i, (wide, c)) in wide.iter().zip(&c).enumerate() {
                assert!((f64::from(*wide) - expected[i]).abs() <= 1e-6 * k as f64, "{name}: f32 element {i}");
                assert_eq!(bf16::from_f32(*wide), *c, "{name}: element {i} is not the rounded f32");
            }
            let got = (bits(&c), wide);
            assert_eq!(*first.get_or_insert_with(|| got.clone()), got, "{name}: differs from 1 thread");
        }
        assert_eq!(packed.unpack(), w, "{isa}: the weight is not what it was");
    }
}

#[rstest]
fn the_low_tier_rounds_its_sums_after_every_tile(#[values(32, 40)] tile_k: usize, #[values(24, 200, 329)] k: usize) {
    let (m, n) = (7, 37);
    let (a, w) = (noise(m * k, 1), noise(n * k, 2));
    let (qa, qw) = (naive_blocks(&a, k), naive_blocks(&w, k));
    let mut expected = vec![];
    for a in qa.chunks(k) {
        for w in qw.chunks(k) {
            let tiles = a.chunks(tile_k).zip(w.chunks(tile_k));
            expected
                .push(tiles.fold(0.0, |sum, (a, w)| nearest(sum + a.iter().zip(w).map(|(a, w)| a * w).sum::<f64>())));
        }
    }
    let packed = PackedWeight::pack(&Pool::new(1), &w, n, k);
    for isa in isas() {
        let mut c = vec![bf16::NAN; m * n];
        call(&Pool::new(2), isa).gemm(&a, &packed, Tier::Low { tile_k }, &mut c);
        // An f32 sum that falls on the other side of a tie is one place of a partial sum off.
        let off = c.iter().zip(&expected).filter(|(c, expected)| c.to_f64() != **expected).count();
        assert!(off * 50 <= c.len(), "{isa}: {off} of {}", c.len());
        assert_close(&isa.to_string(), &c, &expected, 1.0 / 64.0, 0.05);
    }
}

#[test]
fn gemm_keeps_nan_to_its_row_and_column() {
    let (m, n, k) = (14, 40, 25);
    let (mut a, mut w) = (noise(m * k, 5), noise(n * k, 6));
    a[3 * k + 24] = bf16::NAN;
    w[35 * k] = bf16::INFINITY;
    let pool = Pool::new(2);
    let packed = PackedWeight::pack(&pool, &w, n, k);
    for isa in isas() {
        for tier in [Tier::High, Tier::Low { tile_k: 8 }] {
            let mut c = vec![bf16::ZERO; m * n];
            call(&pool, isa).gemm(&a, &packed, tier, &mut c);
            for (i, c) in c.iter().enumerate() {
                assert_eq!(c.is_nan(), i / n == 3 || i % n == 35, "{isa}: row {}, column {}", i / n, i % n);
            }
        }
    }
}

/// One kernel's name, call and steps on (x, y).
type Case = (&'static str, fn(Call<'_>, &[bf16], &[bf16], &mut [bf16]), fn(f64, f64) -> f64);

const CASES: [Case; 3] = [
    (
        "silu_mul",
        |call, x, y, out| call.silu_mul(x, y, out),
        |g, u| {
            let one_plus = down(1.0 + naive_tanh(g / 2.0));
            down(down(g * (0.5 * one_plus)) * u)
        },
    ),
    ("add", |call, x, y, out| call.add(x, y, out), |x, y| down(x + y)),
    (
        "gelu_tanh",
        |call, x, _, out| call.gelu_tanh(x, out),
        |x, _| {
            let inner = down(x + down(down(x * down(x * x)) * nearest(0.044715)));
            let one_plus = down(1.0 + naive_tanh(down(inner * nearest(std::f64::consts::FRAC_2_PI.sqrt()))));
            down(x / 2.0 * one_plus)
        },
    ),
];

#[rstest]
fn elementwise_kernels_are_their_steps(#[values(1, 15, 16, 33, 20_001)] len: usize) {
    let (x, y) = (noise(len, 1), noise(len, 2));
    for (name, kernel, steps) in CASES {
        let expected: Vec<_> = x.iter().zip(&y).map(|(x, y)| steps(x.to_f64(), y.to_f64())).collect();
        for isa in isas() {
            let mut first: Option<Vec<u16>> = None;
            for threads in THREADS {
                let mut out = vec![bf16::NAN; len];
                kernel(call(&Pool::new(threads), isa), &x, &y, &mut out);
                // tanh in f32 may fall on the other side of a tie, once in a few thousand.
                let off = out.iter().zip(&expected).filter(|(y, expected)| y.to_f64() != **expected).count();
                assert!(off * 500 <= len, "{name} {isa}: {off} of {len} differ");
                assert_close(&format!("{name} {isa}"), &out, &expected, 1.0 / 50.0, 1e-2);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name} {isa}: {threads} threads");
            }
        }
    }
}

#[test]
fn nan_stays_and_infinity_is_not_hidden() {
    let pool = Pool::new(2);
    for isa in isas() {
        for (name, kernel, _) in CASES {
            for payload in [0x7fc0, 0xffc0, 0x7f81, 0xffff] {
                let (mut x, y) = (noise(50, 1), noise(50, 2));
                for i in [0, 17, 49] {
                    x[i] = bf16::from_bits(payload);
                }
                let mut out = vec![bf16::ZERO; 50];
                kernel(call(&pool, isa), &x, &y, &mut out);
                for (i, out) in out.iter().enumerate() {
                    assert_eq!(out.is_nan(), [0, 17, 49].contains(&i), "{name} {isa}: element {i}");
                }
            }
            let mut out = vec![bf16::ZERO; 16];
            kernel(call(&pool, isa), &[bf16::INFINITY; 16], &[bf16::ONE; 16], &mut out);
            assert!(out.iter().all(|v| *v == bf16::INFINITY), "{name} {isa}: {out:?}");
        }
    }
}

#[test]
fn bias_add_starts_over_at_every_row() {
    let pool = Pool::new(3);
    for (rows, cols) in [(1, 1), (3, 17), (40, 576)] {
        let (x, bias) = (noise(rows * cols, 1), noise(cols, 2));
        for isa in isas() {
            let mut y = vec![bf16::NAN; rows * cols];
            call(&pool, isa).bias_add(&x, &bias, &mut y);
            for (i, y) in y.iter().enumerate() {
                let sum = f64::from(x[i].to_f32() + bias[i % cols].to_f32());
                assert_eq!(y.to_f64(), down(sum), "{isa} {rows}x{cols}: element {i}");
            }
        }
    }
}

#[rstest]
fn rope_sums_in_f32_and_rounds_down(
    #[values(1, 9, 300)] rows: usize,
    #[values(2, 6, 32, 64, 66, 128)] head_dim: usize,
) {
    let (x, lut) = (noise(rows * head_dim, 1), noise(rows * head_dim, 2));
    let half = head_dim / 2;
    for isa in isas() {
        let mut first: Option<Vec<u16>> = None;
        for threads in THREADS {
            let mut y = vec![bf16::NAN; x.len()];
            call(&Pool::new(threads), isa).rope(&x, &lut, head_dim, &mut y);
            for (i, y) in y.iter().enumerate() {
                let (row, j) = (i / head_dim * head_dim, i % head_dim % half);
                let at = |v: &[bf16], j: usize| v[row + j].to_f32();
                let (a, b, c, s) = (at(&x, j), at(&x, j + half), at(&lut, j), at(&lut, j + half));
                let sum = if i % head_dim < half { a * c - b * s } else { a * s + b * c };
                assert_eq!(y.to_f64(), down(f64::from(sum)), "{isa} {rows}x{head_dim}: element {i}");
            }
            assert_eq!(*first.get_or_insert_with(|| bits(&y)), bits(&y), "{isa}, {threads} threads");
        }
    }
}

/// The steps of both norms; `narrow` is decode's.
fn naive_norm(x: &[bf16], weight: &[bf16], eps: f64, narrow: bool) -> Vec<f64> {
    let mut y = vec![];
    for row in x.chunks(weight.len()) {
        let squares: Vec<f64> = row.iter().map(|x| down(x.to_f64() * x.to_f64())).collect();
        let rstd = if narrow {
            let mut sums = vec![0.0; 16];
            for squares in squares.chunks(16) {
                for (sum, square) in sums.iter_mut().zip(squares) {
                    *sum = down(*sum + square);
                }
            }
            while sums.len() > 1 {
                let (low, high) = sums.split_at(sums.len() / 2);
                sums = low.iter().zip(high).map(|(a, b)| down(a + b)).collect();
            }
            down(1.0 / down(down(sums[0] / row.len() as f64) + nearest(eps)).sqrt())
        } else {
            down(1.0 / (squares.iter().sum::<f64>() / row.len() as f64 + eps).sqrt())
        };
        y.extend(row.iter().zip(weight).map(|(x, w)| down(down(x.to_f64() * rstd) * w.to_f64())));
    }
    y
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn norms_are_their_steps(rows in 1usize..30, cols in 1usize..700, seed in any::<u64>()) {
        let (x, weight) = (noise(rows * cols, seed), noise(cols, !seed));
        for narrow in [false, true] {
            let x = if narrow { &x[..cols] } else { &x[..] };
            let expected = naive_norm(x, &weight, 1e-5, narrow);
            let mut first: Option<Vec<u16>> = None;
            for isa in isas() {
                for threads in [1, 3] {
                    let pool = Pool::new(threads);
                    let mut y = vec![bf16::NAN; x.len()];
                    if narrow {
                        call(&pool, isa).rms_norm_decode(x, &weight, 1e-5, &mut y);
                    } else {
                        call(&pool, isa).rms_norm(x, &weight, 1e-5, &mut y);
                    }
                    // rstd of an f32 sum may fall on the other side of a step, which shows in the whole row.
                    assert_close(&format!("{isa} {rows}x{cols} {narrow}"), &y, &expected, 1.0 / 50.0, 1e-6);
                    prop_assert_eq!(&*first.get_or_insert_with(|| bits(&y)), &bits(&y), "{} {} threads", isa, threads);
                }
            }
        }
    }
}

#[test]
fn norms_are_exactly_their_steps_where_f32_cannot_differ() {
    let (x, weight) = (noise(576, 3), noise(576, 4));
    for isa in isas() {
        let mut y = vec![bf16::NAN; 576];
        call(&Pool::new(1), isa).rms_norm_decode(&x, &weight, 1e-5, &mut y);
        let y: Vec<f64> = y.iter().map(|y| y.to_f64()).collect();
        assert_eq!(y, naive_norm(&x, &weight, 1e-5, true), "{isa}");
    }
}

#[test]
fn a_norm_may_be_in_place_and_nan_fills_its_row_only() {
    let (rows, cols, pool) = (10, 77, Pool::new(2));
    let (mut x, weight) = (noise(rows * cols, 1), noise(cols, 2));
    x[3 * cols + 76] = bf16::NAN;
    for isa in isas() {
        let mut apart = vec![bf16::ZERO; x.len()];
        call(&pool, isa).rms_norm(&x, &weight, 1e-5, &mut apart);
        assert!(apart.iter().enumerate().all(|(i, y)| y.is_nan() == (i / cols == 3)), "{isa}");
        let mut both = x.clone();
        let (place, len) = (both.as_mut_ptr(), both.len());
        // SAFETY: `both` and `weight` outlive the run, and the kernel allows y == x.
        let kernel = unsafe {
            RmsNorm { x: Src::new(place, len), weight: Src::of(&weight), eps: 1e-5, y: Dst::new(place, len), isa }
        };
        pool.run(&[&kernel]);
        let nan_apart =
            |values: &[bf16]| values.iter().map(|v| if v.is_nan() { 1 } else { v.to_bits() }).collect::<Vec<_>>();
        assert_eq!(nan_apart(&both), nan_apart(&apart), "{isa}");
    }
}

/// (heads, kv heads, head_dim)
type Dims = (usize, usize, usize);

/// The flash attention of the silicon, step by step, row by row.
fn naive_attention(q: &[bf16], k: &[bf16], v: &[bf16], (heads, kv_heads, head_dim): Dims, causal: bool) -> Vec<f64> {
    const LOWEST: f64 = -3.389_531_389_251_535_5e38;
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    let rows = q.len() / wide;
    let c = nearest(f64::from((1.0 / (head_dim as f32).sqrt()) * std::f32::consts::LOG2_E));
    let factor = |difference: f64| naive_exp2(nearest(difference).max(LOWEST) * c);
    let head_of = |x: &[bf16], width: usize, row: usize, head: usize| -> Vec<f64> {
        x[row * width + head * head_dim..][..head_dim].iter().map(|x| x.to_f64()).collect()
    };
    let quantised = |x: Vec<f64>| x.chunks(BLOCK).flat_map(naive_block).collect::<Vec<_>>();
    let stage_len = rows.div_ceil(256) * 64;
    let mut out = vec![];
    for row in 0..rows {
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let seen = if causal { row + 1 } else { rows };
            let q = quantised(head_of(q, wide, row, head));
            let mut merged: Option<(f64, f64, Vec<f64>)> = None;
            for stage in (0..4).rev() {
                let (mut m, mut l, mut o) = (LOWEST, 0.0, vec![0.0; head_dim]);
                for start in (stage * stage_len..((stage + 1) * stage_len).min(rows)).step_by(64) {
                    if start >= seen {
                        break;
                    }
                    let filled = 64.min(rows - start);
                    let mut s = vec![f64::NEG_INFINITY; 64];
                    for (p, s) in s.iter_mut().enumerate().take(filled.min(seen - start)) {
                        let k = quantised(head_of(k, narrow, start + p, kv));
                        *s = 0.0;
                        for (q, k) in q.chunks(64).zip(k.chunks(64)) {
                            *s = nearest(*s + q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>());
                        }
                    }
                    let new = s.iter().copied().fold(m.max(LOWEST), f64::max);
                    let p: Vec<f64> = s.iter().map(|s| factor(s - new)).collect();
                    let rescale = factor(m - new);
                    l = nearest(l * rescale + nearest(p.iter().sum()));
                    let p = quantised(p);
                    for (d, o) in o.iter_mut().enumerate() {
                        let column: Vec<f64> = (0..64)
                            .map(|p| if p < filled { head_of(v, narrow, start + p, kv)[d] } else { 0.0 })
                            .collect();
                        let sum: f64 = p.iter().zip(quantised(column)).map(|(p, v)| p * v).sum();
                        *o = nearest(nearest(*o * rescale) + sum);
                    }
                    m = new;
                }
                merged = Some(match merged {
                    None => (m, l, o),
                    Some((later_m, later_l, later_o)) => {
                        let new = m.max(later_m);
                        let (own, later) = (factor(m - new), factor(later_m - new));
                        let total = nearest(l * own + nearest(later_l * later));
                        let added = |(o, later_o): (&f64, &f64)| nearest(nearest(o * own) + nearest(later_o * later));
                        (new, total, o.iter().zip(&later_o).map(added).collect())
                    }
                });
            }
            let (_, l, o) = merged.expect("four stages");
            out.extend(o.iter().map(|o| nearest(o * nearest(1.0 / l))));
        }
    }
    out
}

struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    dims: Dims,
}

impl Inputs {
    fn new(rows: usize, dims: Dims, seed: u64) -> Inputs {
        let kv = rows * dims.1 * dims.2;
        Inputs { q: noise(rows * dims.0 * dims.2, seed), k: noise(kv, seed ^ 1000), v: noise(kv, seed ^ 2000), dims }
    }

    fn attend(&self, call: Call<'_>, causal: bool) -> Vec<bf16> {
        let mut out = vec![bf16::NAN; self.q.len()];
        let scale = 1.0 / (self.dims.2 as f32).sqrt();
        call.attention(&self.q, &self.k, &self.v, self.dims, scale, causal, &mut out);
        out
    }
}

#[rstest]
#[case(1, (1, 1, 2))]
#[case(5, (2, 1, 6))]
#[case(64, (2, 1, 64))]
#[case(65, (3, 3, 34))]
#[case(130, (4, 2, 32))]
#[case(97, (2, 1, 66))]
#[case(140, (2, 1, 128))]
#[case(300, (2, 1, 16))]
#[case(530, (1, 1, 8))]
fn attention_is_its_steps_and_the_same_for_any_threads(#[case] rows: usize, #[case] dims: Dims) {
    let inputs = Inputs::new(rows, dims, 1);
    for causal in [true, false] {
        let expected = naive_attention(&inputs.q, &inputs.k, &inputs.v, dims, causal);
        for isa in isas() {
            let mut first: Option<Vec<u16>> = None;
            for threads in THREADS {
                let pool = Pool::new(threads);
                let out = inputs.attend(call(&pool, isa), causal);
                let name = format!("{isa} {rows} rows {dims:?} causal {causal}, {threads} threads");
                // Sums in f32 that fall on the other side of a tie: few, and each a place of some bf16.
                let off = out.iter().zip(&expected).filter(|(y, expected)| y.to_f64() != **expected).count();
                assert!(off * 20 <= out.len(), "{name}: {off} of {} differ", out.len());
                assert_close(&name, &out, &expected, 0.03, 0.02);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name}");
            }
        }
    }
}

/// A masked value reaches a row through the exponent it shares, so zeros stand where the poison does.
#[rstest]
fn masked_nan_and_infinity_leave_no_trace(
    #[values(bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY)] poison: bf16,
    #[values(1, 20, 63, 64, 100)] clean: usize,
) {
    let dims = (4, 2, 34);
    let (wide, narrow) = (dims.0 * dims.2, dims.1 * dims.2);
    let with = |fill: bf16| {
        let mut inputs = Inputs::new(131, dims, 3);
        inputs.k[clean * narrow..].fill(fill);
        inputs.v[clean * narrow..].fill(fill);
        inputs.q[clean * wide..].fill(fill);
        inputs
    };
    let (zeros, poisoned) = (with(bf16::ZERO), with(poison));
    for isa in isas() {
        let pool = Pool::new(2);
        let (good, bad) = (zeros.attend(call(&pool, isa), true), poisoned.attend(call(&pool, isa), true));
        assert_eq!(bits(&good[..clean * wide]), bits(&bad[..clean * wide]), "{isa}");
        assert!(bad[clean * wide..].iter().all(|v| v.is_nan()), "{isa}: a poisoned row looks sound");
    }
}

#[rstest]
fn a_seen_nan_is_never_hidden(#[values(0, 5, 64, 69)] position: usize, #[values(0, 1, 2)] part: usize) {
    let (rows, dims) = (70, (2, 1, 32));
    let mut inputs = Inputs::new(rows, dims, 4);
    let (wide, narrow) = (64, 32);
    match part {
        0 => inputs.q[position * wide + 3] = bf16::NAN,
        1 => inputs.k[position * narrow + 3] = bf16::NAN,
        _ => inputs.v[position * narrow + 3] = bf16::NAN,
    }
    for isa in isas() {
        let out = inputs.attend(call(&Pool::new(2), isa), true);
        for (i, v) in out.iter().enumerate() {
            let (row, column) = (i / wide, i % wide);
            let expected = match part {
                0 => row == position && column < 32,
                1 => row >= position,
                _ => row >= position && column % 32 == 3,
            };
            assert_eq!(v.is_nan(), expected, "{isa}: row {row}, column {column}");
        }
    }
}
