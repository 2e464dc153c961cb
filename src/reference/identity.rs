//! Whether a capture was made for this checkpoint and these prompts.

use std::collections::BTreeMap;

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

impl Capture {
    /// Refuses a capture that was made for other weights, files or prompts. Both sides must name the same things.
    ///
    /// Errors: [`Error::Capture`] naming what differs.
    pub fn matches(&self, identity: &Identity) -> Result<()> {
        let own = self.identity();
        let differences: Vec<String> = [
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
        let mut why = differences[..differences.len().min(NAMED)].join("; ");
        if differences.len() > NAMED {
            why.push_str(&format!("; and {} more", differences.len() - NAMED));
        }
        Err(Error::Capture { path: self.path().to_owned(), why })
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
