//! What a suite shows to the world, one function a claim.

use std::path::{Path, PathBuf};

use assert_cmd::assert::Assert;
use phasegate::harness::Failed;
use phasegate::report::bundle::{Merged, merge};
use phasegate::settings;
use predicates::prelude::*;
use predicates::str::contains;

type Test = fn() -> Result<(), Failed>;

pub const TESTS: &[(&str, Test)] = &[
    ("list::prints_only_names", list_prints_only_names),
    ("list::ten_thousand_cases", list_ten_thousand_cases),
    ("list::devices_come_last", list_devices_come_last),
    ("names::duplicate_is_a_usage_error", duplicate_is_a_usage_error),
    ("names::bad_name_is_a_usage_error", bad_name_is_a_usage_error),
    ("names::undeclared_need_is_a_usage_error", undeclared_need_is_a_usage_error),
    ("names::unknown_settings_are_usage_errors", unknown_settings_are_usage_errors),
    ("broken::every_way_to_fail_names_the_case", every_way_to_fail_names_the_case),
    ("missing::ignored_with_its_reason", ignored_with_its_reason),
    ("missing::required_fails", required_fails),
    ("missing::device_required_fails", device_required_fails),
    ("missing::include_ignored_does_not_pass", include_ignored_does_not_pass),
    ("missing::nothing_compared_fails", nothing_compared_fails),
    ("missing::filter_that_matches_nothing_passes", filter_that_matches_nothing_passes),
    ("missing::model_selection", model_selection),
    ("baseline::first_run_asks_for_review", first_run_asks_for_review),
    ("baseline::within_band_passes", within_band_passes),
    ("baseline::out_of_band_fails", out_of_band_fails),
    ("baseline::count_is_exact", count_is_exact),
    ("baseline::ci_writes_nothing", ci_writes_nothing),
    ("baseline::failed_gate_writes_nothing", failed_gate_writes_nothing),
    ("baseline::orphans_fail", orphans_fail),
    ("baseline::unselected_and_missing_own_theirs", unselected_and_missing_own_theirs),
    ("bundle::two_shards_are_one_run", two_shards_are_one_run),
    ("bundle::failures_and_gaps_are_told", failures_and_gaps_are_told),
    ("bundle::another_selection_is_refused", another_selection_is_refused),
];

/// A folder for one sample's snapshots, and the sample started in it.
struct Sample {
    root: tempfile::TempDir,
    name: &'static str,
}

impl Sample {
    fn new(name: &'static str) -> Result<Sample, Failed> {
        Ok(Sample { root: tempfile::tempdir()?, name })
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> Result<Assert, Failed> {
        let mut command = assert_cmd::Command::new(std::env::current_exe()?);
        for variable in settings::VARIABLES {
            command.env_remove(variable.name);
        }
        for name in ["CI", "TF_BUILD", "INSTA_UPDATE", "INSTA_FORCE_PASS", "INSTA_OUTPUT", "INSTA_REQUIRE_FULL_MATCH"] {
            command.env_remove(name);
        }
        command.env(settings::ROOT, self.root.path()).env("INSTA_WORKSPACE_ROOT", self.root.path());
        command.args(["--sample", self.name]).args(args).envs(env.iter().copied());
        Ok(command.assert())
    }

    /// The same sample as another one's successor: the folder stays.
    fn then(self, name: &'static str) -> Sample {
        Sample { name, ..self }
    }

    /// Writes the baselines of the sample, as `cargo insta accept` would.
    fn accept(self) -> Result<Sample, Failed> {
        self.run(&[], &[("INSTA_UPDATE", "always")])?.success();
        Ok(self)
    }

    fn files(&self) -> Result<Vec<String>, Failed> {
        let folder = self.root.path().join("snapshots").join("sample");
        if !folder.exists() {
            return Ok(Vec::new());
        }
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            files.push(entry?.file_name().to_string_lossy().into_owned());
        }
        files.sort();
        Ok(files)
    }

    fn snapshot(&self, file: &str) -> Result<String, Failed> {
        Ok(std::fs::read_to_string(self.root.path().join("snapshots/sample").join(file))?)
    }

    fn put(&self, file: &str) -> Result<(), Failed> {
        let folder = self.root.path().join(Path::new("snapshots/sample"));
        std::fs::create_dir_all(&folder)?;
        Ok(std::fs::write(folder.join(file), "---\nsource: nowhere\n---\nsteps 1\n")?)
    }
}

