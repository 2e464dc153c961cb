//! The binary as its users meet it: bad input gives one clear line and an exit code, never a panic; good input works.

mod binary;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rstest::rstest;

use binary::{copy, phasegate, root};

/// A project root of its own with one fixture, to be damaged.
fn project(model: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    copy(&root().join("prompts"), &dir.path().join("prompts"));
    copy(&root().join("fixtures").join(model), &dir.path().join("fixtures").join(model));
    dir
}

fn checkpoint(project: &Path, model: &str) -> PathBuf {
    project.join("fixtures").join(model).join("checkpoint")
}

/// One line on stderr that says `message`, this exit code, nothing on stdout, no panic.
fn refuses(command: &mut Command, code: i32, message: &str) {
    let one_line = predicate::function(|text: &str| text.lines().count() == 1);
    command.assert().code(code).stdout("").stderr(contains(message).and(contains("panicked").not()).and(one_line));
}

type Damage = fn(&Path);

/// Half of a copy of the HF cache: the link without what it leads to.
fn dangle(path: &Path) {
    let _ = fs::remove_file(path);
    std::os::unix::fs::symlink("nowhere", path).unwrap();
}

fn header(dir: &Path, change: impl Fn(String) -> String) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = change(String::from_utf8(bytes[8..8 + len].to_vec()).unwrap());
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out.extend(&bytes[8 + len..]);
    fs::write(path, out).unwrap();
}

