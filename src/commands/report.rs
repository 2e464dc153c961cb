//! `report`: one HTML page over what the commands have written; `compare`: two runs of the same command.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;

use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;
use crate::report::difference::{Change, Kind, differences};
use crate::report::stored::Stored;
use crate::report::{Cell, Page, Table, device_options, page, standing};
use crate::settings;

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate verify tiny_llama; phasegate diagnosis tiny_llama; phasegate report tiny_llama --open
  phasegate report target/phasegate/reports/verify-tiny_llama-emu.json --out page.html")]
pub(super) struct ReportPageArgs {
    /// A model's name (its reports are looked up), or JSON reports
    #[arg(value_name = "MODEL|FILES", default_value = "tiny_llama")]
    what: Vec<String>,
    /// The device whose reports are meant
    #[arg(long, default_value = "emu")]
    device: String,
    /// Folder of the reports
    #[arg(long, value_name = "DIR")]
    report_dir: Option<PathBuf>,
    /// Where the page goes (default: beside the reports)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Show it in the browser
    #[arg(long)]
    open: bool,
}

pub(super) fn run(args: ReportPageArgs) -> anyhow::Result<ExitCode> {
    let dir = args.report_dir.clone().unwrap_or_else(|| settings::work_dir().join("reports"));
    let mut reports = find(&args, &dir)?;
    standing::hold(&settings::root(), &mut reports);
    let first = &reports[0];
    if let Some(other) = reports.iter().find(|r| (&r.model, &r.device) != (&first.model, &first.device)) {
        let found = format!("{} on {} and {} on {}", first.model, first.device, other.model, other.device);
        let expected = "reports of one model on one device".into();
        return Err(Error::Usage { what: "reports".into(), found, expected }.into());
    }
    let out = args.out.clone().unwrap_or_else(|| dir.join(format!("{}-{}.html", first.model, first.device)));
    let written = humantime(std::time::SystemTime::now());
    write_atomically(&out, page(&Page::new(&settings::root(), &reports, written))?.as_bytes())?;
    say!("{}", out.display());
    if args.open {
        open(&out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn find(args: &ReportPageArgs, dir: &Path) -> Result<Vec<Stored>> {
    let files: Vec<&String> = args.what.iter().filter(|what| what.ends_with(".json")).collect();
    if files.len() == args.what.len() {
        return files.iter().map(|file| Stored::read(Path::new(file))).collect();
    }
    let model = &args.what[0];
    let reports = Stored::all_of(dir, model, &args.device)?;
    if reports.is_empty() {
        return Err(Error::Unavailable {
            what: format!("report of {model} on {}", args.device),
            why: format!(
                "none in {}; make one with: phasegate verify {model}{}",
                dir.display(),
                device_options(&args.device)
            ),
        });
    }
    Ok(reports)
}

/// Seconds since 1970 as UTC, `2026-01-31T12:00:00Z`.
fn humantime(now: std::time::SystemTime) -> String {
    let seconds = now.duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to a date: Howard Hinnant's civil_from_days, for dates after 1970.
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

fn open(path: &Path) -> Result<()> {
    let program = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let started = Command::new(program).arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    started.map(|_| ()).map_err(|e| Error::Unavailable {
        what: format!("a browser through {program}"),
        why: format!("{e}; the page is {}", path.display()),
    })
}

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate compare yesterday/verify-tiny_llama-emu.json target/phasegate/reports/verify-tiny_llama-emu.json

Exit codes: 0 nothing got worse, 1 something did or is newly skipped")]
pub(super) struct CompareArgs {
    /// The earlier run's JSON report
    before: PathBuf,
    /// The later run's
    after: PathBuf,
}

/// Exit codes: 0 nothing got worse, 1 something did or is newly skipped.
pub(super) fn compare(args: CompareArgs) -> anyhow::Result<ExitCode> {
    let (before, after) = (Stored::read(&args.before)?, Stored::read(&args.after)?);
    if (&before.command, &before.model) != (&after.command, &after.model) {
        let (found, expected) =
            (format!("{} of {}", after.command, after.model), format!("{} of {}", before.command, before.model));
        return Err(Error::comparison(args.after.display().to_string(), found, expected).into());
    }
    let changes = differences(&before, &after);
    let mut table = Table::new("Changes", &["how", "what", "before", "after"]);
    for Change { kind, what, before, after } in &changes {
        table.row([kind.word().into(), what.as_str().into(), before.as_str().into(), Cell::from(after.as_str())]);
    }
    say!(
        "{} of {}: {} on {}, then {} on {}",
        after.command,
        after.model,
        commit(&before),
        before.device,
        commit(&after),
        after.device
    );
    say!("{}", if changes.is_empty() { "nothing changed".into() } else { table.render() });
    let count = |kind: Kind| changes.iter().filter(|c| c.kind == kind).count();
    let (worse, skipped) = (count(Kind::Worse), count(Kind::Skipped));
    say!(
        "{worse} worse, {skipped} newly skipped, {} better, {} otherwise changed",
        count(Kind::Better),
        changes.len() - worse - skipped - count(Kind::Better)
    );
    Ok(ExitCode::from(u8::from(worse + skipped > 0)))
}

fn commit(report: &Stored) -> &str {
    report.from("commit").unwrap_or("unknown commit")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn times_are_utc() {
        let at = |seconds| super::humantime(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!((at(0).as_str(), at(951_827_696).as_str()), ("1970-01-01T00:00:00Z", "2000-02-29T12:34:56Z"));
        assert_eq!(at(1_780_272_000), "2026-06-01T00:00:00Z");
    }
}
