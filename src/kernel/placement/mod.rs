//! Which tile configs of a kernel fit a shape, before any hardware is asked: the constraints of the facts, evaluated.
//!
//! A good config is one with a completion that breaks no rule; a bad one has none. A recorded failure rejects what
//! repeats it, whether or not a rule explains it; [`census`] keeps the two apart.

mod search;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use serde::Serialize;

use self::search::{Leaf, Query, Rule, Search, warnings};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::kernel::facts::{self, KernelFacts, Point, Row, Tier, Wanted};
use crate::kernel::registry::{self, Near};

/// Measured shapes that a proposal is compared with.
const NEIGHBOURS: usize = 5;
/// What halving the tiles costs a proposal, in units of its distance.
const IDLE_TILES: f64 = 2.0;
/// Configs proposed for a shape that was not measured.
const PROPOSALS: usize = 3;

/// A config that fits.
#[derive(Debug, Clone, Serialize)]
pub struct Proposal {
    pub method: Option<String>,
    pub config: Point,
    /// Compute tiles it uses, where the facts say.
    pub tiles: Option<i64>,
    /// The measured shape it is most like.
    pub neighbour: Option<String>,
    /// Distance to that shape and its config: 1 is a factor of 2 in one number, or another method.
    pub distance: f64,
    /// Unreliable guidelines that it breaks.
    pub warnings: Vec<String>,
}

/// A rule that keeps a shape from being placed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Killer {
    pub rule: String,
    pub kind: String,
    /// Own analysis: no upstream text states it.
    pub inferred: bool,
    pub what: String,
    /// Whether the shape would fit without this rule alone.
    pub alone: bool,
}

/// Whether and how a shape can be placed.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Best first.
    Fits(Vec<Proposal>),
    Unplaceable(Vec<Killer>),
}

impl Killer {
    /// `n_div (N % (tile_n * herd_n) == 0)`, inferred ones marked.
    pub fn line(&self) -> String {
        let mark = if self.inferred { ", inferred" } else { "" };
        format!("{} [{}{mark}]: {}", self.rule, self.kind, self.what)
    }
}

/// Proposes up to `limit` tile configs for a shape: those most like measured ones first, idle tiles weighed in.
///
/// Errors: [`Error::Usage`] for a shape that is not the kernel's; from an expression that cannot be evaluated.
pub fn place(facts: &KernelFacts, shape: &Point, tier: Option<Tier>, limit: usize) -> Result<Placement> {
    check_shape(facts, shape)?;
    let query = Query { shape: shape.clone(), tier: in_tiers(facts, tier), records: true, ..Query::default() };
    let near = registry::nearest(facts, shape, query.tier, NEIGHBOURS)?;
    let (mut proposals, mut costs): (Vec<Proposal>, Vec<f64>) = (Vec::new(), Vec::new());
    Search::new(facts, &query, &[]).run(&mut |leaf| {
        let tiles = facts.tiles.used.as_ref().map(|used| used.value(leaf.bindings)).transpose()?;
        let (distance, neighbour) = likeness(leaf, &near);
        let cost = cost(distance, tiles, facts.tiles.target);
        let at = costs.partition_point(|&before| before <= cost);
        if at < limit {
            costs.insert(at, cost);
            costs.truncate(limit);
            proposals.insert(
                at,
                Proposal {
                    method: leaf.method.map(str::to_owned),
                    config: leaf.values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
                    tiles,
                    neighbour: neighbour.map(|n| facts.name_shape(&n.row.shape)),
                    distance,
                    warnings: warnings(facts, leaf.bindings)?.iter().map(|c| c.id.clone()).collect(),
                },
            );
            proposals.truncate(limit);
        }
        Ok(ControlFlow::Continue(()))
    })?;
    if proposals.is_empty() {
        Ok(Placement::Unplaceable(killers(facts, &query)?))
    } else {
        Ok(Placement::Fits(proposals))
    }
}

/// Orders proposals: a measured config of this very shape first, then likeness to measured ones against idle tiles.
fn cost(distance: f64, tiles: Option<i64>, target: i64) -> f64 {
    match tiles {
        Some(tiles) if distance > 0.0 && tiles < target => {
            distance + IDLE_TILES * (target as f64 / tiles.max(1) as f64).log2()
        }
        _ => distance,
    }
}

