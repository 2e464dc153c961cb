//! Workarounds shown equal to the plain plan: each is a plan option, run through the gates of phases 2 and 3.
//!
//! On the `ieee` datapath phantom heads and CPU fallback must not move a bit; a bias behind RoPE is another order of
//! rounding and has to pass every gate by itself.

use super::subject::Outline;
use super::{Bench, Case, Finding, Subject, phase2, phase3};
use crate::check::{Extent, Verdict};
use crate::device::Arithmetic;
use crate::error::Result;
use crate::model::ModelConfig;
use crate::plan::{BiasLowering, PlanOptions};

/// A workaround that a model's plan can do with or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewrite {
    /// Phantom query heads inside each KV group, up to the next power of two.
    PadGqa,
    /// Attention of the prefill on the CPU.
    HostAttention,
    /// The bias of q, k and v on the host, behind RoPE.
    BiasHost,
}

impl Rewrite {
    pub const ALL: [Rewrite; 3] = [Rewrite::PadGqa, Rewrite::HostAttention, Rewrite::BiasHost];

    /// As it stands in test names.
    pub fn name(self) -> &'static str {
        match self {
            Rewrite::PadGqa => "pad_gqa",
            Rewrite::HostAttention => "host_attention",
            Rewrite::BiasHost => "bias_host",
        }
    }

    /// The plan with it; none where the model has nothing to rewrite.
    pub fn options(self, config: &ModelConfig) -> Option<PlanOptions> {
        let plain = PlanOptions::default();
        match self {
            Rewrite::PadGqa => Some(PlanOptions { pad_gqa: Some((config.group() + 1).next_power_of_two()), ..plain }),
            Rewrite::HostAttention => Some(PlanOptions { host: vec!["attention".into()], ..plain }),
            Rewrite::BiasHost => config.qkv_bias.then_some(PlanOptions { bias: BiasLowering::Host, ..plain }),
        }
    }

    /// Whether nothing but the placement or the shape of the work changes, and so no bit of the result.
    fn is_exact(self) -> bool {
        self != Rewrite::BiasHost
    }
}

/// One case per workaround that applies.
pub fn cases(outline: &Outline) -> Vec<Case> {
    let model = &outline.name;
    let applies = Rewrite::ALL.into_iter().filter(|rewrite| rewrite.options(&outline.config).is_some());
    applies
        .map(|rewrite| {
            let (m, lens) = (model.clone(), outline.lens.clone());
            let prompts = if rewrite.is_exact() { lens.clone() } else { outline.prompts.clone() };
            let name = format!("rewrite::{model}::{}", rewrite.name());
            let case = Case::on_device(name, model, move |device| case(&m, device, rewrite, &prompts, &lens));
            Case { baseline: false, ..case }
        })
        .collect()
}

fn case(model: &str, device: &str, rewrite: Rewrite, prompts: &[String], lens: &[String]) -> Result<Finding> {
    let subject = Subject::shared(model)?;
    let options = rewrite.options(&subject.config).unwrap_or_default();
    let bench = Bench::new(subject, device, prompts, options)?;
    let mut verdict = gates(&bench, prompts, lens)?;
    if rewrite.is_exact() && bench.arithmetic() == Arithmetic::Ieee {
        verdict = verdict.and(same_bits(&bench, &*Bench::shared(model, device)?, prompts)?);
    }
    Ok(Finding::of(verdict))
}

/// The gates of phase 2 on every prompt with layer outputs and of phase 3 on every prompt.
///
/// Errors: those of the runs.
pub fn gates(bench: &Bench, prompts: &[String], lens: &[String]) -> Result<Verdict> {
    let mut verdict = phase3::kl(bench, prompts)?.verdict;
    for id in prompts {
        verdict = verdict.and(phase3::prompt(bench, id)?.verdict.clone());
    }
    for id in lens {
        verdict = verdict.and(phase2::block(bench, id)?.verdict).and(phase3::noise(bench, id)?.verdict);
    }
    Ok(verdict)
}

/// Logits of every step, bit for bit those of the plain plan.
fn same_bits(bench: &Bench, plain: &Bench, prompts: &[String]) -> Result<Verdict> {
    let (mut failures, mut steps) = (vec![], 0);
    for id in prompts {
        let (ours, theirs) = (bench.record(id)?, plain.record(id)?);
        for (step, (a, b)) in ours.logits.rows().into_iter().zip(theirs.logits.rows()).enumerate() {
            steps += 1;
            if a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits()) {
                failures.push(format!("{id}: step {step}: other logits than the plain plan's"));
                break;
            }
        }
    }
    let required = (prompts.len() * Subject::STEPS) as u64;
    Ok(Verdict::judge(failures, Extent::new().require("equal steps", required).compare("equal steps", steps)))
}
