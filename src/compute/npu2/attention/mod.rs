//! Attention as the NPU2's flash attention computes it.
//!
//! Keys pass in blocks of 64, in four stages that know nothing of each other and are merged at the end, the last first:
//! a cascade of four cores. Whatever passes from one step to the next is bf16, rounded to nearest even (the one kernel
//! beside the matrix ones that sets the rounding mode): scores, their maximum, probabilities, their sum, contexts, rescaling
//! factors, the inverse of the sum, and the constant `log2(e) / sqrt(head_dim)` too. Both products take BFP16 blocks, along
//! the head's dimension for the scores (in pieces of 64) and along the keys for the contexts. exp2 is the [unit](super::unit)'s
//! and makes two thirds of the error.
//!
//! A value shares its exponent with its seven neighbours along the keys, be they masked or not: on the silicon what lies
//! ahead of a token reaches it that far, and so it does here. Infinity and NaN ahead of it do not.
//!
//! The silicon takes lengths that are multiples of 256; others are cut into stages as if padded to one, which the padding
//! could not be told from. A head of 256 would pass in blocks of 32, which this does not follow.
//! Source: mlir-air's `attn_npu2.cc` and `attn_npu2.py`.

use half::bf16;

use crate::compute::{
    Isa,
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

mod block;
mod border;
mod scratch;
mod state;

use block::Share;

/// [`compute::Attention`](crate::compute::Attention) in the NPU2's arithmetic.
///
/// Shapes: `q`, `out` [S, heads * head_dim], `k`, `v` [S, kv_heads * head_dim], row-major; head_dim even.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Queries.
    pub q: Src<bf16>,
    /// Keys.
    pub k: Src<bf16>,
    /// Values.
    pub v: Src<bf16>,
    /// Contexts; may not overlap an input.
    pub out: Dst<bf16>,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether position i sees positions 0..=i only.
    pub causal: bool,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows and heads of `out`, each claimed once.
unsafe impl Kernel for Attention {
    fn run(&self, worker: &Worker<'_>) {
        let Attention { heads, kv_heads, head_dim, .. } = *self;
        assert!(kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), "attention: {heads} heads on {kv_heads}");
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "attention: head_dim {head_dim} is not even");
        let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
        let rows = self.q.len() / wide;
        assert_eq!(self.q.len(), rows * wide, "attention: q is not [S, {wide}]");
        assert_eq!(self.out.len(), rows * wide, "attention: out is not [{rows}, {wide}]");
        assert_eq!(self.k.len(), rows * narrow, "attention: k is not [{rows}, {narrow}]");
        assert_eq!(self.v.len(), rows * narrow, "attention: v is not [{rows}, {narrow}]");
        self.isa.dispatch(Share { kernel: self, rows, worker });
    }
}
