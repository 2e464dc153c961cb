//! Phase 7: can the verdicts be trusted?
//!
//! An audit takes nothing over from earlier phases: it hashes everything anew, drives the runner itself and holds its
//! counters and times against the plan, feeds the gate what must not pass, injects a sample of the catalogue, and judges
//! the model again. What it audits is whatever `drive` hands out: the production runner, or something that pretends.

mod nulls;
mod path;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Bench, Subject, decode, escape, kv_rows, phase3};
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::fault::{Entry, Gate, Injection, Kind, Reach, catalogue};
use crate::model::hashes::sha256_file;
use crate::model::prompts::PromptSet;
use crate::plan::PlanOptions;
use crate::reference::Identity;
use crate::runner::{Runner, RunnerOptions, Sound};

pub use path::Drive;

/// The name of the document it writes.
pub const DOCUMENT: &str = "evaluation_report";

/// Models of more parameters are audited on fewer prompts and faults.
const SMALL: u64 = 20_000_000;

/// One question of the audit and its answer.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Exhibit {
    pub name: &'static str,
    pub question: &'static str,
    /// What was found, in numbers.
    pub found: String,
    pub verdict: Verdict,
}

/// Everything an audit found.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Audit {
    pub model: String,
    pub device: String,
    pub description: String,
    pub prompts: Vec<String>,
    pub seed: u64,
    pub exhibits: Vec<Exhibit>,
    /// Figures of the model itself: name and value.
    pub figures: Vec<(String, f64)>,
    /// Faults injected and faults that no gate saw.
    pub injected: usize,
    pub escaped: usize,
    pub verdict: Verdict,
}

/// Audits the production path of a device.
///
/// Errors: those of opening the model and the device; whatever the audit finds is in its verdict.
pub fn audit(subject: &Arc<Subject>, device: &str, seed: u64) -> Result<Audit> {
    let drive = |options: &RunnerOptions| -> Result<Box<dyn Runner>> { Ok(Box::new(subject.runner(device, options)?)) };
    audit_of(subject, device, &drive, seed)
}

/// Audits whatever `drive` hands out in place of the production path.
///
/// Errors: as [`audit`].
pub fn audit_of(subject: &Arc<Subject>, device: &str, drive: Drive<'_>, seed: u64) -> Result<Audit> {
    let small = subject.config.parameters() <= SMALL;
    let prompts = prompts(subject, small)?;
    let bench = Bench::new(subject.clone(), device, &prompts, PlanOptions::default())?.altered(Arc::new(Sound));
    let mut exhibits = vec![identity(subject)?, reference(subject)?];
    exhibits.extend(path::exhibits(subject, &bench, drive, seed)?);
    exhibits.push(nulls::exhibit(&bench, &prompts)?);
    let (kills, injected, escaped) = kills(subject, device, seed, small)?;
    exhibits.push(kills);
    let (again, figures) = again(&bench, &prompts)?;
    exhibits.push(again);
    let verdict = Verdict::all(exhibits.iter().map(|exhibit| exhibit.verdict.clone()));
    let (_, description) = bench.describe()?;
    let (model, device) = (subject.name.clone(), device.to_owned());
    Ok(Audit { model, device, description, prompts, seed, exhibits, figures, injected, escaped, verdict })
}

/// The first prompts of each set: two of a small model, one of a large one and none of its long ones.
fn prompts(subject: &Subject, small: bool) -> Result<Vec<String>> {
    let mut chosen = vec![];
    for set in PromptSet::ALL.into_iter().filter(|set| small || *set != PromptSet::Long) {
        let of_set = subject.capture()?.prompts().iter().filter(|p| PromptSet::of_id(&p.id) == Some(set));
        chosen.extend(of_set.take(if small { 2 } else { 1 }).map(|p| p.id.clone()));
    }
    Ok(chosen)
}

/// One count that had to be reached.
fn extent(what: &str, wanted: usize, found: usize) -> Extent {
    Extent::new().require(what, wanted as u64).compare(what, found as u64)
}

