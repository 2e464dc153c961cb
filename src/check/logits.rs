//! Divergence of logits. There is one definition of it here and nowhere else, for the device and for the noise floor.

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, s};
use serde::Serialize;

use super::extent::Extent;
use super::quantile::Summary;
use super::tolerance::at_most;
use super::verdict::Verdict;
use crate::error::{Error, Result};

/// Least mass of the tail bin. Captures store log-sum-exp in f32, so 1 minus the mass of the head is known to about 1e-6.
pub const TAIL_FLOOR: f64 = 1e-6;

/// HF's f32 model: its top ids per step, their logits, and the log-sum-exp of all.
///
/// Shapes: `ids`, `logits` `[N, K]`; `lse` `[N]`.
#[derive(Debug, Clone, Copy)]
pub struct Truth<'a> {
    pub ids: ArrayView2<'a, u32>,
    pub logits: ArrayView2<'a, f32>,
    pub lse: ArrayView1<'a, f32>,
}

/// Another model's logits at the ids of a [`Truth`], and the log-sum-exp of all its logits.
///
/// Shapes: `logits` `[N, K]`; `lse` `[N]`.
#[derive(Debug, Clone, PartialEq)]
pub struct AtTruth {
    pub logits: Array2<f32>,
    pub lse: Array1<f64>,
}

impl AtTruth {
    /// Gathers from logits over the whole vocabulary; `n` may be smaller than `N`: later steps are not there.
    ///
    /// Shapes: `ids [N, K]`, `logits [n <= N, vocab]`.
    ///
    /// Errors: [`Error::Comparison`] for more steps than the truth has and for ids beyond the vocabulary.
    pub fn gather(ids: ArrayView2<'_, u32>, logits: ArrayView2<'_, f32>) -> Result<AtTruth> {
        let (steps, vocab) = logits.dim();
        if steps > ids.nrows() {
            return Err(Error::comparison("kl: logits", format!("{steps} steps"), format!("at most {}", ids.nrows())));
        }
        if let Some(id) = ids.slice(s![..steps, ..]).iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::comparison("kl", format!("HF token id {id}"), format!("an id below {vocab}")));
        }
        let at = Array2::from_shape_fn((steps, ids.ncols()), |(i, k)| logits[[i, ids[[i, k]] as usize]]);
        Ok(AtTruth { logits: at, lse: logits.outer_iter().map(log_sum_exp).collect() })
    }
}

/// log Σ exp(x), in f64; NaN when any x is NaN or infinite, or when there is none.
///
/// Shapes: `[vocab] -> scalar`.
pub fn log_sum_exp(logits: ArrayView1<'_, f32>) -> f64 {
    if logits.is_empty() || !logits.iter().all(|x| x.is_finite()) {
        return f64::NAN;
    }
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// KL per step and its summary.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kl {
    /// Units: nats.
    pub steps: Vec<f64>,
    pub summary: Summary,
}

/// How many times the floor each figure may be; `None` is not judged.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KlFactors {
    pub median: f64,
    pub p95: Option<f64>,
    pub max: Option<f64>,
}

impl KlFactors {
    /// A limit on the median only: 3 is the factor of the `ieee` class.
    pub const fn median(factor: f64) -> KlFactors {
        KlFactors { median: factor, p95: None, max: None }
    }
}

impl Kl {
    /// KL(truth || other) per step = Σ p ln(p / q) over the truth's K ids and one bin for the tail, with p = exp(logit -
    /// lse), a tail of 1 - Σ p but at least [`TAIL_FLOOR`], and both sides scaled to sum to 1, so that it is never
    /// negative and a constant added to all logits changes nothing. A step with a NaN or an infinity on either side is NaN.
    ///
    /// Shapes: `truth [N, K]`, `other [n <= N, K]` -> `[n]`.
    ///
    /// Units: nats.
    ///
    /// Errors: [`Error::Comparison`] for other shapes.
    pub fn measure(truth: &Truth<'_>, other: &AtTruth) -> Result<Kl> {
        let (steps, k) = other.logits.dim();
        let (n, truth_k) = truth.logits.dim();
        let shapes_fit = truth.ids.dim() == (n, truth_k) && truth.lse.len() == n && other.lse.len() == steps;
        if !(shapes_fit && steps <= n && k == truth_k && k > 0) {
            let found = format!("shape {:?}, lse {}", other.logits.shape(), other.lse.len());
            let expected = format!("[{n}, {truth_k}], lse {}, HF's", truth.lse.len());
            return Err(Error::comparison("kl", found, expected));
        }
        let step = |i: usize| {
            let p = log_bins(truth.logits.row(i), f64::from(truth.lse[i]));
            let q = log_bins(other.logits.row(i), other.lse[i]);
            // Gibbs: the sum is not negative but for the last bits of its terms.
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
            if kl < 0.0 { 0.0 } else { kl }
        };
        Ok(Kl::of((0..steps).map(step).collect()))
    }