fn rewrite(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{} does not hold {from}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[rstest]
#[case::missing_shard("tiny_mistral", |d: &Path| fs::remove_file(d.join("model-00003-of-00004.safetensors")).unwrap(), "model-00003-of-00004.safetensors")]
#[case::missing_weights("tiny_llama", |d: &Path| fs::remove_file(d.join("model.safetensors")).unwrap(), "model.safetensors")]
#[case::truncated("tiny_llama", |d: &Path| { let p = d.join("model.safetensors"); let b = fs::read(&p).unwrap(); fs::write(&p, &b[..b.len() / 2]).unwrap() }, "model.safetensors")]
#[case::truncated_header("tiny_llama", |d: &Path| { let p = d.join("model.safetensors"); let b = fs::read(&p).unwrap(); fs::write(&p, &b[..100]).unwrap() }, "model.safetensors")]
#[case::endless_header("tiny_llama", |d: &Path| { let p = d.join("model.safetensors"); let mut b = fs::read(&p).unwrap(); b[..8].fill(0xff); fs::write(&p, b).unwrap() }, "model.safetensors")]
#[case::empty_weights("tiny_llama", |d: &Path| fs::write(d.join("model.safetensors"), "").unwrap(), "model.safetensors")]
#[case::malformed_header("tiny_llama", |d: &Path| header(d, |h| h.replacen('{', "[", 1)), "model.safetensors")]
#[case::offsets_beyond_the_file("tiny_llama", |d: &Path| header(d, |h| h.replacen("\"data_offsets\":[0,", "\"data_offsets\":[99999999990,", 1)), "model.safetensors")]
#[case::html_weights("tiny_llama", |d: &Path| fs::write(d.join("model.safetensors"), "<!DOCTYPE html><html><body>401 Unauthorized</body></html>").unwrap(), "model.safetensors")]
#[case::html_config("tiny_llama", |d: &Path| fs::write(d.join("config.json"), "<html></html>").unwrap(), "config.json")]
#[case::missing_key("tiny_llama", |d: &Path| rewrite(&d.join("config.json"), "\"hidden_size\": 128,", ""), "hidden_size")]
#[case::other_size("tiny_llama", |d: &Path| rewrite(&d.join("config.json"), "\"intermediate_size\": 384", "\"intermediate_size\": 385"), "gate_proj")]
#[case::other_architecture("tiny_llama", |d: &Path| rewrite(&d.join("config.json"), "LlamaForCausalLM", "MixtralForCausalLM"), "MixtralForCausalLM")]
#[case::missing_tokenizer("tiny_llama", |d: &Path| fs::remove_file(d.join("tokenizer.json")).unwrap(), "tokenizer.json")]
#[case::tokenizer_folder("tiny_llama", |d: &Path| { fs::remove_file(d.join("tokenizer.json")).unwrap(); fs::create_dir(d.join("tokenizer.json")).unwrap() }, "tokenizer.json: found a folder, expected a file")]
#[case::garbage_tokenizer("tiny_llama", |d: &Path| fs::write(d.join("tokenizer.json"), "{}").unwrap(), "tokenizer.json")]
fn a_damaged_checkpoint_is_one_clear_line(#[case] model: &str, #[case] damage: Damage, #[case] message: &str) {
    let project = project(model);
    let dir = checkpoint(project.path(), model);
    damage(&dir);
    refuses(phasegate().args(["inspect", dir.to_str().unwrap()]), 1, message);
    refuses(phasegate().args(["verify", model]).env("PHASEGATE_ROOT", project.path()), 1, message);
}

/// What a checkpoint need not have is no less of a finding when it is there and cannot be read.
#[rstest]
#[case(|d: &Path| dangle(&d.join("generation_config.json")), "generation_config.json: found a link to no file")]
#[case(|d: &Path| dangle(&d.join("chat_template.jinja")), "chat_template.jinja: found a link to no file")]
#[case(|d: &Path| dangle(&d.join("tokenizer_config.json")), "tokenizer_config.json: found a link to no file")]
#[case(|d: &Path| fs::write(d.join("tokenizer_config.json"), "[]").unwrap(), "tokenizer_config.json: found an array, expected an object")]
#[case(|d: &Path| fs::write(d.join("generation_config.json"), "7").unwrap(), "generation_config.json: found a single value, expected an object")]
fn side_files_are_read_or_refused(#[case] damage: Damage, #[case] message: &str) {
    let project = project("tiny_llama");
    let dir = checkpoint(project.path(), "tiny_llama");
    damage(&dir);
    refuses(phasegate().arg("inspect").arg(&dir), 1, message);
    // Its capture's hashes may be what speaks first.
    refuses(phasegate().args(["verify", "tiny_llama"]).env("PHASEGATE_ROOT", project.path()), 1, "_");
    refuses(phasegate().args(["run"]).arg(&dir).args(["--chat", "--n-tokens", "2"]), 1, message);
}

#[rstest]
#[case::another_prompt(|p: &Path| rewrite(&p.join("prompts/base.txt"), "France", "Spain"), "capture refused: prompt file base")]
#[case::another_config(|p: &Path| rewrite(&p.join("fixtures/tiny_llama/checkpoint/config.json"), "\"use_cache\": true", "\"use_cache\": false"), "capture refused: file config.json")]
#[case::other_weights(|p: &Path| { let f = p.join("fixtures/tiny_llama/checkpoint/model.safetensors"); let mut b = fs::read(&f).unwrap(); let at = b.len() - 1; b[at] ^= 1; fs::write(&f, b).unwrap() }, "capture refused: weights")]
#[case::another_models_capture(|p: &Path| { fs::copy(root().join("fixtures/tiny_mistral/reference.safetensors"), p.join("fixtures/tiny_llama/reference.safetensors")).unwrap(); }, "reference.safetensors")]
#[case::damaged_capture(|p: &Path| fs::write(p.join("fixtures/tiny_llama/reference.safetensors"), [0xff; 64]).unwrap(), "reference.safetensors")]
#[case::bad_manifest(|p: &Path| fs::write(p.join("fixtures/tiny_llama/manifest.toml"), "name = 3").unwrap(), "manifest.toml")]
fn a_capture_that_does_not_belong_is_refused(#[case] damage: Damage, #[case] message: &str) {
    let project = project("tiny_llama");
    damage(project.path());
    refuses(phasegate().args(["verify", "tiny_llama"]).env("PHASEGATE_ROOT", project.path()), 1, message);
}

#[test]
fn a_missing_capture_is_not_run() {
    let project = project("tiny_llama");
    fs::remove_file(project.path().join("fixtures/tiny_llama/reference.safetensors")).unwrap();
    refuses(phasegate().args(["verify", "tiny_llama"]).env("PHASEGATE_ROOT", project.path()), 3, "capture.py");
}

#[test]
fn an_empty_prompt_file_fails_phase_0() {
    let project = project("tiny_llama");
    fs::write(project.path().join("prompts/base.txt"), "# nothing\n").unwrap();
    refuses(phasegate().args(["verify", "tiny_llama"]).env("PHASEGATE_ROOT", project.path()), 1, "base");
}

#[rstest]
#[case::unknown_model(&["run", "no_such_model"], 64, "unknown model \"no_such_model\"")]
#[case::unknown_variant(&["run", "tiny_llama", "--variant", "nope"], 64, "nope")]
#[case::unknown_device(&["run", "tiny_llama", "--device", "gpu"], 64, "unknown device \"gpu\"")]
#[case::no_npu(&["run", "tiny_llama", "--device", "npu"], 3, "without XRT")]
#[case::unknown_kernel(&["run", "tiny_llama", "--host", "conv"], 64, "unknown kernel \"conv\"")]
#[case::no_tokens(&["run", "tiny_llama", "--n-tokens", "0"], 64, "n-tokens")]
#[case::too_many_tokens(&["run", "tiny_llama", "--n-tokens", "5000"], 64, "max_position_embeddings 2048")]
#[case::no_tokens_to_say(&["chat", "tiny_llama", "-n", "0"], 64, "n-tokens")]
#[case::endless_padding(&["run", "tiny_llama", "--pad-gqa", "18446744073709551615"], 64, "at most 64")]
#[case::wide_padding(&["verify", "tiny_llama", "--pad-gqa", "65"], 64, "at most 64")]
#[case::call_sites(&["run", "tiny_llama", "--host", "foo"], 64, "q_proj, q_rope")]
#[case::head_is_a_site(&["run", "tiny_llama", "--host", "foo"], 64, "lm_head")]
#[case::two_datapaths(&["run", "tiny_llama", "--device", "emu_npu2", "--datapath", "ieee"], 64, "--datapath: found \"ieee\"")]
#[case::datapath_of_an_npu(&["verify", "tiny_llama", "--device", "npu", "--datapath", "npu2"], 64, "--device emu with it, not npu")]
#[case::runner_and_device(&["verify", "tiny_llama", "--runner", "true", "--device", "npu"], 64, "--device: found \"npu\"")]
#[case::runner_padded(&["verify", "tiny_llama", "--runner", "true", "--pad-gqa", "8"], 64, "--pad-gqa: found \"8\"")]
#[case::runner_and_host(&["diagnosis", "tiny_llama", "--runner", "true", "--host", "attention,add"], 64, "--host: found \"attention,add\"")]
#[case::runner_tuned(&["verify", "tiny_llama", "--runner", "true", "--optimise-decode", "none"], 64, "--optimise-decode: found \"none\"")]
#[case::external_and_tuned(&["diagnosis", "tiny_llama", "--device", "external", "--optimise-prefill", "none"], 64, "--optimise-prefill: found \"none\"")]
#[case::external_and_bias(&["verify", "tiny_llama", "--device", "external", "--bias", "host"], 64, "--bias: found \"host\"")]
#[case::seed_of_nothing(&["run", "tiny_llama", "--seed", "3"], 64, "seed")]
#[case::serve_nobody(&["serve", "nope"], 64, "unknown model \"nope\"")]
#[case::no_prompts(&["verify", "tiny_llama", "--max-prompts", "0"], 64, "prompts")]
#[case::beside_nothing(&["verify", "tiny_llama", "--beside", "gpu"], 64, "unknown device \"gpu\"")]
#[case::empty_prompt(&["run", "tiny_mistral", "--prompt", ""], 64, "prompt")]
#[case::unknown_timed_prompt(&["optimise", "tiny_llama", "--prompt-id", "nope"], 64, "\"nope\"")]
#[case::no_layers_of_this_prompt(&["diagnosis", "tiny_llama", "--prompt-id", "base_01"], 64, "unknown prompt with layer outputs \"base_01\"; known: ")]
#[case::endless_prompt(&["profile", "tiny_llama", "--prompt-tokens", "99999999999"], 64, "99999999999 + 20 positions")]
#[case::record_of_a_workaround(&["optimise", "tiny_llama", "--host", "attention", "--record"], 64, "record: found \"host (attention)\"")]
#[case::record_of_a_tuning(&["verify-full", "tiny_llama", "--optimise-decode", "none", "--record"], 64, "record: found \"optimise_decode (none)\"")]
#[case::record_of_a_padding(&["diagnosis", "tiny_llama", "--pad-gqa", "8", "--record"], 64, "record: found \"pad_gqa")]
#[case::reports_in_a_file(&["verify", "tiny_llama", "--max-prompts", "1", "--report-dir", "README.md"], 74, "README.md: found a file, expected a folder")]
#[case::reports_nowhere(&["verify", "tiny_llama", "--max-prompts", "1", "--report-dir", "/proc/nowhere"], 74, "/proc/nowhere: ")]
#[case::not_a_checkpoint(&["inspect", "src"], 1, "config.json")]
fn wrong_arguments_are_one_clear_line(#[case] args: &[&str], #[case] code: i32, #[case] message: &str) {
    refuses(phasegate().args(args), code, message);
}

#[rstest]
#[case(&["--datapath", "npu2"], "emu_npu2 beside emu")]
#[case(&["--beside", "emu_npu2"], "emu beside emu_npu2")]
fn two_arithmetics_stand_beside_each_other(#[case] options: &[&str], #[case] title: &str) {
    let arguments = ["verify", "tiny_llama", "--max-prompts", "2", "--json"];
    let output = phasegate().args(arguments).args(options).assert().code(0).get_output().stdout.clone();
    let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
    let table = report["tables"].as_array().unwrap().iter().find(|table| table["title"] == title).unwrap();
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        let [npu2, ieee] = if title.starts_with("emu_npu2") { [5, 6] } else { [6, 5] };
        assert_eq!((&row[1], &row[2]), (&"PASS".into(), &"PASS".into()));
        // The silicon's arithmetic is further from HF f32 than the ieee datapath.
        assert!(row[npu2].as_f64().unwrap() > row[ieee].as_f64().unwrap(), "{row}");
    }
}

