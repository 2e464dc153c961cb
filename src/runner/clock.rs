//! Times the steps of a run: a hook, so that a run without it pays nothing.

use std::time::Instant;

use super::{Hook, StepContext};
use crate::error::Result;
use crate::plan::{Op, Placement};

/// How long one step took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTime {
    pub step: String,
    /// A device call: handing over its arguments, wake-up, run. Otherwise the host's own work.
    pub on_device: bool,
    /// Units: nanoseconds.
    pub ns: u64,
}

/// Keeps the time of every step since it was last asked.
#[derive(Debug, Default)]
pub struct Clock {
    started: Option<Instant>,
    steps: Vec<StepTime>,
}

impl Clock {
    /// The steps since the last call, in order.
    pub fn take(&mut self) -> Vec<StepTime> {
        std::mem::take(&mut self.steps)
    }
}

impl Hook for Clock {
    fn before_step(&mut self, _: &mut StepContext<'_>) -> Result<()> {
        self.started = Some(Instant::now());
        Ok(())
    }

    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let ns = self.started.take().map_or(0, |started| started.elapsed().as_nanos() as u64);
        let on_device = cx.step.placement == Placement::Device && matches!(cx.step.op, Op::Dispatch(_));
        self.steps.push(StepTime { step: cx.step.name.clone(), on_device, ns });
        Ok(())
    }

    fn reads_rows(&self) -> bool {
        false
    }
}
