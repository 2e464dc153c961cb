//! The binary under test, and copies of what it is let loose on.

use std::fs;
use std::path::Path;

use assert_cmd::Command;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn phasegate() -> Command {
    let mut command = Command::cargo_bin("phasegate").unwrap();
    command.current_dir(root());
    command
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
