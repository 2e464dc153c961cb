//! Where the time goes: setup, prefill, decode, and within them every dispatch, call site, kernel and host op.
//!
//! Totals come from runs that nothing watches; the breakdown from as many with a clock before and behind every step, its
//! figures being their means. A call site inside a merged dispatch cannot be timed from outside, so sites are timed with
//! one launch per dispatch.

mod ceilings;
mod lines;

use std::sync::{Arc, PoisonError};
use std::time::Instant;

pub use ceilings::{Ceilings, GEMM, GEMV};
use lines::Runs;
pub use lines::{HostLine, Line};

use super::Subject;
use crate::check::{Extent, Verdict};
use crate::device::Counters;
use crate::error::Result;
use crate::kernel::Rows;
use crate::plan::{Plan, PlanOptions, Tuning};
use crate::runner::{Clock, NpuRunner, Record, Runner, RunnerOptions, StepTime, free_run};

/// Unwatched runs that the totals are medians of, after the cold one, and watched ones for the breakdown.
pub const RUNS: usize = 5;

/// One half of inference.
#[derive(Debug, Clone)]
pub struct HalfProfile {
    /// Unwatched wall times: one a run at prefill, one a token at decode. Units: milliseconds.
    pub wall_ms: Vec<f64>,
    /// Watched: all steps of one call. Units: milliseconds.
    pub device_ms: f64,
    pub host_ms: f64,
    /// Watched: what lies between the steps of a call (poisoning, logits read back, the choice of the token). Units:
    /// milliseconds.
    pub between_ms: f64,
    /// Calls of each line are per prefill, or per token.
    pub sites: Vec<Line>,
    pub kernels: Vec<Line>,
    pub dispatches: Vec<Line>,
    pub host: Vec<HostLine>,
}

/// A model's profile on a device.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Units: milliseconds.
    pub setup_ms: f64,
    pub setup: Counters,
    /// The first prefill after setup. Units: milliseconds.
    pub cold_prefill_ms: f64,
    pub prompt_tokens: usize,
    pub seq_len: usize,
    pub prefill: HalfProfile,
    pub decode: HalfProfile,
    /// One unwatched run.
    pub run: Counters,
    pub decode_steps: usize,
    /// What this machine can do; none where the device is not this machine's CPU.
    pub ceilings: Option<Ceilings>,
    /// Watched runs gave the unwatched ones' logits, bit for bit, and none has a NaN.
    pub verdict: Verdict,
}

/// Profiles `steps` tokens behind a prompt; prefill and decode are carried out by these tunings.
///
/// Errors: those of the runs.
pub fn profile(
    subject: &Subject,
    device: &str,
    plan: &PlanOptions,
    [prefill, decode]: [Tuning; 2],
    ids: &[u32],
    steps: usize,
) -> Result<Profile> {
    let mut options = RunnerOptions::for_prompts([ids.len()], steps, subject.config.max_position_embeddings);
    (options.plan, options.prefill, options.decode) = (plan.clone(), prefill, decode);
    let started = Instant::now();
    let mut runner = subject.runner(device, &options)?;
    let setup_ms = started.elapsed().as_secs_f64() * 1e3;
    let setup = runner.counters();
    let masked = subject.masked_ids()?;
    let mut run = |runner: &mut NpuRunner| free_run(runner, ids, steps, &masked, |_| true);

    let cold = run(&mut runner)?;
    let records = (0..RUNS).map(|_| run(&mut runner)).collect::<Result<Vec<Record>>>()?;
    let mut watched = vec![watch(&mut runner, &mut run)?];
    if options.prefill.merge || options.decode.merge {
        let apart = |tuning| Tuning { merge: false, ..tuning };
        let (prefill, decode) = (apart(options.prefill), apart(options.decode));
        let mut plain = subject.runner(device, &RunnerOptions { prefill, decode, ..options.clone() })?;
        run(&mut plain)?;
        watched.push(watch(&mut plain, &mut run)?);
    }

    let verdict = judge(&cold, &records, &watched, steps);
    let (deployed, apart) = (&watched[0], &watched[watched.len() - 1]);
    let ms = |us: u64| us as f64 / 1e3;
    let prefill_ms = records.iter().map(|r| ms(r.timing.prefill_us)).collect();
    let decode_ms = records.iter().flat_map(|r| r.timing.decode_us.iter().map(|&us| ms(us))).collect();
    Ok(Profile {
        setup_ms,
        setup,
        cold_prefill_ms: ms(cold.timing.prefill_us),
        prompt_tokens: ids.len(),
        seq_len: deployed.plans[0].stage.rows(),
        prefill: half(prefill_ms, [deployed, apart].map(Watched::prefill)),
        decode: half(decode_ms, [deployed, apart].map(Watched::decode)),
        run: records[0].counters,
        decode_steps: records[0].fed.len(),
        ceilings: if device.starts_with("emu") { Some(Ceilings::measure()?) } else { None },
        verdict,
    })
}

