//! What a deployment has passed, kept beside the model's documents so that the next call goes on from there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Outcome, Verdict};
use crate::error::{Error, Result};
use crate::model::hashes::{sha256_file, write_atomically};
use crate::phase::Subject;
use crate::report::provenance;

/// One phase's end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The outcome's word.
    pub(super) outcome: String,
    /// What was compared.
    pub(super) extent: String,
    pub(super) reasons: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    /// What the entries hold for: other weights, captures or programs have passed nothing.
    weights_sha256: String,
    capture_sha256: String,
    program_sha256: String,
    phases: BTreeMap<u8, Entry>,
}

/// The state of one model on one device.
pub(super) struct State {
    path: PathBuf,
    kept: Kept,
}

impl State {
    /// The state that was kept, or none passed when `again`, or when it holds for something else.
    ///
    /// Errors: [`Error::Io`].
    pub(super) fn open(subject: &Subject, device: &str, again: bool) -> Result<State> {
        let path = super::document_path(subject, device, "deploy").with_extension("json");
        let program = std::env::current_exe().map_err(Error::io("this binary"))?;
        let fresh = Kept {
            weights_sha256: provenance::weights(subject)?,
            capture_sha256: sha256_file(subject.capture()?.path())?,
            program_sha256: sha256_file(&program)?,
            phases: BTreeMap::new(),
        };
        let known = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Kept>(&text).ok());
        let same = |known: &Kept| {
            (&known.weights_sha256, &known.capture_sha256, &known.program_sha256)
                == (&fresh.weights_sha256, &fresh.capture_sha256, &fresh.program_sha256)
        };
        let kept = known.filter(|known| !again && same(known)).unwrap_or(fresh);
        Ok(State { path, kept })
    }

    /// What a phase compared when it passed; none when it has not.
    pub(super) fn passed(&self, phase: u8) -> Option<&str> {
        let entry = self.kept.phases.get(&phase)?;
        (entry.outcome == Outcome::Pass.word()).then_some(entry.extent.as_str())
    }

    pub(super) fn entry(&self, phase: u8) -> Option<&Entry> {
        self.kept.phases.get(&phase)
    }

    /// Enters a phase's end; what came after it earlier has passed nothing.
    ///
    /// Errors: [`Error::Io`].
    pub(super) fn enter(&mut self, phase: u8, verdict: &Verdict) -> Result<()> {
        self.kept.phases.retain(|known, _| *known < phase);
        let (outcome, extent) = (verdict.outcome().word().to_owned(), verdict.extent().to_string());
        self.kept.phases.insert(phase, Entry { outcome, extent, reasons: verdict.reasons().to_vec() });
        let text = serde_json::to_string_pretty(&self.kept).map_err(|e| Error::malformed(&self.path, e.to_string()))?;
        write_atomically(&self.path, text.as_bytes())
    }
}
