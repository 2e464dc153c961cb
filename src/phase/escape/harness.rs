//! Faults of whoever asks and judges, carried out where they would happen.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::gates::of_run;
use super::{Sighting, prompts};
use crate::check::layers;
use crate::error::{Error, Result};
use crate::fault::{Gate, Harness};
use crate::model::prompts::PromptSet;
use crate::phase::{Bench, Subject, phase0, phase3};
use crate::plan::PlanOptions;
use crate::runner::{Alteration, Record};

type Gates = BTreeMap<Gate, Sighting>;

/// A record cut to its first steps.
struct Cut(usize);

impl Alteration for Cut {
    fn record(&self, mut record: Record) -> Record {
        record.logits = record.logits.slice(ndarray::s![..self.0, ..]).to_owned();
        record
    }
}

/// Chat prompts as their raw text.
struct Raw(BTreeMap<Vec<u32>, Vec<u32>>);

impl Alteration for Raw {
    fn prompt(&self, ids: &[u32]) -> Vec<u32> {
        self.0.get(ids).cloned().unwrap_or_else(|| ids.to_vec())
    }
}

/// Carries a fault out and asks the gates that are there to see it.
///
/// Errors: what is wrong with the sound model.
pub(super) fn gates(fault: Harness, subject: &Arc<Subject>, device: &str) -> Result<Gates> {
    let ids = prompts(subject)?;
    let bench = |ids: &[String]| Bench::new(subject.clone(), device, ids, PlanOptions::default());
    match fault {
        Harness::TemplateMissing => {
            let chat: Vec<String> =
                ids.into_iter().filter(|id| PromptSet::of_id(id) == Some(PromptSet::Chat)).collect();
            let bench = bench(&chat)?.altered(Arc::new(Raw(raw(subject, &chat)?)));
            Ok(of_run(&bench, &chat, &[])?.0)
        }
        Harness::NoPrompts => {
            let bench = bench(&[])?;
            Ok(one(Gate::Kl, phase3::kl(&bench, &[]).map(|f| f.verdict)))
        }
        Harness::Steps(steps) => {
            let ids = &ids[..1];
            let bench = bench(ids)?.altered(Arc::new(Cut(steps)));
            let mut gates = one(Gate::TokenSet, phase3::prompt(&bench, &ids[0]).map(|f| f.verdict.clone()));
            gates.extend(one(Gate::Kl, phase3::kl(&bench, ids).map(|f| f.verdict)));
            Ok(gates)
        }
        Harness::NoLayers => Ok(one(Gate::Noise, Ok(layers::judge(&[], subject.config.num_hidden_layers, 1)))),
        Harness::OtherCapture => {
            let other = ["tiny_llama", "tiny_qwen3"].into_iter().find(|name| *name != subject.name).unwrap_or_default();
            with_copy(subject, |root, dir| {
                let from = subject.root.join("fixtures").join(other).join(REFERENCE);
                copy(&from, &dir.join(REFERENCE))?;
                open(root, subject)
            })
        }
        Harness::StaleCapture => with_copy(subject, |root, _| {
            let file = PromptSet::Base.file(root);
            let text = fs::read_to_string(&file).map_err(Error::io(&file))?;
            fs::write(&file, format!("{text}One more line\n")).map_err(Error::io(&file))?;
            open(root, subject)
        }),
        Harness::CorruptedFile => with_copy(subject, |root, dir| {
            let weights = first_weights(&dir.join("checkpoint"))?;
            let mut bytes = fs::read(&weights).map_err(Error::io(&weights))?;
            if let Some(byte) = bytes.last_mut() {
                *byte ^= 1;
            }
            fs::write(&weights, bytes).map_err(Error::io(&weights))?;
            open(root, subject)
        }),
        Harness::NanReference => with_copy(subject, |root, dir| {
            let file = dir.join(REFERENCE);
            let mut bytes = fs::read(&file).map_err(Error::io(&file))?;
            poison_float(&file, &mut bytes)?;
            fs::write(&file, bytes).map_err(Error::io(&file))?;
            let subject = Subject::unaccounted(root, &subject.name, None)?;
            let verdict = phase0::verdict(&Arc::new(subject))?;
            let sighting = Sighting { reason: verdict.reasons().join("; "), ..Sighting::of(&verdict) };
            Ok([(Gate::Phase0, sighting)].into())
        }),
    }
}

