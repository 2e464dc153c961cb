//! A plan bound to a device: buffers made, static ones filled, dispatches prepared.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use half::bf16;

use crate::device::{BoundLaunch, BufferHandle, Device, DispatchHandle};
use crate::error::{Error, Result};
use crate::kernel::{ArgRole, Rows};
use crate::model::{RopeTable, Weights};
use crate::plan::{BufferId, Needed, Op, Placement, Plan, PlanBuffer, Source, Step, Tuning};
use crate::tensor;

/// A plan bound to a device.
pub(super) struct Compiled {
    pub(super) plan: Plan,
    pub(super) handles: Vec<BufferHandle>,
    pub(super) dispatches: Vec<Option<DispatchHandle>>,
    needed: Vec<Needed>,
    /// What the host writes before each step's dispatch; nothing unless the tuning says so.
    pub(super) handovers: Vec<Vec<Handover>>,
}

impl Compiled {
    /// The rows that a step's dispatch has to leave for a prompt of `valid` tokens; none where that is all of them.
    pub(super) fn rows(&self, step: usize, valid: usize) -> Option<Rows> {
        let of = self.plan.stage.rows();
        match self.needed[step] {
            Needed::Last if of > 1 => Some(Rows { first: valid - 1, count: 1, of }),
            Needed::Prompt if of > valid => Some(Rows { first: 0, count: valid, of }),
            _ => None,
        }
    }
}

/// One argument that the host writes before a dispatch.
pub(super) enum Handover {
    /// A static one, anew from its source.
    Weight(BufferHandle, Source),
    /// A static one that no checkpoint holds.
    Table(BufferHandle, Arc<[u8]>),
    /// What it holds is read back and handed over again.
    Content(BufferHandle),
    /// It will be written: NaN until then.
    Output(BufferHandle),
}

/// Creates the plan's buffers (static ones once per device, shared by all plans) and prepares its dispatches.
pub(super) fn compile(
    plan: Plan,
    tuning: &Tuning,
    device: &mut dyn Device,
    weights: &dyn Weights,
    rope: &RopeTable,
    statics: &mut HashMap<(Source, usize), BufferHandle>,
) -> Result<Compiled> {
    let mut handles: Vec<BufferHandle> = Vec::with_capacity(plan.buffers.len());
    let mut uploads: Vec<(BufferHandle, &Source)> = vec![];
    // A home may stand behind the buffers that lie in it.
    let mut homes: HashMap<BufferId, BufferHandle> = HashMap::new();
    for (at, buffer) in plan.buffers.iter().enumerate() {
        let home = plan.home(BufferId(at));
        let key = (buffer.source.clone(), buffer.spec.len());
        let known = homes.get(&home).or_else(|| statics.get(&key).filter(|_| buffer.source != Source::Run));
        if let Some(&known) = known {
            handles.push(known);
            continue;
        }
        let handle = device.create(plan.buffer(home).spec.clone())?;
        homes.insert(home, handle);
        match &buffer.source {
            Source::Run => {}
            Source::Tensor(_) | Source::Padded { .. } => {
                uploads.push((handle, &buffer.source));
                statics.insert(key, handle);
            }
            Source::RopeLut { .. } => {
                device.write(handle, 0, &table(rope, buffer))?;
                statics.insert(key, handle);
            }
        }
        handles.push(handle);
    }
    // The largest first: while a tensor is taken over it is in memory twice, and then little else is there yet.
    uploads.sort_by_key(|&(handle, _)| std::cmp::Reverse(device.spec(handle).bytes()));
    for (handle, source) in uploads {
        device.write(handle, 0, tensor::bytes_of(&content(weights, source)?))?;
        if let Source::Tensor(tensor) | Source::Padded { tensor, .. } = source {
            weights.release(tensor);
        }
    }
    let mut dispatches = Vec::with_capacity(plan.steps.len());
    for step in &plan.steps {
        dispatches.push(match (&step.op, step.placement) {
            (Op::Dispatch(launches), Placement::Device) => {
                let bound = launches.iter().map(|l| BoundLaunch {
                    site: format!("{}.{}", plan.stage.name(), l.name),
                    kernel: l.kernel.clone(),
                    args: l.args.iter().map(|a| handles[a.0]).collect(),
                });
                Some(device.prepare(&step.name, bound.collect())?)
            }
            _ => None,
        });
    }
    let handovers = handovers(&plan, tuning, &handles, rope);
    let needed = plan.rows_needed();
    Ok(Compiled { plan, handles, dispatches, needed, handovers })
}

/// Per step, what the host writes before its dispatch: each argument once, as the dispatch first meets it.
fn handovers(plan: &Plan, tuning: &Tuning, handles: &[BufferHandle], rope: &RopeTable) -> Vec<Vec<Handover>> {
    let mut tables: HashMap<BufferId, Arc<[u8]>> = HashMap::new();
    let mut of_step = |step: &Step| {
        let (mut met, mut handovers) = (HashSet::new(), vec![]);
        for launch in step.launches().iter().filter(|_| step.placement == Placement::Device) {
            for (arg, &id) in launch.kernel.args().iter().zip(&launch.args) {
                let (buffer, handle) = (plan.buffer(id), handles[id.0]);
                if !met.insert(handle) {
                    continue;
                }
                match &buffer.source {
                    Source::Run if !tuning.write_intermediates => {}
                    Source::Run if arg.role == ArgRole::Output => handovers.push(Handover::Output(handle)),
                    Source::Run => handovers.push(Handover::Content(handle)),
                    _ if !tuning.write_statics => {}
                    Source::RopeLut { .. } => {
                        let table = tables.entry(id).or_insert_with(|| table(rope, buffer).into());
                        handovers.push(Handover::Table(handle, table.clone()));
                    }
                    weight => handovers.push(Handover::Weight(handle, weight.clone())),
                }
            }
        }
        handovers
    };
    plan.steps.iter().map(&mut of_step).collect()
}

/// The bytes of a static table.
fn table(rope: &RopeTable, buffer: &PlanBuffer) -> Vec<u8> {
    let Source::RopeLut { heads } = buffer.source else { return vec![] };
    let positions: Vec<usize> = (0..buffer.spec.rows).collect();
    tensor::bytes_of(&rope_rows(rope, &positions, heads)).to_vec()
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
