//! The first step and layer that are off, and within the layer the launch that does it.
//!
//! Distances are taken to the f32 forward pass ([`super::forward`]) in units of what the emulated device of the same
//! arithmetic class leaves there: 1 is the noise of a sound run. Then the layer's launches are answered by the f32 oracle,
//! one more at a time, front to back; the first one behind which the distance is noise again is named. Each is also held
//! against the oracle on its own inputs, which says whether it adds error or hands on what it got.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::forward::{Truth, forward};
use super::lab::{Lab, Script, trace};
use super::swap::Swapper;
use super::trace::{Segment, Stage, Trace};
use crate::check::tolerance::at_most;
use crate::error::{Error, Result};
use crate::plan::{HostOp, Op, Plan, Step};
use crate::runner::{Alteration, NpuRunner, Runner, Sound};

/// A layer's output may be this many times as far from the truth as a sound run's.
///
/// Source: the same runs under other instruction sets and prompts differ by less than 1.5 (phase 3's noise ratio).
pub const LAYER: f64 = 2.0;

/// A single launch may be this many times as far from the oracle on its own inputs.
pub const LAUNCH: f64 = 3.0;

/// Relative L2 that rounding to bf16 alone can leave, and so no fault: the least unit of a launch.
const ROUNDING: f64 = 2e-3;

/// One launch of the suspect layer.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Row {
    pub launch: String,
    /// Distance of the metric's output over a sound run's, with the launches before this one swapped.
    pub before: f64,
    /// The same with this one swapped too.
    pub after: f64,
    /// Relative L2 of its output against the oracle on its own inputs.
    pub added: f64,
    /// The same over a sound run's.
    pub added_over_sound: f64,
    /// Relative L2 of its output against the truth: what it added and what it inherited.
    pub total: f64,
}

impl Row {
    /// Whether the launch does something other than its kernel should.
    pub fn adds(&self) -> bool {
        !at_most(self.added_over_sound, LAUNCH)
    }
}

/// What a bisect found.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Bisect {
    /// 0 is prefill, then decode steps; none where no layer's output is off.
    pub step: Option<usize>,
    /// None behind the layers: final norm and head.
    pub layer: Option<usize>,
    /// Distance of each layer's output (rows) at each step (columns) over a sound run's.
    pub ratios: Vec<Vec<f64>>,
    /// The same of the logits, by step.
    pub logits: Vec<f64>,
    pub rows: Vec<Row>,
    /// The first launch whose swap restores the metric, or the first that adds error where the metric shows none.
    pub culprit: Option<String>,
    /// Why there is nothing to take apart: the run was refused, or has other launches than the model.
    pub refused: Option<String>,
}

impl Bisect {
    /// Of a run that left nothing to take apart.
    pub fn refused(why: String) -> Bisect {
        let (ratios, logits, rows) = Default::default();
        Bisect { step: None, layer: None, ratios, logits, rows, culprit: None, refused: Some(why) }
    }

    /// What was found, in one line.
    pub fn line(&self) -> String {
        if let Some(why) = &self.refused {
            return format!("the run cannot be taken apart: {why}");
        }
        let Some(step) = self.step else {
            return "every launch is as near to the f32 oracle as a sound run's, and so is every layer's output".into();
        };
        let when = if step == 0 { "prefill".to_owned() } else { format!("decode step {step}") };
        let (place, ratio) = match self.layer {
            Some(layer) => (format!("layer {layer}"), self.ratios.get(layer).and_then(|r| r.get(step)).copied()),
            None => ("behind the layers".to_owned(), self.logits.get(step).copied()),
        };
        let ratio = ratio.unwrap_or(f64::NAN);
        let mut line =
            format!("first off at {when}, {place}: {ratio:.2} times a sound run's distance to the f32 forward pass");
        match self.culprit.as_ref().and_then(|name| self.rows.iter().find(|row| row.launch == *name)) {
            Some(row) => line.push_str(&format!(
                "; swapping {} for the f32 oracle brings it from {:.2} to {:.2}; it is {:.2e} off on its own inputs",
                row.launch, row.before, row.after, row.added
            )),
            None => line.push_str("; no single launch brings it back"),
        }
        line
    }
}

