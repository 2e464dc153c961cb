//! A place where threads wait for a condition: spin for a while, then sleep.
//!
//! May not know what is waited for; [`Pool`](super::Pool) builds its start signal and its barrier from it.

use std::sync::{
    Condvar, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// Looks between two offers of the core to others.
const YIELD: u32 = 64;

#[derive(Debug, Default)]
pub(super) struct Gate {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    opened: Condvar,
}

impl Gate {
    /// Waits until `open` holds, looking `spins` times before sleeping.
    ///
    /// `open` must read with `SeqCst`, and whoever makes it true must write with `SeqCst` and then call
    /// [`Gate::notify`]: either the sleeper sees the change, or the notifier sees the sleeper.
    pub(super) fn wait(&self, spins: u32, open: impl Fn() -> bool) {
        for look in 1..=spins {
            if open() {
                return;
            }
            if look % YIELD == 0 {
                // Whoever we wait for may be waiting for this core.
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !open() {
            guard = self.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Makes every waiter look again.
    pub(super) fn notify(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // A sleeper holds the lock from its last look until it sleeps, so the notice cannot fall between.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.opened.notify_all();
        }
    }
}
