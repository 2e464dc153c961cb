//! The kernels in the NPU2's own arithmetic.
//!
//! Not a model of an error but the steps themselves, as the kernels' sources and measurements on the silicon describe
//! them; nothing here is fitted to a figure. What rounds where:
//!
//! - [`Gemm`]: operands in [`bfp16`] blocks along K, f32 sums, one rounding to nearest even. GEMV has no block arithmetic
//!   on the silicon: [`compute::Gemv`](crate::compute::Gemv) is both datapaths' own, and so is
//!   [`compute::GemvAdd`](crate::compute::GemvAdd), which is told how often to round.
//! - [`Add`], [`BiasAdd`], [`SiluMul`], [`GeluTanh`], [`RmsNorm`], [`RmsNormDecode`], [`Rope`],
//!   [`LayerNorm`](super::LayerNorm) and [`Swiglu`](super::Swiglu) never set the core's rounding mode, whose default is toward minus infinity: every step that narrows to bf16 does so.
//! - [`Attention`]: block products, bf16 scores, probabilities, maxima, sums and contexts, all to nearest even, in four
//!   stages over the keys that are merged at the end.
//! - tanh and exp2 are the [special function unit](unit)'s piecewise linear ones.
//!
//! As everywhere in `compute`: bit-identical for any number of threads, NaN in is NaN out, infinity is never hidden (the
//! block format has none: it becomes NaN). Unlike on `ieee`, prefill and decode differ, for the silicon's kernels do; and
//! attention sees its length, which decides the stages.

mod attention;
mod bfp16;
mod elementwise;
mod gemm;
mod norm;
#[cfg(test)]
mod tests;
mod unit;

pub use attention::Attention;
pub use bfp16::{BLOCK, Blocks};
pub(super) use elementwise::{gelu, silu_times};
pub use gemm::{Gemm, Tier};
pub use norm::RmsNormDecode;
pub(super) use norm::rms_norm;

/// [`compute::SiluMul`](super::SiluMul), rounded after each of its last four steps.
pub type SiluMul = super::SiluMul<true>;
/// [`compute::Add`](super::Add), rounded down.
pub type Add = super::Add<true>;
/// [`compute::BiasAdd`](super::BiasAdd), rounded down.
pub type BiasAdd = super::BiasAdd<true>;
/// [`compute::GeluTanh`](super::GeluTanh), rounded after every step, its constants in bf16.
pub type GeluTanh = super::GeluTanh<true>;
/// [`compute::Rope`](super::Rope), rounded down.
pub type Rope = super::Rope<true>;
/// [`compute::RmsNorm`](super::RmsNorm) with squares, rstd and both products in bf16.
pub type RmsNorm = super::RmsNorm<true>;
