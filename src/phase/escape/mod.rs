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

use super::{Bench, Subject};
use crate::check::{Outcome, Verdict};
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
    let (gates, place) = match entry.injection {
        Injection::Harness(kind) => (harness::gates(kind, subject, device)?, Place::default()),
        _ => {
            let prompts = prompts(subject)?;
            let bench = Bench::new(subject.clone(), device, &prompts, PlanOptions::default())?.altered(fault.clone());
            gates::of_fault(&fault, &bench, &prompts)?
        }
    };
    let killed = entry.catches.iter().any(|gate| gates.get(gate).is_some_and(Sighting::stops));
    let located = located(entry, &fault, subject, &gates, &place)?;
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
        Lens::Step(step) => Some(place.step == Some(step(&fault.at))),
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

/// The sound model through the same gates, on these prompts: what any of them says here is a false alarm.
///
/// Errors: those of the runs.
pub fn clean(subject: &Arc<Subject>, device: &str, prompts: &[String]) -> Result<BTreeMap<Gate, Sighting>> {
    let lens: Vec<String> =
        subject.capture()?.lens_prompts().iter().filter(|id| prompts.contains(id)).cloned().collect();
    let bench = Bench::new(subject.clone(), device, prompts, PlanOptions::default())?;
    gates::of_run(&bench, prompts, &lens)
}
