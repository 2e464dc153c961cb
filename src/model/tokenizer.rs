//! `tokenizer.json` through the tokenizers crate: text to ids and back, and the ids that end a generation.
//!
//! Adds nothing of its own: whether a BOS is put in front is the tokenizer's post-processor's affair, or the chat
//! template's, never both.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoint::side_file;
use super::config::{ModelConfig, parse_json, read_bytes, read_object};
use crate::error::{Error, Result};

/// Special tokens by the names that chat templates know them under.
const SPECIAL: &[&str] = &["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"];

/// An opened tokenizer and what `tokenizer_config.json` says beside it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    /// Name -> text, as `tokenizer_config.json` has them.
    special: Vec<(&'static str, String)>,
}

impl Tokenizer {
    /// Opens `tokenizer.json` in a checkpoint, with `tokenizer_config.json` where there is one.
    ///
    /// Errors: [`Error::Io`], [`Error::Malformed`]; [`Error::Refused`] where only a sentencepiece or vocab file is.
    pub fn open(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join("tokenizer.json");
        if side_file(dir, "tokenizer.json")?.is_none() {
            for other in ["tokenizer.model", "vocab.json", "tekken.json"] {
                if dir.join(other).is_file() {
                    let why =
                        "only tokenizer.json is read; AutoTokenizer.from_pretrained(..).save_pretrained(..) writes one";
                    return Err(Error::Refused { path: dir.into(), what: other.into(), why: why.into() });
                }
            }
        }
        let bytes = read_bytes(&path)?;
        // Parsed as JSON once more only to say what is wrong: a vocabulary is megabytes.
        let mut inner = match tokenizers::Tokenizer::from_bytes(&bytes) {
            Ok(inner) => inner,
            Err(error) => {
                parse_json(&path, &bytes)?;
                return Err(Error::malformed(&path, format!("not a tokenizer: {error}")));
            }
        };
        // A capture's ids are of whole prompts; HF ignores what the file says here unless asked to.
        inner.with_truncation(None).map_err(|e| Error::malformed(&path, e.to_string()))?;
        inner.with_padding(None);
        let special = side_file(dir, "tokenizer_config.json")?.map_or(Ok(vec![]), |path| special(&path))?;
        Ok(Tokenizer { path, inner, special })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Special tokens by name (`bos_token` ...), for chat templates.
    pub fn special_tokens(&self) -> &[(&'static str, String)] {
        &self.special
    }

    /// A special token's text.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(n, _)| *n == name).map(|(_, t)| t.as_str())
    }

    /// A token's id.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Text to ids; `add_special_tokens` lets the post-processor add its own (a BOS, where it has one).
    ///
    /// Errors: [`Error::Malformed`] where the tokenizer's own parts contradict each other.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode(text, add_special_tokens);
        Ok(encoding.map_err(|e| Error::malformed(&self.path, format!("cannot encode: {e}")))?.get_ids().to_vec())
    }

    /// Ids to text; special tokens are left out on request.
    ///
    /// Errors: [`Error::Malformed`] as for [`Tokenizer::encode`].
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|e| Error::malformed(&self.path, format!("cannot decode: {e}")))
    }

    /// A decoder that is fed id by id and never gives half a character; special tokens are left out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), given: 0, seen: 0 }
    }

    /// One more than the largest id with a token.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Ids below `vocab_size` (the head's rows) that have no token: padding of the vocabulary, never to be chosen.
    pub fn unnamed_ids(&self, vocab_size: usize) -> Vec<u32> {
        let named: BTreeSet<u32> = self.inner.get_vocab(true).into_values().collect();
        (0..vocab_size as u32).filter(|id| !named.contains(id)).collect()
    }

    /// How many BOS stand at the head of `ids`.
    pub fn leading_bos(&self, ids: &[u32], config: &ModelConfig) -> usize {
        let own = self.special_token("bos_token").and_then(|t| self.token_id(t));
        let Some(bos) = own.or(config.bos_token_id) else { return 0 };
        ids.iter().take_while(|id| **id == bos).count()
    }

    /// The ids that end a generation: those of config, generation_config and tokenizer together, sorted.
    ///
    /// Errors: [`Error::Malformed`], [`Error::Key`] for a generation_config that cannot be read.
    pub fn stop_ids(&self, dir: &Path, config: &ModelConfig) -> Result<Vec<u32>> {
        let mut ids: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
        if let Some(path) = side_file(dir, "generation_config.json")? {
            ids.extend(generation_eos(&path, &read_object(&path)?)?);
        }
        if let Some(eos) = self.special_token("eos_token") {
            ids.extend(self.token_id(eos));
        }
        Ok(ids.into_iter().collect())
    }
}

/// `eos_token_id` of a generation_config: absent, null, an id or a list of ids.
fn generation_eos(path: &Path, json: &Value) -> Result<Vec<u32>> {
    let wrong = |v: &Value| Error::Key {
        path: path.into(),
        key: "eos_token_id".into(),
        found: v.to_string(),
        expected: "a token id or a list of them".into(),
    };
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(v));
    match json.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

/// Special tokens of a tokenizer_config: each a string or an object with `content`.
fn special(path: &Path) -> Result<Vec<(&'static str, String)>> {
    let json = read_object(path)?;
    let mut found = Vec::new();
    for &name in SPECIAL {
        let text = match json.get(name) {
            None | Some(Value::Null) => continue,
            Some(Value::String(s)) => s.clone(),
            Some(v) => match v.get("content").and_then(Value::as_str) {
                Some(s) => s.to_owned(),
                None => {
                    let (key, found) = (name.to_owned(), v.to_string());
                    let expected = "a string or an object with content".into();
                    return Err(Error::Key { path: path.into(), key, found, expected });
                }
            },
        };
        found.push((name, text));
    }
    Ok(found)
}

/// Incremental decoding: text comes out as soon as it is whole UTF-8 and can no longer change.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Ids whose text has been given out.
    given: usize,
    /// Where the window starts that the next text is decoded in: one step before `given`, for decoders that look back.
    seen: usize,
}

impl TextStream<'_> {
    /// Takes the next id; the new text, empty while a character is incomplete.
    ///
    /// Errors: [`Error::Malformed`] as for [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let whole = self.tokenizer.decode(&self.ids[self.seen..], true)?;
        if whole.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.give(&whole)
    }

    /// What is left at the end, incomplete characters and all.
    ///
    /// Errors: as [`TextStream::push`].
    pub fn finish(mut self) -> Result<String> {
        let whole = self.tokenizer.decode(&self.ids[self.seen..], true)?;
        self.give(&whole)
    }

    fn give(&mut self, whole: &str) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[self.seen..self.given], true)?;
        let text = whole.get(before.len()..).unwrap_or_default().to_owned();
        self.seen = self.given;
        self.given = self.ids.len();
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
