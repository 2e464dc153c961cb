//! Optimisation as an experiment: apply a step, gate it, time it against what was there before, keep or revert.
//!
//! Nothing is believed: a step that breaks the output, keeps the counters where they were, is slower, or whose gain the
//! clock cannot tell from nothing, is taken back with its reason. Times are never baselines; counters are.

mod contender;
mod delta;
mod step;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use contender::{Contender, ITERATIONS, Race, Seeded, Setting, WARM_UP};
pub use delta::{Delta, Pairs, Timing};
pub use step::{Cost, Half, Optimisation};

use super::subject::Outline;
use super::{Case, Finding};
use crate::check::{Extent, Outcome, Verdict};
use crate::error::{Error, Result};
use crate::plan::Tuning;

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    Applied,
    /// There is nothing to do.
    Skipped,
    Reverted,
}

impl Decision {
    pub fn word(self) -> &'static str {
        match self {
            Decision::Applied => "applied",
            Decision::Skipped => "skipped",
            Decision::Reverted => "reverted",
        }
    }
}

/// One step's experiment.
#[derive(Debug, Clone)]
pub struct Experiment {
    pub name: String,
    pub decision: Decision,
    pub reason: String,
    /// Whether the output stayed right, whatever the clock says; a skipped step broke nothing.
    pub correct: Verdict,
    pub timing: Option<(Delta, [f64; 2])>,
    pub costs: Option<[Cost; 2]>,
}

/// Compares `after` (the step applied) with `before`. Whatever goes wrong with `after` is why the step is reverted.
///
/// Errors: those of files, a device that does not complete, and those of `before`'s runs.
pub fn experiment(step: Optimisation, before: &Contender, after: &Contender) -> Result<Experiment> {
    let done = |decision, reason: String, correct, timing, costs| Experiment {
        name: step.name().into(),
        decision,
        reason,
        correct,
        timing,
        costs,
    };
    let sound = before.gate()?;
    if !sound.is_pass() {
        return Ok(done(Decision::Reverted, format!("the state before it does not hold: {sound}"), sound, None, None));
    }
    let (correct, cost) = match gated(before, after, step.keeps_bits(after.device())) {
        Ok(found) => found,
        // A disk, or a device that hangs: nothing is known of the step.
        Err(error @ (Error::Io { .. } | Error::Incomplete { .. })) => return Err(error),
        Err(error) => {
            let why = format!("cannot be carried out: {error}");
            let unavailable = matches!(error, Error::Unavailable { .. });
            let verdict = if unavailable { Verdict::not_run(why.clone()) } else { failed(why.clone()) };
            return Ok(done(Decision::Reverted, why, verdict, None, None));
        }
    };
    if !correct.is_pass() {
        return Ok(done(Decision::Reverted, format!("breaks the output: {correct}"), correct, None, None));
    }
    let costs = [before.cost()?, cost];
    if let Some(broken) = step.broken_promise(&costs[0], &costs[1]) {
        return Ok(done(Decision::Reverted, broken, correct, None, Some(costs)));
    }
    let pairs = match before.race(after)? {
        Race::Timed(pairs) => pairs,
        Race::Void(why) => {
            let reason = format!("breaks the output: {why}");
            return Ok(done(Decision::Reverted, reason, correct.and(failed(why)), None, Some(costs)));
        }
    };
    let cold = [before.cold()?, after.cold()?];
    let Some(delta) = Delta::of(&pairs) else {
        return Ok(done(Decision::Reverted, "too few times to judge".into(), correct, None, Some(costs)));
    };
    let (decision, reason) = match delta.timing() {
        Timing::Faster => (Decision::Applied, "pays".to_owned()),
        Timing::Slower => (Decision::Reverted, "does not pay: slower".to_owned()),
        Timing::Inconclusive => {
            (Decision::Reverted, "does not pay: INCONCLUSIVE(timing), the interval does not exclude zero".to_owned())
        }
    };
    Ok(done(decision, reason, correct, Some((delta, cold)), Some(costs)))
}

