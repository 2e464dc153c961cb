//! Runs over any [`Runner`]: teacher-forced for the gates, free-running for people. One decode loop for both.

use std::time::Instant;

use half::bf16;
use ndarray::Array2;

use super::{Record, Runner, StepTiming};
use crate::error::{Error, Result};

/// Prefills `ids`, then decodes so that `steps` rows of logits exist; step `i` (from 1) is fed `teacher[i - 1]`.
///
/// Shapes: teacher `[>= steps - 1]`, logits `[steps, vocab_size]`.
/// Errors: [`Error::Usage`] for no steps or too short a teacher; whatever the runner reports.
pub fn teacher_forced(runner: &mut dyn Runner, ids: &[u32], teacher: &[u32], steps: usize) -> Result<Record> {
    if steps == 0 || teacher.len() + 1 < steps {
        return Err(Error::Usage {
            what: "teacher ids".into(),
            found: format!("{} for {steps} steps", teacher.len()),
            expected: "at least one step and one id less than steps".into(),
        });
    }
    run(runner, ids, steps, |step, _| teacher.get(step).copied())
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
    let mut timing = StepTiming { prefill_us: started.elapsed().as_micros() as u64, decode_us: vec![] };
    let vocab = last.len();
    let mut logits = last.clone();
    let mut fed = vec![];
    for step in 0..steps.saturating_sub(1) {
        let Some(token) = choose(step, &last) else { break };
        let started = Instant::now();
        last = runner.decode_step(token, ids.len() + step)?;
        timing.decode_us.push(started.elapsed().as_micros() as u64);
        logits.extend_from_slice(&last);
        fed.push(token);
    }
    if fed.len() + 1 == steps {
        choose(steps - 1, &last);
    }
    let logits = Array2::from_shape_vec((logits.len() / vocab, vocab), logits)
        .map_err(|e| Error::Device { device: runner.info().label.clone(), why: format!("logits: {e}") })?;
    Ok(Record {
        prompt_ids: ids.to_vec(),
        fed,
        logits,
        taps: Default::default(),
        timing,
        counters: runner.counters().since(before),
        device: runner.info().label.clone(),
    })
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
