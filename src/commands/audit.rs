//! `audit`: can a model's verdicts be trusted? Writes the evaluation report.

use std::process::ExitCode;

use clap::Args;

use super::refused::Gate;
use super::{ModelArgs, RecordArgs};
use crate::phase::{Subject, phase7};
use crate::report::{Cell, Report, Table, provenance};
use crate::settings;

#[derive(Args)]
pub(super) struct AuditArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    report: RecordArgs,
    /// Chooses the injected faults and the prompt nobody has captured
    #[arg(long, value_name = "N", default_value_t = 7)]
    seed: u64,
}

pub(super) fn run(args: AuditArgs) -> anyhow::Result<ExitCode> {
    Gate::new("audit", &args.model, args.model.label(), &args.report.shown).reported(audit(args))
}

fn audit(args: AuditArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let audit = phase7::audit(&subject, &args.model.label(), args.seed)?;
    let path = if args.report.record {
        audit.record(&settings::root())?
    } else {
        let path = args.report.shown.dir().join(format!("{}-{}-{}.md", phase7::DOCUMENT, audit.model, audit.device));
        audit.write(&path)?;
        path
    };
    let info = (audit.device.clone(), audit.description.clone());
    let mut report = Report::new("audit", &subject.name, info, audit.verdict.clone());
    let mut table = Table::new("Evidence", &["exhibit", "found", "verdict"]);
    for e in &audit.exhibits {
        table.row([Cell::from(e.name), e.found.as_str().into(), e.verdict.outcome().word().into()]);
    }
    report.tables.push(table);
    report.provenance = provenance::of(&subject)?;
    for (name, value) in &audit.figures {
        report.fact(name, *value);
    }
    report.fact("faults injected", audit.injected as u64);
    report.fact("faults that no gate saw", audit.escaped as u64);
    let shown = path.strip_prefix(settings::root()).unwrap_or(&path).display().to_string();
    report.fact("evaluation report", shown);
    Ok(args.report.publish(&report, |report| {
        say!("{} on {}\n", report.model, report.device_description);
        say!("{}", report.tables[0].render());
        for (name, value) in &report.facts {
            say!("{name}: {}", value.text());
        }
    })?)
}