/// Every hash anew, past the cache.
fn identity(subject: &Subject) -> Result<Exhibit> {
    let mut prompts_sha256 = BTreeMap::new();
    for set in PromptSet::ALL {
        prompts_sha256.insert(set.file_key().to_owned(), sha256_file(&set.file(&subject.root))?);
    }
    let identity = Identity {
        weights_sha256: subject.checkpoint.tensor_hashes_uncached()?,
        files_sha256: subject.checkpoint.side_file_hashes()?,
        prompts_sha256,
    };
    let failures = match subject.refuse_others(subject.capture()?, &identity) {
        Ok(()) => vec![],
        Err(error) => vec![error.to_string()],
    };
    let count = identity.weights_sha256.len() + identity.files_sha256.len() + identity.prompts_sha256.len();
    let wanted = subject.config.tensors().len() + 1;
    Ok(Exhibit {
        name: "identity",
        question: "are weights, tokenizer and prompts those the reference was captured from?",
        found: format!("{count} sha256 computed anew, no cache"),
        verdict: Verdict::judge(failures, extent("hashes", wanted, count)),
    })
}

/// The reference is HF in bf16, of this architecture, and can be a truth at all.
fn reference(subject: &Subject) -> Result<Exhibit> {
    let capture = subject.capture()?;
    let provenance = capture.provenance();
    let mut failures = vec![];
    if !provenance.dtype.contains("bfloat16") {
        failures.push(format!("captured in {}, not bfloat16", provenance.dtype));
    }
    let class = capture.resolved_config()["architectures"][0].as_str().unwrap_or("none").to_owned();
    if class != subject.config.architecture.class() {
        failures.push(format!("captured from {class}, the checkpoint is {}", subject.config.architecture.class()));
    }
    let differences = subject.config.resolved_differences(capture.resolved_config());
    failures.extend(differences.iter().take(3).map(|d| format!("config as HF resolved it: {d:?}")));
    failures.extend(capture.sound().err().map(|error| error.to_string()));
    let prompts = capture.prompts().len();
    Ok(Exhibit {
        name: "reference",
        question: "is the reference HF transformers in bf16, of exactly this checkpoint?",
        found: format!("{class}; {}", provenance.line()),
        verdict: Verdict::judge(failures, extent("captured prompts", 1, prompts)),
    })
}

/// Verify, computed anew.
fn again(bench: &Bench, prompts: &[String]) -> Result<(Exhibit, Vec<(String, f64)>)> {
    let mut verdicts = vec![];
    let (mut same, mut steps) = (0, 0);
    for id in prompts {
        let found = phase3::prompt(bench, id)?;
        same += found.token_set.same();
        steps += found.token_set.steps.len();
        verdicts.push(found.verdict.clone());
    }
    let kl = phase3::kl(bench, prompts)?;
    let verdict = Verdict::all(verdicts).and(phase3::agreement(bench, prompts)?).and(kl.verdict);
    let mut figures = vec![("steps with HF's own token, share".to_owned(), same as f64 / steps.max(1) as f64)];
    figures.extend(kl.numbers.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    let exhibit = Exhibit {
        name: "verify again",
        question: "does the model pass when everything is computed anew?",
        found: format!("{} prompts, {steps} steps, {same} with HF's own token", prompts.len()),
        verdict,
    };
    Ok((exhibit, figures))
}

/// A seeded sample of the catalogue, each of which some gate must see.
fn kills(subject: &Arc<Subject>, device: &str, seed: u64, small: bool) -> Result<(Exhibit, usize, usize)> {
    let sample = sample(subject, device, seed, small);
    let (mut failures, mut seen) = (vec![], vec![]);
    for entry in &sample {
        let (killed, by) = if small {
            let row = escape::inject(entry, subject, device)?;
            let by = row.seen().map(Gate::name).next();
            (row.killed || row.unseen.is_some(), by)
        } else {
            light(entry, subject, device)?
        };
        seen.push(format!("{} by {}", entry.id, by.unwrap_or("nothing")));
        if !killed {
            failures.push(format!("fault {} was injected and no gate saw it", entry.id));
        }
    }
    let (injected, escaped) = (sample.len(), failures.len());
    let exhibit = Exhibit {
        name: "injected faults",
        question: "do the gates fail when something is broken?",
        found: seen.join(", "),
        verdict: Verdict::judge(failures, extent("injected faults", 4, injected)),
    };
    Ok((exhibit, injected, escaped))
}

/// Kinds of which one fault each is drawn.
const KINDS: [Kind; 6] = [Kind::Weights, Kind::Attention, Kind::Kv, Kind::Arithmetic, Kind::Device, Kind::Input];

fn sample(subject: &Subject, device: &str, seed: u64, small: bool) -> Vec<&'static Entry> {
    let mut state = seed;
    let mut draw = |end: usize| {
        // Source: Knuth's MMIX generator; only the high bits are used.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end.max(1)
    };
    let mut chosen = vec![];
    for kind in KINDS {
        let fits = |entry: &&&'static Entry| {
            entry.kind == kind
                && (entry.absent)(&subject.config).is_none()
                && (entry.unseen)(&subject.config).is_none()
                && !(device != "emu" && matches!(entry.injection, Injection::Harness(_)))
                && (small || is_light(entry))
        };
        let there: Vec<&'static Entry> = catalogue().iter().filter(fits).copied().collect();
        if !there.is_empty() {
            chosen.push(there[draw(there.len())]);
        }
    }
    chosen
}

