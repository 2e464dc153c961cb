//! `bisect`: where a run parts from the truth, launch by launch, and which named fault accounts for it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::planted::PlantedArgs;
use super::{ModelArgs, ReportArgs};
use crate::check::{Extent, Verdict};
use crate::explain::bisect::{Bisect, LAYER};
use crate::explain::fit::Hypothesis;
use crate::phase::{Subject, devices, explain};
use crate::report::{Cell, Report, Table, provenance};
use crate::settings;

#[derive(Args)]
pub(super) struct BisectArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    report: ReportArgs,
    /// Time for fitting the catalogue of faults (default: PHASEGATE_EXPLAIN_SECONDS)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=settings::MOST_SECONDS))]
    budget: Option<u64>,
    #[command(flatten)]
    planted: PlantedArgs,
}

pub(super) fn run(args: BisectArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let device = args.model.label();
    let budget = args.budget.map_or_else(settings::explain_budget, |seconds| Ok(Duration::from_secs(seconds)))?;
    let altered = args.planted.alteration(&subject.config)?;
    let found = explain::explain(&subject, &device, &*altered, &args.model.plan(), budget)?;
    let opened = devices::open_device(&device)?;
    let info = (opened.info().label.clone(), opened.info().description.clone());
    let verdict = verdict(&found, args.planted.id());
    let mut report = Report::new("bisect", &subject.name, info, verdict);
    report.tables.extend((!found.bisect.logits.is_empty()).then(|| steps(&found.bisect)));
    report.tables.extend((!found.bisect.rows.is_empty()).then(|| launches(&found.bisect)));
    report.tables.extend((!found.hypotheses.is_empty()).then(|| hypotheses(&found.hypotheses)));
    report.provenance = provenance::of(&subject)?;
    if let Some(id) = args.planted.id() {
        report.fact("injected fault", id);
    }
    let limit = if args.budget.is_some() { "--budget" } else { settings::EXPLAIN_SECONDS };
    for (i, line) in found.lines(limit).into_iter().enumerate() {
        report.fact(if i == 0 { "bisect" } else { "fit" }, line);
    }
    Ok(args.report.publish(&report, |report| {
        say!("{} on {}\n", report.model, report.device_description);
        for table in &report.tables {
            say!("{}\n{}", table.title, table.render());
        }
        for (name, value) in &report.facts {
            say!("{name}: {}", value.text());
        }
    })?)
}

/// A run is as it should be where nothing is off and nothing needs explaining. One that has a fault in it and shows nothing
/// of it is no pass: these prompts cannot tell.
fn verdict(found: &explain::Explanation, planted: Option<&str>) -> Verdict {
    if let (Some(id), true) = (planted, found.is_sound()) {
        return Verdict::inconclusive(format!("{id} was put in, and neither prompt shows it"));
    }
    let Bisect { step, culprit, ratios, .. } = &found.bisect;
    let mut failures = vec![];
    if step.is_some() || found.bisect.refused.is_some() {
        failures.push(found.bisect.line());
    } else if let Some(first) = found.hypotheses.first() {
        failures.push(format!("the run is not a sound one; {} accounts for it best", first.fault));
    } else if !found.is_sound() {
        failures.push("the run is not a sound one; no fault that was tried accounts for it".into());
    }
    let outputs = ratios.iter().map(Vec::len).sum::<usize>() as u64;
    let extent = Extent::new().require("layer outputs", outputs).compare("layer outputs", outputs);
    debug_assert!(culprit.is_none() || !failures.is_empty());
    Verdict::judge(failures, extent)
}

fn steps(found: &Bisect) -> Table {
    let steps = found.logits.len();
    let names: Vec<String> =
        (0..steps).map(|step| if step == 0 { "prefill".into() } else { format!("step {step}") }).collect();
    let columns: Vec<&str> = std::iter::once("output of").chain(names.iter().map(String::as_str)).collect();
    let title = format!("Distance to the f32 forward pass over a sound run's, at most {LAYER}");
    let mut table = Table::new(&title, &columns);
    let rows = found.ratios.iter().enumerate().map(|(layer, row)| (format!("layer {layer:02}"), row));
    for (name, row) in rows.chain([("lm_head".to_owned(), &found.logits)]) {
        table.row(std::iter::once(Cell::from(name)).chain(row.iter().map(|&x| Cell::Rounded(x, 2))));
    }
    table
}

fn launches(found: &Bisect) -> Table {
    let columns = ["launch", "before", "after the swap", "added (rel. L2)", "over a sound run's", "in all", "says"];
    let mut table = Table::new("Launches answered by the f32 oracle, one more a row", &columns);
    for row in &found.rows {
        let culprit = found.culprit.as_ref() == Some(&row.launch);
        let says = match (culprit, row.adds()) {
            (true, _) => "CULPRIT",
            (false, true) => "adds",
            (false, false) => "inherits",
        };
        table.row([
            Cell::from(row.launch.as_str()),
            Cell::Rounded(row.before, 2),
            Cell::Rounded(row.after, 2),
            row.added.into(),
            Cell::Rounded(row.added_over_sound, 2),
            if row.total.is_nan() { "".into() } else { row.total.into() },
            says.into(),
        ]);
    }
    table
}

fn hypotheses(found: &[Hypothesis]) -> Table {
    let columns = ["fault", "where", "strength", "explained", "cosine", "score", "likely cause", "remedy"];
    let mut table = Table::new("Faults that account for the residual", &columns);
    for h in found.iter().take(5) {
        table.row([
            Cell::from(h.fault),
            h.at.layer.map_or("everywhere".to_owned(), |layer| format!("layer {layer}")).into(),
            h.at.strength.into(),
            format!("{:.1} %", 100.0 * h.matched.share).into(),
            Cell::Rounded(h.matched.cosine, 3),
            Cell::Rounded(h.matched.score(), 3),
            h.cause.into(),
            h.remedy.into(),
        ]);
    }
    table
}
