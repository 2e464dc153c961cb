//! One plan in execution: each step on the device, or on the host by design or by placement.

use half::bf16;

use super::compiled::{Compiled, Handover, content, rope_rows};
use super::hook::StepContext;
use super::host::HostKernels;
use super::kv::KvCache;
use super::npu::EMBEDDING;
use crate::device::{Device, Role};
use crate::error::Result;
use crate::kernel::Kernel;
use crate::model::{ModelConfig, RopeTable, Weights};
use crate::plan::{BufferId, HostOp, Op, Source};
use crate::tensor;

/// One run's place in the sequence.
#[derive(Clone, Copy)]
pub(super) struct Span<'a> {
    pub(super) ids: &'a [u32],
    pub(super) position: usize,
}

/// What a plan's steps need at hand.
pub(super) struct Run<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) weights: &'a dyn Weights,
    pub(super) rope: &'a RopeTable,
    pub(super) device: &'a mut dyn Device,
    pub(super) host: &'a HostKernels,
    pub(super) kv: &'a mut KvCache,
    pub(super) compiled: &'a Compiled,
    pub(super) span: Span<'a>,
    pub(super) pad_id: u32,
    /// Whether every row is computed: somebody looks into the run, who may want any.
    pub(super) whole: bool,
}

impl Run<'_> {
    pub(super) fn context(&mut self, index: usize) -> StepContext<'_> {
        StepContext {
            plan: &self.compiled.plan,
            step: &self.compiled.plan.steps[index],
            position: self.span.position,
            valid_rows: self.span.ids.len(),
            kv: self.kv,
            device: self.device,
            handles: &self.compiled.handles,
        }
    }

    pub(super) fn poison_intermediates(&mut self) -> Result<()> {
        for (buffer, &handle) in self.compiled.plan.buffers.iter().zip(&self.compiled.handles) {
            if matches!(buffer.spec.role, Role::Intermediate | Role::Output) && buffer.lies_in.is_none() {
                self.device.poison(handle)?;
            }
        }
        Ok(())
    }

    /// What the host writes before a step's dispatch.
    pub(super) fn hand_over_all(&mut self, index: usize) -> Result<()> {
        self.compiled.handovers[index].iter().try_for_each(|handover| self.hand_over(handover))
    }

    pub(super) fn step(&mut self, index: usize) -> Result<()> {
        let compiled = self.compiled;
        let step = &compiled.plan.steps[index];
        match (&step.op, compiled.dispatches[index]) {
            (_, Some(dispatch)) => {
                self.hand_over_all(index)?;
                let rows = compiled.rows(index, self.span.ids.len()).filter(|_| !self.whole);
                let done = match rows {
                    Some(rows) => self.device.run_rows(dispatch, rows),
                    None => self.device.run(dispatch),
                };
                done.map(drop)
            }
            (Op::Host(op), None) => self.host_op(op),
            (Op::Dispatch(launches), None) => launches.iter().try_for_each(|launch| {
                let inputs = launch.args[..launch.args.len() - 1]
                    .iter()
                    .map(|&id| match &compiled.plan.buffer(id).source {
                        source @ (Source::Tensor(_) | Source::Padded { .. }) => {
                            Ok(content(self.weights, source)?.into_owned())
                        }
                        _ => self.read(id),
                    })
                    .collect::<Result<Vec<_>>>()?;
                let out = self.host.launch(&launch.kernel, &inputs)?;
                self.write(*launch.args.last().expect("checked by the plan"), 0, &out)
            }),
        }
    }

    fn hand_over(&mut self, handover: &Handover) -> Result<()> {
        match handover {
            Handover::Weight(handle, source) => {
                self.device.write(*handle, 0, tensor::bytes_of(&content(self.weights, source)?))
            }
            Handover::Table(handle, rows) => self.device.write(*handle, 0, rows),
            Handover::Content(handle) => {
                let bytes = self.device.spec(*handle).bytes();
                let content = self.device.read(*handle, 0, bytes)?.to_vec();
                self.device.write(*handle, 0, &content)
            }
            Handover::Output(handle) => {
                let nan = vec![bf16::NAN; self.device.spec(*handle).bytes() / 2];
                self.device.write(*handle, 0, tensor::bytes_of(&nan))
            }
        }
    }

    fn host_op(&mut self, op: &HostOp) -> Result<()> {
        let hidden = self.config.hidden_size;
        let valid = self.span.ids.len();
        match *op {
            HostOp::AddBias { x, ref bias } => {
                let bias = content(self.weights, bias)?;
                self.add_rows(x, |_| Ok(bias.to_vec()))
            }
            HostOp::AddRotatedBias { x, ref bias } => {
                let bias = content(self.weights, bias)?.into_owned();
                let (head_dim, start) = (self.config.head_dim, self.span.position);
                let (rope, host) = (self.rope, self.host);
                self.add_rows(x, |row| {
                    let lut = rope_rows(rope, &[start + row], bias.len() / head_dim);
                    let rotate = Kernel::Rope { rows: bias.len() / head_dim, head_dim };
                    host.launch(&rotate, &[bias.clone(), lut])
                })
            }
            HostOp::Embed { out } => {
                let rows = self.compiled.plan.buffer(out).spec.rows;
                let ids = self.span.ids.iter().chain((valid < rows).then_some(&self.pad_id));
                let ids: Vec<usize> = ids.map(|&id| id as usize).collect();
                let mut x = self.weights.bf16_rows(EMBEDDING, hidden, &ids)?;
                (valid + 1..rows).for_each(|_| x.extend_from_within(valid * hidden..(valid + 1) * hidden));
                self.write(out, 0, &x)
            }
            HostOp::RopeRow { q_lut, k_lut } => {
                let width = self.compiled.plan.buffer(q_lut).spec.cols;
                let row = rope_rows(self.rope, &[self.span.position], width / self.config.head_dim);
                self.write(q_lut, 0, &row)?;
                self.write(k_lut, 0, &row[..self.config.kv_dim()])
            }
            HostOp::KvAppend { layer, k, v } => {
                let (device, handles) = (&mut *self.device, &self.compiled.handles);
                let bytes = 2 * valid * self.kv.kv_dim();
                let mut place = self.kv.append(layer, self.span.position, valid)?;
                place.keys(&tensor::bf16_of_le_bytes(device.read(handles[k.0], 0, bytes)?));
                place.values(&tensor::bf16_of_le_bytes(device.read(handles[v.0], 0, bytes)?));
                Ok(())
            }
            HostOp::DecodeAttention { layer, q, out } => {
                let q = self.read(q)?;
                let context = self.host.decode_attention(&q, self.kv.layer(layer));
                self.write(out, 0, &context)
            }
            HostOp::FinalNorm { x, out } => {
                let row = self.read_part(x, (valid - 1) * hidden, hidden)?;
                let normed = self.host.final_norm(&row);
                self.write(out, 0, &normed)
            }
        }
    }

    /// `x[row] += addend(row)` for the rows of the prompt, one rounding each.
    fn add_rows(&mut self, x: BufferId, addend: impl Fn(usize) -> Result<Vec<bf16>>) -> Result<()> {
        let width = self.compiled.plan.buffer(x).spec.cols;
        for row in 0..self.span.ids.len() {
            let old = self.read_part(x, row * width, width)?;
            let sum = self.host.launch(&Kernel::Add { rows: 1, cols: width }, &[old, addend(row)?])?;
            self.write(x, row * width, &sum)?;
        }
        Ok(())
    }

    pub(super) fn read(&mut self, id: BufferId) -> Result<Vec<bf16>> {
        self.read_part(id, 0, self.compiled.plan.buffer(id).spec.len())
    }

    /// Elements `[start, start + len)` of a bf16 buffer.
    fn read_part(&mut self, id: BufferId, start: usize, len: usize) -> Result<Vec<bf16>> {
        let bytes = self.device.read(self.compiled.handles[id.0], start * 2, len * 2)?;
        Ok(tensor::bf16_from_le_bytes(bytes))
    }

    fn write(&mut self, id: BufferId, start: usize, content: &[bf16]) -> Result<()> {
        self.device.write(self.compiled.handles[id.0], start * 2, tensor::bytes_of(content))
    }
}