#[rstest]
#[case("PHASEGATE_ISA", "sse", 64)]
#[case("PHASEGATE_THREADS", "0", 64)]
#[case("PHASEGATE_ROOT", "/nope", 64)]
#[case("PHASEGATE_THREADS", "many", 64)]
#[case("PHASEGATE_NPU_TIMEOUT", OsStr::from_bytes(b"\xff"), 64)]
#[case("PHASEGATE_REQUIRE", OsStr::from_bytes(b"npu\xff"), 64)]
fn wrong_variables_are_one_clear_line(#[case] name: &str, #[case] value: impl AsRef<OsStr>, #[case] code: i32) {
    refuses(phasegate().args(["run", "tiny_llama"]).env(name, value), code, name);
}

#[rstest]
#[case("0")]
#[case("false")]
fn the_run_cache_is_on_or_off(#[case] value: &str) {
    let verify = ["verify", "tiny_llama", "--max-prompts", "1"];
    refuses(phasegate().args(verify).env("PHASEGATE_RUN_CACHE", value), 64, "PHASEGATE_RUN_CACHE");
}

#[test]
fn a_root_without_fixtures_says_so() {
    let verify = ["verify", "tiny_llama"];
    refuses(
        phasegate().args(verify).env("PHASEGATE_ROOT", "/nope"),
        64,
        "the root /nope (PHASEGATE_ROOT) has no fixtures/",
    );
}

