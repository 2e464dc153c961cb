//! `deploy`: from a checkpoint to an evaluation report, phase by phase, stopping at the first gate that does not hold.
//!
//! What has passed is not repeated while checkpoint and program are the same (the state file says so); the documents
//! are written as it goes.

mod audit;
mod capture;
mod documents;
mod scaffold;
mod state;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;

use super::Datapath;
use crate::check::{Outcome, Verdict};
use crate::error::{Error, Result};
use crate::phase::{
    self, Run, Subject, explain, external, phase0, phase1, phase2, phase3, phase4, phase5, phase6, progress,
};
use crate::settings;
use state::State;

/// The last phase.
const LAST: u8 = 7;

#[derive(Args)]
#[command(
    after_help = "Steps: scope, scaffold, capture, phase 0 to phase 7. The first that does not hold ends the command with its findings
and the next step; the same command resumes there.

Examples:
  phasegate deploy HuggingFaceTB/SmolLM2-135M-Instruct        # from the local Hugging Face cache
  phasegate deploy ~/models/my-llama --name my_llama --python ~/venv/bin/python
  phasegate deploy my_llama --until 3                         # resume, and end after phase 3"
)]
pub(super) struct DeployArgs {
    /// A checkpoint's folder, an HF id in the local cache, or a fixture's name
    #[arg(value_name = "HF_ID|PATH")]
    model: String,
    /// Name of the fixture (default: from the folder or id)
    #[arg(long)]
    name: Option<String>,
    /// Device: emu, vnpu or npu
    #[arg(long, default_value = "emu")]
    device: String,
    /// Arithmetic of the emulated device
    #[arg(long, value_enum, default_value = "ieee")]
    datapath: Datapath,
    /// A Python with torch and transformers, for the capture (default: the first of python3 and python that has them)
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// End after this phase
    #[arg(long, value_name = "PHASE", default_value_t = LAST, value_parser = clap::value_parser!(u8).range(0..=LAST as i64))]
    until: u8,
    /// Forget what has passed
    #[arg(long)]
    again: bool,
}

pub(super) fn run(args: DeployArgs) -> anyhow::Result<ExitCode> {
    let root = settings::root();
    let device = match (args.device.as_str(), args.datapath) {
        ("emu", Datapath::Npu2) => "emu_npu2".to_owned(),
        (device, _) => device.to_owned(),
    };
    if let Some(error) = phase::devices::unavailable(&device) {
        return Err(error.into());
    }
    let name = scaffold::scaffold(&root, &args.model, args.name.as_deref())?;
    say!("scope     PASS  {name}: in scope, every key and tensor accounted for");
    say!("scaffold  PASS  fixtures/{name}/manifest.toml");
    if let Some(command) = capture::capture(&root, &name, args.python.as_deref())? {
        say!(
            "capture   NOT RUN  neither python3 nor python has torch and transformers. Name one that has (--python PROGRAM), or run this where there is one, bring \
             fixtures/{name}/reference.safetensors back, and deploy again:\n\n  {command}\n"
        );
        return Ok(ExitCode::from(Outcome::NotRun.exit_code()));
    }
    let subject = Subject::open_arc(&name, None)?;
    say!("capture   PASS  {}", subject.capture()?.provenance().line());
    let mut state = State::open(&subject, &device, args.again)?;
    let mut worst = Outcome::Pass;
    for phase in 0..=args.until {
        if let Some(known) = state.passed(phase) {
            say!("phase {phase}   PASS  {known} (before)");
            continue;
        }
        let (verdict, findings) = run_phase(phase, &subject, &device)?;
        documents::phase(&subject, &device, phase, &verdict, &findings)?;
        state.enter(phase, &verdict)?;
        documents::todo(&subject, &device, &state)?;
        say!("phase {phase}   {}  {}", verdict.outcome(), verdict.extent());
        if !verdict.is_pass() {
            let explained = (phase == 2 || phase == 3).then(|| explain::of_failure(&name, &device)).flatten();
            let causes = explained.as_deref().map_or(&[][..], Vec::as_slice);
            documents::lesson(&subject, &device, phase, &verdict, causes)?;
            verdict.reasons().iter().take(8).chain(causes).for_each(|reason| say!("  {reason}"));
            say!("next: {}", next(phase, &name, &device));
            worst = verdict.outcome();
            break;
        }
    }
    let report = documents::evaluation(&subject, &device, &state, args.until)?;
    say!("\n{worst}: {}", report.strip_prefix(&root).unwrap_or(&report).display());
    Ok(ExitCode::from(worst.exit_code()))
}

