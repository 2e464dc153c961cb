//! Prompt files and the prompts made of them, rendered and tokenised.
//!
//! One prompt a line; `#` lines and blank lines are ignored; an expectation may follow ` => `, alternatives ` | `.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::chat_template::{ChatTemplate, Message};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

const MAX_PROMPT_FILE_BYTES: u64 = 16 << 20;

/// A set of prompts; the chat set is the instructions through the chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSet {
    Base,
    Instruct,
    Chat,
    Long,
}

impl PromptSet {
    pub const ALL: [PromptSet; 4] = [PromptSet::Base, PromptSet::Instruct, PromptSet::Chat, PromptSet::Long];

    /// What ids and manifests call it.
    pub fn name(self) -> &'static str {
        match self {
            PromptSet::Base => "base",
            PromptSet::Instruct => "instruct",
            PromptSet::Chat => "chat",
            PromptSet::Long => "long",
        }
    }

    /// The name that the capture's `prompts_sha256` has this set's file under.
    pub fn file_key(self) -> &'static str {
        match self {
            PromptSet::Chat => "instruct",
            set => set.name(),
        }
    }

    /// The file its lines come from.
    pub fn file(self, root: &Path) -> PathBuf {
        root.join("prompts").join(format!("{}.txt", self.file_key()))
    }

    /// Whether a capture keeps layer outputs of its first prompt.
    pub fn has_lens(self) -> bool {
        self != PromptSet::Instruct
    }

    /// The set of a prompt id such as `base_00`.
    pub fn of_id(id: &str) -> Option<PromptSet> {
        let (set, number) = id.rsplit_once('_')?;
        let numbered = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        Self::ALL.into_iter().find(|s| numbered && s.name() == set)
    }
}

impl std::str::FromStr for PromptSet {
    type Err = Error;

    fn from_str(s: &str) -> Result<PromptSet> {
        Self::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| Error::Unknown {
            kind: "prompt set",
            name: s.into(),
            known: Self::ALL.map(PromptSet::name).join(", "),
        })
    }
}

/// One line of a prompt file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    /// Beginnings of the continuation, any of which is right; empty where nothing is expected.
    pub expect: Vec<String>,
}

/// One prompt as it is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// `base_00`, `instruct_00`, `chat_00`, `long_00` ...
    pub id: String,
    pub set: PromptSet,
    /// The line.
    pub text: String,
    /// What is tokenised: the line, or the chat template's text around it.
    pub rendered: String,
    pub ids: Vec<u32>,
    pub expect: Vec<String>,
}

/// Loads one set, tokenised: raw lines with the tokenizer's own special tokens, chats without, as the template has
/// written them.
///
/// Errors: those of the file, of the template ([`Error::Unavailable`] where there is none) and of the tokenizer.
pub fn load(
    root: &Path,
    set: PromptSet,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<Prompt>> {
    let path = set.file(root);
    let lines = read(&path)?;
    lines.into_iter().enumerate().map(|(i, line)| prompt(set, i, line, tokenizer, template)).collect()
}

fn prompt(
    set: PromptSet,
    i: usize,
    line: Line,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Prompt> {
    let id = id(set, i);
    let rendered = match (set, template) {
        (PromptSet::Chat, Some(t)) => t.render(tokenizer, &[Message::user(line.text.as_str())], true)?,
        (PromptSet::Chat, None) => {
            let why = "the checkpoint has no chat_template.jinja and no chat_template in tokenizer_config.json";
            return Err(Error::Unavailable { what: format!("prompt {id}"), why: why.into() });
        }
        _ => line.text.clone(),
    };
    let ids = tokenizer.encode(&rendered, set != PromptSet::Chat)?;
    Ok(Prompt { id, set, text: line.text, rendered, ids, expect: line.expect })
}

/// The id of a set's n-th prompt.
pub fn id(set: PromptSet, i: usize) -> String {
    format!("{}_{i:02}", set.name())
}

/// The ids of a set's prompts, without opening a model: for listing tests.
///
/// Errors: those of [`read`].
pub fn list(root: &Path, set: PromptSet) -> Result<Vec<String>> {
    Ok((0..read(&set.file(root))?.len()).map(|i| id(set, i)).collect())
}

/// Reads a prompt file.
///
/// Errors: [`Error::Io`]; [`Error::Malformed`] where it is not text, or holds no prompt or an empty one.
pub fn read(path: &Path) -> Result<Vec<Line>> {
    let size = std::fs::metadata(path).map_err(Error::io(path))?.len();
    if size > MAX_PROMPT_FILE_BYTES {
        return Err(Error::malformed(path, format!("{size} bytes, expected at most {MAX_PROMPT_FILE_BYTES}")));
    }
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let text = String::from_utf8(bytes).map_err(|_| Error::malformed(path, "not UTF-8, expected text"))?;
    parse(path, &text)
}

/// Parses a prompt file's text; `path` is for messages only.
///
/// Errors: as [`read`].
pub fn parse(path: &Path, text: &str) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = |why: &str| Error::malformed(path, format!("line {}: {why}", n + 1));
        let (prompt, expect) = match line.split_once(" => ") {
            None if line.starts_with("=> ") => return Err(bad("an expectation without a prompt")),
            None if line.ends_with(" =>") => return Err(bad("nothing after =>, expected the continuation")),
            None => (line, Vec::new()),
            Some((prompt, expect)) => {
                let alternatives: Vec<String> = expect.split(" | ").map(|s| s.trim().to_owned()).collect();
                if alternatives.iter().any(String::is_empty) {
                    return Err(bad("an empty alternative in the expectation"));
                }
                (prompt.trim(), alternatives)
            }
        };
        lines.push(Line { text: prompt.to_owned(), expect });
    }
    if lines.is_empty() {
        return Err(Error::malformed(path, "no prompt in it, expected at least one line"));
    }
    Ok(lines)
}

/// Whether a continuation is what a prompt expects; true where it expects nothing.
pub fn as_expected(continuation: &str, expect: &[String]) -> bool {
    let text = continuation.trim_start();
    expect.is_empty() || expect.iter().any(|e| text.starts_with(e.as_str()))
}
