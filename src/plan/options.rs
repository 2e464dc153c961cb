//! What may be asked of a plan beside the model it is for: placements and workarounds.

use crate::error::{Error, Result};
use crate::model::ModelConfig;

/// Where a bias of q, k and v is added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BiasLowering {
    /// A launch of its own on the device, before RoPE.
    #[default]
    Device,
    /// On the host behind RoPE: `RoPE(q + b) = RoPE(q) + RoPE(b)`.
    Host,
}

/// Most query heads per KV head that padding may ask for, unless the model's own next power of two is more: every
/// phantom head costs as much as a real one.
const MAX_PADDED_GROUP: usize = 64;

/// Options of a plan. The default is the plain plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// What runs on the CPU instead: kernel ids (`gemm_bf16`), call sites (`q_proj`), single launches (`l07.q_proj`).
    pub host: Vec<String>,
    pub bias: BiasLowering,
    /// GQA-aware padding: query heads per KV head after phantom heads are added inside each group.
    pub pad_gqa: Option<usize>,
}

impl PlanOptions {
    /// What differs from the plain plan, for reports: option and value.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let host = (!self.host.is_empty()).then(|| ("host", self.host.join(", ")));
        let bias = (self.bias == BiasLowering::Host).then(|| ("bias", "host, behind RoPE".to_owned()));
        let pad = self.pad_gqa.map(|group| ("pad_gqa", format!("{group} query heads per KV head")));
        [host, bias, pad].into_iter().flatten().collect()
    }

    /// Query heads per KV head that the plan works with.
    ///
    /// Errors: [`Error::Usage`] for a padding that would drop heads, or add more than any tile could be after.
    pub fn group(&self, config: &ModelConfig) -> Result<usize> {
        let most = MAX_PADDED_GROUP.max((config.group() + 1).next_power_of_two());
        match self.pad_gqa {
            None => Ok(config.group()),
            Some(group) if (config.group()..=most).contains(&group) => Ok(group),
            Some(group) => Err(Error::Usage {
                what: "pad_gqa".into(),
                found: group.to_string(),
                expected: format!(
                    "at least {}, the model's query heads per KV head, and at most {most}",
                    config.group()
                ),
            }),
        }
    }
}
