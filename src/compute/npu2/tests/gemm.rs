//! Products of BFP16 blocks, in both tiers.

use super::*;

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
