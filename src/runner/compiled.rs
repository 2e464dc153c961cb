//! A plan bound to a device: buffers made, static ones filled, dispatches prepared.

use std::borrow::Cow;
use std::collections::HashMap;

use half::bf16;

use crate::device::{BoundLaunch, BufferHandle, Device, DispatchHandle};
use crate::error::{Error, Result};
use crate::model::{RopeTable, Weights};
use crate::plan::{Op, Placement, Plan, Source};
use crate::tensor;

/// A plan bound to a device.
pub(super) struct Compiled {
    pub(super) plan: Plan,
    pub(super) handles: Vec<BufferHandle>,
    pub(super) dispatches: Vec<Option<DispatchHandle>>,
}

/// Creates the plan's buffers (static ones once per device, shared by all plans) and prepares its dispatches.
pub(super) fn compile(
    plan: Plan,
    device: &mut dyn Device,
    weights: &dyn Weights,
    rope: &RopeTable,
    statics: &mut HashMap<(Source, usize), BufferHandle>,
) -> Result<Compiled> {
    let mut handles = Vec::with_capacity(plan.buffers.len());
    for buffer in &plan.buffers {
        let key = (buffer.source.clone(), buffer.spec.len());
        if let Some(&known) = statics.get(&key).filter(|_| buffer.source != Source::Run) {
            handles.push(known);
            continue;
        }
        let handle = device.create(buffer.spec.clone())?;
        match &buffer.source {
            Source::Run => {}
            Source::Tensor(_) | Source::Padded { .. } => {
                device.write(handle, 0, tensor::bytes_of(&content(weights, &buffer.source)?))?;
                statics.insert(key, handle);
            }
            Source::RopeLut { heads } => {
                let positions: Vec<usize> = (0..buffer.spec.rows).collect();
                device.write(handle, 0, tensor::bytes_of(&rope_rows(rope, &positions, *heads)))?;
                statics.insert(key, handle);
            }
        }
        handles.push(handle);
    }
    let mut dispatches = Vec::with_capacity(plan.steps.len());
    for step in &plan.steps {
        dispatches.push(match (&step.op, step.placement) {
            (Op::Dispatch(launches), Placement::Device) => {
                let bound = launches.iter().map(|l| BoundLaunch {
                    site: format!("{}.{}", plan.stage.name(), step.name),
                    kernel: l.kernel.clone(),
                    args: l.args.iter().map(|a| handles[a.0]).collect(),
                });
                Some(device.prepare(&step.name, bound.collect())?)
            }
            _ => None,
        });
    }
    Ok(Compiled { plan, handles, dispatches })
}

/// What a static weight's buffer holds.
///
/// Errors: those of the weights; [`Error::Plan`] for a source that is no weight.
pub(super) fn content<'a>(weights: &'a dyn Weights, source: &Source) -> Result<Cow<'a, [bf16]>> {
    match source {
        Source::Tensor(name) => weights.bf16(name),
        Source::Padded { tensor, padding } => Ok(padding.apply(&weights.bf16(tensor)?)?.into()),
        Source::Run | Source::RopeLut { .. } => Err(Error::Plan { why: format!("{source:?} is no weight") }),
    }
}

/// LUT rows (cos half, then sin half) of `positions`, each repeated per head.
///
/// Shapes: `[n] -> [n, heads * head_dim]`.
pub(super) fn rope_rows(rope: &RopeTable, positions: &[usize], heads: usize) -> Vec<bf16> {
    let seq_len = positions.iter().max().map_or(0, |p| p + 1);
    let (cos, sin) = rope.bf16_rows(positions, seq_len);
    let mut rows = Vec::with_capacity(positions.len() * heads * cos.ncols() * 2);
    for (cos, sin) in cos.rows().into_iter().zip(sin.rows()) {
        for _ in 0..heads {
            rows.extend(cos);
            rows.extend(sin);
        }
    }
    rows
}
