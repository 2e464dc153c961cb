//! The plan: a model's config turned into steps (dispatches and host ops) over named buffers.
//!
//! Derived by composing leaf kernels, never by model name. Knows the config; knows no device, weight or prompt.

mod build;
mod inheritance;
mod memory;
mod merge;
mod needed;
mod options;
mod share;
mod sound;
#[cfg(test)]
mod tests;
mod tuning;
pub mod upstream;

pub use build::{decode, prefill};
pub use inheritance::{Inheritance, inheritance};
pub use memory::Memory;
pub use merge::{merge, split, stands_between};
pub use needed::Needed;
pub use options::{BiasLowering, PlanOptions};
pub use share::share;
pub use tuning::Tuning;

use crate::device::BufferSpec;
use crate::error::{Error, Result};
use crate::kernel::Kernel;

/// Names a buffer of one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// Where the content of a static buffer comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Source {
    /// Not static: written by a step.
    Run,
    /// A tensor of the checkpoint, by its HF name.
    Tensor(String),
    /// The same with room for phantom heads.
    Padded { tensor: String, padding: HeadPadding },
    /// RoPE rows of positions `0..seq_len`, each repeated once per head.
    RopeLut { heads: usize },
}

/// Widens the heads' dimension of a weight: each group of `from` elements is followed by zeros up to `to`.
///
/// A KV group keeps its real query heads at its front and gets phantom heads behind them, so that head `h` still
/// attends to KV head `h / group`. Zeros at the very end instead would shift every later head into another group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadPadding {
    /// Rows of the tensor (q_proj and its bias: out features) or columns (o_proj: in features).
    pub axis: Axis,
    pub groups: usize,
    /// Units: elements of one group before and after.
    pub from: usize,
    pub to: usize,
}

/// The dimension of a `[rows, cols]` weight that is widened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    Rows,
    Cols,
}

impl HeadPadding {
    /// Shapes: `[groups * from, n] -> [groups * to, n]` for rows, `[m, groups * from] -> [m, groups * to]` for columns.
    ///
    /// Errors: [`Error::Plan`] when the tensor is of another size.
    pub fn apply(&self, weight: &[half::bf16]) -> Result<Vec<half::bf16>> {
        let HeadPadding { axis, groups, from, to } = *self;
        let unit = groups * from;
        if unit == 0 || !weight.len().is_multiple_of(unit) || to < from {
            return Err(Error::Plan { why: format!("{} weights cannot be padded by {self:?}", weight.len()) });
        }
        let other = weight.len() / unit;
        // Elements that move together: whole rows, or a piece of one row.
        let scale = if axis == Axis::Rows { other } else { 1 };
        let mut padded = Vec::with_capacity(weight.len() / from * to);
        for group in weight.chunks_exact(from * scale) {
            padded.extend_from_slice(group);
            padded.resize(padded.len() + (to - from) * scale, half::bf16::ZERO);
        }
        Ok(padded)
    }
}

/// A buffer with its content's origin.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlanBuffer {
    pub spec: BufferSpec,
    pub source: Source,
    /// The buffer in whose memory this one lies, at times when that one's content is done with ([`share`]).
    pub lies_in: Option<BufferId>,
}

/// One leaf kernel call site.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Launch {
    /// The call site, which no merge changes: `l07.q_proj`, `lm_head` ...
    pub name: String,
    pub kernel: Kernel,
    pub args: Vec<BufferId>,
}

impl Launch {
    /// The call site without its layer: `q_proj`.
    pub fn site(&self) -> &str {
        self.name.split_once('.').map_or(self.name.as_str(), |(_, site)| site)
    }

    /// What it writes.
    pub fn output(&self) -> Option<BufferId> {
        self.args.last().copied()
    }

    /// Whether `what` means this launch: a kernel id, a call site, or a call site in one layer.
    pub fn is(&self, what: &str) -> bool {
        [self.kernel.id(), self.site(), &self.name].contains(&what)
    }
}

/// What runs on the CPU by design, as the upstream stack does it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HostOp {
    /// Embedding rows of the token ids; rows behind the prompt hold the padding token's.
    Embed { out: BufferId },
    /// RoPE rows of the current position, repeated per head (decode).
    RopeRow { q_lut: BufferId, k_lut: BufferId },
    /// `x += bias`, the bias a tensor, broadcast over positions.
    AddBias { x: BufferId, bias: Source },
    /// `x += RoPE(bias)` at each row's position, which is what a bias before RoPE comes to behind it.
    AddRotatedBias { x: BufferId, bias: Source },
    /// New K and V rows into the layer's cache: the prompt's rows at prefill, one row at decode.
    KvAppend { layer: usize, k: BufferId, v: BufferId },
    /// Attention of one query row over the layer's cache.
    DecodeAttention { layer: usize, q: BufferId, out: BufferId },
    /// Final norm of the one row whose logits are wanted.
    FinalNorm { x: BufferId, out: BufferId },
}

