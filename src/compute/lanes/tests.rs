//! Every instruction set's lanes against plain arithmetic.

use super::*;
use crate::compute::{
    exp::exp2,
    testing::{bits, isas, noise},
};

/// `2^x`, or `1 / x` where that is asked for.
struct Unary<'a>(&'a [f32], bool);

impl Lanewise for Unary<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> Vec<f32> {
        let mut out = vec![0.0; self.0.len()];
        for i in (0..self.0.len()).step_by(LANES) {
            // SAFETY: the test passes whole vectors.
            unsafe {
                let x = l.load(self.0.as_ptr().add(i));
                l.store(out.as_mut_ptr().add(i), if self.1 { l.reciprocal(x) } else { exp2(l, x) });
            }
        }
        out
    }
}

#[test]
fn exp2_is_within_9e_5() {
    let x: Vec<f32> = (0..1 << 16).map(|i| -125.0 + i as f32 * (252.0 / 65536.0)).collect();
    for isa in isas() {
        for (x, y) in x.iter().zip(isa.dispatch(Unary(&x, false))) {
            let exact = f64::from(*x).exp2();
            assert!((f64::from(y) / exact - 1.0).abs() <= 9e-5, "{isa}: 2^{x} = {y}");
        }
    }
}

#[test]
fn exp2_at_the_ends_and_at_integers() {
    let small = [f32::NEG_INFINITY, f32::MIN, -1e30, -200.0, -127.5, -126.5];
    let nan = [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)];
    let large = [f32::INFINITY, f32::MAX, 1e30, 129.0, 128.0];
    let whole: Vec<f32> = (-125..128).map(|n| n as f32).collect();
    let one = [0.0, -0.0, 1e-40, 1e-30];
    let mut x = [&small[..], &nan, &large, &one, &whole].concat();
    x.resize(x.len().next_multiple_of(LANES), 0.0);
    for isa in isas() {
        let y = isa.dispatch(Unary(&x, false));
        let (end, nans, top) = (small.len(), small.len() + nan.len(), small.len() + nan.len() + large.len());
        assert!(y[..end].iter().all(|y| (0.0..1e-37).contains(y)), "{isa}: {y:?}");
        assert!(y[end..nans].iter().all(|y| y.is_nan()), "{isa}: {y:?}");
        assert!(y[nans..top].iter().all(|y| *y == f32::INFINITY), "{isa}: {y:?}");
        assert_eq!(y[top..top + one.len()], [1.0; 4], "{isa}");
        // A power of two rescales what came before: that must not cost a rounding.
        for (x, y) in whole.iter().zip(&y[top + one.len()..]) {
            assert_eq!(*y, x.exp2(), "{isa}: 2^{x}");
        }
    }
}

#[test]
fn a_reciprocal_is_within_an_ulp() {
    let mut v: Vec<f32> = (0..1 << 16).map(|i| f32::from_bits((127 << 23) + i * ((127 << 23) / (1 << 16)))).collect();
    v.extend([f32::INFINITY, f32::MAX, f32::NAN, 1.0].repeat(4));
    for isa in isas() {
        for (v, y) in v.iter().zip(isa.dispatch(Unary(&v, true))) {
            let exact = 1.0 / f64::from(*v);
            let room = if exact < 2f64.powi(-125) { 2f64.powi(-148) } else { exact * 2f64.powi(-23) };
            let close = (f64::from(y) - exact).abs() <= room;
            assert!(if v.is_nan() { y.is_nan() } else { close }, "{isa}: 1 / {v} = {y}");
            assert!(*v != f32::INFINITY || y == 0.0, "{isa}: 1 / infinity = {y}");
        }
    }
}

/// Sixteen pairs there and back: as numbers, and rounded again.
struct Pairs<'a>(&'a [bf16], f32);

impl Lanewise for Pairs<'_> {
    type Output = [Vec<bf16>; 2];

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> [Vec<bf16>; 2] {
        let len = self.0.len();
        let (mut paired, mut plain) = (vec![bf16::ZERO; len], vec![bf16::ZERO; len]);
        let factor = l.splat(self.1);
        // An odd element first: pairs need not be aligned.
        for i in (1..len - 2 * LANES).step_by(2 * LANES) {
            // SAFETY: 32 elements from `i` on exist in all of them.
            unsafe {
                let (even, odd) = l.load_pairs(self.0.as_ptr().add(i).cast());
                l.store_bf16_pairs(paired.as_mut_ptr().add(i), l.mul(even, factor), l.mul(odd, factor));
                for at in [i, i + LANES] {
                    l.store_bf16(plain.as_mut_ptr().add(at), l.mul(l.load_bf16(self.0.as_ptr().add(at)), factor));
                }
            }
        }
        [paired, plain]
    }
}

