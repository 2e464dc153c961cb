//! Phase 0: can this checkpoint be deployed, and is the reference sound?
//!
//! The strictest preflight there is: a pass means this checkpoint, exactly, as Hugging Face runs it. No device.

use super::subject::{Outline, Subject};
use super::{Case, Finding};
use crate::check::tolerance::{at_least, at_most};
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::model::chat_template::Message;
use crate::model::{PromptSet, RopeTable, prompts};
use crate::reference::noise::Floor;
use crate::settings;

/// RoPE rows before rounding may differ from HF's by this much: what one f32 rounding of the angle does at 2047.
const ROPE_MAX_ABS: f64 = 1e-6;

/// A perplexity above this is no language model's on plain text; one below 1 is no probability's.
const PERPLEXITY_MAX: f64 = 1000.0;

/// Perplexity of HF bf16 over HF f32: HF agrees with itself within 0.3 %; 5 % is a broken reference.
const PERPLEXITY_RATIO_MAX: f64 = 1.05;

/// Every case of phase 0 for one model.
pub fn cases(outline: &Outline) -> Vec<Case> {
    let model = outline.name.as_str();
    let mut cases = vec![];
    let mut add = |name: String, run: fn(&Subject, &str) -> Result<Verdict>, argument: &str| {
        let (m, argument) = (model.to_owned(), argument.to_owned());
        cases.push(Case::fixed(name, model, move || Ok(Finding::of(run(&*Subject::shared(&m)?, &argument)?))));
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
    add(format!("tensor::{model}::nothing_left_over"), left_over, "");
    for position in &outline.rope_positions {
        add(format!("rope::{model}::pos_{position:04}"), rope, &position.to_string());
    }
    for prompt in &outline.prompts {
        add(format!("tokens::{model}::{prompt}"), tokens, prompt);
        add(format!("baseline::{model}::{prompt}"), baseline, prompt);
    }
    add(format!("template::{model}"), template, "");
    add(format!("stop_set::{model}"), stop_set, "");
    add(format!("baseline::{model}::perplexity"), perplexity, "");
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

/// Opening the checkpoint has already refused everything out of scope.
fn scope(subject: &Subject, _: &str) -> Result<Verdict> {
    let class = subject.config.architecture.class();
    let hf = subject.capture()?.resolved_config()["architectures"][0].as_str().map(str::to_owned);
    Ok(one("architecture", (hf.as_deref() != Some(class)).then(|| format!("{class}, HF runs {hf:?}"))))
}

fn coverage(subject: &Subject, _: &str) -> Result<Verdict> {
    let unknown = &subject.coverage.unknown;
    let used = subject.coverage.used.len() as u64;
    let extent = Extent::new().require("config keys", 1).compare("config keys", used);
    let verdict = Verdict::judge(vec![], extent);
    Ok(unknown
        .iter()
        .fold(verdict, |v, key| v.warn(format!("config key {key} is unknown and belongs to no computation"))))
}

/// The capture was made for exactly these weights, this config, tokenizer and prompt files.
fn identity(subject: &Subject, _: &str) -> Result<Verdict> {
    let capture = subject.capture()?;
    capture.sound()?;
    let weights = capture.identity().weights_sha256.len() as u64;
    Ok(Verdict::judge(vec![], Extent::new().require("weight hashes", 1).compare("weight hashes", weights)))
}

/// One key of HF's resolved config against what we made of config.json.
fn config_key(subject: &Subject, key: &str) -> Result<Verdict> {
    let differences = subject.config.resolved_differences(subject.capture()?.resolved_config());
    let found = differences.into_iter().find(|d| d.key == key || d.key.starts_with(&format!("{key}.")));
    Ok(one("key", found.map(|d| format!("{}: ours {}, HF's {}", d.key, d.ours, d.hf))))
}

fn tensor(subject: &Subject, name: &str) -> Result<Verdict> {
    let spec = subject.config.tensors().into_iter().find(|t| t.name == name).ok_or_else(|| Error::Plan {
        why: format!("HF's config implies tensor {name}, the checkpoint's config does not"),
    })?;
    subject.checkpoint.check(&subject.config, spec)?;
    let nonfinite = subject.checkpoint.nonfinite(name)?;
    Ok(one("tensor", (nonfinite > 0).then(|| format!("{name}: {nonfinite} values are NaN or infinite"))))
}

fn left_over(subject: &Subject, _: &str) -> Result<Verdict> {
    let accounting = subject.checkpoint.account(&subject.config)?;
    let tensors = accounting.tensors.len() as u64;
    let expected = subject.config.tensors().len() as u64;
    Ok(Verdict::judge(vec![], Extent::new().require("tensors", expected).compare("tensors", tensors)))
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
    for (ours, hf) in [(cos, captured.cos.row(row)), (sin, captured.sin.row(row))] {
        for (i, hf) in hf.iter().enumerate() {
            let error = f64::from((ours[[0, i % half]] - hf).abs());
            worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
        }
    }
    let failure = (!at_most(worst, ROPE_MAX_ABS)).then(|| format!("max_abs {worst:.3e} > {ROPE_MAX_ABS:e} against HF"));
    let values = 2 * captured.cos.ncols() as u64;
    let extent = Extent::new().require("values", 4 * half as u64).compare("values", values);
    Ok(Verdict::judge(failure.into_iter().collect(), extent))
}

/// Rendered text and ids of one prompt equal the capture's; exactly one BOS where HF has one.
fn tokens(subject: &Subject, id: &str) -> Result<Verdict> {
    let capture = subject.capture()?;
    let captured = capture.prompts().iter().find(|p| p.id == id).ok_or_else(|| Error::Unknown {
        kind: "prompt",
        name: id.into(),
        known: capture.prompts().iter().map(|p| p.id.as_str()).collect::<Vec<_>>().join(", "),
    })?;
    let (set, ours) = prompt_line(id)?;
    let (rendered, ids) = match set {
        PromptSet::Chat => subject.chat_ids(&[Message::user(ours.text)])?,
        _ => subject.raw_ids(&ours.text)?,
    };
    let mut failures = vec![];
    if rendered != captured.rendered {
        failures.push(format!("rendered text {rendered:?}, HF's {:?}", captured.rendered));
    }
    let hf = capture.prompt(id)?.ids;
    if ids != hf {
        let at = ids.iter().zip(&hf).position(|(a, b)| a != b).unwrap_or(ids.len().min(hf.len()));
        failures.push(format!("{} ids, HF has {}; the first difference is at {at}", ids.len(), hf.len()));
    }
    let bos = subject.tokenizer()?.leading_bos(&ids, &subject.config);
    if bos > 1 {
        failures.push(format!("the prompt starts with {bos} BOS tokens"));
    }
    let extent = Extent::new().require("ids", hf.len() as u64).compare("ids", ids.len().min(hf.len()) as u64);
    Ok(Verdict::judge(failures, extent))
}

/// The line of a prompt file that a captured prompt was made from.
///
/// Errors: [`Error::Unknown`] when the files hold no such prompt.
fn prompt_line(id: &str) -> Result<(PromptSet, prompts::Line)> {
    let root = settings::root();
    let unknown = |known: String| Error::Unknown { kind: "prompt", name: id.into(), known };
    let set = PromptSet::of_id(id).ok_or_else(|| unknown("base_00, instruct_00, chat_00, long_00 ...".into()))?;
    let mut lines = prompts::read(&set.file(&root))?;
    let at = prompts::list(&root, set)?.iter().position(|known| known == id);
    match at.filter(|&at| at < lines.len()) {
        Some(at) => Ok((set, lines.swap_remove(at))),
        None => Err(unknown(prompts::list(&root, set)?.join(", "))),
    }
}

fn template(subject: &Subject, _: &str) -> Result<Verdict> {
    let (text, ids) = subject.chat_ids(&[Message::user("one"), Message::assistant("two"), Message::user("three")])?;
    let complete = ["one", "two", "three"].iter().all(|turn| text.contains(turn)) && !ids.is_empty();
    Ok(one("conversation", (!complete).then(|| format!("a turn is missing in {text:?}"))))
}

fn stop_set(subject: &Subject, _: &str) -> Result<Verdict> {
    let sorted = |ids: &[u32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    let (ours, hf) = (sorted(subject.stop_ids()?), sorted(subject.capture()?.stop_ids()));
    Ok(one("stop set", (ours != hf).then(|| format!("{ours:?}, HF's {hf:?}"))))
}

/// HF's own answer to one prompt is finite, not degenerate, and starts as the world says where that is known.
fn baseline(subject: &Subject, id: &str) -> Result<Verdict> {
    let captured = subject.capture()?.prompt(id)?;
    let mut failures = vec![];
    let finite = captured.bf16.logits.iter().chain(&captured.f32.logits).all(|x| x.is_finite());
    if !finite {
        failures.push("HF's logits hold a NaN or an infinity".into());
    }
    // Mass of HF's own choice at each step: all about uniform is a broken model.
    let uniform = 1.0 / subject.config.vocab_size as f64;
    let steps = 0..captured.bf16_lse.len();
    let mass = |step: usize| f64::from(captured.bf16.logits[[step, 0]] - captured.bf16_lse[step]).exp();
    let flat = steps.filter(|&step| !at_least(mass(step), 4.0 * uniform)).count();
    if flat > 0 {
        failures.push(format!("{flat} steps of HF's answer are about uniform"));
    }
    let expects = subject.located.manifest.as_ref().is_some_and(|m| m.expects.iter().any(|e| e == id));
    if expects {
        let (_, prompt) = prompt_line(id)?;
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

fn perplexity(subject: &Subject, _: &str) -> Result<Verdict> {
    let Floor { perplexity_bf16: bf16, perplexity_f32: f32, .. } = Floor::of(subject.capture()?)?;
    let sane = |p: f64| p > 1.0 && p < PERPLEXITY_MAX;
    let ratio = (bf16 / f32).max(f32 / bf16);
    let failure = (!(sane(bf16) && sane(f32) && at_most(ratio, PERPLEXITY_RATIO_MAX)))
        .then(|| format!("HF's perplexity is {bf16:.3} in bf16, {f32:.3} in f32"));
    let tokens = subject.capture()?.nll()?.bf16.len() as u64;
    let extent = Extent::new().require("tokens", 100).compare("tokens", tokens);
    Ok(Verdict::judge(failure.into_iter().collect(), extent))
}
