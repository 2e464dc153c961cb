//! Which named fault accounts for what a run did.
//!
//! Every fault of the catalogue that the model can have is put into the emulated device of the same arithmetic class, and
//! what it changes there (`h`) is held against what the run in question has changed (`r`), launch by launch. A launch
//! that neither touches says nothing; one that only one of them touches speaks against it. So the first launches that
//! are off, where the fault itself shows and not its consequences, decide more than the last. A fault of another head, row
//! or step than any that was tried changes other elements in the same way: how much is changed where, without regard to
//! which elements, counts for as much as the elements themselves.

use std::collections::BTreeMap;
use std::time::Instant;

use super::lab::{Lab, Script};
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::fault::{At, Entry, Fault, Injection, Reach, catalogue};
use crate::model::ModelConfig;
use crate::runner::Sound;

mod changes;

pub use changes::Match;
use changes::{Changes, Ground, compare};

/// What is left of a run: its trace, or the words of its refusal.
pub type Outcome = std::result::Result<Trace, String>;

/// Runs a script; a run that fails is an outcome too.
pub fn outcome(traced: Result<Trace>) -> Outcome {
    traced.map_err(|error| without_numbers(&error.to_string()))
}

/// Two refusals are the same one whatever sizes they name.
fn without_numbers(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// A fault with its parameters.
pub type Instance = (&'static Entry, At);

/// An instance of a fault and what it changes.
struct Candidate {
    entry: &'static Entry,
    at: At,
    changes: std::result::Result<Changes, String>,
}

/// What each fault of the catalogue does to one script on one device.
pub struct Library {
    ground: Ground,
    candidates: Vec<Candidate>,
    /// Instances that were left out, for want of time.
    pub left_out: usize,
}

/// A fault that accounts for a run, with the instance that does it best.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Hypothesis {
    pub fault: &'static str,
    pub title: &'static str,
    pub cause: &'static str,
    pub remedy: &'static str,
    pub at: At,
    #[serde(flatten)]
    pub matched: Match,
}

/// Whether an entry is a fault of the run itself, which a run can be made of.
pub fn is_of_run(entry: &Entry) -> bool {
    !matches!(entry.injection, Injection::Prompt(_) | Injection::Record(_) | Injection::Harness(_))
}

/// Where a bisect has led to.
#[derive(Debug, Clone, Default)]
pub struct Suspect {
    pub layer: Option<usize>,
    /// The call site without its layer: `q_proj`.
    pub site: Option<String>,
}

impl Suspect {
    /// 0 for a fault of this launch, 1 of its layer, 2 of every layer, 3 for any other.
    fn distance(&self, entry: &Entry, at: &At) -> u8 {
        let named = |sites: &[&str]| self.site.as_deref().is_some_and(|site| sites.contains(&site));
        let here = at.layer.is_none() || at.layer == self.layer;
        match entry.injection {
            Injection::Launch { sites, .. } if here && named(sites) => 0,
            _ if self.layer.is_some() && at.layer == self.layer => 1,
            _ if at.layer.is_none() => 2,
            _ => 3,
        }
    }
}

/// The entry's own instances; a kernel's fault is tried in each layer alone too, for another may have been placed there.
fn instances_of(entry: &Entry, config: &ModelConfig) -> Vec<At> {
    let mut instances = entry.library(config);
    let in_layers = !matches!(entry.injection, Injection::Launch { sites: ["lm_head"], .. });
    if entry.reach == Reach::Everywhere && matches!(entry.injection, Injection::Launch { .. }) && in_layers {
        let default = entry.default_at(config);
        instances.extend((0..config.num_hidden_layers).map(|l| At { layer: Some(l), ..default.clone() }));
    }
    instances
}

impl Library {
    /// Runs every instance of the catalogue, those of one layer in `layers` only, until `deadline`; those that could be at
    /// the `suspect` launch first.
    ///
    /// Errors: those of the sound run.
    pub fn new(
        lab: &Lab,
        device: &str,
        script: &Script,
        layers: Option<&[usize]>,
        suspect: &Suspect,
        deadline: Option<Instant>,
    ) -> Result<Library> {
        let mut instances: Vec<Instance> = vec![];
        for entry in catalogue().iter().copied().filter(|e| is_of_run(e) && (e.absent)(&lab.config).is_none()) {
            let here = |at: &At| at.layer.is_none_or(|l| layers.is_none_or(|layers| layers.contains(&l)));
            instances.extend(instances_of(entry, &lab.config).into_iter().filter(here).map(|at| (entry, at)));
        }
        instances.sort_by_key(|(entry, at)| suspect.distance(entry, at));
        Library::of(lab, device, script, instances, deadline)
    }

    /// Runs these instances until `deadline`.
    ///
    /// Errors: those of the sound run.
    pub fn of(
        lab: &Lab,
        device: &str,
        script: &Script,
        instances: Vec<Instance>,
        deadline: Option<Instant>,
    ) -> Result<Library> {
        let ground = Ground::new(&lab.trace(device, script, &Sound)?);
        let mut library = Library { ground, candidates: vec![], left_out: 0 };
        for (entry, at) in instances {
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                library.left_out += 1;
                continue;
            }
            let changes = library.changes(lab, device, script, entry, &at)?;
            library.candidates.push(Candidate { entry, at, changes });
        }
        Ok(library)
    }

    /// The instances that change nothing in this script.
    pub fn sound_candidates(&self) -> Vec<Instance> {
        let sound = |c: &&Candidate| c.changes.as_ref().is_ok_and(|changes| changes.sites.is_empty());
        self.candidates.iter().filter(sound).map(|c| (c.entry, c.at.clone())).collect()
    }

    fn changes(
        &self,
        lab: &Lab,
        device: &str,
        script: &Script,
        entry: &'static Entry,
        at: &At,
    ) -> Result<std::result::Result<Changes, String>> {
        let fault = Fault::new(entry, &lab.config, at.clone())?;
        let traced = lab.trace(device, script, &fault);
        if let Err(error @ Error::Unavailable { .. }) = traced {
            return Err(error);
        }
        Ok(outcome(traced).map(|trace| self.ground.changes(&trace)))
    }

    /// Whether the run has done anything that a sound one has not.
    pub fn is_sound(&self, observed: &Outcome, noise: f64) -> bool {
        observed
            .as_ref()
            .is_ok_and(|trace| self.ground.changes(trace).sites.values().all(|touched| touched.energy <= noise))
    }

    /// The faults by how well they account for a run, the best instance of each.
    pub fn explain(&self, observed: &Outcome, noise: f64) -> Vec<Hypothesis> {
        let observed = observed.as_ref().map(|trace| self.ground.changes(trace));
        let mut best: BTreeMap<&'static str, Hypothesis> = BTreeMap::new();
        for Candidate { entry, at, changes } in &self.candidates {
            let matched = match (&observed, changes) {
                (Ok(observed), Ok(supposed)) => compare(&self.ground, observed, supposed, noise),
                (Err(one), Err(other)) if *one == other => Match::SAME,
                _ => Match::NONE,
            };
            let Entry { id, title, cause, remedy, .. } = **entry;
            let found = Hypothesis { fault: id, title, cause, remedy, at: at.clone(), matched };
            match best.get_mut(id) {
                Some(known) if known.matched.score() >= matched.score() => {}
                _ => drop(best.insert(id, found)),
            }
        }
        let mut ranked: Vec<Hypothesis> = best.into_values().filter(|h| h.matched.score() > 0.0).collect();
        ranked.sort_by(|a, b| b.matched.score().total_cmp(&a.matched.score()));
        ranked
    }
}
