//! Elementwise kernels against f64, on every instruction set.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::compute::{
    Call, Pool,
    testing::{BF16, THREADS, assert_close, bits, isas, noise},
};

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    // The sigmoid form, because 1 + tanh cancels for large negative u.
    x / (1.0 + (-2.0 * u).exp())
}

/// One kernel's name, call and f64 formula on (x, y).
type Case = (&'static str, fn(Call<'_>, &[bf16], &[bf16], &mut [bf16]), fn(f64, f64) -> f64);

const CASES: [Case; 3] = [
    ("silu_mul", |call, x, y, out| call.silu_mul(x, y, out), |x, y| silu(x) * y),
    ("add", |call, x, y, out| call.add(x, y, out), |x, y| x + y),
    ("gelu_tanh", |call, x, _, out| call.gelu_tanh(x, out), |x, _| gelu(x)),
];

#[rstest]
fn kernels_match_f64(#[values(1, 15, 16, 33, 576, 20_001, 700_003)] len: usize) {
    let (x, y) = (noise(len, 1), noise(len, 2));
    for (name, call, formula) in CASES {
        let expected: Vec<_> = x.iter().zip(&y).map(|(x, y)| formula(x.to_f64(), y.to_f64())).collect();
        for isa in isas() {
            let mut first: Option<Vec<u16>> = None;
            for threads in THREADS {
                let mut out = vec![bf16::NAN; len];
                call(Call { pool: &Pool::new(threads), isa }, &x, &y, &mut out);
                // Near the middle between two bf16 the exponential's 9e-5 decide.
                assert_close(&format!("{name} {isa}"), &out, &expected, BF16 + 9e-5, 1e-30);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{name} {isa}: {threads} threads");
            }
        }
    }
}

#[test]
fn every_finite_bf16_through_silu_and_gelu() {
    let x: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).filter(|x| x.is_finite()).collect();
    let one = vec![bf16::ONE; x.len()];
    let pool = Pool::new(2);
    for isa in isas() {
        for (name, call, formula) in [CASES[0], CASES[2]] {
            let mut out = vec![bf16::NAN; x.len()];
            call(Call { pool: &pool, isa }, &x, &one, &mut out);
            let expected: Vec<_> = x.iter().map(|x| formula(x.to_f64(), 1.0)).collect();
            // Below 1e-35 a value may be flushed to zero.
            assert_close(&format!("{name} {isa}"), &out, &expected, BF16, 1e-35);
        }
    }
}

#[test]
fn bias_add_matches_f64_and_starts_over_at_every_row() {
    let pool = Pool::new(3);
    for (rows, cols) in [(1, 1), (1, 20_000), (3, 17), (40, 576), (70, 192), (1300, 577)] {
        let (x, bias) = (noise(rows * cols, 1), noise(cols, 2));
        let expected: Vec<_> = x.iter().enumerate().map(|(i, x)| x.to_f64() + bias[i % cols].to_f64()).collect();
        for isa in isas() {
            let mut y = vec![bf16::NAN; rows * cols];
            Call { pool: &pool, isa }.bias_add(&x, &bias, &mut y);
            assert_close(&format!("bias_add {isa} {rows}x{cols}"), &y, &expected, BF16, 1e-30);
        }
    }
}

#[test]
fn nan_stays_where_it_is() {
    let pool = Pool::new(2);
    let len = 50;
    for payload in [0x7fc0, 0xffc0, 0x7f81, 0xffff] {
        for isa in isas() {
            for (name, call, _) in CASES {
                let (mut x, y) = (noise(len, 1), noise(len, 2));
                for i in [0, 17, 49] {
                    x[i] = bf16::from_bits(payload);
                }
                let mut out = vec![bf16::ZERO; len];
                call(Call { pool: &pool, isa }, &x, &y, &mut out);
                for (i, out) in out.iter().enumerate() {
                    assert_eq!(out.is_nan(), [0, 17, 49].contains(&i), "{name} {isa}: element {i}");
                }
            }
        }
    }
}

#[test]
fn infinity_is_not_hidden() {
    let pool = Pool::new(1);
    let (x, y) = (vec![bf16::INFINITY; 16], vec![bf16::ONE; 16]);
    for isa in isas() {
        for (name, call, _) in CASES {
            let mut out = vec![bf16::ZERO; 16];
            call(Call { pool: &pool, isa }, &x, &y, &mut out);
            assert!(out.iter().all(|v| *v == bf16::INFINITY), "{name} {isa}");
        }
    }
}

#[test]
fn the_output_may_be_an_input() {
    let pool = Pool::new(2);
    let (a, b) = (noise(1001, 1), noise(1001, 2));
    for isa in isas() {
        let mut apart = vec![bf16::NAN; 1001];
        Call { pool: &pool, isa }.silu_mul(&a, &b, &mut apart);
        let mut both = a.clone();
        let (place, b) = (both.as_mut_ptr(), b.as_ptr());
        // SAFETY: `both` and `b` outlive the run, and the kernel allows its output to be `gate`.
        let kernel = unsafe {
            SiluMul::<false> { gate: Src::new(place, 1001), up: Src::new(b, 1001), out: Dst::new(place, 1001), isa }
        };
        pool.run(&[&kernel]);
        assert_eq!(bits(&both), bits(&apart), "{isa}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn rounding_is_to_nearest_even(values in prop::collection::vec(any::<(u16, u16)>(), 1..60)) {
        // The sum of two bf16 exercises the rounding; half's own is the reference. Subnormals may be flushed.
        let (a, b): (Vec<_>, Vec<_>) = values.into_iter().map(|(a, b)| (bf16::from_bits(a), bf16::from_bits(b))).unzip();
        let pool = Pool::new(1);
        for isa in isas() {
            let mut out = vec![bf16::ZERO; a.len()];
            Call { pool: &pool, isa }.add(&a, &b, &mut out);
            for ((a, b), out) in a.iter().zip(&b).zip(out) {
                let sum = a.to_f32() + b.to_f32();
                let expected = bf16::from_f32(sum);
                let tiny = sum.abs() < 1e-37 && out.to_f32().abs() < 1e-37;
                prop_assert!(out == expected || tiny || (out.is_nan() && expected.is_nan()), "{} {:?} + {:?}", isa, a, b);
            }
        }
    }
}
