//! The device's own thread: takes commands in order and completes them.

use std::ffi::c_int;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::{DONE, State, WORK, state};
use crate::fault::{self, Fault};
use crate::packet;

/// One command.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub fd: c_int,
    pub context: u32,
    pub command: u32,
    pub sequence: u64,
    /// What is to go wrong with it.
    pub fault: Option<Fault>,
}

/// Hands a command to the thread, which is started with the first: after a `fork` a child starts its own.
pub fn submit(state: &mut State, job: Job) {
    static OWNER: AtomicU32 = AtomicU32::new(0);
    if OWNER.swap(std::process::id(), Ordering::Relaxed) != std::process::id() {
        std::thread::spawn(work);
    }
    state.jobs.push_back(job);
    WORK.notify_one();
}

fn work() {
    let mut state = state();
    loop {
        let Some(job) = state.jobs.pop_front() else {
            state = WORK.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        std::thread::sleep(fault::delay());
        // A hung command stays as it is, and its context with it.
        let hung = job.fault == Some(Fault::Hang);
        if !hung {
            packet::run(job.fd, job.command, job.fault);
        }
        state = self::state();
        if !hung && let Some(context) = state.device(job.fd).and_then(|device| device.contexts.get_mut(&job.context)) {
            context.done = job.sequence + 1;
            DONE.notify_all();
        }
    }
}
