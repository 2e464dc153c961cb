//! The files of the project, and rules on what stands in any of them.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::source;

/// The project's own folder, whatever `PHASEGATE_ROOT` says.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the project as git knows it, committed or about to be, relative and sorted; without git (an exported
/// tree) every file outside of the ignored folders.
pub fn all() -> Vec<String> {
    let git = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    let mut files: Vec<String> = match git {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
        }
        _ => walk(root()),
    };
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    assert!(files.iter().any(|file| file == "Cargo.toml"), "the project's files were not found: {files:?}");
    files
}

fn walk(folder: &Path) -> Vec<String> {
    let ignored = ["target", "models", ".git", ".venv", "__pycache__"];
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path: PathBuf = entry.expect("a readable folder").path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() && !ignored.contains(&name.as_str()) {
            files.extend(walk(&path));
        } else if path.is_file() {
            files.push(path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned());
        }
    }
    files
}

/// Every Rust source file.
pub fn rust() -> Vec<String> {
    all().into_iter().filter(|file| file.ends_with(".rs")).collect()
}

/// A file's text; `None` if it is not text.
pub fn text(file: &str) -> Option<String> {
    String::from_utf8(std::fs::read(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))).ok()
}

#[test]
fn every_rust_file_says_what_it_is() {
    let bare = |file: &String| !text(file).is_some_and(|text| text.starts_with("//! "));
    let bare = rust().into_iter().filter(bare).collect::<Vec<_>>();
    assert!(bare.is_empty(), "no `//!` on the first line: {bare:?}");
}

#[test]
fn no_file_is_named_for_what_it_is_not() {
    let vague = ["util", "utils", "common", "helper", "helpers", "manager", "misc"];
    let named = |file: &String| file.split(['/', '.', '_']).any(|part| vague.contains(&part));
    let named = rust().into_iter().filter(named).collect::<Vec<_>>();
    assert!(named.is_empty(), "name these files for what is in them: {named:?}");
}

/// Folders of one machine and hosts that serve packages: written as pieces, for this file is searched too.
#[test]
fn no_file_names_a_machine_or_a_registry() {
    let folders = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"], ["/Us", "ers/"], ["../sh", "ared"]];
    let hosts = [
        ["index.crates", ".io"],
        ["static.crates", ".io"],
        ["pypi.org", "/simple"],
        ["files.python", "hosted.org"],
        ["registry.npm", "js.org"],
    ];
    let forbidden = folders.iter().chain(&hosts).map(|pieces| pieces.concat()).collect::<Vec<_>>();
    let mut found = Vec::new();
    for file in all() {
        for (number, line) in text(&file).unwrap_or_default().lines().enumerate() {
            if let Some(what) = forbidden.iter().find(|what| names(line, what)) {
                found.push(format!("{file}:{}: {what}", number + 1));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Whether a line names a folder or host, and not a longer path that merely ends like it (`a/b/c` where `/b/` is asked for).
fn names(line: &str, what: &str) -> bool {
    line.match_indices(what).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !what.starts_with('/') || before.is_none_or(|c| !(c.is_alphanumeric() || "}_-.)$*".contains(c)))
    })
}

#[test]
fn a_machine_path_is_told_from_a_longer_one() {
    let folder = ["/wo", "rk/"].concat();
    assert!(names(&format!("cd {folder}x"), &folder) && names(&format!("\"{folder}x\""), &folder));
    assert!(!names(&format!("target{folder}x"), &folder));
}

/// `unsafe` stands only where hardware, a C interface or a memory map makes it unavoidable.
const UNSAFE_MAY_STAND_IN: &[(&str, &str)] = &[
    ("src/compute/", "SIMD intrinsics"),
    ("src/device/emu/", "buffers shared with the worker pool"),
    ("src/device/npu/", "foreign functions"),
    ("src/model/safetensors_file.rs", "memory map"),
    ("src/model/fetch/convert.rs", "memory map"),
    ("benches/model.rs", "CPU time of the process"),
    ("benches/gates.rs", "memory of child processes"),
    ("xrt-sys/", "foreign functions"),
];

#[test]
fn unsafe_stands_only_where_it_must() {
    for file in rust() {
        let allowed = UNSAFE_MAY_STAND_IN.iter().any(|(place, _)| file.starts_with(place));
        let code = source::code(&text(&file).unwrap_or_default());
        assert!(allowed || !source::has_word(&code, "unsafe"), "{file}: unsafe outside of {UNSAFE_MAY_STAND_IN:?}");
    }
}

#[test]
fn the_makefile_lists_its_targets() {
    let makefile = text("Makefile").expect("text");
    let targets = makefile.lines().filter_map(|line| {
        let (name, rest) = line.split_once(':')?;
        let plain = !name.is_empty() && name.bytes().all(|c| c.is_ascii_lowercase() || c == b'-');
        (plain && !rest.starts_with('=')).then_some((name, rest))
    });
    let targets = targets.collect::<Vec<_>>();
    for wanted in [
        "help",
        "compile",
        "run",
        "chat",
        "verify",
        "verify-full",
        "diagnosis",
        "profile",
        "model",
        "fixtures",
        "test",
        "check",
        "review",
        "bench",
        "clean",
    ] {
        assert!(targets.iter().any(|(name, _)| *name == wanted), "Makefile: no target {wanted}");
    }
    let phony = makefile.lines().find_map(|line| line.strip_prefix(".PHONY:")).expect("a .PHONY line");
    for (name, rest) in targets {
        assert!(rest.contains("## "), "Makefile: {name} has no `## text`, so `make help` does not list it");
        assert!(phony.split_whitespace().any(|word| word == name), "Makefile: {name} is not in .PHONY");
    }
}
