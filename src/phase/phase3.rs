//! Phase 3: is the whole model right, decode included?
//!
//! Binding: upstream's token-set gate per prompt over all 32 steps, no NaN anywhere, KL against HF f32 within a factor
//! of HF bf16's own, and every layer's distance to HF f32 within a factor of HF bf16's. Layer cases keep baselines.

use ndarray::{ArrayView2, Axis, s};

use super::phase2::missing;
use super::subject::Outline;
use super::{Bench, Case, Finding, decode, rewrite};
use crate::check::agreement::Agreement;
use crate::check::layers::{self, Layer};
use crate::check::logits::{AtTruth, Kl, KlFactors};
use crate::check::token_set::{STEPS, TokenSet};
use crate::check::tolerance::at_most;
use crate::check::{Extent, Metrics, Verdict};
use crate::device::Arithmetic;
use crate::error::Result;
use crate::reference::Lens;
use crate::tensor::{self, F32Matrix};

/// The name of its progress document.
pub const DOCUMENT: &str = "phase3_full";

/// Median KL over all prompts and steps may be this many times HF bf16's own.
///
/// Source: SmolLM2-135M, faults injected into its f32 model: every one that a logit gate can see lies above 3x, HF's own
/// variants (eager against sdpa, one prefill against cached decode) below 2x. Other models were not measured.
pub const IEEE_KL: KlFactors = KlFactors::median(3.0);

/// The same for the NPU2's arithmetic, per layer: rounding toward minus infinity is a bias that every layer adds to.
///
/// Source: clean runs on emu_npu2 over all 25 prompts, times the floor per layer: tiny_llama 1.56, tiny_mistral 1.35,
/// tiny_qwen2 1.87, tiny_qwen3 1.61 (3 or 4 layers), smollm2_135m 1.15 (30 layers; 34.5 in all). Twice the largest of the
/// others clears each model. What hides below it is for phase 1, the layer lens or a run on ieee to see.
pub const NPU2_KL_PER_LAYER: f64 = 3.2;

/// Distance to HF f32 of any layer, over HF bf16's own distance.
///
/// Source: what rounding bf16 at kernel borders and f32 inside can add over HF's own rounding points.
pub const IEEE_NOISE_RATIO: f64 = 1.5;

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
    let m = model.clone();
    // No baseline: the limit is HF's own, and on the ieee datapath the distance is nothing at all.
    let decodes =
        Case::on_device(format!("decode::{model}"), model, move |device| decode::case(&*Bench::shared(&m, device)?));
    cases.push(Case { baseline: false, ..decodes });
    cases.extend(rewrite::cases(outline));
    cases
}

#[cfg(test)]
mod tests;

/// One prompt as upstream judges it, and what upstream does not look at.
#[derive(Debug, Clone)]
pub struct PromptFinding {
    pub token_set: TokenSet,
    pub agreement: Agreement,
    pub kl: Kl,
    pub floor: Kl,
    /// The device's logits at HF f32's top ids against HF f32's, over all steps.
    pub logits: Metrics,
    pub verdict: Verdict,
}

/// Compares all steps of one prompt.
///
/// Errors: those of the run and of the comparison.
pub fn prompt(bench: &Bench, id: &str) -> Result<PromptFinding> {
    let capture = bench.subject().capture()?.prompt(id)?;
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
    Ok(PromptFinding { token_set, agreement, kl, floor, logits, verdict })
}

/// Each side's choice among the other's five at every step of these prompts, ties included.
///
/// Errors: those of the runs.
pub fn agreement(bench: &Bench, prompts: &[String]) -> Result<Verdict> {
    let of = |id: &String| Ok(prompt(bench, id)?.agreement.judge(STEPS));
    Ok(Verdict::all(prompts.iter().map(of).collect::<Result<Vec<_>>>()?))
}

fn token_set(bench: &Bench, id: &str) -> Result<Finding> {
    let found = prompt(bench, id)?;
    // Choices at near-ties flip with the last bit of a sum, and one such step moves a prompt's KL; the logits hardly move.
    let logits = &found.logits;
    let numbers = vec![("rel_l2", logits.rel_l2), ("mean_abs", logits.mean_abs)];
    Ok(Finding { verdict: found.verdict, numbers })
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
    let found = lens(bench, id)?;
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

fn kl_factors(bench: &Bench) -> KlFactors {
    match arithmetic(bench) {
        Arithmetic::Ieee => IEEE_KL,
        Arithmetic::Npu2 => KlFactors::median(NPU2_KL_PER_LAYER * bench.subject().config.num_hidden_layers as f64),
    }
}

fn noise_limit(bench: &Bench) -> Result<Option<f64>> {
    Ok(match arithmetic(bench) {
        Arithmetic::Ieee => Some(IEEE_NOISE_RATIO),
        Arithmetic::Npu2 => None,
    })
}

/// The arithmetic class a device label stands for.
pub(super) fn arithmetic(bench: &Bench) -> Arithmetic {
    // The virtual NPU computes with emu's kernels.
    if matches!(bench.device(), "emu" | "vnpu") { Arithmetic::Ieee } else { Arithmetic::Npu2 }
}

/// KL over all steps of all `prompts` against HF bf16's own.
///
/// Errors: those of the runs.
pub fn kl(bench: &Bench, prompts: &[String]) -> Result<Finding> {
    let (mut steps, mut floor) = (vec![], vec![]);
    for id in prompts {
        let found = prompt(bench, id)?;
        steps.extend(found.kl.steps);
        floor.extend(found.floor.steps);
    }
    let (kl, floor) = (Kl::of(steps), Kl::of(floor));
    let verdict = kl.judge(&floor.summary, kl_factors(bench), prompts.len() * STEPS);
    let numbers =
        vec![("kl_median", kl.summary.median), ("kl_p95", kl.summary.p95), ("kl_floor_median", floor.summary.median)];
    Ok(Finding { verdict, numbers })
}
