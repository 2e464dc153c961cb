//! Can the gates fail? Every fault of the catalogue on every embedded model that can have it, and the sound models through
//! the same gates. A whole run writes the kill matrix.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use phasegate::error::{Error, Result};
use phasegate::fault::{Entry, Injection, catalogue};
use phasegate::harness::{Availability, Case, Failed, Suite};
use phasegate::phase::escape::{self, Row, matrix::Matrix};
use phasegate::phase::{Outline, Subject};
use phasegate::settings;

/// Models that are also injected under the NPU2's arithmetic.
const NPU2: [&str; 2] = ["tiny_llama", "tiny_qwen3"];

/// Sets of prompts that the sound models are run over, each with the long prompt.
const SETS: [&str; 3] = ["base", "instruct", "chat"];

type Found = Arc<Mutex<Matrix>>;

fn main() -> ExitCode {
    let found = Found::default();
    let (suite, cases) = match suite(&found) {
        Ok(suite) => suite,
        Err(error) => {
            eprintln!("escape: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = suite.run();
    let mut matrix = found.lock().unwrap_or_else(PoisonError::into_inner);
    if matrix.rows.len() + matrix.clean.len() == cases {
        matrix.sort();
        if let Err(error) = write(&matrix) {
            eprintln!("escape: {error}");
            return ExitCode::FAILURE;
        }
    }
    code
}

fn suite(found: &Found) -> Result<(Suite, usize)> {
    let mut suite = Suite::new("escape");
    let mut cases = 0;
    for outline in Outline::all()?.into_iter().filter(|outline| outline.name.starts_with("tiny_")) {
        suite.model(&outline.name, outline.missing.clone().map_or(Availability::Available, Availability::Missing));
        for device in ["emu", "emu_npu2"] {
            let injected = device == "emu" || NPU2.contains(&outline.name.as_str());
            for &entry in catalogue().iter().filter(|entry| injected && (entry.absent)(&outline.config).is_none()) {
                if device != "emu" && matches!(entry.injection, Injection::Harness(_) | Injection::Config(_)) {
                    continue;
                }
                cases += 1;
                suite.case(fault(entry, &outline, device, found));
            }
            for set in SETS {
                cases += 1;
                suite.case(clean(set, &outline, device, found));
            }
        }
    }
    Ok((suite, cases))
}

fn prefix(device: &str) -> &str {
    if device == "emu" { "" } else { "npu2::" }
}

fn fault(entry: &'static Entry, outline: &Outline, device: &'static str, found: &Found) -> Case {
    let (model, found) = (outline.name.clone(), found.clone());
    let case = Case::new(format!("{}{}::{model}", prefix(device), entry.id), {
        let model = model.clone();
        move |_| {
            let row = escape::inject(entry, &Subject::shared(&model).map_err(failed)?, device).map_err(failed)?;
            let verdict = judge(entry, &row);
            found.lock().unwrap_or_else(PoisonError::into_inner).rows.push(row);
            verdict
        }
    });
    case.needs(outline.name.clone()).without_device()
}

/// Some gate that the catalogue names saw it and what should point at it does, or no run of this model can show it.
fn judge(entry: &Entry, row: &Row) -> std::result::Result<(), Failed> {
    if !row.killed {
        let seen: Vec<&str> = row.seen().map(|gate| gate.name()).collect();
        return match &row.unseen {
            Some(_) if seen.is_empty() => Ok(()),
            _ => Err(format!("none of {:?} saw it; seen by {seen:?}\n{row:#?}", entry.catches).into()),
        };
    }
    if row.located == Some(false) {
        return Err(format!("killed, but {:?} does not point at it: {:?}", entry.lens, row.place).into());
    }
    Ok(())
}

fn clean(set: &'static str, outline: &Outline, device: &'static str, found: &Found) -> Case {
    let (model, found) = (outline.name.clone(), found.clone());
    let wanted = |id: &&String| id.starts_with(set) || id.starts_with("long");
    let prompts: Vec<String> = outline.prompts.iter().filter(wanted).cloned().collect();
    let name = format!("{}clean::{model}::{set}", prefix(device));
    let case = Case::new(name.clone(), move |_| {
        let subject = Subject::shared(&model).map_err(failed)?;
        let clean = escape::clean(&subject, device, &prompts).map_err(failed)?;
        let alarms = clean.alarms.clone();
        found.lock().unwrap_or_else(PoisonError::into_inner).clean.insert(name.clone(), clean);
        if alarms.is_empty() { Ok(()) } else { Err(alarms.join("\n").into()) }
    });
    case.needs(outline.name.clone()).without_device()
}

fn failed(error: Error) -> Failed {
    error.to_string().into()
}

/// `target/phasegate/escape/kill_matrix.{json,md}`; the committed copy is docs/kill_matrix.md.
fn write(matrix: &Matrix) -> Result<()> {
    let dir = settings::work_dir().join("escape");
    std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    let json = serde_json::to_vec_pretty(matrix).map_err(|e| Error::malformed(&dir, e.to_string()))?;
    for (name, content) in [("kill_matrix.json", json), ("kill_matrix.md", matrix.markdown().into_bytes())] {
        let path = dir.join(name);
        std::fs::write(&path, content).map_err(Error::io(&path))?;
    }
    let figures = matrix.figures();
    eprintln!("escape: {figures:?}");
    let document = settings::root().join("docs/kill_matrix.md");
    let written = std::fs::read_to_string(&document).map_err(Error::io(&document))?;
    if matrix.is_documented(&written) {
        return Ok(());
    }
    let why = format!("its figures are not those of this run, which stand in {}", dir.join("kill_matrix.md").display());
    Err(Error::malformed(document, why))
}
