//! The plan: a model's config turned into steps (dispatches and host ops) over named buffers.
//!
//! Derived by composing leaf kernels, never by model name. Knows the config; knows no device, weight or prompt.

mod build;
mod inheritance;
mod memory;
mod options;
#[cfg(test)]
mod tests;

pub use build::{decode, prefill};
pub use inheritance::{Inheritance, inheritance};
pub use memory::Memory;
pub use options::{BiasLowering, PlanOptions};

use crate::device::BufferSpec;
use crate::error::{Error, Result};
use crate::kernel::{ArgRole, Kernel};

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
}

/// One leaf kernel call site.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Launch {
    pub kernel: Kernel,
    pub args: Vec<BufferId>,
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
    /// `l07.q_proj`, `lm_head` ...
    pub name: String,
    pub layer: Option<usize>,
    pub op: Op,
    pub placement: Placement,
    pub tap: Option<Tap>,
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

    /// Every launch with its step, in order.
    pub fn launches(&self) -> impl Iterator<Item = (&Step, &Launch)> {
        self.steps.iter().flat_map(|step| match &step.op {
            Op::Dispatch(launches) => launches.iter().map(move |l| (step, l)).collect::<Vec<_>>(),
            Op::Host(_) => Vec::new(),
        })
    }

    /// Device calls of one run.
    pub fn dispatches(&self) -> usize {
        self.steps.iter().filter(|s| s.placement == Placement::Device && matches!(s.op, Op::Dispatch(_))).count()
    }

    /// Moves every step whose kernel has this id to `placement`, and says how many there were.
    pub fn place(&mut self, kernel_id: &str, placement: Placement) -> usize {
        let mut moved = 0;
        for step in &mut self.steps {
            if let Op::Dispatch(launches) = &step.op
                && launches.iter().any(|l| l.kernel.id() == kernel_id)
            {
                step.placement = placement;
                moved += 1;
            }
        }
        moved
    }

    /// Checks that every launch's buffers have the dtypes and sizes its kernel wants, that no launch reads a buffer
    /// before something has written it, and that none writes a static one.
    ///
    /// Errors: [`Error::Plan`] naming the step and the argument.
    pub fn check(&self) -> Result<()> {
        let mut written: Vec<bool> = self.buffers.iter().map(|b| b.spec.role.is_static()).collect();
        let fail = |step: &Step, why: String| Error::Plan { why: format!("{}: {why}", step.name) };
        for step in &self.steps {
            match &step.op {
                Op::Host(op) => {
                    for id in op.reads() {
                        if !written[id.0] {
                            return Err(fail(
                                step,
                                format!("reads {} before it is written", self.buffer(id).spec.name),
                            ));
                        }
                    }
                    for id in op.writes() {
                        written[id.0] = true;
                    }
                }
                Op::Dispatch(launches) => {
                    for launch in launches {
                        self.check_launch(step, launch, &mut written)?;
                    }
                }
            }
        }
        if written[self.logits.0] { Ok(()) } else { Err(Error::Plan { why: "no step writes the logits".into() }) }
    }

    fn check_launch(&self, step: &Step, launch: &Launch, written: &mut [bool]) -> Result<()> {
        let args = launch.kernel.args();
        let fail = |why: String| Err(Error::Plan { why: format!("{}: {}: {why}", step.name, launch.kernel) });
        if args.len() != launch.args.len() {
            return fail(format!("found {} arguments, expected {}", launch.args.len(), args.len()));
        }
        for (arg, &id) in args.iter().zip(&launch.args) {
            let spec = &self.buffer(id).spec;
            if (spec.dtype, spec.len()) != (arg.dtype, arg.rows * arg.cols) {
                return fail(format!(
                    "argument {}: found {} {:?} [{}, {}], expected {:?} [{}, {}]",
                    arg.name, spec.name, spec.dtype, spec.rows, spec.cols, arg.dtype, arg.rows, arg.cols
                ));
            }
            match arg.role {
                ArgRole::Output if spec.role.is_static() => return fail(format!("writes the static {}", spec.name)),
                ArgRole::Output => written[id.0] = true,
                _ if !written[id.0] => return fail(format!("reads {} before it is written", spec.name)),
                _ => {}
            }
        }
        Ok(())
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