/// How far a config is from the nearest measured shape and its config.
fn likeness<'n>(leaf: &Leaf, near: &'n [Near]) -> (f64, Option<&'n Near>) {
    let log = |v: i64| (v.max(1) as f64).log2();
    let cost = |n: &Near| {
        let tiles =
            leaf.values.iter().filter_map(|&(name, value)| Some((log(value) - log(*n.row.config.get(name)?)).abs()));
        let other = f64::from(u8::from(n.row.method.as_deref() != leaf.method));
        n.distance + tiles.sum::<f64>() + other
    };
    let nearest = near.iter().map(|n| (cost(n), n)).min_by(|a, b| a.0.total_cmp(&b.0));
    nearest.map_or((0.0, None), |(cost, n)| (cost, Some(n)))
}

/// The rules to blame for a query without a config: each one without which there would be one, or, where it takes more
/// than one to be dropped, a set of which none can be spared.
fn killers(facts: &KernelFacts, query: &Query) -> Result<Vec<Killer>> {
    // A record that only repeats what a rule says explains nothing.
    let by_rules = Query { records: false, ..query.clone() };
    let explained = Search::new(facts, &by_rules, &[]).first()?.is_none();
    let query = if explained { &by_rules } else { query };
    let mut whole = Search::new(facts, query, &[]);
    whole.run(&mut |_| Ok(ControlFlow::Continue(())))?;
    let mut cut: Vec<(Rule, u64)> = whole.rejected.iter().map(|(&rule, &count)| (rule, count)).collect();
    cut.sort_by_key(|&(rule, count)| (std::cmp::Reverse(count), rule));
    let cut: Vec<Rule> = cut.into_iter().map(|(rule, _)| rule).collect();
    let fits_without = |skipped: &[Rule]| Ok::<_, Error>(Search::new(facts, query, skipped).first()?.is_some());
    let mut alone = Vec::new();
    for &rule in cut.iter().filter(|rule| rule.can_be_skipped()) {
        if fits_without(&[rule])? {
            alone.push(killer(facts, rule, &whole, true));
        }
    }
    if !alone.is_empty() {
        return Ok(alone);
    }
    // A rule that cuts early hides those behind it, so all are dropped before any is taken back.
    let all = (0..facts.constraints.len()).map(Rule::Constraint).chain([Rule::Record]);
    let every: Vec<Rule> = all.collect();
    let mut bare = Search::new(facts, query, &every);
    if bare.first()?.is_none() {
        let stuck = bare.rejected.keys().filter(|rule| matches!(rule, Rule::NoCandidate(_)));
        return Ok(stuck.map(|&rule| killer(facts, rule, &bare, false)).collect());
    }
    let mut together = every.clone();
    for at in (0..together.len()).rev() {
        let rule = together.remove(at);
        if !fits_without(&together)? {
            together.insert(at, rule);
        }
    }
    Ok(together.into_iter().map(|rule| killer(facts, rule, &whole, false)).collect())
}

fn killer(facts: &KernelFacts, rule: Rule, search: &Search, alone: bool) -> Killer {
    match rule {
        Rule::Constraint(index) => {
            let c = &facts.constraints[index];
            let what = c.expr.as_ref().map_or_else(String::new, ToString::to_string);
            Killer { rule: c.id.clone(), kind: c.kind.name().into(), inferred: c.inferred, what, alone }
        }
        Rule::NoCandidate(level) => Killer {
            rule: "no_candidate".into(),
            kind: "hard-compile".into(),
            inferred: false,
            what: search.choice(level),
            alone,
        },
        Rule::Record | Rule::Tiles => Killer {
            rule: "recorded".into(),
            kind: "known-bad".into(),
            inferred: false,
            what: "every config that is left is recorded as failing".into(),
            alone,
        },
    }
}

/// A tier means nothing to a kernel without methods.
fn in_tiers(facts: &KernelFacts, tier: Option<Tier>) -> Option<Tier> {
    tier.filter(|_| !facts.methods.is_empty())
}

/// Refuses a shape that lacks a dimension, has another, or one that no array can have.
///
/// Errors: [`Error::Usage`].
pub fn check_shape(facts: &KernelFacts, shape: &Point) -> Result<()> {
    let names: Vec<&str> = facts.shape_names().collect();
    let known = shape.keys().all(|name| names.contains(&name.as_str())) && shape.len() == names.len();
    let sound = shape.iter().all(|(name, &value)| {
        if name == "causal" { (0..=1).contains(&value) } else { (1..=i64::from(i32::MAX)).contains(&value) }
    });
    if known && sound {
        return Ok(());
    }
    Err(Error::Usage {
        what: format!("shape of {}", facts.id),
        found: shape.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","),
        expected: format!("{}, each at least 1 and at most {} (causal: 0 or 1)", names.join(", "), i32::MAX),
    })
}

