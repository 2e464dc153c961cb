//! Workers that execute lists of kernels.
//!
//! One wake-up per list, a barrier between neighbours. Nobody waits for a worker that sleeps or that the system has put
//! aside: the run goes on with those who are there, others join at the kernel under way, and the barrier counts members
//! only. So a small list on a busy machine costs what the caller alone needs. The pool may not look into a kernel, and who
//! computes what must not show in any result.

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use super::gate::Gate;

mod phase;

use phase::{MAX_MEMBERS, MAX_STEPS, Phase, Place};

/// Looks at a gate before a worker sleeps: some tens of microseconds, more than the host needs between two dispatches.
const SPINS: u32 = 1500;

/// One worker's part in the run of one kernel.
#[derive(Debug)]
pub struct Worker<'a> {
    index: usize,
    next: &'a AtomicUsize,
}

impl Worker<'_> {
    /// This worker's number, below [`Pool::threads`]; the caller of [`Pool::run`] is 0. Not every number takes part.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Takes the next piece of this kernel's work: over all workers 0, 1, 2, ... each exactly once.
    pub fn claim(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

/// Work that a pool can share out.
///
/// # Safety
/// From one to [`Pool::threads`] workers call `run` at the same time, and a worker may call it again when all is done. All
/// of the work must be shared out by [`Worker::claim`] (a fixed share of an absent worker would stay undone), pieces must
/// write disjoint memory, and the result must not depend on who does which.
pub unsafe trait Kernel: Sync {
    /// Does pieces of the work until none is left.
    fn run(&self, worker: &Worker<'_>);

    /// Whether there is only one piece: then nobody else is called.
    fn alone(&self) -> bool {
        false
    }
}

/// Elements that one thread passes over sooner than another one is awake.
pub(super) const ALONE: usize = 8192;

/// Elements of a task of a kernel that passes over `len`: enough to hide taking it, and of many a long stretch, which the CPU
/// sees coming.
pub(super) fn stretch(len: usize) -> usize {
    (len / 64).clamp(ALONE, 65536).next_multiple_of(64)
}

/// A fixed set of workers; the calling thread is one of them. Dropping the pool ends and joins the others.
pub struct Pool {
    shared: Arc<Shared>,
    /// Whoever holds it owns the workers for one list of kernels.
    turn: Mutex<()>,
    others: Vec<JoinHandle<()>>,
}

struct Shared {
    spins: u32,
    phase: Phase,
    start: Gate,
    barrier: Gate,
    /// Claims of the even and of the odd kernels; the one not in use is cleared before it is.
    next: [Padded; 2],
    job: UnsafeCell<*const [&'static dyn Kernel]>,
    stop: AtomicBool,
    failed: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A counter with a cache line of its own: every claim takes the line away from all others.
#[repr(align(128))]
struct Padded(AtomicUsize);

// SAFETY: `job` is written by the thread that owns the turn while no run is open, and read by members of an open run only,
// which closes after they have all arrived; the kernels it points to are `Sync`. The rest is atomics and locks.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

thread_local! {
    static INSIDE_KERNEL: Cell<bool> = const { Cell::new(false) };
}

/// This thread is inside a kernel as long as the value lives, a panic included.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        INSIDE_KERNEL.set(true);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE_KERNEL.set(false);
    }
}

impl Pool {
    /// A pool of `threads` workers (at least one), of which `threads - 1` are new threads.
    pub fn new(threads: usize) -> Pool {
        let count = threads.clamp(1, MAX_MEMBERS);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            // More workers than cores: whoever spins keeps the one it waits for from running.
            spins: if count <= cores { SPINS } else { 1 },
            phase: Phase::new(),
            start: Gate::default(),
            barrier: Gate::default(),
            next: [Padded(AtomicUsize::new(0)), Padded(AtomicUsize::new(0))],
            job: UnsafeCell::new(&[]),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            payload: Mutex::new(None),
        });
        let others = (1..count)
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{index}"))
                    .spawn(move || shared.serve(index))
                    .expect("the system refused a worker thread")
            })
            .collect();
        Pool { shared, turn: Mutex::new(()), others }
    }

    /// How many workers there are, the caller included.
    pub fn threads(&self) -> usize {
        self.others.len() + 1
    }

    /// Executes `kernels` one after the other, each on all workers at hand, with a barrier after each.
    ///
    /// Panics if a kernel panics, with its payload and after all workers have stopped (later kernels do not run), and
    /// if called from inside a kernel. Calls from several threads take turns.
    pub fn run(&self, kernels: &[&dyn Kernel]) {
        assert!(!INSIDE_KERNEL.get(), "a kernel may not call Pool::run");
        assert!(kernels.len() < MAX_STEPS, "too many kernels in one run");
        if kernels.is_empty() {
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if kernels.iter().all(|kernel| kernel.alone()) {
            let _inside = Inside::enter();
            for kernel in kernels {
                kernel.run(&Worker { index: 0, next: &AtomicUsize::new(0) });
            }
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; members alone read the kernels, and `work` returns after all have arrived.
        let erased = unsafe { std::mem::transmute::<*const [&dyn Kernel], *const [&'static dyn Kernel]>(kernels) };
        // SAFETY: we own the turn and no run is open, so nobody reads `job` now.
        unsafe { *shared.job.get() = erased };
        shared.next[0].0.store(0, Ordering::Relaxed);
        let place = shared.phase.open();
        shared.start.notify();
        {
            let _inside = Inside::enter();
            shared.work(0, place, kernels);
        }
        let payload = if shared.failed.swap(false, Ordering::Relaxed) {
            shared.payload.lock().unwrap_or_else(PoisonError::into_inner).take()
        } else {
            None
        };
        drop(turn);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    /// Calls `body(i)` once for every `i` in `0..items`, shared out as workers get free.
    pub fn for_each(&self, items: usize, body: impl Fn(usize) + Sync) {
        self.run(&[&ForEach { items, body }]);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.start.notify();
        for other in self.others.drain(..) {
            // A worker catches every panic of a kernel, so there is nothing to learn from the result.
            let _ = other.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Shared {
    fn serve(&self, index: usize) {
        INSIDE_KERNEL.set(true);
        // The number of the run this worker has had its part in. Should it sleep through so many runs that the number
        // comes round, it misses one more.
        let mut last = 0;
        loop {
            let stopped = || self.stop.load(Ordering::SeqCst);
            self.start.wait(self.spins, || self.phase.is_open(last) || stopped());
            if stopped() {
                return;
            }
            if let Some(place) = self.phase.join() {
                last = place.run;
                // SAFETY: as a member we may read the job, which was written before the run was opened; the caller keeps
                // the list alive until all members have arrived at the end.
                self.work(index, place, unsafe { &**self.job.get() });
            }
        }
    }

    /// A member's way from `place` to the end of the list.
    fn work(&self, index: usize, mut place: Place, kernels: &[&dyn Kernel]) {
        let steps = kernels.len();
        loop {
            let worker = Worker { index, next: &self.next[place.step % 2].0 };
            // Relaxed: the barrier orders it. Whoever misses a failure of this very kernel does no harm.
            if !self.failed.load(Ordering::Relaxed)
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| kernels[place.step].run(&worker)))
            {
                self.failed.store(true, Ordering::Relaxed);
                self.payload.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
            // Nobody claims from the other counter: its last users have arrived, its next ones wait for us.
            self.next[(place.step + 1) % 2].0.store(0, Ordering::Relaxed);
            let end = place.step + 1 == steps;
            // After this call nothing of the list may be touched at its end: the caller may be gone.
            if self.phase.arrive(steps) {
                self.barrier.notify();
            } else if !end || index == 0 {
                self.barrier.wait(self.spins, || self.phase.has_left(place));
            }
            if end {
                return;
            }
            place.step += 1;
        }
    }
}

/// Kernels that do not touch each other's memory, as one: whoever is done with its share of the first goes on with the next,
/// and nobody waits between them.
pub struct Together<'a> {
    kernels: Vec<(Box<dyn Kernel + 'a>, Padded)>,
}

impl<'a> Together<'a> {
    /// The work of all `kernels`, once: for one run.
    ///
    /// # Safety
    /// No kernel writes what another reads or writes.
    pub unsafe fn new(kernels: Vec<Box<dyn Kernel + 'a>>) -> Together<'a> {
        Together { kernels: kernels.into_iter().map(|kernel| (kernel, Padded(AtomicUsize::new(0)))).collect() }
    }
}

// SAFETY: each kernel deals out its own work by a counter of its own, and they do not meet, as the constructor demands.
unsafe impl Kernel for Together<'_> {
    fn run(&self, worker: &Worker<'_>) {
        for (kernel, next) in &self.kernels {
            kernel.run(&Worker { index: worker.index, next: &next.0 });
        }
    }

    fn alone(&self) -> bool {
        self.kernels.iter().all(|(kernel, _)| kernel.alone())
    }
}

struct ForEach<F> {
    items: usize,
    body: F,
}

// SAFETY: `body` is `Sync` and safe to call at the same time; `claim` deals every index once.
unsafe impl<F: Fn(usize) + Sync> Kernel for ForEach<F> {
    fn run(&self, worker: &Worker<'_>) {
        loop {
            let i = worker.claim();
            if i >= self.items {
                break;
            }
            (self.body)(i);
        }
    }
}

#[cfg(test)]
mod tests;
