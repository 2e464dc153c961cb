//! One self-contained page over the reports of a model on a device: nothing is loaded from anywhere.

use std::path::Path;

use minijinja::{AutoEscape, Environment, Value, context};

use super::difference::{Kind, differences};
use super::standing::STALE;
use super::stored::Stored;
use super::{Cell, Plot, REFUSED, Table, svg};
use crate::check::extent::amount;
use crate::error::{Error, Result};
use crate::phase::progress;

const TEMPLATE: &str = include_str!("page.html");
/// Differences named on the page; the rest are counted.
const CHANGES: usize = 40;
/// Reasons named at the top; the rest are counted, and stand in their sections.
const REASONS: usize = 6;

/// What a page is made of.
pub struct Page<'a> {
    /// Of one model on one device.
    pub reports: &'a [Stored],
    /// Phase and the word of its verdict, as the progress document has it.
    pub phases: Vec<(u8, String)>,
    /// When it is written: RFC 3339.
    pub written: String,
}

impl<'a> Page<'a> {
    /// A page over `reports`, with the phases recorded under `root`.
    pub fn new(root: &Path, reports: &'a [Stored], written: String) -> Page<'a> {
        let phases = reports.first().map_or_else(Vec::new, |r| progress::phases(root, &r.model, &r.device));
        Page { reports, phases, written }
    }
}

/// Renders the page.
///
/// Errors: [`Error::Usage`] without a report; [`Error::Malformed`] from the template.
pub fn page(page: &Page<'_>) -> Result<String> {
    let Some(first) = page.reports.first() else {
        let (what, expected) = ("reports".into(), "at least one".into());
        return Err(Error::Usage { what, found: "none".into(), expected });
    };
    let bad = |e: minijinja::Error| Error::malformed("page.html", e.to_string());
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template("page.html", TEMPLATE).map_err(bad)?;
    let worst = page.reports.iter().max_by_key(|r| badness(&r.outcome)).unwrap_or(first);
    let mut reasons = vec![];
    if badness(&worst.outcome) > 0 {
        // Any command's lines may show where it begins, a passing one's too.
        reasons.extend(page.reports.iter().flat_map(culprits));
        for report in page.reports.iter().filter(|r| badness(&r.outcome) > 0) {
            reasons.extend(report.reasons.iter().map(|r| format!("{}: {r}", report.command)));
        }
    }
    let more = reasons.len().saturating_sub(REASONS);
    reasons.truncate(REASONS);
    let template = environment.get_template("page.html").map_err(bad)?;
    let described = page.reports.iter().map(|r| r.device_description.as_str()).find(|d| !d.is_empty()).unwrap_or("");
    let sections = page.reports.iter().map(section).collect::<Result<Vec<_>>>()?;
    let warned = page.reports.iter().any(|r| !r.warnings.is_empty());
    let of = |r: &Stored| judged(&r.outcome, !r.warnings.is_empty());
    let rendered = template.render(context! {
        model => first.model.clone(),
        device => first.device.clone(),
        device_description => described,
        outcome => judged(&worst.outcome, warned).0,
        tone => judged(&worst.outcome, warned).1,
        gates => page.reports.iter().map(|r| context! {
            command => r.command.clone(), outcome => of(r).0, tone => of(r).1, extent => extent(r),
        }).collect::<Vec<_>>(),
        reasons => reasons,
        more_reasons => more,
        next => next(page.reports),
        phases => strip(&page.phases, page.reports.iter().any(|r| r.outcome == STALE || is_refused(r))),
        sections => sections,
        provenance => provenance(page.reports),
        written => page.written.clone(),
    });
    rendered.map_err(bad)
}

/// The first point of each plot that lies beyond its limit: where to look.
fn culprits(report: &Stored) -> Vec<String> {
    let first = |plot: &Plot| {
        let limit = plot.limit?;
        let beyond = plot.series.iter().flat_map(|s| s.points.iter().filter(|(_, y)| y.is_nan() || *y > limit).take(1));
        let &(x, y) = beyond.min_by(|a, b| a.0.total_cmp(&b.0))?;
        Some(format!(
            "{}: {} is first beyond its limit at {} {x}: {} > {limit}",
            report.command,
            plot.title,
            plot.x,
            Cell::Number(y).text()
        ))
    };
    report.plots.iter().filter_map(first).collect()
}

/// Whether it ended before there was anything to judge.
fn is_refused(report: &Stored) -> bool {
    report.facts.iter().any(|(name, _)| name == REFUSED)
}

/// What to do about the first gate that does not hold.
fn next(reports: &[Stored]) -> Option<String> {
    let broken = reports.iter().find(|r| badness(&r.outcome) > 0)?;
    let on = on(broken);
    if broken.outcome == STALE {
        return Some(format!("phasegate {} {}{on} runs it again on what is there now", broken.command, broken.model));
    }
    // The next command would be refused as well.
    if is_refused(broken) {
        return None;
    }
    let has = |command: &str| reports.iter().any(|r| r.command == command);
    Some(match broken.command.as_str() {
        "verify" | "verify-full" if !has("diagnosis") => {
            format!("phasegate diagnosis {}{on} shows the first layer that is wrong", broken.model)
        }
        "verify" | "verify-full" | "diagnosis" if broken.device != "external" && !has("bisect") => {
            format!("phasegate bisect {}{on} narrows it down to one kernel", broken.model)
        }
        _ => return None,
    })
}

/// The options that ask the same device or engine again.
fn on(report: &Stored) -> String {
    let engine = || {
        let command = report.device_description.split_once("through \"")?.1;
        Some(format!(" --runner \"{}\"", command.rsplit_once('"')?.0))
    };
    let asked = if report.device == "external" { engine() } else { None };
    asked.unwrap_or_else(|| device_options(&report.device))
}

/// The options that ask for the device of this label, with a space before them.
pub fn device_options(label: &str) -> String {
    match label {
        "emu" => String::new(),
        "emu_npu2" => " --datapath npu2".into(),
        other => format!(" --device {other}"),
    }
}

/// The phases as recorded; where a run is of other weights or was refused, what they once passed is no pass of what is there.
fn strip(phases: &[(u8, String)], doubtful: bool) -> Vec<Value> {
    (0..8)
        .map(|phase| {
            let found = phases.iter().find(|(known, _)| *known == phase).map(|(_, word)| word.as_str());
            let tone = found.map_or("none", |word| tone(word));
            match found {
                Some(word) if doubtful && tone == "good" => {
                    context! { phase => phase, outcome => format!("was {word}"), tone => "none" }
                }
                _ => context! { phase => phase, outcome => found.unwrap_or("not recorded"), tone => tone },
            }
        })
        .collect()
}

fn section(report: &Stored) -> Result<Value> {
    let plots = report.plots.iter().map(|plot| {
        context! { title => plot.title.clone(), svg => Value::from_safe_string(svg::draw(plot)), legend => svg::legend(plot) }
    });
    let changes = match report.previous()? {
        None => None,
        Some(previous) => {
            let all = differences(&previous, report);
            let shown = all.iter().take(CHANGES).map(|c| {
                let tone = match c.kind {
                    Kind::Worse | Kind::Skipped => "bad",
                    Kind::Better => "good",
                    Kind::Changed | Kind::New => "none",
                };
                context! { kind => c.kind.word(), tone => tone, what => c.what.clone(), before => c.before.clone(), after => c.after.clone() }
            });
            let commit = previous.from("commit").unwrap_or("unknown").to_owned();
            Some(context! { rows => shown.collect::<Vec<_>>(), count => all.len(), shown => CHANGES, commit => commit })
        }
    };
    let (outcome, tone) = judged(&report.outcome, !report.warnings.is_empty());
    Ok(context! {
        command => report.command.clone(),
        outcome => outcome,
        tone => tone,
        reasons => report.reasons.clone(),
        warnings => report.warnings.clone(),
        extent => extent(report),
        facts => report.facts.iter().map(|(name, value)| (name.clone(), value.text())).collect::<Vec<_>>(),
        plots => plots.collect::<Vec<_>>(),
        tables => report.tables.iter().map(table).collect::<Vec<_>>(),
        changes => changes,
    })
}

/// Numbers to the right, verdicts in their colours, shares as bars.
fn table(table: &Table) -> Value {
    let bars: Vec<Option<f64>> = (0..table.columns.len()).map(|column| largest_share(table, column)).collect();
    let rows = table.rows.iter().map(|row| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let text = cell.text();
            let tone = match (cell, text.as_str()) {
                (Cell::Text(_), "NO" | "escaped" | "ESCAPED" | "missed") => "bad",
                (Cell::Text(_), "killed" | "caught") => "good",
                (Cell::Text(_), word) if is_outcome(word) => tone(word),
                _ => "",
            };
            let bar = match (bars.get(column).copied().flatten(), cell.number()) {
                (Some(largest), Some(x)) if largest > 0.0 => Some(100.0 * (x / largest).clamp(0.0, 1.0)),
                _ => None,
            };
            context! { text => text, tone => tone, number => cell.number().is_some(), bar => bar }
        });
        cells.collect::<Vec<_>>()
    });
    context! { title => table.title.clone(), columns => table.columns.clone(), rows => rows.collect::<Vec<_>>() }
}

