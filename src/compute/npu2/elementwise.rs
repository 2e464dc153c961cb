//! The steps of the NPU2's elementwise kernels: every one is rounded to bf16 toward minus infinity.
//!
//! Source: mlir-air's `silu_and_mul.cc` and `gelu.py`, which never set the rounding mode. Halving is exact and has no
//! rounding here.

use super::unit::tanh;
use crate::compute::lanes::Lanes;

/// `gate * (0.5 * (1 + tanh(gate / 2))) * up`, rounded after each of the last four operations.
#[inline(always)]
pub(in crate::compute) fn silu_times<L: Lanes>(l: L, gate: L::F, up: L::F) -> L::F {
    let half = l.splat(0.5);
    let one_plus = l.round_down(l.add(l.splat(1.0), tanh(l, l.mul(gate, half))));
    let silu = l.round_down(l.mul(gate, l.mul(half, one_plus)));
    l.round_down(l.mul(silu, up))
}

/// 0.044715 and sqrt(2/pi) as bf16 has them.
const GELU: (f32, f32) = (0.044_677_734, 0.796_875);

/// `x / 2 * (1 + tanh(c * (x + b * (x * (x * x)))))`, rounded after each operation, with `c = sqrt(2/pi)` and
/// `b = 0.044715` in bf16.
#[inline(always)]
pub(in crate::compute) fn gelu<L: Lanes>(l: L, x: L::F) -> L::F {
    let cube = l.round_down(l.mul(x, l.round_down(l.mul(x, x))));
    let inner = l.round_down(l.add(x, l.round_down(l.mul(cube, l.splat(GELU.0)))));
    let t = tanh(l, l.round_down(l.mul(inner, l.splat(GELU.1))));
    let one_plus = l.round_down(l.add(t, l.splat(1.0)));
    l.round_down(l.mul(l.mul(x, l.splat(0.5)), one_plus))
}
