//! RoPE against f64, on every instruction set.

use rstest::rstest;

use super::*;
use crate::compute::{
    Call, Pool,
    testing::{BF16, THREADS, assert_close, bits, isas, noise},
};

fn naive(x: &[bf16], lut: &[bf16], head_dim: usize) -> Vec<f64> {
    let half = head_dim / 2;
    let mut y = vec![0.0; x.len()];
    for (row, y) in y.chunks_mut(head_dim).enumerate() {
        let (x, lut) = (&x[row * head_dim..], &lut[row * head_dim..]);
        for i in 0..half {
            let (a, b, c, s) = (x[i].to_f64(), x[i + half].to_f64(), lut[i].to_f64(), lut[i + half].to_f64());
            y[i] = a * c - b * s;
            y[i + half] = a * s + b * c;
        }
    }
    y
}

#[rstest]
fn matches_f64_and_is_the_same_everywhere(
    #[values(1, 9, 300)] rows: usize,
    #[values(2, 6, 32, 64, 66, 80, 128)] head_dim: usize,
) {
    let (x, lut) = (noise(rows * head_dim, 1), noise(rows * head_dim, 2));
    let expected = naive(&x, &lut, head_dim);
    let mut first: Option<Vec<u16>> = None;
    for isa in isas() {
        for threads in THREADS {
            let pool = Pool::new(threads);
            let mut y = vec![bf16::NAN; x.len()];
            Call { pool: &pool, isa }.rope(&x, &lut, head_dim, &mut y);
            assert_close(&format!("{isa} {rows}x{head_dim}"), &y, &expected, BF16, 1e-6);
            assert_eq!(*first.get_or_insert_with(|| bits(&y)), bits(&y), "{isa}, {threads} threads");
            let mut both = x.clone();
            let (place, len) = (both.as_mut_ptr(), both.len());
            // SAFETY: `both` and `lut` outlive the run, and the kernel allows y == x.
            let kernel = unsafe {
                Rope::<false> { x: Src::new(place, len), lut: Src::of(&lut), y: Dst::new(place, len), head_dim, isa }
            };
            pool.run(&[&kernel]);
            assert_eq!(bits(&both), bits(&y), "{isa}: in place");
        }
    }
}

#[test]
fn nan_reaches_its_partner_only() {
    let (head_dim, pool) = (34, Pool::new(1));
    for isa in isas() {
        let mut x = noise(2 * head_dim, 1);
        x[head_dim + 16] = bf16::NAN;
        let mut y = vec![bf16::ZERO; 2 * head_dim];
        Call { pool: &pool, isa }.rope(&x, &noise(2 * head_dim, 2), head_dim, &mut y);
        assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i == head_dim + 16 || i == head_dim + 33)), "{isa}");
    }
}
