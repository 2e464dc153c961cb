//! Phase 3's question about a held text: is its perplexity HF's?
//!
//! A prefill of the first tokens, then teacher-forced decode: production's own path over both halves.

use ndarray::{Array1, s};

use super::{Bench, Finding, limits};
use crate::check::logits::log_sum_exp;
use crate::check::tolerance::at_least;
use crate::check::{Extent, Verdict};
use crate::error::Result;
use crate::runner::{TapRequest, npu};
use crate::tensor;

/// Tokens of the prefill.
const PREFILL: usize = 96;

/// Tokens that must be predicted.
const MIN_TOKENS: u64 = 128;

/// Tokens of the captured text: what the KV cache must hold.
const CAPTURED: usize = 512;

/// Perplexities over the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Perplexity {
    pub device: f64,
    pub hf_bf16: f64,
    pub tokens: usize,
}

/// Over at most `tokens` of the captured held text.
///
/// Errors: those of the runner and the capture.
pub fn measure(bench: &Bench, tokens: usize) -> Result<Perplexity> {
    let nll = bench.subject().capture()?.nll()?;
    let end = nll.ids.len().min(PREFILL.saturating_add(tokens)).min(bench.capacity());
    let (prompt, rest) = nll.ids[..end].split_at(PREFILL.min(end - 1));
    let prompt = bench.altered_prompt(prompt);
    let steps = rest.len();
    let record = bench.with_runner(|runner| runner.record(&prompt, rest, steps, &TapRequest::default()))?;
    let logits = tensor::to_f32(record.logits.view());
    let own: Array1<f64> =
        logits.outer_iter().zip(rest).map(|(row, &id)| log_sum_exp(row) - f64::from(row[id as usize])).collect();
    // nll[i] is that of token i + 1.
    let hf = nll.bf16.slice(s![end - steps - 1..end - 1]);
    let mean = |sum: f64| (sum / steps.max(1) as f64).exp();
    Ok(Perplexity { device: mean(own.sum()), hf_bf16: mean(hf.iter().map(|&x| f64::from(x)).sum()), tokens: own.len() })
}

/// Judges it: HF's over the device's at least what the class's limit leaves.
///
/// Errors: as [`measure`].
pub fn judge(bench: &Bench, tokens: usize) -> Result<Finding> {
    let Perplexity { device, hf_bf16, tokens } = measure(bench, tokens)?;
    let share = hf_bf16 / device;
    let mut failures = vec![];
    let least = 1.0 - limits::required(bench, limits::Gate::PerplexityLoss)?;
    if !at_least(share, least) {
        let (share, least) = (100.0 * share, 100.0 * least);
        failures.push(format!("perplexity {device:.3}, HF bf16 {hf_bf16:.3}: {share:.2} %, at least {least:.1} %"));
    }
    let extent = Extent::new().require("tokens", MIN_TOKENS).compare("tokens", tokens as u64);
    Ok(Finding {
        verdict: Verdict::judge(failures, extent),
        numbers: vec![("perplexity", device), ("hf_over_own", share)],
    })
}

/// Positions that it needs.
pub(super) fn positions(max_positions: usize) -> usize {
    CAPTURED.min(max_positions)
}

/// The bucket of its prefill.
pub(super) fn bucket(max_positions: usize) -> usize {
    npu::bucket(PREFILL, max_positions)
}
