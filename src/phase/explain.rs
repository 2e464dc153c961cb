//! Explanations of a bench's runs: the bisect, and the fit of named faults.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::devices::{isa, open_device, pool};
use super::{Bench, Subject, court};
use crate::check::{Outcome, Verdict};
use crate::error::{Error, Result};
use crate::explain::bisect::{self, Bisect};
use crate::explain::fit::{self, Hypothesis, Library, Suspect};
use crate::explain::{Lab, Script, finite};
use crate::plan::PlanOptions;
use crate::runner::{Alteration, Sound};
use crate::settings;

/// Decode steps of an explained run.
pub const STEPS: usize = 6;

/// What a subject is made of, for runs of its own.
///
/// Errors: those of the settings.
pub fn lab(subject: &Subject, plan: PlanOptions) -> Result<Lab> {
    Ok(Lab {
        config: subject.config.clone(),
        weights: subject.checkpoint.clone(),
        pool: pool()?,
        isa: isa()?,
        open: open_device,
        plan,
    })
}

/// The run that shows most for its length: the shortest captured prompt with layer outputs, from 16 tokens on.
///
/// Errors: those of the capture.
pub fn script(subject: &Subject) -> Result<Script> {
    let capture = subject.capture()?;
    let found = capture.prompts().iter().filter(|p| p.n_prompt >= 16).min_by_key(|p| p.n_prompt);
    let id = found.map(|p| p.id.clone()).ok_or_else(|| Error::Unavailable {
        what: "a prompt to explain by".into(),
        why: "none has 16 tokens".into(),
    })?;
    script_of(subject, &id)
}

/// The longest captured prompt: what lies beyond a block, a ring or bf16's whole numbers shows there only.
///
/// Errors: those of the capture.
pub fn long_script(subject: &Subject) -> Result<Script> {
    let found = subject.capture()?.prompts().iter().max_by_key(|p| p.n_prompt).map(|p| p.id.clone());
    script_of(subject, &found.unwrap_or_default())
}

fn script_of(subject: &Subject, id: &str) -> Result<Script> {
    let prompt = subject.capture()?.prompt(id)?;
    Ok(Script::new(&prompt.ids, &prompt.chosen[..STEPS]))
}

/// The emulated device that rounds as this one does.
pub fn sound(device: &str) -> &'static str {
    if device == "emu" { "emu" } else { "emu_npu2" }
}

/// Relative square of a site's change that another device of the same arithmetic class may show without a fault.
///
/// The emulated device repeats itself bit for bit; a real one is held to what rounding at another place leaves.
fn noise(device: &str) -> f64 {
    if matches!(device, "emu" | "emu_npu2") { 0.0 } else { 1e-3 }
}

/// Models of more layers than this are fitted at the suspect layer and its neighbours only.
const ALL_LAYERS: usize = 8;

/// Least score of a fault that is named; the very fault has 1.
const ALIKE: f64 = 0.3;

/// What was found out about a run.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Explanation {
    pub bisect: Bisect,
    /// The faults by how well they account for the run.
    pub hypotheses: Vec<Hypothesis>,
    /// Instances of faults that were left out for want of time.
    pub left_out: usize,
    pub seen: Seen,
}

/// Where a run was seen to part from a sound one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// On neither prompt: there is nothing to explain.
    Nowhere,
    Short,
    /// On the longest prompt only.
    Long,
    /// The model itself leaves no numbers, so no run of it can be told from another.
    NoNumbers,
}

/// Takes a device's run apart and fits the catalogue to it.
///
/// Errors: those of the sound runs; a run that is refused is itself explained.
pub fn explain(
    subject: &Subject,
    device: &str,
    altered: &dyn Alteration,
    plan: &PlanOptions,
    budget: Duration,
) -> Result<Explanation> {
    explain_in(&lab(subject, plan.clone())?, &[script(subject)?, long_script(subject)?], device, altered, budget)
}