/// Phase 3's gate on `after`, whether its logits are those of `before`, and what a call of it costs. No step changes an
/// operation or its order, so that bits are equal wherever the device does not choose them by what it compiles.
fn gated(before: &Contender, after: &Contender, bits: bool) -> Result<(Verdict, Cost)> {
    after.cold()?;
    let same = if bits { after.same_bits(before)? } else { after.near(before)? };
    Ok((after.gate()?.and(same), after.cost()?))
}

fn failed(why: String) -> Verdict {
    Verdict::judge(vec![why], Extent::new())
}

/// All steps of one half in turn, each upon those that were kept.
pub struct Optimised {
    pub experiments: Vec<Experiment>,
    /// What was kept.
    pub tuning: Tuning,
    /// The last state against the baseline; none when nothing was kept.
    pub total: Option<Experiment>,
    /// The baseline's own gate, the last state's gates, and the speed gate.
    pub verdict: Verdict,
}

/// Runs the experiments; `seeded` breaks the plan of one step. Upon a baseline that is not right there are none.
///
/// Errors: those of files, a device that does not complete, and those of the baseline's runs.
pub fn optimise(
    setting: &Setting,
    seeded: Option<(Optimisation, Seeded)>,
    progress: &mut dyn FnMut(&str),
) -> Result<Optimised> {
    progress("baseline");
    let baseline = Contender::new(setting, Tuning::BASELINE, None)?;
    climb(setting, Arc::new(baseline), seeded, progress)
}

/// [`optimise`] from this baseline on.
fn climb(
    setting: &Setting,
    baseline: Arc<Contender>,
    seeded: Option<(Optimisation, Seeded)>,
    progress: &mut dyn FnMut(&str),
) -> Result<Optimised> {
    let _alone = alone();
    let first = baseline.gate()?;
    if !first.is_pass() {
        let verdict = first.about("the baseline, before any step");
        return Ok(Optimised { experiments: vec![], tuning: Tuning::BASELINE, total: None, verdict });
    }
    let mut state = baseline.clone();
    let mut experiments = vec![];
    for step in Optimisation::ALL {
        progress(step.name());
        if let Some(found) = skipped(step, setting)? {
            experiments.push(found);
            continue;
        }
        let fault = seeded.filter(|(broken, _)| *broken == step).map(|(_, fault)| fault);
        let next = Contender::new(setting, step.apply(state.tuning), fault)?;
        let found = experiment(step, &state, &next)?;
        if found.decision == Decision::Applied {
            state = Arc::new(next);
        }
        experiments.push(found);
    }
    progress("all of it");
    let tuning = state.tuning;
    if Arc::ptr_eq(&baseline, &state) {
        let unsure =
            experiments.iter().filter_map(|e| e.timing.as_ref()).any(|(d, _)| d.timing() == Timing::Inconclusive);
        let why = "no step was kept, so nothing is faster than the baseline";
        let speed =
            if unsure { Verdict::inconclusive(format!("INCONCLUSIVE(timing): {why}")) } else { failed(why.into()) };
        return Ok(Optimised { experiments, tuning, total: None, verdict: first.and(speed) });
    }
    let total = total(&baseline, &state)?;
    let verdict = first.and(total.correct.clone()).and(speed(&total));
    Ok(Optimised { tuning, verdict, experiments, total: Some(total) })
}

fn skipped(step: Optimisation, setting: &Setting) -> Result<Option<Experiment>> {
    let reason = step.nothing_to_do(&setting.subject.config, setting.half, &setting.plan)?;
    Ok(reason.map(|reason| Experiment {
        name: step.name().into(),
        decision: Decision::Skipped,
        reason,
        correct: Verdict::judge(vec![], Extent::new().require("plans looked at", 1).compare("plans looked at", 1)),
        timing: None,
        costs: None,
    }))
}

