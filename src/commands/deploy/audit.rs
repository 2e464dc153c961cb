//! Phase 7 of a deployment: the audit, in a process of its own that has seen nothing of the phases before.

use std::process::Command;

use serde_json::Value;

use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};

/// Runs `phasegate audit`; its exit code is what counts, its JSON says why.
///
/// Errors: [`Error::Io`] when the program cannot be started.
pub(super) fn audit(program: &str, model: &str, device: &str) -> Result<Verdict> {
    // `emu_npu2` is a device's label, too: `--device` takes every one of them.
    let args = ["audit", model, "--device", device, "--json"];
    let output = Command::new(program).args(args).output().map_err(Error::io(program))?;
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let extent = Extent::new().require("audits", 1).compare("audits", 1);
    if output.status.success() {
        return Ok(Verdict::judge(vec![], extent));
    }
    let reasons = report["verdict"]["reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut failures: Vec<String> = reasons.map(|reason| format!("audit: {reason}")).collect();
    if failures.is_empty() {
        let said = String::from_utf8_lossy(&output.stderr);
        failures.push(format!("audit: {}; {}", output.status, said.lines().next_back().unwrap_or_default()));
    }
    Ok(Verdict::judge(failures, extent))
}