/// A cache that cannot be written costs time and one warning; a report that cannot be written is an error, not a verdict.
#[test]
fn what_cannot_be_written() {
    let project = project("tiny_llama");
    fs::create_dir_all(project.path().join("fixtures/hf")).unwrap();
    fs::copy(root().join("fixtures/limits.toml"), project.path().join("fixtures/limits.toml")).unwrap();
    let taken = project.path().join("target/phasegate");
    fs::create_dir_all(&taken).unwrap();
    for cache in ["hashes", "runs"] {
        fs::write(taken.join(cache), "a file where a folder should be").unwrap();
    }
    let reports = tempfile::tempdir().unwrap();
    let verify = |reports: &Path| {
        let mut command = phasegate();
        command.args(["verify", "tiny_llama", "--max-prompts", "1", "--report-dir"]).arg(reports);
        command.env("PHASEGATE_ROOT", project.path());
        command.assert()
    };
    let once = predicate::function(|text: &str| text.matches("warning: ").count() == 1);
    verify(reports.path()).success().stderr(once.and(contains("nothing is cached")));
    let folder = taken.join("runs/reports");
    let twice = predicate::function(|text: &str| text.matches("os error").count() == 2);
    verify(&folder).code(74).stderr(contains("error: ").and(contains("runs")).and(twice));
}