/// A state against the baseline.
fn total(baseline: &Contender, state: &Contender) -> Result<Experiment> {
    let cold = [baseline.cold()?, state.cold()?];
    let bits = !state.tuning.merge || Optimisation::LaunchMerging.keeps_bits(state.device());
    let (mut correct, cost) = gated(baseline, state, bits)?;
    let costs = [baseline.cost()?, cost];
    let timing = match baseline.race(state)? {
        Race::Timed(pairs) => Delta::of(&pairs).map(|delta| (delta, cold)),
        Race::Void(why) => {
            correct = correct.and(failed(why));
            None
        }
    };
    let faster = timing.as_ref().is_some_and(|(delta, _)| delta.timing() == Timing::Faster);
    let decision = if faster { Decision::Applied } else { Decision::Reverted };
    let (name, reason) = ("faster".to_owned(), "all steps that were kept, against the baseline".to_owned());
    Ok(Experiment { name, decision, reason, correct, timing, costs: Some(costs) })
}

/// The hard gate of speed: kernel time strictly below the baseline's.
fn speed(total: &Experiment) -> Verdict {
    let Some((delta, _)) = &total.timing else {
        return Verdict::inconclusive("INCONCLUSIVE(timing): too few times to judge");
    };
    let extent = Extent::new().require("timed pairs", ITERATIONS as u64).compare("timed pairs", delta.pairs as u64);
    match delta.timing() {
        Timing::Faster => Verdict::judge(vec![], extent),
        Timing::Slower => Verdict::judge(vec![format!("slower than the baseline: {delta}")], extent),
        Timing::Inconclusive => Verdict::inconclusive(format!("INCONCLUSIVE(timing): {delta}")),
    }
}

/// The cases of one half: each step in its place, what `run` and `verify` do against the baseline, and rewrites that break.
pub fn cases(outline: &Outline, half: Half) -> Vec<Case> {
    let model = &outline.name;
    let mut cases: Vec<Case> = Optimisation::ALL
        .into_iter()
        .map(|step| {
            let m = model.clone();
            let nothing = step == Optimisation::LayoutAlignment;
            let case = Case::on_device(format!("{}::{model}", step.name()), model, move |device| {
                let _alone = alone();
                step_case(&m, device, half, step)
            });
            Case { baseline: !nothing, ..case }
        })
        .collect();
    let m = model.clone();
    cases.push(Case::on_device(format!("faster::{model}"), model, move |device| {
        let _alone = alone();
        let [baseline, state] = [Tuning::BASELINE, Tuning::default()].map(|t| shared(&m, device, half, t));
        let found = total(&*baseline?, &*state?)?;
        let verdict = found.correct.clone().and(speed(&found));
        Ok(Finding { verdict, numbers: numbers(&found) })
    }));
    let broken: [(&str, Seeded, &[&str]); 2] = [
        ("seeded_fault", exchange_gate_and_up, &["breaks the output: FAIL"]),
        ("unbound_rewrite", unbind_down, &["cannot be carried out", "found 1 arguments, expected 3"]),
    ];
    for (name, seeded, told) in broken {
        let m = model.clone();
        let case = Case::on_device(format!("{name}::{model}"), model, move |device| {
            let _alone = alone();
            seeded_case(&m, device, half, (seeded, told))
        });
        cases.push(Case { baseline: false, ..case });
    }
    cases
}

