//! Which named fault accounts for what a run did.
//!
//! Every fault of the catalogue that the model can have is put into the emulated device of the same arithmetic class, and
//! what it changes there (`h`) is held against what the run in question has changed (`r`), launch by launch. A launch
//! that neither touches says nothing; one that only one of them touches speaks against it. So the first launches that
//! are off, where the fault itself shows and not its consequences, decide more than the last. A fault of another head, row
//! or step than any that was tried changes other elements in the same way: how much is changed where, without regard to
//! which elements, counts for as much as the elements themselves.

use std::collections::{BTreeMap, HashMap, HashSet};
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

/// A change with its square, in units of the sound run's, and the share of elements that it is in.
struct Touched {
    change: Change,
    energy: f64,
    spread: f64,
}

const GONE: Touched = Touched { change: Change::Gone, energy: 1.0, spread: 1.0 };

/// What a run changed, by site; sites it did not touch are left out.
struct Changes {
    sites: HashMap<Site, Touched>,
    /// The same without regard to which elements, and of decode to which steps.
    outline: HashMap<(Stage, String), Trait>,
}

/// How much of a site was changed, on average over the steps that were.
#[derive(Debug, Clone, Copy, Default)]
struct Trait {
    energy: f64,
    spread: f64,
    steps: f64,
}

/// One site of the sound run.
struct Own {
    rows: Vec<f32>,
    /// Sum of squares.
    size: f64,
    /// Place in the order of computation.
    order: usize,
}

/// The sound run.
struct Ground {
    sites: HashMap<Site, Own>,
    order: HashMap<(Stage, String), usize>,
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
        let mut all: Vec<(usize, Site, &[bf16])> =
            sites(trace).enumerate().map(|(at, (site, rows))| (at, site, rows)).collect();
        // Stages in order, in decode step by step.
        all.sort_by_key(|(at, (stage, _, step), _)| (*stage, *step, *at));
        let mut ground = Ground { sites: HashMap::new(), order: HashMap::new() };
        for (order, (_, site, rows)) in all.into_iter().enumerate() {
            let rows: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
            let size = rows.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().max(1e-20);
            ground.order.entry((site.0, site.1.clone())).or_insert(order);
            ground.sites.insert(site, Own { rows, size, order });
        }
        ground
    }

    /// What is no number counts as far off: four times the site's own spread.
    fn changes(&self, trace: &Trace) -> Changes {
        let mut found: HashMap<Site, Touched> = HashMap::new();
        let mut there: HashSet<Site> = HashSet::new();
        for (site, rows) in sites(trace) {
            there.insert(site.clone());
            let Some(Own { rows: own, size, .. }) = self.sites.get(&site).filter(|own| own.rows.len() == rows.len())
            else {
                found.insert(site, GONE);
                continue;
            };
            let far = 4.0 * (size / own.len().max(1) as f64).sqrt() as f32;
            let off = |(x, &own): (&bf16, &f32)| if x.is_finite() { x.to_f32() - own } else { far };
            let change: Vec<bf16> = rows.iter().zip(own).map(off).map(bf16::from_f32).collect();
            let energy = dot(&change, &change) / size;
            let touched = change.iter().filter(|x| **x != bf16::ZERO).count();
            if touched > 0 {
                let spread = touched as f64 / change.len() as f64;
                found.insert(site, Touched { change: Change::Rows(change), energy, spread });
            }
        }
        for site in self.sites.keys().filter(|site| !there.contains(*site)) {
            found.insert(site.clone(), GONE);
        }
        let mut outline: HashMap<(Stage, String), Trait> = HashMap::new();
        for ((stage, name, _), touched) in &found {
            let of = outline.entry((*stage, name.clone())).or_default();
            of.energy += touched.energy;
            of.spread += touched.spread;
            of.steps += 1.0;
        }
        Changes { sites: found, outline }
    }
}

/// How well one change accounts for another.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Match {
    /// Mean over the sites that either touches of `2 <r, h> / (<r, r> + <h, h>)`: 1 for the same change, 0 for none.
    pub likeness: f64,
    /// The same with `|r| |h|` for `<r, h>`, times the ratio of the shares of elements that are touched: alike in kind, be it
    /// at another head, row or step.
    pub outline: f64,
    /// `1 - |r - h|^2 / |r|^2` over all sites, each in units of the sound run's size there.
    pub share: f64,
    /// `<r, h> / |r| |h|`, likewise.
    pub cosine: f64,
}

