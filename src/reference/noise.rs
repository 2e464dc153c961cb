//! The noise floor: how far HF's bf16 is from HF's own f32, by the judge's definitions. Computed from the tensors; what the
//! metadata says of it must agree, for every limit is a factor on it.

use super::capture::{Capture, Nll};
use super::prompt::PromptCapture;
use crate::check::Summary;
use crate::check::logits::Kl;
use crate::check::ulp::bf16_ulp;
use crate::error::{Error, Result};

/// How far the metadata's figures may be from the tensors', relatively.
const SLACK: f64 = 0.01;

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

impl Capture {
    /// KL(HF f32 || HF bf16) over all steps of all prompts.
    ///
    /// Errors: those of reading; [`Error::Capture`] where the metadata has other figures: the capture is damaged.
    pub fn kl_floor(&self) -> Result<Summary> {
        if let Some(known) = self.known_floor().get() {
            return Ok(*known);
        }
        let mut steps = vec![];
        for prompt in self.prompts() {
            steps.extend(prompt_floor(&self.prompt(&prompt.id)?)?.steps);
        }
        let found = Summary::of(&steps);
        if let Some(declared) = self.declared_floor() {
            let same = |found: f64, declared: f64| (found - declared).abs() <= SLACK * declared.abs();
            if !(same(found.median, declared.median) && same(found.p95, declared.p95)) {
                let (median, p95) = (found.median, found.p95);
                let found = format!("KL median {median:.3e} and p95 {p95:.3e} of HF bf16 from HF f32 by its tensors");
                let why = format!("{found}, {:.3e} and {:.3e} by its metadata (noise)", declared.median, declared.p95);
                return Err(Error::Capture { path: self.path().to_owned(), why });
            }
        }
        Ok(*self.known_floor().get_or_init(|| found))
    }
}

impl Capture {
    /// What HF f32's costliest choice costs by HF bf16's logits, over all steps of all prompts.
    ///
    /// Units: bf16 ULPs of HF bf16's highest logit.
    ///
    /// Errors: those of reading.
    pub fn regret_floor(&self) -> Result<f64> {
        if let Some(known) = self.known_regret().get() {
            return Ok(*known);
        }
        let mut worst = 0f64;
        for prompt in self.prompts() {
            let prompt = self.prompt(&prompt.id)?;
            for (&top, &f32s) in prompt.bf16.logits.column(0).iter().zip(prompt.bf16_at_f32.column(0)) {
                let top = f64::from(top);
                worst = worst.max((top - f64::from(f32s)) / bf16_ulp(top));
            }
        }
        Ok(*self.known_regret().get_or_init(|| worst))
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
