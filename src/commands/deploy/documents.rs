//! The documents of a deployment: each phase's figures, TODO.md, LESSONS.md and evaluation_report.md.

use std::fmt::Write;
use std::path::PathBuf;

use super::state::State;
use super::{Findings, LAST, document_path};
use crate::check::Verdict;
use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;
use crate::phase::{Subject, phase2, phase3, phase4, phase5, progress};
use crate::report::provenance;

/// What each phase asks.
const QUESTIONS: [&str; 8] = [
    "can this checkpoint be deployed, and is the reference sound?",
    "is each kernel right at each shape?",
    "is one block right?",
    "is the whole model right, decode included?",
    "is prefill faster and still right?",
    "is decode faster and still right?",
    "does the finished deployment run as its users run it?",
    "can the verdicts be trusted?",
];

fn command(subject: &Subject, device: &str) -> String {
    match device {
        "emu_npu2" => format!("phasegate deploy {} --datapath npu2", subject.name),
        device => format!("phasegate deploy {} --device {device}", subject.name),
    }
}

/// Writes a phase's document, or at least its line in progress.md.
///
/// Errors: [`Error::Io`].
pub(super) fn phase(subject: &Subject, device: &str, phase: u8, verdict: &Verdict, findings: &Findings) -> Result<()> {
    let name = match phase {
        0 => "phase0_checkpoint",
        1 => "phase1_kernels",
        2 => phase2::DOCUMENT,
        3 => phase3::DOCUMENT,
        4 => phase4::DOCUMENT,
        5 => phase5::DOCUMENT,
        6 => "phase6_finalize",
        _ => {
            progress::enter(&subject.root, &subject.name, device, phase, verdict, &command(subject, device))?;
            return Ok(());
        }
    };
    let document = progress::Document {
        name,
        phase,
        model: subject.name.clone(),
        device: device.into(),
        command: command(subject, device),
        notes: vec![
            format!("verdict: {} ({})", verdict.outcome(), verdict.extent()),
            format!("capture: {}", subject.capture()?.provenance().line()),
        ],
        tables: vec![],
        findings: findings.clone(),
    };
    document.write(&subject.root).map(drop)
}

/// Writes TODO.md: a box a phase, what blocks, the resolved config.
///
/// Errors: [`Error::Io`].
pub(super) fn todo(subject: &Subject, device: &str, state: &State) -> Result<()> {
    let mut out =
        format!("# To do: {} on {device}\n\nWritten by `{}`; do not edit.\n\n", subject.name, command(subject, device));
    for (phase, question) in QUESTIONS.iter().enumerate() {
        let tick = if state.passed(phase as u8).is_some() { 'x' } else { ' ' };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "- [{tick}] phase {phase}: {question}");
    }
    out.push_str("\n## Blockers\n\n");
    let blocked = (0..=LAST).filter(|&p| state.passed(p).is_none()).find_map(|p| Some((p, state.entry(p)?)));
    match blocked {
        None => out.push_str("None.\n"),
        Some((phase, entry)) => {
            let _ = writeln!(out, "Phase {phase}: {}", entry.outcome);
            for reason in &entry.reasons {
                let _ = writeln!(out, "- {reason}");
            }
        }
    }
    out.push_str("\n## Resolved config\n\n");
    for (key, value) in subject.config.resolved() {
        let _ = writeln!(out, "- `{key}`: {value}");
    }
    write(document_path(subject, device, "TODO"), &out).map(drop)
}

/// Adds a failure to LESSONS.md, once: what did not hold, and its causes as explain found them.
///
/// Errors: [`Error::Io`].
pub(super) fn lesson(subject: &Subject, device: &str, phase: u8, verdict: &Verdict, causes: &[String]) -> Result<()> {
    let path = document_path(subject, device, "LESSONS");
    let head = format!("# Lessons: {} on {device}\n", subject.name);
    let mut out = std::fs::read_to_string(&path).unwrap_or(head);
    let mut entry =
        format!("\n## Phase {phase}: {}, commit {}\n\n", verdict.outcome(), provenance::commit(&subject.root));
    for reason in verdict.reasons().iter().take(10) {
        let _ = writeln!(entry, "- {reason}");
    }
    for cause in causes {
        let _ = writeln!(entry, "- cause: {cause}");
    }
    if out.contains(&entry) {
        return Ok(());
    }
    out.push_str(&entry);
    write(path, &out).map(drop)
}

/// Writes evaluation_report.md and says where.
///
/// Errors: [`Error::Io`].
pub(super) fn evaluation(subject: &Subject, device: &str, state: &State, until: u8) -> Result<PathBuf> {
    let first = (0..=until).find(|&phase| state.passed(phase).is_none());
    let word = first.map_or("PASS", |phase| state.entry(phase).map_or("NOT RUN", |entry| entry.outcome.as_str()));
    let mut out = format!("# Evaluation: {} on {device}\n\n**{word}**", subject.name);
    match first {
        None if until < LAST => out.push_str(&format!(" up to phase {until}; the later ones were not asked for")),
        None => {}
        Some(phase) => out.push_str(&format!(" at phase {phase}")),
    }
    let _ = writeln!(
        out,
        "\n\nWritten by `{}`; do not edit.\n\n| phase | question | verdict | compared |\n|---|---|---|---|",
        command(subject, device)
    );
    for (phase, question) in QUESTIONS.iter().enumerate() {
        let entry = state.entry(phase as u8);
        let (outcome, extent) = entry.map_or(("NOT RUN", ""), |e| (e.outcome.as_str(), e.extent.as_str()));
        let _ = writeln!(out, "| {phase} | {question} | {outcome} | {} |", extent.replace('|', "/"));
    }
    out.push_str("\n## Provenance\n\n");
    for (name, value) in provenance::of(subject)? {
        let _ = writeln!(out, "- {name}: {value}");
    }
    write(document_path(subject, device, "evaluation_report"), &out)
}

fn write(path: PathBuf, text: &str) -> Result<PathBuf> {
    let dir = path.parent().unwrap_or(std::path::Path::new("."));
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    write_atomically(&path, text.as_bytes())?;
    Ok(path)
}
