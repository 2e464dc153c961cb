//! Phase 3: is the whole model right, decode included?
//!
//! Binding: upstream's token-set gate per prompt over all 32 steps, no NaN anywhere, KL against HF f32 within a factor
//! of HF bf16's own, and every layer's distance to HF f32 within a factor of HF bf16's. Layer cases keep baselines.

use std::sync::Arc;

use ndarray::{ArrayView2, Axis, s};

use super::limits::Gate;
use super::phase2::missing;
use super::subject::Outline;
use super::{Bench, Case, Finding, added, decode, kv_rows, limits, perplexity, positions, rewrite};
use crate::check::agreement::Agreement;
use crate::check::layers::{self, Layer};
use crate::check::logits::{AtTruth, Kl, KlFactors};
use crate::check::token_set::{STEPS, TokenSet};
use crate::check::tolerance::at_most;
use crate::check::{Extent, Metrics, Summary, Verdict};
use crate::device::Counters;
use crate::error::Result;
use crate::reference::Lens;
use crate::runner::StepTiming;
use crate::tensor::{self, F32Matrix};

/// The name of its progress document.
pub const DOCUMENT: &str = "phase3_full";

/// Every case of phase 3 for one model.
pub fn cases(outline: &Outline) -> Vec<Case> {
    let model = &outline.name;
    let mut cases = vec![];
    for prompt in &outline.prompts {
        let (m, p) = (model.clone(), prompt.clone());
        cases.push(Case::on_device(format!("token_set::{model}::{prompt}"), model, move |device| {
            token_set(&*Bench::shared(&m, device)?, &p)
        }));
    }
    for prompt in &outline.lens {
        for layer in 0..outline.layers {
            let (m, p) = (model.clone(), prompt.clone());
            cases.push(Case::on_device(format!("layer::{model}::{prompt}::l{layer:02}"), model, move |device| {
                layer_case(&*Bench::shared(&m, device)?, &p, layer)
            }));
        }
        let (m, p) = (model.clone(), prompt.clone());
        cases.push(Case::on_device(format!("noise::{model}::{prompt}"), model, move |device| {
            noise(&*Bench::shared(&m, device)?, &p)
        }));
    }
    let (m, prompts) = (model.clone(), outline.prompts.clone());
    cases.push(Case::on_device(format!("kl::{model}"), model, move |device| {
        let bench = Bench::shared(&m, device)?;
        kl(&bench, &prompts)
    }));
    // No baselines below: each limit is HF's own noise, and the extremes they look at differ between instruction sets.
    let mut gate = |name: String, run: fn(&Bench, &Outline) -> Result<Verdict>| {
        let outline = outline.clone();
        let case = Case::on_device(name, model, move |device| {
            Ok(Finding::of(run(&*Bench::shared(&outline.name, device)?, &outline)?))
        });
        cases.push(Case { baseline: false, ..case });
    };
    gate(format!("agreement::{model}"), |bench, outline| agreement(bench, &outline.prompts));
    gate(format!("added::{model}"), |bench, _| Ok(added::judge(bench, &added::prompts(bench)?)?.verdict));
    gate(format!("kv_rows::{model}"), |bench, outline| Ok(kv_rows::judge(bench, &outline.lens)?.verdict));
    gate(format!("positions::{model}"), |bench, outline| Ok(positions::judge(bench, &outline.lens)?.verdict));
    gate(format!("perplexity::{model}"), |bench, _| Ok(perplexity::judge(bench, usize::MAX)?.verdict));
    gate(format!("decode::{model}"), |bench, _| Ok(decode::case(bench)?.verdict));
    cases.extend(rewrite::cases(outline));
    cases
}

#[cfg(test)]
mod tests;

/// Prompts that are many: the smallest of the sets that the pool's limits were measured on.
const POOL: usize = 8;

/// One prompt as upstream judges it, and what upstream does not look at.
#[derive(Debug, Clone)]
pub struct PromptFinding {
    pub token_set: TokenSet,
    pub agreement: Agreement,
    pub kl: Kl,
    pub floor: Kl,
    /// The device's logits at HF f32's top ids against HF f32's, over all steps.
    pub logits: Metrics,
    /// What the run took and did.
    pub timing: StepTiming,
    pub counters: Counters,
    pub decode_steps: usize,
    pub verdict: Verdict,
}

/// Compares all steps of one prompt.
///
/// Errors: those of the run and of the comparison.
pub fn prompt(bench: &Bench, id: &str) -> Result<Arc<PromptFinding>> {
    bench.finding(id, || look(bench, id))
}

fn look(bench: &Bench, id: &str) -> Result<PromptFinding> {
    let capture = bench.subject().capture()?.sound_prompt(id)?;
    let record = bench.record(id)?;
    let logits = tensor::to_f32(record.logits.view());
    let token_set = TokenSet::compare(&capture.chosen, capture.bf16.ids.view(), logits.view())?;
    let agreement = Agreement::compare(&capture.hf_top(), logits.view())?;
    let truth = capture.truth();
    let at_truth = AtTruth::gather(truth.ids, logits.view())?;
    let kl = Kl::measure(&truth, &at_truth)?;
    let steps = at_truth.logits.nrows();
    let logits = Metrics::measure(at_truth.logits.view(), truth.logits.slice(s![..steps, ..]))?;
    let floor = Kl::measure(&truth, &capture.bf16_at_truth())?;
    let verdict = token_set.judge();
    let (timing, counters, decode_steps) = (record.timing.clone(), record.counters, record.fed.len());
    Ok(PromptFinding { token_set, agreement, kl, floor, logits, timing, counters, decode_steps, verdict })
}

