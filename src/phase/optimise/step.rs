//! The optimisation steps of phases 4 and 5: what each changes, and what it promises.

use std::fmt;

use crate::device::Counters;
use crate::error::Result;
use crate::model::ModelConfig;
use crate::plan::{self, PlanOptions, Tuning};

/// The half of inference a phase makes faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Half {
    /// Phase 4.
    Prefill,
    /// Phase 5.
    Decode,
}

impl Half {
    pub fn phase(self) -> u8 {
        match self {
            Half::Prefill => 4,
            Half::Decode => 5,
        }
    }

    /// The name of its progress document.
    pub fn document(self) -> &'static str {
        match self {
            Half::Prefill => "phase4_prefill",
            Half::Decode => "phase5_decode",
        }
    }

    /// What its times are of.
    pub fn unit(self) -> &'static str {
        match self {
            Half::Prefill => "ms per prefill",
            Half::Decode => "ms per token",
        }
    }

    /// `(prefill, decode)` when this half runs `tuning` and the other one what `run` and `verify` do.
    pub fn tunings(self, tuning: Tuning) -> (Tuning, Tuning) {
        match self {
            Half::Prefill => (tuning, Tuning::default()),
            Half::Decode => (Tuning::default(), tuning),
        }
    }
}

/// One step, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Optimisation {
    StaticWeights,
    IntermediateReuse,
    LaunchMerging,
    LayoutAlignment,
}

impl Optimisation {
    pub const ALL: [Optimisation; 4] = [
        Optimisation::StaticWeights,
        Optimisation::IntermediateReuse,
        Optimisation::LaunchMerging,
        Optimisation::LayoutAlignment,
    ];

    /// As it stands in test names.
    pub fn name(self) -> &'static str {
        match self {
            Optimisation::StaticWeights => "static_weights",
            Optimisation::IntermediateReuse => "intermediate_reuse",
            Optimisation::LaunchMerging => "launch_merging",
            Optimisation::LayoutAlignment => "layout_alignment",
        }
    }

    /// The tuning with this step added.
    pub fn apply(self, before: Tuning) -> Tuning {
        match self {
            Optimisation::StaticWeights => Tuning { write_statics: false, ..before },
            Optimisation::IntermediateReuse => Tuning { write_intermediates: false, share: true, ..before },
            Optimisation::LaunchMerging => Tuning { merge: true, ..before },
            Optimisation::LayoutAlignment => before,
        }
    }

    /// The baseline with every step before this one.
    pub fn ladder(self) -> Tuning {
        Optimisation::ALL.into_iter().take_while(|step| *step != self).fold(Tuning::BASELINE, |t, step| step.apply(t))
    }

    /// Everything applied.
    pub fn all() -> Tuning {
        Optimisation::ALL.into_iter().fold(Tuning::BASELINE, |tuning, step| step.apply(tuning))
    }

    /// Why there is nothing to do for this model, if there is not.
    ///
    /// Errors: from the plan.
    pub fn nothing_to_do(self, config: &ModelConfig, half: Half, options: &PlanOptions) -> Result<Option<String>> {
        if self != Optimisation::LayoutAlignment {
            return Ok(None);
        }
        let plan = match half {
            Half::Prefill => plan::prefill(config, 64, options)?,
            Half::Decode => plan::decode(config, options)?,
        };
        let transposes = plan.steps.iter().filter(|step| step.name.contains("transpose")).count();
        let q = [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads * config.head_dim);
        Ok((transposes == 0).then(|| {
            format!(
                "sequence-first from end to end already: q and the attention context are [positions, {}], k and v \
                 [positions, {}], and none of the plan's {} steps transposes",
                q[0],
                q[1],
                plan.steps.len()
            )
        }))
    }

    /// What one call's counters show of a step that did not do what it is for.
    pub fn broken_promise(self, before: &Cost, after: &Cost) -> Option<String> {
        let (b, a) = (before.counters, after.counters);
        let kept = match self {
            Optimisation::StaticWeights => a.static_uploads == 0 && a.bytes_written < b.bytes_written,
            Optimisation::IntermediateReuse => a.bytes_written < b.bytes_written && after.memory < before.memory,
            Optimisation::LaunchMerging => a.dispatches < b.dispatches && a.launches == b.launches,
            Optimisation::LayoutAlignment => false,
        };
        (!kept).then(|| {
            format!("{}: the counters say that nothing was saved: {before} before, {after} after", self.name())
        })
    }
}

/// What one call costs in work that does not depend on the clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    pub counters: Counters,
    /// Intermediates of this half's plan. Units: bytes.
    pub memory: u64,
    pub layers: usize,
}

impl Cost {
    /// Device calls of one layer: all but the head's.
    pub fn dispatches_per_layer(&self) -> f64 {
        self.counters.dispatches.saturating_sub(1) as f64 / self.layers.max(1) as f64
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters { dispatches, bytes_written, static_uploads, .. } = self.counters;
        let per_layer = self.dispatches_per_layer();
        write!(f, "{dispatches} dispatches ({per_layer} per layer), {bytes_written} bytes written, ")?;
        write!(f, "{static_uploads} static uploads, {} bytes of intermediates", self.memory)
    }
}
