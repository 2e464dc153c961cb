//! Which named fault accounts for what a run did.
//!
//! Every fault of the catalogue that the model can have is put into the emulated device of the same arithmetic class, and
//! what it changes there (`h`) is held against what the run in question has changed (`r`), launch by launch. A launch
//! that neither touches says nothing; one that only one of them touches speaks against it. So the first launches that
//! are off, where the fault itself shows and not its consequences, decide as much as the last.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use half::bf16;

use super::lab::{Lab, Script};
use super::trace::{Stage, Trace};
use crate::error::{Error, Result};
use crate::fault::{At, Entry, Fault, Injection, Reach, catalogue};
use crate::model::ModelConfig;
use crate::runner::Sound;

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

/// A site of a run: stage, launch, and of decode the step.
type Site = (Stage, String, usize);

/// What a run changed at one site.
enum Change {
    /// Shapes: as the sound run's rows.
    Rows(Vec<bf16>),
    /// The launch is not there, or has another width.
    Gone,
}

/// What a run changed, by site; sites it did not touch are left out.
struct Changes {
    sites: HashMap<Site, (Change, f64)>,
}

/// The sound run's rows and their squares.
struct Ground {
    sites: HashMap<Site, (Vec<f32>, f64)>,
}

/// Rows of a trace by site: of decode each step apart.
fn sites(trace: &Trace) -> impl Iterator<Item = (Site, &[bf16])> {
    trace.segments.iter().flat_map(|segment| {
        let rows = if segment.stage == Stage::Decode { segment.cols.max(1) } else { segment.values.len().max(1) };
        let parts = segment.values.chunks(rows).enumerate();
        parts.map(move |(step, rows)| ((segment.stage, segment.name.clone(), step), rows))
    })
}

impl Ground {
    fn new(trace: &Trace) -> Ground {
        let site = |(site, rows): (Site, &[bf16])| {
            let rows: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
            let size = rows.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().max(1e-20);
            (site, (rows, size))
        };
        Ground { sites: sites(trace).map(site).collect() }
    }

    /// What is no number counts as far off: four times the site's own spread.
    fn changes(&self, trace: &Trace) -> Changes {
        let mut found: HashMap<Site, (Change, f64)> = HashMap::new();
        let mut seen = 0;
        for (site, rows) in sites(trace) {
            let Some((own, size)) = self.sites.get(&site) else {
                found.insert(site, (Change::Gone, 1.0));
                continue;
            };
            seen += 1;
            if own.len() != rows.len() {
                found.insert(site, (Change::Gone, 1.0));
                continue;
            }
            let far = 4.0 * (size / own.len().max(1) as f64).sqrt() as f32;
            let off = |(x, &own): (&bf16, &f32)| if x.is_finite() { x.to_f32() - own } else { far };
            let change: Vec<bf16> = rows.iter().zip(own).map(off).map(bf16::from_f32).collect();
            let energy = change.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / size;
            if energy > 0.0 {
                found.insert(site, (Change::Rows(change), energy));
            }
        }
        if seen < self.sites.len() {
            let there: std::collections::HashSet<Site> = sites(trace).map(|(site, _)| site).collect();
            for site in self.sites.keys().filter(|site| !there.contains(*site)) {
                found.insert(site.clone(), (Change::Gone, 1.0));
            }
        }
        Changes { sites: found }
    }
}

/// How well one change accounts for another.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Match {
    /// Mean over the sites that either touches of `2 <r, h> / (<r, r> + <h, h>)`: 1 for the same change, 0 for none.
    pub likeness: f64,
    /// `1 - |r - h|^2 / |r|^2` over all sites, each in units of the sound run's size there.
    pub share: f64,
    /// `<r, h> / |r| |h|`, likewise.
    pub cosine: f64,
}

