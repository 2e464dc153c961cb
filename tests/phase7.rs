//! Phase 7: the audit of every fixture on every chosen device, each in a process of its own that trusts nothing; and
//! runners that only pretend, which the audit must catch.

#[path = "phase7/mock.rs"]
mod mock;

use std::process::{Command, ExitCode};

use phasegate::harness::{Availability, Case, DeviceLabel, Failed, Suite};
use phasegate::phase::{Outline, devices};

fn main() -> ExitCode {
    let mut suite = Suite::new("phase7");
    for device in DeviceLabel::ALL {
        let missing = devices::unavailable(device.label());
        suite.device(device, missing.map_or(Availability::Available, |e| Availability::Missing(e.to_string())));
    }
    let outlines = match Outline::all() {
        Ok(outlines) => outlines,
        Err(error) => {
            eprintln!("phase7: {error}");
            return ExitCode::FAILURE;
        }
    };
    for outline in outlines {
        suite.model(&outline.name, outline.missing.map_or(Availability::Available, Availability::Missing));
        let model = outline.name.clone();
        let case = Case::new(format!("audit::{model}"), move |cx| audit(&model, cx.device()?));
        suite.case(case.needs(outline.name));
    }
    suite.case(Case::new("mock::of_reference_tokens", |_| mock::caught(false)).without_device());
    suite.case(Case::new("mock::with_forged_counters", |_| mock::caught(true)).without_device());
    suite.run()
}

fn audit(model: &str, device: DeviceLabel) -> Result<(), Failed> {
    let (device, datapath) = match device.label() {
        "emu_npu2" => ("emu", "npu2"),
        other => (other, "ieee"),
    };
    let reports = concat!(env!("CARGO_TARGET_TMPDIR"), "/audit");
    let output = Command::new(env!("CARGO_BIN_EXE_phasegate"))
        .args(["audit", model, "--device", device, "--datapath", datapath, "--report-dir", reports])
        .output()
        .map_err(|e| Failed::from(format!("phasegate audit: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stdout);
    Err(format!("phasegate audit {model}: {}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}