/// [`explain`] of any model, on the first of the scripts on which the run is not a sound one.
fn explain_in(
    lab: &Lab,
    scripts: &[Script; 2],
    device: &str,
    altered: &dyn Alteration,
    budget: Duration,
) -> Result<Explanation> {
    let deadline = Instant::now() + budget;
    let [short, long] = scripts;
    let no_numbers =
        |why| Explanation { bisect: Bisect::refused(why), hypotheses: vec![], left_out: 0, seen: Seen::NoNumbers };
    if let Some(why) = finite::not_finite(lab, sound(device), short)? {
        return Ok(no_numbers(why));
    }
    let found = match bisect::bisect(lab, device, sound(device), short, altered) {
        Err(error @ Error::Unavailable { .. }) => return Err(error),
        found => found.unwrap_or_else(|error| Bisect::refused(error.to_string())),
    };
    let outcome = fit::outcome(lab.trace(device, short, altered));
    let near: Vec<usize> = match found.layer {
        Some(layer) => (layer.saturating_sub(1)..=layer + 1).collect(),
        None => vec![0, lab.config.num_hidden_layers - 1],
    };
    let layers = (lab.config.num_hidden_layers > ALL_LAYERS).then_some(&near[..]);
    let culprit = found.culprit.as_deref().map(|name| name.split_once('.').map_or(name, |(_, site)| site).to_owned());
    let suspect = Suspect { layer: found.layer, site: culprit };
    let library = Library::new(lab, sound(device), short, layers, &suspect, Some(deadline))?;
    if !library.is_sound(&outcome, noise(device)) {
        let hypotheses = library.explain(&outcome, noise(device));
        return Ok(Explanation { bisect: found, hypotheses, left_out: library.left_out, seen: Seen::Short });
    }
    if let Some(why) = finite::not_finite(lab, sound(device), long)? {
        return Ok(no_numbers(why));
    }
    // Only what the short run does not show can be the fault.
    let hidden = library.sound_candidates();
    let library = Library::of(lab, sound(device), long, hidden, Some(deadline))?;
    let outcome = fit::outcome(lab.trace(device, long, altered));
    let (hypotheses, seen) = match library.is_sound(&outcome, noise(device)) {
        true => (vec![], Seen::Nowhere),
        false => (library.explain(&outcome, noise(device)), Seen::Long),
    };
    Ok(Explanation { bisect: found, hypotheses, left_out: library.left_out, seen })
}

impl Explanation {
    /// Whether the run is as a sound one on every prompt that was looked at.
    pub fn is_sound(&self) -> bool {
        self.seen == Seen::Nowhere && self.bisect.step.is_none() && self.bisect.refused.is_none()
    }

    /// A few lines for the end of a failure message; `limit` is what sets the time that a fit may take.
    pub fn lines(&self, limit: &str) -> Vec<String> {
        let mut lines = vec![self.bisect.line()];
        if self.is_sound() || self.seen == Seen::NoNumbers {
            return lines;
        }
        if self.seen == Seen::Long {
            lines.push("on the short prompt the run is a sound one; the longest one shows it".into());
        }
        let likely: Vec<&Hypothesis> = self.hypotheses.iter().filter(|h| h.matched.score() >= ALIKE).take(3).collect();
        if likely.is_empty() {
            let best = self.hypotheses.first().map(|h| format!("; nearest is {}, {:.2}", h.fault, h.matched.score()));
            lines.push(format!("no fault of the catalogue is like it{}", best.unwrap_or_default()));
        }
        for (i, h) in likely.into_iter().enumerate() {
            let place = h.at.layer.map_or("everywhere".to_owned(), |layer| format!("layer {layer}"));
            // Another head or row than the one that was tried: other elements, the same pattern.
            let how = match h.matched.share > 0.0 {
                true => {
                    format!("explains {:.1} % of the residual, cosine {:.3}", 100.0 * h.matched.share, h.matched.cosine)
                }
                false => format!("the same launches are off by as much, other elements ({:.2})", h.matched.score()),
            };
            let what = format!("{}. {} ({place}): {}; {how}", i + 1, h.fault, h.title);
            lines.push(if i == 0 { format!("{what}; likely cause: {}; remedy: {}", h.cause, h.remedy) } else { what });
        }
        if self.left_out > 0 {
            lines.push(format!("{} instances of faults were not tried: {limit} is too short", self.left_out));
        }
        lines
    }
}

/// Prompts of a failing run whose reference is heard.
const HEARD: usize = 4;

