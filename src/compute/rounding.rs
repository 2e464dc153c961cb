//! How a kernel that both datapaths have rounds: the one difference between kernels that are otherwise alike.

use super::lanes::Lanes;

/// `v`, on the NPU2 rounded to bf16 toward minus infinity, for no kernel there sets the rounding mode; else as it is, for a
/// store rounds to nearest even.
#[inline(always)]
pub(super) fn narrow<L: Lanes, const NPU2: bool>(l: L, v: L::F) -> L::F {
    if NPU2 { l.round_down(v) } else { v }
}
