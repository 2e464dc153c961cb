//! Upstream's correctness gate, exactly: K = 5, N = 32, judged at the first divergence only, ties to the smaller id.
//! What it lets through (anything after that step) is the business of `logits` and `agreement`, not of this file.

use ndarray::{ArrayView1, ArrayView2};
use serde::Serialize;

use super::extent::Extent;
use super::verdict::Verdict;
use crate::error::{Error, Result};

/// Size of the token sets.
///
/// Source: upstream's GATE_K.
pub const TOP_K: usize = 5;

/// Tokens compared per prompt.
///
/// Source: upstream's GATE_N_TOKENS.
pub const STEPS: usize = 32;

/// Ids of the `k` largest logits, largest first, equal ones by ascending id; all of them when there are fewer than `k`.
///
/// Shapes: `[vocab] -> [min(k, vocab)]`.
///
/// Errors: [`Error::Comparison`] for a NaN or an infinity, naming the first id that has one.
pub fn top_k(logits: ArrayView1<'_, f32>, k: usize) -> Result<Vec<u32>> {
    if let Some(id) = logits.iter().position(|x| !x.is_finite()) {
        return Err(Error::comparison("top_k", format!("{} at id {id}", logits[id]), "finite logits"));
    }
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(k + 1);
    for (&logit, id) in logits.iter().zip(0u32..) {
        // Ids ascend, so an equal logit never displaces one that stands.
        if best.len() == k && best.last().is_none_or(|&(least, _)| logit <= least) {
            continue;
        }
        let at = best.partition_point(|&(standing, _)| standing >= logit);
        best.insert(at, (logit, id));
        best.truncate(k);
    }
    Ok(best.into_iter().map(|(_, id)| id).collect())
}

/// The first step at which the device chose another token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Divergence {
    pub step: usize,
    pub device_token: u32,
    pub hf_token: u32,
    pub device_top5: Vec<u32>,
    pub hf_top5: Vec<u32>,
    /// Whether each side's token is in the other's five.
    pub mutual: bool,
}

/// One teacher-forced step, by ids alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    pub device_token: u32,
    pub hf_token: u32,
    pub device_in_hf: bool,
    pub hf_in_device: bool,
    /// Ids that both five have.
    pub shared: usize,
}

/// What the gate saw: upstream's verdict needs `first_divergence` and `bad_step`; `steps` tells the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenSet {
    /// Steps before the first bad one.
    pub steps: Vec<Step>,
    pub first_divergence: Option<Divergence>,
    /// The first step whose logits hold a NaN or an infinity; nothing from it on was compared.
    pub bad_step: Option<usize>,
}

impl TokenSet {
    /// Compares the device's logits, teacher-forced with HF's tokens, with HF's choices. Up to the first divergence that
    /// is the same run as a free one.
    ///
    /// Shapes: `chosen [N]`; `hf_top_ids [N, >= 5]`, highest first; `logits [n <= N, vocab]`.
    ///
    /// Errors: [`Error::Comparison`] for other shapes, more steps than HF has, and ids beyond the vocabulary.
    pub fn compare(chosen: &[u32], hf_top_ids: ArrayView2<'_, u32>, logits: ArrayView2<'_, f32>) -> Result<TokenSet> {
        check_shapes(chosen, hf_top_ids, logits)?;
        let mut seen = TokenSet { steps: Vec::new(), first_divergence: None, bad_step: None };
        for (step, (row, &hf_token)) in logits.outer_iter().zip(chosen).enumerate() {
            let Ok(device_top5) = top_k(row, TOP_K) else {
                seen.bad_step = Some(step);
                break;
            };
            let hf_top5: Vec<u32> = hf_top_ids.row(step).iter().take(TOP_K).copied().collect();
            let device_token = device_top5[0];
            let here = Step {
                device_token,
                hf_token,
                device_in_hf: hf_top5.contains(&device_token),
                hf_in_device: device_top5.contains(&hf_token),
                shared: device_top5.iter().filter(|id| hf_top5.contains(id)).count(),
            };
            if device_token != hf_token && seen.first_divergence.is_none() {
                let mutual = here.device_in_hf && here.hf_in_device;
                seen.first_divergence = Some(Divergence { step, device_token, hf_token, device_top5, hf_top5, mutual });
            }
            seen.steps.push(here);
        }
        Ok(seen)
    }

