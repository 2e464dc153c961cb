//! Whether a capture can be a truth at all: no NaN, nothing flat, and its parts agree with each other.

use super::capture::Capture;
use super::prompt::{PromptCapture, Top};
use super::tensors::Tensors;
use crate::error::{Error, Result};

/// Slack of a log-sum-exp that is stored in f32.
const LSE_SLACK: f64 = 1e-4;

impl Capture {
    /// Scans every value: none is NaN or infinite; per prompt, top logits descend (ties by id) and are not all equal,
    /// the chosen ids are the top ids, no log-sum-exp is below what its own logits add up to, and bf16's logits at the
    /// f32 model's ids are those it has in its own list. The noise floor is what the metadata says.
    ///
    /// Errors: [`Error::Capture`] naming the tensor and the place.
    pub fn sound(&self) -> Result<()> {
        let refused = |why: String| Error::Capture { path: self.path().to_owned(), why };
        finite(self.tensors()).map_err(refused)?;
        for prompt in self.prompts() {
            self.sound_prompt(&prompt.id)?;
        }
        self.kl_floor().map(drop)
    }

    /// [`Capture::prompt`] of a prompt that is [`Capture::sound`].
    ///
    /// Errors: those of [`Capture::prompt`]; [`Error::Capture`].
    pub fn sound_prompt(&self, id: &str) -> Result<PromptCapture> {
        let prompt = self.prompt(id)?;
        let refused = |why: String| Error::Capture { path: self.path().to_owned(), why: format!("{id}: {why}") };
        sound_prompt(&prompt).map_err(refused)?;
        Ok(prompt)
    }
}

fn finite(tensors: &Tensors) -> std::result::Result<(), String> {
    for name in tensors.names() {
        let Ok(values) = tensors.floats(&name) else { continue };
        if let Some(at) = values.iter().position(|x| !x.is_finite()) {
            return Err(format!("tensor {name}: {} at element {at}", values[at]));
        }
    }
    Ok(())
}

fn sound_prompt(prompt: &PromptCapture) -> std::result::Result<(), String> {
    ordered("bf16", &prompt.bf16)?;
    ordered("f32", &prompt.f32)?;
    if let Some(step) = (0..prompt.chosen.len()).find(|&i| prompt.chosen[i] != prompt.bf16.ids[[i, 0]]) {
        return Err(format!("step {step}: chosen {}, top id {}", prompt.chosen[step], prompt.bf16.ids[[step, 0]]));
    }
    let sides = [
        ("bf16", &prompt.bf16.logits, &prompt.bf16_lse),
        ("bf16 at f32", &prompt.bf16_at_f32, &prompt.bf16_lse),
        ("bf16_prefill", &prompt.bf16_prefill_at_f32, &prompt.bf16_prefill_lse),
        ("f32", &prompt.f32.logits, &prompt.f32_lse),
    ];
    for (side, logits, lse) in sides {
        for (step, (row, &lse)) in logits.outer_iter().zip(lse).enumerate() {
            let part = crate::check::logits::log_sum_exp(row);
            if part > f64::from(lse) + LSE_SLACK {
                return Err(format!("{side}: step {step}: log-sum-exp {lse} below {part:.6}, that of its top logits"));
            }
        }
    }
    consistent(prompt)
}

fn ordered(side: &str, top: &Top) -> std::result::Result<(), String> {
    for (step, (ids, logits)) in top.ids.outer_iter().zip(top.logits.outer_iter()).enumerate() {
        let falls = |i: usize| logits[i] > logits[i + 1] || (logits[i] == logits[i + 1] && ids[i] < ids[i + 1]);
        if !(0..ids.len() - 1).all(falls) {
            return Err(format!("{side}.top_logits: step {step} does not descend"));
        }
        if ids.len() > 1 && logits[0] == logits[ids.len() - 1] {
            return Err(format!("{side}.top_logits: step {step} is flat"));
        }
    }
    Ok(())
}

fn consistent(prompt: &PromptCapture) -> std::result::Result<(), String> {
    for ((step, k), id) in prompt.f32.ids.indexed_iter() {
        let own = prompt.bf16.ids.row(step).iter().position(|x| x == id);
        if own.is_some_and(|own| prompt.bf16.logits[[step, own]] != prompt.bf16_at_f32[[step, k]]) {
            return Err(format!("step {step}: bf16.at_f32 and bf16.top_logits differ for id {id}"));
        }
    }
    Ok(())
}
