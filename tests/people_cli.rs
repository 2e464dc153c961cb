//! What people do with the program beside the gates: pages, comparisons, text, completions, a deployment.

mod binary;
mod people;

use std::fs;

use predicates::prelude::*;
use predicates::str::contains;
use rstest::rstest;

use binary::{copy, phasegate, root};

/// A folder with the reports of one prompt and one lens.
fn reports() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    phasegate().args(["verify", "--max-prompts", "1", "--report-dir"]).arg(dir.path()).assert().success();
    phasegate().args(["diagnosis", "--report-dir"]).arg(dir.path()).assert().success();
    dir
}

#[test]
fn a_page_is_one_file_with_everything_in_it() {
    let dir = reports();
    phasegate().args(["report", "tiny_llama", "--report-dir"]).arg(dir.path()).assert().success();
    let html = fs::read_to_string(dir.path().join("tiny_llama-emu.html")).unwrap();
    for text in [
        "PASS",
        "KL divergence from HF f32",
        "Noise ratio",
        "weights_sha256",
        "steps 32/32",
        "<svg",
        "first divergence",
    ] {
        assert!(html.contains(text), "{text}");
    }
    assert!(!html.contains("http"), "the page names another place");
    phasegate().args(["verify", "--max-prompts", "1", "--report-dir"]).arg(dir.path()).assert().success();
    phasegate().args(["report", "tiny_llama", "--report-dir"]).arg(dir.path()).assert().success();
    let html = fs::read_to_string(dir.path().join("tiny_llama-emu.html")).unwrap();
    assert!(html.contains("Since the previous run"));
}

#[test]
fn a_page_needs_reports_of_one_model() {
    let dir = reports();
    let missing = ["report", "tiny_qwen3", "--report-dir"];
    phasegate()
        .args(missing)
        .arg(dir.path())
        .assert()
        .code(3)
        .stderr(contains("make one with: phasegate verify tiny_qwen3\n"));
    for (device, options) in [("npu", "--device npu"), ("emu_npu2", "--datapath npu2")] {
        let made = format!("make one with: phasegate verify tiny_qwen3 {options}\n");
        phasegate().args(missing).arg(dir.path()).args(["--device", device]).assert().code(3).stderr(contains(made));
    }
    let one = dir.path().join("verify-tiny_llama-emu.json");
    let other = dir.path().join("other.json");
    fs::write(&other, fs::read_to_string(&one).unwrap().replace("\"tiny_llama\"", "\"tiny_qwen2\"")).unwrap();
    phasegate().arg("report").args([&one, &other]).assert().code(64).stderr(contains("reports of one model"));
}

#[test]
fn two_runs_are_compared() {
    let dir = reports();
    let one = dir.path().join("verify-tiny_llama-emu.json");
    let other = dir.path().join("other.json");
    phasegate().arg("compare").args([&one, &one]).assert().success().stdout(contains("nothing changed"));
    let text = fs::read_to_string(&one).unwrap();
    fs::write(&other, text.replacen("\"outcome\": \"pass\"", "\"outcome\": \"fail\"", 1)).unwrap();
    let worse = contains("verdict").and(contains("1 worse, 0 newly skipped"));
    phasegate().arg("compare").args([&one, &other]).assert().code(1).stdout(worse);
    phasegate().arg("compare").args([&other, &one]).assert().success().stdout(contains("1 better"));
    let diagnosis = dir.path().join("diagnosis-tiny_llama-emu.json");
    phasegate().arg("compare").args([&one, &diagnosis]).assert().code(1).stderr(contains("cannot be compared"));
}

#[rstest]
#[case("bash")]
#[case("zsh")]
#[case("fish")]
fn shells_complete_every_command(#[case] shell: &str) {
    let out = phasegate().args(["completions", shell]).assert().success();
    let script = String::from_utf8(out.get_output().stdout.clone()).unwrap();
    for command in ["verify-full", "deploy", "compare", "--datapath"] {
        assert!(script.contains(command.trim_start_matches("--")), "{shell}: {command}");
    }
}

#[test]
fn every_command_has_a_manual_page_and_help() {
    let dir = tempfile::tempdir().unwrap();
    phasegate().args(["man", "--dir"]).arg(dir.path()).assert().success();
    for command in ["run", "chat", "verify", "diagnosis", "report", "compare", "merge", "deploy", "serve"] {
        let page = fs::read_to_string(dir.path().join(format!("phasegate-{command}.1"))).unwrap();
        assert!(page.contains(command));
        phasegate().args([command, "--help"]).assert().success().stdout(contains("Examples:"));
    }
    phasegate().arg("man").assert().success().stdout(contains(".TH"));
}

#[test]
fn draws_repeat_with_their_seed() {
    let run = |seed: &str| {
        let args = ["run", "--n-tokens", "24", "--ignore-eos", "--temperature", "1.5", "--seed", seed];
        let out = phasegate().args(args).assert().success();
        let text = String::from_utf8(out.get_output().stdout.clone()).unwrap();
        text.split("\n[").next().unwrap_or_default().to_owned()
    };
    assert_eq!(run("3"), run("3"));
    assert_ne!(run("3"), run("4"));
}

