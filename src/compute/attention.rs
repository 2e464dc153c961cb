//! Attention over whole sequences (prefill) and for one new token (decode), grouped-query.
//!
//! Keys and values are packed first, once for all queries. Flash style: they pass in blocks of a fixed size with an
//! online softmax in f32, no [S, S] matrix exists, and blocks above the diagonal are skipped. Every row of a result sees
//! the same blocks in the same order whichever kernel computes it, so decode equals prefill bit for bit. May not let a
//! masked position touch a result, not even as 0 * NaN.

use half::bf16;

use super::{
    Isa,
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

mod block;
mod border;
mod cache;
mod positions;
mod scratch;
mod split;

use block::{Decode, Prefill};
pub use cache::PackedCache;
pub use positions::PackPositions;
pub(super) use positions::pack_values;
pub(super) use split::{Sight, Split};

/// `out = softmax(scale * q · kᵀ + mask) · v` for every head; head h reads kv head `h / (heads / kv_heads)`.
///
/// `scale`d scores and softmax in f32; the probabilities are rounded to bf16 as operand of the product with v, their sum
/// is not.
///
/// Shapes: `q`, `out` [n, heads * head_dim], row-major, of the positions from `first` on; keys and values of all `seq` positions as
/// [`PackPositions`] leaves them; head_dim even. Running it panics where they are not.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Queries.
    pub q: Src<bf16>,
    /// Packed keys and values.
    pub positions: Src<u32>,
    /// Contexts; may not overlap an input.
    pub out: Dst<bf16>,
    /// Position of the first query.
    pub first: usize,
    /// Positions there are.
    pub seq: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Factor of the scores, above 0.
    pub scale: f32,
    /// Whether position i sees positions 0..=i only.
    pub causal: bool,
    /// Instruction set.
    pub isa: Isa,
}

/// [`Attention`] for one query over the cached positions, bit for bit the row of the last of them.
///
/// Shapes: `q`, `out` [heads * head_dim]. Running it panics where they are not, and for an empty cache.
#[derive(Debug, Clone, Copy)]
pub struct DecodeAttention<'a> {
    /// Query.
    pub q: Src<bf16>,
    /// Keys and values, of one position at least.
    pub cache: &'a PackedCache,
    /// Context; may not overlap an input.
    pub out: Dst<bf16>,
    /// Query heads, a multiple of the cache's.
    pub heads: usize,
    /// Factor of the scores, above 0.
    pub scale: f32,
    /// Instruction set.
    pub isa: Isa,
}

fn check_heads(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) {
    assert!(kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), "attention: {heads} heads on {kv_heads}");
    assert!(head_dim > 0 && head_dim.is_multiple_of(2), "attention: head_dim {head_dim} is not even");
    // The largest score is looked for before they are scaled.
    assert!(scale > 0.0, "attention: scale {scale} is not positive");
}

// SAFETY: tasks are disjoint rows and heads of `out`, each claimed once.
unsafe impl Kernel for Attention {
    fn run(&self, worker: &Worker<'_>) {
        check_heads(self.heads, self.kv_heads, self.head_dim, self.scale);
        let wide = self.heads * self.head_dim;
        let rows = self.q.len() / wide;
        assert_eq!(self.q.len(), rows * wide, "attention: q is not [n, {wide}]");
        assert!(
            self.first + rows <= self.seq,
            "attention: queries {}..{} of {}",
            self.first,
            self.first + rows,
            self.seq
        );
        assert_eq!(self.out.len(), rows * wide, "attention: out is not [{rows}, {wide}]");
        let packed = PackPositions::len(self.kv_heads, self.head_dim, self.seq);
        assert_eq!(self.positions.len(), packed, "attention: positions are not {} packed ones", self.seq);
        self.isa.dispatch(Prefill { kernel: self, rows, worker });
    }
}

// SAFETY: tasks are disjoint heads of `out`, each claimed once.
unsafe impl Kernel for DecodeAttention<'_> {
    fn run(&self, worker: &Worker<'_>) {
        let positions::Layout { kv_heads, head_dim, .. } = self.cache.layout();
        check_heads(self.heads, kv_heads, head_dim, self.scale);
        let wide = self.heads * head_dim;
        assert!(!self.cache.is_empty(), "decode attention: no position");
        assert!(self.q.len() == wide && self.out.len() == wide, "decode attention: q or out is not [{wide}]");
        self.isa.dispatch(Decode { kernel: self, worker });
    }
}

#[cfg(test)]
mod tests;