/// The largest value of a column of parts of a whole, or of times; none for any other column.
fn largest_share(table: &Table, column: usize) -> Option<f64> {
    let name = table.columns.get(column)?.to_lowercase();
    let parts =
        ["share", "%", "ms", "us", "ms/token"].iter().any(|word| name.split([' ', '_', ',']).any(|w| w == *word));
    parts.then(|| table.rows.iter().filter_map(|row| row.get(column)?.number()).fold(0.0, f64::max))
}

fn extent(report: &Stored) -> Vec<Value> {
    // Numbers and our own words: escaping would only spell the stroke another way.
    let amount = |c: &super::stored::Count| Value::from_safe_string(amount(c.compared, c.required));
    let short = |c: &super::stored::Count| c.required.is_some_and(|required| c.compared < required);
    report.extent.iter().map(|c| context! { what => c.what.clone(), amount => amount(c), short => short(c) }).collect()
}

/// Name, value, and whether all reports say the same.
fn provenance(reports: &[Stored]) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = vec![];
    for report in reports {
        for (name, value) in &report.provenance {
            match all.iter_mut().find(|(known, _)| known == name) {
                None => all.push((name.clone(), value.clone())),
                Some((_, known)) if !known.split(" | ").any(|v| v == value) => *known = format!("{known} | {value}"),
                Some(_) => {}
            }
        }
    }
    all
}

