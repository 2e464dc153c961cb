//! Is the gate the token-set check over the full extent? It is fed outputs that owe nothing to the model.

use ndarray::{Array2, s};

use super::{Exhibit, extent};
use crate::check::agreement::Agreement;
use crate::check::logits::{AtTruth, Kl, KlFactors};
use crate::check::token_set::{STEPS, TokenSet};
use crate::check::{Outcome, Verdict};
use crate::device::Arithmetic;
use crate::error::Result;
use crate::phase::{Bench, limits};
use crate::reference::PromptCapture;
use crate::tensor;

/// Each null, and whether upstream's rule alone has to stop it: not being stopped there is why the others exist.
fn nulls(logits: &Array2<f32>, captured: &PromptCapture) -> Vec<(&'static str, Array2<f32>)> {
    let (steps, vocab) = logits.dim();
    let wave = |i: usize, j: usize| ((i * 7919 + j * 104_729 + 13) % 1009) as f32 / 100.0;
    let first = logits.row(0).to_owned();
    let mut tail = logits.clone();
    // Step 0: HF's two best in each other's place, a near tie; garbage from there on.
    let (one, two) = (captured.bf16.ids[[0, 0]] as usize, captured.bf16.ids[[0, 1]] as usize);
    tail.slice_mut(s![1.., ..]).assign(&Array2::from_shape_fn((steps - 1, vocab), |(i, j)| wave(i, j)));
    let top = tail[[0, one]].max(tail[[0, two]]);
    (tail[[0, one]], tail[[0, two]]) = (top, top + 0.01 * top.abs() + 0.01);
    let mut stopped = logits.slice(s![..1, ..]).to_owned();
    stopped.row_mut(0).assign(&first);
    vec![
        ("noise", Array2::from_shape_fn((steps, vocab), |(i, j)| wave(i, j))),
        ("constants", Array2::from_elem((steps, vocab), 1.0)),
        ("zeros", Array2::zeros((steps, vocab))),
        ("shuffled rows", Array2::from_shape_fn((steps, vocab), |(i, j)| logits[[(i + 11) % steps, j]])),
        ("the first row at every step", Array2::from_shape_fn((steps, vocab), |(_, j)| first[j])),
        ("nothing at all", Array2::zeros((0, vocab))),
        ("one step of 32", stopped),
        ("garbage behind a near tie", tail),
    ]
}

/// The gate of phase 3 on one prompt's logits.
fn judge(captured: &PromptCapture, logits: &Array2<f32>, factor: f64) -> Result<Verdict> {
    let token_set = TokenSet::compare(&captured.chosen, captured.bf16.ids.view(), logits.view())?;
    let agreement = Agreement::compare(&captured.hf_top(), logits.view())?;
    let truth = captured.truth();
    let kl = Kl::measure(&truth, &AtTruth::gather(truth.ids, logits.view())?)?;
    let floor = Kl::measure(&truth, &captured.bf16_at_truth())?;
    Ok(token_set.judge().and(agreement.judge(STEPS)).and(kl.judge(&floor.summary, KlFactors::median(factor), STEPS)))
}

/// Every null on the first prompt must be stopped, the two thin ones as VACUOUS or worse.
///
/// Errors: those of the run and the comparison.
pub(super) fn exhibit(bench: &Bench, prompts: &[String]) -> Result<Exhibit> {
    // The loosest limit of any class: a null must not depend on a tight one.
    let layers = bench.subject().config.num_hidden_layers;
    let factor = limits::of(limits::Gate::KlMedian, Arithmetic::Npu2, layers)?;
    let (mut failures, mut tried) = (vec![], 0);
    for id in prompts.iter().take(1) {
        let captured = bench.subject().capture()?.prompt(id)?;
        let logits = tensor::to_f32(bench.record(id)?.logits.view());
        for (name, null) in nulls(&logits, &captured) {
            tried += 1;
            let verdict = judge(&captured, &null, factor)?;
            if !matches!(verdict.outcome(), Outcome::Fail | Outcome::Vacuous) {
                failures.push(format!("{name} in place of the logits: {verdict}"));
            }
        }
    }
    Ok(Exhibit {
        name: "null outputs",
        question: "is the gate the token-set check over all 32 steps, and does it stop what is no model?",
        found: format!("{tried} null outputs, {} passed", failures.len()),
        verdict: Verdict::judge(failures, extent("null outputs", 8, tried)),
    })
}
