//! The pool deals every piece once, in order, and survives panics.

use std::{collections::HashSet, time::Duration};

use rstest::rstest;

use super::*;

/// Logs every piece it deals.
struct Log<'a> {
    step: usize,
    pieces: usize,
    seen: &'a Mutex<Vec<(usize, usize)>>,
}

// SAFETY: writes behind a lock only.
unsafe impl Kernel for Log<'_> {
    fn run(&self, worker: &Worker<'_>) {
        loop {
            let piece = worker.claim();
            if piece >= self.pieces {
                break;
            }
            self.seen.lock().unwrap().push((self.step, piece));
        }
    }
}

#[rstest]
fn a_barrier_separates_kernels(#[values(1, 2, 3, 5)] threads: usize) {
    let pool = Pool::new(threads);
    for round in 0..200 {
        let seen = Mutex::new(Vec::new());
        let kernels: Vec<_> = (0..7).map(|step| Log { step, pieces: (step * 5 + round) % 11, seen: &seen }).collect();
        pool.run(&kernels.iter().map(|k| k as &dyn Kernel).collect::<Vec<_>>());
        let seen = seen.lock().unwrap();
        assert!(seen.is_sorted_by_key(|s| s.0), "{seen:?}");
        for kernel in &kernels {
            let mut pieces: Vec<_> = seen.iter().filter(|s| s.0 == kernel.step).map(|s| s.1).collect();
            pieces.sort_unstable();
            assert!(pieces.into_iter().eq(0..kernel.pieces), "{seen:?}");
        }
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
fn kernels_together_are_each_done_once(#[values(1, 2, 3, 5)] threads: usize) {
    let pool = Pool::new(threads);
    for round in 0..100 {
        let seen = Mutex::new(Vec::new());
        let log = |step: usize| Log { step, pieces: (step * 5 + round) % 11, seen: &seen };
        // SAFETY: they write behind a lock only.
        let together = unsafe { Together::new((0..4).map(|step| Box::new(log(step)) as Box<dyn Kernel>).collect()) };
        pool.run(&[&log(4), &together, &log(5)]);
        drop(together);
        let (first, last) = (log(4).pieces, log(5).pieces);
        let mut seen = seen.into_inner().unwrap();
        assert!(
            seen[..first].iter().all(|s| s.0 == 4) && seen[seen.len() - last..].iter().all(|s| s.0 == 5),
            "{seen:?}"
        );
        seen.sort_unstable();
        let all: Vec<_> =
            (0..6).flat_map(|step| (0..(step * 5 + round) % 11).map(move |piece| (step, piece))).collect();
        assert_eq!(seen, all);
    }
}

#[test]
fn the_others_do_take_part() {
    let pool = Pool::new(3);
    let names = Mutex::new(HashSet::new());
    for _ in 0..200 {
        pool.for_each(6, |_| {
            std::thread::sleep(Duration::from_millis(1));
            names.lock().unwrap().insert(std::thread::current().id());
        });
        if names.lock().unwrap().len() == 3 {
            return;
        }
    }
    panic!("only {} of 3 workers ever took part", names.lock().unwrap().len());
}

#[rstest]
fn a_panic_reaches_the_caller_and_the_pool_lives_on(#[values(1, 2, 3, 5)] threads: usize) {
    struct Bad(usize);
    // SAFETY: writes nothing.
    unsafe impl Kernel for Bad {
        fn run(&self, worker: &Worker<'_>) {
            loop {
                let piece = worker.claim();
                assert!(piece != self.0, "piece {piece} fails");
                if piece >= 9 {
                    break;
                }
            }
        }
    }
    let pool = Pool::new(threads);
    for bad in 0..9 {
        let seen = Mutex::new(Vec::new());
        let after = Log { step: 0, pieces: 5, seen: &seen };
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&[&Bad(bad), &after]))).unwrap_err();
        assert_eq!(caught.downcast_ref::<String>().unwrap(), &format!("piece {bad} fails"));
        assert!(seen.lock().unwrap().is_empty(), "no kernel runs after a failed one");
        pool.run(&[&after]);
        assert_eq!(seen.lock().unwrap().len(), 5);
    }
}

#[test]
fn a_panic_of_another_worker_reaches_the_caller() {
    let pool = Pool::new(2);
    let main = std::thread::current().id();
    for _ in 0..200 {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(4, |_| {
                std::thread::sleep(Duration::from_millis(1));
                assert!(std::thread::current().id() == main, "elsewhere");
            });
        }));
        if let Err(payload) = caught {
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"elsewhere"));
            return;
        }
    }
    panic!("the other worker never took part");
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
    std::thread::sleep(Duration::from_millis(20));
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

/// A kernel of one piece that notes which thread did it.
struct Alone<'a>(&'a Mutex<Vec<std::thread::ThreadId>>, bool);

// SAFETY: the piece is claimed once.
unsafe impl Kernel for Alone<'_> {
    fn run(&self, worker: &Worker<'_>) {
        if worker.claim() == 0 {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(std::thread::current().id());
            assert!(!self.1, "as asked");
        }
    }

    fn alone(&self) -> bool {
        true
    }
}

#[test]
fn kernels_of_one_piece_stay_with_the_caller_and_may_panic() {
    let pool = Pool::new(3);
    let seen = Mutex::new(vec![]);
    for _ in 0..200 {
        pool.run(&[&Alone(&seen, false), &Alone(&seen, false)]);
    }
    let here = std::thread::current().id();
    let seen_by = seen.lock().unwrap().clone();
    assert!(seen_by.len() == 400 && seen_by.iter().all(|id| *id == here));
    let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&[&Alone(&seen, true), &Alone(&seen, false)])));
    assert!(caught.is_err() && seen.lock().unwrap_or_else(PoisonError::into_inner).len() == 401);
    // Neither the turn nor the mark of being inside a kernel is left behind.
    pool.for_each(3, |_| ());
}
