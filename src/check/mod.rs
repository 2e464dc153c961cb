//! The judge: numbers in, verdicts out. Pure: no file, no device, no clock, and no code of what it judges; it imports
//! `error` and nothing else of this crate (kept by a test).
//!
//! Order of every check: shape, then NaN and infinity, then extent, then the figure. A figure that does not exist
//! (NaN somewhere, nothing compared) is NaN, and every gate is written so that NaN fails it.

pub mod agreement;
pub mod extent;
pub mod floor;
pub mod layers;
pub mod logits;
pub mod metrics;
pub mod position_cosine;
pub mod quantile;
pub mod token_set;
pub mod tolerance;
pub mod ulp;
pub mod verdict;

#[cfg(test)]
mod laws;

pub use extent::Extent;
pub use metrics::Metrics;
pub use position_cosine::PositionCosine;
pub use quantile::Summary;
pub use verdict::{Outcome, Verdict};

use crate::error::{Error, Result};

/// Refuses a pair of other shapes.
///
/// Errors: [`Error::Comparison`] naming `what` and both shapes.
fn same_shape(what: &str, device: &[usize], reference: &[usize]) -> Result<()> {
    if device == reference {
        return Ok(());
    }
    Err(Error::comparison(what, format!("shape {device:?}"), format!("{reference:?}, the reference's")))
}