/// Each side's choice among the other's five at every step of these prompts, ties included, and no choice that costs more
/// than the class's factor allows.
///
/// Errors: those of the runs.
pub fn agreement(bench: &Bench, prompts: &[String]) -> Result<Verdict> {
    let of = |id: &String| Ok(prompt(bench, id)?.agreement.judge(STEPS));
    let verdict = Verdict::all(prompts.iter().map(of).collect::<Result<Vec<_>>>()?);
    let (worst, own) = regret(bench, prompts)?;
    let limit = limits::required(bench, Gate::Regret)? * own;
    let far = (!at_most(worst, limit)).then(|| {
        format!("a choice costs {worst:.1} ulp by HF's logits, at most {limit:.1}, a factor on what HF f32's own choices cost")
    });
    let steps = prompts.len() as u64;
    let extent = Extent::new().require("prompts", steps).compare("prompts", steps);
    Ok(verdict.and(Verdict::judge(far.into_iter().collect(), extent)))
}

/// What the costliest choice of the device costs by HF bf16's logits, and what HF f32's costliest does, but at least one.
///
/// Units: bf16 ULPs of HF's highest logit.
///
/// Errors: those of the runs.
pub fn regret(bench: &Bench, prompts: &[String]) -> Result<(f64, f64)> {
    let mut worst = 0f64;
    for id in prompts {
        let found = prompt(bench, id)?;
        let steps = &found.agreement.steps;
        worst = steps.iter().map(|step| step.regret_ulp).fold(worst, f64::max);
    }
    // Of every captured prompt: what a model's ties cost is not known from a few.
    Ok((worst, bench.subject().capture()?.regret_floor()?.max(1.0)))
}

fn token_set(bench: &Bench, id: &str) -> Result<Finding> {
    let found = prompt(bench, id)?;
    // Choices at near-ties flip with the last bit of a sum, and one such step moves a prompt's KL; the logits hardly move.
    let logits = &found.logits;
    let numbers = vec![("rel_l2", logits.rel_l2), ("mean_abs", logits.mean_abs)];
    Ok(Finding { verdict: found.verdict.clone(), numbers })
}

/// The layers of one lens prompt; the last one after the final norm, on both sides.
///
/// Errors: those of the run; [`crate::error::Error::Capture`] when the prompt has no lens.
pub fn lens(bench: &Bench, id: &str) -> Result<Vec<Layer>> {
    let layers = bench.subject().config.num_hidden_layers;
    (0..layers).map(|layer| lens_layer(bench, id, layer)).collect()
}

/// One layer's rows: the device's and both references'.
struct Rows<'a> {
    device: F32Matrix,
    bf16: ArrayView2<'a, f32>,
    f32: ArrayView2<'a, f32>,
}

fn rows<'a>(bench: &Bench, id: &str, lens: &'a Lens, layer: usize) -> Result<Rows<'a>> {
    let record = bench.record(id)?;
    let last = layer + 1 == bench.subject().config.num_hidden_layers;
    let tap = if last { "final_norm".to_owned() } else { format!("l{layer:02}.output") };
    let kept = record.taps.get(&tap).ok_or_else(|| missing(&tap))?;
    let (bf16, f32) = match last {
        true => (lens.final_norm_bf16.view(), lens.final_norm_f32.view()),
        false => (lens.layers_bf16.index_axis(Axis(0), layer), lens.layers_f32.index_axis(Axis(0), layer)),
    };
    Ok(Rows { device: tensor::to_f32(kept.view()), bf16, f32 })
}

fn lens_layer(bench: &Bench, id: &str, layer: usize) -> Result<Layer> {
    let lens = bench.subject().lens(id)?;
    let Rows { device, bf16, f32 } = rows(bench, id, &lens, layer)?;
    Layer::look(layer, &lens.positions, device.view(), bf16, f32)
}

/// Baseline figures are means and medians: extremes of single positions differ between instruction sets by their nature,
/// and so does max_abs against bf16, which jumps by whole bf16 steps of the largest channel.
fn layer_case(bench: &Bench, id: &str, layer: usize) -> Result<Finding> {
    let lens = bench.subject().lens(id)?;
    let Rows { device, bf16, f32 } = rows(bench, id, &lens, layer)?;
    let found = Layer::look(layer, &lens.positions, device.view(), bf16, f32)?;
    let numbers = vec![
        ("cosine_median", found.vs_bf16.positions.median),
        ("max_abs_typical", Metrics::typical_max_abs(device.view(), f32)?),
        ("mean_rel_l1", found.vs_bf16.body.mean_rel_l1),
        ("rel_l2_over_hf", found.noise_ratio),
    ];
    Ok(Finding { verdict: layers::judge(&[found], 1, lens.positions.len()), numbers })
}

