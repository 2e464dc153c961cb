//! Which room may import which, and which packages stay in which room.

use super::files;
use super::source;

/// Every room, from the ground up: a room may import itself and any room above it in this list, unless
/// [`NARROWER`] says less. What is missing here may not exist under `src/`.
const ROOMS: &[&str] = &[
    "error",
    "begun",
    "random",
    "tensor",
    "settings",
    "check",
    "model",
    "kernel",
    "reference",
    "compute",
    "device",
    "plan",
    "runner",
    "fault",
    "explain",
    "phase",
    "report",
    "harness",
    "commands",
];

/// Rooms that may import less than all below them, and why.
const NARROWER: &[(&str, &[&str], &str)] = &[
    ("check", &["error", "tensor"], "the judge shares no code with the judged"),
    ("compute", &["error", "tensor"], "it sees views, shapes and packed weights only"),
    ("kernel", &["error", "begun", "tensor"], "description, and oracles that share no code with a device"),
    ("model", &["error", "begun", "tensor", "settings"], "what is judged does not know the judge"),
    ("device", &["error", "tensor", "settings", "kernel", "compute"], "a device knows no model and no judge"),
    ("plan", &["error", "tensor", "model", "kernel", "compute", "device"], "what is judged does not know the judge"),
    (
        "runner",
        &["error", "begun", "random", "tensor", "settings", "model", "kernel", "compute", "device", "plan"],
        "what is judged does not know the judge, nor the reference",
    ),
    (
        "fault",
        &["error", "random", "tensor", "model", "kernel", "device", "plan", "runner"],
        "a fault alters a run and judges none; its kernels share no code with a device",
    ),
];

/// What a room may import; none for a room that is not in the table.
fn allowed(room: &str) -> Option<Vec<&'static str>> {
    let at = ROOMS.iter().position(|known| *known == room)?;
    let narrower = NARROWER.iter().find(|(known, ..)| *known == room);
    Some(narrower.map_or_else(|| ROOMS[..at].to_vec(), |(_, rooms, _)| rooms.to_vec()))
}

/// Packages that only some files may use, with the reason for each exception.
const PACKAGES: &[(&str, &[(&str, &str)])] = &[
    (
        "safetensors",
        &[
            ("src/model/", "the room that knows file formats"),
            ("src/reference/", "reads captures"),
            ("src/runner/record", "reads and writes records"),
            ("src/runner/external/protocol", "rows that an engine leaves"),
            ("src/runner/tests.rs", "makes checkpoints"),
        ],
    ),
    ("tokenizers", &[("src/model/", "the room that knows file formats")]),
    ("minijinja", &[("src/model/", "chat templates are part of a checkpoint"), ("src/report/html", "the page")]),
    ("hf_hub", &[("src/model/", "finds checkpoints")]),
    ("xrt_sys", &[("src/device/npu", "the only user of XRT")]),
    ("evalexpr", &[("src/kernel/expr", "placement rules")]),
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
        let Some(allowed) = allowed(room) else {
            wrong.push(format!("{file}: room {room} is not in the table"));
            continue;
        };
        for import in source::rooms_of(&code_of(&file)) {
            let is_room = ROOMS.contains(&import.as_str());
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
    for (at, room) in ROOMS.iter().enumerate() {
        for below in allowed(room).expect("in the table") {
            assert!(ROOMS[..at].contains(&below), "{room} may import {below}, which is not below");
        }
    }
    assert!(NARROWER.iter().all(|(room, ..)| ROOMS.contains(room)));
}

#[test]
fn the_judge_shares_no_code_with_the_judged() {
    let judged = ["model", "kernel", "compute", "device", "plan", "runner"];
    for room in judged {
        assert!(!allowed(room).expect("in the table").contains(&"check"), "{room} may not know the judge");
    }
    assert_eq!(allowed("check"), Some(vec!["error", "tensor"]));
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
