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
use crate::runner::{Alteration, NpuRunner, Sound};

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
    let mut bench = Swapped::new(lab, device, script, altered, None)?;
    let (observed, observed_off) = bench.run(&[])?;
    let mut other = Swapped::new(lab, sound, script, &Sound, None)?;
    let (clean, clean_off) = other.run(&[])?;
    let measure = Measure { truth: &truth, clean: &clean, script };
    let layers = lab.config.num_hidden_layers;
    let ratios: Vec<Vec<f64>> =
        (0..layers).map(|l| measure.steps(&observed, &format!("l{l:02}.mlp_add"))).collect::<Result<_>>()?;
    let logits = measure.steps(&observed, "lm_head")?;
    let steps = script.teacher.len() + 1;
    let bad = |x: f64| !at_most(x, LAYER);
    let first = (0..steps).find_map(|step| {
        let layer = ratios.iter().position(|row| bad(row[step]));
        layer.map(|l| (step, Some(l))).or_else(|| bad(logits[step]).then_some((step, None)))
    });
    let added = |name: &str, stage: Stage| -> (f64, f64) {
        let of = |off: &Offs| off.get(&(stage, name.to_owned())).map_or(0.0, |off| off.rel_l2());
        let (found, own) = (of(&observed_off), of(&clean_off));
        (found, found / own.max(ROUNDING))
    };
    // Where no output is off, a launch may still be: look at them all.
    let plans = bench.names(first.is_none_or(|(step, _)| step == 0));
    let adds = |stage: Stage, names: &[(Option<usize>, String)]| {
        names.iter().find(|(_, name)| !at_most(added(name, stage).1, LAUNCH)).cloned()
    };
    let (step, layer, stage) = match first {
        Some((step, layer)) => (Some(step), layer, if step == 0 { Stage::Prefill } else { Stage::Decode }),
        None => {
            let prefill = adds(Stage::Prefill, &plans).map(|(layer, _)| (0, layer, Stage::Prefill));
            let decode = || adds(Stage::Decode, &bench.names(false)).map(|(layer, _)| (1, layer, Stage::Decode));
            match prefill.or_else(decode) {
                Some((step, layer, stage)) => (Some(step), layer, stage),
                None => {
                    return Ok(Bisect {
                        step: None,
                        layer: None,
                        ratios,
                        logits,
                        rows: vec![],
                        culprit: None,
                        refused: None,
                    });
                }
            }
        }
    };
    let step = step.unwrap_or(0);
    let names = suspects(&bench.names(stage == Stage::Prefill), layer);
    let metric = layer.map_or("lm_head".to_owned(), |l| format!("l{l:02}.mlp_add"));
    let mut rows: Vec<Row> = vec![];
    let mut swapped: Vec<String> = vec![];
    let mut before = measure.steps(&observed, &metric)?[step];
    // The others have been looked at; behind the layers there is none to look at again.
    bench.layer = layer.or(Some(usize::MAX));
    let mut restored = None;
    for name in names {
        swapped.push(name.clone());
        let after = match restored {
            // All behind it is swapped for nothing.
            Some(_) => before,
            None => measure.steps(&bench.run(&swapped)?.0, &metric)?[step],
        };
        if restored.is_none() && bad(before) && !bad(after) {
            restored = Some(name.clone());
        }
        // The cache is filled by prefill, whose own append may be what is wrong.
        let of_stage = added(&name, stage);
        let (own, over) = if name.ends_with("kv_append") && added(&name, Stage::Prefill).1 > of_stage.1 {
            added(&name, Stage::Prefill)
        } else {
            of_stage
        };
        let total = measure.total(&observed, stage, step, &name)?;
        rows.push(Row { launch: name, before, after, added: own, added_over_sound: over, total });
        before = after;
    }
    let culprit = restored.or_else(|| rows.iter().find(|row| row.adds()).map(|row| row.launch.clone()));
    Ok(Bisect { step: Some(step), layer, ratios, logits, rows, culprit, refused: None })
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
    layer: Option<usize>,
    prefill: Vec<(Option<usize>, String)>,
    decode: Vec<(Option<usize>, String)>,
}

impl<'a> Swapped<'a> {
    fn new(
        lab: &'a Lab,
        device: &'a str,
        script: &'a Script,
        altered: &'a dyn Alteration,
        layer: Option<usize>,
    ) -> Result<Swapped<'a>> {
        Ok(Swapped { lab, device, script, altered, layer, prefill: vec![], decode: vec![] })
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

    fn names(&self, prefill: bool) -> Vec<(Option<usize>, String)> {
        if prefill { self.prefill.clone() } else { self.decode.clone() }
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
            runner.prefill_only(&self.altered.prompt(&self.script.before))?;
        }
        runner.add_hook(swapper.clone());
        let trace = trace(&mut runner, &script, self.altered)?;
        let off = std::mem::take(&mut swapper.lock().unwrap_or_else(PoisonError::into_inner).off);
        Ok((trace, off))
    }
}

trait PrefillOnly {
    fn prefill_only(&mut self, ids: &[u32]) -> Result<()>;
}

impl PrefillOnly for NpuRunner {
    fn prefill_only(&mut self, ids: &[u32]) -> Result<()> {
        crate::runner::Runner::prefill(self, ids).map(drop)
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
