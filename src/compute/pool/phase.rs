//! The state of a run in one atomic word: who takes part, and how far they are.
//!
//! May not know what a kernel is; it only counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// A worker's place in a run: the run's number and the kernel it is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) run: u16,
    pub(super) step: usize,
}

/// The word, unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    run: u16,
    /// The kernel under way, or [`CLOSED`].
    step: u64,
    /// Workers that take part from this kernel on.
    members: u64,
    /// Members that have finished it.
    arrived: u64,
}

const STEP_BITS: u32 = 24;
const COUNT_BITS: u32 = 12;
const CLOSED: u64 = (1 << STEP_BITS) - 1;

/// Kernels in a run at most.
pub(super) const MAX_STEPS: usize = CLOSED as usize;
/// Workers of a pool at most.
pub(super) const MAX_MEMBERS: usize = (1 << COUNT_BITS) - 1;

impl State {
    fn pack(self) -> u64 {
        (((u64::from(self.run) << STEP_BITS | self.step) << COUNT_BITS | self.members) << COUNT_BITS) | self.arrived
    }

    fn unpack(word: u64) -> State {
        let part = |shift: u32, bits: u32| word >> shift & ((1 << bits) - 1);
        State {
            run: (word >> (STEP_BITS + 2 * COUNT_BITS)) as u16,
            step: part(2 * COUNT_BITS, STEP_BITS),
            members: part(COUNT_BITS, COUNT_BITS),
            arrived: part(0, COUNT_BITS),
        }
    }
}

/// Runs, one after the other; all operations are `SeqCst`, as [`Gate`](super::Gate) needs.
#[derive(Debug)]
pub(super) struct Phase(AtomicU64);

impl Phase {
    pub(super) fn new() -> Phase {
        Phase(AtomicU64::new(State { run: 0, step: CLOSED, members: 0, arrived: 0 }.pack()))
    }

    fn state(&self) -> State {
        State::unpack(self.0.load(Ordering::SeqCst))
    }

    /// Opens the next run with the caller as its only member. Only after the last one is closed.
    pub(super) fn open(&self) -> Place {
        let run = self.state().run.wrapping_add(1);
        self.0.store(State { run, step: 0, members: 1, arrived: 0 }.pack(), Ordering::SeqCst);
        Place { run, step: 0 }
    }

    /// Whether a run other than `last` is under way.
    pub(super) fn is_open(&self, last: u16) -> bool {
        let state = self.state();
        state.step != CLOSED && state.run != last
    }

    /// Becomes a member of the run under way, if there is one.
    pub(super) fn join(&self) -> Option<Place> {
        let add = |word| {
            let state = State::unpack(word);
            (state.step != CLOSED).then(|| State { members: state.members + 1, ..state }.pack())
        };
        let before = State::unpack(self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).ok()?);
        Some(Place { run: before.run, step: before.step as usize })
    }

    /// Reports that a member has finished its step of a run of `steps`; true if it was the last one and the run went on
    /// (or, after the last step, closed) by that.
    pub(super) fn arrive(&self, steps: usize) -> bool {
        let add = |word| {
            let state = State::unpack(word);
            let arrived = state.arrived + 1;
            let next = if arrived < state.members {
                State { arrived, ..state }
            } else {
                let step = state.step + 1;
                State { step: if step == steps as u64 { CLOSED } else { step }, arrived: 0, ..state }
            };
            Some(next.pack())
        };
        let before = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).expect("always a next state");
        let before = State::unpack(before);
        before.arrived + 1 == before.members
    }

    /// Whether the run has left `place`.
    pub(super) fn has_left(&self, place: Place) -> bool {
        let state = self.state();
        state.run != place.run || state.step != place.step as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_holds_its_parts() {
        let state = State { run: 0xabcd, step: CLOSED, members: MAX_MEMBERS as u64, arrived: 77 };
        assert_eq!(State::unpack(state.pack()), state);
        let state = State { run: 1, step: 5, members: 3, arrived: 2 };
        assert_eq!(State::unpack(state.pack()), state);
    }

    #[test]
    fn a_late_member_joins_the_step_under_way_and_is_waited_for() {
        let phase = Phase::new();
        assert!(!phase.is_open(9) && phase.join().is_none());
        let place = phase.open();
        assert_eq!(place, Place { run: 1, step: 0 });
        assert!(phase.arrive(2) && phase.has_left(place));
        assert_eq!(phase.join(), Some(Place { run: 1, step: 1 }));
        assert!(!phase.arrive(2) && phase.is_open(0) && !phase.is_open(1));
        assert!(phase.arrive(2));
        assert!(phase.join().is_none() && !phase.is_open(0));
    }
}