#[cfg(target_os = "linux")]
#[rstest]
#[case(&["kernels"])]
#[case(&["inspect", "tiny_llama", "--json"])]
fn a_full_disk_behind_stdout_is_said(#[case] args: &[&str]) {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("phasegate"));
    let output = command.args(args).current_dir(root()).stdout(full).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(74) && said.starts_with("error: stdout: No space left"), "{output:?}");
}

/// Processes that write the same report at once: each comes to its verdict, and what stands there at the end is whole.
#[test]
fn the_same_report_from_several_processes() {
    let dir = tempfile::tempdir().unwrap();
    let diagnose = || {
        for _ in 0..6 {
            phasegate().args(["diagnosis", "tiny_llama", "--report-dir"]).arg(dir.path()).assert().success();
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(diagnose))));
    for report in ["diagnosis-tiny_llama-emu.json", "previous/diagnosis-tiny_llama-emu.json"] {
        let text = fs::read_to_string(dir.path().join(report)).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["verdict"]["outcome"], "pass");
    }
}

/// A report that cannot be written leaves the one that stands there.
#[test]
fn a_report_that_cannot_be_written_leaves_the_last_one() {
    let dir = tempfile::tempdir().unwrap();
    let verify = || {
        let mut command = phasegate();
        command.args(["verify", "tiny_llama", "--max-prompts", "1", "--report-dir"]).arg(dir.path());
        command.assert()
    };
    verify().success();
    let kept =
        || ["json", "md"].map(|kind| fs::read(dir.path().join(format!("verify-tiny_llama-emu.{kind}"))).unwrap());
    let before = kept();
    // Where the previous report goes there is a file: the folder cannot be made.
    fs::write(dir.path().join("previous"), "").unwrap();
    verify().code(74).stderr(contains("previous"));
    assert_eq!(kept(), before);
}

/// What no machine has memory for is told before anything is set up.
#[test]
fn more_positions_than_memory_are_not_available() {
    let dir = tempfile::tempdir().unwrap();
    let mine = dir.path().join("mine");
    copy(&root().join("fixtures/tiny_llama/checkpoint"), &mine);
    let (from, to) = ("\"max_position_embeddings\": 2048", "\"max_position_embeddings\": 2000000000");
    rewrite(&mine.join("config.json"), from, to);
    refuses(phasegate().arg("run").arg(&mine).args(["-n", "1900000000"]), 3, "memory for mine with 1900000");
}

/// A checkpoint of nobody's capture can be timed.
#[test]
fn profile_needs_no_capture() {
    let dir = tempfile::tempdir().unwrap();
    copy(&root().join("fixtures/tiny_llama/checkpoint"), &dir.path().join("mine"));
    let profile = ["profile", "--n-tokens", "3", "--report-dir"];
    phasegate().args(profile).arg(dir.path()).arg(dir.path().join("mine")).assert().success();
}

