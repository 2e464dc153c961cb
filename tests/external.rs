//! The external runner from outside: engines that are right, wrong, dead, slow and talkative, and the verdict of each.
//!
//! This binary is also the engine: `--adapter WRONG` serves tiny_llama through the protocol, with that one thing wrong.

use std::io::Write;
use std::process::{Command, ExitCode};
use std::time::Duration;

use half::bf16;
use phasegate::device::{Counters, DeviceInfo};
use phasegate::error::Result;
use phasegate::harness::{Case, Failed, Suite};
use phasegate::phase::Subject;
use phasegate::runner::external::protocol::{Hello, PROTOCOL, Taps};
use phasegate::runner::external::{Served, serve};
use phasegate::runner::{NpuRunner, Runner, RunnerOptions};

const MODEL: &str = "tiny_llama";

/// What is wrong, the exit code, the outcome, and what the reason must name.
const WRONG: &[(&str, i32, &str, &str)] = &[
    ("negated", 1, "fail", "first divergence at step 0"),
    ("stale", 1, "fail", "first divergence"),
    ("noisy", 1, "fail", "KL"),
    ("nan", 1, "fail", "NaN"),
    // Its cache ends before the rows that it is asked for.
    ("other_position", 2, "inconclusive", "refused by the engine: position"),
    ("short_logits", 1, "fail", "wrong vocabulary"),
    ("vocabulary", 1, "fail", "wrong vocabulary"),
    ("model", 1, "fail", "another model"),
    ("weights", 1, "fail", "another model: the engine read model.safetensors"),
    ("protocol", 1, "fail", "protocol 99"),
    ("garbage", 1, "fail", "is no answer"),
    ("half_an_answer", 1, "fail", "lacks what it must hold"),
    ("answer_id", 1, "fail", "answer to request"),
    ("no_utf8", 1, "fail", "no UTF-8"),
    ("refusal", 2, "inconclusive", "refused by the engine"),
    ("crash", 2, "inconclusive", "crash: exit status: 7; stderr: out of tiles"),
    ("time_out", 2, "inconclusive", "time-out: no answer within 1 s"),
    ("status", 2, "inconclusive", "ERT_CMD_STATE_TIMEOUT"),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, flag, wrong] = args.as_slice()
        && flag == "--adapter"
    {
        return adapter(wrong);
    }
    let mut suite = Suite::new("external");
    for &(wrong, code, outcome, reason) in WRONG {
        let case = Case::new(format!("wrong::{wrong}"), move |_| judged(wrong, code, outcome, reason));
        suite.case(case.without_device());
    }
    suite.case(Case::new("the_same_through_a_pipe", |_| same_through_a_pipe()).without_device());
    suite.case(Case::new("layers_through_a_pipe", |_| layers_through_a_pipe()).without_device());
    let exchanged = Case::new("exchanged_layers_fail_the_diagnosis", |_| exchanged_layers_fail_the_diagnosis());
    suite.case(exchanged.without_device());
    suite.case(Case::new("layers_file_is_checked", |_| layers_file_is_checked()).without_device());
    suite.case(Case::new("no_such_program", |_| no_such_program()).without_device());
    suite.run()
}

/// The JSON report and the exit code of `phasegate COMMAND tiny_llama`.
fn phasegate(args: &[&str]) -> (serde_json::Value, i32, String) {
    let reports = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_phasegate"))
        .args(args)
        .args(["--json", "--report-dir"])
        .arg(reports.path())
        .env("PHASEGATE_RUN_CACHE", "off")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = serde_json::from_slice(&output.stdout).unwrap_or(serde_json::Value::Null);
    (json, output.status.code().unwrap_or(-1), stderr)
}

fn this(wrong: &str) -> String {
    format!("{} --adapter {wrong}", std::env::current_exe().unwrap().display())
}

fn judged(wrong: &str, code: i32, outcome: &str, reason: &str) -> std::result::Result<(), Failed> {
    let runner = this(wrong);
    let mut args = vec!["verify", MODEL, "--max-prompts", "1", "--runner", &runner];
    if wrong == "time_out" {
        args.extend(["--runner-timeout", "1"]);
    }
    let (report, found, stderr) = phasegate(&args);
    let reasons = report["verdict"]["reasons"].to_string();
    if found == code && report["verdict"]["outcome"] == outcome && reasons.contains(reason) {
        return Ok(());
    }
    let seen = &report["verdict"]["outcome"];
    Err(format!("exit {found}, {seen}, {reasons}, {stderr}; expected exit {code}, {outcome}, {reason:?}").into())
}