/// A command's verdict once the reference has been heard, and what is known of why it failed; a pass is handed on.
pub fn after(bench: &Bench, prompts: &[String], verdict: Verdict) -> (Verdict, Vec<String>) {
    if verdict.outcome() != Outcome::Fail {
        return (verdict, vec![]);
    }
    let mut hearing = court::Hearing::default();
    let mut lines = vec![];
    for prompt in prompts.iter().take(HEARD) {
        match court::hear(bench, prompt) {
            Ok(heard) => hearing.extend(heard),
            Err(error) => lines.push(format!("the reference was not heard: {error}")),
        }
    }
    let budget = settings::explain_budget().unwrap_or_default();
    // Another engine has no steps of ours to look into.
    if !budget.is_zero() && !bench.is_external() {
        let explained = explain(bench.subject(), bench.device(), &Sound, &bench.plan(), budget);
        lines.extend(explained.map_or_else(
            |error| vec![format!("no explanation: {error}")],
            |found| found.lines(settings::EXPLAIN_SECONDS),
        ));
    }
    (hearing.apply(verdict), lines)
}

/// The explanation of a fixture's failing runs on a device, made once per process; none where it is switched off or
/// cannot be made, which is no reason to hide the failure.
pub fn of_failure(model: &str, device: &str) -> Option<Arc<Vec<String>>> {
    type Known = Mutex<HashMap<(String, String), Arc<Vec<String>>>>;
    static KNOWN: OnceLock<Known> = OnceLock::new();
    let budget = settings::explain_budget().ok().filter(|budget| !budget.is_zero())?;
    let mut known = KNOWN.get_or_init(Default::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (model.to_owned(), device.to_owned());
    if let Some(lines) = known.get(&key) {
        return Some(lines.clone());
    }
    let explained = Subject::shared(model).and_then(|s| explain(&s, device, &Sound, &PlanOptions::default(), budget));
    let lines = Arc::new(
        explained.map_or_else(|error| vec![format!("no explanation: {error}")], |e| e.lines(settings::EXPLAIN_SECONDS)),
    );
    known.insert(key, lines.clone());
    Some(lines)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use half::bf16;

    use super::*;
    use crate::model::Weights;

    /// A checkpoint with one element of one tensor replaced.
    struct Damaged {
        sound: Arc<dyn Weights>,
        tensor: &'static str,
        at: usize,
        with: bf16,
    }

    impl Weights for Damaged {
        fn bf16(&self, name: &str) -> Result<Cow<'_, [bf16]>> {
            let mut values = self.sound.bf16(name)?;
            if name == self.tensor {
                values.to_mut()[self.at] = self.with;
            }
            Ok(values)
        }
    }

    fn damaged(tensor: &'static str, at: usize, with: bf16) -> Explanation {
        let subject = Subject::shared("tiny_llama").unwrap();
        let sound = lab(&subject, PlanOptions::default()).unwrap();
        let weights = Arc::new(Damaged { sound: sound.weights.clone(), tensor, at, with });
        let scripts = [script(&subject).unwrap(), long_script(&subject).unwrap()];
        explain_in(&Lab { weights, ..sound }, &scripts, "emu", &Sound, Duration::ZERO).unwrap()
    }

    #[test]
    fn a_model_that_holds_no_number_is_named_and_not_fitted() {
        let columns = Subject::shared("tiny_llama").unwrap().config.hidden_size;
        for (tensor, at, with, said) in [
            (
                "model.layers.1.mlp.up_proj.weight",
                2 * columns + 5,
                bf16::NAN,
                "model.layers.1.mlp.up_proj.weight holds a NaN (first at row 2, column 5)",
            ),
            ("model.norm.weight", 3, bf16::INFINITY, "model.norm.weight holds an infinity (first at element 3)"),
            // Large, and a number all the same: what is too large for bf16 comes of it.
            ("model.layers.1.post_attention_layernorm.weight", 0, bf16::MAX, "every weight is finite"),
        ] {
            let found = damaged(tensor, at, with);
            let lines = found.lines("--budget");
            assert!(found.hypotheses.is_empty() && !found.is_sound(), "{lines:?}");
            assert!(lines.len() == 1 && lines[0].contains(said), "{lines:?}");
        }
    }
}
