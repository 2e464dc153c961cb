//! Can the gates fail? Each fault of the catalogue is injected, every gate is asked, and what saw it is written down.
//!
//! The only module of this room that knows faults. Prints nothing.

mod gates;
mod harness;
mod locate;
pub mod matrix;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use locate::Place;

use super::{Bench, Subject, added, decode, devices, kv_rows, perplexity, phase3, positions};
use crate::check::{Outcome, Summary, Verdict};
use crate::device::Arithmetic;
use crate::error::{Error, Result};
use crate::fault::{Entry, Fault, Gate, Injection, Kind, Lens};
use crate::plan::PlanOptions;

/// What one gate said.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Sighting {
    pub outcome: String,
    /// The first reason.
    pub reason: String,
}

impl Sighting {
    fn of(verdict: &Verdict) -> Sighting {
        let reason = verdict.reasons().first().cloned().unwrap_or_default();
        Sighting { outcome: verdict.outcome().word().into(), reason }
    }

    fn refused(error: &Error) -> Sighting {
        let outcome = if matches!(error, Error::Incomplete { .. }) { Outcome::Inconclusive.word() } else { "REFUSED" };
        Sighting { outcome: outcome.into(), reason: error.to_string() }
    }

    /// Whether it stops whoever asks.
    pub fn stops(&self) -> bool {
        self.outcome != Outcome::Pass.word()
    }
}

/// Decode steps after the first affected one within which it must show.
const LATE: usize = 2;

/// One fault on one model and device.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Row {
    pub fault: String,
    pub kind: Kind,
    pub model: String,
    pub device: String,
    /// What each gate that was asked said.
    pub gates: BTreeMap<Gate, Sighting>,
    /// A gate that the catalogue names saw it.
    pub killed: bool,
    /// Whether what should point at it did; none where nothing but the verdict was asked for.
    pub located: Option<bool>,
    /// Where the lenses pointed.
    pub place: Place,
    /// Why no run of this model shows it, where that is known.
    pub unseen: Option<String>,
}

impl Row {
    /// Gates that saw it.
    pub fn seen(&self) -> impl Iterator<Item = Gate> {
        self.gates.iter().filter(|(_, s)| s.stops()).map(|(gate, _)| *gate)
    }
}

/// Prompts of an injected run: those with layer outputs, and one of another bucket.
///
/// Errors: as [`Subject::capture`].
pub fn prompts(subject: &Subject) -> Result<Vec<String>> {
    let capture = subject.capture()?;
    let mut prompts = capture.lens_prompts().to_vec();
    let other = capture.prompts().iter().find(|p| p.n_prompt > 64 && !prompts.contains(&p.id));
    prompts.extend(other.map(|p| p.id.clone()));
    Ok(prompts)
}

/// Injects the default instance of a fault and asks every gate.
///
/// Errors: [`Error::Unavailable`] for a fault the model cannot have; whatever is wrong with the sound model.
pub fn inject(entry: &'static Entry, subject: &Arc<Subject>, device: &str) -> Result<Row> {
    let fault = Arc::new(Fault::of(entry, &subject.config)?);
    let (gates, mut place) = match entry.injection {
        Injection::Harness(kind) => (harness::gates(kind, subject, device)?, Place::default()),
        _ => {
            let prompts = prompts(subject)?;
            let bench = Bench::new(subject.clone(), device, &prompts, PlanOptions::default())?.altered(fault.clone());
            gates::of_fault(&fault, &bench, &prompts)?
        }
    };
    let mut killed = entry.catches.iter().any(|gate| gates.get(gate).is_some_and(Sighting::stops));
    let mut gates = gates;
    let ieee = devices::open_device(device)?.info().arithmetic == Arithmetic::Ieee;
    let mut located = located(entry, &fault, subject, &gates, &place)?;
    if !ieee && (!killed || located == Some(false)) {
        // The same plan, weights and host on the other datapath: what the device's rounding hides is still there.
        let rerun = inject(entry, subject, "emu")?;
        killed |= rerun.killed;
        located = rerun.located;
        let seen = rerun.seen().map(Gate::name).collect::<Vec<_>>().join(", ");
        let outcome = if rerun.killed { Outcome::Fail.word() } else { Outcome::Pass.word() };
        gates.insert(Gate::IeeeRerun, Sighting { outcome: outcome.into(), reason: format!("seen by {seen}") });
        place = rerun.place;
    }
    let unseen = unseen(entry, subject);
    let (fault, kind, model, device) = (entry.id.into(), entry.kind, subject.name.clone(), device.into());
    Ok(Row { fault, kind, model, device, gates, killed, located, place, unseen })
}

