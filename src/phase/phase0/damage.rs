//! A project of one fixture to be damaged, and the means to: its config, weights, tokenizer, prompts and capture.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use serde_json::{Value, json};

use super::{Open, cases_of};
use crate::check::Outcome;
use crate::error::Result;
use crate::model::Manifest;
use crate::phase::{Outline, Run, Subject};

/// A copy of a fixture under a root of its own.
pub struct Project {
    folder: tempfile::TempDir,
    model: &'static str,
    /// From before the damage.
    outline: Outline,
}

impl Project {
    pub fn of(model: &'static str) -> Project {
        let folder = tempfile::tempdir().unwrap();
        let project = Path::new(env!("CARGO_MANIFEST_DIR"));
        for part in ["prompts".to_owned(), format!("fixtures/{model}"), "fixtures/hf".to_owned()] {
            copy(&project.join(&part), &folder.path().join(&part));
        }
        let manifest = Manifest::read(&folder.path().join("fixtures").join(model)).unwrap();
        let outline = Outline::of(folder.path(), &manifest).unwrap();
        Project { folder, model, outline }
    }

    fn fixture(&self) -> PathBuf {
        self.folder.path().join("fixtures").join(self.model)
    }

    fn checkpoint(&self) -> PathBuf {
        self.fixture().join("checkpoint")
    }

    fn capture(&self) -> PathBuf {
        self.fixture().join("reference.safetensors")
    }

    /// Replaces the first `from` of a text file of the project by `to`. `checkpoint/` stands for the fixture's.
    pub fn rewrite(&self, file: &str, from: &str, to: &str) {
        let path = match file.strip_prefix("checkpoint/") {
            Some(file) => self.checkpoint().join(file),
            None => self.folder.path().join(file),
        };
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{} does not hold {from}", path.display());
        fs::write(path, text.replacen(from, to, 1)).unwrap();
    }

    /// Changes config.json, as if HF had read it so: the capture is rebound to it.
    pub fn config(&self, change: impl FnOnce(&mut Value)) {
        let path = self.checkpoint().join("config.json");
        let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(&path, config.to_string()).unwrap();
        self.rebind();
    }

    /// Changes the header of a safetensors file, tensors and metadata; the data stays.
    fn header(path: &Path, change: impl FnOnce(&mut Value)) {
        let (mut header, data) = open(path);
        change(&mut header);
        write(path, &header, &data);
    }

    /// Changes the checkpoint's tensor table.
    pub fn tensors(&self, change: impl FnOnce(&mut Value)) {
        Self::header(&self.checkpoint().join("model.safetensors"), change);
    }

    /// Sets element `at` of a bf16 tensor of the checkpoint.
    pub fn weight(&self, tensor: &str, at: usize, value: f32) {
        let path = self.checkpoint().join("model.safetensors");
        patch(&path, tensor, 2 * at, &bf16::from_f32(value).to_le_bytes());
    }

    /// Sets four bytes of a tensor of the capture.
    pub fn captured(&self, tensor: &str, at: usize, value: [u8; 4]) {
        patch(&self.capture(), tensor, 4 * at, &value);
    }

    /// Changes a key of the capture's metadata, parsed.
    pub fn said(&self, key: &str, change: impl FnOnce(&mut Value)) {
        Self::header(&self.capture(), |header| {
            let mut value = serde_json::from_str(header["__metadata__"][key].as_str().unwrap()).unwrap();
            change(&mut value);
            header["__metadata__"][key] = json!(value.to_string());
        });
    }

    /// Takes tensors out of the capture, data and all.
    pub fn forget(&self, gone: impl Fn(&str) -> bool) {
        let (header, data) = open(&self.capture());
        let (mut kept, mut bytes) = (json!({"__metadata__": header["__metadata__"]}), vec![]);
        for (name, info) in header.as_object().unwrap().iter().filter(|(n, _)| *n != "__metadata__" && !gone(n)) {
            let at = offsets(info);
            let start = bytes.len();
            bytes.extend(&data[at.0..at.1]);
            kept[name] = info.clone();
            kept[name]["data_offsets"] = json!([start, bytes.len()]);
        }
        write(&self.capture(), &kept, &bytes);
    }

    fn subject(&self) -> Result<Subject> {
        Subject::unaccounted(self.folder.path(), self.model, None)
    }

    /// Makes the capture that of the damaged files, as if HF had been captured from them, so that the damage itself is
    /// looked at and not the hashes.
    pub fn rebind(&self) {
        let identity = self.subject().unwrap().identity().unwrap();
        self.said("weights_sha256", |hashes| *hashes = json!(identity.weights_sha256));
        self.said("files_sha256", |hashes| *hashes = json!(identity.files_sha256));
        self.said("prompts_sha256", |hashes| *hashes = json!(identity.prompts_sha256));
    }

    /// The cases that do not pass, with `change` made to the subject, named without the model and in case order.
    pub fn failing_with(&self, change: impl FnOnce(&mut Subject)) -> Vec<String> {
        failing(
            &self.outline,
            self.subject().map(|mut subject| {
                change(&mut subject);
                Arc::new(subject)
            }),
        )
    }

    /// Why the capture is refused.
    pub fn refusal(&self) -> String {
        self.subject().unwrap().capture().unwrap_err().to_string()
    }

    pub fn outline(&self) -> &Outline {
        &self.outline
    }

    /// The warnings of a case that passes, with `change` made to the subject.
    pub fn warnings(&self, kind: &str, change: impl FnOnce(&mut Subject)) -> Vec<String> {
        let mut subject = self.subject().unwrap();
        change(&mut subject);
        let subject = Arc::new(subject);
        let cases = cases_of(&self.outline, &(Arc::new(move || Ok(subject.clone())) as Open));
        let case = cases.iter().find(|case| case.name == format!("{kind}::{}", self.model)).unwrap();
        let Run::Static(run) = &case.run else { panic!("phase 0 has no device") };
        let verdict = run().unwrap().verdict;
        assert!(verdict.is_pass(), "{verdict}");
        verdict.warnings().to_vec()
    }

    /// The cases that do not pass.
    pub fn failing(&self) -> Vec<String> {
        self.failing_with(|_| {})
    }
}

/// The names (without the model) of the cases about `subject` that do not pass.
fn failing(outline: &Outline, subject: Result<Arc<Subject>>) -> Vec<String> {
    let subject = Arc::new(subject.map_err(|error| error.to_string()));
    let open: Open = Arc::new(move || {
        (*subject).clone().map_err(|why| crate::error::Error::Unavailable { what: "subject".into(), why })
    });
    let cases = cases_of(outline, &open);
    let fails = |run: &Run| match run {
        Run::Static(run) => !run().is_ok_and(|finding| finding.verdict.outcome() == Outcome::Pass),
        Run::OnDevice(_) => panic!("phase 0 has no device"),
    };
    let model = format!("::{}", outline.name);
    cases.iter().filter(|case| fails(&case.run)).map(|case| case.name.replacen(&model, "", 1)).collect()
}

fn open(path: &Path) -> (Value, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

fn write(path: &Path, header: &Value, data: &[u8]) {
    let header = header.to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()).unwrap();
}

fn offsets(info: &Value) -> (usize, usize) {
    let at = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
    (at(0), at(1))
}

fn patch(path: &Path, tensor: &str, at: usize, bytes: &[u8]) {
    let (header, mut data) = open(path);
    let start = offsets(&header[tensor]).0 + at;
    data[start..][..bytes.len()].copy_from_slice(bytes);
    write(path, &header, &data);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