/// A step that breaks the output fails; one that does not pay is told of and does not.
fn step_case(model: &str, device: &str, half: Half, step: Optimisation) -> Result<Finding> {
    let setting = Setting::of(model, device, half)?;
    let found = match skipped(step, &setting)? {
        Some(found) => found,
        None => {
            let before = shared(model, device, half, step.ladder())?;
            let after = shared(model, device, half, step.apply(step.ladder()))?;
            experiment(step, &before, &after)?
        }
    };
    let kept_promise = found.timing.is_some() || found.decision == Decision::Skipped;
    let failures = if kept_promise || !found.correct.is_pass() { vec![] } else { vec![found.reason.clone()] };
    let extent = Extent::new().require("steps tried", 1).compare("steps tried", 1);
    let mut verdict = found.correct.clone().and(Verdict::judge(failures, extent));
    if found.decision == Decision::Reverted {
        let delta = found.timing.as_ref().map_or(String::new(), |(delta, _)| format!(": {delta}"));
        verdict = verdict.warn(format!("{} reverted, {}{delta}", found.name, found.reason));
    }
    Ok(Finding { verdict, numbers: numbers(&found) })
}

/// A rewrite that breaks must be reverted with a reason that tells what is wrong with it, and what was there before still stands.
fn seeded_case(model: &str, device: &str, half: Half, (seeded, told): (Seeded, &[&str])) -> Result<Finding> {
    let step = Optimisation::LaunchMerging;
    let before = shared(model, device, half, step.ladder())?;
    let tuning = step.apply(step.ladder());
    let broken = Contender::new(&Setting::of(model, device, half)?, tuning, Some(seeded))?;
    let found = experiment(step, &before, &broken)?;
    let told = told.iter().all(|part| found.reason.contains(part));
    let reverted = found.decision == Decision::Reverted && found.correct.outcome() == Outcome::Fail && told;
    let failures = if reverted { vec![] } else { vec![format!("not reverted: {}", found.reason)] };
    let extent = Extent::new().require("seeded faults", 1).compare("seeded faults", 1);
    Ok(Finding::of(Verdict::judge(failures, extent).and(before.gate()?)))
}

/// A fault of a rewrite that every check of the plan passes: `silu(up) * gate`.
pub fn exchange_gate_and_up(plan: &mut crate::plan::Plan) {
    for step in &mut plan.steps {
        if let crate::plan::Op::Dispatch(launches) = &mut step.op {
            launches.iter_mut().filter(|launch| launch.site() == "silu_mul").for_each(|launch| launch.args.swap(0, 1));
        }
    }
}

/// A fault of a rewrite that no device can carry out: `down_proj` has one argument too few.
pub fn unbind_down(plan: &mut crate::plan::Plan) {
    for step in &mut plan.steps {
        if let crate::plan::Op::Dispatch(launches) = &mut step.op {
            launches
                .iter_mut()
                .filter(|launch| launch.site() == "down_proj")
                .for_each(|launch| launch.args.truncate(1));
        }
    }
}

/// What does not depend on the clock: one call's work before and after.
fn numbers(found: &Experiment) -> Vec<(&'static str, f64)> {
    let Some([before, after]) = &found.costs else { return vec![] };
    vec![
        ("dispatches_before", before.counters.dispatches as f64),
        ("dispatches_after", after.counters.dispatches as f64),
        ("bytes_written_before", before.counters.bytes_written as f64),
        ("bytes_written_after", after.counters.bytes_written as f64),
        ("static_uploads_before", before.counters.static_uploads as f64),
        ("static_uploads_after", after.counters.static_uploads as f64),
        ("intermediate_bytes_before", before.memory as f64),
        ("intermediate_bytes_after", after.memory as f64),
    ]
}

/// Times are taken by one case at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A contender that the cases of this process share, so that each state is set up and gated once.
fn shared(model: &str, device: &str, half: Half, tuning: Tuning) -> Result<Arc<Contender>> {
    type Key = (String, String, Half, Tuning);
    static CONTENDERS: OnceLock<Mutex<HashMap<Key, Arc<Contender>>>> = OnceLock::new();
    let mut contenders = CONTENDERS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (model.to_owned(), device.to_owned(), half, tuning);
    if let Some(contender) = contenders.get(&key) {
        return Ok(contender.clone());
    }
    let contender = Arc::new(Contender::new(&Setting::of(model, device, half)?, tuning, None)?);
    contenders.insert(key, contender.clone());
    Ok(contender)
}
