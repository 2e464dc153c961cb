//! Phase 6: does the finished deployment run as its users run it?
//!
//! Everything goes through the binary and the Makefile: what they print, their exit codes, and what the device counted. The
//! timed region holds no setup, and run, verify and profile run the same plans: run and profile by one call, verify, which
//! decodes short prompts side by side, as many dispatches of its own, whose bits are those of one prompt after the other.

mod call;

use std::path::Path;

use serde_json::Value;

pub use call::Deployment;

use super::subject::Outline;
use super::{Case, Finding, Subject};
use crate::check::tolerance::at_most;
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::plan::{Op, Plan};
use crate::runner::RunnerOptions;

/// Tokens that the short runs generate.
const TOKENS: usize = 8;
/// Peak memory of `verify` over the checkpoint's size, at most.
const MEMORY: f64 = 1.3;
/// What any process may take, however small its checkpoint: program, tokenizer, captures.
///
/// Units: bytes.
const SMALL: f64 = 96e6;
/// What `run` and `profile` continue.
const PROMPT: &str = "The capital of France is";

/// Every case of phase 6 for one model.
pub fn cases(outline: &Outline, binary: &'static str) -> Vec<Case> {
    type Body = fn(&Deployment) -> Result<Finding>;
    let bodies: [(&str, Body); 9] = [
        ("run", run),
        ("verify", verify),
        ("verify_full", verify_full),
        ("memory", memory),
        ("diagnosis", diagnosis),
        ("profile", profile),
        ("exit_codes", exit_codes),
        ("makefile", makefile),
        ("same_path", same_path),
    ];
    bodies
        .into_iter()
        .map(|(name, body)| {
            let model = outline.name.clone();
            let case = Case::on_device(format!("{name}::{model}"), &outline.name, move |device| {
                body(&Deployment::new(binary, &model, device, name))
            });
            Case { baseline: false, ..case }
        })
        .collect()
}

/// `run` prints its text, the time to the first token and the tokens per second.
fn run(deployment: &Deployment) -> Result<Finding> {
    let out = deployment.call(&["run", "--n-tokens", &TOKENS.to_string(), "--ignore-eos"])?;
    let figure = |name: &str, unit: &str| {
        let line = out.stdout.lines().rev().find(|line| line.contains("TTFT"))?;
        line.split(" | ")
            .find(|part| part.contains(name))?
            .replace([']', '['], "")
            .split(' ')
            .find_map(|word| word.parse().ok())
            .filter(|x: &f64| *x > 0.0 && line.contains(unit))
    };
    let mut failures = out.expect(0);
    failures.extend(figure("TTFT", "ms").is_none().then(|| format!("no TTFT in {:?}", out.stdout)));
    failures.extend(figure("TPS", "TPS").is_none().then(|| format!("no TPS in {:?}", out.stdout)));
    failures.extend((!out.stdout.starts_with(PROMPT)).then(|| "the text does not begin with the prompt".to_owned()));
    Ok(judged(failures, "runs", 1))
}

/// A command with a verdict: exit code 0, and its JSON says pass.
fn passes(deployment: &Deployment, args: &[&str]) -> Result<(Vec<String>, Value)> {
    let out = deployment.call(&[args, &["--json"]].concat())?;
    let mut failures = out.expect(0);
    let report = out.json().unwrap_or(Value::Null);
    let outcome = &report["verdict"]["outcome"];
    failures.extend((outcome != "pass").then(|| format!("{}: outcome {outcome}", args.join(" "))));
    Ok((failures, report))
}

fn verify(deployment: &Deployment) -> Result<Finding> {
    let (failures, report) = passes(deployment, &["verify", "--max-prompts", "2"])?;
    let rows = report["tables"][0]["rows"].as_array().map_or(0, Vec::len);
    let extent = Extent::new().require("prompts", 2).compare("prompts", rows as u64);
    Ok(Finding::of(Verdict::judge(failures, extent)))
}

fn verify_full(deployment: &Deployment) -> Result<Finding> {
    let (failures, report) = passes(deployment, &["verify-full"])?;
    let rows = report["tables"][0]["rows"].as_array().map_or(0, Vec::len);
    let extent = Extent::new().require("prompts", 8).compare("prompts", rows as u64);
    Ok(Finding::of(Verdict::judge(failures, extent)))
}

