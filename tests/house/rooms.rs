//! Which room may import which, and which packages stay in which room.

use super::files;
use super::source;

/// Every room and what it may import, from the ground up: the one table of the architecture. A room may import
/// itself; what is missing from this table may not exist under `src/`.
const ROOMS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("tensor", &["error"]),
    ("settings", &["error"]),
    ("model", &["error", "tensor", "settings"]),
    ("kernel", &["error", "tensor", "settings", "model"]),
    ("reference", &["error", "tensor", "settings", "model", "kernel"]),
    ("compute", &["error", "tensor", "settings", "model", "kernel", "reference"]),
    ("device", &["error", "tensor", "settings", "model", "kernel", "reference", "compute"]),
    ("plan", &["error", "tensor", "settings", "model", "kernel", "reference", "compute", "device"]),
    ("runner", &["error", "tensor", "settings", "model", "kernel", "reference", "compute", "device", "plan"]),
    // The judge shares no code with the judged.
    ("check", &["error", "tensor"]),
    ("fault", BELOW_FAULT),
    ("explain", BELOW_EXPLAIN),
    ("phase", BELOW_PHASE),
    ("report", BELOW_REPORT),
    // It makes tests of cases and knows nothing of what they test.
    ("harness", &["error", "settings"]),
    ("commands", BELOW_COMMANDS),
];

const BELOW_FAULT: &[&str] =
    &["error", "tensor", "settings", "model", "kernel", "reference", "compute", "device", "plan", "runner", "check"];
const BELOW_EXPLAIN: &[&str] = &[
    "error",
    "tensor",
    "settings",
    "model",
    "kernel",
    "reference",
    "compute",
    "device",
    "plan",
    "runner",
    "check",
    "fault",
];
const BELOW_PHASE: &[&str] = &[
    "error",
    "tensor",
    "settings",
    "model",
    "kernel",
    "reference",
    "compute",
    "device",
    "plan",
    "runner",
    "check",
    "fault",
    "explain",
];
const BELOW_REPORT: &[&str] = &[
    "error",
    "tensor",
    "settings",
    "model",
    "kernel",
    "reference",
    "compute",
    "device",
    "plan",
    "runner",
    "check",
    "fault",
    "explain",
    "phase",
];
const BELOW_COMMANDS: &[&str] = &[
    "error",
    "tensor",
    "settings",
    "model",
    "kernel",
    "reference",
    "compute",
    "device",
    "plan",
    "runner",
    "check",
    "fault",
    "explain",
    "phase",
    "report",
    "harness",
];

/// Packages that only some files may use, with the reason for each exception.
const PACKAGES: &[(&str, &[(&str, &str)])] = &[
    (
        "safetensors",
        &[
            ("src/model/", "the room that knows file formats"),
            ("src/reference/", "reads captures"),
            ("src/runner/record", "reads and writes records"),
        ],
    ),
    ("tokenizers", &[("src/model/", "the room that knows file formats")]),
    ("minijinja", &[("src/model/", "chat templates are part of a checkpoint")]),
    ("hf_hub", &[("src/model/", "finds checkpoints")]),
    ("xrt_sys", &[("src/device/npu", "the only user of XRT")]),
    ("insta", &[("src/harness/baseline.rs", "baselines")]),
    ("libtest_mimic", &[("src/harness/", "test cases")]),
    ("clap", &[("src/commands/", "the command line"), ("src/main.rs", "the command line")]),
    ("anyhow", &[("src/commands/", "wraps the one error type"), ("src/main.rs", "prints what commands return")]),
];

/// The room of a file under `src/`; none for `lib.rs` and `main.rs`.
fn room(file: &str) -> Option<&str> {
    let inside = file.strip_prefix("src/")?;
    let room = inside.split(['/', '.']).next()?;
    (!["lib", "main"].contains(&room) && !inside.starts_with("bin/")).then_some(room)
}

fn code_of(file: &str) -> String {
    source::code(&files::text(file).unwrap_or_default())
}

#[test]
fn a_room_imports_only_what_the_table_allows() {
    let mut wrong = Vec::new();
    for file in files::rust() {
        let Some(room) = room(&file) else { continue };
        let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            wrong.push(format!("{file}: room {room} is not in the table"));
            continue;
        };
        for import in source::rooms_of(&code_of(&file)) {
            let is_room = ROOMS.iter().any(|(name, _)| *name == import);
            if is_room && import != room && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{file}: {room} imports {import}, and may import {allowed:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A path that climbs by `super` could leave its room unseen by the rule above.
#[test]
fn no_path_climbs_out_of_its_room() {
    for file in files::rust().iter().filter(|file| room(file).is_some()) {
        let code = code_of(file);
        let root = file.matches('/').count() == 1 || file.ends_with("/mod.rs") && file.matches('/').count() == 2;
        let climbs = if root { "super::super" } else { "super::super::super" };
        assert!(!code.contains(climbs), "{file}: {climbs} leaves the room; write crate::");
        let outside_of_tests = code.split("mod tests").next().unwrap_or_default();
        assert!(!root || !outside_of_tests.contains("super::"), "{file}: super:: leaves the room; write crate::");
    }
}

#[test]
fn the_table_points_downwards() {
    for (at, (room, allowed)) in ROOMS.iter().enumerate() {
        for below in *allowed {
            assert!(ROOMS[..at].iter().any(|(name, _)| name == below), "{room} may import {below}, which is not below");
        }
    }
}

#[test]
fn the_judge_shares_no_code_with_the_judged() {
    let judged = ["model", "device", "runner", "plan", "kernel", "compute", "reference"];
    let (_, allowed) = ROOMS.iter().find(|(room, _)| *room == "check").expect("the judge's room");
    assert!(judged.iter().all(|room| !allowed.contains(room)));
}

#[test]
fn packages_stay_in_their_rooms() {
    let mut wrong = Vec::new();
    for file in files::rust().iter().filter(|file| file.starts_with("src/")) {
        let code = code_of(file);
        for (package, places) in PACKAGES {
            let allowed = places.iter().any(|(place, _)| file.starts_with(place));
            if !allowed && source::uses_crate(&code, package) {
                wrong.push(format!("{file} uses {package}, which only {places:?} may"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
