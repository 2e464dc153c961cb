//! HF captures: what transformers computed for a checkpoint, read from `reference.safetensors` and never re-computed.
//!
//! Schema `phasegate.reference/1` (written by fixtures/hf/capture.py). A capture that is damaged, incomplete or made
//! for something else is refused by name. It knows nothing of the device; of `check` it uses the definition of KL alone.

mod capture;
mod identity;
mod lens;
mod metadata;
pub mod noise;
mod prompt;
mod schema;
mod sound;
mod tensors;

#[cfg(test)]
mod made;
#[cfg(test)]
mod tests;

pub use capture::{Capture, Nll, Rope};
pub use identity::Identity;
pub use lens::{Lens, TAPS, Tap};
pub use metadata::{CapturedPrompt, Provenance};
pub use prompt::{PromptCapture, Top};

/// The schema this room reads.
pub const SCHEMA: &str = "phasegate.reference/1";

/// Teacher-forced steps per prompt.
pub const STEPS: usize = 32;

/// Ids captured per step, or the vocabulary if smaller.
pub const TOP_IDS: usize = 64;
