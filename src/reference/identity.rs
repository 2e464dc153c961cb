//! Whether a capture was made for this checkpoint and these prompts.

use std::collections::BTreeMap;

use serde_json::Value;

use super::capture::Capture;
use crate::error::{Error, Result};

/// Hashes of what is loaded, computed by whoever loaded it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Tensor name -> sha256 (hex) of its bytes as stored.
    pub weights_sha256: BTreeMap<String, String>,
    /// File name (`config.json`, `tokenizer.json`, ...) -> sha256 of its bytes.
    pub files_sha256: BTreeMap<String, String>,
    /// Prompt file (`base`, `instruct`, `long`) -> sha256 of its bytes.
    pub prompts_sha256: BTreeMap<String, String>,
}

/// Names given in a message before "and n more".
const NAMED: usize = 3;

/// The side file of which a capture holds more than the hash: what HF made of it.
const CONFIG: &str = "config.json";

impl Capture {
    /// Refuses a capture that was made for other weights, files or prompts. Both sides must name the same things.
    /// `config_differences` tells what the loaded config has otherwise than HF's resolved one; it is asked only where the
    /// hashes of `config.json` differ.
    ///
    /// Errors: [`Error::Capture`] naming what differs; those of `config_differences`.
    pub fn matches(
        &self,
        identity: &Identity,
        config_differences: impl FnOnce(&Value) -> Result<Vec<String>>,
    ) -> Result<()> {
        let own = self.identity();
        let mut differences: Vec<String> = [
            ("weights", &own.weights_sha256, &identity.weights_sha256),
            ("file", &own.files_sha256, &identity.files_sha256),
            ("prompt file", &own.prompts_sha256, &identity.prompts_sha256),
        ]
        .into_iter()
        .flat_map(|(kind, captured, loaded)| differences(kind, captured, loaded))
        .collect();
        if differences.is_empty() {
            return Ok(());
        }
        if let Some(config) = differences.iter_mut().find(|d| d.starts_with(&format!("file {CONFIG}: sha256 "))) {
            let keys = config_differences(self.resolved_config())?;
            let none = "no key of another value than HF resolved it to";
            config.push_str(&format!(" ({})", if keys.is_empty() { none.into() } else { first(&keys) }));
        }
        Err(Error::Capture { path: self.path().to_owned(), why: first(&differences) })
    }
}

/// The first few, and how many more.
fn first(all: &[String]) -> String {
    let named = all[..all.len().min(NAMED)].join("; ");
    match all.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}

fn differences(kind: &str, captured: &BTreeMap<String, String>, loaded: &BTreeMap<String, String>) -> Vec<String> {
    let short = |hash: &String| hash.chars().take(12).collect::<String>();
    let ours = captured.iter().filter_map(|(name, then)| match loaded.get(name) {
        None => Some(format!("{kind} {name}: captured, not loaded")),
        Some(now) if !now.eq_ignore_ascii_case(then) => {
            Some(format!("{kind} {name}: sha256 {} loaded, {} captured", short(now), short(then)))
        }
        Some(_) => None,
    });
    let theirs = loaded.keys().filter(|name| !captured.contains_key(*name));
    ours.chain(theirs.map(|name| format!("{kind} {name}: loaded, not captured"))).collect()
}
