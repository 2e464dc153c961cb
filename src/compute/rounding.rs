//! How a datapath rounds what an elementwise kernel stores: the one difference between kernels that are otherwise alike.

use super::lanes::Lanes;

/// What happens to an f32 result before it is stored as bf16; the store itself rounds to nearest even.
pub(super) trait Rounding: Copy {
    fn round<L: Lanes>(self, l: L, v: L::F) -> L::F;
}

/// To nearest even: the store's own. Datapath `ieee`.
#[derive(Clone, Copy)]
pub(super) struct Nearest;

/// Toward minus infinity. Datapath `npu2`, where no kernel sets the rounding mode.
#[derive(Clone, Copy)]
pub(super) struct Down;

impl Rounding for Nearest {
    #[inline(always)]
    fn round<L: Lanes>(self, _: L, v: L::F) -> L::F {
        v
    }
}

impl Rounding for Down {
    #[inline(always)]
    fn round<L: Lanes>(self, l: L, v: L::F) -> L::F {
        l.round_down(v)
    }
}
