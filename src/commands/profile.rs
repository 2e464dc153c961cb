//! `profile`: where the time of setup, prefill and decode goes.

use std::process::ExitCode;

use clap::Args;

use super::generate::check_room;
use super::refused::Gate;
use super::{ModelArgs, ReportArgs, TuningArgs};
use crate::check::Summary;
use crate::error::Error;
use crate::phase::profile::{self, Ceilings, HalfProfile, Line, Profile};
use crate::phase::{Bench, Subject};
use crate::report::{Cell, Plot, Report, Table, provenance};

#[derive(Args)]
pub(super) struct ProfileArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    report: ReportArgs,
    /// Text to continue
    #[arg(long, short, default_value = "The capital of France is")]
    prompt: String,
    /// Repeat the prompt's tokens up to this many
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<usize>,
    /// Tokens to generate
    #[arg(long, short, default_value_t = 20)]
    n_tokens: usize,
}

pub(super) fn run(args: ProfileArgs) -> anyhow::Result<ExitCode> {
    let gate = Gate::new("profile", &args.model, args.model.label(), &args.report);
    gate.reported(profiled(args))
}

fn profiled(args: ProfileArgs) -> anyhow::Result<ExitCode> {
    if args.n_tokens < 2 {
        let (what, expected) = ("n-tokens".into(), "at least 2: the first one is prefill's".into());
        return Err(Error::Usage { what, found: args.n_tokens.to_string(), expected }.into());
    }
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let (_, mut ids) = subject.raw_ids(&args.prompt)?;
    let tokens = args.prompt_tokens.unwrap_or(ids.len());
    check_room(&subject, tokens, args.n_tokens)?;
    ids = ids.iter().copied().cycle().take(tokens).collect();
    let (label, plan) = (args.model.label(), args.model.plan());
    let found = profile::profile(&subject, &label, &plan, args.tuning.halves(), &ids, args.n_tokens)?;
    let device = Bench::new(subject.clone(), &label, &[], plan.clone())?.describe()?;
    let mut report = Report::new("profile", &subject.name, device, found.verdict.clone());
    report.provenance = provenance::of(&subject)?;
    for (option, value) in args.tuning.facts(&args.model) {
        report.fact(option, value);
    }
    facts(&mut report, &found);
    super::device_facts(&mut report, found.run, 1, found.decode_steps);
    for (name, half) in [("Prefill", &found.prefill), ("Decode, per token", &found.decode)] {
        tables(&mut report, name, half, found.ceilings.as_ref());
    }
    Ok(args.report.publish(&report, |report| {
        say!("{} on {}\n", report.model, report.device_description);
        // Kernels and single dispatches are in the report's files.
        let shown = report.tables.iter().filter(|t| t.title.contains("call site") || t.title.contains("host"));
        for table in shown {
            say!("{}\n{}\n", table.title, table.render());
        }
        for (name, value) in &report.facts {
            say!("{name}: {}", value.text());
        }
    })?)
}

fn facts(report: &mut Report, found: &Profile) {
    let (prefill, decode) = (Summary::of(&found.prefill.wall_ms), Summary::of(&found.decode.wall_ms));
    let head = |half: &HalfProfile| half.sites.iter().find(|l| l.name == "lm_head").map_or(f64::NAN, |l| l.ms);
    report.fact("setup_ms", found.setup_ms);
    report.fact("setup_bytes_written", found.setup.bytes_written);
    report.fact("setup_static_uploads", found.setup.static_uploads);
    report.fact("prompt_tokens", found.prompt_tokens);
    report.fact("seq_len", found.seq_len);
    report.fact("prefill_cold_ms", found.cold_prefill_ms);
    report.fact("prefill_ms", prefill.median);
    report.fact("prefill_device_ms", found.prefill.device_ms);
    report.fact("prefill_host_ms", found.prefill.host_ms);
    report.fact("prefill_tok_s", found.prompt_tokens as f64 / prefill.median * 1e3);
    report.fact("decode_ms_p50", decode.median);
    report.fact("decode_ms_p95", decode.p95);
    report.fact("decode_device_ms", found.decode.device_ms);
    report.fact("decode_host_ms", found.decode.host_ms);
    report.fact("decode_tok_s", 1e3 / decode.median);
    report.fact("lm_head_ms", head(&found.decode));
    if let Some(Ceilings { gflops, gbytes }) = found.ceilings {
        let (m, k, n) = profile::GEMM;
        report.fact("ceiling_gflops", gflops);
        report.fact("ceiling_gflops_from", format!("best GEMM {m} x {k} x {n}, operands in the caches"));
        report.fact("ceiling_gb_s", gbytes);
        let (rows, cols) = profile::GEMV;
        report.fact("ceiling_gb_s_from", format!("best GEMV over {rows} x {cols} bf16, which no cache holds"));
    }
}