/// Work of one step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Op {
    /// One device call: one or more launches.
    Dispatch(Vec<Launch>),
    Host(HostOp),
}

/// Where a dispatch runs. CPU fallback, the bisect and reference injection change nothing but this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    Device,
    Host,
}

/// A buffer worth looking at after a step, under the capture's name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tap {
    pub name: &'static str,
    pub buffer: BufferId,
}

/// One step of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// `l07.q_proj`, `lm_head` ...; of several launches, the name of their group: `l07.rms_qkv_rope`.
    pub name: String,
    pub layer: Option<usize>,
    pub op: Op,
    pub placement: Placement,
    /// What stands in its buffers once it is done.
    pub taps: Vec<Tap>,
}

impl Step {
    /// Its launches; none of a host op.
    pub fn launches(&self) -> &[Launch] {
        match &self.op {
            Op::Dispatch(launches) => launches,
            Op::Host(_) => &[],
        }
    }

    /// Whether `what` names this step or one of its launches ([`Launch::is`]).
    pub fn is(&self, what: &str) -> bool {
        self.name == what || self.launches().iter().any(|launch| launch.is(what))
    }

    /// The buffer of this tap, if the step shows it.
    pub fn tap(&self, name: &str) -> Option<BufferId> {
        self.taps.iter().find(|tap| tap.name == name).map(|tap| tap.buffer)
    }
}

/// Which of the two halves of inference a plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Units: positions, padding included.
    Prefill {
        seq_len: usize,
    },
    Decode,
}

impl Stage {
    /// `prefill` or `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Prefill { .. } => "prefill",
            Stage::Decode => "decode",
        }
    }

    /// Rows that a layer works on.
    pub fn rows(self) -> usize {
        match self {
            Stage::Prefill { seq_len } => seq_len,
            Stage::Decode => 1,
        }
    }
}

/// Steps in order over buffers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    pub stage: Stage,
    pub buffers: Vec<PlanBuffer>,
    pub steps: Vec<Step>,
    /// Where the logits of the wanted row end up.
    pub logits: BufferId,
}

impl Plan {
    pub fn buffer(&self, id: BufferId) -> &PlanBuffer {
        &self.buffers[id.0]
    }

    /// The buffer whose memory holds this one.
    pub fn home(&self, id: BufferId) -> BufferId {
        self.buffers[id.0].lies_in.unwrap_or(id)
    }

    /// Every launch with its step, in order.
    pub fn launches(&self) -> impl Iterator<Item = (&Step, &Launch)> {
        self.steps.iter().flat_map(|step| step.launches().iter().map(move |launch| (step, launch)))
    }

    /// Device calls of one run.
    pub fn dispatches(&self) -> usize {
        self.steps.iter().filter(|s| s.placement == Placement::Device && matches!(s.op, Op::Dispatch(_))).count()
    }

    /// Moves every launch that `what` means ([`Launch::is`]) to `placement`, and says how many there were. A dispatch of
    /// several launches is taken apart for it and stays so.
    pub fn place(&mut self, what: &str, placement: Placement) -> usize {
        let mut moved = 0;
        let several = |step: &Step| step.launches().len() > 1 && step.launches().iter().any(|l| l.is(what));
        if self.steps.iter().any(several) {
            let steps = std::mem::take(&mut self.steps);
            let apart = |step: Step| if several(&step) { merge::apart(step) } else { vec![step] };
            self.steps = steps.into_iter().flat_map(apart).collect();
        }
        for step in self.steps.iter_mut().filter(|step| step.launches().iter().any(|l| l.is(what))) {
            step.placement = placement;
            moved += 1;
        }
        moved
    }
}

impl HostOp {
    /// Device buffers this op reads.
    pub fn reads(&self) -> Vec<BufferId> {
        match *self {
            HostOp::Embed { .. } | HostOp::RopeRow { .. } => vec![],
            HostOp::AddBias { x, .. } | HostOp::AddRotatedBias { x, .. } => vec![x],
            HostOp::KvAppend { k, v, .. } => vec![k, v],
            HostOp::DecodeAttention { q, .. } => vec![q],
            HostOp::FinalNorm { x, .. } => vec![x],
        }
    }

    /// Device buffers this op writes.
    pub fn writes(&self) -> Vec<BufferId> {
        match *self {
            HostOp::Embed { out } | HostOp::DecodeAttention { out, .. } | HostOp::FinalNorm { out, .. } => vec![out],
            HostOp::RopeRow { q_lut, k_lut } => vec![q_lut, k_lut],
            HostOp::AddBias { x, .. } | HostOp::AddRotatedBias { x, .. } => vec![x],
            HostOp::KvAppend { .. } => vec![],
        }
    }
}
