//! Every fault of the virtual NPU under `phasegate verify`: a named error, a failure or INCONCLUSIVE, never a pass, a
//! crash or a hang.

use libtest_mimic::Failed;

use super::{Named, child};

pub fn cases() -> Vec<Named> {
    vec![
        ("none", none),
        ("hang", || fault("hang", 2, &HUNG)),
        ("hang_later", || fault("hang,after=30", 2, &HUNG)),
        ("error", || fault("error", 2, &["ERT_CMD_STATE_ERROR"])),
        ("error_later", || fault("error,after=100", 2, &["ERT_CMD_STATE_ERROR"])),
        ("timeout", || fault("timeout", 2, &["ERT_CMD_STATE_TIMEOUT"])),
        ("timeout_later", || fault("timeout,after=50", 2, &["ERT_CMD_STATE_TIMEOUT"])),
        ("eio", || fault("eio", 2, &["not started: DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-5)"])),
        ("no_context", || fault("no_context", 1, &["no hardware context is free"])),
        ("no_memory", || fault("no_memory", 1, &["no memory for a buffer"])),
        ("memlock", || fault("memlock", 1, &["raise `ulimit -l`"])),
        ("first_generation", || fault("npu1", 1, &["found NPU1, expected NPU2"])),
        ("stale", || wrong("stale")),
        ("alias", || wrong("alias")),
    ]
}

/// A command that has not ended: its state is the one it began with.
const HUNG: [&str; 2] = ["no end", "ERT_CMD_STATE_NEW"];

const VERIFY: [&str; 4] = ["verify", "tiny_llama", "--device", "vnpu"];

/// Without a fault the same command passes.
fn none() -> Result<(), Failed> {
    let left = child::of_phasegate(&VERIFY, "")?;
    if left.out.contains("PASS") { left.expect(0, "") } else { Err(format!("no PASS: {left:#?}").into()) }
}

/// The command says what happened, in its report or as its error; with the dispatch's name where one was running.
fn fault(orders: &str, code: i32, texts: &[&str]) -> Result<(), Failed> {
    let left = child::of_phasegate(&VERIFY, orders)?;
    let said = [left.out.as_str(), left.err.as_str()].concat();
    let dispatch: &[&str] = if code == 2 { &["device vnpu: ", "l0"] } else { &[] };
    if left.code != Some(code) || texts.iter().chain(dispatch).any(|text| !said.contains(text)) {
        return Err(format!("expected exit {code} and {texts:?} under {orders}, found {left:#?}").into());
    }
    if left.out.contains("PASS") {
        return Err(format!("a verdict of PASS under {orders}: {left:#?}").into());
    }
    Ok(())
}

/// Silently wrong numbers: the gates must see them.
fn wrong(orders: &str) -> Result<(), Failed> {
    let left = child::of_phasegate(&VERIFY, orders)?;
    if left.code == Some(1) && !left.out.contains("PASS") {
        return Ok(());
    }
    Err(format!("expected a failure under {orders}, found {left:#?}").into())
}
