//! Every instruction set's lanes against plain arithmetic.

use super::*;
use crate::compute::{
    exp::{exp, exp2_negative},
    testing::{isas, noise},
};

/// `e^x`, or `2^x` where that is asked for.
struct Exp<'a>(&'a [f32], bool);

impl Lanewise for Exp<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) -> Vec<f32> {
        let mut out = vec![0.0; self.0.len()];
        for i in (0..self.0.len()).step_by(LANES) {
            // SAFETY: the test passes whole vectors.
            unsafe {
                let x = l.load(self.0.as_ptr().add(i));
                l.store(out.as_mut_ptr().add(i), if self.1 { exp2_negative(l, x) } else { exp(l, x) });
            }
        }
        out
    }
}

#[test]
fn exp_is_within_two_ulp() {
    let x: Vec<f32> = (0..1 << 16).map(|i| -87.0 + i as f32 * (175.0 / 65536.0)).collect();
    for isa in isas() {
        for (x, y) in x.iter().zip(isa.dispatch(Exp(&x, false))) {
            let exact = f64::from(*x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((f64::from(y) - exact).abs() <= 2.0 * ulp, "{isa}: exp({x}) = {y}");
        }
    }
}

#[test]
fn exp2_is_within_3e_6() {
    let x: Vec<f32> = (0..1 << 16).map(|i| -125.0 + i as f32 * (125.0 / 65535.0)).collect();
    let ends = [f32::NEG_INFINITY, -1e30, -126.5, f32::NAN].repeat(4);
    for isa in isas() {
        for (x, y) in x.iter().zip(isa.dispatch(Exp(&x, true))) {
            let exact = f64::from(*x).exp2();
            assert!((f64::from(y) / exact - 1.0).abs() <= 3e-6, "{isa}: 2^{x} = {y}");
            assert!(*x != 0.0 || y == 1.0, "{isa}: 2^0 = {y}");
        }
        let y = isa.dispatch(Exp(&ends, true));
        assert!(y[..3].iter().all(|y| (0.0..1e-37).contains(y)) && y[3].is_nan(), "{isa}: {y:?}");
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

#[test]
fn exp_at_the_ends() {
    let x = [
        f32::NEG_INFINITY,
        -1e30,
        -200.0,
        -88.5,
        f32::NAN,
        -f32::NAN,
        f32::from_bits(0x7f80_0001),
        f32::INFINITY,
        1e30,
        89.0,
        0.0,
        -0.0,
        1e-40,
        0.0,
        0.0,
        0.0,
    ];
    for isa in isas() {
        let y = isa.dispatch(Exp(&x, false));
        assert!(y[..4].iter().all(|y| (0.0..1.2e-38).contains(y)), "{isa}: {y:?}");
        assert!(y[4..7].iter().all(|y| y.is_nan()), "{isa}: {y:?}");
        assert_eq!(y[7..10], [f32::INFINITY; 3], "{isa}");
        assert_eq!(y[10..], [1.0; 6], "{isa}");
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
