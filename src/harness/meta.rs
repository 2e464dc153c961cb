//! The checks a suite makes on itself: enough ran, and no snapshot is left without a case.

use std::collections::BTreeSet;
use std::path::Path;

use super::device_label::DeviceLabel;
use super::selection::Selection;
use crate::settings;

/// How far a suite reaches in this run, counted before it runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Extent {
    pub runnable: usize,
    /// Devices and models that any case of the suite could use, and those that a runnable case uses.
    pub could_use: BTreeSet<String>,
    pub uses: BTreeSet<String>,
}

/// Fails if nothing can run, or nothing on something that `PHASEGATE_REQUIRE` names.
pub(super) fn extent(extent: &Extent, selection: &Selection) -> Result<(), String> {
    if extent.runnable == 0 {
        return Err("not one case can run here: nothing would be compared".into());
    }
    let idle = |name: &&String| extent.could_use.contains(*name) && !extent.uses.contains(*name);
    match selection.required.iter().find(idle) {
        None => Ok(()),
        Some(name) => Err(format!("{} names {name}, but not one selected case can run on it", settings::REQUIRE)),
    }
}

/// Fails if a `.snap` file of the folder belongs to no case. `owned` holds the file stems of every case that has a
/// baseline, for all models whether selected or not: without their device for those that run on one (`on_device`), as
/// they are for the others (`bare`).
pub(super) fn snapshots_match_cases(folder: &Path, owned: &Owned) -> Result<(), String> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(format!("{}: {e}", folder.display())),
    };
    let mut orphans = Vec::new();
    for entry in entries {
        let file = entry.map_err(|e| format!("{}: {e}", folder.display()))?.file_name();
        let file = file.to_string_lossy();
        if file.strip_suffix(".snap").is_some_and(|stem| !owned.holds(stem)) {
            orphans.push(file.into_owned());
        }
    }
    orphans.sort();
    if orphans.is_empty() {
        return Ok(());
    }
    Err(format!("{}: snapshots without a case: {}", folder.display(), orphans.join(", ")))
}

/// The snapshot stems that a suite's cases own.
#[derive(Clone, Debug, Default)]
pub(super) struct Owned {
    pub on_device: BTreeSet<String>,
    pub bare: BTreeSet<String>,
}

impl Owned {
    fn holds(&self, stem: &str) -> bool {
        let on_device = stem
            .rsplit_once('.')
            .is_some_and(|(case, label)| DeviceLabel::of(label).is_some() && self.on_device.contains(case));
        on_device || self.bare.contains(stem)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[rstest]
    #[case("layer.l00.emu", true)]
    #[case("layer.l00.npu", true)]
    #[case("layer.l00.emu_npu2", true)]
    #[case("layer.l00", false)]
    #[case("layer.l00.gpu", false)]
    #[case("layer.l01.emu", false)]
    #[case("config.x", true)]
    #[case("config.x.emu", false)]
    fn owners(#[case] stem: &str, #[case] owned: bool) {
        let cases = Owned { on_device: set(&["layer.l00"]), bare: set(&["config.x"]) };
        assert_eq!(cases.holds(stem), owned);
    }

    #[test]
    fn orphans_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let owned = Owned { on_device: set(&["a"]), bare: set(&[]) };
        for file in ["a.emu.snap", "a.emu.snap.new", "b.emu.snap", "readme.md"] {
            std::fs::write(folder.path().join(file), "").unwrap();
        }
        let message = snapshots_match_cases(folder.path(), &owned).unwrap_err();
        assert!(message.ends_with("snapshots without a case: b.emu.snap"), "{message}");
        assert!(snapshots_match_cases(&folder.path().join("nothing"), &owned).is_ok());
    }

    #[rstest]
    #[case::nothing_runs(0, &[], &[], false)]
    #[case::all_well(1, &["npu"], &["npu"], true)]
    #[case::required_but_idle(1, &["npu"], &["emu"], false)]
    #[case::required_of_another_suite(1, &["emu"], &["emu"], true)]
    fn extents(#[case] runnable: usize, #[case] could_use: &[&str], #[case] uses: &[&str], #[case] good: bool) {
        let selection = Selection { devices: vec![], models: vec![], required: vec!["npu".into()] };
        let reach = Extent { runnable, could_use: set(could_use), uses: set(uses) };
        assert_eq!(extent(&reach, &selection).is_ok(), good);
    }
}