/// What the rules say of a config, perhaps a partial one.
#[derive(Debug, Clone)]
pub struct Judgement {
    /// A completion that breaks no rule.
    pub accepted: Option<(Option<String>, Point)>,
    /// Whom to blame when there is none.
    pub killers: Vec<Killer>,
    /// Constraints that could not be checked, for they read what was left open.
    pub unchecked: Vec<String>,
}

fn judge(facts: &KernelFacts, query: &Query) -> Result<Judgement> {
    let mut search = Search::new(facts, query, &[]);
    let accepted = search.first()?;
    let unchecked = search.unchecked.iter().map(|&id| id.to_owned()).collect();
    let killers = if accepted.is_some() { vec![] } else { killers(facts, query)? };
    Ok(Judgement { accepted, killers, unchecked })
}

/// What the rules say of a measured row; the recorded failures count too.
///
/// Errors: from an expression that cannot be evaluated.
pub fn judge_row(facts: &KernelFacts, row: &Row) -> Result<Judgement> {
    judge(facts, &known(&row.shape, row.method.as_deref(), exactly(&row.config), true))
}

fn exactly(config: &Point) -> BTreeMap<String, Wanted> {
    config.iter().map(|(name, &value)| (name.clone(), Wanted::Exactly(value))).collect()
}

fn known(shape: &Point, method: Option<&str>, config: BTreeMap<String, Wanted>, records: bool) -> Query {
    let (shape, method) = (shape.clone(), method.map(str::to_owned));
    Query { shape, method, config, records, ..Query::default() }
}

/// How one kernel's known configs fare.
#[derive(Debug, Clone, Serialize)]
pub struct KernelCensus {
    pub id: String,
    pub measured: usize,
    pub measured_accepted: usize,
    pub known_good: usize,
    pub known_good_accepted: usize,
    pub known_bad: usize,
    /// Rejected by a rule that upstream states, by an inferred rule only, and by nothing but the record of the failure.
    pub rejected_by_stated_rule: usize,
    pub rejected_by_inferred_rule: usize,
    pub rejected_by_record: usize,
    /// Configs that are judged against what is known of them.
    pub wrong: Vec<String>,
}

/// Every known-good and known-bad config against the rules.
///
/// Errors: as [`facts::all`]; from an expression that cannot be evaluated.
pub fn census() -> Result<Vec<KernelCensus>> {
    facts::all()?.iter().map(census_of).collect()
}

fn census_of(facts: &KernelFacts) -> Result<KernelCensus> {
    let mut census = KernelCensus {
        id: facts.id.clone(),
        measured: facts.measured.len(),
        measured_accepted: 0,
        known_good: facts.known_good.len(),
        known_good_accepted: 0,
        known_bad: facts.known_bad.len(),
        rejected_by_stated_rule: 0,
        rejected_by_inferred_rule: 0,
        rejected_by_record: 0,
        wrong: vec![],
    };
    let good = facts.known_good.iter().map(|g| (&g.shape, g.method.as_deref(), &g.config));
    let rows = facts.measured.iter().map(|r| (&r.shape, r.method.as_deref(), &r.config));
    let measured = rows.map(|r| (true, r)).chain(good.map(|g| (false, g)));
    for (is_row, (shape, method, config)) in measured {
        let judgement = judge(facts, &known(shape, method, exactly(config), true))?;
        match (judgement.accepted, is_row) {
            (Some(_), true) => census.measured_accepted += 1,
            (Some(_), false) => census.known_good_accepted += 1,
            (None, _) => {
                let why: Vec<String> = judgement.killers.iter().map(Killer::line).collect();
                census.wrong.push(format!(
                    "good, rejected: {} {config:?}: {}",
                    facts.name_shape(shape),
                    why.join("; ")
                ));
            }
        }
    }
    for bad in &facts.known_bad {
        let query = |records| known(&bad.shape, bad.method.as_deref(), bad.config.clone(), records);
        let fits = |query: &Query| Ok::<_, Error>(Search::new(facts, query, &[]).first()?.is_some());
        if !fits(&Query { stated_only: true, ..query(false) })? {
            census.rejected_by_stated_rule += 1;
        } else if !fits(&query(false))? {
            census.rejected_by_inferred_rule += 1;
        } else if !fits(&query(true))? {
            census.rejected_by_record += 1;
        } else {
            census.wrong.push(format!("bad, accepted: {} {:?}", facts.name_shape(&bad.shape), bad.config));
        }
    }
    Ok(census)
}

