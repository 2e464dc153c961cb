//! The `kernels` command as its users meet it.

use std::path::Path;

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rstest::rstest;
use serde_json::Value;

fn kernels(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("phasegate").unwrap();
    command.current_dir(env!("CARGO_MANIFEST_DIR")).arg("kernels").args(args);
    command
}

fn json(args: &[&str]) -> Value {
    let output = kernels(args).arg("--json").assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

/// One line on stderr that says `message`, this exit code, nothing on stdout.
fn refuses(args: &[&str], code: i32, message: &str) {
    let one_line = predicate::function(|text: &str| text.lines().count() == 1);
    kernels(args).assert().code(code).stdout("").stderr(contains(message).and(one_line));
}

#[test]
fn every_kernel_is_listed() {
    let all = json(&[]);
    assert_eq!(all.as_array().unwrap().len(), 15);
    kernels(&[]).assert().success().stdout(contains("15 kernels, 211 measured configs"));
}

#[rstest]
#[case("gemm", &["gemm_bf16_bf16", "gemm_bf16_f32"])]
#[case("norm", &["rms_norm", "rms_norm_decode", "qk_norm", "layer_norm"])]
fn a_part_of_an_id_filters(#[case] part: &str, #[case] ids: &[&str]) {
    let found = json(&[part]);
    let found: Vec<&str> = found.as_array().unwrap().iter().map(|k| k["id"].as_str().unwrap()).collect();
    assert_eq!(found, ids);
}

#[test]
fn a_whole_id_is_shown_in_full() {
    let shown = kernels(&["rms_norm"]).assert().success();
    let parts =
        ["y = x / sqrt(mean(x^2) + eps) * w", "toward minus infinity", "M % herd_x == 0", "M=2048 N=896", "911 us"];
    let shown = parts.iter().fold(shown, |shown, part| shown.stdout(contains(*part)));
    shown.stdout(contains("decode").not().or(contains("rms_norm_decode").not()));
    assert_eq!(json(&["rms_norm"])["measured"].as_array().unwrap().len(), 8);
}

#[test]
fn a_measured_shape_is_looked_up() {
    let found = json(&["gemm_bf16_bf16", "--shape", "M=2048,K=2048,N=2048", "--tier", "low"]);
    assert_eq!(found["measured"]["method"], "direct");
    assert_eq!(found["placement"]["fits"][0]["distance"], 0.0);
}

#[test]
fn an_unmeasured_shape_gets_neighbours_and_configs() {
    let found = json(&["gemm_bf16_bf16", "--shape", "M=128,K=576,N=1536"]);
    assert_eq!((&found["measured"], found["nearest"].as_array().unwrap().len()), (&Value::Null, 5));
    assert!(found["placement"]["fits"][0]["tiles"].as_i64().unwrap() > 0);
    let shown = kernels(&["gemm_bf16_bf16", "--shape", "M=128,K=576,N=1536"]).assert().success();
    let command = "cargo test --test phase1 -- gemm_bf16::m0128_k0576_n1536`";
    shown.stdout(contains("never measured; nearest measured: M=64 K=720 N=1600;").and(contains(command)));
}

#[test]
fn what_kills_a_shape_is_said() {
    kernels(&["gemv_bf16", "--shape", "M=151936,K=1024"])
        .assert()
        .success()
        .stdout(contains("outer_repeat [hard-compile]"));
}

#[test]
fn the_rules_agree_with_the_hardware() {
    let census = json(&["--placement"]);
    let total = &census["total"];
    assert_eq!((&total["good_accepted"], &total["good"]), (&Value::from(238), &Value::from(238)));
    assert_eq!((&total["bad_rejected"], &total["bad"]), (&Value::from(36), &Value::from(36)));
    assert_eq!(total["pass"], true);
    let text = kernels(&["--placement"]).assert().success();
    text.stdout(contains("known good: 238 of 238 accepted").and(contains("known bad: 36 of 36 rejected")));
}

#[rstest]
#[case("tiny_llama", false, false)]
#[case("tiny_mistral", false, false)]
#[case("tiny_qwen2", true, false)]
#[case("tiny_qwen3", false, true)]
fn a_model_needs_what_its_plans_launch(#[case] model: &str, #[case] bias: bool, #[case] qk_norm: bool) {
    let needed = json(&["--model", model]);
    let manifest = std::fs::read_to_string(Path::new("fixtures").join(model).join("manifest.toml")).unwrap();
    assert!(manifest.contains(&format!("seq_len = {}", needed["seq_len"])));
    let rows = needed["kernels"].as_array().unwrap();
    let has = |id: &str| rows.iter().any(|r| r["kernel"] == id);
    assert!(
        ["gemm_bf16_bf16", "gemv_bf16", "rms_norm", "rms_norm_decode", "rope", "attention", "add", "silu_mul"]
            .iter()
            .all(|id| has(id))
    );
    assert_eq!((has("bias_add"), has("qk_norm")), (bias, qk_norm));
    for row in rows {
        let status = row["status"].as_str().unwrap();
        assert!(["measured", "nearest", "unplaceable"].contains(&status), "{row}");
        assert!(row["prefill"].as_u64().unwrap() + row["decode"].as_u64().unwrap() > 0, "{row}");
        // A shortfall always has its reason.
        let full = row["tiles"].as_i64().is_some_and(|t| t >= row["target"].as_i64().unwrap());
        assert!(full || !row["shortfall"].as_str().unwrap().is_empty(), "{row}");
        assert!(status != "unplaceable" || !row["detail"]["killers"].as_array().unwrap().is_empty(), "{row}");
    }
}

#[test]
fn the_prefill_length_can_be_chosen() {
    let rows = |args: &[&str]| json(args)["kernels"].clone();
    let m = |rows: &Value| rows.as_array().unwrap().iter().find_map(|r| r["shape"]["M"].as_i64()).unwrap();
    assert_eq!(m(&rows(&["--model", "tiny_llama", "--seq-len", "2048", "gemm"])), 2048);
    kernels(&["--model", "tiny_llama"])
        .assert()
        .success()
        .stdout(contains("tile utilisation").and(contains("unplaceable")));
}

#[test]
fn fused_dispatches_are_listed_and_shown() {
    assert_eq!(json(&["--dispatch"]).as_array().unwrap().len(), 22);
    kernels(&["--dispatch"]).assert().success().stdout(contains("1 + 2P"));
    let shown = kernels(&["--dispatch", "o_gemv_ffn"]).assert().success();
    shown.stdout(contains("matvec_swiglu_rms").and(contains("requires E < 2560")));
}

#[rstest]
#[case(&["convolution"], 64, "unknown kernel \"convolution\"; known: gemm_bf16_bf16")]
#[case(&["--model", "nobody"], 64, "unknown model")]
#[case(&["--dispatch", "nobody"], 64, "unknown dispatch")]
#[case(&["gemm", "--shape", "M=1,K=1,N=1"], 64, "unknown kernel \"gemm\"")]
#[case(&["gemv_bf16", "--shape", "M=1"], 64, "expected M, K")]
#[case(&["gemv_bf16", "--shape", "M=1,K=0"], 64, "each at least 1")]
#[case(&["gemv_bf16", "--shape", "M=1,K=x"], 64, "expected DIM=N")]
#[case(&["gemv_bf16", "--shape", "M=1,M=2"], 64, "expected DIM=N")]
#[case(&["gemv_bf16", "--shape", "M=99999999999999999999,K=1"], 64, "expected DIM=N")]
fn bad_input_is_one_line(#[case] args: &[&str], #[case] code: i32, #[case] message: &str) {
    refuses(args, code, message);
}

#[rstest]
#[case(&["--shape", "M=1"])]
#[case(&["--seq-len", "64"])]
#[case(&["--model", "tiny_llama", "--seq-len", "0"])]
#[case(&["--placement", "--dispatch"])]
#[case(&["--tier", "middle"])]
fn options_that_do_not_go_together_are_usage(#[case] args: &[&str]) {
    kernels(args).assert().code(64).stdout("");
}