fn same<T: PartialEq + std::fmt::Debug>(found: T, expected: T) -> Result<(), Failed> {
    if found == expected { Ok(()) } else { Err(format!("found {found:?}, expected {expected:?}").into()) }
}

fn list_prints_only_names() -> Result<(), Failed> {
    let sample = Sample::new("good")?;
    let list =
        "config: test\nmeasure::emu: test\nmeta::extent: test\nmeta::snapshots_match_cases: test\nwhere::emu: test\n";
    let assert = sample.run(&["--list", "--format", "terse"], &[])?.success().stderr("");
    let mut lines = String::from_utf8_lossy(&assert.get_output().stdout).lines().map(str::to_owned).collect::<Vec<_>>();
    lines.sort();
    same(lines.join("\n") + "\n", list.to_owned())
}

fn list_ten_thousand_cases() -> Result<(), Failed> {
    let started = std::time::Instant::now();
    let assert = Sample::new("large")?.run(&["--list", "--format", "terse"], &[])?.success();
    eprintln!("listing 10,000 cases took {} ms", started.elapsed().as_millis());
    same(assert.get_output().stdout.iter().filter(|&&byte| byte == b'\n').count(), 10_002)
}

fn list_devices_come_last() -> Result<(), Failed> {
    let env = [(settings::DEVICES, "npu, emu")];
    let both = contains("where::npu: test").and(contains("where::emu: test")).and(contains("config: test"));
    Sample::new("good")?.run(&["--list"], &env)?.success().stdout(both.and(contains("config::").not()));
    Ok(())
}

fn duplicate_is_a_usage_error() -> Result<(), Failed> {
    let line = "sample: case name: found \"twice\", expected a name used once\n";
    Sample::new("duplicate")?.run(&["--list"], &[])?.code(64).stdout("").stderr(line);
    Ok(())
}

fn bad_name_is_a_usage_error() -> Result<(), Failed> {
    Sample::new("bad_name")?.run(&[], &[])?.code(64).stderr(contains("found \"Layer 7\", expected [a-z0-9_]+"));
    Ok(())
}

fn undeclared_need_is_a_usage_error() -> Result<(), Failed> {
    Sample::new("undeclared")?
        .run(&[], &[])?
        .code(64)
        .stderr(contains("need of layer: found \"nothing_of_that_name\""));
    Ok(())
}

fn unknown_settings_are_usage_errors() -> Result<(), Failed> {
    let sample = Sample::new("models")?;
    for name in [settings::DEVICES, settings::MODELS, settings::REQUIRE] {
        sample
            .run(&[], &[(name, "nonsense")])?
            .code(64)
            .stdout("")
            .stderr(contains(format!("{name}: found \"nonsense\"")));
    }
    Ok(())
}

fn every_way_to_fail_names_the_case() -> Result<(), Failed> {
    let sample = Sample::new("broken")?;
    let text = contains("sample::fails::emu: gate says no")
        .and(contains("sample::panics::emu: panicked: out of cheese"))
        .and(contains("sample::measures_nothing::emu: declared a baseline and measured nothing"))
        .and(contains("sample::undeclared_baseline::emu: a baseline from a case that did not declare one"))
        .and(contains("sample::nan::emu: max_abs is NaN"))
        .and(contains("3 passed; 5 failed"));
    sample.run(&[], &[])?.code(101).stdout(text);
    same(sample.files()?, Vec::new())
}

fn ignored_with_its_reason() -> Result<(), Failed> {
    let sample = Sample::new("models")?.accept()?;
    let line = "sample: ignored 3 cases: models/big is not there; make model (layer::big 3)\n";
    sample.run(&[], &[])?.success().stdout(contains("5 passed; 0 failed; 3 ignored")).stderr(contains(line));
    sample.run(&["layer::big::l01"], &[])?.stderr(contains("ignored 1 case: models/big is not there"));
    let env = [(settings::DEVICES, "emu,vnpu")];
    sample.run(&[], &env)?.success().stderr(contains("no virtual NPU here (layer::tiny 3)"));
    sample.run(&["--list"], &[])?.success().stdout(contains("make model").not()).stderr(line);
    sample.run(&["--list", "--format", "terse"], &[])?.success().stderr("");
    sample.run(&["--exact", "layer::tiny::l00::emu"], &[])?.success().stderr("");
    Ok(())
}

