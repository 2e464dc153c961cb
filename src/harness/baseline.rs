//! The insta snapshot of a case: where it lies, and how a measured text is compared with it. Only this file uses insta.
//!
//! insta decides what happens to a difference: by default a `.snap.new` beside the snapshot for `cargo insta review`,
//! nothing under `CI=true`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use insta::Comparator;
use insta::internals::SnapshotContents;

use super::case::Cx;
use super::numbers::{Numbers, differences};
use crate::settings;

/// The folder of a phase's snapshots, absolute: insta would take a relative one from this file's place.
pub(super) fn folder(phase: &str) -> PathBuf {
    let folder = settings::root().join("snapshots").join(phase);
    std::path::absolute(&folder).unwrap_or(folder)
}

/// `layer::tiny_llama::l07::emu` lies in `layer.tiny_llama.l07.emu.snap`.
pub(super) fn stem(name: &str) -> String {
    name.replace("::", ".")
}

/// Compares what a case measured with its snapshot; the error says which numbers left their bands.
pub(super) fn compare(cx: &Cx, numbers: &Numbers) -> Result<(), String> {
    let text = numbers.render()?;
    let found = Differences::default();
    let mut insta = insta::Settings::clone_current();
    insta.set_snapshot_path(folder(&cx.phase));
    insta.set_prepend_module_to_snapshot(false);
    insta.set_omit_expression(true);
    let name = cx.baseline_name();
    insta.set_description(format!("{}::{name}", cx.phase));
    insta.set_comparator(Box::new(WithinBands { found: found.clone() }));
    let asserted = catch_unwind(AssertUnwindSafe(|| insta.bind(|| insta::assert_snapshot!(stem(&name), text))));
    if asserted.is_ok() {
        return Ok(());
    }
    let found = found.lock().unwrap_or_else(PoisonError::into_inner);
    let file = format!("snapshots/{}/{}.snap", cx.phase, stem(&name));
    match found.as_slice() {
        [] => Err(format!("no baseline {file} yet: cargo insta review")),
        lines => Err(format!("{file}: out of band, cargo insta review:\n  {}", lines.join("\n  "))),
    }
}

/// The numbers of a stored baseline, if there is one.
pub(super) fn stored(phase: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(folder(phase).join(format!("{}.snap", stem(name)))).ok()?;
    // Two fences of `---` hold insta's metadata.
    text.splitn(3, "---\n").nth(2).map(str::to_owned)
}

type Differences = Arc<Mutex<Vec<String>>>;

/// Tells insta whether two texts are the same within the bands, and keeps what was not.
#[derive(Clone)]
struct WithinBands {
    found: Differences,
}

impl Comparator for WithinBands {
    fn matches(&self, stored: &insta::Snapshot, found: &insta::Snapshot) -> bool {
        let (SnapshotContents::Text(stored), SnapshotContents::Text(found)) = (stored.contents(), found.contents())
        else {
            return false;
        };
        let lines = differences(&stored.to_string(), &found.to_string());
        let same = lines.is_empty();
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = lines;
        same
    }

    fn dyn_clone(&self) -> Box<dyn Comparator> {
        Box::new(self.clone())
    }
}
