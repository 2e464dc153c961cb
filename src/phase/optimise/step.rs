//! The optimisation steps of phases 4 and 5: what each changes, and what it promises.

use std::fmt;

use crate::device::Counters;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::model::ModelConfig;
use crate::plan::{self, HostOp, Op, Plan, PlanOptions, Tuning};

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

    /// `(prefill, decode)` when this half runs `tuning` and the other one what `run` and `verify` do by default.
    pub fn tunings(self, tuning: Tuning) -> (Tuning, Tuning) {
        match self {
            Half::Prefill => (tuning, Tuning::default()),
            Half::Decode => (Tuning::default(), tuning),
        }
    }

    /// The option that has `run`, `verify` and `profile` carry it out in another way.
    pub fn option(self) -> &'static str {
        match self {
            Half::Prefill => "--optimise-prefill",
            Half::Decode => "--optimise-decode",
        }
    }
}

/// One step, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Optimisation {
    StaticWeights,
    IntermediateReuse,
    BufferSharing,
    LaunchMerging,
    LayoutAlignment,
}

impl Optimisation {
    pub const ALL: [Optimisation; 5] = [
        Optimisation::StaticWeights,
        Optimisation::IntermediateReuse,
        Optimisation::BufferSharing,
        Optimisation::LaunchMerging,
        Optimisation::LayoutAlignment,
    ];

    /// As it stands in test names.
    pub fn name(self) -> &'static str {
        match self {
            Optimisation::StaticWeights => "static_weights",
            Optimisation::IntermediateReuse => "intermediate_reuse",
            Optimisation::BufferSharing => "buffer_sharing",
            Optimisation::LaunchMerging => "launch_merging",
            Optimisation::LayoutAlignment => "layout_alignment",
        }
    }

    /// Whether the step promises every bit on this device. Emulated ones run a merged dispatch's launches one after the other; a
    /// compiled one may keep more than bf16 between them.
    pub fn keeps_bits(self, device: &str) -> bool {
        self != Optimisation::LaunchMerging || device != "npu"
    }

    /// What these steps come to together; `none` is the unoptimised plan.
    ///
    /// Errors: a text that names the step that is unknown.
    pub fn tuning(names: &str) -> std::result::Result<Tuning, String> {
        let mut tuning = Tuning::BASELINE;
        for name in names.split(',').filter(|_| names != "none") {
            let known = || Optimisation::ALL.map(Optimisation::name).join(", ");
            let step = Optimisation::ALL.into_iter().find(|step| step.name() == name);
            tuning = step.ok_or_else(|| format!("found {name:?}, expected none, or of {}", known()))?.apply(tuning);
        }
        Ok(tuning)
    }

    /// The steps of a tuning, as [`Optimisation::tuning`] takes them.
    pub fn names(tuning: Tuning) -> String {
        let changes =
            |step: &Optimisation| step.apply(tuning) == tuning && step.apply(Tuning::BASELINE) != Tuning::BASELINE;
        let names: Vec<&str> = Optimisation::ALL.into_iter().filter(changes).map(Optimisation::name).collect();
        if names.is_empty() { "none".into() } else { names.join(",") }
    }

    /// The tuning with this step added.
    pub fn apply(self, before: Tuning) -> Tuning {
        match self {
            Optimisation::StaticWeights => Tuning { write_statics: false, ..before },
            Optimisation::IntermediateReuse => Tuning { write_intermediates: false, ..before },
            Optimisation::BufferSharing => Tuning { share: true, ..before },
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
        let q = [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads * config.head_dim);
        Ok(sequence_first(&plan).then(|| {
            format!(
                "sequence-first from end to end already: q and the attention context are [positions, {}], k and v \
                 [positions, {}], and no step rearranges them",
                q[0], q[1],
            )
        }))
    }

    /// What one call's counters show of a step that did not do what it is for.
    pub fn broken_promise(self, before: &Cost, after: &Cost) -> Option<String> {
        let (b, a) = (before.counters, after.counters);
        let kept = match self {
            Optimisation::StaticWeights => a.static_uploads == 0 && a.bytes_written < b.bytes_written,
            Optimisation::IntermediateReuse => a.bytes_written < b.bytes_written,
            Optimisation::BufferSharing => after.memory < before.memory,
            Optimisation::LaunchMerging => a.dispatches < b.dispatches && a.launches == b.launches,
            Optimisation::LayoutAlignment => false,
        };
        (!kept).then(|| {
            format!("{}: the counters say that nothing was saved: {before} before, {after} after", self.name())
        })
    }
}

/// Whether everything that attention reads and writes has a row per position, as the projections leave it and want it: only
/// then nothing needs to be transposed in between.
fn sequence_first(plan: &Plan) -> bool {
    let positions = plan.stage.rows();
    let mut arguments = vec![];
    for step in &plan.steps {
        match &step.op {
            Op::Host(HostOp::DecodeAttention { q, out, .. }) => arguments.extend([*q, *out]),
            Op::Host(HostOp::KvAppend { k, v, .. }) => arguments.extend([*k, *v]),
            Op::Host(_) => {}
            Op::Dispatch(launches) => {
                let attention = launches.iter().filter(|launch| matches!(launch.kernel, Kernel::Attention { .. }));
                arguments.extend(attention.flat_map(|launch| launch.args.iter().copied()));
            }
        }
    }
    !arguments.is_empty() && arguments.iter().all(|&id| plan.buffer(id).spec.rows == positions)
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::phase::Subject;

    #[rstest]
    #[case("none", Tuning::BASELINE)]
    #[case("static_weights,intermediate_reuse", Tuning::default())]
    #[case("static_weights,intermediate_reuse,buffer_sharing,launch_merging", Optimisation::all())]
    #[case("launch_merging", Tuning { merge: true, ..Tuning::BASELINE })]
    fn a_tuning_is_told_as_it_is_asked_for(#[case] names: &str, #[case] tuning: Tuning) {
        assert_eq!(Optimisation::tuning(names), Ok(tuning));
        assert_eq!(Optimisation::names(tuning), names);
    }

    #[rstest]
    #[case("")]
    #[case("static_weights,")]
    #[case("none,launch_merging")]
    #[case("Launch_Merging")]
    fn an_unknown_step_is_named(#[case] names: &str) {
        let error = Optimisation::tuning(names).unwrap_err();
        assert!(error.starts_with("found ") && error.ends_with("launch_merging, layout_alignment"), "{error}");
    }

    /// Each argument of attention by itself, laid out head by head.
    #[test]
    fn a_plan_that_is_not_sequence_first_is_seen() {
        let config = &Subject::shared("tiny_llama").unwrap().config;
        let options = PlanOptions::default();
        for plan in [plan::prefill(config, 64, &options).unwrap(), plan::decode(config, &options).unwrap()] {
            assert!(sequence_first(&plan));
            for step in &plan.steps {
                let arguments = match &step.op {
                    Op::Host(HostOp::DecodeAttention { q, out, .. }) => vec![*q, *out],
                    Op::Dispatch(launches) if step.name.ends_with(".attention") => launches[0].args.clone(),
                    _ => continue,
                };
                for id in arguments {
                    let mut plan = plan.clone();
                    let spec = &mut plan.buffers[id.0].spec;
                    let heads = spec.cols / config.head_dim;
                    (spec.rows, spec.cols) = (spec.rows * heads, config.head_dim);
                    assert!(!sequence_first(&plan), "{}", step.name);
                }
            }
            assert!(!sequence_first(&Plan { steps: vec![], ..plan }));
        }
    }
}