/// A kernel of a plan against the registry.
#[derive(Debug, Clone)]
pub struct Assessment {
    pub facts: &'static KernelFacts,
    pub shape: Point,
    pub status: RegistryStatus,
    /// Compute tiles of the measured or proposed config.
    pub tiles: Option<i64>,
    /// Why these are fewer than the target.
    pub shortfall: Option<String>,
}

/// What the registry knows of a shape.
#[derive(Debug, Clone)]
pub enum RegistryStatus {
    Measured(&'static Row),
    /// Not measured: the nearest measured shapes, and the configs that should fit.
    Unmeasured {
        near: Vec<Near>,
        proposals: Vec<Proposal>,
    },
    /// Not measured, and no config fits.
    Unplaceable {
        near: Vec<Near>,
        killers: Vec<Killer>,
    },
}

/// Assesses a kernel of the plan: its status in the registry and its tile utilisation.
///
/// Errors: as [`facts::all`]; from an expression that cannot be evaluated.
pub fn assess(kernel: &Kernel, tier: Option<Tier>) -> Result<Assessment> {
    let tier = registry::own_tier(kernel).or(tier);
    let facts = registry::facts_of(kernel)?;
    let shape = registry::shape_of(kernel);
    if let Some(row) = registry::best(facts, &shape, tier)? {
        let query = known(&shape, row.method.as_deref(), exactly(&row.config), false);
        let tiles = tiles_of(facts, &query)?;
        let shortfall = shortfall(facts, &shape, tier, tiles)?;
        return Ok(Assessment { facts, shape, status: RegistryStatus::Measured(row), tiles, shortfall });
    }
    let near = registry::nearest(facts, &shape, tier, NEIGHBOURS)?;
    match place(facts, &shape, tier, PROPOSALS)? {
        Placement::Fits(proposals) => {
            let tiles = proposals.first().and_then(|p| p.tiles);
            let shortfall = shortfall(facts, &shape, tier, tiles)?;
            let status = RegistryStatus::Unmeasured { near, proposals };
            Ok(Assessment { facts, shape, status, tiles, shortfall })
        }
        Placement::Unplaceable(killers) => {
            let status = RegistryStatus::Unplaceable { near, killers };
            Ok(Assessment { facts, shape, status, tiles: None, shortfall: None })
        }
    }
}

/// Why an NPU cannot run kernels of these shapes, if it cannot: every shape that no config fits, and the rules that say so.
///
/// Errors: as [`assess`].
pub fn refuse<'a>(kernels: impl IntoIterator<Item = &'a Kernel>) -> Result<Option<String>> {
    let mut reasons = vec![];
    for kernel in kernels {
        let Assessment { facts, shape, status, .. } = assess(kernel, None)?;
        if let RegistryStatus::Unplaceable { killers, .. } = status {
            let rules: Vec<String> = killers.iter().map(Killer::line).collect();
            reasons.push(format!("{} at {}: {}", facts.id, facts.name_shape(&shape), rules.join("; ")));
        }
    }
    Ok((!reasons.is_empty()).then(|| reasons.join("; ")))
}

/// Tiles of a config, completed where it is a partial one.
fn tiles_of(facts: &KernelFacts, query: &Query) -> Result<Option<i64>> {
    let Some(used) = &facts.tiles.used else { return Ok(None) };
    let mut tiles = None;
    Search::new(facts, query, &[]).run(&mut |leaf| {
        tiles = Some(used.value(leaf.bindings)?);
        Ok(ControlFlow::Break(()))
    })?;
    Ok(tiles)
}

/// Why a config uses fewer tiles than the target: a waiver, a rule that keeps every larger config from fitting, or
/// nothing but the choice.
fn shortfall(facts: &KernelFacts, shape: &Point, tier: Option<Tier>, tiles: Option<i64>) -> Result<Option<String>> {
    let target = facts.tiles.target;
    if tiles.is_some_and(|t| t >= target) {
        return Ok(facts.tiles.waiver.clone());
    }
    if facts.tiles.waiver.is_some() {
        return Ok(facts.tiles.waiver.clone());
    }
    let query = Query {
        shape: shape.clone(),
        tier: in_tiers(facts, tier),
        min_tiles: Some(target),
        records: true,
        ..Query::default()
    };
    if Search::new(facts, &query, &[]).first()?.is_some() {
        return Ok(Some(format!("a config with {target} tiles fits; this one is measured, or nearer to what is")));
    }
    let rules: Vec<String> = killers(facts, &query)?.into_iter().map(|k| k.rule).collect();
    Ok(Some(format!("no config with {target} tiles fits: {}", rules.join(", "))))
}