/// A device behind the protocol gives the very figures that it gives without.
fn same_through_a_pipe() -> std::result::Result<(), Failed> {
    let runner = format!("{} serve {MODEL}", env!("CARGO_BIN_EXE_phasegate"));
    let (piped, code, stderr) = phasegate(&["verify", MODEL, "--max-prompts", "2", "--runner", &runner]);
    let (direct, ..) = phasegate(&["verify", MODEL, "--max-prompts", "2"]);
    assert_eq!((code, &piped["verdict"]["outcome"]), (0, &"pass".into()), "{piped} {stderr}");
    assert_eq!(piped["tables"], direct["tables"]);
    assert_eq!(piped["plots"], direct["plots"]);
    assert_eq!(piped["verdict"]["extent"]["compared"]["weight files"], 1);
    assert_eq!(piped["verdict"]["warnings"], serde_json::json!([]));
    Ok(())
}

fn layers_through_a_pipe() -> std::result::Result<(), Failed> {
    let (piped, code, stderr) = phasegate(&["diagnosis", MODEL, "--runner", &this("nothing")]);
    let (mut direct, ..) = phasegate(&["diagnosis", MODEL]);
    assert_eq!(code, 0, "{piped} {stderr}");
    // What a layer adds of its own is asked of devices of ours only: the last column.
    let table = &mut direct["tables"][0];
    assert_eq!(table["columns"].as_array_mut().and_then(Vec::pop), Some("added".into()));
    for row in table["rows"].as_array_mut().into_iter().flatten() {
        row.as_array_mut().and_then(Vec::pop).ok_or("an empty row")?;
    }
    assert_eq!(piped["tables"], direct["tables"]);
    Ok(())
}

/// Two layers in each other's place: the first layer is right, and that is not enough.
fn exchanged_layers_fail_the_diagnosis() -> std::result::Result<(), Failed> {
    let runner = format!("{} serve {MODEL} --fault layers_swapped", env!("CARGO_BIN_EXE_phasegate"));
    let (report, code, stderr) = phasegate(&["diagnosis", MODEL, "--runner", &runner]);
    let reasons = report["verdict"]["reasons"].to_string();
    assert!(code == 1 && reasons.contains("times HF bf16's distance"), "exit {code}, {reasons}, {stderr}");
    Ok(())
}

fn layers_file_is_checked() -> std::result::Result<(), Failed> {
    for (wrong, reason) in
        [("a_layer_less", "lacks tensor l01.output"), ("a_row_less", "rows, expected one for each of")]
    {
        let (report, code, stderr) = phasegate(&["diagnosis", MODEL, "--runner", &this(wrong)]);
        let reasons = report["verdict"]["reasons"].to_string();
        assert!(code == 1 && reasons.contains(reason), "{wrong}: exit {code}, {reasons}, {stderr}");
    }
    Ok(())
}

fn no_such_program() -> std::result::Result<(), Failed> {
    let (_, code, stderr) = phasegate(&["verify", MODEL, "--runner", "no/such/program"]);
    assert!(code == 3 && stderr.contains("external runner \"no/such/program\" is not available"), "{code} {stderr}");
    let (_, code, stderr) = phasegate(&["verify", MODEL, "--device", "external"]);
    assert!(code == 64 && stderr.contains("runner = [...]"), "{code} {stderr}");
    Ok(())
}

/// The engine with one thing wrong.
struct Wrong {
    wrong: String,
    runner: NpuRunner,
    last: Vec<bf16>,
    steps: usize,
}

