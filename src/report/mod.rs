//! Reports of single runs: one document, written as JSON for programs and Markdown for people.
//!
//! Knows nothing of how a figure came about.

pub mod bundle;
pub mod difference;
mod html;
mod markdown;
pub mod provenance;
pub mod standing;
pub mod stored;
mod svg;

pub use html::{Page, device_options, page};

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use crate::begun::write_together;
use crate::check::Verdict;
use crate::error::{Error, Result};

/// One cell of a table.
#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    Text(String),
    Count(u64),
    Number(f64),
    /// A number of which so many decimals mean something.
    Rounded(f64, usize),
}

/// Text or a number, rounded as people see it.
impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Cell::Text(text) => to.serialize_str(text),
            Cell::Count(n) => to.serialize_u64(*n),
            Cell::Number(x) => to.serialize_f64(*x),
            Cell::Rounded(..) => to.serialize_f64(self.text().parse().unwrap_or(f64::NAN)),
        }
    }
}

impl Cell {
    /// What it counts or measures.
    pub fn number(&self) -> Option<f64> {
        match self {
            Cell::Text(_) => None,
            Cell::Count(n) => Some(*n as f64),
            Cell::Number(x) | Cell::Rounded(x, _) => Some(*x),
        }
    }

    /// As people read it: six decimals near one, scientific elsewhere.
    pub fn text(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Count(n) => n.to_string(),
            Cell::Rounded(x, digits) => format!("{x:.digits$}"),
            Cell::Number(x) if *x == 0.0 => "0".into(),
            Cell::Number(x) if (0.01..1000.0).contains(&x.abs()) => format!("{x:.6}"),
            Cell::Number(x) => format!("{x:.3e}"),
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.into())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<f64> for Cell {
    fn from(x: f64) -> Cell {
        Cell::Number(x)
    }
}

impl From<usize> for Cell {
    fn from(n: usize) -> Cell {
        Cell::Count(n as u64)
    }
}

impl From<u64> for Cell {
    fn from(n: u64) -> Cell {
        Cell::Count(n)
    }
}

/// A table with a title.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Table {
    pub title: String,
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    pub fn new(title: &str, columns: &[&str]) -> Table {
        Table { title: title.into(), columns: columns.iter().map(|c| (*c).to_owned()).collect(), rows: vec![] }
    }

    /// Adds a row; it has one cell per column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.columns.len(), "{}", self.title);
        self.rows.push(cells);
    }

    /// A pipe table with its title as heading.
    pub fn markdown(&self) -> String {
        markdown::table_markdown(self)
    }

    /// For a terminal.
    pub fn render(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
        table.set_header(&self.columns);
        for row in &self.rows {
            table.add_row(row.iter().map(Cell::text));
        }
        table.to_string()
    }
}

/// One line of a [`Plot`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Series {
    pub name: String,
    /// Pairs of x and y; a y that is no finite number is a gap, written as null.
    pub points: Vec<(f64, f64)>,
}

/// Figures over layers, steps or positions, to be drawn.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Plot {
    pub title: String,
    pub x: String,
    pub y: String,
    /// Whether y is drawn on a logarithmic axis.
    pub log: bool,
    /// A line that must not be crossed, if there is one.
    pub limit: Option<f64>,
    pub series: Vec<Series>,
}

impl Plot {
    pub fn new(title: &str, x: &str, y: &str) -> Plot {
        Plot { title: title.into(), x: x.into(), y: y.into(), ..Plot::default() }
    }

    /// Adds a line.
    pub fn line(&mut self, name: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        self.series.push(Series { name: name.into(), points: points.into_iter().collect() });
    }
}

/// Folder beside the reports that keeps the run before the last.
pub const PREVIOUS: &str = "previous";

/// Name of the fact that a command ended before there was anything to judge.
pub const REFUSED: &str = "refused";

/// Version of the JSON form: sections may be added under the same one.
pub const SCHEMA: &str = "phasegate.report/1";

/// What one command found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub command: String,
    pub model: String,
    pub device: String,
    /// What the device says of itself.
    pub device_description: String,
    pub verdict: Verdict,
    /// Single facts: name and value.
    pub facts: Vec<(String, Cell)>,
    pub tables: Vec<Table>,
    pub plots: Vec<Plot>,
    /// What the figures come from: commit, weights, capture, versions.
    pub provenance: Vec<(String, String)>,
}

impl Report {
    /// A report without sections; `device` is a label and what the device says of itself.
    pub fn new(command: &str, model: &str, device: (String, String), verdict: Verdict) -> Report {
        Report {
            schema: SCHEMA,
            command: command.into(),
            model: model.into(),
            device: device.0,
            device_description: device.1,
            verdict,
            facts: vec![],
            tables: vec![],
            plots: vec![],
            provenance: vec![],
        }
    }

    pub fn fact(&mut self, name: &str, value: impl Into<Cell>) {
        self.facts.push((name.into(), value.into()));
    }

    pub fn markdown(&self) -> String {
        markdown::render(self)
    }

    /// Writes `<dir>/<command>-<model>-<device>.{json,md}` and says where; nothing is replaced before all is written. The JSON that
    /// stood there is kept in [`PREVIOUS`]. Processes that write the same report at once do not fail each other.
    ///
    /// Errors: [`Error::Io`], never of the kind `NotFound`, which is what a checkpoint's missing file is.
    pub fn write(&self, dir: &Path) -> Result<[PathBuf; 2]> {
        self.write_in(dir).map_err(|error| match error {
            Error::Io { path, os } if os.kind() == ErrorKind::NotFound => {
                Error::Io { path, os: std::io::Error::other(os.to_string()) }
            }
            other => other,
        })
    }

    fn write_in(&self, dir: &Path) -> Result<[PathBuf; 2]> {
        if dir.exists() && !dir.is_dir() {
            let os = std::io::Error::new(ErrorKind::NotADirectory, "found a file, expected a folder for reports");
            return Err(Error::Io { path: dir.into(), os });
        }
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let stem = format!("{}-{}-{}", self.command, self.model, self.device);
        let json = dir.join(format!("{stem}.json"));
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::malformed(&json, e.to_string()))?;
        let md = dir.join(format!("{stem}.md"));
        let (previous, shown) = (dir.join(PREVIOUS).join(format!("{stem}.json")), self.markdown());
        let old = match std::fs::read(&json) {
            Ok(old) => Some(old),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io(&json)(error)),
        };
        let mut files: Vec<(&Path, &[u8])> = old.iter().map(|old| (previous.as_path(), old.as_slice())).collect();
        files.extend([(json.as_path(), text.as_bytes()), (md.as_path(), shown.as_bytes())]);
        write_together(&files)?;
        Ok([json, md])
    }
}
