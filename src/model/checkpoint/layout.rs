//! How a checkpoint directory is laid out: which files, which tensor in which, under which prefix.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::super::config::{quantised_beside, read_json};
use super::super::safetensors_file::SafetensorsFile;
use crate::error::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How stored names differ from `model.layers.0...` and `lm_head.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Prefix {
    /// `model.embed_tokens.weight`, `lm_head.weight`: a causal LM as HF saves it.
    #[serde(rename = "model.")]
    Model,
    /// `embed_tokens.weight`: a base model saved without its head.
    #[serde(rename = "")]
    None,
    /// `language_model.model.embed_tokens.weight`, `language_model.lm_head.weight`: taken from a multimodal wrapper.
    #[serde(rename = "language_model.model.")]
    LanguageModel,
    /// `model.language_model.embed_tokens.weight`, `lm_head.weight`: the same in transformers 5.
    #[serde(rename = "model.language_model.")]
    ModelLanguageModel,
}

impl Prefix {
    const ALL: [Prefix; 4] = [Prefix::Model, Prefix::None, Prefix::LanguageModel, Prefix::ModelLanguageModel];

    /// What stands where the canonical name has `model.`.
    pub fn text(self) -> &'static str {
        match self {
            Prefix::Model => "model.",
            Prefix::None => "",
            Prefix::LanguageModel => "language_model.model.",
            Prefix::ModelLanguageModel => "model.language_model.",
        }
    }

    /// The stored name of a canonical one.
    pub fn stored(self, canonical: &str) -> Cow<'_, str> {
        match (self, canonical.strip_prefix("model.")) {
            (Prefix::Model, _) => Cow::Borrowed(canonical),
            (_, Some(rest)) => Cow::Owned(format!("{}{rest}", self.text())),
            (Prefix::LanguageModel, None) => Cow::Owned(format!("language_model.{canonical}")),
            (_, None) => Cow::Borrowed(canonical),
        }
    }
}

/// The files of a checkpoint and what its index says.
pub struct Shards {
    pub paths: Vec<PathBuf>,
    /// The index file and its tensor -> shard, where there is one.
    pub index: Option<(PathBuf, BTreeMap<String, usize>)>,
}

/// Refuses directories that are no plain checkpoint.
///
/// Errors: [`Error::Refused`].
pub fn scope(dir: &Path) -> Result<()> {
    let adapter = dir.join("adapter_config.json");
    if adapter.is_file() {
        let why = "HF would load the adapter too; merge it into the weights first (merge_and_unload)";
        return Err(Error::Refused { path: adapter, what: "a LoRA or other adapter".into(), why: why.into() });
    }
    quantised_beside(dir).map_or(Ok(()), Err)
}

/// The single file, else the shards that the index names; every shard is looked for before any is read.
///
/// Errors: [`Error::Malformed`], [`Error::Refused`], [`Error::Io`].
pub fn shards(dir: &Path) -> Result<Shards> {
    let single = dir.join(SINGLE);
    if single.is_file() {
        return Ok(Shards { paths: vec![single], index: None });
    }
    let index = dir.join(INDEX);
    if !index.is_file() {
        return Err(without_safetensors(dir));
    }
    let json = read_json(&index)?;
    let map = json.get("weight_map").and_then(Value::as_object).filter(|m| !m.is_empty());
    let Some(map) = map else { return Err(Error::malformed(&index, "found no weight_map, expected tensor -> shard")) };
    let mut names = BTreeSet::new();
    for (tensor, shard) in map {
        match shard.as_str() {
            Some(s) if plain_name(s) => names.insert(s),
            _ => {
                let why = format!("weight_map: {tensor}: found {shard}, expected the name of a file beside the index");
                return Err(Error::malformed(&index, why));
            }
        };
    }
    let missing: Vec<&str> = names.iter().copied().filter(|s| !dir.join(s).is_file()).collect();
    if let Some(first) = missing.first() {
        let why = format!("shard {first} is missing ({} of {} shards are)", missing.len(), names.len());
        return Err(Error::malformed(&index, why));
    }
    let order: BTreeMap<&str, usize> = names.iter().enumerate().map(|(i, s)| (*s, i)).collect();
    let owner = map.iter().filter_map(|(t, s)| Some((t.clone(), *order.get(s.as_str()?)?))).collect();
    Ok(Shards { paths: names.iter().map(|s| dir.join(s)).collect(), index: Some((index, owner)) })
}

fn plain_name(s: &str) -> bool {
    !s.is_empty() && Path::new(s).file_name() == Some(s.as_ref()) && !s.contains(['/', '\\', '\0'])
}

fn without_safetensors(dir: &Path) -> Error {
    let names = |ends: &[&str]| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names = entries.filter_map(|e| e.file_name().into_string().ok());
        names.find(|n| ends.iter().any(|end| n.ends_with(end)))
    };
    if !dir.is_dir() {
        return Error::malformed(dir, "not a directory, expected a checkpoint");
    }
    if let Some(found) = names(&[".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5"]) {
        let why = "only safetensors are read (never pickled code); convert with save_pretrained";
        return Error::Refused { path: dir.into(), what: found, why: why.into() };
    }
    Error::malformed(dir, format!("found neither {SINGLE} nor {INDEX}"))
}

/// Which file owns each tensor, and which tensors lie in two.
///
/// Errors: [`Error::Malformed`] for an index entry that its shard does not hold; [`Error::Tensor`] where two files
/// tell a tensor differently.
pub fn owners(shards: &Shards, files: &[SafetensorsFile]) -> Result<(BTreeMap<String, usize>, Vec<String>)> {
    let mut owner = BTreeMap::new();
    let mut duplicates = Vec::new();
    if let Some((path, index)) = &shards.index {
        for (tensor, &i) in index {
            if !files[i].tensors().contains_key(tensor) {
                let shard = files[i].path().file_name().unwrap_or_default().display();
                return Err(Error::malformed(path, format!("weight_map: {tensor}: not in shard {shard}")));
            }
            owner.insert(tensor.clone(), i);
        }
    }
    for (i, file) in files.iter().enumerate() {
        for (name, tensor) in file.tensors() {
            let first = *owner.entry(name.clone()).or_insert(i);
            if first == i {
                continue;
            }
            let same =
                files[first].tensors().get(name).is_some_and(|t| (t.dtype, &t.shape) == (tensor.dtype, &tensor.shape));
            if !same || files[first].bytes(name) != file.bytes(name) {
                return Err(Error::Tensor {
                    path: file.path().into(),
                    tensor: name.clone(),
                    found: "other contents".into(),
                    expected: format!("the same as in {}", files[first].path().display()),
                });
            }
            duplicates.push(name.clone());
        }
    }
    Ok((owner, duplicates))
}

/// The prefix, by where the embedding is.
///
/// Errors: [`Error::Tensor`] where there is none or more than one.
pub fn prefix(dir: &Path, owner: &BTreeMap<String, usize>) -> Result<Prefix> {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let found: Vec<Prefix> =
        Prefix::ALL.into_iter().filter(|p| owner.contains_key(p.stored(EMBEDDING).as_ref())).collect();
    let wrong = |found: String| Error::Tensor {
        path: dir.into(),
        tensor: EMBEDDING.into(),
        found,
        expected: "one embedding, under model., no prefix, language_model.model. or model.language_model.".into(),
    };
    match found.as_slice() {
        [one] => Ok(*one),
        [] => Err(wrong(match owner.keys().next() {
            None => "no tensors at all".into(),
            Some(first) => format!("{} tensors without one, such as {first}", owner.len()),
        })),
        more => Err(wrong(
            more.iter().map(|p| format!("{}embed_tokens.weight", p.text())).collect::<Vec<_>>().join(" and "),
        )),
    }
}
