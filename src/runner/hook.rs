//! Looking into a run, and meddling with it: hooks see every step. Without hooks a run pays nothing for them.

use std::collections::BTreeMap;

use half::bf16;
use ndarray::Array2;

use super::kv::KvCache;
use crate::device::{BufferHandle, Device};
use crate::error::Result;
use crate::plan::{BufferId, Plan, Stage, Step, Tap};
use crate::tensor;

/// What a hook may see and change around one step.
pub struct StepContext<'a> {
    pub plan: &'a Plan,
    pub step: &'a Step,
    /// Position of the first row of this run.
    pub position: usize,
    /// Rows that belong to the prompt; those behind are padding.
    pub valid_rows: usize,
    pub kv: &'a mut KvCache,
    pub(super) device: &'a mut dyn Device,
    pub(super) handles: &'a [BufferHandle],
}

impl StepContext<'_> {
    /// The whole content of a bf16 buffer of the plan. Where no hook reads rows ([`Hook::reads_rows`]), those that nobody needs may be
    /// NaN or stale.
    pub fn read(&mut self, buffer: BufferId) -> Result<Vec<bf16>> {
        let handle = self.handles[buffer.0];
        let bytes = self.device.spec(handle).bytes();
        Ok(tensor::bf16_from_le_bytes(self.device.read(handle, 0, bytes)?))
    }

    /// Row `row` of a bf16 buffer whose rows are positions.
    pub fn read_row(&mut self, buffer: BufferId, row: usize) -> Result<Vec<bf16>> {
        let handle = self.handles[buffer.0];
        let bytes = self.device.spec(handle).cols * 2;
        Ok(tensor::bf16_from_le_bytes(self.device.read(handle, row * bytes, bytes)?))
    }

    /// Overwrites the whole content of a bf16 buffer.
    pub fn write(&mut self, buffer: BufferId, content: &[bf16]) -> Result<()> {
        self.device.write(self.handles[buffer.0], 0, tensor::bytes_of(content))
    }
}

/// Sees every step of every run.
pub trait Hook: Send {
    /// Before the step runs.
    fn before_step(&mut self, _cx: &mut StepContext<'_>) -> Result<()> {
        Ok(())
    }

    /// After the step has completed.
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()>;

    /// Whether it looks into buffers: then every row is computed, and not those alone that production needs.
    fn reads_rows(&self) -> bool {
        true
    }
}

/// Which rows of which taps a run shall keep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub struct TapRequest {
    /// Positions at which every layer's output is kept.
    pub layer_positions: Vec<usize>,
    /// Positions at which layer 0's inner taps are kept.
    pub tap_positions: Vec<usize>,
    /// Positions (prompt and decoded) at which KV rows of every layer are kept.
    pub kv_positions: Vec<usize>,
}

impl TapRequest {
    pub fn is_empty(&self) -> bool {
        self.layer_positions.is_empty() && self.tap_positions.is_empty() && self.kv_positions.is_empty()
    }
}

/// Keeps the rows a [`TapRequest`] names, from prefill.
pub struct TapRecorder {
    request: TapRequest,
    taps: BTreeMap<String, Array2<bf16>>,
}

impl TapRecorder {
    pub fn new(request: TapRequest) -> Self {
        TapRecorder { request, taps: BTreeMap::new() }
    }

    /// Tap name (`l07.output`, `l00.q` ...) to rows, in the order of the requested positions.
    pub fn taps(&self) -> &BTreeMap<String, Array2<bf16>> {
        &self.taps
    }
}

impl TapRecorder {
    fn keep(&mut self, layer: usize, tap: Tap, cx: &mut StepContext<'_>) -> Result<()> {
        let positions = match tap.name {
            "output" => &self.request.layer_positions,
            _ if layer == 0 => &self.request.tap_positions,
            _ => return Ok(()),
        };
        let positions: Vec<usize> = positions.iter().copied().filter(|&p| p < cx.valid_rows).collect();
        if positions.is_empty() {
            return Ok(());
        }
        let mut rows = Vec::new();
        for &position in &positions {
            rows.extend(cx.read_row(tap.buffer, position)?);
        }
        let width = rows.len() / positions.len();
        let rows = Array2::from_shape_vec((positions.len(), width), rows).expect("rows of one width");
        self.taps.insert(format!("l{layer:02}.{}", tap.name), rows);
        Ok(())
    }
}

impl Hook for TapRecorder {
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let (Some(layer), Stage::Prefill { .. }) = (cx.step.layer, cx.plan.stage) else { return Ok(()) };
        for tap in &cx.step.taps {
            self.keep(layer, *tap, cx)?;
        }
        Ok(())
    }
}
