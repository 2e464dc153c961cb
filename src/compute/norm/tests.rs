//! RMSNorm against f64, on every instruction set.

use proptest::prelude::*;

use super::*;
use crate::compute::{
    Call, Pool,
    testing::{BF16, THREADS, assert_close, bits, isas, noise},
};

fn naive(x: &[bf16], weight: &[bf16], eps: f64) -> Vec<f64> {
    x.chunks(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / row.len() as f64;
            let rstd = 1.0 / (mean + eps).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x.to_f64() * rstd * w.to_f64()).collect::<Vec<_>>()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn matches_f64_and_is_the_same_everywhere(rows in 1usize..50, cols in 1usize..700, seed in any::<u64>()) {
        let (x, weight) = (noise(rows * cols, seed), noise(cols, !seed));
        let expected = naive(&x, &weight, 1e-5);
        let mut first: Option<Vec<u16>> = None;
        for isa in isas() {
            for threads in THREADS {
                let mut y = vec![bf16::NAN; x.len()];
                Call { pool: &Pool::new(threads), isa }.rms_norm(&x, &weight, 1e-5, &mut y);
                assert_close(&format!("{isa} {rows}x{cols}"), &y, &expected, BF16, 1e-30);
                prop_assert_eq!(&*first.get_or_insert_with(|| bits(&y)), &bits(&y), "{} {} threads", isa, threads);
            }
        }
    }
}

#[test]
fn nan_fills_its_row_only() {
    let (rows, cols) = (40, 576);
    let mut x = noise(rows * cols, 1);
    x[7 * cols + 575] = bf16::NAN;
    let weight = noise(cols, 2);
    for isa in isas() {
        let mut y = vec![bf16::ZERO; rows * cols];
        Call { pool: &Pool::new(2), isa }.rms_norm(&x, &weight, 1e-5, &mut y);
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i / cols == 7)), "{isa}");
    }
}

#[test]
fn in_place_equals_apart() {
    let (x, weight, pool) = (noise(10 * 77, 1), noise(77, 2), Pool::new(2));
    for isa in isas() {
        let mut apart = vec![bf16::NAN; x.len()];
        Call { pool: &pool, isa }.rms_norm(&x, &weight, 1e-5, &mut apart);
        let mut both = x.clone();
        let (place, len) = (both.as_mut_ptr(), both.len());
        // SAFETY: `both` and `weight` outlive the run, and the kernel allows y == x.
        let kernel = unsafe {
            RmsNorm::<false> {
                x: Src::new(place, len),
                weight: Src::of(&weight),
                eps: 1e-5,
                y: Dst::new(place, len),
                isa,
            }
        };
        pool.run(&[&kernel]);
        assert_eq!(bits(&both), bits(&apart), "{isa}");
    }
}