/// Takes a run apart.
///
/// `sound` is the label of the emulated device of the same arithmetic class.
///
/// Errors: those of the runs.
pub fn bisect(lab: &Lab, device: &str, sound: &str, script: &Script, altered: &dyn Alteration) -> Result<Bisect> {
    let truth = forward(&lab.config, &*lab.weights, &script.sequence(), script.ids.len())?;
    let mut bench = Swapped::new(lab, device, script, altered);
    let (observed, observed_off) = bench.run(&[])?;
    let (clean, clean_off) = Swapped::new(lab, sound, script, &Sound).run(&[])?;
    let measure = Measure { truth: &truth, clean: &clean, script };
    let seen = Seen { measure, observed, observed_off, clean_off };
    let layers = lab.config.num_hidden_layers;
    let ratios: Vec<Vec<f64>> = (0..layers).map(|l| seen.steps(&output_of(Some(l)))).collect::<Result<_>>()?;
    let logits = seen.steps(&output_of(None))?;
    let first = (0..logits.len()).find_map(|step| {
        let layer = ratios.iter().position(|row| is_off(row[step]));
        layer.map(|l| (step, Some(l))).or_else(|| is_off(logits[step]).then_some((step, None)))
    });
    let mut found = Bisect { step: None, layer: None, ratios, logits, rows: vec![], culprit: None, refused: None };
    // Where no output is off, a launch may still be.
    let Some((step, layer)) = first.or_else(|| seen.first_launch(&bench)) else { return Ok(found) };
    (found.step, found.layer) = (Some(step), layer);
    (found.rows, found.culprit) = swap(&mut bench, &seen, step, layer)?;
    Ok(found)
}

fn is_off(ratio: f64) -> bool {
    !at_most(ratio, LAYER)
}

/// The call site whose output is a layer's, or the model's.
fn output_of(layer: Option<usize>) -> String {
    layer.map_or("lm_head".to_owned(), |l| format!("l{l:02}.mlp_add"))
}

/// Answers the launches of one layer by the oracle, one more at a time.
fn swap(
    bench: &mut Swapped<'_>,
    seen: &Seen<'_>,
    step: usize,
    layer: Option<usize>,
) -> Result<(Vec<Row>, Option<String>)> {
    let stage = if step == 0 { Stage::Prefill } else { Stage::Decode };
    let output = output_of(layer);
    let mut before = seen.steps(&output)?[step];
    // The others have been looked at; behind the layers there is none to look at again.
    bench.layer = layer.or(Some(usize::MAX));
    let (mut rows, mut swapped, mut restored): (Vec<Row>, Vec<String>, Option<String>) = Default::default();
    for name in suspects(bench.names(stage == Stage::Prefill), layer) {
        swapped.push(name.clone());
        let after = match restored {
            // All behind it is swapped for nothing.
            Some(_) => before,
            None => seen.measure.steps(&bench.run(&swapped)?.0, &output)?[step],
        };
        if restored.is_none() && is_off(before) && !is_off(after) {
            restored = Some(name.clone());
        }
        let (added, added_over_sound) = seen.added_anywhere(&name, stage);
        let total = seen.measure.total(&seen.observed, stage, step, &name)?;
        rows.push(Row { launch: name, before, after, added, added_over_sound, total });
        before = after;
    }
    let culprit = restored.or_else(|| rows.iter().find(|row| row.adds()).map(|row| row.launch.clone()));
    Ok((rows, culprit))
}

/// What the run in question and the sound one have left.
struct Seen<'a> {
    measure: Measure<'a>,
    observed: Trace,
    observed_off: Offs,
    clean_off: Offs,
}

