//! Runs over any [`Runner`]: teacher-forced for the gates, free-running for people. One decode loop for both.

use std::time::Instant;

use half::bf16;
use ndarray::Array2;

use super::{Record, Runner, StepTiming};
use crate::device::Counters;
use crate::error::{Error, Result};

/// Prefills `ids`, then decodes so that `steps` rows of logits exist; step `i` (from 1) is fed `teacher[i - 1]`.
///
/// Shapes: teacher `[>= steps - 1]`, logits `[steps, vocab_size]`.
/// Errors: [`Error::Usage`] for no steps or too short a teacher; whatever the runner reports.
pub fn teacher_forced(runner: &mut dyn Runner, ids: &[u32], teacher: &[u32], steps: usize) -> Result<Record> {
    check_teacher(teacher, steps)?;
    run(runner, ids, steps, |step, _| teacher.get(step).copied())
}

/// That there is a token to feed at each step but the first.
///
/// Errors: [`Error::Usage`].
pub(super) fn check_teacher(teacher: &[u32], steps: usize) -> Result<()> {
    if steps == 0 || teacher.len() + 1 < steps {
        return Err(Error::Usage {
            what: "teacher ids".into(),
            found: format!("{} for {steps} steps", teacher.len()),
            expected: "at least one step and one id less than steps".into(),
        });
    }
    Ok(())
}

/// Prefills `ids`, then feeds its own greedy choice until `steps` tokens or until `token` says so.
///
/// `masked` ids (ascending: those without a token) are never chosen. `token` sees every chosen token, in order, and may
/// end the run by returning false.
/// Errors: whatever the runner reports.
pub fn free_run(
    runner: &mut dyn Runner,
    ids: &[u32],
    steps: usize,
    masked: &[u32],
    token: impl FnMut(u32) -> bool,
) -> Result<Record> {
    chosen_run(runner, ids, steps, |logits| argmax(logits, masked), token)
}

/// [`free_run`] with a choice of the caller's; none ends the run.
///
/// Errors: whatever the runner reports.
pub fn chosen_run(
    runner: &mut dyn Runner,
    ids: &[u32],
    steps: usize,
    mut choose: impl FnMut(&[bf16]) -> Option<u32>,
    mut token: impl FnMut(u32) -> bool,
) -> Result<Record> {
    run(runner, ids, steps, |_, logits| {
        let id = choose(logits)?;
        token(id).then_some(id)
    })
}

/// Index of the largest logit outside of `masked` (ascending); ties go to the smaller id. None when there is a NaN
/// anywhere, or nothing at all.
pub fn argmax(logits: &[bf16], masked: &[u32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (i, v) in logits.iter().enumerate() {
        let v = v.to_f32();
        if v.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, b)| v > b) && masked.binary_search(&(i as u32)).is_err() {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i as u32)
}

/// `choose(step, logits)` gives the token to feed next, or ends the run.
fn run(
    runner: &mut dyn Runner,
    ids: &[u32],
    steps: usize,
    mut choose: impl FnMut(usize, &[bf16]) -> Option<u32>,
) -> Result<Record> {
    let before = runner.counters();
    let started = Instant::now();
    let mut last = runner.prefill(ids)?;
    let mut made = Made::prefilled(ids, &last, steps, started);
    for step in 0..steps.saturating_sub(1) {
        let Some(token) = choose(step, &last) else { break };
        let started = Instant::now();
        last = runner.decode_step(token, ids.len() + step)?;
        made.decoded(token, &last, started);
    }
    if made.fed.len() + 1 == steps {
        choose(steps - 1, &last);
    }
    made.counters = runner.counters().since(before);
    made.record(&runner.info().label)
}

/// Rows of logits that memory is reserved for at most.
const RESERVED: usize = 64;

/// What a run has made so far.
pub(super) struct Made {
    ids: Vec<u32>,
    fed: Vec<u32>,
    vocab: usize,
    logits: Vec<bf16>,
    pub(super) timing: StepTiming,
    pub(super) counters: Counters,
}

impl Made {
    /// By the prefill that began at `started`; there will be `steps` rows of logits.
    pub(super) fn prefilled(ids: &[u32], row: &[bf16], steps: usize, started: Instant) -> Made {
        let timing = StepTiming { prefill_us: started.elapsed().as_micros() as u64, ..StepTiming::default() };
        // A run that goes on until its caller ends it may have any number.
        let mut logits = Vec::with_capacity(steps.min(RESERVED) * row.len());
        logits.extend_from_slice(row);
        Made { ids: ids.into(), fed: vec![], vocab: row.len(), logits, timing, counters: Counters::default() }
    }

    /// By a decode step, too, that began at `started` and was fed `token`.
    pub(super) fn decoded(&mut self, token: u32, logits: &[bf16], started: Instant) {
        self.timing.decode_us.push(started.elapsed().as_micros() as u64);
        self.logits.extend_from_slice(logits);
        self.fed.push(token);
    }

    /// All of it, but for the taps.
    ///
    /// Errors: [`Error::Device`] where steps gave logits of different lengths.
    pub(super) fn record(self, device: &str) -> Result<Record> {
        let logits = Array2::from_shape_vec((self.logits.len() / self.vocab, self.vocab), self.logits)
            .map_err(|e| Error::Device { device: device.into(), why: format!("logits: {e}") })?;
        Ok(Record {
            prompt_ids: self.ids,
            fed: self.fed,
            logits,
            taps: Default::default(),
            timing: self.timing,
            counters: self.counters,
            device: device.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_named_id_is_chosen() {
        let logits: Vec<bf16> = [1.0, 3.0, 3.0, 9.0, f32::NEG_INFINITY].map(bf16::from_f32).into();
        assert_eq!(argmax(&logits, &[]), Some(3));
        assert_eq!(argmax(&logits, &[3, 4]), Some(1));
        assert_eq!(argmax(&logits, &[1, 3]), Some(2));
        assert_eq!(argmax(&logits, &[0, 1, 2, 3]), Some(4));
        assert_eq!(argmax(&logits, &[0, 1, 2, 3, 4]), None);
    }

    #[test]
    fn a_nan_is_no_choice_masked_or_not() {
        assert_eq!(argmax(&[bf16::ONE, bf16::NAN], &[1]), None);
    }
}
