//! Phase 4: is prefill faster and still right?
//!
//! Each optimisation step is an experiment against the plan without it; see [`super::optimise`].

use super::Case;
use super::optimise::{self, Half};
use super::subject::Outline;

/// The name of its progress document.
pub const DOCUMENT: &str = "phase4_prefill";

/// Every case of phase 4 for one model.
pub fn cases(outline: &Outline) -> Vec<Case> {
    optimise::cases(outline, Half::Prefill)
}
