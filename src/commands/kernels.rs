//! `kernels`: what is known of the leaf kernels, what a model needs of them, and whether the placement rules agree with
//! the hardware.

mod cache;
mod calibrate;
mod fused;
mod model;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::commands::ReportArgs;
use crate::error::{Error, Result};
use crate::kernel::facts::{self, Candidates, Figure, KernelFacts, Point, Row, Tier, TileVariable};
use crate::kernel::placement::{self, Placement, Proposal};
use crate::kernel::registry;
use crate::report::{Cell, Table};

/// Configs proposed for a shape.
const PROPOSALS: usize = 5;

#[derive(Args)]
pub(super) struct KernelsArgs {
    /// A kernel's id, shown in full, or a part of ids to filter by
    #[arg(value_name = "ID")]
    id: Option<String>,
    /// List every kernel and shape that this model's prefill and decode need, with its registry status
    #[arg(long, value_name = "NAME", conflicts_with_all = ["placement", "dispatch", "shape"])]
    model: Option<String>,
    /// The manifest's variant (instruct or base)
    #[arg(long, value_name = "NAME", requires = "model")]
    variant: Option<String>,
    /// Prefill length [default: the manifest's, else 2048]
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    seq_len: Option<u32>,
    /// Look one shape of the kernel up and propose tile configs: M=128,K=576,N=1536
    #[arg(long, value_name = "DIM=N,..", requires = "id", value_delimiter = ',')]
    shape: Vec<String>,
    /// Precision tier of a GEMM [default: the high one where it is measured, else the low one]
    #[arg(long, value_enum)]
    tier: Option<TierArg>,
    /// Judge every known-good and known-bad config by the placement rules; fails when one is judged wrongly
    #[arg(long, conflicts_with_all = ["dispatch", "shape", "id"])]
    placement: bool,
    /// Measure the emulated NPU2 arithmetic beside hardware's figures; fails where one misses its goal
    #[arg(long, conflicts_with_all = ["placement", "dispatch", "shape", "id", "model"])]
    calibrate: bool,
    /// Seal a folder of compiled ELFs: hash each with the contract of the shape table beside it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["placement", "dispatch", "shape", "id", "model", "calibrate"])]
    seal: Option<PathBuf>,
    /// List the ELFs of a folder and which are as sealed; fails where one is changed or missing, and with
    /// PHASEGATE_REQUIRE=sealed where one is not sealed
    #[arg(long, value_name = "DIR", conflicts_with_all = ["placement", "dispatch", "shape", "id", "model", "calibrate", "seal"])]
    cache: Option<PathBuf>,
    /// List the fused dispatches, or show the one called ID
    #[arg(long, conflicts_with = "shape")]
    dispatch: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum TierArg {
    High,
    Low,
}

impl From<TierArg> for Tier {
    fn from(tier: TierArg) -> Tier {
        match tier {
            TierArg::High => Tier::High,
            TierArg::Low => Tier::Low,
        }
    }
}

pub(super) fn run(args: KernelsArgs) -> anyhow::Result<ExitCode> {
    let tier = args.tier.map(Tier::from);
    if let Some(dir) = &args.seal {
        return cache::seal(dir, args.json);
    }
    if let Some(dir) = &args.cache {
        return cache::show(dir, args.json);
    }
    if args.calibrate {
        return calibrate::run(&ReportArgs { json: args.json, report_dir: None });
    }
    if args.placement {
        return placement_census(args.json);
    }
    if let Some(model) = &args.model {
        model::needs_of(model, &args, tier)?;
    } else if args.dispatch {
        show::dispatches(args.id.as_deref(), args.json)?;
    } else if let (Some(id), false) = (&args.id, args.shape.is_empty()) {
        one_shape(facts::of(id)?, &args.shape, tier, args.json)?;
    } else {
        let found = matching(args.id.as_deref())?;
        match found.as_slice() {
            [facts] if args.id.is_some() => show::kernel(facts, args.json)?,
            several => list(several, args.json)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The kernel of this id, or those whose id has it in it.
fn matching(id: Option<&str>) -> Result<Vec<&'static KernelFacts>> {
    let all = facts::all()?;
    let Some(id) = id else { return Ok(all.iter().collect()) };
    if let Some(facts) = all.iter().find(|f| f.id == id) {
        return Ok(vec![facts]);
    }
    let found: Vec<_> = all.iter().filter(|f| f.id.contains(id)).collect();
    if found.is_empty() { facts::of(id).map(|facts| vec![facts]) } else { Ok(found) }
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    say!("{}", serde_json::to_string_pretty(value).context("JSON")?);
    Ok(())
}

/// A table under its title.
fn print(table: &Table) {
    say!("{}\n{}\n", table.title, table.render());
}

/// An enumeration's name as its file has it.
fn word(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let value = serde_json::to_value(value).context("JSON")?;
    Ok(value.as_str().unwrap_or_default().replace('_', " "))
}

fn list(kernels: &[&KernelFacts], as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_json(&kernels);
    }
    let columns =
        ["id", "what", "shapes", "constraints", "prose", "known bad", "rtol", "atol", "mean_rel_l1 <=", "tiles"];
    let mut table = Table::new("kernels", &columns);
    for facts in kernels {
        let (checked, prose) = facts.constraint_counts();
        let tolerance = |of: &dyn Fn(&facts::Tolerance) -> f64| {
            let each: Vec<String> = facts.tolerances.iter().map(|t| of(t).to_string()).collect();
            each.join(" / ")
        };
        table.row([
            Cell::from(facts.id.as_str()),
            facts.title.as_str().into(),
            facts.measured.len().to_string().into(),
            checked.to_string().into(),
            prose.to_string().into(),
            facts.known_bad.len().to_string().into(),
            tolerance(&|t| t.rtol).into(),
            tolerance(&|t| t.atol).into(),
            tolerance(&|t| t.mean_rel_l1.limit).into(),
            facts.tiles.target.to_string().into(),
        ]);
    }
    print(&table);
    say!("{} kernels, {} measured configs", kernels.len(), kernels.iter().map(|k| k.measured.len()).sum::<usize>());
    Ok(())
}

fn row_config(facts: &KernelFacts, row: &Row) -> String {
    let tier = row.tier.filter(|t| *t == Tier::Low).map(|t| format!(" ({t} tier)")).unwrap_or_default();
    format!("{}{tier}", config(facts, row.method.as_deref(), &row.config))
}

/// `drain herd_n=4 tile_n=128 ..`, in the order in which the kernel declares its variables.
fn config(facts: &KernelFacts, method: Option<&str>, config: &Point) -> String {
    // A build option left as it is goes without saying.
    let usual = |v: &TileVariable, value| match &v.candidates {
        Candidates::Values(list) => v.first_fit && list.values.first() == Some(&value),
        Candidates::Divisors(_) => false,
    };
    let values = facts.variables.tile.iter().filter_map(|v| {
        let &value = config.get(&v.name)?;
        (!usual(v, value)).then(|| format!("{}={value}", v.name))
    });
    method.map(str::to_owned).into_iter().chain(values).collect::<Vec<_>>().join(" ")
}

fn speed(row: &Row) -> String {
    let figure = |value: Option<Figure>, unit: &str| {
        value.map(|value| match value {
            Figure::One(v) => format!("{v} {unit}"),
            Figure::Range([low, high]) => format!("{low}..{high} {unit}"),
        })
    };
    let parts = [figure(row.latency_us, "us"), figure(row.gflops, "GFLOP/s"), figure(row.gbps, "GB/s")];
    let inherited = if row.speed_inherited { " (a sibling's)" } else { "" };
    format!("{}{inherited}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn one_shape(facts: &KernelFacts, dims: &[String], tier: Option<Tier>, as_json: bool) -> anyhow::Result<()> {
    let mut shape = Point::new();
    for dim in dims {
        let bad = || Error::Usage {
            what: "--shape".into(),
            found: dim.clone(),
            expected: format!("DIM=N with DIM one of {}", facts.shape_names().collect::<Vec<_>>().join(", ")),
        };
        let (name, value) = dim.split_once('=').ok_or_else(bad)?;
        let value = value.trim().parse().map_err(|_| bad())?;
        if shape.insert(name.trim().to_owned(), value).is_some() {
            return Err(bad().into());
        }
    }
    let placed = placement::place(facts, &shape, tier, PROPOSALS)?;
    let best = registry::best(facts, &shape, tier)?;
    let near = registry::nearest(facts, &shape, tier, PROPOSALS)?;
    if as_json {
        let near: Vec<Value> = near.iter().map(|n| json!({"distance": n.distance, "row": n.row})).collect();
        return print_json(
            &json!({"kernel": facts.id, "shape": shape, "measured": best, "nearest": near, "placement": placed}),
        );
    }
    match best {
        Some(row) => say!("measured: {}: {}", row_config(facts, row), speed(row)),
        None => match registry::kernel_of(facts, &shape, tier) {
            Some(kernel) => say!("{}", registry::unmeasured(facts, &shape, tier, &kernel.to_string())?),
            None => say!("never measured"),
        },
    }
    let mut table = Table::new("nearest measured", &["distance", "shape", "config", "speed"]);
    for n in &near {
        let distance = format!("{:.2}", n.distance);
        let shape = facts.name_shape(&n.row.shape);
        table.row([distance.into(), Cell::from(shape), row_config(facts, n.row).into(), speed(n.row).into()]);
    }
    print(&table);
    match placed {
        Placement::Fits(proposals) => say!("{}", proposed(facts, &proposals).render()),
        Placement::Unplaceable(killers) => {
            say!("unplaceable:");
            killers.iter().for_each(|k| say!("- {}{}", k.line(), if k.alone { "" } else { " (not alone)" }));
        }
    }
    Ok(())
}

fn proposed(facts: &KernelFacts, proposals: &[Proposal]) -> Table {
    let mut table = Table::new("configs that fit", &["config", "tiles", "most like", "distance", "breaks guidelines"]);
    for p in proposals {
        let tiles = p.tiles.map_or_else(|| "?".into(), |t| t.to_string());
        let (like, distance) = (p.neighbour.clone().unwrap_or_default(), format!("{:.2}", p.distance));
        let config = config(facts, p.method.as_deref(), &p.config);
        table.row([Cell::from(config), tiles.into(), like.into(), distance.into(), p.warnings.join(", ").into()]);
    }
    table
}

fn placement_census(as_json: bool) -> anyhow::Result<ExitCode> {
    let census = placement::census()?;
    let sum = |of: fn(&placement::KernelCensus) -> usize| census.iter().map(of).sum::<usize>();
    let good = (sum(|c| c.measured_accepted + c.known_good_accepted), sum(|c| c.measured + c.known_good));
    let rejected =
        |c: &placement::KernelCensus| c.rejected_by_stated_rule + c.rejected_by_inferred_rule + c.rejected_by_record;
    let bad = (census.iter().map(rejected).sum::<usize>(), sum(|c| c.known_bad));
    let passed = good.0 == good.1 && bad.0 == bad.1;
    if as_json {
        let total =
            json!({"good_accepted": good.0, "good": good.1, "bad_rejected": bad.0, "bad": bad.1, "pass": passed});
        print_json(&json!({"total": total, "kernels": census}))?;
        return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let columns =
        ["kernel", "measured", "other good", "bad", "by stated rule", "by inferred rule", "by its record only"];
    let mut table = Table::new("placement rules against the hardware: accepted of good, rejected of bad", &columns);
    for c in &census {
        table.row([
            Cell::from(c.id.as_str()),
            format!("{}/{}", c.measured_accepted, c.measured).into(),
            format!("{}/{}", c.known_good_accepted, c.known_good).into(),
            format!("{}/{}", rejected(c), c.known_bad).into(),
            c.rejected_by_stated_rule.to_string().into(),
            c.rejected_by_inferred_rule.to_string().into(),
            c.rejected_by_record.to_string().into(),
        ]);
    }
    print(&table);
    census.iter().flat_map(|c| c.wrong.iter().map(move |w| (&c.id, w))).for_each(|(id, w)| say!("WRONG {id}: {w}"));
    say!("known good: {} of {} accepted", good.0, good.1);
    say!("known bad: {} of {} rejected", bad.0, bad.1);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