fn required_fails() -> Result<(), Failed> {
    let sample = Sample::new("models")?.accept()?;
    let text = contains(
        "sample::layer::big::l01::emu: cannot run: models/big is not there; make model (PHASEGATE_REQUIRE names big)",
    );
    let extent = contains("sample::meta::extent: PHASEGATE_REQUIRE names big");
    sample
        .run(&[], &[(settings::REQUIRE, "big")])?
        .code(101)
        .stdout(text.and(extent).and(contains("4 failed; 0 ignored")));
    sample.run(&[], &[(settings::REQUIRE, "tiny,emu,sealed")])?.success();
    Ok(())
}

fn device_required_fails() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?;
    let env = [(settings::REQUIRE, "npu"), (settings::DEVICES, "emu,npu")];
    let text =
        contains("sample::where::npu: cannot run: device npu is not part of this build").and(contains("3 failed"));
    sample.run(&[], &env)?.code(101).stdout(text);
    let not_selected =
        contains("sample::meta::extent: PHASEGATE_REQUIRE names npu, but not one selected case can run on it");
    let elsewhere = [(settings::REQUIRE, "npu"), (settings::DEVICES, "emu")];
    sample.run(&[], &elsewhere)?.code(101).stdout(not_selected.and(contains("1 failed")));
    // Named nowhere but here, the device that must be there is the one to use.
    sample
        .run(&[], &env[..1])?
        .code(101)
        .stdout(contains("sample::measure::npu: cannot run").and(contains("3 failed")));
    Ok(())
}

fn include_ignored_does_not_pass() -> Result<(), Failed> {
    let sample = Sample::new("models")?;
    let text = contains("sample::layer::big::l00::emu: cannot run: models/big is not there");
    sample.run(&["--include-ignored", "layer::big"], &[])?.code(101).stdout(text);
    Ok(())
}

fn nothing_compared_fails() -> Result<(), Failed> {
    let sample = Sample::new("models")?;
    let env = [(settings::DEVICES, "npu")];
    sample.run(&[], &env)?.code(101).stdout(contains("meta::extent: not one case can run here"));
    sample.run(&["layer::big"], &[])?.code(101).stderr(contains("3 cases chosen, not one could run"));
    sample.run(&["layer::big", "--list"], &[])?.success();
    sample.run(&["meta::snapshots"], &[])?.success();
    Ok(())
}

fn filter_that_matches_nothing_passes() -> Result<(), Failed> {
    Sample::new("models")?.run(&["a_case_of_another_binary"], &[])?.success();
    Ok(())
}

fn model_selection() -> Result<(), Failed> {
    let list = contains("layer::tiny").and(contains("layer::big").not());
    Sample::new("models")?.run(&["--list"], &[(settings::MODELS, "tiny")])?.success().stdout(list);
    let sample = Sample::new("models")?;
    sample.run(&[], &[(settings::MODELS, "big")])?.code(101).stdout(contains("not one case can run here"));
    Ok(())
}

fn first_run_asks_for_review() -> Result<(), Failed> {
    let sample = Sample::new("good")?;
    let text = contains("sample::measure::emu: no baseline snapshots/sample/measure.emu.snap yet");
    sample.run(&[], &[])?.code(101).stdout(text);
    same(sample.files()?, vec!["measure.emu.snap.new".to_owned()])
}

fn within_band_passes() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?;
    let text = sample.snapshot("measure.emu.snap")?;
    let body = "cosine 9.99100000e-1\nmax_abs 1.00000e-2\nsteps 32\n";
    same((text.ends_with(body), text.contains("description: \"sample::measure::emu\"")), (true, true))?;
    same((text.contains("expression:"), text.contains("assertion_line:")), (false, false))?;
    let sample = sample.then("within");
    sample.run(&[], &[])?.success();
    same(sample.files()?, vec!["measure.emu.snap".to_owned()])
}

fn out_of_band_fails() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?.then("other_number");
    let text =
        contains("max_abs: found 2.00000e-2, baseline 1.00000e-2 (within 1.5x + 1e-7)").and(contains("1 failed"));
    sample.run(&[], &[])?.code(101).stdout(text);
    same(sample.files()?, vec!["measure.emu.snap".to_owned(), "measure.emu.snap.new".to_owned()])?;
    let stored = sample.snapshot("measure.emu.snap")?;
    same(stored.contains("max_abs 1.00000e-2"), true)
}

fn count_is_exact() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?.then("other_count");
    sample.run(&[], &[])?.code(101).stdout(contains("steps: found 31, baseline 32 (equal)"));
    Ok(())
}

