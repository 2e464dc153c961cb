//! How a plan is carried out: the choices of phases 4 and 5. None changes what is computed.

use super::{Plan, merge, share};
use crate::error::Result;

/// The default is what `run` and `verify` do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// The host writes weights and tables again before each dispatch that reads them.
    pub write_statics: bool,
    /// The host writes every other argument before each dispatch: what an earlier one left is read back and handed over
    /// again, an output is filled with NaN.
    pub write_intermediates: bool,
    /// Intermediates share memory where their lives allow it.
    pub share: bool,
    /// One dispatch between two hard stops.
    pub merge: bool,
}

impl Tuning {
    /// The unoptimised plan: one launch per dispatch, every buffer written at every call. Phase 3 validates it first.
    pub const BASELINE: Tuning = Tuning { write_statics: true, write_intermediates: true, share: false, merge: false };

    /// The plan carried out like this.
    ///
    /// Errors: [`crate::error::Error::Plan`] when the result would break a plan's rules.
    pub fn apply(&self, plan: Plan) -> Result<Plan> {
        let plan = if self.merge { merge(plan) } else { plan };
        let plan = if self.share { share(plan) } else { plan };
        plan.check()?;
        Ok(plan)
    }
}
