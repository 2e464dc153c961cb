//! A run's states as types, so that what XRT answers with an abort, a hang or garbage cannot be written down.
//!
//! [`Run`] is at rest: its arguments may be set, it can be started, it cannot be waited for. [`InFlight`] can be waited
//! for and nothing else; dropped, it leaks the run, where freeing would abort the process. Not completed is an answer of
//! its own and never a result.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use xrt_sys::Failure;

use super::handles::{Bo, Kernel, RawRun};

/// States of a command.
///
/// Source: ert_cmd_state of XRT.
const STATES: [&str; 12] = [
    "unknown",
    "ERT_CMD_STATE_NEW",
    "ERT_CMD_STATE_QUEUED",
    "ERT_CMD_STATE_RUNNING",
    "ERT_CMD_STATE_COMPLETED",
    "ERT_CMD_STATE_ERROR",
    "ERT_CMD_STATE_ABORT",
    "ERT_CMD_STATE_SUBMITTED",
    "ERT_CMD_STATE_TIMEOUT",
    "ERT_CMD_STATE_NORESPONSE",
    "ERT_CMD_STATE_SKERROR",
    "ERT_CMD_STATE_SKCRASHED",
];

const COMPLETED: u32 = 4;
const TIMEOUT: u32 = 8;
const NO_RESPONSE: u32 = 9;

/// A state by its name in XRT.
fn name(state: u32) -> &'static str {
    STATES.get(state as usize).unwrap_or(&STATES[0])
}

fn is_in_flight(state: u32) -> bool {
    matches!(state, 1 | 2 | 3 | 7)
}

/// A run at rest.
#[derive(Debug)]
pub struct Run {
    raw: RawRun,
    set: Vec<bool>,
}

/// A run that was started. Dropped, it leaks: freeing a run in flight aborts the process.
#[derive(Debug)]
#[must_use = "a run that is not waited for is leaked, and its result unknown"]
pub struct InFlight {
    run: ManuallyDrop<Run>,
    since: Instant,
}

/// How a run ended, if it did.
#[derive(Debug)]
pub enum Ended {
    Completed(Run, Duration),
    /// It ended in another state; nothing it wrote may be used. `reset` says that its context cannot be used either.
    Failed {
        run: Run,
        state: String,
        elapsed: Duration,
        reset: bool,
    },
    /// It has not ended within the limit. It stays with the device, and so does everything that it uses.
    Hung {
        state: String,
        elapsed: Duration,
    },
}

impl Run {
    /// A run of a kernel with that many arguments, none of them set.
    ///
    /// Errors: what XRT says.
    pub fn new(kernel: &Kernel, arguments: usize) -> Result<Run, Failure> {
        Ok(Run { raw: RawRun::new(kernel)?, set: vec![false; arguments] })
    }

    /// Sets an argument.
    ///
    /// Errors: what XRT says, of an argument that the kernel does not have too.
    pub fn set(&mut self, argument: usize, bo: &Bo) -> Result<(), Failure> {
        self.raw.set(argument, bo)?;
        if let Some(set) = self.set.get_mut(argument) {
            *set = true;
        }
        Ok(())
    }

    /// Starts it.
    ///
    /// Errors: the run, and an argument that is not set (XRT would hand a bogus address to the device) or what XRT says.
    pub fn start(mut self) -> Result<InFlight, (Box<Run>, String)> {
        if let Some(unset) = self.set.iter().position(|set| !set) {
            return Err((Box::new(self), format!("argument {unset} is not set")));
        }
        let since = Instant::now();
        match self.raw.start() {
            Ok(()) => Ok(InFlight { run: ManuallyDrop::new(self), since }),
            Err(failure) => Err((Box::new(self), failure.to_string())),
        }
    }
}

impl InFlight {
    /// Waits until it has ended, at most this long.
    ///
    /// XRT's own answers to an expired wait are ambiguous (an exception, or a state that also means that the device gave
    /// up): the run's state decides, and a last wait collects a run that has ended.
    pub fn wait(self, limit: Duration) -> Ended {
        let InFlight { run, since } = self;
        let milliseconds = limit.as_millis().clamp(1, u128::from(u32::MAX)) as u32;
        if let Ok(false) = run.raw.wait2(milliseconds) {
            // Completed is the only state that XRT returns without a failure.
            return Ended::Completed(ManuallyDrop::into_inner(run), since.elapsed());
        }
        let elapsed = || since.elapsed();
        let state = match run.raw.state() {
            Ok(state) => state,
            Err(failure) => return Ended::Hung { state: failure.to_string(), elapsed: elapsed() },
        };
        if is_in_flight(state) {
            return Ended::Hung { state: name(state).into(), elapsed: elapsed() };
        }
        let collected = run.raw.wait2(0);
        let run = ManuallyDrop::into_inner(run);
        match collected {
            Ok(false) if state == COMPLETED => Ended::Completed(run, elapsed()),
            _ => {
                let reset = matches!(state, TIMEOUT | NO_RESPONSE);
                Ended::Failed { run, state: name(state).into(), elapsed: elapsed(), reset }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_in_flight_completed_or_failed() {
        let in_flight: Vec<&str> = (0..20).filter(|&s| is_in_flight(s)).map(name).collect();
        assert_eq!(in_flight.len(), 4);
        assert!(!is_in_flight(COMPLETED) && name(COMPLETED).ends_with("COMPLETED"));
        assert!(
            name(TIMEOUT).ends_with("TIMEOUT") && name(NO_RESPONSE).ends_with("NORESPONSE") && name(99) == "unknown"
        );
    }
}
