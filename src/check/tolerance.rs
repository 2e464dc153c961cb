//! The limits: named tiers for elements, cosine minima for a block. No bare number stands in a gate elsewhere.

use std::fmt;

use ndarray::ArrayView2;
use serde::Serialize;

use super::extent::Extent;
use super::metrics::Metrics;
use super::position_cosine::PositionCosine;
use super::same_shape;
use super::ulp::bf16_ulp;
use super::verdict::Verdict;
use crate::error::Result;

/// Minimum of the whole-tensor cosine of a block.
///
/// Source: upstream's phase 2, gate 2.1.
pub const WHOLE_COSINE_MIN: f64 = 0.99;

/// Minimum of the per-position cosine of a block: 0.99 at head_dim 64, 0.98 at 128, 0.97 at 256. Upstream names no
/// limit in between; there the stricter neighbour holds (96: 0.99, 192: 0.98).
///
/// Source: upstream's phase 2, gate 2.2.
pub fn position_cosine_min(head_dim: usize) -> f64 {
    match head_dim {
        0..128 => 0.99,
        128..256 => 0.98,
        _ => 0.97,
    }
}

/// Phase 2's gate over one block's output: whole cosine, per-position minimum by `head_dim`, no NaN, and at least
/// `required` positions.
///
/// Shapes: `[positions, hidden_size]` both.
///
/// Errors: [`crate::error::Error::Comparison`] for other shapes.
pub fn block(
    device: ArrayView2<'_, f32>,
    reference: ArrayView2<'_, f32>,
    head_dim: usize,
    required: usize,
) -> Result<(Metrics, PositionCosine, Verdict)> {
    let metrics = Metrics::measure(device, reference)?;
    let positions = PositionCosine::measure(device, reference)?;
    let mut failures = Vec::new();
    let compared = if metrics.count == 0 { 0 } else { positions.values.len() };
    if let Some((row, column)) = metrics.first_bad {
        failures.push(format!("{} values are NaN or infinite, the first at [{row}, {column}]", metrics.nan_count));
    } else if compared > 0 {
        if !at_least(metrics.cosine, WHOLE_COSINE_MIN) {
            failures.push(format!("whole cosine {:.6} < {WHOLE_COSINE_MIN}", metrics.cosine));
        }
        let min = position_cosine_min(head_dim);
        if !at_least(positions.min, min) {
            failures.push(format!("cosine {:.6} < {min} at row {}", positions.min, positions.min_position));
        }
    }
    let extent = Extent::new().require("positions", required as u64).compare("positions", compared as u64);
    Ok((metrics, positions, Verdict::judge(failures, extent)))
}

/// Whether `value` exists and reaches `min`.
pub fn at_least(value: f64, min: f64) -> bool {
    value >= min
}

/// Whether `value` exists and does not exceed `max`.
pub fn at_most(value: f64, max: f64) -> bool {
    value <= max
}

/// A named limit on every element: |d - r| <= atol + rtol |r|.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tier {
    pub name: &'static str,
    pub atol: f64,
    pub rtol: f64,
}

impl Tier {
    /// Equal values; +0 and -0 are equal.
    pub const EXACT: Tier = Tier { name: "exact", atol: 0.0, rtol: 0.0 };
    /// f32 sums in another order.
    pub const F32_SUM: Tier = Tier { name: "f32_sum", atol: 1e-6, rtol: 1e-5 };
    /// One rounding to bf16: at most one spacing, 2^-7 of the value.
    pub const BF16_ROUNDING: Tier = Tier { name: "bf16_rounding", atol: 0.0, rtol: 0.007_812_5 };

    /// Upstream's tier of a kernel: rtol 0.016 (two bf16 spacings), and the kernel's own atol.
    ///
    /// Source: facts/kernels.json, rtol and atol of each kernel.
    pub const fn kernel(atol: f64) -> Tier {
        Tier { name: "kernel", atol, rtol: 0.016 }
    }

    /// Checks every element.
    ///
    /// Shapes: `[r, c]` both.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn check(&self, device: ArrayView2<'_, f32>, reference: ArrayView2<'_, f32>) -> Result<Elements> {
        same_shape("elements", device.shape(), reference.shape())?;
        let mut elements =
            Elements { tier: self.clone(), count: device.len(), bad: 0, nan_count: 0, first: None, worst_ulp: 0.0 };
        for ((index, &d), &r) in device.indexed_iter().zip(reference.iter()) {
            let (device, reference) = (f64::from(d), f64::from(r));
            let error = (device - reference).abs();
            let finite = d.is_finite() && r.is_finite();
            if finite {
                elements.worst_ulp = elements.worst_ulp.max(error / bf16_ulp(reference));
            } else {
                elements.nan_count += 1;
            }
            // An infinite reference would allow any error, so finiteness is asked first.
            if !(finite && at_most(error, self.atol + self.rtol * reference.abs())) {
                elements.bad += 1;
                elements.first.get_or_insert(BadElement { index, device: d, reference: r });
            }
        }
        Ok(elements)
    }
}

