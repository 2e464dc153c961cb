//! What a checkpoint is: its config, tensors, tokenizer, chat template and prompts, and where it is found.
//!
//! The only room that knows file formats. Knows nothing of kernels, devices or plans; judges nothing but whether
//! the files say one thing, completely, and whether that thing is in scope.

pub mod chat_template;
pub mod checkpoint;
pub mod config;
pub mod fetch;
pub mod gguf;
pub mod hashes;
pub mod locate;
pub mod manifest;
pub mod prompts;
pub mod safetensors_file;
pub mod tokenizer;

#[cfg(test)]
mod tests;

pub use checkpoint::{Accounting, Checkpoint, Weights};
pub use config::rope::{RopeKind, RopeParameters, RopeTable};
pub use config::{Architecture, Coverage, Difference, ModelConfig, TensorSpec};
pub use locate::{Located, fixture, locate, locate_in};
pub use manifest::{Manifest, Variant, fixtures};
pub use prompts::{Prompt, PromptSet};
pub use tokenizer::Tokenizer;
