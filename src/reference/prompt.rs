//! What HF computed for one prompt, as the judge wants it. bf16 values are widened to f32 exactly.

use ndarray::{Array1, Array2};

use super::tensors::Tensors;
use crate::check::agreement::HfTop;
use crate::check::logits::{AtTruth, Truth};
use crate::error::Result;

/// A model's own top ids per step, highest first, ties to the smaller id, and their logits.
///
/// Shapes: `[N, K]` both.
#[derive(Debug, Clone, PartialEq)]
pub struct Top {
    pub ids: Array2<u32>,
    pub logits: Array2<f32>,
}

/// One prompt's capture. `chosen` are the greedy ids of HF bf16 and the teacher ids of every logit here.
///
/// Shapes: `ids [P]`; `chosen`, `*_lse` `[N]`; `*_at_f32` `[N, K]`; `rel_l2 [N, 2]`; N = 32, K = 64 or the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptCapture {
    pub ids: Vec<u32>,
    pub chosen: Vec<u32>,
    /// HF bf16 with KV cache.
    pub bf16: Top,
    pub bf16_lse: Array1<f32>,
    /// HF f32, one prefill.
    pub f32: Top,
    pub f32_lse: Array1<f32>,
    /// HF bf16's logits at the f32 model's top ids.
    pub bf16_at_f32: Array2<f32>,
    /// The same from one bf16 prefill.
    pub bf16_prefill_at_f32: Array2<f32>,
    pub bf16_prefill_lse: Array1<f32>,
    /// Whole-vocabulary relative L2 per step: ‖bf16 - f32‖ / ‖f32‖ and ‖bf16_prefill - bf16‖ / ‖bf16‖.
    pub rel_l2: Array2<f32>,
}

impl PromptCapture {
    pub(super) fn read(tensors: &Tensors, id: &str) -> Result<PromptCapture> {
        let name = |what: &str| format!("{id}.{what}");
        let top = |side: &str| {
            let ids = tensors.id_matrix(&name(&format!("{side}.top_ids")))?;
            Ok(Top { ids, logits: tensors.matrix(&name(&format!("{side}.top_logits")))? })
        };
        Ok(PromptCapture {
            ids: tensors.ids(&name("ids"))?,
            chosen: tensors.ids(&name("chosen"))?,
            bf16: top("bf16")?,
            bf16_lse: tensors.vector(&name("bf16.lse"))?,
            f32: top("f32")?,
            f32_lse: tensors.vector(&name("f32.lse"))?,
            bf16_at_f32: tensors.matrix(&name("bf16.at_f32"))?,
            bf16_prefill_at_f32: tensors.matrix(&name("bf16_prefill.at_f32"))?,
            bf16_prefill_lse: tensors.vector(&name("bf16_prefill.lse"))?,
            rel_l2: tensors.matrix(&name("rel_l2"))?,
        })
    }

    /// The first side of every KL.
    pub fn truth(&self) -> Truth<'_> {
        Truth { ids: self.f32.ids.view(), logits: self.f32.logits.view(), lse: self.f32_lse.view() }
    }

    /// HF bf16's choices, for agreement and regret.
    pub fn hf_top(&self) -> HfTop<'_> {
        HfTop { ids: self.bf16.ids.view(), logits: self.bf16.logits.view() }
    }

    /// HF bf16 as the second side of a KL: the noise floor.
    pub fn bf16_at_truth(&self) -> AtTruth {
        AtTruth { logits: self.bf16_at_f32.clone(), lse: self.bf16_lse.mapv(f64::from) }
    }

    /// HF bf16 from one prefill as the second side of a KL.
    pub fn bf16_prefill_at_truth(&self) -> AtTruth {
        AtTruth { logits: self.bf16_prefill_at_f32.clone(), lse: self.bf16_prefill_lse.mapv(f64::from) }
    }
}
