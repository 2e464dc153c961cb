//! Every kernel and shape that a model's prefill and decode launch, from the plans that the runner executes.

use crate::error::Result;
use crate::kernel::Kernel;
use crate::model::ModelConfig;
use crate::plan::{self, PlanOptions};

/// One kernel at one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    pub kernel: Kernel,
    /// Launches in one prefill.
    pub prefill: usize,
    /// Launches in one decode step.
    pub decode: usize,
    /// The first call site.
    pub step: String,
}

/// What a model needs at this prefill length, in the order of its steps; prefill before decode.
///
/// Errors: from the plans.
pub fn needs(config: &ModelConfig, seq_len: usize, options: &PlanOptions) -> Result<Vec<Need>> {
    let mut needs: Vec<Need> = Vec::new();
    for plan in [plan::prefill(config, seq_len, options)?, plan::decode(config, options)?] {
        for (_, launch) in plan.launches() {
            let at = needs.iter().position(|n| n.kernel == launch.kernel).unwrap_or_else(|| {
                let (kernel, step) = (launch.kernel.clone(), launch.name.clone());
                needs.push(Need { kernel, prefill: 0, decode: 0, step });
                needs.len() - 1
            });
            match plan.stage {
                plan::Stage::Prefill { .. } => needs[at].prefill += 1,
                plan::Stage::Decode => needs[at].decode += 1,
            }
        }
    }
    Ok(needs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::Outline;

    /// Nothing the runner launches is left out, and nothing is counted twice.
    #[test]
    fn needs_are_the_plans_launches() {
        for outline in Outline::all().unwrap() {
            let options = PlanOptions::default();
            let found = needs(&outline.config, 256, &options).unwrap();
            let prefill = plan::prefill(&outline.config, 256, &options).unwrap().launches().count();
            let decode = plan::decode(&outline.config, &options).unwrap().launches().count();
            let counted = (found.iter().map(|n| n.prefill).sum(), found.iter().map(|n| n.decode).sum());
            assert_eq!(counted, (prefill, decode), "{}", outline.name);
            // The head's may be a projection's shape, too.
            let (vocab, hidden) = (outline.config.vocab_size, outline.config.hidden_size);
            let head = found.iter().find(|n| n.kernel == Kernel::Gemv { m: vocab, k: hidden }).unwrap();
            assert!(head.prefill == 1 && head.decode >= 1, "{}", outline.name);
            let layers = outline.config.num_hidden_layers;
            assert!(found.iter().filter(|n| n.step.starts_with("l00")).all(|n| n.prefill + n.decode >= layers));
        }
    }
}
