//! Agreement of choices at every teacher-forced step. bf16 logits tie often (4 % of top choices of a real model), so
//! two logits within one bf16 spacing of each other count as tied.

use ndarray::{ArrayView1, ArrayView2};
use serde::Serialize;

use super::extent::Extent;
use super::token_set::{TOP_K, top_k};
use super::ulp::bf16_ulp;
use super::verdict::Verdict;
use crate::error::{Error, Result};

/// HF's bf16 model: its top ids per step and their logits, highest first.
///
/// Shapes: both `[N, K]`.
#[derive(Debug, Clone, Copy)]
pub struct HfTop<'a> {
    pub ids: ArrayView2<'a, u32>,
    pub logits: ArrayView2<'a, f32>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepAgreement {
    pub device_token: u32,
    pub hf_token: u32,
    /// HF's logit of the device's token is within one bf16 spacing of HF's fifth, or above.
    pub device_in_hf: bool,
    /// The device's logit of HF's token is within one bf16 spacing of the device's fifth, or above.
    pub hf_in_device: bool,
    /// How many of the device's five HF has in its five or tied with the fifth.
    pub shared: usize,
    /// What the device's choice costs by HF's own logits, (top - logit of the device's token) / spacing at top; 0 for
    /// the same token.
    ///
    /// Units: bf16 ULPs.
    pub regret_ulp: f64,
    /// The device's token is beyond the captured ids: `regret_ulp` is a lower bound.
    pub beyond: bool,
}

/// All steps before the first that holds a NaN or an infinity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    pub steps: Vec<StepAgreement>,
    pub bad_step: Option<usize>,
}

impl Agreement {
    /// Compares the device's teacher-forced logits with HF's top ids.
    ///
    /// Shapes: `hf [N, K >= 5]`, `logits [n <= N, vocab]`.
    ///
    /// Errors: [`Error::Comparison`] for other shapes and ids beyond the vocabulary.
    pub fn compare(hf: &HfTop<'_>, logits: ArrayView2<'_, f32>) -> Result<Agreement> {
        let (steps, vocab) = logits.dim();
        let (n, k) = hf.ids.dim();
        if hf.logits.dim() != (n, k) || steps > n || k < TOP_K.min(vocab) || k == 0 || (steps > 0 && vocab == 0) {
            let found = format!("logits {:?}, HF's top ids {:?}", logits.shape(), hf.ids.shape());
            return Err(Error::comparison("agreement", found, format!("HF's top logits {:?}", hf.logits.shape())));
        }
        if let Some(id) = hf.ids.iter().find(|&&id| steps > 0 && id as usize >= vocab) {
            return Err(Error::comparison("agreement", format!("HF token id {id}"), format!("an id below {vocab}")));
        }
        let mut seen = Agreement { steps: Vec::with_capacity(steps), bad_step: None };
        for (step, row) in logits.outer_iter().enumerate() {
            match compare_step(hf.ids.row(step), hf.logits.row(step), row) {
                Some(here) => seen.steps.push(here),
                None => {
                    seen.bad_step = Some(step);
                    break;
                }
            }
        }
        Ok(seen)
    }

    /// Steps at which each side's choice is in the other's five, ties included.
    pub fn mutual(&self) -> usize {
        self.steps.iter().filter(|s| s.device_in_hf && s.hf_in_device).count()
    }

    /// Mean of `shared` over [`TOP_K`]; NaN without steps.
    pub fn overlap(&self) -> f64 {
        self.steps.iter().map(|s| s.shared as f64).sum::<f64>() / (self.steps.len() * TOP_K) as f64
    }

    /// The step with the largest regret.
    pub fn worst(&self) -> Option<(usize, &StepAgreement)> {
        self.steps.iter().enumerate().max_by(|a, b| a.1.regret_ulp.total_cmp(&b.1.regret_ulp))
    }

    /// Fails where the choices are not in each other's five at any step; VACUOUS below `required` steps.
    pub fn judge(&self, required: usize) -> Verdict {
        let mut failures = Vec::new();
        if let Some(step) = self.bad_step {
            failures.push(format!("step {step} holds a NaN or an infinity"));
        }
        let apart = self.steps.iter().enumerate().filter(|(_, s)| !(s.device_in_hf && s.hf_in_device));
        failures.extend(apart.map(|(step, s)| {
            let bound = if s.beyond { "at least " } else { "" };
            let StepAgreement { device_token, hf_token, regret_ulp, .. } = s;
            format!("step {step}: device token {device_token}, HF token {hf_token}, regret {bound}{regret_ulp:.1} ulp")
        }));
        let extent = Extent::new().require("steps", required as u64).compare("steps", self.steps.len() as u64);
        Verdict::judge(failures, extent)
    }
}