    /// Upstream's rule and nothing else: no NaN, and mutual inclusion at the first divergence if there is one. It holds
    /// for an empty run too, which is why only [`TokenSet::judge`] may pass anything.
    pub fn upstream_accepts(&self) -> bool {
        self.bad_step.is_none() && self.first_divergence.as_ref().is_none_or(|d| d.mutual)
    }

    /// Upstream's rule over a full extent: VACUOUS below 32 steps.
    pub fn judge(&self) -> Verdict {
        let mut failures = Vec::new();
        if let Some(step) = self.bad_step {
            failures.push(format!("logits of step {step} hold a NaN or an infinity"));
        }
        if let Some(d) = self.first_divergence.as_ref().filter(|d| !d.mutual) {
            failures.push(format!(
                "first divergence at step {}: device token {} (top 5 {:?}), HF token {} (top 5 {:?}): not in each other's",
                d.step, d.device_token, d.device_top5, d.hf_token, d.hf_top5
            ));
        }
        let extent = Extent::new().require("steps", STEPS as u64).compare("steps", self.steps.len() as u64);
        Verdict::judge(failures, extent)
    }

    /// Steps at which both chose the same token.
    pub fn same(&self) -> usize {
        self.steps.iter().filter(|s| s.device_token == s.hf_token).count()
    }
}