    /// From the figures of single steps, of one prompt or of many.
    pub fn of(steps: Vec<f64>) -> Kl {
        Kl { summary: Summary::of(&steps), steps }
    }

    /// Each judged figure may be at most its factor times the floor's; VACUOUS below `required` steps.
    pub fn judge(&self, floor: &Summary, factors: KlFactors, required: usize) -> Verdict {
        let judged = [
            ("median", Some(factors.median), self.summary.median, floor.median),
            ("p95", factors.p95, self.summary.p95, floor.p95),
            ("max", factors.max, self.summary.max, floor.max),
        ];
        let mut failures = Vec::new();
        if let Some(step) = self.steps.iter().position(|kl| kl.is_nan()) {
            failures.push(format!("KL of step {step} is NaN"));
        } else if !self.steps.is_empty() {
            for (name, factor, value, floor) in judged {
                if let Some(factor) = factor.filter(|factor| !at_most(value, factor * floor)) {
                    failures.push(format!("KL {name} {value:.3e} > {factor} x {floor:.3e}, HF's own"));
                }
            }
        }
        let extent = Extent::new().require("KL steps", required as u64).compare("KL steps", self.steps.len() as u64);
        Verdict::judge(failures, extent)
    }
}

/// ln of the mass of each of the K ids and of the tail, scaled to sum to 1.
fn log_bins(logits: ArrayView1<'_, f32>, lse: f64) -> Vec<f64> {
    let mut bins: Vec<f64> = logits.iter().map(|&x| f64::from(x) - lse).collect();
    let head: f64 = bins.iter().map(|x| x.exp()).sum();
    // Not f64::max, which would drop a NaN.
    let tail = if 1.0 - head < TAIL_FLOOR { TAIL_FLOOR } else { 1.0 - head };
    bins.push(tail.ln());
    let total = (head + tail).ln();
    let bad = !(total.is_finite() && lse.is_finite() && logits.iter().all(|x| x.is_finite()));
    bins.iter_mut().for_each(|x| *x = if bad { f64::NAN } else { *x - total });
    bins
}

#[cfg(test)]
mod tests {
    use ndarray::{arr1, arr2};

    use super::*;
    use crate::check::Outcome;
    use crate::check::token_set::tests::{row, run};
    use crate::check::token_set::{STEPS, TokenSet, top_k};

    /// The top ids, their logits and the log-sum-exp of full logits.
    fn truth_of(logits: &Array2<f32>, k: usize) -> (Array2<u32>, Array2<f32>, Array1<f32>) {
        let ids: Vec<u32> = logits.outer_iter().flat_map(|row| top_k(row, k).unwrap()).collect();
        let ids = Array2::from_shape_vec((logits.nrows(), k), ids).unwrap();
        let at = AtTruth::gather(ids.view(), logits.view()).unwrap();
        (ids, at.logits, at.lse.mapv(|x| x as f32))
    }

    fn kl(reference: &Array2<f32>, device: &Array2<f32>, k: usize) -> Kl {
        let (ids, logits, lse) = truth_of(reference, k);
        let truth = Truth { ids: ids.view(), logits: logits.view(), lse: lse.view() };
        Kl::measure(&truth, &AtTruth::gather(ids.view(), device.view()).unwrap()).unwrap()
    }

