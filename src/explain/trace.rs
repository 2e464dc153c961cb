//! What a run left at every launch: the rows that are compared.

use std::collections::HashMap;

use half::bf16;

use crate::error::Result;
use crate::plan::{self, BufferId, HostOp, Op, Step};
use crate::runner::{Hook, KvCache, StepContext};

/// Which part of a run a segment is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    Prefill,
    Decode,
    /// The KV cache as it stands when all is done.
    End,
}

/// One output of one launch or host op: of prefill the chosen positions, of decode one row a step.
///
/// Shapes: `[values.len() / cols, cols]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    pub stage: Stage,
    /// The call site: `l01.q_proj`, `l01.k_cache`, `lm_head` ...
    pub name: String,
    pub layer: Option<usize>,
    pub cols: usize,
    pub values: Vec<bf16>,
}

/// Every segment of a run, in order of computation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    pub segments: Vec<Segment>,
    index: HashMap<(Stage, String), usize>,
}

impl Trace {
    /// Puts rows behind those that this site has left already.
    pub(super) fn push(&mut self, stage: Stage, name: &str, layer: Option<usize>, cols: usize, rows: &[bf16]) {
        let key = (stage, name.to_owned());
        let at = *self.index.entry(key).or_insert_with(|| {
            self.segments.push(Segment { stage, name: name.into(), layer, cols, values: vec![] });
            self.segments.len() - 1
        });
        self.segments[at].values.extend_from_slice(rows);
    }

    pub fn get(&self, stage: Stage, name: &str) -> Option<&Segment> {
        self.index.get(&(stage, name.to_owned())).map(|&at| &self.segments[at])
    }

    /// The rows of a cache at `positions`.
    pub(super) fn push_cache(
        &mut self,
        stage: Stage,
        kv: &KvCache,
        layer: usize,
        positions: impl Iterator<Item = usize> + Clone,
    ) {
        let (keys, values) = kv.rows_at(layer, positions.filter(|&p| p < kv.len(layer)));
        for (name, rows) in [("k_cache", keys), ("v_cache", values)] {
            self.push(stage, &format!("l{layer:02}.{name}"), Some(layer), kv.kv_dim(), &rows);
        }
    }
}

/// Keeps every step's outputs.
pub(super) struct Recorder {
    pub(super) positions: Vec<usize>,
    pub(super) trace: Trace,
}

impl Hook for Recorder {
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let prefill = matches!(cx.plan.stage, plan::Stage::Prefill { .. });
        let stage = if prefill { Stage::Prefill } else { Stage::Decode };
        if let Op::Host(HostOp::KvAppend { layer, .. }) = cx.step.op {
            let of_prefill = self.positions.iter().copied().filter(|&p| prefill && p < cx.valid_rows);
            let here = std::iter::once(cx.position).filter(|_| !prefill);
            self.trace.push_cache(stage, cx.kv, layer, of_prefill.chain(here));
            return Ok(());
        }
        for (name, buffer) in outputs(cx.step) {
            let spec = &cx.plan.buffer(buffer).spec;
            let (rows, cols) = (spec.rows, spec.cols);
            let kept: Vec<bf16> = if rows == 1 {
                cx.read(buffer)?
            } else {
                let all = cx.read(buffer)?;
                let wanted = self.positions.iter().filter(|&&p| p < cx.valid_rows.min(rows));
                wanted.flat_map(|&p| all[p * cols..(p + 1) * cols].iter().copied()).collect()
            };
            self.trace.push(stage, &name, cx.step.layer, cols, &kept);
        }
        Ok(())
    }
}

/// What a step writes, by call site.
pub(super) fn outputs(step: &Step) -> Vec<(String, BufferId)> {
    match &step.op {
        Op::Dispatch(launches) => launches.iter().filter_map(|l| Some((l.name.clone(), l.output()?))).collect(),
        Op::Host(op) => {
            let writes = op.writes();
            let named = |(i, buffer): (usize, &BufferId)| match i {
                0 => (step.name.clone(), *buffer),
                i => (format!("{}.{i}", step.name), *buffer),
            };
            writes.iter().enumerate().map(named).collect()
        }
    }
}
