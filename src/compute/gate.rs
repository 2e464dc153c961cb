//! A gate that threads wait at: spin for a while, then sleep.
//!
//! May not know what is waited for; [`Pool`](super::Pool) builds its start signal and its barrier from it.

use std::sync::{
    Condvar, Mutex, PoisonError,
    atomic::{AtomicU32, AtomicUsize, Ordering},
};

/// A counter of openings; a waiter passes once the counter has left the value it last saw.
#[derive(Debug, Default)]
pub(super) struct Gate {
    openings: AtomicU32,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    opened: Condvar,
}

impl Gate {
    /// The number of openings so far, to be passed to [`Gate::wait`].
    pub(super) fn seen(&self) -> u32 {
        self.openings.load(Ordering::Acquire)
    }

    /// Lets every waiter pass; what was written before happens before they go on.
    pub(super) fn open(&self) {
        // SeqCst on the counter and on `sleepers`: either the sleeper sees the new count, or we see the sleeper.
        self.openings.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // A sleeper holds the lock from its last look at the counter until it sleeps, so the notice cannot fall between.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.opened.notify_all();
        }
    }

    /// Waits until the gate has been opened since it was `seen`, looking `spins` times before sleeping.
    pub(super) fn wait(&self, seen: u32, spins: u32) -> u32 {
        for _ in 0..spins {
            let now = self.seen();
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let now = loop {
            let now = self.openings.load(Ordering::SeqCst);
            if now != seen {
                break now;
            }
            guard = self.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        now
    }
}