fn check_shapes(chosen: &[u32], hf_top_ids: ArrayView2<'_, u32>, logits: ArrayView2<'_, f32>) -> Result<()> {
    let vocab = logits.ncols();
    if hf_top_ids.nrows() != chosen.len() || hf_top_ids.ncols() < TOP_K.min(vocab) {
        let expected = format!("[{}, {TOP_K} or more]", chosen.len());
        return Err(Error::comparison("token_set: HF's top ids", format!("shape {:?}", hf_top_ids.shape()), expected));
    }
    if logits.nrows() > chosen.len() {
        let expected = format!("at most {}, the steps HF has", chosen.len());
        return Err(Error::comparison("token_set: logits", format!("{} steps", logits.nrows()), expected));
    }
    if logits.nrows() > 0 && vocab == 0 {
        return Err(Error::comparison("token_set: logits", "no vocabulary", "at least one id"));
    }
    let beyond = chosen.iter().chain(hf_top_ids.iter()).find(|&&id| logits.nrows() > 0 && id as usize >= vocab);
    match beyond {
        Some(id) => Err(Error::comparison("token_set", format!("HF token id {id}"), format!("an id below {vocab}"))),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ndarray::{Array2, arr1};
    use rstest::rstest;

    use super::*;
    use crate::check::Outcome;

    /// Logits of one step whose top ids are `top`, in that order.
    pub fn row(vocab: usize, top: &[u32]) -> Vec<f32> {
        let mut row: Vec<f32> = vec![-4.0; vocab];
        top.iter().enumerate().for_each(|(rank, &id)| row[id as usize] = 10.0 - rank as f32);
        row
    }

    /// A run of `steps` steps: HF's choices, its top ids, and the device's logits.
    pub fn run(steps: usize, hf: &[u32], device: impl Fn(usize) -> Vec<f32>) -> (Vec<u32>, Array2<u32>, Array2<f32>) {
        let rows: Vec<f32> = (0..steps).flat_map(device).collect();
        let vocab = rows.len() / steps.max(1);
        let top = Array2::from_shape_fn((STEPS, hf.len()), |(_, k)| hf[k]);
        (vec![hf[0]; STEPS], top, Array2::from_shape_vec((steps, vocab), rows).unwrap())
    }

    const HF: [u32; 5] = [1, 2, 3, 4, 5];

    #[rstest]
    #[case::same(&[1, 2, 3, 4, 5], true, None)]
    #[case::same_token_other_order(&[1, 9, 8, 7, 6], true, None)]
    #[case::near_tie(&[2, 1, 3, 4, 5], true, Some(true))]
    #[case::last_of_five_both_ways(&[5, 9, 8, 7, 1], true, Some(true))]
    #[case::device_token_outside_hf(&[9, 1, 2, 3, 4], false, Some(false))]
    #[case::hf_token_outside_device(&[2, 3, 4, 5, 6, 1], false, Some(false))]
    #[case::both_outside(&[9, 8, 7, 6, 0], false, Some(false))]
    fn upstream_rule(#[case] device: &[u32], #[case] accepts: bool, #[case] mutual: Option<bool>) {
        let (chosen, top, logits) = run(STEPS, &HF, |_| row(16, device));
        let seen = TokenSet::compare(&chosen, top.view(), logits.view()).unwrap();
        assert_eq!(seen.upstream_accepts(), accepts);
        assert_eq!(seen.first_divergence.as_ref().map(|d| d.mutual), mutual);
        assert_eq!(seen.judge().is_pass(), accepts);
    }

    #[test]
    fn only_the_first_divergence_counts() {
        let garbage_later =
            run(STEPS, &HF, |s| if s == 0 { row(16, &[2, 1, 3, 4, 5]) } else { row(16, &[15, 14, 13, 12, 11]) });
        let seen = TokenSet::compare(&garbage_later.0, garbage_later.1.view(), garbage_later.2.view()).unwrap();
        assert!(seen.judge().is_pass());
        assert_eq!((seen.same(), seen.steps.iter().filter(|s| s.shared == 0).count()), (0, 31));
        let garbage_at_9 = run(STEPS, &HF, |s| if s == 9 { row(16, &[15, 14, 13, 12, 11]) } else { row(16, &HF) });
        let seen = TokenSet::compare(&garbage_at_9.0, garbage_at_9.1.view(), garbage_at_9.2.view()).unwrap();
        assert_eq!((seen.judge().outcome(), seen.first_divergence.map(|d| d.step)), (Outcome::Fail, Some(9)));
    }

    #[rstest]
    #[case(0, Outcome::Vacuous)]
    #[case(1, Outcome::Vacuous)]
    #[case(31, Outcome::Vacuous)]
    #[case(32, Outcome::Pass)]
    fn a_short_run_is_vacuous(#[case] steps: usize, #[case] outcome: Outcome) {
        let (chosen, top, logits) = run(steps, &HF, |_| row(16, &HF));
        let seen = TokenSet::compare(&chosen, top.view(), logits.view()).unwrap();
        assert!(seen.upstream_accepts());
        assert_eq!(seen.judge().outcome(), outcome);
    }

    #[rstest]
    #[case(f32::NAN)]
    #[case(f32::INFINITY)]
    #[case(f32::NEG_INFINITY)]
    fn a_nan_fails_after_a_divergence_too(#[case] bad: f32) {
        let (chosen, top, mut logits) = run(STEPS, &HF, |_| row(16, &[2, 1, 3, 4, 5]));
        logits[[31, 0]] = bad;
        let seen = TokenSet::compare(&chosen, top.view(), logits.view()).unwrap();
        assert_eq!((seen.bad_step, seen.judge().outcome()), (Some(31), Outcome::Fail));
    }

    #[test]
    fn ties_go_to_the_smaller_id() {
        assert_eq!(top_k(arr1(&[1.0, 3.0, 3.0, 2.0, 3.0]).view(), 2).unwrap(), [1, 2]);
        assert_eq!(top_k(arr1(&[0.0, -0.0, 0.0]).view(), 5).unwrap(), [0, 1, 2]);
        let flat = run(STEPS, &[0, 1, 2, 3, 4], |_| vec![1.0; 16]);
        assert!(TokenSet::compare(&flat.0, flat.1.view(), flat.2.view()).unwrap().judge().is_pass());
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let (chosen, top, logits) = run(STEPS, &HF, |_| row(16, &HF));
        assert!(TokenSet::compare(&chosen[..5], top.view(), logits.view()).is_err());
        assert!(TokenSet::compare(&chosen[..5], top.slice(ndarray::s![..5, ..]), logits.view()).is_err());
        assert!(TokenSet::compare(&chosen, top.slice(ndarray::s![.., ..4]), logits.view()).is_err());
        assert!(TokenSet::compare(&chosen, top.view(), logits.slice(ndarray::s![.., ..5])).is_err());
        assert!(top_k(arr1(&[1.0, f32::NAN]).view(), 1).unwrap_err().to_string().contains("NaN at id 1"));
        assert!(top_k(arr1(&[1.0, 2.0]).view(), 0).unwrap().is_empty());
    }
}
