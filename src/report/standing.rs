//! Whether a stored run still is one of the checkpoint and capture that are on disk: a pass of other weights passes nothing.

use std::collections::BTreeMap;
use std::path::Path;

use super::provenance;
use super::stored::Stored;
use crate::error::{Error, Result};
use crate::model;
use crate::model::hashes::sha256_file;
use crate::phase::Subject;

/// Outcome of a pass that is not of what is on disk.
pub const STALE: &str = "stale";

/// What is on disk now; the capture only where it belongs to the checkpoint.
struct Now {
    weights: String,
    capture: Result<String>,
}

/// Holds each report against what is on disk under `root`. One of other weights or of another capture, and one whose
/// checkpoint or capture would be refused now, is marked as stale; one that cannot be held against anything is warned of.
pub fn hold(root: &Path, reports: &mut [Stored]) {
    let mut known: BTreeMap<(String, String), Result<Now>> = BTreeMap::new();
    for report in reports {
        let Some(weights) = report.from("weights_sha256").map(str::to_owned) else {
            if report.outcome == "pass" {
                report.warnings.push("names no weights: whether they are the checkpoint's cannot be told".into());
            }
            continue;
        };
        let dir = report.from("checkpoint").unwrap_or_default().to_owned();
        let key = (report.model.clone(), dir);
        let now = &*known.entry(key).or_insert_with_key(|(model, dir)| now(root, model, dir));
        let other = |what: &str, found: &str, now: &str| format!("run on another {what}: {found:.12}, now {now:.12}");
        let stale = match now {
            Err(error @ (Error::Unavailable { .. } | Error::Unknown { .. })) => {
                report.warnings.push(format!("not held against the checkpoint as it is now: {error}"));
                None
            }
            Err(error) => Some(error.to_string()),
            Ok(now) if now.weights != weights => Some(other("set of weights", &weights, &now.weights)),
            Ok(Now { capture: Err(error), .. }) => Some(error.to_string()),
            Ok(Now { capture: Ok(capture), .. }) => {
                let found = report.from("capture_sha256").filter(|found| found != capture);
                found.map(|found| other("capture", found, capture))
            }
        };
        if let Some(why) = stale {
            report.reasons.insert(0, format!("stale: {why}"));
            if report.outcome == "pass" {
                report.outcome = STALE.into();
            }
        }
    }
}

/// Errors: whatever is wrong with the checkpoint; that there is none.
fn now(root: &Path, name: &str, dir: &str) -> Result<Now> {
    let subject = open(root, name, dir)?;
    let capture = subject.capture().and_then(|capture| sha256_file(capture.path()));
    Ok(Now { weights: provenance::weights(&subject)?, capture })
}

/// The fixture's variant whose checkpoint this is; for a model that is no fixture, the folder.
fn open(root: &Path, name: &str, dir: &str) -> Result<Subject> {
    let subject = if root.join("fixtures").join(name).is_dir() {
        let fixture = model::fixtures(root).unwrap_or_default().into_iter().find(|fixture| fixture.name == name);
        let here = |variant: &&String| {
            let located = model::locate_in(root, name, Some(variant));
            located.is_ok_and(|located| located.checkpoint_dir == Path::new(dir))
        };
        let variant = fixture.as_ref().and_then(|fixture| fixture.variants.keys().find(here));
        Subject::unaccounted(root, name, variant.map(String::as_str))?
    } else {
        Subject::unaccounted(root, dir, None)?
    };
    subject.checkpoint.account(&subject.config)?;
    Ok(subject)
}
