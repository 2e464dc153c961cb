//! Rotary position embedding: f32 sums of unrounded products, one rounding toward minus infinity.
//!
//! Source: mlir-air's `rope_halfsplit.cc`, which never sets the rounding mode.

use half::bf16;

use crate::compute::{
    Isa,
    pool::{Kernel, Worker},
    rope::Share,
    rounding::Down,
    view::{Dst, Src},
};

/// [`compute::Rope`](crate::compute::Rope) rounded down. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// Rows, one per token and head.
    pub x: Src<bf16>,
    /// cos and sin of every row.
    pub lut: Src<bf16>,
    /// Rotated rows.
    pub y: Dst<bf16>,
    /// Length of a row, even.
    pub head_dim: usize,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for Rope {
    fn run(&self, worker: &Worker<'_>) {
        let Rope { x, lut, y, head_dim, isa } = *self;
        Share { x, lut, y, head_dim, rounding: Down, worker }.run(isa);
    }
}
