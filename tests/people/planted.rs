//! Faults that people put in: what cannot be put in, or not there, is said at once.

use predicates::prelude::*;
use predicates::str::contains;
use rstest::rstest;

use crate::binary::phasegate;

#[rstest]
#[case(&["--fault", "residual_dropped", "--layer", "99"], "layer: found \"99\", expected 0 to 3")]
#[case(&["--fault", "tensor_scaled", "--strength", "0"], "strength: found \"0\", expected a number from 0.125 to 12, not 1")]
#[case(&["--fault", "tensor_scaled", "--strength", "1"], "strength: found \"1\"")]
#[case(&["--fault", "tensor_scaled", "--strength", "nan"], "strength: found \"NaN\"")]
#[case(&["--fault", "tensor_scaled", "--strength", "1e300"], "strength: found \"1000")]
#[case(&["--fault", "tensor_truncated", "--strength", "2.5"], "a whole number from 1 to 6")]
#[case(&["--fault", "residual_dropped", "--strength", "2"], "strength: found \"2\", expected none")]
#[case(&["--fault", "template_missing"], "before or behind the runner")]
#[case(&["--fault", "bos_doubled"], "before or behind the runner")]
#[case(&["--fault", "no_such_fault"], "unknown fault")]
fn what_cannot_be_put_in_is_a_usage_error(#[case] args: &[&str], #[case] message: &str) {
    let said = contains(message).and(predicate::function(|text: &str| text.lines().count() == 1));
    phasegate().args(["bisect", "tiny_llama"]).args(args).assert().code(64).stdout("").stderr(said);
}

#[test]
fn an_engine_refuses_what_bisect_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let engine = env!("CARGO_BIN_EXE_phasegate");
    let engine = format!("{engine} serve tiny_llama --fault residual_dropped --layer 99");
    let args = ["verify", "tiny_llama", "--max-prompts", "1", "--runner", &engine, "--report-dir"];
    let out = phasegate().args(args).arg(dir.path()).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(!out.status.success() && said.contains("expected 0 to 3"), "{said}");
}

#[test]
fn a_sound_run_is_one_line_and_a_pass() {
    let dir = tempfile::tempdir().unwrap();
    let silent = contains("no fault of the catalogue").or(contains("the longest one shows it")).not();
    let said = contains("every launch is as near to the f32 oracle as a sound run's").and(silent);
    let args = ["bisect", "tiny_llama", "--budget", "0", "--report-dir"];
    phasegate().args(args).arg(dir.path()).assert().success().stdout(said);
}

#[test]
fn the_option_that_is_too_short_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["bisect", "tiny_llama", "--fault", "residual_dropped", "--budget", "0", "--report-dir"];
    let named = contains("not tried: --budget is too short").and(contains("PHASEGATE_EXPLAIN_SECONDS").not());
    phasegate().args(args).arg(dir.path()).assert().code(1).stdout(named);
}

#[rstest]
#[case("bisect")]
#[case("profile")]
#[case("merge")]
fn what_has_no_document_has_no_option_to_write_one(#[case] command: &str) {
    phasegate().args([command, "--help"]).assert().success().stdout(contains("--record").not());
    phasegate().args([command, "--record"]).assert().code(64).stderr(contains("--record"));
}
