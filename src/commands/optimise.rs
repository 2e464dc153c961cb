//! `optimise`: phases 4 and 5 as experiments, step by step.

use std::process::ExitCode;

use clap::Args;

use super::{ModelArgs, RecordArgs};
use crate::phase::optimise::{self, Decision, Experiment, Half, ITERATIONS, Optimised, Setting, WARM_UP};
use crate::phase::{Bench, Run, Subject, progress};
use crate::report::{Cell, Report, Table, provenance};
use crate::settings;

#[derive(Args)]
pub(super) struct OptimiseArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    report: RecordArgs,
    /// 4: prefill, 5: decode
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(4..=5))]
    phase: u8,
}

pub(super) fn run(args: OptimiseArgs) -> anyhow::Result<ExitCode> {
    let half = if args.phase == 4 { Half::Prefill } else { Half::Decode };
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let setting = Setting { subject: subject.clone(), device: args.model.label(), plan: args.model.plan(), half };
    let bar = super::progress_bar::bar(6, "optimise");
    let run = optimise::optimise(&setting, None, &mut |step| {
        bar.set_message(step.to_owned());
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    let table = table(half, &run);
    let device = Bench::new(subject.clone(), &setting.device, &[], setting.plan.clone())?.describe()?;
    let mut report = Report::new(&format!("optimise-phase{}", args.phase), &subject.name, device, run.verdict.clone());
    report.provenance = provenance::of(&subject)?;
    for (option, value) in args.model.plan().facts() {
        report.fact(option, value);
    }
    report.fact("kept", kept(&run));
    if let Some((delta, [cold, _])) = &run.total.timing {
        report.fact("baseline_ms", delta.before);
        report.fact("optimised_ms", delta.after);
        report.fact("speedup", delta.before / delta.after);
        report.fact("baseline_cold_ms", *cold);
    }
    report.tables.push(table);
    if args.report.record {
        record(&args, &setting, &run)?;
    }
    Ok(args.report.publish(&report, |report| {
        say!("{} on {}, {}\n", report.model, report.device_description, half.unit());
        // The reasons are too long for a terminal's column and follow below.
        let mut table = report.tables[0].clone();
        table.columns.pop();
        table.rows.iter_mut().for_each(|row| drop(row.pop()));
        say!("{}", table.render());
        for experiment in &run.experiments {
            say!("{}: {}, {}", experiment.name, experiment.decision.word(), experiment.reason);
        }
        if let Some((delta, _)) = &run.total.timing {
            say!("all that was kept: {delta}");
        }
    })?)
}

fn kept(run: &Optimised) -> String {
    let applied = run.experiments.iter().filter(|e| e.decision == Decision::Applied);
    let names: Vec<&str> = applied.map(|e| e.name.as_str()).collect();
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

fn table(half: Half, run: &Optimised) -> Table {
    let columns = [
        "step",
        "decision",
        "before ms",
        "after ms",
        "saved ms",
        "interval",
        "cold ms",
        "dispatches per layer",
        "bytes written per call",
        "reason",
    ];
    let title = format!(
        "Kernel time, {}: medians of at least {ITERATIONS} interleaved pairs of calls after {WARM_UP}; interval of the \
         median paired difference by the sign test",
        half.unit()
    );
    let mut table = Table::new(&title, &columns);
    for experiment in run.experiments.iter().chain([&run.total]) {
        table.row(row(experiment));
    }
    table
}

fn row(experiment: &Experiment) -> [Cell; 10] {
    let none = || Cell::from("-");
    let [before, after, saved, interval, cold] = match &experiment.timing {
        Some((d, cold)) => [
            d.before.into(),
            d.after.into(),
            d.saved.into(),
            format!("[{:.3}, {:.3}] ({:.1} %, {} pairs)", d.low, d.high, 100.0 * d.coverage, d.pairs).into(),
            format!("{:.3} -> {:.3}", cold[0], cold[1]).into(),
        ],
        None => [none(), none(), none(), none(), none()],
    };
    let [dispatches, bytes] = match &experiment.costs {
        Some([b, a]) => [
            format!("{:.2} -> {:.2}", b.dispatches_per_layer(), a.dispatches_per_layer()).into(),
            format!("{} -> {}", b.counters.bytes_written, a.counters.bytes_written).into(),
        ],
        None => [none(), none()],
    };
    let decision = if experiment.name == "faster" { "in all" } else { experiment.decision.word() };
    let (name, reason) = (experiment.name.as_str().into(), experiment.reason.as_str().into());
    [name, decision.into(), before, after, saved, interval, cold, dispatches, bytes, reason]
}

/// Writes the phase's progress document: these experiments, and the figures of the very cases the tests run.
fn record(args: &OptimiseArgs, setting: &Setting, run: &Optimised) -> anyhow::Result<()> {
    let Setting { subject, device, half, .. } = setting;
    let mut findings = vec![];
    for case in optimise::cases(&subject.outline()?, *half) {
        if let Run::OnDevice(run) = &case.run {
            findings.push((case.name.clone(), run(device)?));
        }
    }
    let mut notes = vec![format!("verdict: {}", run.verdict), format!("kept: {}", kept(run))];
    notes.extend(run.total.timing.iter().map(|(delta, _)| format!("all that was kept: {delta}")));
    notes.push(format!("capture: {}", subject.capture()?.provenance().line()));
    notes.push("times are of one machine and one run; no test compares them with another".into());
    let document = progress::Document {
        name: half.document(),
        phase: half.phase(),
        model: subject.name.clone(),
        device: device.clone(),
        command: format!("phasegate optimise {} --phase {} --device {} --record", args.model.model, args.phase, device),
        notes,
        tables: vec![table(*half, run).markdown()],
        findings,
    };
    let path = document.write(&settings::root())?;
    eprintln!("wrote {}", path.strip_prefix(settings::root()).unwrap_or(&path).display());
    Ok(())
}
