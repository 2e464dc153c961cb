//! BFP16 blocks and the rounding toward minus infinity.

use super::*;

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
