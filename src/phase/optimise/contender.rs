//! A model set up one way: its first call timed, then gated, then timed call by call, each call's logits held against the
//! gated run's.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use half::bf16;
use ndarray::Axis;

use super::delta::Pairs;
use super::step::{Cost, Half};
use crate::check::tolerance::at_least;
use crate::check::{Extent, Metrics, Verdict};
use crate::device::Role;
use crate::error::{Error, Result};
use crate::phase::{Bench, Subject, phase3};
use crate::plan::{Plan, PlanOptions, Tuning};
use crate::reference::PromptCapture;
use crate::runner::{Alteration, Clock, NpuRunner, Runner, npu};

/// Calls before the first one that counts.
pub const WARM_UP: usize = 5;
/// Pairs of calls that count, at least.
pub const ITERATIONS: usize = 20;
/// Short calls are repeated up to this often, as many as fit in [`BUDGET_MS`]: a machine that does other things as well
/// takes a core away for longer than they last. How many is settled before the first one counts.
const MOST: usize = 200;
const BUDGET_MS: f64 = 250.0;

/// Least cosine between the logits before and after a step that does not keep their bits.
///
/// Source: the gate that upstream asks of an optimisation.
const NEAR: f64 = 0.99;
/// Decode steps of a gated run.
const CONTINUATION: usize = Subject::STEPS - 1;
/// The longest prompt that tests time. Units: tokens.
const QUICK: usize = 16;

/// A rewrite gone wrong, for the tests of the gates.
pub type Seeded = fn(&mut Plan);

struct SeededPlan(Seeded);

impl Alteration for SeededPlan {
    fn plan(&self, plan: &mut Plan) {
        (self.0)(plan);
    }
}

/// What is made faster, where.
#[derive(Clone)]
pub struct Setting {
    pub subject: Arc<Subject>,
    /// Label.
    pub device: String,
    pub plan: PlanOptions,
    pub half: Half,
    /// Id of the captured prompt that is timed: its prefill, or the steps behind it.
    pub prompt: String,
}

impl Setting {
    /// With the longest captured prompt, or the named one.
    ///
    /// Errors: those of the capture; [`Error::Unknown`] for a prompt that it does not have.
    pub fn new(
        subject: Arc<Subject>,
        device: &str,
        plan: PlanOptions,
        half: Half,
        prompt: Option<&str>,
    ) -> Result<Setting> {
        let prompt = match prompt {
            Some(id) => id.to_owned(),
            None => longest(&subject, usize::MAX)?,
        };
        subject.capture()?.prompt(&prompt)?;
        Ok(Setting { subject, device: device.into(), plan, half, prompt })
    }

    /// The plain plan of a fixture with a prompt that does not take long.
    ///
    /// Errors: as [`Subject::shared`].
    pub fn of(model: &str, device: &str, half: Half) -> Result<Setting> {
        let (subject, plan) = (Subject::shared(model)?, PlanOptions::default());
        let prompt = longest(&subject, QUICK)?;
        Ok(Setting { subject, device: device.into(), plan, half, prompt })
    }

    /// Tokens of the timed prompt, and the padded length that its prefill runs in.
    ///
    /// Errors: those of the capture.
    pub fn lengths(&self) -> Result<[usize; 2]> {
        let tokens = self.subject.capture()?.prompt(&self.prompt)?.ids.len();
        Ok([tokens, npu::bucket(tokens, self.subject.config.max_position_embeddings)])
    }
}

/// The longest captured prompt of at most `most` tokens, else the shortest of all.
fn longest(subject: &Subject, most: usize) -> Result<String> {
    let capture = subject.capture()?;
    let fitting = capture.prompts().iter().filter(|p| p.n_prompt <= most).max_by_key(|p| p.n_prompt);
    let found = fitting.or_else(|| capture.prompts().iter().min_by_key(|p| p.n_prompt));
    let nothing = || Error::Plan { why: format!("{}: the capture has no prompt to time", subject.name) };
    found.map(|prompt| prompt.id.clone()).ok_or_else(nothing)
}

/// What timing two contenders came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Race {
    Timed(Pairs),
    /// A call of the second one failed, or gave other logits than its gated run: why.
    Void(String),
}

/// One way to carry out one half of a model's inference.
pub struct Contender {
    pub tuning: Tuning,
    half: Half,
    bench: Bench,
    /// What gates it; the last is timed.
    prompts: Vec<String>,
    cold: OnceLock<f64>,
}

