//! Elementwise kernels, step by step: every step is rounded to bf16 toward minus infinity.
//!
//! Source: mlir-air's `silu_and_mul.cc`, `gelu.py` and `eltwise_add`, which never set the rounding mode. Halving is exact
//! and has no rounding here. The output may be an input itself, as on `ieee`.

use half::bf16;

use super::unit::tanh;
use crate::compute::{
    Isa,
    elementwise::{Function, Share},
    lanes::Lanes,
    pool::{Kernel, Worker},
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
struct Plus;
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

impl Function for Plus {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, a: L::F, b: L::F) -> L::F {
        l.round_down(l.add(a, b))
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
        assert!(gate.len() == out.len() && up.len() == out.len(), "silu_mul: gate, up and out differ in length");
        self.isa.dispatch(Share { f: SiluTimes, a: gate, b: up, y: out, worker });
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl Kernel for Add {
    fn run(&self, worker: &Worker<'_>) {
        let (a, b, out) = (self.a, self.b, self.out);
        assert!(a.len() == out.len() && b.len() == out.len(), "add: a, b and out differ in length");
        self.isa.dispatch(Share { f: Plus, a, b, y: out, worker });
    }
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for BiasAdd {
    fn run(&self, worker: &Worker<'_>) {
        let (x, bias, y) = (self.x, self.bias, self.y);
        assert!(x.len() == y.len(), "bias_add: x and y differ in length");
        assert!(y.len().is_multiple_of(bias.len()), "bias_add: y is not [rows, {}]", bias.len());
        self.isa.dispatch(Share { f: Plus, a: x, b: bias, y, worker });
    }
}

// SAFETY: tasks are disjoint pieces of `y`, each claimed once.
unsafe impl Kernel for GeluTanh {
    fn run(&self, worker: &Worker<'_>) {
        assert!(self.x.len() == self.y.len(), "gelu_tanh: x and y differ in length");
        self.isa.dispatch(Share { f: Gelu, a: self.x, b: self.x, y: self.y, worker });
    }
}