impl Match {
    const NONE: Match = Match { likeness: 0.0, outline: 0.0, share: 0.0, cosine: 0.0 };
    const SAME: Match = Match { likeness: 1.0, outline: 1.0, share: 1.0, cosine: 1.0 };

    /// What hypotheses are ranked by.
    pub fn score(&self) -> f64 {
        (self.likeness.max(0.0) + self.outline) / 2.0
    }
}

/// Mean of figures by their place in the order of computation: the first sites show the fault, the later ones what has
/// become of it, and so each counts less than the one before (1, 1/2, 1/3 ...).
fn by_order(mut figures: Vec<(usize, f64)>) -> f64 {
    figures.sort_by_key(|(order, _)| *order);
    let (mut sum, mut weights) = (0.0, 0.0);
    for (rank, (_, figure)) in figures.into_iter().enumerate() {
        let weight = 1.0 / (rank + 1) as f64;
        sum += weight * figure;
        weights += weight;
    }
    if weights > 0.0 { sum / weights } else { 0.0 }
}

/// `noise`: relative square of a site's change that a sound run of the observed device may have.
fn compare(ground: &Ground, observed: &Changes, supposed: &Changes, noise: f64) -> Match {
    let order = |site: &Site| ground.sites.get(site).map_or(0, |own| own.order);
    let mut figures = vec![];
    let (mut rr, mut hh, mut rh) = (0.0, 0.0, 0.0);
    for (site, r) in &observed.sites {
        let (dot, same) = match (&r.change, supposed.sites.get(site)) {
            (Change::Gone, Some(Touched { change: Change::Gone, .. })) => (1.0, 1.0),
            (Change::Rows(one), Some(Touched { change: Change::Rows(other), energy, .. })) => {
                let size = ground.sites.get(site).map_or(1.0, |own| own.size);
                let dot = dot(one, other) / size;
                (dot, (2.0 * dot + noise) / (r.energy + energy + noise))
            }
            (_, None) if r.energy <= noise => continue,
            (_, None) => (0.0, noise / (r.energy + noise)),
            _ => (0.0, 0.0),
        };
        figures.push((order(site), same));
        rr += r.energy;
        rh += dot;
    }
    for (site, h) in &supposed.sites {
        hh += h.energy;
        if !observed.sites.contains_key(site) && h.energy > noise {
            figures.push((order(site), noise / (h.energy + noise)));
        }
    }
    let over = |x: f64, y: f64| if y > 0.0 { x / y } else { 0.0 };
    Match {
        likeness: by_order(figures),
        outline: outlines(ground, observed, supposed, noise),
        share: over(2.0 * rh - hh, rr),
        cosine: over(rh, (rr * hh).sqrt()),
    }
}

/// In sixteen partial sums of f32; what is compared holds no NaN, so widening is a shift.
fn dot(a: &[bf16], b: &[bf16]) -> f64 {
    let wide = |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
    let mut sums = [0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += wide(a[i]) * wide(b[i]);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(&a, &b)| f64::from(wide(a) * wide(b))).sum();
    sums.iter().map(|&x| f64::from(x)).sum::<f64>() + rest
}

fn outlines(ground: &Ground, observed: &Changes, supposed: &Changes, noise: f64) -> f64 {
    let mut figures = vec![];
    let order = |site: &(Stage, String)| ground.order.get(site).copied().unwrap_or(0);
    for (site, r) in &observed.outline {
        let r_energy = r.energy / r.steps;
        match supposed.outline.get(site) {
            Some(h) => {
                let h_energy = h.energy / h.steps;
                let spreads = (r.spread / r.steps, h.spread / h.steps);
                let spread = if noise > 0.0 { 1.0 } else { spreads.0.min(spreads.1) / spreads.0.max(spreads.1) };
                let same = (2.0 * (r_energy * h_energy).sqrt() + noise) / (r_energy + h_energy + noise);
                figures.push((order(site), same * spread));
            }
            None if r_energy <= noise => {}
            None => figures.push((order(site), noise / (r_energy + noise))),
        }
    }
    for (site, h) in &supposed.outline {
        let energy = h.energy / h.steps;
        if !observed.outline.contains_key(site) && energy > noise {
            figures.push((order(site), noise / (energy + noise)));
        }
    }
    by_order(figures)
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
