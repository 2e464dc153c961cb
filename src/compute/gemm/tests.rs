//! GEMM and GEMV against f64 and against each other, on every instruction set.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::compute::{
    Call, Pool,
    testing::{BF16, THREADS, assert_close, bits, isas, noise},
};

/// `a · wᵀ` in f64.
fn naive(a: &[bf16], w: &[bf16], m: usize, n: usize, k: usize) -> Vec<f64> {
    let row = |x: &[bf16], i: usize| x[i * k..(i + 1) * k].iter().map(|v| v.to_f64()).collect::<Vec<_>>();
    let w: Vec<_> = (0..n).map(|j| row(w, j)).collect();
    (0..m)
        .flat_map(|i| {
            let a = row(a, i);
            w.iter().map(|w| a.iter().zip(w).map(|(a, b)| a * b).sum()).collect::<Vec<f64>>()
        })
        .collect()
}

/// Noise of f32 sums of `k` products of order one.
fn sum_noise(k: usize) -> f64 {
    1e-6 * k as f64
}

#[rstest]
#[case(1, 1, 1)]
#[case(2, 31, 3)]
#[case(3, 33, 64)]
#[case(13, 65, 17)]
#[case(29, 100, 129)]
#[case(121, 192, 130)]
#[case(64, 576, 192)]
#[case(300, 33, 601)]
fn gemm_and_gemv_match_f64(#[case] m: usize, #[case] n: usize, #[case] k: usize) {
    let (a, w) = (noise(m * k, 1), noise(n * k, 2));
    let expected = naive(&a, &w, m, n, k);
    let packed = PackedWeight::pack(&Pool::new(1), &w, n, k);
    for isa in isas() {
        let mut first: Option<(Vec<u16>, Vec<f32>)> = None;
        for threads in THREADS {
            let pool = Pool::new(threads);
            let call = Call { pool: &pool, isa };
            let (mut c, mut wide) = (vec![bf16::NAN; m * n], vec![f32::NAN; m * n]);
            call.gemm(&a, &packed, &mut c);
            call.gemm_f32(&a, &packed, &mut wide);
            let name = format!("{isa} {m}x{n}x{k}, {threads} threads");
            assert_close(&name, &c, &expected, BF16, sum_noise(k));
            for (i, (wide, c)) in wide.iter().zip(&c).enumerate() {
                assert!((f64::from(*wide) - expected[i]).abs() <= sum_noise(k), "{name}: f32 element {i}");
                assert_eq!(bf16::from_f32(*wide), *c, "{name}: element {i} is not the rounded f32");
            }
            for row in 0..m {
                let (mut y, mut y_wide) = (vec![bf16::NAN; n], vec![f32::NAN; n]);
                call.gemv(&a[row * k..][..k], &packed, &mut y);
                call.gemv_f32(&a[row * k..][..k], &packed, &mut y_wide);
                assert_eq!(bits(&y), bits(&c[row * n..][..n]), "{name}: gemv differs from row {row}");
                assert_eq!(y_wide, wide[row * n..][..n], "{name}: f32 gemv differs from row {row}");
                if threads > 2 && row > 3 {
                    break;
                }
            }
            // From none to more than the largest tile has rows.
            for count in [0, 1, 2, 3, 4, 7, 14].into_iter().filter(|&count| count <= m) {
                let mut y = vec![bf16::NAN; count * n];
                call.gemvs(a.chunks(k).zip(y.chunks_mut(n)), &packed);
                assert_eq!(bits(&y), bits(&c[..count * n]), "{name}: {count} vectors");
            }
            let got = (bits(&c), wide);
            assert_eq!(*first.get_or_insert_with(|| got.clone()), got, "{name}: differs from 1 thread");
        }
    }
}

#[test]
fn instruction_sets_without_pair_products_agree_bit_for_bit() {
    let (m, n, k) = (17, 70, 301);
    let (a, pool) = (noise(m * k, 3), Pool::new(2));
    let packed = PackedWeight::pack(&pool, &noise(n * k, 4), n, k);
    let product = |isa| {
        let mut c = vec![f32::NAN; m * n];
        Call { pool: &pool, isa }.gemm_f32(&a, &packed, &mut c);
        c
    };
    let portable = product(Isa::Portable);
    for isa in isas().filter(|&isa| isa < Isa::Avx512bf16) {
        assert_eq!(product(isa), portable, "{isa}");
    }
}

#[test]
fn nan_reaches_its_row_and_column_and_nothing_else() {
    let (m, n, k) = (14, 40, 9);
    let (mut a, mut w) = (noise(m * k, 5), noise(n * k, 6));
    a[3 * k + 8] = bf16::NAN;
    w[35 * k] = bf16::NAN;
    let pool = Pool::new(2);
    let packed = PackedWeight::pack(&pool, &w, n, k);
    for isa in isas() {
        let mut c = vec![bf16::ZERO; m * n];
        Call { pool: &pool, isa }.gemm(&a, &packed, &mut c);
        for (i, c) in c.iter().enumerate() {
            assert_eq!(c.is_nan(), i / n == 3 || i % n == 35, "{isa}: row {}, column {}", i / n, i % n);
        }
    }
}

#[test]
fn no_input_gives_zero_and_no_output_is_fine() {
    let pool = Pool::new(2);
    for isa in isas() {
        let call = Call { pool: &pool, isa };
        let mut c = vec![bf16::NAN; 3 * 5];
        call.gemm(&[], &PackedWeight::pack(&pool, &[], 5, 0), &mut c);
        assert_eq!(c, [bf16::ZERO; 15]);
        call.gemm(&[], &PackedWeight::pack(&pool, &noise(20, 1), 5, 4), &mut []);
        call.gemv(&noise(4, 1), &PackedWeight::pack(&pool, &[], 0, 4), &mut []);
    }
}

#[test]
#[should_panic(expected = "gemm: a is not [2, 4]")]
fn a_wrong_shape_is_refused() {
    let pool = Pool::new(2);
    let packed = PackedWeight::pack(&pool, &noise(12, 1), 3, 4);
    Call { pool: &pool, isa: Isa::Portable }.gemm(&noise(9, 1), &packed, &mut [bf16::ZERO; 6]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_shape(m in 1usize..40, n in 1usize..80, k in 1usize..90, threads in 1usize..4, seed in any::<u64>()) {
        let (a, w) = (noise(m * k, seed), noise(n * k, !seed));
        let expected = naive(&a, &w, m, n, k);
        let pool = Pool::new(threads);
        let packed = PackedWeight::pack(&pool, &w, n, k);
        for isa in isas() {
            let mut c = vec![bf16::NAN; m * n];
            Call { pool: &pool, isa }.gemm(&a, &packed, &mut c);
            assert_close(&format!("{isa} {m}x{n}x{k}"), &c, &expected, BF16, sum_noise(k));
        }
    }
}

/// Blocks are whole tiles, fit the cache, and differ by less than a tile: no worker is left with a sliver.
#[rstest]
fn rows_are_cut_into_much_the_same_blocks(
    #[values(1, 12, 13, 128, 512, 541, 2048)] m: usize,
    #[values(1, 576, 1536, 40_000)] k: usize,
) {
    let rows = block_rows(m, k);
    let blocks = m.div_ceil(rows);
    assert!(rows.is_multiple_of(TILE) && (rows - TILE) * k * size_of::<bf16>() <= BLOCK_BYTES.max(TILE * 2 * k));
    assert!(m > (blocks - 1) * rows && blocks * rows - m < blocks * TILE, "{blocks} blocks of {rows}");
}