    #[test]
    fn log_sum_exp_by_hand() {
        assert!((log_sum_exp(arr1(&[0.0, 0.0]).view()) - 2f64.ln()).abs() < 1e-15);
        assert!((log_sum_exp(arr1(&[3000.0, 3000.0]).view()) - (3000.0 + 2f64.ln())).abs() < 1e-12);
        assert!(log_sum_exp(arr1(&[0.0, f32::NEG_INFINITY]).view()).is_nan());
        assert!(log_sum_exp(arr1::<f32>(&[]).view()).is_nan());
    }

    #[test]
    fn two_bins_by_hand() {
        // p = (3/4, 1/4), q = (1/2, 1/2), the second id being the tail.
        let kl = kl(&arr2(&[[3f32.ln(), 0.0]]), &arr2(&[[0.0, 0.0]]), 1);
        assert!((kl.steps[0] - (0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln())).abs() < 1e-6, "{kl:?}");
    }

    #[test]
    fn mass_that_moves_into_an_empty_tail_is_seen() {
        let mut reference = Array2::from_elem((1, 100), -30.0f32);
        reference[[0, 3]] = 10.0;
        let mut device = reference.clone();
        device[[0, 50]] = 10.0;
        let seen = kl(&reference, &device, 8);
        assert!((seen.steps[0] - 2f64.ln()).abs() < 1e-4, "{seen:?}");
    }

    /// Upstream's gate stops looking at the first divergence; this one does not.
    #[test]
    fn a_near_tie_followed_by_garbage_passes_the_token_set_and_fails_here() {
        let hf = [1, 2, 3, 4, 5];
        let reference = Array2::from_shape_vec((STEPS, 16), (0..STEPS).flat_map(|_| row(16, &hf)).collect()).unwrap();
        let garbage = |s| if s == 0 { row(16, &[2, 1, 3, 4, 5]) } else { row(16, &[15, 14, 13, 12, 11]) };
        let (chosen, top, device) = run(STEPS, &hf, garbage);
        assert!(TokenSet::compare(&chosen, top.view(), device.view()).unwrap().judge().is_pass());
        let floor = Summary::of(&[8e-4; 32]);
        let verdict = kl(&reference, &device, 8).judge(&floor, KlFactors::median(3.0), STEPS);
        assert_eq!(verdict.outcome(), Outcome::Fail);
    }

    #[test]
    fn thin_empty_and_nan_runs_do_not_pass() {
        let reference = Array2::from_shape_fn((STEPS, 16), |(i, j)| ((i * 5 + j * 3) % 16) as f32);
        let floor = Summary::of(&[1e-3; 32]);
        let judge =
            |device: &Array2<f32>| kl(&reference, device, 8).judge(&floor, KlFactors::median(3.0), STEPS).outcome();
        assert_eq!(judge(&reference), Outcome::Pass);
        assert_eq!(judge(&reference.slice(s![..1, ..]).to_owned()), Outcome::Vacuous);
        assert_eq!(judge(&reference.slice(s![..0, ..]).to_owned()), Outcome::Vacuous);
        let mut bad = reference.clone();
        bad[[31, 15]] = f32::NAN;
        assert_eq!(judge(&bad), Outcome::Fail);
    }

    #[test]
    fn a_floor_that_is_none_passes_nothing() {
        let verdict = Kl::of(vec![0.0; 32]).judge(&Summary::of(&[]), KlFactors::median(3.0), STEPS);
        assert_eq!(verdict.outcome(), Outcome::Fail);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let reference = Array2::from_shape_fn((4, 16), |(i, j)| ((i * 5 + j * 3) % 16) as f32);
        let (ids, logits, lse) = truth_of(&reference, 8);
        assert!(AtTruth::gather(ids.view(), reference.slice(s![.., ..8])).is_err());
        assert!(AtTruth::gather(ids.slice(s![..2, ..]), reference.view()).is_err());
        let truth = Truth { ids: ids.view(), logits: logits.view(), lse: lse.view() };
        let other = AtTruth { logits: Array2::zeros((4, 7)), lse: Array1::zeros(4) };
        assert!(Kl::measure(&truth, &other).is_err());
    }
}
