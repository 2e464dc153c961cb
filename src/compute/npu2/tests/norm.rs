//! Both RMSNorms.

use super::*;

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