fn ci_writes_nothing() -> Result<(), Failed> {
    let sample = Sample::new("good")?;
    sample.run(&[], &[("CI", "true")])?.code(101);
    same(sample.files()?, Vec::new())?;
    let sample = sample.accept()?.then("other_number");
    sample.run(&[], &[("CI", "true")])?.code(101);
    same(sample.files()?, vec!["measure.emu.snap".to_owned()])
}

/// Also under what `cargo insta test` sets, and under the mode that accepts everything.
fn failed_gate_writes_nothing() -> Result<(), Failed> {
    let sample = Sample::new("gate_after_baseline")?;
    let text = contains("sample::measure::emu: gate: cosine 0.4");
    sample.run(&[], &[])?.code(101).stdout(text.clone());
    sample.run(&[], &[("INSTA_FORCE_PASS", "1"), ("INSTA_UPDATE", "new")])?.code(101).stdout(text.clone());
    sample.run(&[], &[("INSTA_UPDATE", "always")])?.code(101).stdout(text);
    same(sample.files()?, Vec::new())
}

fn orphans_fail() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?;
    for file in ["measure.npu.snap", "gone.emu.snap", "where.emu.snap", "measure.snap"] {
        sample.put(file)?;
    }
    let text = contains("snapshots without a case: gone.emu.snap, measure.snap, where.emu.snap");
    sample.run(&[], &[])?.code(101).stdout(text);
    Ok(())
}

fn unselected_and_missing_own_theirs() -> Result<(), Failed> {
    let sample = Sample::new("models")?.accept()?;
    for file in ["layer.big.l00.emu.snap", "layer.big.l02.npu.snap", "layer.tiny.l02.emu_npu2.snap"] {
        sample.put(file)?;
    }
    sample.run(&[], &[(settings::MODELS, "tiny")])?.success();
    sample.run(&["meta::snapshots"], &[])?.success();
    Ok(())
}

/// The bundle that a run of the sample left, with these arguments.
fn bundled(sample: &Sample, name: &str, args: &[&str], env: &[(&str, &str)]) -> Result<PathBuf, Failed> {
    let dir = sample.root.path().join(name);
    let text = dir.to_string_lossy().into_owned();
    sample.run(args, &[env, &[(settings::BUNDLE, text.as_str())]].concat())?;
    Ok(dir)
}

fn two_shards_are_one_run() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?;
    let whole = merge(&[bundled(&sample, "whole", &[], &[])?]).map_err(|e| e.to_string())?;
    let one = bundled(&sample, "one", &["measure"], &[])?;
    let two = bundled(&sample, "two", &["--skip", "measure"], &[])?;
    let both = merge(&[one, two]).map_err(|e| e.to_string())?;
    let known = |merged: &Merged| -> Vec<_> {
        merged.cases.iter().map(|(key, c)| (key.clone(), c.passed, c.message.clone(), c.figures.clone())).collect()
    };
    same(known(&both), known(&whole))?;
    same((both.verdict().to_string(), both.bundles), ("PASS (cases 5/5)".to_owned(), 2))?;
    let figures = known(&both).into_iter().find(|c| c.0.1 == "measure::emu").map(|c| c.3);
    same(figures.as_deref(), Some("cosine 9.99100000e-1\nmax_abs 1.00000e-2\nsteps 32\n"))
}

fn failures_and_gaps_are_told() -> Result<(), Failed> {
    let sample = Sample::new("broken")?;
    let failed = merge(&[bundled(&sample, "failed", &[], &[])?]).map_err(|e| e.to_string())?;
    let reasons = failed.verdict().reasons().join(" ");
    same((failed.verdict().outcome().word(), reasons.contains("gate says no")), ("FAIL", true))?;
    let sample = Sample::new("good")?.accept()?;
    let part = merge(&[bundled(&sample, "part", &["measure"], &[])?]).map_err(|e| e.to_string())?;
    same(part.verdict().to_string(), "VACUOUS: compared 1 of 5 cases (cases 1/5)".to_owned())
}

fn another_selection_is_refused() -> Result<(), Failed> {
    let sample = Sample::new("good")?.accept()?;
    let one = bundled(&sample, "one", &["measure"], &[])?;
    let two = bundled(&sample, "two", &["--skip", "measure"], &[(settings::DEVICES, "emu,emu_npu2")])?;
    let refused = merge(&[one, two]).map(|_| ()).map_err(|e| e.to_string());
    let text = refused.err().unwrap_or_default();
    same((text.contains("devices and datapaths"), text.contains("emu_npu2")), (true, true))
}