impl Seen<'_> {
    /// Distance of one site's output at each step.
    fn steps(&self, name: &str) -> Result<Vec<f64>> {
        self.measure.steps(&self.observed, name)
    }

    /// Distance of a launch from the oracle on its own inputs, alone and over a sound run's.
    fn added(&self, name: &str, stage: Stage) -> (f64, f64) {
        let of = |off: &Offs| off.get(&(stage, name.to_owned())).map_or(0.0, |off| off.rel_l2());
        let (found, own) = (of(&self.observed_off), of(&self.clean_off));
        (found, found / own.max(ROUNDING))
    }

    /// The cache is filled by prefill, whose own append may be what is wrong at a decode step.
    fn added_anywhere(&self, name: &str, stage: Stage) -> (f64, f64) {
        let here = self.added(name, stage);
        let filled = self.added(name, Stage::Prefill);
        if name.ends_with("kv_append") && filled.1 > here.1 { filled } else { here }
    }

    /// Step and layer of the first launch that adds error of its own.
    fn first_launch(&self, bench: &Swapped<'_>) -> Option<(usize, Option<usize>)> {
        let stages = [(0, Stage::Prefill), (1, Stage::Decode)];
        stages.into_iter().find_map(|(step, stage)| {
            let names = bench.names(stage == Stage::Prefill).iter();
            let adds = |(_, name): &&(Option<usize>, String)| !at_most(self.added(name, stage).1, LAUNCH);
            names.clone().find(adds).map(|(layer, _)| (step, *layer))
        })
    }
}

/// The launches of a layer in order, with what belongs to no layer and comes before it; behind the layers: the rest.
fn suspects(names: &[(Option<usize>, String)], layer: Option<usize>) -> Vec<String> {
    let last = names.iter().rposition(|(l, _)| l.is_some()).unwrap_or(0);
    let wanted = |at: usize, of: Option<usize>| match layer {
        Some(layer) => of == Some(layer) || of.is_none() && at < last,
        None => of.is_none() && at > last,
    };
    names.iter().enumerate().filter(|(at, (of, _))| wanted(*at, *of)).map(|(_, (_, name))| name.clone()).collect()
}

type Offs = std::collections::HashMap<(Stage, String), super::swap::Off>;

/// A runner whose launches can be swapped from run to run. Each run begins on a fresh runner: a fault may remember.
struct Swapped<'a> {
    lab: &'a Lab,
    device: &'a str,
    script: &'a Script,
    altered: &'a dyn Alteration,
    /// The layer whose launches are held against the oracle; none: all.
    layer: Option<usize>,
    prefill: Vec<(Option<usize>, String)>,
    decode: Vec<(Option<usize>, String)>,
}

impl<'a> Swapped<'a> {
    fn new(lab: &'a Lab, device: &'a str, script: &'a Script, altered: &'a dyn Alteration) -> Swapped<'a> {
        Swapped { lab, device, script, altered, layer: None, prefill: vec![], decode: vec![] }
    }

    fn runner(&mut self) -> Result<NpuRunner> {
        let runner = self.lab.runner(self.device, self.script, self.altered)?;
        if self.prefill.is_empty() {
            self.prefill = names(runner.prefill_plan(self.script.ids.len())?);
            self.decode = runner
                .plans()
                .find(|plan| plan.stage.name() == "decode")
                .map(names)
                .ok_or_else(|| Error::Plan { why: "no decode plan".into() })?;
        }
        Ok(runner)
    }

    fn names(&self, prefill: bool) -> &[(Option<usize>, String)] {
        if prefill { &self.prefill } else { &self.decode }
    }

    fn run(&mut self, swapped: &[String]) -> Result<(Trace, Offs)> {
        let mut runner = self.runner()?;
        let mut swapper = Swapper::new(&self.lab.config, self.lab.weights.clone(), self.layer);
        swapper.swapped = swapped.iter().cloned().collect::<BTreeSet<_>>();
        swapper.ids = self.script.sequence();
        let swapper = Arc::new(Mutex::new(swapper));
        let script = Script { before: vec![], ..self.script.clone() };
        if !self.script.before.is_empty() {
            // Without a swap: what this prompt leaves behind is part of the fault.
            runner.prefill(&self.altered.prompt(&self.script.before))?;
        }
        runner.add_hook(swapper.clone());
        let trace = trace(&mut runner, &script, self.altered)?;
        let off = std::mem::take(&mut swapper.lock().unwrap_or_else(PoisonError::into_inner).off);
        Ok((trace, off))
    }
}

