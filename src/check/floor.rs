//! Distances in units of the reference's own noise: how far the device is, over how far HF bf16 is from HF f32.

use ndarray::{ArrayView2, Axis, s};

use super::metrics::ratio;
use super::quantile::{quantile, sorted};
use super::same_shape;
use crate::error::Result;

/// One reference in both precisions, and the device.
///
/// Shapes: `[rows, channels]` each.
#[derive(Debug, Clone, Copy)]
pub struct Three<'a> {
    pub device: ArrayView2<'a, f32>,
    pub bf16: ArrayView2<'a, f32>,
    pub f32: ArrayView2<'a, f32>,
}

impl<'a> Three<'a> {
    /// Without the first row, which in many models is a massive activation; the one row where there is no other.
    #[must_use]
    pub fn body(&self) -> Three<'a> {
        let from = usize::from(self.device.nrows() > 1);
        let cut = |x: ArrayView2<'a, f32>| x.slice_move(s![from.min(x.nrows()).., ..]);
        Three { device: cut(self.device), bf16: cut(self.bf16), f32: cut(self.f32) }
    }

    /// ‖device - f32‖ / ‖bf16 - f32‖; 0 without error, infinite where HF has none and the device has, NaN for a NaN.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn over_own(&self) -> Result<f64> {
        self.check()?;
        Ok(ratio(distance(self.device, self.f32), distance(self.bf16, self.f32)))
    }

    /// [`Three::over_own`] of every row, over the row's own noise or the rows' median, whichever is larger: a row that HF
    /// happens to get right is no limit.
    ///
    /// Shapes: result `[rows]`.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn rows_over_own(&self) -> Result<Vec<f64>> {
        self.check()?;
        let of = |x: ArrayView2<'_, f32>| {
            let rows = x.axis_iter(Axis(0)).zip(self.f32.axis_iter(Axis(0)));
            rows.map(|(x, r)| distance(x.insert_axis(Axis(0)), r.insert_axis(Axis(0)))).collect::<Vec<f64>>()
        };
        let (device, own) = (of(self.device), of(self.bf16));
        let median = quantile(&sorted(&own), 0.5);
        let larger = |own: f64| if own > median { own } else { median };
        Ok(device.into_iter().zip(own).map(|(device, own)| ratio(device, larger(own))).collect())
    }

    /// [`Three::over_own`] of every group of `width` channels, the heads of a row of the KV cache.
    ///
    /// Shapes: result `[channels / width]`.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn heads_over_own(&self, width: usize) -> Result<Vec<f64>> {
        self.check()?;
        let heads = self.device.ncols() / width.max(1);
        let part = |x: &ArrayView2<'_, f32>, h: usize| x.slice(s![.., h * width..(h + 1) * width]).to_owned();
        let head = |h: usize| {
            let [device, bf16, f32] = [&self.device, &self.bf16, &self.f32].map(|x| part(x, h));
            Three { device: device.view(), bf16: bf16.view(), f32: f32.view() }.over_own()
        };
        (0..heads).map(head).collect()
    }

    fn check(&self) -> Result<()> {
        same_shape("floor", self.device.shape(), self.f32.shape())?;
        same_shape("floor", self.bf16.shape(), self.f32.shape())
    }
}

/// ‖a - b‖; NaN where an element is NaN or infinite.
fn distance(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>) -> f64 {
    let squares = a.iter().zip(&b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
    let sum: f64 = squares.sum();
    if sum.is_finite() { sum.sqrt() } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2};

    use super::*;

    fn three(device: &Array2<f32>) -> (f64, Vec<f64>, Vec<f64>) {
        let f32 = arr2(&[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]);
        let bf16 = &f32 + &arr2(&[[0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]]);
        let three = Three { device: device.view(), bf16: bf16.view(), f32: f32.view() };
        (three.over_own().unwrap(), three.rows_over_own().unwrap(), three.heads_over_own(2).unwrap())
    }

    #[test]
    fn a_wrong_row_and_a_wrong_head_are_told_apart() {
        let mut device = arr2(&[[1.1, 2.1, 3.1, 4.1], [5.1, 6.1, 7.1, 8.1]]);
        let (over, ..) = three(&device);
        assert!((over - 1.0).abs() < 1e-5, "{over}");
        device[[1, 3]] = 9.0;
        let (over, rows, heads) = three(&device);
        assert!(over > 3.0 && rows[0] < 1.01 && rows[1] > 5.0 && heads[0] < 1.01 && heads[1] > 5.0);
    }

    #[test]
    fn nan_stays_nan() {
        let device = arr2(&[[f32::NAN, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]);
        let (over, rows, heads) = three(&device);
        assert!(over.is_nan() && rows[0].is_nan() && heads[0].is_nan());
        assert!(rows[1].is_finite() && heads[1].is_finite());
    }
}
