//! Order statistics of figures. NaN in, NaN out: a missing figure is never averaged away.

use serde::Serialize;

/// Median, 95th percentile, mean and maximum of a list; all NaN when the list is empty or holds a NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    pub count: usize,
    pub median: f64,
    pub p95: f64,
    pub mean: f64,
    pub max: f64,
}

impl Summary {
    /// Summarises `values`, quantiles by linear interpolation.
    ///
    /// Source: numpy's default quantile method.
    pub fn of(values: &[f64]) -> Summary {
        let sorted = sorted(values);
        Summary {
            count: values.len(),
            median: quantile(&sorted, 0.5),
            p95: quantile(&sorted, 0.95),
            mean: mean(&sorted),
            max: quantile(&sorted, 1.0),
        }
    }
}

/// Ascending by the total order, so that a NaN stands at an end.
pub(super) fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The `q`-quantile of ascending values: x\[i\] + (h - i)(x\[i+1\] - x\[i\]), h = q (n - 1), i = floor(h).
///
/// NaN when there is none or any is NaN.
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return f64::NAN };
    if first.is_nan() || last.is_nan() {
        return f64::NAN;
    }
    let h = q.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[h.floor() as usize], sorted[h.ceil() as usize]);
    if low == high { low } else { low + (h - h.floor()) * (high - low) }
}

/// The arithmetic mean; NaN when there is none.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate_linearly() {
        let s = Summary::of(&[4.0, 1.0, 3.0, 2.0]);
        assert_eq!((s.count, s.median, s.mean, s.max), (4, 2.5, 2.5, 4.0));
        assert!((s.p95 - 3.85).abs() < 1e-12);
    }

    #[test]
    fn nothing_and_nan_have_no_figure() {
        for values in [&[][..], &[1.0, f64::NAN], &[-f64::NAN, 1.0, 2.0]] {
            let s = Summary::of(values);
            assert!(s.median.is_nan() && s.p95.is_nan() && s.mean.is_nan() && s.max.is_nan(), "{values:?}");
        }
    }

    #[test]
    fn infinities_are_kept() {
        let s = Summary::of(&[1.0, 2.0, f64::INFINITY]);
        assert_eq!((s.median, s.max), (2.0, f64::INFINITY));
    }
}
