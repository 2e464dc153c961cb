//! Progress documents: what a model's phases measured on a device, kept beside its fixture.
//!
//! `fixtures/<model>/progress/<device>/<document>.md`, written by the commands' `--record` and never by hand: the
//! phase's `documented` case compares every figure in it with the baseline.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::Finding;
use crate::check::Verdict;
use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;

/// Header of the table of figures.
const HEADER: &str = "| case | figure | value |";

/// One phase's document for one model on one device.
#[derive(Debug, Clone)]
pub struct Document {
    /// `phase2_block` or `phase3_full`.
    pub name: &'static str,
    /// Its phase, entered in progress.md.
    pub phase: u8,
    pub model: String,
    pub device: String,
    /// The command that writes it.
    pub command: String,
    /// Free lines above the figures: verdict, plan, extent.
    pub notes: Vec<String>,
    /// Tables above the verdicts, in Markdown.
    pub tables: Vec<String>,
    /// Case (without device) and what it found.
    pub findings: Vec<(String, Finding)>,
}

/// Where the document lies.
pub fn path(root: &Path, model: &str, device: &str, name: &str) -> PathBuf {
    root.join("fixtures").join(model).join("progress").join(device).join(format!("{name}.md"))
}

impl Document {
    pub fn render(&self) -> String {
        let Document { name, model, device, command, notes, tables, findings, .. } = self;
        let mut out = format!("# {name}: {model} on {device}\n\nWritten by `{command}`; do not edit.\n\n");
        // Writing to a String cannot fail.
        for note in notes {
            let _ = writeln!(out, "- {note}");
        }
        for table in tables {
            let _ = writeln!(out, "\n{table}");
        }
        let _ = writeln!(out, "\n## Verdicts\n\n| case | verdict |\n|---|---|");
        for (case, finding) in findings {
            let _ = writeln!(out, "| {case} | {} |", finding.verdict.to_string().replace('|', "/"));
        }
        let _ = writeln!(out, "\n## Figures\n\n{HEADER}\n|---|---|---|");
        for (case, finding) in findings {
            for (figure, value) in &finding.numbers {
                // Counts keep all their digits.
                let whole = value.fract() == 0.0 && (2.0..1e15).contains(value);
                let value = if whole { format!("{value:.0}") } else { format!("{value:.6e}") };
                let _ = writeln!(out, "| {case} | {figure} | {value} |");
            }
        }
        out
    }

    /// Writes the document, whole or not at all.
    ///
    /// Errors: [`Error::Io`].
    pub fn write(&self, root: &Path) -> Result<PathBuf> {
        let path = path(root, &self.model, &self.device, self.name);
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        write_atomically(&path, self.render().as_bytes())?;
        let verdict = Verdict::all(self.findings.iter().map(|(_, finding)| finding.verdict.clone()));
        enter(root, &self.model, &self.device, self.phase, &verdict, &self.command)?;
        Ok(path)
    }
}

/// Header of the table of phases in progress.md.
const PHASES_HEADER: &str = "| phase | verdict | compared | command |";

/// Enters one phase's outcome into `progress.md`, keeping what the other phases have written.
///
/// Errors: [`Error::Io`].
pub fn enter(root: &Path, model: &str, device: &str, phase: u8, verdict: &Verdict, command: &str) -> Result<PathBuf> {
    let path = path(root, model, device, "progress");
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let mut rows: BTreeMap<u8, String> = BTreeMap::new();
    for line in old.lines().skip_while(|line| *line != PHASES_HEADER).skip(2) {
        let known = line.trim_start_matches('|').split('|').next().and_then(|cell| cell.trim().parse().ok());
        rows.extend(known.map(|known| (known, line.to_owned())));
    }
    let extent = verdict.extent().to_string().replace('|', "/");
    rows.insert(phase, format!("| {phase} | {} | {extent} | `{command}` |", verdict.outcome().word()));
    let mut out = format!("# Progress: {model} on {device}\n\nWritten by the commands' `--record`; do not edit.\n\n");
    let _ = writeln!(out, "{PHASES_HEADER}\n|---|---|---|---|");
    for row in rows.values() {
        let _ = writeln!(out, "{row}");
    }
    write_atomically(&path, out.as_bytes())?;
    Ok(path)
}

/// Phase and the word of its verdict, as `progress.md` has them; none where nothing was recorded.
pub fn phases(root: &Path, model: &str, device: &str) -> Vec<(u8, String)> {
    let text = std::fs::read_to_string(path(root, model, device, "progress")).unwrap_or_default();
    let rows = text.lines().skip_while(|line| *line != PHASES_HEADER).skip(2);
    let row = |line: &str| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        Some((cells.next()?.parse().ok()?, cells.next()?.to_owned()))
    };
    rows.filter_map(row).collect()
}

/// The figures of a written document: case to (figure, value) in document order.
///
/// Errors: [`Error::Io`] when it is not there, [`Error::Malformed`] for a line that is no figure.
pub fn figures(path: &Path) -> Result<BTreeMap<String, Vec<(String, f64)>>> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let mut figures: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let rows = text.lines().skip_while(|line| *line != HEADER).skip(2);
    for line in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [case, figure, value] = cells[..] else {
            return Err(Error::malformed(path, format!("not a figure: {line}")));
        };
        let value = value.parse().map_err(|_| Error::malformed(path, format!("not a number: {line}")))?;
        figures.entry(case.into()).or_default().push((figure.into(), value));
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Extent;

    #[test]
    fn figures_survive_the_document() {
        let extent = Extent::new().require("steps", 1).compare("steps", 1);
        let finding = Finding {
            verdict: Verdict::judge(vec![], extent),
            numbers: vec![("cosine", 0.5), ("kl", 1e-9), ("bytes", 1234567891.0)],
        };
        let document = Document {
            name: "phase3_full",
            phase: 3,
            model: "m".into(),
            device: "emu".into(),
            command: "phasegate verify m --record".into(),
            notes: vec!["a | b".into()],
            tables: vec![],
            findings: vec![("layer::m::base_00::l00".into(), finding)],
        };
        let root = tempfile::tempdir().unwrap();
        let read = figures(&document.write(root.path()).unwrap()).unwrap();
        assert_eq!(
            read["layer::m::base_00::l00"],
            [("cosine".to_owned(), 0.5), ("kl".to_owned(), 1e-9), ("bytes".to_owned(), 1234567891.0)]
        );
    }

    #[test]
    fn entering_a_phase_keeps_the_others() {
        let root = tempfile::tempdir().unwrap();
        let verdict = |n| Verdict::judge(vec![], Extent::new().require("steps", 2).compare("steps", n));
        let write = |phase, n| enter(root.path(), "m", "emu", phase, &verdict(n), "phasegate x").unwrap();
        write(3, 2);
        write(0, 2);
        let text = std::fs::read_to_string(write(3, 1)).unwrap();
        let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| 0") || l.starts_with("| 3")).collect();
        let expected = ["| 0 | PASS | steps 2/2 | `phasegate x` |", "| 3 | VACUOUS | steps 1/2 | `phasegate x` |"];
        assert_eq!(rows, expected);
        assert_eq!(phases(root.path(), "m", "emu"), [(0, "PASS".into()), (3, "VACUOUS".into())]);
    }

    #[test]
    fn a_missing_document_is_an_error() {
        assert!(figures(Path::new("no/such/document.md")).is_err());
    }
}
