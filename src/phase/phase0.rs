//! Phase 0: can this checkpoint be deployed, and is the reference sound?
//!
//! The strictest preflight there is: a pass means this checkpoint, exactly, as Hugging Face runs it. No device.
//! Every case can fail: `tests.rs` damages a fixture for each and requires it to.

mod reference;
mod text;

#[cfg(test)]
mod damage;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::subject::{Outline, Subject};
use super::{Case, Finding, Run};
use crate::check::tolerance::at_most;
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::model::{PromptSet, RopeTable, config};

/// RoPE rows before rounding may differ from HF's by this much: what one f32 rounding of the angle does at 2047.
const ROPE_MAX_ABS: f64 = 1e-6;

/// Positions whose RoPE rows must be compared, as far as the model has them: both ends, and both sides of where
/// scaling and long prompts begin.
const ROPE_POSITIONS: [u32; 6] = [0, 1, 64, 511, 512, 2047];

/// Opens the model that the cases are about.
type Open = Arc<dyn Fn() -> Result<Arc<Subject>> + Send + Sync>;

/// What a case does with the subject and its argument.
type Look = fn(&Subject, &str) -> Result<Verdict>;

/// Every case of phase 0 for one model.
pub fn cases(outline: &Outline) -> Vec<Case> {
    let model = outline.name.clone();
    cases_of(outline, &(Arc::new(move || Subject::shared_unaccounted(&model)) as Open))
}

/// All cases about one subject as one verdict; a case that cannot be carried out fails it.
///
/// Errors: as [`Subject::outline`].
pub fn verdict(subject: &Arc<Subject>) -> Result<Verdict> {
    let outline = subject.outline()?;
    let subject = subject.clone();
    let open: Open = Arc::new(move || Ok(subject.clone()));
    let of = |case: Case| {
        let Run::Static(run) = case.run else { return Verdict::not_run(format!("{}: needs a device", case.name)) };
        let failed = |error: Error| Verdict::judge(vec![format!("{}: {error}", case.name)], Extent::new());
        run().map_or_else(failed, |finding| finding.verdict)
    };
    Ok(Verdict::all(cases_of(&outline, &open).into_iter().map(of)))
}

/// The cases about whatever `open` opens.
fn cases_of(outline: &Outline, open: &Open) -> Vec<Case> {
    let model = outline.name.as_str();
    let mut cases = vec![];
    let mut add = |name: String, look: Look, argument: &str| {
        let (open, argument) = (open.clone(), argument.to_owned());
        cases.push(Case::fixed(name, model, move || Ok(Finding::of(look(&*open()?, &argument)?))));
    };
    add(format!("scope::{model}"), scope, "");
    add(format!("coverage::{model}"), coverage, "");
    add(format!("identity::{model}"), identity, "");
    for key in &outline.config_keys {
        add(format!("config::{model}::{}", segment(key)), config_key, key);
    }
    for spec in outline.config.tensors() {
        let place = spec.layer.map_or(String::new(), |l| format!("l{l:02}::"));
        add(format!("tensor::{model}::{place}{}", spec.part), tensor, &spec.name);
    }
    add(format!("tensor::{model}::nothing_missing"), missing, "");
    add(format!("tensor::{model}::nothing_left_over"), left_over, "");
    for position in &outline.rope_positions {
        add(format!("rope::{model}::pos_{position:04}"), rope, &position.to_string());
    }
    add(format!("rope::{model}::positions"), rope_positions, "");
    for prompt in &outline.prompts {
        add(format!("tokens::{model}::{prompt}"), text::tokens, prompt);
        add(format!("baseline::{model}::{prompt}"), reference::answer, prompt);
    }
    add(format!("tokens::{model}::held_out"), text::held_out, "");
    if outline.prompts.iter().any(|id| PromptSet::of_id(id) == Some(PromptSet::Chat)) {
        add(format!("template::{model}"), text::template, "");
    }
    add(format!("vocabulary::{model}"), text::vocabulary, "");
    add(format!("stop_set::{model}"), text::stop_set, "");
    add(format!("baseline::{model}::sound"), reference::sound, "");
    add(format!("baseline::{model}::complete"), reference::complete, "");
    add(format!("baseline::{model}::perplexity"), reference::perplexity, "");
    cases
}

