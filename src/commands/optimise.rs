//! `optimise`: phases 4 and 5 as experiments, step by step.

use std::process::ExitCode;

use clap::Args;

use super::refused::Gate;
use super::{ModelArgs, RecordArgs};
use crate::phase::optimise::{self, Delta, Experiment, Half, ITERATIONS, Optimisation, Optimised, Setting, WARM_UP};
use crate::phase::{Bench, Run, Subject, progress};
use crate::plan::Tuning;
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
    /// The captured prompt that is timed: its prefill, or the steps behind it (default: the longest)
    #[arg(long, value_name = "ID")]
    prompt_id: Option<String>,
}

pub(super) fn run(args: OptimiseArgs) -> anyhow::Result<ExitCode> {
    let command = if args.phase == 4 { "optimise-phase4" } else { "optimise-phase5" };
    let gate = Gate::new(command, &args.model, args.model.label(), &args.report.shown);
    gate.reported(optimised(args, command))
}

fn optimised(args: OptimiseArgs, command: &str) -> anyhow::Result<ExitCode> {
    args.report.plain(args.model.plan().facts())?;
    let half = if args.phase == 4 { Half::Prefill } else { Half::Decode };
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let (label, plan) = (args.model.label(), args.model.plan());
    let setting = Setting::new(subject.clone(), &label, plan, half, args.prompt_id.as_deref())?;
    let lengths = setting.lengths()?;
    let bar = super::progress_bar::bar(2 + Optimisation::ALL.len() as u64, "optimise");
    let run = optimise::optimise(&setting, None, &mut |step| {
        bar.set_message(step.to_owned());
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    let table = table(half, lengths, &run);
    let device = Bench::new(subject.clone(), &setting.device, &[], setting.plan.clone())?.describe()?;
    let mut report = Report::new(command, &subject.name, device, run.verdict.clone());
    report.provenance = provenance::of(&subject)?;
    for (option, value) in args.model.plan().facts() {
        report.fact(option, value);
    }
    report.fact("prompt_id", setting.prompt.clone());
    report.fact("prompt_tokens", lengths[0]);
    report.fact("seq_len", lengths[1]);
    if !run.experiments.is_empty() {
        report.fact("kept", Optimisation::names(run.tuning));
    }
    if let Some((delta, [cold, _])) = timing(&run) {
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
        if let Some((delta, _)) = timing(&run) {
            say!("all that was kept: {delta}");
        }
        say!("{}", deployment(half, &run));
    })?)
}

fn timing(run: &Optimised) -> Option<&(Delta, [f64; 2])> {
    run.total.as_ref().and_then(|total| total.timing.as_ref())
}

/// How what was kept is run.
fn deployment(half: Half, run: &Optimised) -> String {
    match run.tuning == Tuning::default() {
        _ if run.experiments.is_empty() => "nothing was tried".into(),
        true => "run, verify and profile do what was kept by default".into(),
        false => format!("run, verify and profile do it with {} {}", half.option(), Optimisation::names(run.tuning)),
    }
}

fn table(half: Half, [tokens, bucket]: [usize; 2], run: &Optimised) -> Table {
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
    let of = match half {
        Half::Prefill => format!("{tokens} tokens in {bucket} positions"),
        Half::Decode => format!("up to 31 steps behind {tokens} tokens"),
    };
    let title = format!(
        "Kernel time, {} ({of}): medians of at least {ITERATIONS} interleaved pairs of calls after {WARM_UP}; interval of \
         the median paired difference by the sign test; cold: the first call after setup",
        half.unit()
    );
    let mut table = Table::new(&title, &columns);
    for experiment in run.experiments.iter().chain(&run.total) {
        table.row(row(experiment));
    }
    table
}

fn row(experiment: &Experiment) -> [Cell; 10] {
    let none = || Cell::from("-");
    let [before, after, saved, interval, cold] = match &experiment.timing {
        Some((d, cold)) => [
            Cell::Rounded(d.before, 3),
            Cell::Rounded(d.after, 3),
            Cell::Rounded(d.saved, 3),
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
    let mut notes = vec![
        format!("verdict: {}", run.verdict),
        format!("kept: {}; {}", Optimisation::names(run.tuning), deployment(*half, run)),
    ];
    notes.extend(timing(run).map(|(delta, _)| format!("all that was kept: {delta}")));
    notes.push(format!("timed: {}; the tests' cases time a prompt of at most 16 tokens", setting.prompt));
    notes.push(format!("capture: {}", subject.capture()?.provenance().line()));
    notes.push("times are of one machine and one run; no test compares them with another".into());
    let document = progress::Document {
        name: half.document(),
        phase: half.phase(),
        model: subject.name.clone(),
        device: device.clone(),
        command: format!(
            "phasegate optimise {} --phase {}{} --record",
            args.model.options(),
            args.phase,
            args.prompt_id.as_ref().map_or(String::new(), |id| format!(" --prompt-id {id}"))
        ),
        notes,
        tables: vec![table(*half, setting.lengths()?, run).markdown()],
        findings,
    };
    let path = document.write(&settings::root())?;
    eprintln!("wrote {}", path.strip_prefix(settings::root()).unwrap_or(&path).display());
    Ok(())
}
