//! A pass of other weights passes nothing: a refused run leaves a report that says so, and a page is never headed by a pass
//! of a checkpoint or capture that is no longer there.

use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rstest::rstest;

use crate::binary::phasegate;

/// A project of its own with one fixture.
struct Project(tempfile::TempDir);

impl Project {
    fn new() -> Project {
        Project(super::project())
    }

    fn run(&self, args: &[&str]) -> Command {
        let mut command = phasegate();
        command.args(args).arg("tiny_llama").arg("--report-dir").arg(self.reports());
        command.env("PHASEGATE_ROOT", self.0.path());
        command
    }

    fn reports(&self) -> PathBuf {
        self.0.path().join("reports")
    }

    fn weights(&self) -> PathBuf {
        self.0.path().join("fixtures/tiny_llama/checkpoint/model.safetensors")
    }

    fn capture(&self) -> PathBuf {
        self.0.path().join("fixtures/tiny_llama/reference.safetensors")
    }

    /// Exchanges two layers' `o_proj`, which have one shape.
    fn exchange_layers(&self) {
        let mut bytes = fs::read(self.weights()).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let range = |layer: usize| {
            let offsets = &tensors[format!("model.layers.{layer}.self_attn.o_proj.weight")]["data_offsets"];
            let at = |i: usize| 8 + header + offsets[i].as_u64().unwrap() as usize;
            at(0)..at(1)
        };
        let (one, other) = (bytes[range(0)].to_vec(), bytes[range(1)].to_vec());
        assert_ne!(one, other);
        bytes[range(0)].copy_from_slice(&other);
        bytes[range(1)].copy_from_slice(&one);
        fs::write(self.weights(), bytes).unwrap();
    }

    /// The page as it is made now, and the word at its head.
    fn page(&self) -> (String, String) {
        self.run(&["report"]).assert().success();
        let html = fs::read_to_string(self.reports().join("tiny_llama-emu.html")).unwrap();
        let title = html.split("<title>").nth(1).unwrap().split(':').next().unwrap().to_owned();
        (title, html)
    }

    fn outcome(&self, command: &str) -> String {
        let text = fs::read_to_string(self.reports().join(format!("{command}-tiny_llama-emu.json"))).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        format!("{}: {}", report["verdict"]["outcome"].as_str().unwrap(), report["verdict"]["reasons"][0])
    }
}

#[test]
fn no_page_is_headed_by_a_pass_of_other_weights() {
    let project = Project::new();
    project.run(&["verify", "--max-prompts", "1"]).assert().success();
    project.run(&["diagnosis"]).assert().success();
    assert_eq!(project.page().0, "PASS");

    let sound = fs::read(project.weights()).unwrap();
    project.exchange_layers();
    let (title, html) = project.page();
    assert_eq!(title, "STALE");
    assert!(html.contains("verify: stale: run on another set of weights") && html.contains("diagnosis: stale"));
    assert!(html.contains("phasegate verify tiny_llama runs it again"));

    // The refused run takes the place of the one that passed.
    project.run(&["verify", "--max-prompts", "1"]).assert().code(1).stderr(contains("capture refused"));
    let (title, html) = project.page();
    assert_eq!(title, "FAIL");
    assert!(html.contains("capture refused") && !html.contains(">PASS<"));

    // What was refused is not taken back by the right weights, only by another run.
    fs::write(project.weights(), sound).unwrap();
    assert_eq!(project.page().0, "FAIL");
    project.run(&["verify", "--max-prompts", "1"]).assert().success();
    assert_eq!(project.page().0, "PASS");

    fs::remove_file(project.capture()).unwrap();
    let (title, html) = project.page();
    assert_eq!(title, "STALE");
    assert!(html.contains("HF capture of tiny_llama is not available"));
}

#[rstest]
#[case(&["verify"], "verify")]
#[case(&["verify-full"], "verify-full")]
#[case(&["diagnosis"], "diagnosis")]
#[case(&["audit"], "audit")]
fn a_refused_gate_leaves_a_report_that_fails(#[case] args: &[&str], #[case] command: &str) {
    let project = Project::new();
    project.exchange_layers();
    let refused = contains("capture refused: weights").and(contains("panicked").not());
    project.run(args).assert().code(1).stdout("").stderr(refused);
    let outcome = project.outcome(command);
    assert!(outcome.starts_with("fail: ") && outcome.contains("capture refused: weights"), "{outcome}");
}

#[test]
fn a_damaged_checkpoint_leaves_a_report_and_a_wrong_question_none() {
    let project = Project::new();
    project.run(&["verify", "--max-prompts", "0"]).assert().code(64);
    project.run(&["verify", "--variant", "nope"]).assert().code(64);
    assert!(!project.reports().exists());
    fs::write(project.weights(), "").unwrap();
    project.run(&["verify"]).assert().code(1);
    assert!(project.outcome("verify").contains("model.safetensors"));
}
