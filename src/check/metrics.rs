//! Distances between a device's tensor and the reference's, from one pass over both, in f64.

use ndarray::ArrayView2;
use serde::Serialize;

use super::quantile::Summary;
use super::same_shape;
use super::ulp::bf16_ulp;
use crate::error::Result;

/// Floor of the denominator of `max_rel`.
pub const REL_FLOOR: f64 = 1e-6;

/// Elements per partial sum. Partial sums are added in order, so the figures do not depend on who computed them.
const CHUNK: usize = 1 << 11;

/// Partial sums kept apart inside a chunk, for the vector unit.
pub(super) const LANES: usize = 4;

/// How far `device` is from `reference`. With d, r the elements and e = d - r:
///
/// `cosine` = Σdr / √(Σd² Σr²), 1 for two zero tensors and 0 for one · `max_abs` = max|e| · `mean_abs` = mean|e| ·
/// `max_rel` = max(|e| / max(|r|, 1e-6)) · `mean_rel_l1` = mean|e| / mean|r| · `nmse` = Σe² / Σr² · `rel_l2` = √nmse ·
/// `sqnr_db` = -10 log10(nmse), infinite without error · `bias` = mean(e) / mean|r|.
///
/// Quotients over a zero reference are 0 without error and infinite with one. Where an element is NaN or infinite, or
/// nothing was compared, every figure is NaN; `nan_count` counts the places and `first_bad` is the first, (row, column).
///
/// Source: `mean_rel_l1` and `max_rel` as upstream's precision tables define them (facts/kernels.json, gate_policy);
/// `nmse` as in llama.cpp's test-backend-ops.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    pub count: usize,
    pub cosine: f64,
    pub max_abs: f64,
    pub mean_abs: f64,
    pub max_rel: f64,
    pub mean_rel_l1: f64,
    pub sqnr_db: f64,
    pub nmse: f64,
    pub rel_l2: f64,
    pub bias: f64,
    pub nan_count: usize,
    pub first_bad: Option<(usize, usize)>,
}

impl Metrics {
    /// Measures `device` against `reference`.
    ///
    /// Shapes: `[r, c]` both.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn measure(device: ArrayView2<'_, f32>, reference: ArrayView2<'_, f32>) -> Result<Metrics> {
        same_shape("metrics", device.shape(), reference.shape())?;
        let columns = device.ncols();
        let (device, reference) = (device.as_standard_layout(), reference.as_standard_layout());
        let (d, r) = (slice_of(&device), slice_of(&reference));
        let mut sums = Sums::default();
        for (d, r) in d.chunks(CHUNK).zip(r.chunks(CHUNK)) {
            sums.add(&Sums::of(d, r));
        }
        if sums.is_finite() {
            return Ok(sums.finish(d.len()));
        }
        let mut bad =
            d.iter().zip(r).enumerate().filter(|(_, (d, r))| !(d.is_finite() && r.is_finite())).map(|(i, _)| i);
        let first = bad.next();
        let mut metrics = Metrics::none(d.len());
        metrics.nan_count = bad.count() + usize::from(first.is_some());
        metrics.first_bad = first.map(|i| (i / columns, i % columns));
        Ok(metrics)
    }

    /// The geometric mean over rows (positions) of each row's max|e|, which no single outlying row moves far. A row counts with
    /// half a bf16 step of its largest reference at least: less than that rounding decides, and no two instruction sets alike
    /// (means and cosines show it). NaN where a row's is or a reference is infinite, 0 where all of a row is 0.
    ///
    /// Shapes: `[r, c]` both.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn typical_max_abs(device: ArrayView2<'_, f32>, reference: ArrayView2<'_, f32>) -> Result<f64> {
        same_shape("metrics", device.shape(), reference.shape())?;
        let larger = |max: f64, e: f64| if e.is_nan() || e > max { e } else { max };
        let rows = device.outer_iter().zip(reference.outer_iter());
        let logs: Vec<f64> = rows
            .map(|(d, r)| {
                let errors = d.iter().zip(r).map(|(&d, &r)| (f64::from(d) - f64::from(r)).abs());
                let largest = r.iter().map(|&r| f64::from(r).abs()).fold(0.0, f64::max);
                let half_step = if largest > 0.0 { bf16_ulp(largest) / 2.0 } else { 0.0 };
                errors.fold(half_step, larger).ln()
            })
            .collect();
        Ok(Summary::of(&logs).mean.exp())
    }

    /// No figure at all.
    fn none(count: usize) -> Metrics {
        let no = f64::NAN;
        Metrics {
            count,
            cosine: no,
            max_abs: no,
            mean_abs: no,
            max_rel: no,
            mean_rel_l1: no,
            sqnr_db: no,
            nmse: no,
            rel_l2: no,
            bias: no,
            nan_count: 0,
            first_bad: None,
        }
    }
}