/// A config key as a segment of a test name.
fn segment(key: &str) -> String {
    key.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect()
}

/// PASS for one thing compared, or FAIL with the reason.
fn one(what: &str, failure: Option<String>) -> Verdict {
    Verdict::judge(failure.into_iter().collect(), Extent::new().require(what, 1).compare(what, 1))
}

/// Opening the checkpoint has refused everything out of scope; HF runs the same class.
fn scope(subject: &Subject, _: &str) -> Result<Verdict> {
    let architecture = subject.config.architecture;
    let hf = subject.capture()?.resolved_config();
    let type_differs = hf["model_type"] != architecture.model_type();
    // A config without `architectures` is loaded by its model_type.
    let class_differs =
        hf["architectures"].as_array().is_some_and(|classes| classes.iter().all(|c| c != architecture.class()));
    let failure = (type_differs || class_differs)
        .then(|| format!("{}, HF runs {} ({})", architecture.class(), hf["architectures"], hf["model_type"]));
    Ok(one("architecture", failure))
}

/// Every key of config.json is in the account: used, known to change nothing, or unknown and no part of a computation
/// (reading the config has refused those that are).
fn coverage(subject: &Subject, _: &str) -> Result<Verdict> {
    let coverage = &subject.coverage;
    let json = config::read_json(&subject.located.checkpoint_dir.join(config::CONFIG_FILE))?;
    let mut stated = vec![];
    for (key, value) in json.as_object().into_iter().flatten() {
        stated.push(key.clone());
        let inner = value.as_object().filter(|_| key.starts_with("rope_")).into_iter().flatten();
        stated.extend(inner.map(|(name, _)| format!("{key}.{name}")));
    }
    let irrelevant = coverage.irrelevant.iter().map(|(key, _)| key);
    let accounted: BTreeSet<&String> = coverage.used.iter().chain(irrelevant).chain(&coverage.unknown).collect();
    let lost = stated.iter().filter(|key| !accounted.contains(key));
    let failures = lost.map(|key| format!("config key {key} is in no account")).collect();
    let extent = Extent::new().require("config keys", stated.len() as u64);
    let verdict = Verdict::judge(failures, extent.compare("config keys", accounted.len() as u64));
    let unknown = coverage.unknown.iter();
    Ok(unknown.fold(verdict, |v, key| v.warn(format!("config key {key} is unknown and belongs to no computation"))))
}

/// The capture was made for exactly these weights, this config, tokenizer and prompt files.
fn identity(subject: &Subject, _: &str) -> Result<Verdict> {
    let identity = subject.capture()?.identity();
    let hashes = [&identity.weights_sha256, &identity.files_sha256, &identity.prompts_sha256];
    let compared = hashes.iter().map(|h| h.len() as u64).sum();
    Ok(Verdict::judge(vec![], Extent::new().require("hashes", hashes.len() as u64).compare("hashes", compared)))
}

/// One key: what we made of config.json against what HF did. A key that nobody here uses must at least be known, and
/// stand in config.json as HF read it.
fn config_key(subject: &Subject, key: &str) -> Result<Verdict> {
    let hf = subject.capture()?.resolved_config();
    let differences = subject.config_differences(hf)?;
    let found = differences.into_iter().find(|d| d.key == key || d.key.starts_with(&format!("{key}.")));
    let verdict = one("key", found.map(|d| format!("{}: ours {}, HF's {}", d.key, d.ours, d.hf)));
    if subject.config.accounts_for(key, &hf[key]) {
        return Ok(verdict);
    }
    Ok(verdict.warn(format!("HF resolves {key}, which is unknown here and belongs to no computation")))
}