fn tables(report: &mut Report, name: &str, half: &HalfProfile, ceilings: Option<&Ceilings>) {
    let by = |what: &str, lines: &[Line]| lines_table(&format!("{name}, by {what}"), what, lines, half, ceilings);
    let tables =
        [by("call site", &half.sites), by("kernel", &half.kernels), by("dispatch", &half.dispatches), host(name, half)];
    report.tables.extend(tables);
    let mut plot = Plot::new(&format!("{name}, dispatches"), "dispatch", "ms");
    plot.line("ms", half.dispatches.iter().enumerate().map(|(at, line)| (at as f64, line.ms)));
    report.plots.push(plot);
}

fn lines_table(title: &str, what: &str, lines: &[Line], half: &HalfProfile, ceilings: Option<&Ceilings>) -> Table {
    let columns = [
        what,
        "kernel",
        "calls",
        "ms",
        "% of device",
        "MB read",
        "MB written",
        "GFLOP/s",
        "% of GEMM",
        "GB/s",
        "% of stream",
    ];
    let mut table = Table::new(title, &columns);
    for line in lines {
        let share = |of: f64, ceiling: Option<f64>| match ceiling {
            Some(ceiling) => Cell::Rounded(100.0 * of / ceiling, 1),
            None => Cell::from("-"),
        };
        table.row([
            line.name.as_str().into(),
            line.kernel.as_str().into(),
            Cell::Rounded(line.calls, 0),
            Cell::Rounded(line.ms, 4),
            Cell::Rounded(100.0 * line.ms / half.device_ms, 1),
            Cell::Rounded(line.bytes_read / 1e6, 3),
            Cell::Rounded(line.bytes_written / 1e6, 3),
            Cell::Rounded(line.gflops(), 1),
            share(line.gflops(), ceilings.map(|c| c.gflops)),
            Cell::Rounded(line.gbytes(), 1),
            share(line.gbytes(), ceilings.map(|c| c.gbytes)),
        ]);
    }
    table
}

fn host(name: &str, half: &HalfProfile) -> Table {
    let columns = ["host op", "calls", "ms", "MB read", "MB written", "GFLOP/s", "GB/s"];
    let mut table = Table::new(&format!("{name}, on the host"), &columns);
    let none = || Cell::from("-");
    for line in &half.host {
        let [read, written, flops, bytes] = match &line.work {
            Some(work) => [
                Cell::Rounded(work.bytes_read / 1e6, 3),
                Cell::Rounded(work.bytes_written / 1e6, 3),
                Cell::Rounded(work.flops / line.ms / 1e6, 1),
                Cell::Rounded((work.bytes_read + work.bytes_written) / line.ms / 1e6, 1),
            ],
            None => [none(), none(), none(), none()],
        };
        let (name, calls, ms) = (line.name.as_str().into(), Cell::Rounded(line.calls, 0), Cell::Rounded(line.ms, 4));
        table.row([name, calls, ms, read, written, flops, bytes]);
    }
    let rest = Cell::Rounded(half.between_ms, 4);
    table.row(["between the steps".into(), none(), rest, none(), none(), none(), none()]);
    table
}