/// Every launch and host op that can be swapped, with its layer.
fn names(plan: &Plan) -> Vec<(Option<usize>, String)> {
    let of = |step: &Step| -> Vec<(Option<usize>, String)> {
        match &step.op {
            Op::Dispatch(launches) => launches.iter().map(|l| (step.layer, l.name.clone())).collect(),
            Op::Host(HostOp::AddBias { .. } | HostOp::AddRotatedBias { .. }) => vec![],
            Op::Host(_) => vec![(step.layer, step.name.clone())],
        }
    };
    plan.steps.iter().flat_map(of).collect()
}

/// Distances to the truth.
struct Measure<'a> {
    truth: &'a Truth,
    clean: &'a Trace,
    script: &'a Script,
}

impl Measure<'_> {
    /// Of one site at prefill and at each decode step, over the sound run's.
    fn steps(&self, observed: &Trace, name: &str) -> Result<Vec<f64>> {
        let prefill = self.distances(observed, Stage::Prefill, name)?;
        let decode = self.distances(observed, Stage::Decode, name)?;
        let (own_prefill, own_decode) =
            (self.distances(self.clean, Stage::Prefill, name)?, self.distances(self.clean, Stage::Decode, name)?);
        let whole = |rows: &[(f64, f64)]| {
            let (error, size) = rows.iter().fold((0.0, 0.0), |(e, s), (error, size)| (e + error, s + size));
            (error / size).sqrt()
        };
        // The first row is a massive activation in many models.
        let body = |rows: Vec<(f64, f64)>| if rows.len() > 1 { rows[1..].to_vec() } else { rows };
        let mut found = vec![whole(&body(prefill)) / whole(&body(own_prefill)).max(ROUNDING)];
        // A step's own noise scatters; the steps' common one does not.
        let common = whole(&own_decode).max(ROUNDING);
        let step = |(row, own): (&(f64, f64), &(f64, f64))| whole(&[*row]) / whole(&[*own]).max(common);
        found.extend(decode.iter().zip(&own_decode).map(step));
        Ok(found)
    }

    /// Squared error and size of every row.
    fn distances(&self, trace: &Trace, stage: Stage, name: &str) -> Result<Vec<(f64, f64)>> {
        let gone = || Error::Plan { why: format!("the run left no {name}") };
        let segment = trace.get(stage, name).ok_or_else(gone)?;
        self.rows(segment).ok_or_else(gone)
    }

    fn rows(&self, segment: &Segment) -> Option<Vec<(f64, f64)>> {
        let right = self.truth.rows_of(segment, &self.script.positions)?;
        let rows = segment.values.chunks(segment.cols).zip(right.chunks(segment.cols));
        let row = |(found, right): (&[half::bf16], &[f32])| {
            found.iter().zip(right).fold((0.0, 0.0), |(error, size), (found, &right)| {
                let right = f64::from(right);
                (error + (found.to_f64() - right).powi(2), size + right.powi(2))
            })
        };
        Some(rows.map(row).collect())
    }

    /// Relative L2 of one launch's output at one step; not a number where the truth has no such launch.
    fn total(&self, observed: &Trace, stage: Stage, step: usize, name: &str) -> Result<f64> {
        let name = name.replace("kv_append", "k_cache");
        let Some(rows) = observed.get(stage, &name).and_then(|segment| self.rows(segment)) else { return Ok(f64::NAN) };
        let rows = if stage == Stage::Decode { rows.get(step - 1..step).unwrap_or_default() } else { &rows[..] };
        let (error, size) = rows.iter().fold((0.0, 0.0), |(e, s), (error, size)| (e + error, s + size));
        Ok((error / size).sqrt())
    }
}