fn tensor(subject: &Subject, name: &str) -> Result<Verdict> {
    let spec = subject.config.tensors().into_iter().find(|t| t.name == name).ok_or_else(|| Error::Plan {
        why: format!("HF's config implies tensor {name}, the checkpoint's config does not"),
    })?;
    subject.checkpoint.check(&subject.config, spec)?;
    let nonfinite = subject.checkpoint.nonfinite(name)?;
    Ok(one("tensor", (nonfinite > 0).then(|| format!("{name}: {nonfinite} values are NaN or infinite"))))
}

/// Every tensor that the checkpoint's own config implies is stored, also one that HF's does not and that has no case.
fn missing(subject: &Subject, _: &str) -> Result<Verdict> {
    let expected = subject.config.tensors();
    let missing = expected.iter().filter(|spec| !subject.checkpoint.contains(&spec.name));
    let failures: Vec<String> = missing.map(|spec| format!("{} is not stored", spec.name)).collect();
    let found = (expected.len() - failures.len()) as u64;
    let extent = Extent::new().require("tensors", expected.len() as u64).compare("tensors", found);
    Ok(Verdict::judge(failures, extent))
}

/// No tensor beyond the expected but a listed few; a wrong one among the expected fails its own case.
fn left_over(subject: &Subject, _: &str) -> Result<Verdict> {
    let stored = subject.checkpoint.tensor_names().count();
    let extras = subject.checkpoint.extras(&subject.config)?;
    let verdict = Verdict::judge(vec![], Extent::new().require("tensors", 1).compare("tensors", stored as u64));
    Ok(extras.iter().fold(verdict, |v, extra| v.warn(format!("{}: {}", extra.stored, extra.reason))))
}

/// Our cos and sin at one position against HF's, before any rounding.
fn rope(subject: &Subject, position: &str) -> Result<Verdict> {
    let captured = subject.capture()?.rope()?;
    let wanted: u32 = position.parse().map_err(|_| Error::Plan { why: format!("position {position}") })?;
    let row = captured
        .positions
        .iter()
        .position(|&p| p == wanted)
        .ok_or_else(|| Error::Plan { why: format!("the capture holds no RoPE row {position}") })?;
    // HF computed its rows in one pass over positions up to the largest.
    let seq_len = captured.positions.iter().max().map_or(0, |&p| p as usize + 1);
    let (cos, sin) = RopeTable::new(&subject.config).rows(&[wanted as usize], seq_len);
    let half = subject.config.head_dim / 2;
    let mut worst = 0f64;
    let mut values = 0;
    for (ours, hf) in [(cos, captured.cos.row(row)), (sin, captured.sin.row(row))] {
        for (i, hf) in hf.iter().enumerate() {
            let error = f64::from((ours[[0, i % half]] - hf).abs());
            worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
            values += 1;
        }
    }
    let failure = (!at_most(worst, ROPE_MAX_ABS)).then(|| format!("max_abs {worst:.3e} > {ROPE_MAX_ABS:e} against HF"));
    let extent = Extent::new().require("values", 4 * half as u64).compare("values", values);
    Ok(Verdict::judge(failure.into_iter().collect(), extent))
}

/// The positions that matter have a case each.
fn rope_positions(subject: &Subject, _: &str) -> Result<Verdict> {
    let captured = subject.capture()?.rope()?.positions;
    let end = subject.config.max_position_embeddings;
    let wanted = || ROPE_POSITIONS.into_iter().filter(|&p| (p as usize) < end);
    let failures = wanted().filter(|p| !captured.contains(p)).map(|p| format!("the capture holds no RoPE row {p}"));
    let extent =
        Extent::new().require("positions", wanted().count() as u64).compare("positions", captured.len() as u64);
    Ok(Verdict::judge(failures.collect(), extent))
}