/// `noise`: relative square of a site's change that a sound run of the observed device may have.
fn compare(ground: &Ground, observed: &Changes, supposed: &Changes, noise: f64) -> Match {
    let (mut likeness, mut touched) = (0.0, 0usize);
    let (mut rr, mut hh, mut rh) = (0.0, 0.0, 0.0);
    for (site, (change, energy)) in &observed.sites {
        let other = supposed.sites.get(site);
        let (own, dot, same) = match (change, other) {
            (Change::Gone, Some((Change::Gone, _))) => (0.0, 0.0, 1.0),
            (Change::Gone, _) => (0.0, 0.0, 0.0),
            (Change::Rows(_), Some((Change::Gone, _))) => (*energy, 0.0, 0.0),
            (Change::Rows(_), None) => (*energy, 0.0, noise / (energy + noise)),
            (Change::Rows(r), Some((Change::Rows(h), theirs))) => {
                let size = ground.sites.get(site).map_or(1.0, |(_, size)| *size);
                let dot = r.iter().zip(h).map(|(r, h)| r.to_f64() * h.to_f64()).sum::<f64>() / size;
                (*energy, dot, (2.0 * dot + noise) / (energy + theirs + noise))
            }
        };
        if own <= noise && other.is_none() {
            continue;
        }
        touched += 1;
        likeness += same;
        rr += own;
        rh += dot;
    }
    for (site, (_, energy)) in &supposed.sites {
        hh += energy;
        if !observed.sites.contains_key(site) && *energy > noise {
            touched += 1;
            likeness += noise / (energy + noise);
        }
    }
    let over = |x: f64, y: f64| if y > 0.0 { x / y } else { 0.0 };
    Match {
        likeness: over(likeness, touched as f64),
        share: over(2.0 * rh - hh, rr),
        cosine: over(rh, (rr * hh).sqrt()),
    }
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
    /// Runs every instance of the catalogue, those of one layer in `layers` only, until `deadline`.
    ///
    /// Errors: those of the sound run.
    pub fn new(
        lab: &Lab,
        device: &str,
        script: &Script,
        layers: Option<&[usize]>,
        deadline: Option<Instant>,
    ) -> Result<Library> {
        let mut instances: Vec<Instance> = vec![];
        for entry in catalogue().iter().copied().filter(|e| is_of_run(e) && (e.absent)(&lab.config).is_none()) {
            let here = |at: &At| at.layer.is_none_or(|l| layers.is_none_or(|layers| layers.contains(&l)));
            instances.extend(instances_of(entry, &lab.config).into_iter().filter(here).map(|at| (entry, at)));
        }
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
        observed.as_ref().is_ok_and(|trace| self.ground.changes(trace).sites.values().all(|(_, energy)| *energy <= noise))
    }

    /// The faults by how well they account for a run, the best instance of each.
    pub fn explain(&self, observed: &Outcome, noise: f64) -> Vec<Hypothesis> {
        let observed = observed.as_ref().map(|trace| self.ground.changes(trace));
        let mut best: BTreeMap<&'static str, Hypothesis> = BTreeMap::new();
        for Candidate { entry, at, changes } in &self.candidates {
            let matched = match (&observed, changes) {
                (Ok(observed), Ok(supposed)) => compare(&self.ground, observed, supposed, noise),
                (Err(one), Err(other)) if *one == other => Match { likeness: 1.0, share: 1.0, cosine: 1.0 },
                _ => Match { likeness: 0.0, share: 0.0, cosine: 0.0 },
            };
            let Entry { id, title, cause, remedy, .. } = **entry;
            let found = Hypothesis { fault: id, title, cause, remedy, at: at.clone(), matched };
            match best.get_mut(id) {
                Some(known) if known.matched.likeness >= matched.likeness => {}
                _ => drop(best.insert(id, found)),
            }
        }
        let mut ranked: Vec<Hypothesis> = best.into_values().filter(|h| h.matched.likeness > 0.0).collect();
        ranked.sort_by(|a, b| b.matched.likeness.total_cmp(&a.matched.likeness));
        ranked
    }
}