/// The first element beyond its limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BadElement {
    pub index: (usize, usize),
    pub device: f32,
    pub reference: f32,
}

/// What [`Tier::check`] found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Elements {
    pub tier: Tier,
    pub count: usize,
    pub bad: usize,
    pub nan_count: usize,
    pub first: Option<BadElement>,
    /// Largest |d - r| in bf16 spacings of r, over the finite pairs.
    pub worst_ulp: f64,
}

impl Elements {
    /// Share of elements beyond the limit; NaN when nothing was compared.
    pub fn share(&self) -> f64 {
        self.bad as f64 / self.count as f64
    }

    /// Fails on any bad element; VACUOUS below `required` elements.
    pub fn judge(&self, required: usize) -> Verdict {
        let failures = if self.bad > 0 { vec![self.to_string()] } else { Vec::new() };
        let extent = Extent::new().require("elements", required as u64).compare("elements", self.count as u64);
        Verdict::judge(failures, extent)
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tier { name, atol, rtol } = &self.tier;
        write!(f, "tier {name} (atol {atol:e}, rtol {rtol:e}): {} of {} elements beyond it", self.bad, self.count)?;
        if self.count > 0 {
            write!(f, " ({:.3} %)", 100.0 * self.share())?;
        }
        if let Some(BadElement { index: (row, column), device, reference }) = self.first {
            write!(f, ", the first at [{row}, {column}]: device {device}, reference {reference}")?;
        }
        write!(f, ", worst {:.1} ulp, {} NaN or infinite", self.worst_ulp, self.nan_count)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, arr2};
    use rstest::rstest;

    use super::*;
    use crate::check::Outcome;

    #[rstest]
    #[case(32, 0.99)]
    #[case(64, 0.99)]
    #[case(96, 0.99)]
    #[case(128, 0.98)]
    #[case(192, 0.98)]
    #[case(256, 0.97)]
    #[case(512, 0.97)]
    fn minimum_by_head_dim(#[case] head_dim: usize, #[case] min: f64) {
        assert_eq!(position_cosine_min(head_dim), min);
    }

    #[rstest]
    #[case::infinite_reference(1.0, f32::INFINITY)]
    #[case::both_infinite(f32::INFINITY, f32::INFINITY)]
    #[case::nan(f32::NAN, 1.0)]
    #[case::both_nan(f32::NAN, f32::NAN)]
    fn no_tier_passes_a_value_that_is_none(#[case] d: f32, #[case] r: f32) {
        let elements = Tier::kernel(1e9).check(arr2(&[[d]]).view(), arr2(&[[r]]).view()).unwrap();
        assert_eq!((elements.bad, elements.nan_count), (1, 1));
        assert_eq!(elements.judge(1).outcome(), Outcome::Fail);
    }

    #[test]
    fn the_message_holds_all_five() {
        let (d, r) = (arr2(&[[1.0, 2.0], [3.5, 4.0]]), arr2(&[[1.0, 2.0], [3.0, 4.0]]));
        let elements = Tier::kernel(0.0015).check(d.view(), r.view()).unwrap();
        assert_eq!(
            elements.to_string(),
            "tier kernel (atol 1.5e-3, rtol 1.6e-2): 1 of 4 elements beyond it (25.000 %), the first at [1, 0]: device 3.5, \
             reference 3, worst 32.0 ulp, 0 NaN or infinite"
        );
        assert_eq!(Tier::EXACT.check(r.view(), r.view()).unwrap().judge(4).outcome(), Outcome::Pass);
    }

    #[test]
    fn nothing_never_passes() {
        let none = Array2::<f32>::zeros((0, 3));
        assert_eq!(Tier::kernel(1.0).check(none.view(), none.view()).unwrap().judge(0).outcome(), Outcome::Vacuous);
        assert_eq!(block(none.view(), none.view(), 64, 0).unwrap().2.outcome(), Outcome::Vacuous);
        let no_channels = Array2::<f32>::zeros((5, 0));
        assert_eq!(block(no_channels.view(), no_channels.view(), 64, 5).unwrap().2.outcome(), Outcome::Vacuous);
    }

    #[test]
    fn a_block_fails_on_one_bad_row_and_on_thin_extent() {
        let r = Array2::from_shape_fn((40, 16), |(i, j)| ((i * 7 + j * 3) % 11) as f32 - 4.5);
        assert!(block(r.view(), r.view(), 64, 40).unwrap().2.is_pass());
        assert_eq!(block(r.view(), r.view(), 64, 41).unwrap().2.outcome(), Outcome::Vacuous);
        let mut d = r.clone();
        d.row_mut(9).mapv_inplace(|x| -x);
        let verdict = block(d.view(), r.view(), 64, 40).unwrap().2;
        assert!(verdict.reasons().iter().any(|s| s.ends_with("at row 9")), "{verdict}");
    }
}
