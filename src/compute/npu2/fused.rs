//! LayerNorm and SwiGLU of a product, in the NPU2's arithmetic: rounded toward minus infinity after every step.
//!
//! Source: mlir-air's `layer_norm.py` and `matvec_swiglu_rms.py`, which never set the rounding mode.

use half::bf16;

use super::elementwise::SiluTimes;
use crate::compute::{
    Isa,
    elementwise::Function,
    fused::PairShare,
    lanes::Lanes,
    layer_norm::Share,
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// [`compute::LayerNorm`](crate::compute::LayerNorm) with `mean`, `x - mean`, its square, rstd, the normalised value and
/// the output each in bf16; sums and `1 / sqrt` in f32. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm {
    /// Rows.
    pub x: Src<bf16>,
    /// Scale, then shift of every column.
    pub params: Src<bf16>,
    /// Added to the variance.
    pub eps: f32,
    /// Normalised rows.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for LayerNorm {
    fn run(&self, worker: &Worker<'_>) {
        let LayerNorm { x, params, eps, y, isa } = *self;
        isa.dispatch(Share::<true>::new(x, params, eps, y, worker));
    }
}

/// [`compute::Swiglu`](crate::compute::Swiglu) with gate and up in bf16, and SiLU as [`SiluMul`](super::SiluMul) has it.
#[derive(Debug, Clone, Copy)]
pub struct Swiglu {
    /// Gate and up in turn.
    pub sums: Src<f32>,
    /// Product.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

struct Narrowed;

impl Function for Narrowed {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, gate: L::F, up: L::F) -> L::F {
        SiluTimes.of(l, l.round_down(gate), l.round_down(up))
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl Kernel for Swiglu {
    fn run(&self, worker: &Worker<'_>) {
        self.isa.dispatch(PairShare::new(Narrowed, self.sums, self.out, worker));
    }
}
