//! Whether the HF capture can be a truth: complete, finite, neither uniform nor certain, and a language model.

use super::text::line;
use crate::check::tolerance::at_most;
use crate::check::{Extent, Verdict};
use crate::error::Result;
use crate::model::prompts;
use crate::phase::Subject;
use crate::reference::PromptCapture;
use crate::reference::noise::Floor;

/// Entropy of any step, over that of a uniform distribution. The committed captures reach 0.78.
const ENTROPY_MAX_SHARE: f64 = 0.95;

/// Mean entropy of an answer's steps. Below it HF is certain of everything, and no fault could move a choice; the
/// committed captures stay above 0.1. Units: nats.
const ENTROPY_MEAN_MIN: f64 = 0.01;

/// A perplexity above this is no language model's on plain text; one below 1 is no probability's.
const PERPLEXITY_MAX: f64 = 1000.0;

/// The same over the vocabulary, whose size is what knowing nothing gives.
const PERPLEXITY_MAX_SHARE: f64 = 0.125;

/// Perplexity of HF bf16 over HF f32, or the inverse: the committed captures agree within 0.4 %.
const PERPLEXITY_RATIO_MAX: f64 = 1.02;

/// Tokens that perplexity must be measured on.
const PERPLEXITY_TOKENS: u64 = 100;

/// Every value is finite and every part agrees with the others.
pub(super) fn sound(subject: &Subject, _: &str) -> Result<Verdict> {
    let capture = subject.capture()?;
    capture.sound()?;
    let prompts = capture.prompts().len() as u64;
    Ok(Verdict::judge(vec![], Extent::new().require("prompts", 1).compare("prompts", prompts)))
}

/// Every prompt of the manifest's sets is captured, so that none goes missing with its cases; every expectation of the
/// manifest can be looked at; a prompt of each kind has layer outputs.
pub(super) fn complete(subject: &Subject, _: &str) -> Result<Verdict> {
    let capture = subject.capture()?;
    let captured = |id: &str| capture.prompts().iter().any(|p| p.id == id);
    let mut failures = vec![];
    let mut wanted = 0;
    let manifest = subject.located.manifest.as_ref();
    for &set in manifest.map_or(&[][..], |m| &m.prompts) {
        let ids = prompts::list(&subject.root, set)?;
        wanted += ids.len() as u64;
        failures.extend(ids.iter().filter(|id| !captured(id)).map(|id| format!("prompt {id} is not captured")));
        if let Some(first) = ids.first().filter(|&id| !capture.lens_prompts().contains(id) && set.has_lens()) {
            failures.push(format!("prompt {first} has no layer outputs"));
        }
    }
    for id in manifest.map_or(&[][..], |m| &m.expects) {
        if !captured(id) {
            failures.push(format!("expects: prompt {id} is not captured"));
        } else if line(subject, id)?.1.expect.is_empty() {
            failures.push(format!("expects: the prompt file expects nothing of {id}"));
        }
    }
    let extent = Extent::new().require("prompts", wanted).compare("prompts", capture.prompts().len() as u64);
    Ok(Verdict::judge(failures, extent))
}

/// HF's own answer to one prompt: of sane entropy, of ids that have tokens, and as the world says where that is known.
pub(super) fn answer(subject: &Subject, id: &str) -> Result<Verdict> {
    let captured = subject.capture()?.prompt(id)?;
    let mut failures = vec![];
    let entropies = entropies(&captured, subject.config.vocab_size);
    let most = ENTROPY_MAX_SHARE * (subject.config.vocab_size as f64).ln();
    if let Some(step) = entropies.iter().position(|&h| !at_most(h, most)) {
        failures.push(format!("step {step}: an entropy of {:.3} nats, at most {most:.3}", entropies[step]));
    }
    let mean = entropies.iter().sum::<f64>() / entropies.len() as f64;
    if !at_most(ENTROPY_MEAN_MIN, mean) {
        failures.push(format!("a mean entropy of {mean:.5} nats, at least {ENTROPY_MEAN_MIN}"));
    }
    let masked = subject.masked_ids()?;
    if let Some(id) = captured.chosen.iter().find(|id| masked.binary_search(id).is_ok()) {
        failures.push(format!("HF chooses id {id}, which has no token"));
    }
    let expects = subject.located.manifest.as_ref().is_some_and(|m| m.expects.iter().any(|e| e == id));
    if expects {
        let (_, prompt) = line(subject, id)?;
        let stop_ids = subject.stop_ids()?;
        let until = captured.chosen.iter().position(|t| stop_ids.contains(t)).unwrap_or(captured.chosen.len());
        let text = subject.tokenizer()?.decode(&captured.chosen[..until], true)?;
        if !prompts::as_expected(&text, &prompt.expect) {
            failures.push(format!("HF continues with {text:?}, expected {}", prompt.expect.join(" or ")));
        }
    }
    let steps = captured.chosen.len() as u64;
    Ok(Verdict::judge(failures, Extent::new().require("steps", Subject::STEPS as u64).compare("steps", steps)))
}

/// Entropy of each step's distribution, what lies beyond the captured ids spread evenly: an upper bound.
///
/// Shapes: `[N]`. Units: nats.
fn entropies(captured: &PromptCapture, vocab_size: usize) -> Vec<f64> {
    let rows = captured.bf16.logits.outer_iter().zip(&captured.bf16_lse);
    let of = |(logits, &lse): (ndarray::ArrayView1<'_, f32>, &f32)| {
        let (mut entropy, mut mass) = (0.0, 0.0);
        for &logit in logits {
            let log_p = f64::from(logit) - f64::from(lse);
            entropy -= log_p.exp() * log_p;
            mass += log_p.exp();
        }
        let (tail, rest) = (1.0 - mass, vocab_size.saturating_sub(logits.len()));
        // Not "tail > 0": a NaN must come through.
        if tail <= 0.0 || rest == 0 { entropy } else { entropy - tail * (tail / rest as f64).ln() }
    };
    rows.map(of).collect()
}

/// A language model on plain text, and the same one in bf16 and f32.
pub(super) fn perplexity(subject: &Subject, _: &str) -> Result<Verdict> {
    let Floor { perplexity_bf16: bf16, perplexity_f32: f32, .. } = Floor::of(subject.capture()?)?;
    let max = PERPLEXITY_MAX.min(PERPLEXITY_MAX_SHARE * subject.config.vocab_size as f64);
    let sane = |p: f64| p > 1.0 && p < max;
    let ratio = (bf16 / f32).max(f32 / bf16);
    let failure = (!(sane(bf16) && sane(f32) && at_most(ratio, PERPLEXITY_RATIO_MAX))).then(|| {
        format!("HF's perplexity is {bf16:.3} in bf16, {f32:.3} in f32: both must lie in 1..{max:.0} and agree within a factor of {PERPLEXITY_RATIO_MAX}")
    });
    let tokens = subject.capture()?.nll()?.bf16.len() as u64;
    let extent = Extent::new().require("tokens", PERPLEXITY_TOKENS).compare("tokens", tokens);
    Ok(Verdict::judge(failure.into_iter().collect(), extent))
}
