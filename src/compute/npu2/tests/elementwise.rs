//! Elementwise kernels and RoPE.

use super::*;

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