/// Positions that decode is walked over, within the shortest buckets.
const WALK: &[(usize, usize)] = &[(1, 16)];

/// Whether one short prompt's logits and layers are enough to see it.
fn is_light(entry: &Entry) -> bool {
    let seen = [Gate::Refused, Gate::Kl, Gate::Noise, Gate::Agreement];
    let of_run = !matches!(entry.injection, Injection::Harness(_));
    of_run && entry.reach == Reach::OneLayer && entry.catches.iter().any(|gate| seen.contains(gate))
        || matches!(entry.injection, Injection::Record(_))
            && entry.id.starts_with("null_")
            && entry.id != "null_previous_prompt"
}

/// One fault on one short prompt, before the gates that need no other run.
fn light(entry: &'static Entry, subject: &Arc<Subject>, device: &str) -> Result<(bool, Option<&'static str>)> {
    let capture = subject.capture()?;
    let short = capture.prompts().iter().filter(|p| capture.lens_prompts().contains(&p.id)).min_by_key(|p| p.n_prompt);
    let prompt = short.map(|p| p.id.clone()).ok_or_else(|| Error::Unavailable {
        what: "a prompt to inject faults into".into(),
        why: "the capture has no layer outputs".into(),
    })?;
    let fault = Arc::new(crate::fault::Fault::of(entry, &subject.config)?);
    let prompts = [prompt.clone()];
    let bench = Bench::new(subject.clone(), device, &prompts, PlanOptions::default())?.altered(fault);
    if bench.record(&prompt).is_err() {
        return Ok((true, Some(Gate::Refused.name())));
    }
    let stopped = |verdict: Result<Verdict>| verdict.map_or(true, |verdict| !verdict.is_pass());
    for (gate, verdict) in [
        (Gate::Kl, phase3::kl(&bench, &prompts).map(|f| f.verdict)),
        (Gate::Agreement, phase3::agreement(&bench, &prompts)),
        (Gate::Noise, phase3::noise(&bench, &prompt).map(|f| f.verdict)),
        (Gate::Kv, kv_rows::judge(&bench, &prompts).map(|f| f.verdict)),
    ] {
        if stopped(verdict) {
            return Ok((true, Some(gate.name())));
        }
    }
    // The dearest last: a prefill for every step.
    let walked = decode::over(&bench, WALK).map(|f| f.verdict);
    Ok(if stopped(walked) { (true, Some(Gate::Decode.name())) } else { (false, None) })
}
