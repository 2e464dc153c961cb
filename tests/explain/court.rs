//! The reference court on a damaged capture and on a damaged device.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use phasegate::check::Outcome;
use phasegate::error::{Error, Result};
use phasegate::fault::Fault;
use phasegate::phase::{Bench, Subject, court, phase2};
use phasegate::plan::PlanOptions;
use safetensors::tensor::SafeTensors;

use crate::rewrite::rewrite;

const MODEL: &str = "tiny_llama";

/// HF bf16's layer outputs are damaged in the capture: DISPUTED, naming HF bf16. A fault of the device stays FAIL.
pub fn disputes() -> Result<Option<String>> {
    let folder = tempfile::tempdir().map_err(Error::io("a temporary folder"))?;
    let sound = Subject::shared(MODEL)?;
    copy(&sound.root.join("prompts"), &folder.path().join("prompts"))?;
    let fixture = PathBuf::from("fixtures").join(MODEL);
    copy(&sound.root.join(&fixture), &folder.path().join(&fixture))?;
    let prompt = sound.capture()?.lens_prompts().first().cloned().unwrap_or_default();
    let capture = folder.path().join(&fixture).join("reference.safetensors");
    let name = format!("{prompt}.bf16.layers");
    let bytes = fs::read(&capture).map_err(Error::io(&capture))?;
    let wrong = |e: safetensors::SafeTensorError| Error::malformed(&capture, e.to_string());
    let tensors = SafeTensors::deserialize(&bytes).map_err(wrong)?;
    let view = tensors.tensor(&name).map_err(wrong)?;
    let mut rows: Vec<bf16> = view.data().chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
    // Every second channel loses its sign.
    rows.iter_mut().step_by(2).for_each(|x| *x = bf16::from_f32(x.to_f32().abs()));
    rewrite(&capture, &capture, &[(name, rows)].into())?;

    let damaged = Arc::new(Subject::unaccounted(folder.path(), MODEL, None)?);
    let bench = Bench::new(damaged, "emu", std::slice::from_ref(&prompt), PlanOptions::default())?;
    let verdict = phase2::block(&bench, &prompt)?.verdict;
    let heard = court::hear(&bench, &prompt)?.apply(verdict.clone());
    let named = heard.reasons().first().is_some_and(|reason| reason.contains("HF bf16 stands alone"));
    if (verdict.outcome(), heard.outcome()) != (Outcome::Fail, Outcome::Disputed) || !named {
        return Ok(Some(format!("a damaged capture: {verdict}; heard: {heard}")));
    }

    let fault = Arc::new(Fault::of(Fault::entry("embedding_shifted")?, &sound.config)?);
    let bench = Bench::new(sound, "emu", std::slice::from_ref(&prompt), PlanOptions::default())?.altered(fault);
    let verdict = phase2::block(&bench, &prompt)?.verdict;
    let heard = court::hear(&bench, &prompt)?.apply(verdict.clone());
    if heard.outcome() != Outcome::Fail {
        return Ok(Some(format!("a damaged device: {verdict}; heard: {heard}")));
    }
    Ok(None)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(Error::io(to))?;
    for entry in fs::read_dir(from).map_err(Error::io(from))? {
        let entry = entry.map_err(Error::io(from))?.path();
        let target = to.join(entry.file_name().unwrap_or_default());
        if entry.is_dir() {
            copy(&entry, &target)?;
        } else {
            fs::copy(&entry, &target).map_err(Error::io(&entry))?;
        }
    }
    Ok(())
}
