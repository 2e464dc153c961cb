//! What people do to the program, and what they are told to do.

mod interrupt;
mod planted;
mod stale;
mod walkthrough;

use std::fs;

use crate::binary::{copy, root};

/// A project root of its own, with tiny_llama and what its gates read.
fn project() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy(&root().join("prompts"), &dir.path().join("prompts"));
    copy(&root().join("fixtures/tiny_llama"), &dir.path().join("fixtures/tiny_llama"));
    for name in ["limits.toml", "hf/held_out.txt"] {
        let to = dir.path().join("fixtures").join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(root().join("fixtures").join(name), to).unwrap();
    }
    dir
}