/// A `verify` needs little more than the packed weights: what is beside them does not grow with the prompts.
fn memory(deployment: &Deployment) -> Result<Finding> {
    let (mut failures, report) = passes(deployment, &["verify", "--max-prompts", "8"])?;
    let files = Subject::shared(&deployment.model)?.checkpoint.files().map(Path::to_owned).collect::<Vec<_>>();
    let sizes = files.iter().map(|file| Ok(file.metadata().map_err(Error::io(file))?.len()));
    let checkpoint = sizes.sum::<Result<u64>>()? as f64;
    let limit = (MEMORY * checkpoint).max(SMALL);
    // Where the system does not tell, this is inconclusive.
    let peak = number(&report, "peak_memory_bytes");
    failures.extend(peak.filter(|&peak| !at_most(peak, limit)).map(|peak| {
        format!(
            "peak memory {:.1} MB, at most {:.1}: checkpoint of {:.1} MB",
            peak / 1e6,
            limit / 1e6,
            checkpoint / 1e6
        )
    }));
    let extent = Extent::new().require("peaks", 1).compare("peaks", peak.is_some().into());
    Ok(Finding::of(Verdict::judge(failures, extent)))
}

fn diagnosis(deployment: &Deployment) -> Result<Finding> {
    let (failures, report) = passes(deployment, &["diagnosis"])?;
    let layers = report["tables"][0]["rows"].as_array().map_or(0, Vec::len);
    let required = Subject::shared(&deployment.model)?.config.num_hidden_layers as u64;
    let extent = Extent::new().require("layers", required).compare("layers", layers as u64);
    Ok(Finding::of(Verdict::judge(failures, extent)))
}

