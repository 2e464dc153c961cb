//! Bring-up of Hugging Face decoder models on an NPU, gated phase by phase.
