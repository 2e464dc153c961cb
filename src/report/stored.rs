//! Reports read back from their JSON: what older and newer versions wrote too, so nothing but the names is required.
//!
//! A stored outcome is text. No verdict is made from it: only the judge makes one.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{Cell, Plot, Table};
use crate::error::{Error, Result};

/// One count of an extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    pub what: String,
    pub compared: u64,
    pub required: Option<u64>,
}

/// A report as it stands on disk.
#[derive(Debug, Clone)]
pub struct Stored {
    pub path: PathBuf,
    pub command: String,
    pub model: String,
    pub device: String,
    pub device_description: String,
    /// `pass`, `fail` ... as [`crate::check::Outcome`] writes them; [`super::standing::STALE`] for a pass of something else.
    pub outcome: String,
    pub reasons: Vec<String>,
    pub warnings: Vec<String>,
    pub extent: Vec<Count>,
    pub facts: Vec<(String, Cell)>,
    pub tables: Vec<Table>,
    pub plots: Vec<Plot>,
    pub provenance: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Raw {
    command: String,
    model: String,
    device: String,
    #[serde(default)]
    device_description: String,
    verdict: RawVerdict,
    #[serde(default)]
    facts: Vec<(String, Value)>,
    #[serde(default)]
    tables: Vec<RawTable>,
    #[serde(default)]
    plots: Vec<RawPlot>,
    #[serde(default)]
    provenance: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct RawVerdict {
    outcome: String,
    #[serde(default)]
    reasons: Vec<String>,
    #[serde(default)]
    warnings: Vec<String>,
    #[serde(default)]
    extent: RawExtent,
}

#[derive(Deserialize, Default)]
struct RawExtent {
    #[serde(default)]
    compared: serde_json::Map<String, Value>,
    #[serde(default)]
    required: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
struct RawTable {
    #[serde(default)]
    title: String,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

#[derive(Deserialize)]
struct RawPlot {
    title: String,
    #[serde(default)]
    x: String,
    #[serde(default)]
    y: String,
    #[serde(default)]
    log: bool,
    #[serde(default)]
    limit: Option<f64>,
    series: Vec<RawSeries>,
}

#[derive(Deserialize)]
struct RawSeries {
    name: String,
    points: Vec<(f64, Option<f64>)>,
}

impl Stored {
    /// Reads one report.
    ///
    /// Errors: [`Error::Io`], [`Error::Malformed`] for a file that is no report.
    pub fn read(path: &Path) -> Result<Stored> {
        let bytes = std::fs::read(path).map_err(Error::io(path))?;
        let raw: Raw = serde_json::from_slice(&bytes)
            .map_err(|e| Error::malformed(path, format!("no report of phasegate: {e}")))?;
        let RawVerdict { outcome, reasons, warnings, extent } = raw.verdict;
        Ok(Stored {
            path: path.into(),
            command: raw.command,
            model: raw.model,
            device: raw.device,
            device_description: raw.device_description,
            outcome,
            reasons,
            warnings,
            extent: counts(&extent),
            facts: raw.facts.into_iter().map(|(name, value)| (name, cell(&value))).collect(),
            tables: raw.tables.into_iter().map(table).collect(),
            plots: raw.plots.into_iter().map(plot).collect(),
            provenance: raw.provenance,
        })
    }

    /// Every report of a model on a device in a folder, in the order people read them: gates first.
    ///
    /// Errors: [`Error::Io`]; a file that cannot be read is an error, not left out.
    pub fn all_of(dir: &Path, model: &str, device: &str) -> Result<Vec<Stored>> {
        let mut found = vec![];
        let suffix = format!("-{model}-{device}.json");
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            Err(e) => return Err(Error::io(dir)(e)),
        };
        for entry in entries {
            let path = entry.map_err(Error::io(dir))?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(&suffix)) {
                let stored = Stored::read(&path)?;
                if stored.model == model && stored.device == device {
                    found.push(stored);
                }
            }
        }
        found.sort_by_key(|r| (rank(&r.command), r.command.clone()));
        Ok(found)
    }

    /// The run before this one, where it was kept.
    ///
    /// Errors: as [`Stored::read`].
    pub fn previous(&self) -> Result<Option<Stored>> {
        let name = self.path.file_name().unwrap_or_default();
        let path = self.path.parent().unwrap_or(Path::new(".")).join(super::PREVIOUS).join(name);
        if path.is_file() { Stored::read(&path).map(Some) } else { Ok(None) }
    }

    /// A value of the provenance.
    pub fn from(&self, name: &str) -> Option<&str> {
        self.provenance.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Where a command's report stands on a page.
fn rank(command: &str) -> usize {
    const ORDER: [&str; 9] =
        ["verify-full", "verify", "diagnosis", "bisect", "explain", "escape", "audit", "profile", "merge"];
    ORDER.iter().position(|known| *known == command).unwrap_or(ORDER.len())
}

fn counts(extent: &RawExtent) -> Vec<Count> {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let mut counts: Vec<Count> = vec![];
    for (what, value) in &extent.compared {
        let required = extent.required.get(what).map(number);
        counts.push(Count { what: what.clone(), compared: number(value), required });
    }
    let missing = extent.required.iter().filter(|(what, _)| !extent.compared.contains_key(*what));
    counts.extend(missing.map(|(what, value)| Count {
        what: what.clone(),
        compared: 0,
        required: Some(number(value)),
    }));
    counts
}

/// A number with as many decimals as stand there, where those are few.
fn fraction(n: &serde_json::Number) -> Cell {
    let (x, text) = (n.as_f64().unwrap_or(f64::NAN), n.to_string());
    match text.split_once('.') {
        Some((_, decimals)) if decimals.len() <= 4 && decimals.bytes().all(|b| b.is_ascii_digit()) => {
            Cell::Rounded(x, decimals.len())
        }
        _ => Cell::Number(x),
    }
}

fn cell(value: &Value) -> Cell {
    match value {
        Value::Null => Cell::Number(f64::NAN),
        Value::String(text) => Cell::Text(text.clone()),
        Value::Number(n) => n.as_u64().map_or_else(|| fraction(n), Cell::Count),
        other => Cell::Text(other.to_string()),
    }
}

fn table(raw: RawTable) -> Table {
    let rows = raw.rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    Table { title: raw.title, columns: raw.columns, rows }
}

fn plot(raw: RawPlot) -> Plot {
    let RawPlot { title, x, y, log, limit, series } = raw;
    let points = |s: RawSeries| s.points.into_iter().map(|(x, y)| (x, y.unwrap_or(f64::NAN))).collect();
    let series = series.into_iter().map(|s| super::Series { name: s.name.clone(), points: points(s) }).collect();
    Plot { title, x, y, log, limit, series }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Extent, Verdict};
    use crate::report::Report;

    #[test]
    fn what_is_written_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let extent = Extent::new().require("steps", 32).compare("steps", 1);
        let mut report = Report::new("verify", "m", ("emu".into(), "here".into()), Verdict::judge(vec![], extent));
        report.fact("kl", f64::NAN);
        let mut plot = Plot::new("t", "step", "nats");
        plot.line("a", [(0.0, 1.0), (1.0, f64::NAN)]);
        report.plots.push(plot);
        report.write(dir.path()).unwrap();
        report.write(dir.path()).unwrap();
        let [stored] = &Stored::all_of(dir.path(), "m", "emu").unwrap()[..] else { panic!() };
        assert_eq!(stored.outcome, "vacuous");
        assert_eq!(stored.extent, [Count { what: "steps".into(), compared: 1, required: Some(32) }]);
        assert!(stored.plots[0].series[0].points[1].1.is_nan());
        assert!(stored.previous().unwrap().is_some());
    }

    /// A rounded number is a number to whoever reads the JSON, and looks the same to whoever reads the page.
    #[test]
    fn rounded_numbers_stay_numbers() {
        for (x, digits, text) in
            [(12.345_67, 1, "12.3"), (0.000_34, 4, "0.0003"), (-1.25, 2, "-1.25"), (1e-9, 3, "0.0")]
        {
            let json = serde_json::to_value(Cell::Rounded(x, digits)).unwrap();
            assert!(json.is_number(), "{json}");
            assert_eq!(cell(&json).text(), text);
            assert_eq!(cell(&json).number(), Some(text.parse().unwrap()));
        }
        assert_eq!(serde_json::to_value(Cell::Rounded(f64::INFINITY, 1)).unwrap(), Value::Null);
        assert_eq!(cell(&serde_json::json!(0.123_456_7)), Cell::Number(0.123_456_7));
        assert_eq!(Cell::from("7.0").number(), None);
    }

    #[test]
    fn other_files_are_no_reports() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x-m-emu.json");
        std::fs::write(&path, "{\"command\": \"verify\"}").unwrap();
        assert!(Stored::read(&path).unwrap_err().to_string().contains("no report of phasegate"));
        assert!(Stored::all_of(dir.path(), "m", "emu").is_err());
        assert!(Stored::all_of(&dir.path().join("nothing"), "m", "emu").unwrap().is_empty());
    }
}