/// Every figure that a profile must give is there and positive.
fn profile(deployment: &Deployment) -> Result<Finding> {
    const FIGURES: [&str; 10] = [
        "setup_ms",
        "prefill_cold_ms",
        "prefill_ms",
        "prefill_device_ms",
        "decode_ms_p50",
        "decode_ms_p95",
        "decode_device_ms",
        "decode_host_ms",
        "lm_head_ms",
        "decode_tok_s",
    ];
    const SITES: [&str; 9] =
        ["q_proj", "k_proj", "v_proj", "attention", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"];
    let (mut failures, report) = passes(deployment, &["profile", "--n-tokens", &TOKENS.to_string()])?;
    for name in FIGURES {
        let value = number(&report, name);
        failures.extend((!value.is_some_and(|x| x > 0.0)).then(|| format!("{name}: found {value:?}")));
    }
    let sites: Vec<&str> = report["tables"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|table| table["rows"].as_array().into_iter().flatten())
        .filter_map(|row| row[0].as_str())
        .collect();
    failures.extend(SITES.iter().filter(|site| !sites.contains(site)).map(|site| format!("no line of {site}")));
    Ok(judged(failures, "figures", FIGURES.len() as u64))
}

/// The documented codes: of a run that is wrong, of one that ends early, of what cannot be carried out. A device that is not here is
/// NOT RUN, and no failure.
fn exit_codes(deployment: &Deployment) -> Result<Finding> {
    // An engine with a fault is red, one that does not answer is inconclusive.
    let faulty = [deployment.binary(), "serve", &deployment.model, "--fault", "residual_dropped"];
    let faulty = shlex::try_join(faulty).map_err(|e| Error::Plan { why: format!("{}: {e}", deployment.binary()) })?;
    let mut wrong: Vec<(Vec<&str>, i32)> = vec![
        (vec!["verify", "--max-prompts", "1", "--runner", &faulty], 1),
        (vec!["verify", "--max-prompts", "1", "--runner", "false"], 2),
        (vec!["run", "--n-tokens", "0"], 64),
        (vec!["profile", "--n-tokens", "1"], 64),
        (vec!["optimise", "--phase", "6"], 64),
        (vec!["verify", "--max-prompts", "0"], 64),
        (vec!["diagnosis", "--no-such-option"], 64),
    ];
    if !npu_is_there() {
        wrong.extend(["run", "verify", "diagnosis", "profile"].map(|command| (vec![command, "--device", "npu"], 3)));
    }
    let mut failures = vec![];
    for (args, code) in &wrong {
        let out = deployment.call_elsewhere(args)?;
        failures.extend(out.expect(*code));
        failures.extend(out.stderr.contains("panicked").then(|| format!("{}: panicked", args.join(" "))));
    }
    Ok(judged(failures, "exit codes", wrong.len() as u64))
}

fn npu_is_there() -> bool {
    super::devices::unavailable("npu").is_none()
}

/// The Makefile's targets, with the binary of this build.
fn makefile(deployment: &Deployment) -> Result<Finding> {
    let targets = ["run", "verify", "verify-full", "diagnosis", "profile"];
    // Large checkpoints are gated in full by `verify_full` already.
    let large = Subject::shared(&deployment.model)?.config.num_hidden_layers > 8;
    let targets: Vec<&str> = targets.into_iter().filter(|target| !large || *target != "verify-full").collect();
    let mut failures = vec![];
    for target in &targets {
        failures.extend(deployment.make(target, &deployment.model)?.expect(0));
    }
    // Make's own exit code is 2 for whatever went wrong; it names that of the command.
    let none = deployment.make("verify", "no_such_model")?;
    let told = none.code == Some(2) && none.stderr.contains("Error 64");
    failures.extend((!told).then(|| format!("make verify of no model: {:?}: {}", none.code, none.stderr.trim_end())));
    Ok(judged(failures, "targets", targets.len() as u64))
}

/// Setup is no part of a run, and run, verify and profile are the same run.
fn same_path(deployment: &Deployment) -> Result<Finding> {
    let tokens = TOKENS.to_string();
    let (mut failures, ran) = passes(deployment, &["run", "--n-tokens", &tokens, "--ignore-eos"])?;
    let (more, verified) = passes(deployment, &["verify", "--max-prompts", "2"])?;
    failures.extend(more);
    let (more, profiled) = passes(deployment, &["profile", "--n-tokens", &tokens])?;
    failures.extend(more);

    let subject = Subject::shared(&deployment.model)?;
    let (_, ids) = subject.raw_ids(PROMPT)?;
    let options = RunnerOptions::for_prompts([ids.len()], TOKENS, subject.config.max_position_embeddings);
    let prefill = options.prefill_plan(&subject.config, options.buckets[0])?;
    let decode = options.decode_plan(&subject.config)?;
    for (command, report) in [("run", &ran), ("verify", &verified), ("profile", &profiled)] {
        let count = |name: &str| number(report, name).map(|n| n as u64);
        let (Some(prefills), Some(steps)) = (count("prefills"), count("decode_steps")) else {
            failures.push(format!("{command}: says nothing of its calls"));
            continue;
        };
        let planned = |of: fn(&Plan) -> u64| prefills * of(&prefill) + steps * of(&decode);
        let mut expected = vec![
            ("buffers_created", 0),
            ("static_uploads", 0),
            ("dispatches", planned(|plan| plan.dispatches() as u64)),
            ("launches", planned(|plan| plan.launches().count() as u64)),
        ];
        if command != "verify" {
            // Its prompts run in buckets of their own.
            expected.push(("bytes_written", planned(written)));
        }
        for (name, expected) in expected {
            let found = count(name);
            let wrong = found != Some(expected);
            failures.extend(wrong.then(|| format!("{command}: {name}: found {found:?}, planned {expected}")));
        }
    }
    Ok(judged(failures, "commands", 3))
}

/// What the host ops of one run write, whole buffers each. Units: bytes.
fn written(plan: &Plan) -> u64 {
    let ops = plan.steps.iter().filter_map(|step| match &step.op {
        Op::Host(op) => Some(op.writes()),
        Op::Dispatch(_) => None,
    });
    ops.flatten().map(|id| plan.buffer(id).spec.bytes() as u64).sum()
}

/// Phase 3's layer cases, each with figures by name.
pub type LayerFigures = Vec<(String, Vec<(&'static str, f64)>)>;

/// Phase 3's layer figures as the deployed binary's `diagnosis` prints them.
///
/// Errors: [`Error::Malformed`] for a report without them.
pub fn layer_figures(binary: &'static str, model: &str, device: &str) -> Result<LayerFigures> {
    let deployment = Deployment::new(binary, model, device, "layer_table");
    let out = deployment.call(&["diagnosis", "--json"])?;
    let bad = |why: &str| Error::malformed("report of diagnosis", why);
    let report = out.json().ok_or_else(|| bad("no JSON"))?;
    let subject = Subject::shared(model)?;
    let prompt = subject.outline()?.lens.first().cloned().ok_or_else(|| bad("the capture holds no layer outputs"))?;
    let table = &report["tables"][0];
    let column = |name: &str| {
        let columns = table["columns"].as_array().ok_or_else(|| bad("no columns"))?;
        columns.iter().position(|c| c == name).ok_or_else(|| bad(&format!("no column {name}")))
    };
    let columns = [("cosine_median", column("cos median")?), ("rel_l2_over_hf", column("noise ratio")?)];
    let rows = table["rows"].as_array().ok_or_else(|| bad("no rows"))?;
    let of_layer = |(layer, row): (usize, &Value)| {
        let figure = |(name, at): (&'static str, usize)| {
            Ok((name, row[at].as_f64().ok_or_else(|| bad(&format!("layer {layer}: {name} is no number")))?))
        };
        let figures = columns.into_iter().map(figure).collect::<Result<Vec<_>>>()?;
        Ok((format!("layer::{model}::{prompt}::l{layer:02}"), figures))
    };
    rows.iter().enumerate().map(of_layer).collect()
}

fn judged(failures: Vec<String>, what: &str, count: u64) -> Finding {
    Finding::of(Verdict::judge(failures, Extent::new().require(what, count).compare(what, count)))
}

/// A numeric fact of a report.
fn number(report: &Value, name: &str) -> Option<f64> {
    let facts = report["facts"].as_array()?;
    facts.iter().find(|fact| fact[0] == name).and_then(|fact| fact[1].as_f64())
}
