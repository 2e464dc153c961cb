//! The kernels in the NPU2's own arithmetic.
//!
//! Not a model of an error but the steps themselves, as the kernels' sources and measurements on the silicon describe
//! them; nothing here is fitted to a figure. What rounds where:
//!
//! - [`Gemm`]: operands in [`bfp16`] blocks along K, f32 sums, one rounding to nearest even. GEMV has no block arithmetic
//!   on the silicon: [`compute::Gemv`](crate::compute::Gemv) is both datapaths' own, and so is
//!   [`compute::GemvAdd`](crate::compute::GemvAdd), which is told how often to round.
//! - [`Add`], [`BiasAdd`], [`SiluMul`], [`GeluTanh`], [`RmsNorm`], [`RmsNormDecode`], [`LayerNorm`], [`Rope`], [`Swiglu`]
//!   never set the core's rounding mode, whose default is toward minus infinity: every step that narrows to bf16 does so.
//! - [`Attention`]: block products, bf16 scores, probabilities, maxima, sums and contexts, all to nearest even, in four
//!   stages over the keys that are merged at the end.
//! - tanh and exp2 are the [special function unit](unit)'s piecewise linear ones.
//!
//! As everywhere in `compute`: bit-identical for any number of threads, NaN in is NaN out, infinity is never hidden (the
//! block format has none: it becomes NaN). Unlike on `ieee`, prefill and decode differ, for the silicon's kernels do; and
//! attention sees its length, which decides the stages.

mod attention;
mod bfp16;
mod call;
mod elementwise;
mod fused;
mod gemm;
mod norm;
mod rope;
#[cfg(test)]
mod tests;
mod unit;

pub use attention::Attention;
pub use bfp16::{BLOCK, Blocks};
pub use call::Call;
pub use elementwise::{Add, BiasAdd, GeluTanh, SiluMul};
pub use fused::{LayerNorm, Swiglu};
pub use gemm::{Gemm, Tier};
pub use norm::{RmsNorm, RmsNormDecode};
pub use rope::Rope;