impl Contender {
    /// Nothing is set up before it is needed.
    ///
    /// Errors: as [`Bench::new`].
    pub fn new(setting: &Setting, tuning: Tuning, seeded: Option<Seeded>) -> Result<Contender> {
        let Setting { subject, device, plan, half, prompt } = setting.clone();
        let first = subject.capture()?.prompts().iter().map(|p| p.id.clone()).find(|id| *id != prompt);
        let prompts: Vec<String> = first.into_iter().chain([prompt]).collect();
        let (prefill, decode) = half.tunings(tuning);
        let bench = Bench::new(subject, &device, &prompts, plan)?.for_records()?.tuned(prefill, decode);
        let bench = match seeded {
            Some(fault) => bench.altered(Arc::new(SeededPlan(fault))),
            None => bench,
        };
        Ok(Contender { tuning, half, bench, prompts, cold: OnceLock::new() })
    }

    /// This contender with the other's gated records in place of its own.
    #[cfg(test)]
    pub(super) fn gated_as(self, other: &Contender) -> Contender {
        for id in &self.prompts {
            self.bench.keep(id, other.bench.record(id).expect("the other one runs"));
        }
        self
    }

    pub fn subject(&self) -> &Arc<Subject> {
        self.bench.subject()
    }

    pub fn device(&self) -> &str {
        self.bench.device()
    }

    /// Kernel time of the first call after setup; NaN when something else ran before it was asked for, which no experiment does.
    ///
    /// Units: milliseconds. Errors: those of the run.
    pub fn cold(&self) -> Result<f64> {
        if let Some(&ms) = self.cold.get() {
            return Ok(ms);
        }
        let prompt = self.timed()?;
        let ms = self.bench.with_runner(|runner| {
            let first = runner.counters().dispatches == 0;
            let (ms, _) = Lane::new(runner, self.half).call(&prompt.ids, &prompt.chosen, 0)?;
            Ok(if first { ms } else { f64::NAN })
        })?;
        Ok(*self.cold.get_or_init(|| ms))
    }

    /// Phase 3's token-set gate on every prompt.
    ///
    /// Errors: those of the runs.
    pub fn gate(&self) -> Result<Verdict> {
        self.cold()?;
        let verdicts = self.prompts.iter().map(|id| Ok(phase3::prompt(&self.bench, id)?.verdict.clone()));
        Ok(Verdict::all(verdicts.collect::<Result<Vec<_>>>()?))
    }

