//! `evaluation_report.md`: what a person reads in two minutes.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::{Audit, DOCUMENT};
use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;
use crate::phase::progress;

impl Audit {
    /// PASS, PASS WITH WARNINGS, FAIL ...
    pub fn word(&self) -> String {
        let word = self.verdict.outcome().word();
        match self.verdict.is_pass() && !self.verdict.warnings().is_empty() {
            true => format!("{word} WITH WARNINGS"),
            false => word.to_owned(),
        }
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut out = format!("# Evaluation: {} on {}\n\n**{}**\n\n", self.model, self.device, self.word());
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}. Prompts: {}. Seed {}.\n", self.description, self.prompts.join(", "), self.seed);
        let _ = writeln!(out, "## Evidence\n\n| exhibit | question | found | verdict |\n|---|---|---|---|");
        for e in &self.exhibits {
            let cell = |text: &str| text.replace('|', "/").replace('\n', " ");
            let _ =
                writeln!(out, "| {} | {} | {} | {} |", e.name, e.question, cell(&e.found), e.verdict.outcome().word());
        }
        let reasons = self.verdict.reasons().iter().map(|r| ("reason", r));
        let warnings = self.verdict.warnings().iter().map(|w| ("warning", w));
        let notes: Vec<_> = reasons.chain(warnings).collect();
        if !notes.is_empty() {
            let _ = writeln!(out, "\n## What speaks against it\n");
            for (kind, text) in notes {
                let _ = writeln!(out, "- {kind}: {text}");
            }
        }
        let _ = writeln!(out, "\n## Measured\n\n| figure | value |\n|---|---|");
        for (name, value) in &self.figures {
            let _ = writeln!(out, "| {name} | {value:.4e} |");
        }
        let _ =
            writeln!(out, "| faults injected | {} |\n| faults that no gate saw | {} |", self.injected, self.escaped);
        let _ = writeln!(
            out,
            "| escape rate of the sample | {:.1} % |",
            100.0 * self.escaped as f64 / self.injected.max(1) as f64
        );
        let _ = writeln!(out, "\nExtent: {}.\n", self.verdict.extent());
        let _ = writeln!(
            out,
            "## Reproduce\n\n    phasegate audit {} --device {} --seed {}\n    cargo test --test phase7 -- {}\n    cargo test --test escape",
            self.model,
            self.device.trim_end_matches("_npu2"),
            self.seed,
            self.model
        );
        out
    }

    /// Writes the report into the model's progress documents.
    ///
    /// Errors: [`Error::Io`].
    pub fn record(&self, root: &Path) -> Result<PathBuf> {
        let path = progress::path(root, &self.model, &self.device, DOCUMENT);
        self.write(&path)?;
        let command = format!("phasegate audit {} --device {} --record", self.model, self.device);
        progress::enter(root, &self.model, &self.device, 7, &self.verdict, &command)?;
        Ok(path)
    }

    /// Writes the report, whole or not at all.
    ///
    /// Errors: [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        write_atomically(path, self.markdown().as_bytes())
    }
}