const REFERENCE: &str = "reference.safetensors";

fn one(gate: Gate, verdict: Result<crate::check::Verdict>) -> Gates {
    [(gate, verdict.as_ref().map_or_else(Sighting::refused, Sighting::of))].into()
}

/// Whether the fixture under `root` is refused.
fn open(root: &Path, subject: &Subject) -> Result<Gates> {
    let opened = Subject::unaccounted(root, &subject.name, None).and_then(|subject| subject.capture().map(drop));
    let sighting = match opened {
        Ok(()) => Sighting { outcome: "PASS".into(), reason: String::new() },
        Err(error) => Sighting::refused(&error),
    };
    Ok([(Gate::Refused, sighting)].into())
}

/// Chat prompts' ids to those of their raw text.
fn raw(subject: &Subject, chat: &[String]) -> Result<BTreeMap<Vec<u32>, Vec<u32>>> {
    let capture = subject.capture()?;
    let mut raw = BTreeMap::new();
    for prompt in capture.prompts().iter().filter(|p| chat.contains(&p.id)) {
        raw.insert(capture.prompt(&prompt.id)?.ids, subject.raw_ids(&prompt.text)?.1);
    }
    Ok(raw)
}

/// A copy of the fixture and of the prompt files in a folder of its own.
fn with_copy(subject: &Subject, act: impl FnOnce(&Path, &Path) -> Result<Gates>) -> Result<Gates> {
    let folder = tempfile::tempdir().map_err(Error::io("a temporary folder"))?;
    let root = folder.path();
    let dir = root.join("fixtures").join(&subject.name);
    copy_tree(&subject.root.join("fixtures").join(&subject.name), &dir)?;
    copy_tree(&subject.root.join("prompts"), &root.join("prompts"))?;
    act(root, &dir)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).map_err(Error::io(from))
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(Error::io(to))?;
    for entry in fs::read_dir(from).map_err(Error::io(from))? {
        let entry = entry.map_err(Error::io(from))?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() { copy_tree(&path, &to)? } else { copy(&path, &to)? }
    }
    Ok(())
}

fn first_weights(dir: &Path) -> Result<PathBuf> {
    let files = fs::read_dir(dir).map_err(Error::io(dir))?.filter_map(|entry| Some(entry.ok()?.path()));
    let weights = files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).min();
    weights.ok_or_else(|| Error::malformed(dir, "no weights"))
}

/// Makes the first f32 of a prompt's f32 logits a NaN, where the header says it lies.
fn poison_float(file: &Path, bytes: &mut [u8]) -> Result<()> {
    let bad = || Error::malformed(file, "not a capture");
    let len = bytes.first_chunk::<8>().map(|n| u64::from_le_bytes(*n) as usize).ok_or_else(bad)?;
    let header: serde_json::Value =
        serde_json::from_slice(bytes.get(8..8 + len).ok_or_else(bad)?).map_err(|_| bad())?;
    let tensors = header.as_object().ok_or_else(bad)?;
    let (_, tensor) = tensors.iter().find(|(name, _)| name.ends_with(".f32.top_logits")).ok_or_else(bad)?;
    let at = 8 + len + tensor["data_offsets"][0].as_u64().ok_or_else(bad)? as usize;
    bytes.get_mut(at..at + 4).ok_or_else(bad)?.copy_from_slice(&f32::NAN.to_le_bytes());
    Ok(())
}