/// Whether the lens that the catalogue names points at the fault.
fn located(
    entry: &Entry,
    fault: &Fault,
    subject: &Subject,
    gates: &BTreeMap<Gate, Sighting>,
    place: &Place,
) -> Result<Option<bool>> {
    let first = fault.at.layer.unwrap_or(0);
    Ok(match entry.lens {
        Lens::None => None,
        Lens::Layer => Some(place.layer == Some(first)),
        Lens::KvLayer => Some(place.kv_layer == Some(first)),
        Lens::Kernel(id) => Some(place.kernel.as_ref().is_some_and(|found| found.starts_with(id))),
        Lens::Tap(tap) => Some(place.tap.as_deref() == Some(tap)),
        Lens::Step(step) => {
            Some(place.step.is_some_and(|found| (step(&fault.at)..=step(&fault.at) + LATE).contains(&found)))
        }
        Lens::Position(from) => {
            Some(place.position.is_some() && place.position == locate::sampled(subject, from(&fault.at))?)
        }
        Lens::Message(word) => Some(gates.values().any(|s| s.stops() && s.reason.contains(word))),
    })
}

/// The reason why a model cannot show a fault that it can have.
fn unseen(entry: &Entry, subject: &Subject) -> Option<String> {
    (entry.unseen)(&subject.config).map(str::to_owned)
}

/// What a sound run showed.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Clean {
    /// What any gate said against it: a false alarm.
    pub alarms: Vec<String>,
    /// The figures that limits are set by, in the limits' units.
    pub figures: BTreeMap<&'static str, f64>,
}

/// The sound model through the same gates, on these prompts.
///
/// Errors: those of the runs.
pub fn clean(subject: &Arc<Subject>, device: &str, prompts: &[String]) -> Result<Clean> {
    let lens: Vec<String> =
        subject.capture()?.lens_prompts().iter().filter(|id| prompts.contains(id)).cloned().collect();
    let bench = Bench::new(subject.clone(), device, prompts, PlanOptions::default())?;
    let (gates, walked) = gates::of_run(&bench, prompts, &lens)?;
    let stops = gates.iter().filter(|(_, said)| said.stops());
    let alarms = stops.map(|(gate, said)| format!("{}: {}", gate.name(), said.reason)).collect();
    Ok(Clean { alarms, figures: figures(&bench, prompts, &lens, &walked)? })
}

fn figures(
    bench: &Bench,
    prompts: &[String],
    lens: &[String],
    walked: &gates::Walked,
) -> Result<BTreeMap<&'static str, f64>> {
    let max = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let (mut layers, mut taps, mut rows) = (vec![], vec![], vec![]);
    for id in added::prompts(bench)?.iter().filter(|id| lens.contains(id)) {
        layers.extend(added::layers(bench, id)?.iter().map(|found| found.over_first));
        taps.extend(added::taps(bench, id)?.iter().map(|(_, over)| *over));
    }
    for id in lens {
        rows.extend(kv_rows::rows(bench, id)?.iter().map(|rows| rows.over_own));
    }
    let mut noise = vec![];
    for id in lens {
        noise.extend(phase3::lens(bench, id)?.iter().map(|layer| layer.noise_ratio));
    }
    let walked: Vec<f64> = walked.iter().map(|(_, distance)| *distance).collect();
    let (walked, hf) = (Summary::of(&walked), decode::hf_distance(bench)?);
    let (kl, floor) = phase3::kl_and_floor(bench, prompts)?;
    let perplexity = perplexity::measure(bench, gates::TOKENS)?;
    let loss = 1.0 - perplexity.hf_bf16 / perplexity.device;
    let (regret, own_regret) = phase3::regret(bench, prompts)?;
    let mut positions = vec![];
    if let Some(id) = positions::longest(bench.subject(), lens)? {
        positions.extend(positions::rows(bench, &id)?.iter().filter(|row| row.position > 0).map(|row| row.over_own));
    }
    Ok([
        ("added_max", max(&mut layers.into_iter())),
        ("taps_max", max(&mut taps.into_iter())),
        ("kv_max", max(&mut rows.into_iter())),
        ("noise_max", max(&mut noise.into_iter())),
        ("decode_median", walked.median / hf.median),
        ("decode_max", walked.max / hf.max),
        ("perplexity_loss", loss),
        ("regret", regret / own_regret),
        ("kl_median", kl.summary.median / floor.summary.median),
        ("kl_prompt", max(&mut phase3::kl_by_prompt(bench, prompts)?.into_iter())),
        ("kl_p95", kl.summary.p95 / floor.summary.p95),
        ("rows_max", max(&mut positions.into_iter())),
    ]
    .into())
}