    /// Logits of every step and every tap of every prompt, bit for bit those of `other`.
    ///
    /// Errors: those of the runs.
    pub fn same_bits(&self, other: &Contender) -> Result<Verdict> {
        let (mut failures, mut steps) = (vec![], 0);
        for id in &self.prompts {
            let (ours, theirs) = (self.bench.record(id)?, other.bench.record(id)?);
            let rows = ours.logits.rows().into_iter().zip(theirs.logits.rows());
            let same = rows.take_while(|(a, b)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())).count();
            steps += same as u64;
            if same < theirs.logits.nrows() {
                failures.push(format!("{id}: step {same}: other logits than before"));
            }
            let other_tap = theirs.taps.iter().find(|(name, rows)| {
                let ours = ours.taps.get(*name);
                ours.is_none_or(|ours| !ours.iter().map(|x| x.to_bits()).eq(rows.iter().map(|x| x.to_bits())))
            });
            failures.extend(other_tap.map(|(name, _)| format!("{id}: {name}: other rows than before")));
        }
        let required = (self.prompts.len() * Subject::STEPS) as u64;
        Ok(Verdict::judge(failures, Extent::new().require("equal steps", required).compare("equal steps", steps)))
    }

    /// Logits of every step of every prompt, as near to those of `other` as [`NEAR`] asks: for a step that does not promise bits.
    ///
    /// Errors: those of the runs.
    pub fn near(&self, other: &Contender) -> Result<Verdict> {
        let (mut failures, mut steps) = (vec![], 0);
        for id in &self.prompts {
            let [ours, theirs] = [self, other].map(|c| c.bench.record(id));
            let [ours, theirs] = [ours?, theirs?].map(|record| record.logits.mapv(f32::from));
            for (step, (ours, theirs)) in ours.rows().into_iter().zip(theirs.rows()).enumerate() {
                let found = Metrics::measure(ours.insert_axis(Axis(0)), theirs.insert_axis(Axis(0)))?;
                steps += 1;
                if !at_least(found.cosine, NEAR) {
                    failures.push(format!(
                        "{id}: step {step}: cosine {:.4} to the logits before, at least {NEAR}",
                        found.cosine
                    ));
                    break;
                }
            }
        }
        let required = (self.prompts.len() * Subject::STEPS) as u64;
        Ok(Verdict::judge(failures, Extent::new().require("near steps", required).compare("near steps", steps)))
    }

    /// The counters of one call.
    ///
    /// Errors: those of the run.
    pub fn cost(&self) -> Result<Cost> {
        let prompt = self.timed()?;
        let (ids, chosen) = (prompt.ids, prompt.chosen);
        self.bench.with_runner(|runner| {
            let mut before = runner.counters();
            runner.prefill(&ids)?;
            if self.half == Half::Decode {
                before = runner.counters();
                runner.decode_step(chosen[0], ids.len())?;
            }
            let counters = runner.counters().since(before);
            let plan = match self.half {
                Half::Prefill => runner.prefill_plan(ids.len())?,
                Half::Decode => runner.decode_plan(),
            };
            let own = plan.buffers.iter().filter(|b| b.spec.role == Role::Intermediate && b.lies_in.is_none());
            let memory = own.map(|b| b.spec.bytes() as u64).sum();
            Ok(Cost { counters, memory, layers: runner.config().num_hidden_layers })
        })
    }

    fn timed(&self) -> Result<PromptCapture> {
        self.subject().capture()?.prompt(self.timed_id())
    }

    fn timed_id(&self) -> &str {
        &self.prompts[self.prompts.len() - 1]
    }

    /// Times `self` and `other` turn by turn, each first every other time. A call of `other` that fails, or whose logits are
    /// not those of its gated run, makes all of it void.
    ///
    /// Errors: those of the records and of `self`'s runs, whose logits are held against its gated run's as well.
    pub fn race(&self, other: &Contender) -> Result<Race> {
        let prompt = self.timed()?;
        let id = self.timed_id();
        let (before, after) = (self.bench.record(id)?, other.bench.record(id)?);
        let expected = [before, after];
        self.bench.with_runner(|a| {
            other.bench.with_runner(|b| {
                let mut lanes = [Lane::new(a, self.half), Lane::new(b, self.half)];
                let (mut pairs, mut turns) = (Pairs::default(), WARM_UP + ITERATIONS);
                let mut shortest = f64::INFINITY;
                let mut turn = 0;
                while turn < turns {
                    let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
                    let mut ms = [0.0; 2];
                    for at in order {
                        let row = if self.half == Half::Prefill { 0 } else { turn % CONTINUATION + 1 };
                        let gated = expected[at].logits.row(row);
                        let took = lanes[at].call(&prompt.ids, &prompt.chosen, turn).and_then(|(took, logits)| {
                            let same = logits.iter().map(|x| x.to_bits()).eq(gated.iter().map(|x| x.to_bits()));
                            let why = format!("call {turn}: other logits than the gated run's: the timing is void");
                            if same { Ok(took) } else { Err(Error::Device { device: self.device().into(), why }) }
                        });
                        match (at, took) {
                            (_, Ok(took)) => ms[at] = took,
                            (0, Err(error)) | (_, Err(error @ Error::Incomplete { .. })) => return Err(error),
                            (_, Err(error)) => return Ok(Race::Void(error.to_string())),
                        }
                    }
                    if turn < WARM_UP {
                        shortest = shortest.min(ms[0] + ms[1]);
                        turns = WARM_UP + ((BUDGET_MS / shortest) as usize).clamp(ITERATIONS, MOST);
                    } else {
                        pairs.before.push(ms[0]);
                        pairs.after.push(ms[1]);
                    }
                    turn += 1;
                }
                Ok(Race::Timed(pairs))
            })
        })
    }
}

/// One of two runners that take turns.
struct Lane<'a> {
    runner: &'a mut NpuRunner,
    half: Half,
    clock: Arc<Mutex<Clock>>,
}

impl<'a> Lane<'a> {
    fn new(runner: &'a mut NpuRunner, half: Half) -> Lane<'a> {
        Lane { runner, half, clock: Arc::default() }
    }

    /// One call's kernel time (every device call from handing over its arguments to its end) and its logits.
    fn call(&mut self, ids: &[u32], chosen: &[u32], turn: usize) -> Result<(f64, Vec<bf16>)> {
        // The gated run goes no further than its continuation, so that is walked again and again.
        let step = turn % CONTINUATION;
        if self.half == Half::Decode && step == 0 {
            self.runner.prefill(ids)?;
        }
        let half = self.half;
        let logits = self.runner.with_hook(self.clock.clone(), |runner| match half {
            Half::Prefill => runner.prefill(ids),
            Half::Decode => runner.decode_step(chosen[step], ids.len() + step),
        })?;
        let steps = self.clock.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ns: u64 = steps.iter().filter(|step| step.on_device).map(|step| step.ns).sum();
        Ok((ns as f64 / 1e6, logits))
    }
}