#[rstest]
#[case(&["--temperature", "-1"], "temperature")]
#[case(&["--top-p", "0.5"], "--temperature above 0")]
#[case(&["--temperature", "1", "--top-p", "0"], "top-p")]
fn draws_that_cannot_be_are_usage_errors(#[case] args: &[&str], #[case] message: &str) {
    let args: Vec<String> = args.chunks(2).map(|pair| pair.join("=")).collect();
    phasegate().arg("run").args(args).assert().code(64).stderr(contains(message));
}

#[test]
fn a_conversation_remembers_and_forgets() {
    let chat = |lines: &str| {
        let out = phasegate().args(["chat", "tiny_llama", "--n-tokens", "8"]).write_stdin(lines).assert().success();
        String::from_utf8(out.get_output().stdout.clone()).unwrap()
    };
    let tokens = |text: &str| -> Vec<usize> {
        let figures = text.lines().filter_map(|l| l.strip_prefix("[tiny_llama: "));
        figures.map(|l| l.split(' ').next().unwrap().parse().unwrap()).collect()
    };
    let both = tokens(&chat("Hello.\nHello.\n"));
    let cleared = tokens(&chat("Hello.\n/clear\nHello.\n/exit\nHello.\n"));
    assert!(both.len() == 2 && both[1] > both[0], "{both:?}");
    assert!(cleared.len() == 2 && cleared[1] == cleared[0], "{cleared:?}");
    // Lines may end as they do elsewhere.
    assert_eq!(tokens(&chat("Hello.\r\nHello.\r\n/exit\r\n")), both);
}

/// A project without fixtures, and a checkpoint beside it.
fn elsewhere() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    copy(&root().join("prompts"), &dir.path().join("project/prompts"));
    let held_out = dir.path().join("project/fixtures/hf/held_out.txt");
    fs::create_dir_all(held_out.parent().unwrap()).unwrap();
    fs::copy(root().join("fixtures/hf/held_out.txt"), held_out).unwrap();
    let checkpoint = dir.path().join("My-Llama");
    copy(&root().join("fixtures/tiny_llama/checkpoint"), &checkpoint);
    (dir, checkpoint)
}

#[test]
fn a_deployment_goes_on_where_it_stopped() {
    let (dir, checkpoint) = elsewhere();
    let project = dir.path().join("project");
    let deploy = |args: &[&str]| {
        let mut command = phasegate();
        // No Python: the capture cannot be made here.
        command.env("PHASEGATE_ROOT", &project).env("PATH", "/nowhere").arg("deploy").args(args);
        command.assert()
    };
    let at = checkpoint.to_string_lossy().into_owned();
    deploy(&[&at, "--until", "2"]).code(3).stdout(contains("capture   NOT RUN").and(contains("--name my_llama")));
    assert!(project.join("fixtures/my_llama/manifest.toml").is_file());
    deploy(&[&at, "--python", "no-such-python"]).code(3).stderr(contains("cannot import torch"));

    let reference = project.join("fixtures/my_llama/reference.safetensors");
    fs::copy(root().join("fixtures/tiny_llama/reference.safetensors"), reference).unwrap();
    deploy(&[&at, "--until", "0"]).success();
    deploy(&[&at, "--until", "0"]).success().stdout(contains("phase 0   PASS").and(contains("(before)")));
    let progress = project.join("fixtures/my_llama/progress/emu");
    let read = |name: &str| fs::read_to_string(progress.join(name)).unwrap();
    assert!(read("TODO.md").contains("- [x] phase 0") && read("TODO.md").contains("`hidden_size`"));
    assert!(read("evaluation_report.md").contains("**PASS** up to phase 0"));

    // An expectation that the model does not meet: the gate holds the deployment, and the documents say so.
    let manifest = project.join("fixtures/my_llama/manifest.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("default_variant", "expects = [\"base_04\"]\ndefault_variant")).unwrap();
    let held = contains("phase 0   FAIL").and(contains("base_04")).and(contains("next: phasegate inspect my_llama"));
    deploy(&["my_llama", "--again"]).code(1).stdout(held.and(contains("phase 1").not()));
    assert!(read("TODO.md").contains("- [ ] phase 0") && read("TODO.md").contains("Phase 0: FAIL"));
    assert!(read("LESSONS.md").contains("base_04"));
}

#[test]
fn out_of_scope_leaves_nothing_behind() {
    let (dir, checkpoint) = elsewhere();
    let config = checkpoint.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("LlamaForCausalLM", "MixtralForCausalLM")).unwrap();
    let project = dir.path().join("project");
    phasegate()
        .env("PHASEGATE_ROOT", &project)
        .arg("deploy")
        .arg(&checkpoint)
        .assert()
        .code(1)
        .stderr(contains("MixtralForCausalLM"));
    let found: Vec<_> = fs::read_dir(project.join("fixtures")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(found, ["hf"]);
}
