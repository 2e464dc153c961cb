//! The `kernels` command as its users meet it.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use phasegate::kernel::Kernel;
use phasegate::kernel::cache::{SEAL, ShapeTable};
use phasegate::kernel::contract::Contract;
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
#[case(&["gemv_bf16", "--shape", "M=9223372036854775807,K=1"], 64, "at most 2147483647")]
#[case(&["gemv_bf16", "--shape", "M=1,K=x"], 64, "expected DIM=N")]
#[case(&["gemv_bf16", "--shape", "M=1,M=2"], 64, "expected DIM=N")]
#[case(&["gemv_bf16", "--shape", "M=99999999999999999999,K=1"], 64, "expected DIM=N")]
fn bad_input_is_one_line(#[case] args: &[&str], #[case] code: i32, #[case] message: &str) {
    refuses(args, code, message);
}

#[rstest]
#[case("<html></html>", "a.json: an HTML or XML page, expected JSON")]
#[case("version https://git-lfs.github.com/spec/v1", "a.json: a git-lfs pointer")]
#[case("", "a.json: an empty file, expected JSON")]
#[case("{]", "a.json: not JSON: ")]
#[case("{}", "a.json: missing field `kernel`")]
fn a_bad_shape_table_is_one_line(#[case] table: &str, #[case] message: &str) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.elf"), "ELF").unwrap();
    std::fs::write(dir.path().join("a.json"), table).unwrap();
    refuses(&["--seal", dir.path().to_str().unwrap()], 1, message);
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

/// Each of upstream's stages of a model is bound or says why leaf dispatches do its work.
#[rstest]
#[case("tiny_llama")]
#[case("smollm2_135m")]
fn a_model_without_fused_elves_says_why(#[case] model: &str) {
    let upstream = &json(&["--model", model])["upstream"];
    assert_eq!(upstream["bound"].as_array().unwrap().len(), 0, "{upstream}");
    let fallbacks = upstream["leaf_dispatches"].as_array().unwrap();
    for stage in ["prefill", "decode", "head"] {
        assert!(fallbacks.iter().any(|f| f["stage"] == stage && !f["why"].as_str().unwrap().is_empty()), "{stage}");
    }
    let why = |id: &str| fallbacks.iter().find(|f| f["id"] == id).unwrap()["why"].as_str().unwrap();
    let found = why("o_gemv_ffn");
    assert!(found.starts_with("requires E < 2560 && E % 512 == 0") && found.contains("found E = "), "{found}");
    let shown = kernels(&["--model", model]).assert().success();
    shown.stdout(contains("prefill: leaf dispatches").and(contains("requires E < 2560 && E % 512 == 0")));
}

/// A checkpoint's folder is enough, and one of upstream's shapes binds every stage.
#[test]
fn a_model_of_upstreams_binds_its_fused_elves() {
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "num_hidden_layers": 16,
        "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let model = dir.path().to_str().unwrap();
    let upstream = &json(&["--model", model])["upstream"];
    assert_eq!(upstream["leaf_dispatches"].as_array().unwrap().len(), 0, "{upstream}");
    let shown = kernels(&["--model", model]).assert().success();
    shown.stdout(contains("decode: rms_gemv_rope, o_gemv_ffn").and(contains("head: lm_head_gemv")));
}

fn sum(rows: usize) -> Contract {
    Contract::of(&[(Kernel::Add { rows, cols: 64 }, vec![0, 1, 2])]).unwrap().0
}

fn put(dir: &Path, rows: usize, content: &str) -> PathBuf {
    let (contract, kernel) = (sum(rows), "add".to_owned());
    let elf = dir.join(format!("{}.elf", contract.stem()));
    let table = ShapeTable { kernel, contract, toolchain: Default::default(), flags: vec![] };
    fs::write(elf.with_extension("json"), serde_json::to_vec(&table).unwrap()).unwrap();
    fs::write(&elf, content).unwrap();
    elf
}

/// `kernels --cache` under `PHASEGATE_REQUIRE=sealed`.
fn sealed_only(dir: &Path) -> assert_cmd::assert::Assert {
    kernels(&["--cache", dir.to_str().unwrap()]).env("PHASEGATE_REQUIRE", "sealed").assert()
}

/// What is done to a sealed folder, and the words in which it is refused, naming the ELF.
#[rstest]
#[case::changed("refused: changed ELF", |_: &Path, elf: &Path| fs::write(elf, "other").unwrap())]
#[case::missing("refused: missing ELF", |_: &Path, elf: &Path| fs::remove_file(elf).unwrap())]
#[case::unsealed("refused: unsealed ELF", |dir: &Path, elf: &Path| { fs::copy(elf, dir.join("add.r0002.elf")).unwrap(); })]
#[case::no_seal("refused: unsealed ELF", |dir: &Path, _: &Path| fs::remove_file(dir.join(SEAL)).unwrap())]
#[case::duplicated("refused: duplicated ELF", |dir: &Path, _: &Path| {
    let text = fs::read_to_string(dir.join(SEAL)).unwrap();
    let mut seal: Value = serde_json::from_str(&text).unwrap();
    seal["entries"][1]["sha256"] = seal["entries"][0]["sha256"].clone();
    fs::write(dir.join(SEAL), seal.to_string()).unwrap();
})]
fn a_damaged_folder_of_elves_is_refused(#[case] message: &str, #[case] damage: fn(&Path, &Path)) {
    let dir = tempfile::tempdir().unwrap();
    let elf = put(dir.path(), 2, "elf 2");
    put(dir.path(), 3, "elf 3");
    let folder = dir.path().to_str().unwrap();
    kernels(&["--seal", folder]).assert().success().stdout(contains("2 ELFs sealed").and(contains("add::r0002_c0064")));
    sealed_only(dir.path()).success().stdout(contains("2 ELFs as sealed"));
    damage(dir.path(), &elf);
    let named = contains("add.r000").and(contains(".elf: ")).and(contains(message));
    sealed_only(dir.path()).code(1).stdout("").stderr(named);
}

#[test]
fn without_the_demand_an_unsealed_folder_is_only_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    let elf = put(dir.path(), 2, "elf 2");
    let folder = dir.path().to_str().unwrap();
    let shown = kernels(&["--cache", folder]).env_remove("PHASEGATE_REQUIRE").assert().success();
    shown.stdout(contains("proves nothing about the content of an ELF").and(contains("0 ELFs as sealed")));
    kernels(&["--seal", folder]).assert().success();
    fs::write(elf, "other").unwrap();
    refuses(&["--cache", folder], 1, "refused: changed ELF");
    // One content for two shapes is no seal, and nothing is written.
    fs::remove_file(dir.path().join(SEAL)).unwrap();
    put(dir.path(), 2, "elf");
    put(dir.path(), 3, "elf");
    refuses(&["--seal", folder], 1, "refused: duplicated ELF");
    assert!(!dir.path().join(SEAL).exists());
    fs::write(dir.path().join("main.elf"), "x").unwrap();
    refuses(&["--seal", folder], 1, "main.elf: refused: ELF");
}
