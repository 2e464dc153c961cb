//! The string map of a capture, typed. Knows nothing of the tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::SCHEMA;
use crate::error::{Error, Result};

/// One captured prompt.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CapturedPrompt {
    /// `base_00`, `chat_03` ...
    pub id: String,
    /// `base`, `instruct`, `chat` or `long`.
    pub set: String,
    /// The line of the prompt file.
    pub text: String,
    /// What was tokenised: the text, or the chat template's output.
    pub rendered: String,
    /// Number of prompt tokens.
    pub n_prompt: usize,
}

/// What made the capture.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Provenance {
    pub transformers: String,
    pub torch: String,
    pub python: String,
    pub tokenizers: String,
    pub attn_implementation: String,
    pub dtype: String,
    pub threads: usize,
    pub cpu: String,
}

impl Provenance {
    /// One line for people.
    pub fn line(&self) -> String {
        let Provenance { transformers, torch, attn_implementation, dtype, threads, cpu, .. } = self;
        format!("transformers {transformers}, torch {torch}, {dtype}, {attn_implementation}, {threads} threads, {cpu}")
    }
}

/// Sizes the tensors must have, from HF's resolved config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub max_position_embeddings: usize,
    pub head_dim: usize,
    pub q_width: usize,
    pub kv_width: usize,
}

/// KL of HF bf16 from HF f32 over all steps, as the capture's script computed it.
#[derive(Debug, Clone, Copy, serde::Deserialize)]
pub(super) struct DeclaredFloor {
    pub median: f64,
    pub p95: f64,
}

#[derive(serde::Deserialize)]
struct Noise {
    kl_f32_bf16: DeclaredFloor,
}

/// Everything but the tensors.
pub(super) struct About {
    pub model: String,
    pub provenance: Provenance,
    pub weights_sha256: BTreeMap<String, String>,
    pub files_sha256: BTreeMap<String, String>,
    pub prompts_sha256: BTreeMap<String, String>,
    pub resolved_config: serde_json::Value,
    pub stop_ids: Vec<u32>,
    pub prompts: Vec<CapturedPrompt>,
    pub lens: Vec<String>,
    pub sizes: Sizes,
    /// None: the file has no `noise`.
    pub floor: Option<DeclaredFloor>,
}

impl About {
    /// Parses and checks the map of the file at `path`.
    ///
    /// Errors: [`Error::Capture`] naming the key.
    pub fn parse(path: &Path, strings: &HashMap<String, String>) -> Result<About> {
        let map = Map { path, strings };
        let schema = map.text("schema")?;
        if schema != SCHEMA {
            return Err(map.refused(format!("schema {schema:?}, this version reads {SCHEMA:?}")));
        }
        let resolved_config: serde_json::Value = map.json("resolved_config")?;
        let about = About {
            model: map.text("model")?.to_owned(),
            provenance: map.json("provenance")?,
            weights_sha256: map.hashes("weights_sha256")?,
            files_sha256: map.hashes("files_sha256")?,
            prompts_sha256: map.hashes("prompts_sha256")?,
            stop_ids: map.json("stop_ids")?,
            prompts: map.json("prompts")?,
            lens: map.json("lens")?,
            sizes: Sizes::of(&map, &resolved_config)?,
            floor: match strings.contains_key("noise") {
                true => Some(map.json::<Noise>("noise")?.kl_f32_bf16),
                false => None,
            },
            resolved_config,
        };
        about.check(&map)?;
        Ok(about)
    }

    fn check(&self, map: &Map<'_>) -> Result<()> {
        if self.provenance.dtype != "bfloat16" {
            return Err(map.refused(format!("provenance: dtype {:?}, expected bfloat16", self.provenance.dtype)));
        }
        if self.prompts.is_empty() {
            return Err(map.refused("prompts: none"));
        }
        let mut seen = BTreeSet::new();
        for prompt in &self.prompts {
            let CapturedPrompt { id, set, n_prompt, .. } = prompt;
            if !seen.insert(id) {
                return Err(map.refused(format!("prompts: {id:?} stands twice")));
            }
            if !["base", "instruct", "chat", "long"].contains(&set.as_str()) {
                return Err(map.refused(format!("prompts: {id}: unknown set {set:?}")));
            }
            if *n_prompt == 0 {
                return Err(map.refused(format!("prompts: {id}: no tokens")));
            }
        }
        match self.lens.iter().find(|id| !seen.contains(id)) {
            Some(id) => Err(map.refused(format!("lens: {id:?} is no captured prompt"))),
            None => Ok(()),
        }
    }
}

impl Sizes {
    fn of(map: &Map<'_>, config: &serde_json::Value) -> Result<Sizes> {
        let get = |key: &str| config.get(key).and_then(serde_json::Value::as_u64).map(|x| x as usize);
        let need = |key: &str| {
            let missing = || map.refused(format!("resolved_config: {key}: missing or no positive number"));
            get(key).filter(|&x| x > 0).ok_or_else(missing)
        };
        let (hidden_size, heads) = (need("hidden_size")?, need("num_attention_heads")?);
        let head_dim = get("head_dim").unwrap_or(hidden_size / heads);
        let width = |heads: usize| {
            let absurd = || map.refused("resolved_config: head_dim: too large");
            heads.checked_mul(head_dim).ok_or_else(absurd)
        };
        Ok(Sizes {
            vocab_size: need("vocab_size")?,
            num_hidden_layers: need("num_hidden_layers")?,
            hidden_size,
            intermediate_size: need("intermediate_size")?,
            max_position_embeddings: need("max_position_embeddings")?,
            head_dim,
            q_width: width(heads)?,
            kv_width: width(get("num_key_value_heads").unwrap_or(heads))?,
        })
    }
}

struct Map<'a> {
    path: &'a Path,
    strings: &'a HashMap<String, String>,
}

impl Map<'_> {
    fn refused(&self, why: impl Into<String>) -> Error {
        Error::Capture { path: self.path.to_owned(), why: why.into() }
    }

    fn text(&self, key: &str) -> Result<&str> {
        self.strings.get(key).map(String::as_str).ok_or_else(|| self.refused(format!("metadata: no key {key:?}")))
    }

    fn json<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        serde_json::from_str(self.text(key)?).map_err(|e| self.refused(format!("metadata: {key}: {e}")))
    }

    /// A map of name to sha256, never empty: no hash matches everything.
    fn hashes(&self, key: &str) -> Result<BTreeMap<String, String>> {
        let map: BTreeMap<String, String> = self.json(key)?;
        if map.is_empty() {
            return Err(self.refused(format!("metadata: {key}: empty")));
        }
        let is_sha256 = |hash: &str| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit());
        match map.iter().find(|(_, hash)| !is_sha256(hash)) {
            Some((name, hash)) => Err(self.refused(format!("metadata: {key}: {name}: {hash:?} is no sha256"))),
            None => Ok(map),
        }
    }
}