/// The elements in row-major order.
fn slice_of<'a>(x: &'a ndarray::CowArray<'_, f32, ndarray::Ix2>) -> &'a [f32] {
    x.as_slice().expect("standard layout is contiguous")
}

/// Σdr / √(Σd² Σr²) from its sums; 1 for two zero vectors, 0 for one.
pub(super) fn cosine(dd: f64, rr: f64, dr: f64) -> f64 {
    match (dd == 0.0, rr == 0.0) {
        (true, true) => 1.0,
        (true, false) | (false, true) => 0.0,
        (false, false) => (dr / (dd * rr).sqrt()).clamp(-1.0, 1.0),
    }
}

/// a / b, where 0 / 0 is 0: no error is no error on any scale.
pub(super) fn ratio(a: f64, b: f64) -> f64 {
    if a == 0.0 && b == 0.0 { 0.0 } else { a / b }
}

/// -10 log10(nmse).
pub(super) fn sqnr_db(nmse: f64) -> f64 {
    if nmse == 0.0 { f64::INFINITY } else { -10.0 * nmse.log10() }
}

/// Calls `take` with lane, d and r for every pair.
#[inline(always)]
pub(super) fn by_lanes(d: &[f32], r: &[f32], mut take: impl FnMut(usize, f64, f64)) {
    let ((d_lanes, d_rest), (r_lanes, r_rest)) = (d.as_chunks::<LANES>(), r.as_chunks::<LANES>());
    for (d, r) in d_lanes.iter().zip(r_lanes) {
        for i in 0..LANES {
            take(i, f64::from(d[i]), f64::from(r[i]));
        }
    }
    for (i, (&d, &r)) in d_rest.iter().zip(r_rest).enumerate() {
        take(i, f64::from(d), f64::from(r));
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    dd: f64,
    rr: f64,
    dr: f64,
    ee: f64,
    e: f64,
    abs_e: f64,
    abs_r: f64,
    max_abs: f64,
    max_rel: f64,
}

impl Sums {
    /// Two loops, so that the sums of each fit the vector registers; a chunk stays in the first cache between them.
    fn of(d: &[f32], r: &[f32]) -> Sums {
        let mut sums = Sums::default();
        sums.take_squares(d, r);
        sums.take_absolutes(d, r);
        sums
    }

    fn take_squares(&mut self, d: &[f32], r: &[f32]) {
        let (mut dd, mut rr, mut dr, mut ee) = ([0.0; LANES], [0.0; LANES], [0.0; LANES], [0.0; LANES]);
        by_lanes(d, r, |i, d, r| {
            let e = d - r;
            dd[i] += d * d;
            rr[i] += r * r;
            dr[i] += d * r;
            ee[i] += e * e;
        });
        [self.dd, self.rr, self.dr, self.ee] = [dd, rr, dr, ee].map(|lanes| lanes.iter().sum());
    }

    fn take_absolutes(&mut self, d: &[f32], r: &[f32]) {
        let (mut sum, mut abs_e, mut abs_r) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        let (mut max_abs, mut max_rel) = ([0.0; LANES], [0.0; LANES]);
        by_lanes(d, r, |i, d, r| {
            let e = d - r;
            let (abs, scale) = (e.abs(), r.abs());
            let rel = abs / if scale > REL_FLOOR { scale } else { REL_FLOOR };
            sum[i] += e;
            abs_e[i] += abs;
            abs_r[i] += scale;
            max_abs[i] = if abs > max_abs[i] { abs } else { max_abs[i] };
            max_rel[i] = if rel > max_rel[i] { rel } else { max_rel[i] };
        });
        [self.e, self.abs_e, self.abs_r] = [sum, abs_e, abs_r].map(|lanes| lanes.iter().sum());
        [self.max_abs, self.max_rel] =
            [max_abs, max_rel].map(|lanes: [f64; LANES]| lanes.iter().copied().fold(0.0, f64::max));
    }

    fn add(&mut self, other: &Sums) {
        self.dd += other.dd;
        self.rr += other.rr;
        self.dr += other.dr;
        self.ee += other.ee;
        self.e += other.e;
        self.abs_e += other.abs_e;
        self.abs_r += other.abs_r;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_rel = self.max_rel.max(other.max_rel);
    }

    /// Squares of finite f32 never overflow f64, so finite sums mean finite elements.
    fn is_finite(&self) -> bool {
        (self.dd + self.rr).is_finite()
    }

    fn finish(&self, count: usize) -> Metrics {
        if count == 0 {
            return Metrics::none(0);
        }
        let nmse = ratio(self.ee, self.rr);
        Metrics {
            count,
            cosine: cosine(self.dd, self.rr, self.dr),
            max_abs: self.max_abs,
            mean_abs: self.abs_e / count as f64,
            max_rel: self.max_rel,
            mean_rel_l1: ratio(self.abs_e, self.abs_r),
            sqnr_db: sqnr_db(nmse),
            nmse,
            rel_l2: nmse.sqrt(),
            bias: ratio(self.e, self.abs_r),
            nan_count: 0,
            first_bad: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2, s};

    use super::*;

    #[test]
    fn one_outlying_row_hardly_moves_the_typical_max_abs() {
        let reference = ndarray::Array2::<f32>::zeros((10, 4));
        let mut device = ndarray::Array2::<f32>::from_elem((10, 4), 0.5);
        let even = Metrics::typical_max_abs(device.view(), reference.view()).unwrap();
        device[[3, 1]] = 8.0;
        let outlier = Metrics::typical_max_abs(device.view(), reference.view()).unwrap();
        assert!((even - 0.5).abs() < 1e-12 && outlier < 0.5 * 1.33, "{even} {outlier}");
        device[[7, 0]] = f32::NAN;
        assert!(Metrics::typical_max_abs(device.view(), reference.view()).unwrap().is_nan());
    }

    #[test]
    fn a_typical_max_abs_is_no_smaller_than_what_rounding_decides() {
        // Half a step of 300 is 1, of 5 it is 2^-6.
        for (error, rows) in [(0.01, [1.0, 2f64.powi(-6)]), (0.5, [1.0, 0.5]), (3.0, [3.0, 3.0])] {
            let reference = arr2(&[[300.0, 1.0, -5.0], [0.0, 1.0, -5.0]]);
            let device = reference.mapv(|x: f32| x + error);
            let found = Metrics::typical_max_abs(device.view(), reference.view()).unwrap();
            let [a, b] = rows;
            assert!((found / (a * b).sqrt() - 1.0).abs() < 1e-5, "{error}: {found}, expected rows of {rows:?}");
        }
    }

    #[test]
    fn figures_by_hand() {
        let m =
            Metrics::measure(arr2(&[[1.0, 2.5], [0.0, -4.0]]).view(), arr2(&[[1.0, 2.0], [0.0, -5.0]]).view()).unwrap();
        assert_eq!((m.count, m.max_abs, m.mean_abs), (4, 1.0, 0.375));
        assert_eq!((m.max_rel, m.mean_rel_l1, m.bias), (0.25, 1.5 / 8.0, 1.5 / 8.0));
        assert!((m.nmse - 1.25 / 30.0).abs() < 1e-15 && (m.rel_l2 * m.rel_l2 - m.nmse).abs() < 1e-15);
        assert!((m.sqnr_db - 10.0 * (30.0f64 / 1.25).log10()).abs() < 1e-12);
        assert!((m.cosine - 26.0 / (23.25f64 * 30.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn cosine_is_blind_to_scale_and_the_others_are_not() {
        let r = Array2::from_shape_fn((3, 5), |(i, j)| (i * 5 + j) as f32 - 7.0);
        let m = Metrics::measure((&r * 3.0).view(), r.view()).unwrap();
        assert!((m.cosine - 1.0).abs() < 1e-12);
        assert_eq!((m.rel_l2, m.mean_rel_l1), (2.0, 2.0));
    }

    #[test]
    fn zero_tensors_are_defined() {
        let (zero, one) = (Array2::<f32>::zeros((2, 2)), Array2::<f32>::ones((2, 2)));
        let both = Metrics::measure(zero.view(), zero.view()).unwrap();
        assert_eq!((both.cosine, both.rel_l2, both.bias, both.sqnr_db), (1.0, 0.0, 0.0, f64::INFINITY));
        let device = Metrics::measure(zero.view(), one.view()).unwrap();
        assert_eq!((device.cosine, device.rel_l2, device.bias), (0.0, 1.0, -1.0));
        let reference = Metrics::measure(one.view(), zero.view()).unwrap();
        assert_eq!((reference.cosine, reference.rel_l2, reference.max_rel), (0.0, f64::INFINITY, 1e6));
    }

    #[test]
    fn another_shape_is_an_error() {
        let (a, b) = (Array2::<f32>::zeros((2, 3)), Array2::<f32>::zeros((3, 2)));
        let error = Metrics::measure(a.view(), b.view()).unwrap_err().to_string();
        assert_eq!(error, "metrics: cannot be compared: found shape [2, 3], expected [3, 2], the reference's");
    }

    #[test]
    fn nothing_has_no_figures() {
        let none = Array2::<f32>::zeros((0, 4));
        let m = Metrics::measure(none.view(), none.view()).unwrap();
        assert!(m.count == 0 && m.cosine.is_nan() && m.max_abs.is_nan());
    }

    #[test]
    fn bad_places_are_counted_and_the_first_is_named() {
        let r = Array2::<f32>::ones((3, 4));
        let mut d = r.clone();
        d[[1, 2]] = f32::NAN;
        d[[2, 0]] = f32::NEG_INFINITY;
        let m = Metrics::measure(d.view(), r.view()).unwrap();
        assert_eq!((m.nan_count, m.first_bad), (2, Some((1, 2))));
        assert!(m.cosine.is_nan() && m.max_abs.is_nan() && m.bias.is_nan());
    }

    #[test]
    fn views_of_any_layout_give_the_same() {
        let d = Array2::from_shape_fn((40, 30), |(i, j)| ((i * 31 + j * 17) % 101) as f32);
        let r = Array2::from_shape_fn((40, 30), |(i, j)| ((i * 29 + j * 13) % 97) as f32);
        let part = s![3..37; 2, 1..29];
        let straight = Metrics::measure(d.slice(part).to_owned().view(), r.slice(part).to_owned().view()).unwrap();
        assert_eq!(Metrics::measure(d.slice(part), r.slice(part)).unwrap(), straight);
    }

    #[test]
    fn extremes_of_f32_do_not_overflow() {
        let x = arr2(&[[f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)]]);
        let m = Metrics::measure(x.view(), (-&x).view()).unwrap();
        assert_eq!((m.cosine, m.rel_l2), (-1.0, 2.0));
    }
}