/// A finding of a phase: its case's name and what it came to.
pub(super) type Findings = Vec<(String, phase::Finding)>;

/// Runs every case of one phase; the last is the audit, in a process of its own.
fn run_phase(phase: u8, subject: &Arc<Subject>, device: &str) -> Result<(Verdict, Findings)> {
    let outline = subject.outline()?;
    if phase == LAST {
        return Ok((audit::audit(binary()?, &subject.name, device)?, vec![]));
    }
    let cases = match phase {
        0 => phase0::cases(&outline),
        1 => phase1::cases(&[outline])?,
        2 => phase2::cases(&outline),
        3 => phase3::cases(&outline),
        4 => phase4::cases(&outline),
        5 => phase5::cases(&outline),
        6 => phase6::cases(&outline, binary()?),
        _ => return Ok((Verdict::not_run(format!("there is no phase {phase}")), vec![])),
    };
    let bar = super::progress_bar::bar(cases.len() as u64, "phase");
    let mut findings = vec![];
    for case in cases {
        bar.set_message(case.name.clone());
        let found = match &case.run {
            Run::Static(run) => run(),
            Run::OnDevice(run) => run(device),
        };
        findings.push((case.name, found.or_else(broken)?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let name = |(name, found): &(String, phase::Finding)| found.verdict.clone().about(name);
    Ok((Verdict::all(findings.iter().map(name)), findings))
}

/// This program, which phase 6 calls as its users do.
///
/// Errors: [`Error::Io`].
fn binary() -> Result<&'static str> {
    let path = std::env::current_exe().map_err(Error::io("this binary"))?;
    // Once a process; cases hold it for as long as that lives.
    Ok(Box::leak(path.display().to_string().into_boxed_str()))
}

/// A case that could not be carried out is a finding too: the phase does not hold.
fn broken(error: Error) -> Result<phase::Finding> {
    let verdict = match error {
        Error::Unavailable { .. } => Verdict::not_run(error.to_string()),
        Error::Io { .. } => return Err(error),
        Error::Incomplete { .. } | Error::Engine { .. } => external::verdict(error)?,
        other => Verdict::judge(vec![other.to_string()], crate::check::Extent::new()),
    };
    Ok(phase::Finding::of(verdict))
}

/// What to do about a phase that does not hold.
fn next(phase: u8, name: &str, device: &str) -> String {
    let on = match device {
        "emu" => String::new(),
        "emu_npu2" => " --datapath npu2".into(),
        other => format!(" --device {other}"),
    };
    match phase {
        0 => format!("phasegate inspect {name} shows every key, tensor and prompt"),
        1 => format!("phasegate kernels --model {name} shows the kernels it needs and their records"),
        2 | 3 => {
            format!("phasegate bisect {name}{on} looks for the kernel, phasegate diagnosis {name}{on} for the layer")
        }
        4 | 5 => format!("phasegate optimise {name}{on} --phase {phase} shows each step, its gate and its time"),
        6 => format!("phasegate run {name}{on}, verify and profile are what it calls"),
        _ => format!("phasegate audit {name}{on} says which of its checks does not hold"),
    }
}

/// Where a model's documents lie.
fn document_path(subject: &Subject, device: &str, name: &str) -> std::path::PathBuf {
    progress::path(&subject.root, &subject.name, device, name)
}
