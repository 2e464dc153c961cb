//! Cosine per position. A whole-tensor cosine hides single bad rows, and one massive activation (position 0 of many
//! models) drowns everything else.

use ndarray::{ArrayView1, ArrayView2};
use serde::Serialize;

use super::metrics::{LANES, by_lanes, cosine};
use super::quantile::{mean, quantile, sorted};
use super::same_shape;
use crate::error::Result;

/// Cosine of every row, and its distribution. All figures are NaN when nothing was compared or any row holds a NaN;
/// `min_position` is then the first bad row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PositionCosine {
    pub min: f64,
    /// Row (not sequence position) of the minimum; the first of equals; 0 when there is none.
    pub min_position: usize,
    pub p5: f64,
    pub median: f64,
    pub mean: f64,
    pub values: Vec<f64>,
}

impl PositionCosine {
    /// Σdr / √(Σd² Σr²) of every row; 1 for two zero rows, 0 for one, NaN where a row holds a NaN or an infinity.
    ///
    /// Shapes: `[positions, channels]` both.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn measure(device: ArrayView2<'_, f32>, reference: ArrayView2<'_, f32>) -> Result<PositionCosine> {
        same_shape("position cosine", device.shape(), reference.shape())?;
        Ok(PositionCosine::of(device.outer_iter().zip(reference.outer_iter()).map(|(d, r)| row_cosine(d, r)).collect()))
    }

    fn of(values: Vec<f64>) -> PositionCosine {
        let bad = values.iter().position(|v| v.is_nan());
        let ascending = sorted(&values);
        let least = |(at, low), (i, &v)| if v < low { (i, v) } else { (at, low) };
        let min_position = bad.unwrap_or_else(|| values.iter().enumerate().fold((0, f64::INFINITY), least).0);
        PositionCosine {
            min: quantile(&ascending, 0.0),
            min_position,
            p5: quantile(&ascending, 0.05),
            median: quantile(&ascending, 0.5),
            mean: mean(&ascending),
            values,
        }
    }
}

fn row_cosine(d: ArrayView1<'_, f32>, r: ArrayView1<'_, f32>) -> f64 {
    if let (Some(d), Some(r)) = (d.as_slice(), r.as_slice()) {
        return slice_cosine(d, r);
    }
    slice_cosine(&d.to_vec(), &r.to_vec())
}

fn slice_cosine(d: &[f32], r: &[f32]) -> f64 {
    if d.is_empty() {
        return f64::NAN;
    }
    let (mut dd, mut rr, mut dr) = ([0f64; LANES], [0f64; LANES], [0f64; LANES]);
    by_lanes(d, r, |i, d, r| {
        dd[i] += d * d;
        rr[i] += r * r;
        dr[i] += d * r;
    });
    let sum = |x: [f64; LANES]| x.iter().sum::<f64>();
    let (dd, rr) = (sum(dd), sum(rr));
    if (dd + rr).is_finite() { cosine(dd, rr, sum(dr)) } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2};

    use super::*;

    #[test]
    fn one_bad_row_shows_where_the_whole_does_not() {
        let mut r = Array2::<f32>::ones((50, 8));
        r.row_mut(0).fill(25_000.0);
        let mut d = r.clone();
        d.row_mut(7).assign(&ndarray::arr1(&[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]));
        let c = PositionCosine::measure(d.view(), r.view()).unwrap();
        assert_eq!((c.min, c.min_position, c.median), (0.0, 7, 1.0));
        assert!(super::super::Metrics::measure(d.view(), r.view()).unwrap().cosine > 0.999_99);
    }

    #[test]
    fn zero_rows_are_defined() {
        let d = arr2(&[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]);
        let r = arr2(&[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]);
        assert_eq!(PositionCosine::measure(d.view(), r.view()).unwrap().values, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_bad_row_takes_every_figure() {
        let r = Array2::<f32>::ones((4, 3));
        let mut d = r.clone();
        d[[2, 1]] = f32::INFINITY;
        let c = PositionCosine::measure(d.view(), r.view()).unwrap();
        assert!(c.min.is_nan() && c.p5.is_nan() && c.median.is_nan() && c.mean.is_nan());
        assert_eq!((c.min_position, c.values[1]), (2, 1.0));
    }

    #[test]
    fn nothing_has_no_figure() {
        for shape in [(0, 4), (4, 0)] {
            let none = Array2::<f32>::zeros(shape);
            assert!(PositionCosine::measure(none.view(), none.view()).unwrap().min.is_nan());
        }
    }
}
