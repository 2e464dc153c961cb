//! What a run changed against the sound one, site by site, and how well one such change accounts for another. Knows no
//! fault: it compares rows.

use std::collections::{HashMap, HashSet};

use half::bf16;

use crate::explain::trace::{Stage, Trace};

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
pub(super) struct Touched {
    change: Change,
    pub(super) energy: f64,
    spread: f64,
}

const GONE: Touched = Touched { change: Change::Gone, energy: 1.0, spread: 1.0 };

/// What a run changed, by site; sites it did not touch are left out.
pub(super) struct Changes {
    pub(super) sites: HashMap<Site, Touched>,
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
pub(super) struct Ground {
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
    pub(super) fn new(trace: &Trace) -> Ground {
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
    pub(super) fn changes(&self, trace: &Trace) -> Changes {
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
    pub(super) const NONE: Match = Match { likeness: 0.0, outline: 0.0, share: 0.0, cosine: 0.0 };
    pub(super) const SAME: Match = Match { likeness: 1.0, outline: 1.0, share: 1.0, cosine: 1.0 };

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
pub(super) fn compare(ground: &Ground, observed: &Changes, supposed: &Changes, noise: f64) -> Match {
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