#[test]
fn pairs_are_rounded_as_single_numbers_are() {
    let mut x = noise(1 + 64 * LANES, 3);
    x[5] = bf16::NAN;
    x[6] = bf16::NEG_INFINITY;
    x[37] = bf16::MAX;
    for isa in isas() {
        for factor in [1.0, 1.000_1, -0.333_3, 3.1] {
            let [paired, plain] = isa.dispatch(Pairs(&x, factor));
            assert_eq!(bits(&paired), bits(&plain), "{isa}: times {factor}");
            assert!(paired[5].is_nan() && paired[6].is_infinite() && paired[9] != bf16::ZERO, "{isa}");
        }
    }
}

/// Sums or maxima of sixteen rows at once, and one by one.
struct Each<'a>(&'a [f32], bool);

impl Lanewise for Each<'_> {
    type Output = [Vec<f32>; 2];

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> [Vec<f32>; 2] {
        let (mut each, mut single) = (vec![0.0; LANES], vec![0.0; LANES]);
        // SAFETY: the test passes sixteen rows of sixteen.
        unsafe {
            let rows = self.0.as_ptr();
            l.store(each.as_mut_ptr(), if self.1 { l.largest_of_each(rows) } else { l.sum_of_each(rows) });
            for (i, single) in single.iter_mut().enumerate() {
                let row = l.load(rows.add(i * LANES));
                *single = if self.1 { l.largest(row) } else { l.sum(row) };
            }
        }
        [each, single]
    }
}

#[test]
fn sixteen_rows_at_once_are_folded_as_one_by_one() {
    let rows: Vec<f32> = noise(LANES * LANES, 5).iter().map(|x| x.to_f32() * 1.000_1).collect();
    for isa in isas() {
        for largest in [false, true] {
            let [each, single] = isa.dispatch(Each(&rows, largest));
            assert_eq!(each, single, "{isa}");
            assert!(each.iter().any(|x| *x != each[0]), "{isa}");
        }
    }
}

struct Transpose<'a>(&'a [bf16], usize);

impl Lanewise for Transpose<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> Vec<u32> {
        let mut to = vec![7; 16 * 19];
        // SAFETY: the test passes sixteen rows.
        unsafe { l.transpose(self.0.as_ptr(), self.1, to.as_mut_ptr(), 19) };
        to
    }
}

#[test]
fn transpose_moves_pairs_and_nothing_else() {
    let stride = 37;
    let rows = noise(16 * stride, 1);
    for isa in isas() {
        let to = isa.dispatch(Transpose(&rows, stride));
        for (i, row) in to.chunks(19).enumerate() {
            for (j, &bits) in row.iter().enumerate() {
                let at = j * stride + 2 * i;
                let pair = || u32::from(rows[at].to_bits()) | u32::from(rows[at + 1].to_bits()) << 16;
                assert_eq!(bits, if j < 16 { pair() } else { 7 }, "{isa}: pair {i} of row {j}");
            }
        }
    }
}

/// Every reduction and selection on sixteen numbers.
struct Fold<'a>(&'a [f32; LANES]);

impl Lanewise for Fold<'_> {
    type Output = (f32, f32, Vec<[f32; LANES]>);

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> Self::Output {
        // SAFETY: sixteen numbers.
        let v = unsafe { l.load(self.0.as_ptr()) };
        let kept = (0..=18).map(|n| {
            let mut out = [0.0; LANES];
            // SAFETY: sixteen numbers.
            unsafe { l.store(out.as_mut_ptr(), l.keep_first(v, n, -1.0)) };
            out
        });
        (l.sum(v), l.largest(v), kept.collect())
    }
}

#[test]
fn folds_have_one_order_and_keep_first_keeps_the_first() {
    let x: [f32; LANES] = std::array::from_fn(|i| (i as f32 * 0.37).sin() * 10f32.powi(i as i32 % 7));
    let eight: Vec<f32> = (0..8).map(|i| x[i] + x[i + 8]).collect();
    let four: Vec<f32> = (0..4).map(|i| eight[i] + eight[i + 4]).collect();
    let sum = (four[0] + four[2]) + (four[1] + four[3]);
    for isa in isas() {
        let (got_sum, largest, kept) = isa.dispatch(Fold(&x));
        assert_eq!(got_sum, sum, "{isa}");
        assert_eq!(largest, x.into_iter().fold(f32::NEG_INFINITY, f32::max), "{isa}");
        for (n, kept) in kept.iter().enumerate() {
            let expected: [f32; LANES] = std::array::from_fn(|i| if i < n { x[i] } else { -1.0 });
            assert_eq!(*kept, expected, "{isa}: first {n}");
        }
    }
}
