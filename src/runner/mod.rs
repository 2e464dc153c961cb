//! The production path: setup once, prefill, decode_step. `run`, `verify`, `profile` and every phase drive this and
//! nothing else.

mod alteration;
mod cache;
mod clock;
mod compiled;
mod execute;
pub mod external;
mod greedy;
mod hook;
mod host;
mod kv;
pub mod npu;
mod record;
mod sample;
#[cfg(test)]
mod tests;

pub use alteration::{Alteration, SharedHook, Sound};
pub use cache::{RunCache, RunKey, plan_hash};
pub use clock::{Clock, StepTime};
pub use greedy::{argmax, chosen_run, free_run, teacher_forced};
pub use hook::{Hook, StepContext, TapRecorder, TapRequest};
pub use kv::KvCache;
pub use npu::{Forced, NpuRunner, RunnerOptions};
pub use record::{Record, StepTiming};
pub use sample::{Sampler, Sampling};

use half::bf16;

use crate::device::{Counters, DeviceInfo};
use crate::error::Result;

/// Anything that can prefill a prompt and decode token by token.
///
/// Errors: a runner returns no logits from a run that did not complete.
pub trait Runner {
    fn info(&self) -> &DeviceInfo;

    /// Runs the whole prompt and gives the logits of its last position.
    ///
    /// Shapes: ids `[P]`, result `[vocab_size]`.
    fn prefill(&mut self, ids: &[u32]) -> Result<Vec<bf16>>;

    /// Runs one token at `position` (0-based, the number of positions before it) and gives its logits.
    fn decode_step(&mut self, token: u32, position: usize) -> Result<Vec<bf16>>;

    /// What the device has done so far.
    fn counters(&self) -> Counters;
}
