//! A gate that ended without a verdict because its checkpoint, capture or device was refused: its report says so, lest an
//! earlier one stands in its place.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::{ModelArgs, ReportArgs};
use crate::check::{Extent, Verdict};
use crate::error::Error;
use crate::model;
use crate::report::{REFUSED, Report, provenance};
use crate::settings;

/// What a report is found by.
pub(super) struct Gate {
    command: &'static str,
    model: String,
    variant: Option<String>,
    device: String,
    dir: PathBuf,
}

impl Gate {
    /// `device`: the label of what is gated.
    pub(super) fn new(command: &'static str, model: &ModelArgs, device: String, report: &ReportArgs) -> Gate {
        Gate { command, model: model.model.clone(), variant: model.variant.clone(), device, dir: report.dir() }
    }

    /// Hands `ended` on; an error that speaks against what was gated is written as the gate's report, too.
    pub(super) fn reported(self, ended: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
        let error = match ended {
            Err(error) => error,
            Ok(code) => return Ok(code),
        };
        if let (Some(verdict), Some(name)) = (verdict(&error), self.name()) {
            let mut report = Report::new(self.command, &name, (self.device.clone(), self.device), verdict);
            report.fact(REFUSED, "ended before there was anything to judge");
            report.provenance = vec![
                ("commit".into(), provenance::commit(&settings::root())),
                ("phasegate".into(), env!("CARGO_PKG_VERSION").into()),
            ];
            // The error itself is what people must read, whatever becomes of its report.
            let _ = report.write(&self.dir);
        }
        Err(error)
    }

    /// The model's name; none where there is no such model.
    fn name(&self) -> Option<String> {
        let plain = Path::new(&self.model).file_name() == Some(self.model.as_ref());
        // A fixture whose manifest is damaged has a name all the same.
        let fixture = || plain && settings::root().join("fixtures").join(&self.model).is_dir();
        let located = model::locate(&self.model, self.variant.as_deref()).map(|located| located.name);
        located.ok().or_else(|| fixture().then(|| self.model.clone()))
    }
}

/// What an error says of what was gated: nothing where the question was wrong, or nothing was here to be asked.
fn verdict(error: &anyhow::Error) -> Option<Verdict> {
    match error.downcast_ref::<Error>() {
        Some(Error::Usage { .. } | Error::Unknown { .. } | Error::Unavailable { .. }) => None,
        Some(Error::Incomplete { .. }) => Some(Verdict::inconclusive(format!("{error:#}"))),
        // A full disk says nothing of a model; a file that is missing from a checkpoint does.
        Some(Error::Io { os, .. }) if os.kind() != std::io::ErrorKind::NotFound => None,
        _ if super::closed_pipe(error) => None,
        _ => Some(Verdict::judge(vec![format!("{error:#}")], Extent::new())),
    }
}