fn adapter(wrong: &str) -> ExitCode {
    let output = Tamper { wrong: wrong.into(), out: std::io::stdout() };
    let served = serve(std::io::stdin().lock(), output, |_| start(wrong));
    served.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

fn start(wrong: &str) -> Result<(Wrong, Hello)> {
    let subject = Subject::open(MODEL, None)?;
    let lengths = [16, 32, 64, 128, 256, 512, 1024];
    let options = RunnerOptions::for_prompts(lengths, 32, subject.config.max_position_embeddings);
    let runner = subject.runner("emu", &options)?;
    let right = subject.config.vocab_size;
    let hash = if wrong == "weights" { "00".repeat(32) } else { sha256_of_the_weights(&subject)? };
    let hello = Hello {
        protocol: if wrong == "protocol" { 99 } else { PROTOCOL },
        model: if wrong == "model" { "another".into() } else { MODEL.into() },
        engine: format!("test engine, {wrong}"),
        vocab_size: if wrong == "vocabulary" { right + 1 } else { right },
        weights_sha256: [("model.safetensors".to_owned(), hash)].into(),
        capabilities: vec!["layers".into(), "kv".into()],
    };
    Ok((Wrong { wrong: wrong.into(), runner, last: vec![], steps: 0 }, hello))
}

fn sha256_of_the_weights(subject: &Subject) -> Result<String> {
    phasegate::model::hashes::sha256_file(&subject.located.checkpoint_dir.join("model.safetensors"))
}

impl Wrong {
    fn distort(&mut self, mut logits: Vec<bf16>) -> Vec<bf16> {
        self.steps += 1;
        match self.wrong.as_str() {
            "negated" => logits.iter_mut().for_each(|x| *x = -*x),
            "stale" if self.steps > 1 => logits.clone_from(&self.last),
            // Every other logit a little larger: hardly a token changes.
            "noisy" => logits.iter_mut().step_by(2).for_each(|x| *x = bf16::from_f32(x.to_f32() + 0.3)),
            "nan" if self.steps == 20 => logits[0] = bf16::NAN,
            "short_logits" => drop(logits.pop()),
            "crash" if self.steps == 9 => {
                eprintln!("out of tiles");
                std::process::exit(7);
            }
            "time_out" if self.steps == 9 => std::thread::sleep(Duration::from_secs(3)),
            _ => {}
        }
        self.last.clone_from(&logits);
        logits
    }
}

impl Runner for Wrong {
    fn info(&self) -> &DeviceInfo {
        self.runner.info()
    }

    fn prefill(&mut self, ids: &[u32]) -> Result<Vec<bf16>> {
        let logits = self.runner.prefill(ids)?;
        Ok(self.distort(logits))
    }

    fn decode_step(&mut self, token: u32, position: usize) -> Result<Vec<bf16>> {
        if self.wrong == "refusal" && self.steps > 3 {
            self.runner.decode_step(u32::MAX, position)?;
        }
        let position = if self.wrong == "other_position" { position.saturating_sub(5) } else { position };
        let logits = self.runner.decode_step(token, position)?;
        Ok(self.distort(logits))
    }

    fn counters(&self) -> Counters {
        self.runner.counters()
    }
}

impl Served for Wrong {
    fn prefill_with_layers(&mut self, ids: &[u32], positions: &[usize]) -> Result<(Vec<bf16>, Taps)> {
        let fewer = if self.wrong == "a_row_less" { &positions[1..] } else { positions };
        let (logits, mut taps) = self.runner.prefill_with_layers(ids, fewer)?;
        if self.wrong == "a_layer_less" {
            taps.remove("l01.output");
        }
        Ok((self.distort(logits), taps))
    }

    fn kv_rows(&mut self, positions: &[usize]) -> Result<Taps> {
        self.runner.kv_rows(positions)
    }
}

/// Spoils answers on their way out.
struct Tamper {
    wrong: String,
    out: std::io::Stdout,
}

impl Write for Tamper {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let spoilt: Vec<u8> = match self.wrong.as_str() {
            "garbage" if text.contains("logits") => b"Loading weights: 100%\n".to_vec(),
            "half_an_answer" => text.replace("base64", "base32").into_bytes(),
            "answer_id" => text.replace("\"id\":3,", "\"id\":2,").into_bytes(),
            "no_utf8" if text.contains("logits") => b"\xff\xfe\n".to_vec(),
            "status" => text.replace("completed", "ERT_CMD_STATE_TIMEOUT").into_bytes(),
            _ => bytes.to_vec(),
        };
        self.out.write_all(&spoilt)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
