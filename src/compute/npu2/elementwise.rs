//! Elementwise kernels, step by step: every step is rounded to bf16 toward minus infinity.
//!
//! Source: mlir-air's `silu_and_mul.cc`, `gelu.py` and `eltwise_add`, which never set the rounding mode. Halving is exact
//! and has no rounding here. The output may be an input itself, as on `ieee`.

use half::bf16;

use super::unit::tanh;
use crate::compute::{
    Isa,
    elementwise::{Function, Plus, Share},
    lanes::Lanes,
    pool::{Kernel, Worker},
    rounding::Down,
    view::{Dst, Src},
};

/// `out = g * (0.5 * (1 + tanh(g / 2))) * up`, rounded after each of the last four operations.
///
/// Shapes: all alike. `out` may be `gate` or `up`.
#[derive(Debug, Clone, Copy)]
pub struct SiluMul {
    /// Goes through SiLU.
    pub gate: Src<bf16>,
    /// The other factor.
    pub up: Src<bf16>,
    /// Product.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `out = a + b`.
///
/// Shapes: all alike. `out` may be `a` or `b`.
#[derive(Debug, Clone, Copy)]
pub struct Add {
    /// A summand.
    pub a: Src<bf16>,
    /// A summand.
    pub b: Src<bf16>,
    /// Sum.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `y[r] = x[r] + bias` for every row `r`.
///
/// Shapes: `x`, `y` [rows, cols], `bias` [cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct BiasAdd {
    /// Rows.
    pub x: Src<bf16>,
    /// Added to every row.
    pub bias: Src<bf16>,
    /// Sums.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `y = x / 2 * (1 + tanh(c * (x + b * (x * (x * x)))))`, rounded after each operation, with `c = sqrt(2/pi)` and
/// `b = 0.044715` in bf16.
///
/// Shapes: all alike. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct GeluTanh {
    /// Argument.
    pub x: Src<bf16>,
    /// Value.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

pub(super) struct SiluTimes;
struct Gelu;

impl Function for SiluTimes {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, gate: L::F, up: L::F) -> L::F {
        let half = l.splat(0.5);
        let one_plus = l.round_down(l.add(l.splat(1.0), tanh(l, l.mul(gate, half))));
        let silu = l.round_down(l.mul(gate, l.mul(half, one_plus)));
        l.round_down(l.mul(silu, up))
    }
}

/// 0.044715 and sqrt(2/pi) as bf16 has them.
const GELU: (f32, f32) = (0.044_677_734, 0.796_875);

impl Function for Gelu {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, x: L::F, _: L::F) -> L::F {
        let cube = l.round_down(l.mul(x, l.round_down(l.mul(x, x))));
        let inner = l.round_down(l.add(x, l.round_down(l.mul(cube, l.splat(GELU.0)))));
        let t = tanh(l, l.round_down(l.mul(inner, l.splat(GELU.1))));
        let one_plus = l.round_down(l.add(t, l.splat(1.0)));
        l.round_down(l.mul(l.mul(x, l.splat(0.5)), one_plus))
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl Kernel for SiluMul {
    fn run(&self, worker: &Worker<'_>) {
        let (gate, up, out) = (self.gate, self.up, self.out);
        Share { f: SiluTimes, a: gate, b: up, y: out, worker }.alike(self.isa, "silu_mul");
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl Kernel for Add {
    fn run(&self, worker: &Worker<'_>) {
        let (a, b, out) = (self.a, self.b, self.out);
        Share { f: Plus(Down), a, b, y: out, worker }.alike(self.isa, "add");
    }
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for BiasAdd {
    fn run(&self, worker: &Worker<'_>) {
        let (x, bias, y) = (self.x, self.bias, self.y);
        Share { f: Plus(Down), a: x, b: bias, y, worker }.by_row(self.isa, "bias_add");
    }
}

// SAFETY: tasks are disjoint pieces of `y`, each claimed once.
unsafe impl Kernel for GeluTanh {
    fn run(&self, worker: &Worker<'_>) {
        Share { f: Gelu, a: self.x, b: self.x, y: self.y, worker }.alike(self.isa, "gelu_tanh");
    }
}
