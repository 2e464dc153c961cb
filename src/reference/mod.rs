//! HF captures.