/// `None` when either side holds a NaN or an infinity.
fn compare_step(
    hf_ids: ArrayView1<'_, u32>,
    hf_logits: ArrayView1<'_, f32>,
    logits: ArrayView1<'_, f32>,
) -> Option<StepAgreement> {
    if !hf_logits.iter().all(|x| x.is_finite()) {
        return None;
    }
    let device_top = top_k(logits, TOP_K).ok()?;
    let (device_token, hf_token) = (device_top[0], hf_ids[0]);
    let least = |fifth: f64| fifth - bf16_ulp(fifth);
    let hf_least = least(f64::from(hf_logits[TOP_K.min(hf_logits.len()) - 1]));
    let device_least = least(f64::from(logits[*device_top.last()? as usize]));
    let hf_logit = |id: u32| hf_ids.iter().position(|&x| x == id).map(|at| f64::from(hf_logits[at]));
    let in_hf = |id: u32| hf_logit(id).is_some_and(|x| x >= hf_least);
    let top = f64::from(hf_logits[0]);
    let cost = top - hf_logit(device_token).unwrap_or_else(|| f64::from(hf_logits[hf_logits.len() - 1]));
    Some(StepAgreement {
        device_token,
        hf_token,
        device_in_hf: in_hf(device_token),
        hf_in_device: f64::from(logits[hf_token as usize]) >= device_least,
        shared: device_top.iter().filter(|&&id| in_hf(id)).count(),
        regret_ulp: if device_token == hf_token { 0.0 } else { cost / bf16_ulp(top) },
        beyond: hf_logit(device_token).is_none(),
    })
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::*;
    use crate::check::Outcome;

    fn one(hf: [(u32, f32); 6], device: &[f32]) -> Agreement {
        let (ids, logits) = (arr2(&[hf.map(|h| h.0)]), arr2(&[hf.map(|h| h.1)]));
        let row = ArrayView2::from_shape((1, device.len()), device).unwrap();
        Agreement::compare(&HfTop { ids: ids.view(), logits: logits.view() }, row).unwrap()
    }

    const HF: [(u32, f32); 6] = [(0, 20.0), (1, 19.0), (2, 18.0), (3, 17.0), (4, 16.5), (5, 16.4)];

    #[test]
    fn a_choice_tied_with_the_fifth_is_in() {
        // 16.4 is within one spacing (0.125) of 16.5; the device's fifth is 16.5 and HF's token has 16.45.
        let tied = one(HF, &[16.45, 19.0, 18.0, 17.0, 16.5, 20.0, 0.0]);
        assert!(tied.steps[0].device_in_hf && tied.steps[0].hf_in_device);
        assert_eq!(tied.judge(1).outcome(), Outcome::Pass);
        let apart = one(HF, &[16.3, 19.0, 18.0, 17.0, 16.5, 20.0, 0.0]);
        assert!(apart.steps[0].device_in_hf && !apart.steps[0].hf_in_device);
        assert_eq!(apart.judge(1).outcome(), Outcome::Fail);
    }

    #[test]
    fn regret_is_in_spacings_of_hf_top() {
        let step = one(HF, &[19.0, 20.0, 18.0, 17.0, 16.5, 16.4, 0.0]).steps[0].clone();
        assert_eq!((step.regret_ulp, step.beyond, step.shared), (8.0, false, 5));
        let beyond = one(HF, &[19.0, 0.0, 18.0, 17.0, 16.5, 16.4, 20.0]);
        assert!(beyond.steps[0].beyond && (beyond.steps[0].regret_ulp - 3.6 * 8.0).abs() < 1e-4);
        assert_eq!(beyond.worst().map(|w| w.0), Some(0));
        assert!(beyond.judge(1).reasons()[0].contains("regret at least 28.8 ulp"));
    }

    #[test]
    fn bad_and_thin_runs_do_not_pass() {
        assert_eq!(one(HF, &[f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]).judge(1).outcome(), Outcome::Fail);
        assert_eq!(one(HF, &[20.0, 19.0, 18.0, 17.0, 16.5, 16.4, 0.0]).judge(2).outcome(), Outcome::Vacuous);
        let mut nan = HF;
        nan[5].1 = f32::NAN;
        assert_eq!(one(nan, &[20.0, 19.0, 18.0, 17.0, 16.5, 16.4, 0.0]).judge(1).outcome(), Outcome::Fail);
    }
}