/// Runs with a clock.
struct Watched {
    /// Prefill and decode.
    plans: [Plan; 2],
    rows: [Vec<Option<Rows>>; 2],
    /// Of all runs.
    steps: [Vec<StepTime>; 2],
    records: Vec<Record>,
}

impl Watched {
    fn prefill(&self) -> Runs<'_> {
        let (plan, rows, calls) = (&self.plans[0], &self.rows[0], self.records.len());
        let wall_us = self.records.iter().map(|record| record.timing.prefill_us).sum();
        Runs {
            plan,
            rows,
            steps: &self.steps[0],
            calls,
            wall_us,
            cached: 0.0,
            tokens: self.records[0].prompt_ids.len(),
        }
    }

    fn decode(&self) -> Runs<'_> {
        let (plan, rows) = (&self.plans[1], &self.rows[1]);
        let calls = self.records.iter().map(|record| record.fed.len()).sum();
        let wall_us = self.records.iter().flat_map(|record| &record.timing.decode_us).sum();
        // Every run walks the same way; each of its steps finds one position more than the last.
        let first = &self.records[0];
        let cached = first.prompt_ids.len() as f64 + first.fed.len().saturating_sub(1) as f64 / 2.0;
        Runs { plan, rows, steps: &self.steps[1], calls, wall_us, cached, tokens: 1 }
    }
}

fn watch(runner: &mut NpuRunner, mut run: impl FnMut(&mut NpuRunner) -> Result<Record>) -> Result<Watched> {
    let clock = Arc::new(std::sync::Mutex::new(Clock::default()));
    let (mut steps, mut records) = ([vec![], vec![]], vec![]);
    for _ in 0..RUNS {
        let record = runner.with_hook(clock.clone(), &mut run)?;
        let mut prefill = clock.lock().unwrap_or_else(PoisonError::into_inner).take();
        steps[1].extend(prefill.split_off(runner.prefill_plan(record.prompt_ids.len())?.steps.len()));
        steps[0].extend(prefill);
        records.push(record);
    }
    let prompt = records[0].prompt_ids.len();
    let plans = [runner.prefill_plan(prompt)?.clone(), runner.decode_plan().clone()];
    let rows = [runner.rows_computed(prompt)?, vec![None; plans[1].steps.len()]];
    Ok(Watched { plans, rows, steps, records })
}

/// As deployed, and with one launch per dispatch.
fn half(wall_ms: Vec<f64>, [deployed, apart]: [Runs<'_>; 2]) -> HalfProfile {
    let per_call = |on_device: bool| {
        let ns: u64 = deployed.steps.iter().filter(|step| step.on_device == on_device).map(|step| step.ns).sum();
        ns as f64 / 1e6 / deployed.calls.max(1) as f64
    };
    let (device_ms, host_ms) = (per_call(true), per_call(false));
    let whole_ms = deployed.wall_us as f64 / 1e3 / deployed.calls.max(1) as f64;
    HalfProfile {
        wall_ms,
        device_ms,
        host_ms,
        between_ms: whole_ms - device_ms - host_ms,
        sites: lines::sites(apart),
        kernels: lines::kernels(apart),
        dispatches: lines::dispatches(deployed),
        host: lines::host(deployed),
    }
}

fn judge(cold: &Record, records: &[Record], watched: &[Watched], steps: usize) -> Verdict {
    let mut failures = vec![];
    let bits = |record: &Record| record.logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let expected = bits(cold);
    let runs: Vec<&Record> = records.iter().chain(watched.iter().flat_map(|w| &w.records)).collect();
    let required = (runs.len() * steps) as u64;
    let mut same = 0;
    for record in runs {
        if bits(record) == expected {
            same += record.logits.nrows() as u64
        } else {
            failures.push("a run with other logits than the first".to_owned())
        }
    }
    if cold.logits.iter().any(|x| x.is_nan()) {
        failures.push("NaN in the logits".into());
    }
    Verdict::judge(failures, Extent::new().require("equal steps", required).compare("equal steps", same))
}

#[cfg(test)]
mod tests;
