//! The compute library of the emulated device: CPU kernels, ISA dispatch, weight packing, worker pool.
//!
//! Datapath `ieee`: bf16 operands, f32 accumulation, one round-to-nearest-even to bf16 at the kernel border.
//! Results are bit-identical from run to run and for any number of threads: work is split over rows and columns
//! only, and every sum has one fixed order. On one ISA a row of [`Gemm`] equals [`Gemv`] bit for bit, and a row of
//! [`Attention`] equals [`DecodeAttention`], so prefill and decode agree. NaN in is NaN out; masked or padded
//! positions never reach a result.
//!
//! This module knows nothing of devices, buffers, models or plans: it sees views, shapes and packed weights.
//!
//! A kernel is a struct over raw [views](view) that implements [`Kernel`]; [`Pool::run`] executes a list of them with
//! one wake-up and a barrier between neighbours. [`Call`] runs one kernel on slices, safely.

mod arena;
mod attention;
mod call;
mod ceiling;
mod elementwise;
mod exp;
mod fused;
mod gate;
mod gemm;
mod isa;
mod lanes;
mod layer_norm;
mod norm;
pub mod npu2;
mod pack;
mod pool;
mod rope;
mod rounding;
mod scratch;
#[cfg(test)]
mod testing;
mod tile;
mod view;

pub(crate) use arena::{HUGE_PAGE, ask_for_huge_pages};
pub use attention::{Attention, DecodeAttention, PackPositions, PackedCache};
pub use call::Call;
pub use ceiling::Ceiling;
pub use elementwise::{Add, BiasAdd, GeluTanh, SiluMul};
pub use fused::{GemvAdd, Swiglu};
pub use gemm::{Gemm, Gemv, Gemvs, Out};
pub use isa::{Isa, ParseIsaError};
pub use layer_norm::LayerNorm;
pub use norm::RmsNorm;
pub use pack::PackedWeight;
pub(crate) use pool::Together;
pub use pool::{Kernel, Pool, Worker};
pub use rope::Rope;
pub use view::{Dst, Src};
