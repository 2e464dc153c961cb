//! Phase 5: is decode faster and still right?
//!
//! Each optimisation step is an experiment against the plan without it; see [`super::optimise`].

use super::Case;
use super::optimise::{self, Half};
use super::subject::Outline;

/// The name of its progress document.
pub const DOCUMENT: &str = "phase5_decode";

/// Every case of phase 5 for one model.
pub fn cases(outline: &Outline) -> Vec<Case> {
    optimise::cases(outline, Half::Decode)
}
