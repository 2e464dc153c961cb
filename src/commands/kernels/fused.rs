//! The part of `kernels --model` that says, stage by stage, which of upstream's fused dispatches the model's shapes bind,
//! and why leaf dispatches do the work where none does.

use serde_json::{Value, json};

use super::{print, word};
use crate::error::Result;
use crate::kernel::dispatch::DispatchStage;
use crate::model::ModelConfig;
use crate::plan::upstream::{self, BoundDispatch, UpstreamPlan};
use crate::report::{Cell, Table};

const STAGES: [DispatchStage; 3] = [DispatchStage::Prefill, DispatchStage::Decode, DispatchStage::Head];

/// What binds and what does not.
pub(super) struct Fused(UpstreamPlan);

impl Fused {
    pub(super) fn of(config: &ModelConfig, seq_len: usize) -> Result<Fused> {
        Ok(Fused(upstream::bind(config, seq_len)?))
    }

    fn bound(&self, stage: DispatchStage) -> impl Iterator<Item = &BoundDispatch> {
        self.0.dispatches.iter().filter(move |dispatch| dispatch.stage == stage)
    }

    pub(super) fn print(&self) -> anyhow::Result<()> {
        let columns = ["stage", "fused dispatch", "bound", "arguments, or why leaf dispatches do its work"];
        let mut table = Table::new("upstream's fused dispatches", &columns);
        let mut lines = vec![];
        for stage in STAGES {
            let name = word(&stage)?;
            for dispatch in self.bound(stage) {
                let arguments: Vec<&str> = dispatch.arguments.iter().map(|a| a.name.as_str()).collect();
                let arguments = format!("{}: {}", arguments.len(), arguments.join(" "));
                table.row([name.clone().into(), Cell::from(dispatch.id), "yes".into(), arguments.into()]);
            }
            for fallback in self.0.fallbacks.iter().filter(|fallback| fallback.stage == stage) {
                let why = fallback.why.as_str();
                table.row([name.clone().into(), Cell::from(fallback.id), "no".into(), why.into()]);
            }
            let ids: Vec<&str> = self.bound(stage).map(|dispatch| dispatch.id).collect();
            lines.push(match ids.as_slice() {
                [] => format!("{name}: leaf dispatches"),
                ids => format!("{name}: {}", ids.join(", ")),
            });
        }
        print(&table);
        lines.iter().for_each(|line| say!("{line}"));
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let bound: Vec<Value> = self.0.dispatches.iter().map(dispatch_json).collect();
        let fallbacks = self.0.fallbacks.iter().map(|f| json!({"stage": f.stage, "id": f.id, "why": f.why}));
        json!({"bound": bound, "leaf_dispatches": fallbacks.collect::<Vec<_>>()})
    }
}

fn dispatch_json(dispatch: &BoundDispatch) -> Value {
    let argument =
        |a: &upstream::BoundArgument| json!({"name": a.name, "role": a.role, "dtype": a.dtype, "dims": a.dims});
    let arguments: Vec<Value> = dispatch.arguments.iter().map(argument).collect();
    json!({"stage": dispatch.stage, "id": dispatch.id, "head_first": dispatch.head_first, "arguments": arguments})
}
