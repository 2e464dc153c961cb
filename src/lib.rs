//! Bring-up of Hugging Face decoder models on an AMD NPU2, gated phase by phase against HF transformers in bf16.
//!
//! The rooms, from the ground up; a room imports only rooms above it in this list (ARCHITECTURE.md, kept by a test):
//! `error`, `begun`, `random`, `tensor`, `settings` · `check` (the judge: pure) · `model` · `kernel` · `reference` · `compute` · `device` ·
//! `plan` · `runner` · `fault` · `explain` · `phase` · `report` · `harness` · `commands`.

pub mod begun;
pub mod check;
pub mod commands;
pub mod compute;
pub mod device;
pub mod error;
pub mod explain;
pub mod fault;
pub mod harness;
pub mod kernel;
pub mod model;
pub mod phase;
pub mod plan;
pub mod random;
pub mod reference;
pub mod report;
pub mod runner;
pub mod settings;
pub mod tensor;