fn canonical(outcome: &str) -> String {
    outcome.to_lowercase().replace([' ', '-'], "_")
}

fn is_outcome(text: &str) -> bool {
    ["pass", "not_run", "disputed", "inconclusive", "vacuous", "fail"].contains(&canonical(text).as_str())
}

/// Order of the outcomes; a word of no outcome is as bad as a failure.
fn badness(outcome: &str) -> usize {
    let order = ["pass", "not_run", "disputed", "inconclusive", "vacuous", STALE, "fail"];
    order.iter().position(|known| *known == canonical(outcome)).unwrap_or(order.len())
}

/// Word and tone of an outcome; a pass with warnings is no plain one.
fn judged(outcome: &str, warned: bool) -> (String, &'static str) {
    if warned && badness(outcome) == 0 {
        return ("PASS WITH WARNINGS".into(), "warn");
    }
    (word(outcome), tone(outcome))
}

fn word(outcome: &str) -> String {
    outcome.to_uppercase().replace('_', " ")
}

fn tone(outcome: &str) -> &'static str {
    match badness(outcome) {
        0 => "good",
        1 => "none",
        2 | 3 => "warn",
        _ => "bad",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Extent, Verdict};
    use crate::report::Report;

    fn written(failures: &[&str], limit: f64) -> (tempfile::TempDir, Vec<Stored>) {
        let dir = tempfile::tempdir().unwrap();
        let extent = Extent::new().require("layers", 2).compare("layers", 2).require("rows", 1).compare("rows", 39);
        let verdict = Verdict::judge(failures.iter().map(|f| (*f).to_owned()).collect(), extent);
        let mut report = Report::new("diagnosis", "m", ("emu".into(), "<script>alert(1)</script>".into()), verdict);
        let mut plot = Plot::new("Noise ratio", "layer", "times");
        plot.limit = Some(limit);
        plot.line("device", [(0.0, 1.0), (1.0, 2.0)]);
        report.plots.push(plot);
        let mut table = Table::new("Kill matrix", &["fault", "phase 3", "share"]);
        table.row(["x".into(), "killed".into(), 0.5.into()]);
        report.tables.push(table);
        report.write(dir.path()).unwrap();
        let reports = Stored::all_of(dir.path(), "m", "emu").unwrap();
        (dir, reports)
    }

    fn rendered(reports: &[Stored]) -> String {
        page(&Page { reports, phases: vec![(3, "FAIL".into())], written: "now".into() }).unwrap()
    }

    #[test]
    fn a_failing_page_names_the_culprit_before_anything_else() {
        let (_dir, reports) = written(&["layer 1 is off"], 1.5);
        let html = rendered(&reports);
        let culprit = html.find("Noise ratio is first beyond its limit at layer 1").unwrap();
        assert!(culprit < html.find("<section").unwrap());
        assert!(html.contains("layers 2/2<") && html.contains("rows 39 (at least 1)<"), "counts as everywhere else");
        assert!(html.contains("layer 1 is off") && html.contains("phasegate bisect m"));
    }

    #[test]
    fn a_page_loads_nothing_and_escapes_everything() {
        let (_dir, reports) = written(&[], 9.0);
        let html = rendered(&reports);
        assert!(!html.contains("<script>alert") && html.contains("&lt;script&gt;"));
        for outside in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!html.contains(outside), "{outside}");
        }
        assert!(!html.contains("is first beyond"));
    }

    #[test]
    fn the_next_command_asks_the_same_device() {
        let (_dir, mut reports) = written(&["off"], 9.0);
        for (device, description, options) in [
            ("emu", "emulated NPU", ""),
            ("emu_npu2", "emulated NPU", " --datapath npu2"),
            ("npu", "NPU2", " --device npu"),
            ("external", "x, through \"python a.py --gguf b\", limits of ieee", " --runner \"python a.py --gguf b\""),
            ("external", "", " --device external"),
        ] {
            for report in &mut reports {
                (report.device, report.device_description) = (device.into(), description.into());
            }
            assert_eq!(on(&reports[0]), options);
        }
    }

    #[test]
    fn a_pass_with_warnings_is_no_plain_one() {
        assert_eq!(judged("pass", true), ("PASS WITH WARNINGS".into(), "warn"));
        assert_eq!(judged("pass", false), ("PASS".into(), "good"));
        assert_eq!(judged("fail", true), ("FAIL".into(), "bad"));
        let (_dir, mut reports) = written(&[], 9.0);
        assert!(!rendered(&reports).contains("WITH WARNINGS"));
        reports[0].warnings.push("cliff at layer 2".into());
        assert!(rendered(&reports).contains("PASS WITH WARNINGS"));
    }

    #[test]
    fn no_reports_are_no_page() {
        assert!(page(&Page { reports: &[], phases: vec![], written: String::new() }).is_err());
    }
}
