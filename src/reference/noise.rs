//! The noise floor: how far HF's bf16 is from HF's own f32, by the judge's definitions. The metadata's figures are for
//! people; these are computed from the tensors.

use super::capture::{Capture, Nll};
use super::prompt::PromptCapture;
use crate::check::logits::Kl;
use crate::error::Result;

/// The floor of a capture, over all prompts and steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Floor {
    /// KL(HF f32 || HF bf16 with KV cache).
    pub kl: Kl,
    /// KL(HF f32 || HF bf16, one prefill): the same floor from another order of summation.
    pub kl_prefill: Kl,
    /// Perplexity of the held-out text.
    pub perplexity_bf16: f64,
    pub perplexity_f32: f64,
}

impl Floor {
    /// Errors: those of reading the capture.
    pub fn of(capture: &Capture) -> Result<Floor> {
        let (mut cached, mut prefill) = (Vec::new(), Vec::new());
        for prompt in capture.prompts() {
            let prompt = capture.prompt(&prompt.id)?;
            cached.extend(prompt_floor(&prompt)?.steps);
            prefill.extend(Kl::measure(&prompt.truth(), &prompt.bf16_prefill_at_truth())?.steps);
        }
        let Nll { bf16, f32, .. } = capture.nll()?;
        Ok(Floor {
            kl: Kl::of(cached),
            kl_prefill: Kl::of(prefill),
            perplexity_bf16: perplexity(bf16.as_slice().unwrap_or_default()),
            perplexity_f32: perplexity(f32.as_slice().unwrap_or_default()),
        })
    }
}

/// KL(HF f32 || HF bf16) of one prompt.
///
/// Shapes: `[N]`. Units: nats.
pub fn prompt_floor(prompt: &PromptCapture) -> Result<Kl> {
    Kl::measure(&prompt.truth(), &prompt.bf16_at_truth())
}

/// exp(mean nll); NaN without tokens.
///
/// Shapes: `[T - 1] -> scalar`. Units: nats in.
pub fn perplexity(nll: &[f32]) -> f64 {
    (nll.iter().map(|&x| f64::from(x)).sum::<f64>() / nll.len() as f64).exp()
}