/// Whatever a deployment is tuned to, it says so and gives the same text.
#[test]
fn a_tuned_run_says_what_default_runs_say() {
    let run = |options: &[&str]| {
        let out = phasegate().args(["run", "tiny_llama", "--n-tokens", "6", "--json"]).args(options).assert().success();
        let report: serde_json::Value = serde_json::from_slice(&out.get_output().stdout).unwrap();
        let fact = |name: &str| {
            let facts = report["facts"].as_array().unwrap();
            facts.iter().find(|fact| fact[0] == name).map(|fact| fact[1].clone())
        };
        (fact("ids"), fact("optimise_decode"), fact("bytes_written").and_then(|n| n.as_u64()).unwrap())
    };
    let (ids, tuned, written) = run(&[]);
    assert_eq!(tuned, None);
    let (merged, tuned, _) = run(&["--optimise-decode", "static_weights,intermediate_reuse,launch_merging"]);
    assert_eq!((merged, tuned.unwrap()), (ids.clone(), "static_weights,intermediate_reuse,launch_merging".into()));
    let (plain, tuned, more) = run(&["--optimise-prefill", "none", "--optimise-decode", "none"]);
    assert_eq!((plain, tuned.unwrap()), (ids, "none".into()));
    assert!(more > 100 * written, "{more} bytes, {written} by default");
}

/// Reports are as readable as any file that this user makes.
#[cfg(unix)]
#[test]
fn a_report_has_the_mode_of_a_plain_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    fs::write(dir.path().join("plain"), "").unwrap();
    phasegate().args(["verify", "tiny_llama", "--max-prompts", "1", "--report-dir"]).arg(dir.path()).assert().success();
    for report in ["verify-tiny_llama-emu.json", "verify-tiny_llama-emu.md"] {
        assert_eq!(mode(&dir.path().join(report)), mode(&dir.path().join("plain")));
    }
}

#[test]
fn wrong_options_exit_with_64_and_help_with_0() {
    phasegate().args(["verify", "--no-such-option"]).assert().code(64);
    phasegate().assert().code(64);
    let unknown = contains("found \"fusion\", expected none, or of static_weights, intermediate_reuse, buffer_sharing");
    phasegate().args(["run", "--optimise-decode", "fusion"]).assert().code(64).stderr(unknown);
    phasegate().arg("--help").assert().code(0).stdout(contains("PHASEGATE_ISA"));
}

#[test]
fn run_continues_with_paris_and_says_how_fast() {
    phasegate()
        .args(["run", "--n-tokens", "8"])
        .assert()
        .success()
        .stdout(contains("The capital of France is Paris").and(contains("TTFT")).and(contains("TPS")));
}

/// A turn that is too long, or no text, is refused by itself; the exit code tells.
#[test]
fn a_conversation_goes_on_without_a_turn_that_cannot_be_answered() {
    let said = |lines: &[u8], code: i32| {
        let chat = phasegate().args(["chat", "--n-tokens", "4"]).write_stdin(lines).assert().code(code);
        let out = chat.get_output().clone();
        let text = String::from_utf8(out.stdout).unwrap();
        let figures = text.lines().filter_map(|line| line.strip_prefix("[tiny_llama: "));
        let tokens: Vec<String> = figures.map(|line| line.split(' ').next().unwrap().to_owned()).collect();
        (tokens, String::from_utf8(out.stderr).unwrap())
    };
    let (plain, _) = said(b"Hello\nAgain\n", 0);
    let refused = [b"Hello\n".as_slice(), &b"long ".repeat(3000), b"\n\xff\xfe\nAgain\n"].concat();
    let (tokens, errors) = said(&refused, 64);
    assert!(errors.contains("error: turn: found ") && errors.contains("error: turn on stdin: found"), "{errors}");
    // What had been said before is still in the prompt.
    assert_eq!((tokens.len(), tokens), (2, plain));
}

