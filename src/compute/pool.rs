//! Persistent workers that execute lists of kernels.
//!
//! One wake-up per list, a barrier between neighbours. The pool may not look into a kernel: it hands out shares and
//! brings a panic back to the caller. Which worker computes what must not show in any result.

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

/// Looks at a gate before a worker sleeps: some tens of microseconds, more than the host needs between two dispatches.
const SPINS: u32 = 4000;

/// One worker's part in the run of one kernel.
#[derive(Debug)]
pub struct Worker<'a> {
    index: usize,
    count: usize,
    next: &'a AtomicUsize,
}

impl Worker<'_> {
    /// This worker's number; the caller of [`Pool::run`] is 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many workers run this kernel.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes the next piece of this kernel's work: over all workers 0, 1, 2, ... each exactly once.
    ///
    /// A worker that the system has put aside then holds up its own piece only, not its share of the whole.
    pub fn claim(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

/// Work that a pool can share out.
///
/// # Safety
/// Calls of `run` with different workers of one run happen at the same time: they must write disjoint memory, and
/// together do all the work for any number of workers. The result must not depend on that number.
pub unsafe trait Kernel: Sync {
    /// Does this worker's share.
    fn run(&self, worker: &Worker<'_>);
}

/// A fixed set of workers; the calling thread is one of them. Dropping the pool ends and joins the others.
pub struct Pool {
    shared: Arc<Shared>,
    /// Whoever holds it owns the workers for one list of kernels.
    turn: Mutex<()>,
    others: Vec<JoinHandle<()>>,
}

struct Shared {
    count: usize,
    spins: u32,
    start: Gate,
    barrier: Gate,
    arrived: AtomicUsize,
    next: AtomicUsize,
    job: UnsafeCell<Job>,
    failed: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
enum Job {
    Run(*const [&'static dyn Kernel]),
    Stop,
}

// SAFETY: `job` is written by the thread that owns the turn while every other worker waits at `start`, and read by
// them after it opened; the kernels it points to are `Sync` and outlive the run. The rest is atomics and locks.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

thread_local! {
    static INSIDE_KERNEL: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool of `threads` workers (at least one), of which `threads - 1` are new threads.
    pub fn new(threads: usize) -> Pool {
        let count = threads.max(1);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            count,
            // More workers than cores: whoever spins keeps the one it waits for from running.
            spins: if count <= cores { SPINS } else { 1 },
            start: Gate::default(),
            barrier: Gate::default(),
            arrived: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job::Stop),
            failed: AtomicBool::new(false),
            payload: Mutex::new(None),
        });
        // Read here, not in the thread: a thread that starts after the first `run` must still see its opening.
        let seen = shared.start.seen();
        let others = (1..count)
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{index}"))
                    .spawn(move || shared.serve(index, seen))
                    .expect("the system refused a worker thread")
            })
            .collect();
        Pool { shared, turn: Mutex::new(()), others }
    }

    /// How many workers there are, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.count
    }

    /// Executes `kernels` one after the other, each on all workers, with a barrier after each.
    ///
    /// Panics if a kernel panics, with its payload and after all workers have stopped (later kernels do not run), and
    /// if called from inside a kernel. Calls from several threads take turns.
    pub fn run(&self, kernels: &[&dyn Kernel]) {
        assert!(!INSIDE_KERNEL.get(), "a kernel may not call Pool::run");
        if kernels.is_empty() {
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; every worker is done with the kernels when `work` returns, since it
        // reads none after the last barrier.
        let erased = unsafe { std::mem::transmute::<*const [&dyn Kernel], *const [&'static dyn Kernel]>(kernels) };
        if shared.count > 1 {
            // SAFETY: we own the turn and the workers wait at `start`, so nobody reads `job` now.
            unsafe { *shared.job.get() = Job::Run(erased) };
            shared.start.open();
        }
        INSIDE_KERNEL.set(true);
        shared.work(0, kernels);
        INSIDE_KERNEL.set(false);
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

    /// Calls `body(i)` once for every `i` in `0..items`, shared out dynamically.
    pub fn for_each(&self, items: usize, body: impl Fn(usize) + Sync) {
        self.run(&[&ForEach { items, body }]);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.others.is_empty() {
            // SAFETY: `&mut self`: no run is under way, all workers wait at `start`.
            unsafe { *self.shared.job.get() = Job::Stop };
            self.shared.start.open();
        }
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
    fn serve(&self, index: usize, mut seen: u32) {
        INSIDE_KERNEL.set(true);
        loop {
            seen = self.start.wait(seen, self.spins);
            // SAFETY: `start` was opened after `job` was written, and it is not written again before we wait there.
            match unsafe { *self.job.get() } {
                // SAFETY: the caller keeps the list alive until the last barrier of `work`.
                Job::Run(kernels) => self.work(index, unsafe { &*kernels }),
                Job::Stop => return,
            }
        }
    }

    fn work(&self, index: usize, kernels: &[&dyn Kernel]) {
        let worker = Worker { index, count: self.count, next: &self.next };
        let mut left = kernels.len();
        for kernel in kernels {
            // Relaxed: the barrier orders it. Whoever misses a failure of this very kernel does no harm.
            if !self.failed.load(Ordering::Relaxed)
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| kernel.run(&worker)))
            {
                self.failed.store(true, Ordering::Relaxed);
                self.payload.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
            left -= 1;
            // Nothing after this call may touch the list if it was the last: the caller may be gone.
            self.meet(left == 0 && index != 0);
        }
    }

    /// The barrier. `leave`: the thread only reports that it has arrived and does not wait.
    fn meet(&self, leave: bool) {
        let seen = self.barrier.seen();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            self.next.store(0, Ordering::Relaxed);
            self.barrier.open();
        } else if !leave {
            self.barrier.wait(seen, self.spins);
        }
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
mod tests {
    use rstest::rstest;

    use super::*;

    struct Log<'a> {
        step: usize,
        seen: &'a Mutex<Vec<(usize, usize)>>,
    }

    // SAFETY: writes behind a lock only.
    unsafe impl Kernel for Log<'_> {
        fn run(&self, worker: &Worker<'_>) {
            self.seen.lock().unwrap().push((self.step, worker.index()));
        }
    }

    #[rstest]
    fn a_barrier_separates_kernels(#[values(1, 2, 3, 5)] threads: usize) {
        let pool = Pool::new(threads);
        for _ in 0..50 {
            let seen = Mutex::new(Vec::new());
            let kernels: Vec<_> = (0..7).map(|step| Log { step, seen: &seen }).collect();
            pool.run(&kernels.iter().map(|k| k as &dyn Kernel).collect::<Vec<_>>());
            let seen = seen.into_inner().unwrap();
            assert_eq!(seen.len(), 7 * threads);
            assert!(seen.is_sorted_by_key(|s| s.0), "{seen:?}");
        }
    }

    #[rstest]
    fn for_each_deals_every_item_once(#[values(1, 2, 3, 5)] threads: usize) {
        let pool = Pool::new(threads);
        for items in [0, 1, 2, 17, 1000] {
            let hits: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(items, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[rstest]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on(#[values(1, 2, 3, 5)] threads: usize) {
        let pool = Pool::new(threads);
        let after = AtomicUsize::new(0);
        struct Count<'a>(&'a AtomicUsize);
        // SAFETY: atomic.
        unsafe impl Kernel for Count<'_> {
            fn run(&self, _: &Worker<'_>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        for bad in 0..threads {
            struct Bad(usize);
            // SAFETY: writes nothing.
            unsafe impl Kernel for Bad {
                fn run(&self, worker: &Worker<'_>) {
                    assert!(worker.index() != self.0, "worker {} fails", self.0);
                }
            }
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&[&Bad(bad), &Count(&after)]))).unwrap_err();
            assert_eq!(caught.downcast_ref::<String>().unwrap(), &format!("worker {bad} fails"));
            assert_eq!(after.load(Ordering::Relaxed), 0, "no kernel runs after a failed one");
        }
        pool.run(&[&Count(&after)]);
        assert_eq!(after.load(Ordering::Relaxed), threads);
    }

    #[test]
    fn a_run_inside_a_kernel_is_refused_not_a_deadlock() {
        let pool = Pool::new(2);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.for_each(4, |_| pool.for_each(1, |_| ()))));
        assert!(caught.is_err());
        pool.for_each(3, |_| ());
    }

    #[test]
    fn drop_joins_even_when_workers_sleep() {
        let pool = Pool::new(4);
        pool.for_each(8, |_| ());
        std::thread::sleep(std::time::Duration::from_millis(20));
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        assert!(shared.upgrade().is_none(), "a worker still holds the pool");
        drop(Pool::new(3));
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.for_each(10, |i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 100 * 45);
    }
}