/// Every layer must be no further from HF f32 than HF bf16 is, times the class's factor.
///
/// Errors: as [`lens`].
pub fn noise(bench: &Bench, id: &str) -> Result<Finding> {
    noise_of(bench, &lens(bench, id)?)
}

/// [`noise`] of the layers that [`lens`] found.
///
/// Errors: as [`noise_limit`].
pub fn noise_of(bench: &Bench, found: &[Layer]) -> Result<Finding> {
    let limit = noise_limit(bench)?;
    let failures: Vec<String> = found
        .iter()
        .filter(|l| limit.is_some_and(|limit| !at_most(l.noise_ratio, limit)))
        .map(|l| {
            let limit = limit.unwrap_or(f64::NAN);
            format!("layer {}: {:.3} times HF bf16's distance to HF f32, at most {limit}", l.layer, l.noise_ratio)
        })
        .collect();
    let layers = bench.subject().config.num_hidden_layers as u64;
    let extent = Extent::new().require("layers", layers).compare("layers", found.len() as u64);
    let worst = found.iter().map(|l| l.noise_ratio).fold(f64::NEG_INFINITY, f64::max);
    Ok(Finding { verdict: Verdict::judge(failures, extent), numbers: vec![("rel_l2_over_hf_max", worst)] })
}

fn kl_factors(bench: &Bench) -> Result<KlFactors> {
    Ok(KlFactors { p95: limit(bench, Gate::KlP95)?, ..KlFactors::median(limits::required(bench, Gate::KlMedian)?) })
}

fn limit(bench: &Bench, gate: Gate) -> Result<Option<f64>> {
    limits::find(gate, bench.arithmetic(), bench.subject().config.num_hidden_layers)
}

/// How many times HF bf16's own distance to HF f32 a layer's may be, where the class has a limit.
///
/// Errors: as [`limits::find`].
pub fn noise_limit(bench: &Bench) -> Result<Option<f64>> {
    limit(bench, Gate::Noise)
}

/// KL of the device and of HF bf16, over all steps of all `prompts`.
///
/// Errors: those of the runs.
pub fn kl_and_floor(bench: &Bench, prompts: &[String]) -> Result<(Kl, Kl)> {
    let (mut steps, mut floor) = (vec![], vec![]);
    for id in prompts {
        let found = prompt(bench, id)?;
        steps.extend_from_slice(&found.kl.steps);
        floor.extend_from_slice(&found.floor.steps);
    }
    Ok((Kl::of(steps), Kl::of(floor)))
}

/// HF bf16's own figures of a few prompts, or of the whole capture where that has more: where HF's own two hardly differ, one
/// rounding more is many times as much.
fn at_least_the_whole(bench: &Bench, own: Summary) -> Result<Summary> {
    let whole = bench.subject().capture()?.kl_floor()?;
    Ok(Summary { median: own.median.max(whole.median), p95: own.p95.max(whole.p95), ..own })
}

/// Each prompt's own median KL over HF bf16's, that of the prompt or of the whole capture, whichever is larger.
///
/// Errors: those of the runs and of the capture.
pub fn kl_by_prompt(bench: &Bench, prompts: &[String]) -> Result<Vec<f64>> {
    let over = |id: &String| {
        let found = prompt(bench, id)?;
        Ok(found.kl.summary.median / at_least_the_whole(bench, found.floor.summary)?.median)
    };
    prompts.iter().map(over).collect()
}

/// KL over all steps of all `prompts` against HF bf16's own (of few prompts, or of the whole capture, whichever is larger), and of
/// each prompt alone: in a pool of many, one that is wrong from end to end does not move the median.
///
/// Errors: those of the runs and of the capture.
pub fn kl(bench: &Bench, prompts: &[String]) -> Result<Finding> {
    let (kl, Kl { summary: mut floor, .. }) = kl_and_floor(bench, prompts)?;
    let alone = limits::required(bench, Gate::KlPrompt)?;
    let mut factors = kl_factors(bench)?;
    if prompts.len() < POOL {
        // They scatter like one, and are judged like one.
        floor = at_least_the_whole(bench, floor)?;
        factors.median = alone;
    }
    let by_prompt = kl_by_prompt(bench, prompts)?;
    let failures = prompts.iter().zip(&by_prompt).filter(|(_, over)| !at_most(**over, alone));
    let failures = failures.map(|(id, over)| format!("{id}: KL median {over:.2} times HF's own, at most {alone}"));
    let extent =
        Extent::new().require("KL prompts", prompts.len() as u64).compare("KL prompts", by_prompt.len() as u64);
    let verdict = kl.judge(&floor, factors, prompts.len() * STEPS);
    let verdict = verdict.and(Verdict::judge(failures.collect(), extent));
    let numbers = vec![("kl_median", kl.summary.median), ("kl_p95", kl.summary.p95), ("kl_floor_median", floor.median)];
    Ok(Finding { verdict, numbers })
}