#[test]
fn chat_answers_every_line_of_stdin() {
    let two_replies = predicate::function(|text: &str| text.matches("TTFT").count() == 2);
    phasegate()
        .args(["chat", "--n-tokens", "4"])
        .write_stdin("Hello\n\nAgain\n")
        .assert()
        .success()
        .stdout(two_replies);
}

#[test]
fn verify_compares_every_step_and_writes_its_reports() {
    let reports = tempfile::tempdir().unwrap();
    let output = phasegate()
        .args([
            "verify",
            "tiny_qwen3",
            "--max-prompts",
            "2",
            "--json",
            "--report-dir",
            reports.path().to_str().unwrap(),
        ])
        .assert()
        .success();
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["verdict"]["outcome"], "pass", "{report}");
    let steps = report["verdict"]["extent"]["compared"]["steps"].as_u64().unwrap();
    assert!(steps >= 64, "{steps} steps");
    assert!(reports.path().join("verify-tiny_qwen3-emu.json").exists());
    let markdown = fs::read_to_string(reports.path().join("verify-tiny_qwen3-emu.md")).unwrap();
    assert!(markdown.contains("**PASS**"), "{markdown}");
}

#[test]
fn diagnosis_shows_every_layer() {
    phasegate()
        .args(["diagnosis", "tiny_qwen2"])
        .assert()
        .success()
        .stdout(contains("kernel-first: l00.q_proj_bias").and(contains("03 (after final norm)")));
}

#[test]
fn inspect_speaks_json() {
    let output = phasegate().args(["inspect", "tiny_mistral", "--json"]).assert().success();
    let shown: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(shown["config"]["architecture"], "mistral");
    assert_eq!(shown["composition"], "inherits llama's layer");
    assert_eq!((&shown["sizes"]["q_dim"], &shown["sizes"]["group"]), (&512.into(), &4.into()));
    assert_eq!(shown["parameters"], 1_508_480);
    let memory = &shown["memory"];
    // 4 layers of 2 x 128 channels, k and v, bf16, 2048 positions.
    assert_eq!(memory["kv_cache"], 4 * 2 * 128 * 2 * 2048);
    assert!(memory["weights"].as_u64().unwrap() > 2 * (1_508_480 - 2 * 1024 * 128), "{memory}");
    assert_eq!(shown["prompts"].as_array().unwrap().len(), 4);
    assert!(!shown["outlook"].as_array().unwrap().is_empty());
    assert_eq!(shown["verdict"]["outcome"], "pass");
    assert!(shown["verdict"]["extent"]["compared"]["key"].as_u64().unwrap() > 20, "phase 0 is part of the verdict");
}

#[test]
fn inspect_takes_a_directory_and_an_id_of_the_local_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--Some-Org--Some-Model");
    copy(&root().join("fixtures/tiny_qwen3/checkpoint"), &repo.join("snapshots/0123456789abcdef"));
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), "0123456789abcdef").unwrap();
    for model in ["Some-Org/Some-Model", repo.join("snapshots/0123456789abcdef").to_str().unwrap()] {
        phasegate()
            .args(["inspect", model])
            .env("HF_HUB_CACHE", cache.path())
            .assert()
            .success()
            .stdout(contains("kernel-first: l00.q_norm").and(contains("no capture: nothing was compared with HF")));
    }
    refuses(
        phasegate().args(["inspect", "Some-Org/Other"]).env("HF_HUB_CACHE", cache.path()),
        3,
        "hf download Some-Org/Other",
    );
}

/// A checkpoint whose config is this one is refused with what, where and why.
#[rstest]
#[case::moe(
    r#"{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}"#,
    "num_local_experts = 8: mixture of experts is out of scope"
)]
#[case::mla(
    r#"{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512}"#,
    "kv_lora_rank = 512: multi-head latent attention"
)]
#[case::fp8(
    r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": {"quant_method": "fp8"}}"#,
    "quantised checkpoints are out of scope"
)]
#[case::partial_rotary(
    r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "partial_rotary_factor": 0.5}"#,
    "partial_rotary_factor = 0.5: partial rotary"
)]
#[case::soft_capping(
    r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "final_logit_softcapping": 30.0}"#,
    "final_logit_softcapping = 30.0: logit soft-capping"
)]
#[case::window(
    r#"{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}"#,
    "sliding_window = 4096: sliding-window attention"
)]
#[case::yarn(r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}"#, "rope_type = \"yarn\": YaRN scaling is not built yet")]
#[case::longrope(
    r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": {"type": "longrope"}}"#,
    "LongRoPE scaling is not built yet"
)]
#[case::encoder(
    r#"{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": true}"#,
    "encoder-decoder models are out of scope"
)]
#[case::activation(
    r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "gelu"}"#,
    "hidden_act = \"gelu\": an activation without a kernel here"
)]
#[case::wrapper(r#"{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}, "text_config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4}}"#, "its text_config is in scope (LlamaForCausalLM, 4 layers)")]
fn inspect_refuses_with_the_reason(#[case] config: &str, #[case] why: &str) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config).unwrap();
    let refused = refuses_text(phasegate().args(["inspect", dir.path().to_str().unwrap()]), 1);
    assert!(refused.contains("config.json: refused: ") && refused.contains(why), "{refused}");
}

/// The one line of a refusal.
fn refuses_text(command: &mut Command, code: i32) -> String {
    let output = command.assert().code(code).stdout("");
    String::from_utf8(output.get_output().stderr.clone()).unwrap()
}

#[test]
fn a_capture_of_another_checkpoint_fails_the_inspection() {
    let project = project("tiny_qwen2");
    rewrite(
        &checkpoint(project.path(), "tiny_qwen2").join("config.json"),
        "\"use_cache\": true",
        "\"use_cache\": false",
    );
    let output = phasegate().args(["inspect", "tiny_qwen2"]).env("PHASEGATE_ROOT", project.path()).assert().code(1);
    output.stdout(contains("FAIL").and(contains("capture refused: file config.json")));
}

/// Workarounds on the command line: they pass, and the report names them.
#[rstest]
#[case("tiny_qwen2", &["--bias", "host"], "bias", "host, behind RoPE")]
#[case("tiny_llama", &["--host", "attention"], "host", "attention")]
#[case("tiny_mistral", &["--pad-gqa", "8"], "pad_gqa", "8 query heads per KV head")]
fn verify_reports_its_workaround(
    #[case] model: &str,
    #[case] options: &[&str],
    #[case] fact: &str,
    #[case] value: &str,
) {
    let reports = tempfile::tempdir().unwrap();
    let folder = reports.path().to_str().unwrap();
    let output = phasegate()
        .args(["verify", model, "--max-prompts", "1", "--json", "--report-dir", folder])
        .args(options)
        .assert()
        .success();
    let report: serde_json::Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(report["verdict"]["outcome"], "pass");
    let shown = serde_json::to_string(&report["facts"]).unwrap();
    assert!(shown.contains(fact) && shown.contains(value), "{shown}");
}

#[test]
fn a_padding_that_drops_heads_is_a_usage_error() {
    refuses(phasegate().args(["run", "tiny_llama", "--pad-gqa", "3"]), 64, "at least 4");
}

/// Nobody reads on, but what the command came to is its exit code all the same.
#[rstest]
#[case(&["inspect", "tiny_llama"], 0)]
#[case(&["verify", "tiny_llama", "--max-prompts", "1", "--runner", "cat"], 1)]
#[case(&["verify", "tiny_llama", "--max-prompts", "1", "--runner", "cat", "--json"], 1)]
#[case(&["bisect", "tiny_llama", "--fault", "residual_dropped", "--layer", "2", "--budget", "0"], 1)]
fn a_closed_pipe_is_no_error(#[case] args: &[&str], #[case] code: i32) {
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("phasegate"))
        .args(args)
        .current_dir(root())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.code() == Some(code) && output.stderr.is_empty(), "{output:?}");
}
