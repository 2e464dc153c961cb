//! A checkpoint's chat template, found in HF's order of precedence and rendered with HF's conventions.
//!
//! Source: transformers 5.24.0 `chat_template_utils.py` (trim_blocks, lstrip_blocks, Python methods,
//! `raise_exception`, `strftime_now`, its own `tojson`, the `generation` block). The date is fixed.

mod python;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value, context};
use serde_json::Value as Json;

use super::checkpoint::side_file;
use super::config::read_object;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// The date of every rendering, as Llama's templates print it; captures are made with the same.
pub const DATE_STRING: &str = "26 Jul 2024";
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Steps that a template may take: far above any real one, so that none runs for ever.
const FUEL: u64 = 10_000_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub role: String,
    pub content: String,
}

impl Message {
    pub fn user(content: impl Into<String>) -> Message {
        Message { role: "user".into(), content: content.into() }
    }

    /// Role before content, as a Python dictionary written in that order has it.
    fn value(&self) -> Value {
        context! { role => self.role.as_str(), content => self.content.as_str() }
    }

    pub fn assistant(content: impl Into<String>) -> Message {
        Message { role: "assistant".into(), content: content.into() }
    }
}

/// A template's source; compiled only when it is rendered, so that what nobody uses is never refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The file that it stands in.
    pub path: PathBuf,
    pub source: String,
}

impl ChatTemplate {
    /// `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, as a string or the entry `default` of a
    /// list; none where there is neither.
    ///
    /// Errors: [`Error::Io`], [`Error::Malformed`], [`Error::Key`].
    pub fn open(dir: &Path) -> Result<Option<ChatTemplate>> {
        if let Some(path) = side_file(dir, "chat_template.jinja")? {
            let size = std::fs::metadata(&path).map_err(Error::io(&path))?.len();
            if size > MAX_TEMPLATE_BYTES {
                return Err(Error::malformed(&path, format!("{size} bytes, expected at most {MAX_TEMPLATE_BYTES}")));
            }
            let source = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
            return Ok(Some(ChatTemplate { path, source }));
        }
        let Some(path) = side_file(dir, "tokenizer_config.json")? else { return Ok(None) };
        let json = read_object(&path)?;
        Ok(from_config(&path, json.get("chat_template"))?.map(|source| ChatTemplate { path, source }))
    }

    /// The text that HF's `apply_chat_template(messages, tokenize=False)` gives; to be tokenised without adding
    /// special tokens.
    ///
    /// Errors: [`Error::Refused`] where the template raises an exception, [`Error::Malformed`] where it does not
    /// compile or asks for what is not there.
    pub fn render(&self, tokenizer: &Tokenizer, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_with(tokenizer.special_tokens(), messages, add_generation_prompt)
    }

    fn render_with(&self, special: &[(&str, String)], messages: &[Message], generate: bool) -> Result<String> {
        let source = python::generation_blocks(&self.source);
        let environment = environment().map_err(|e| self.error(&e))?;
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let mut variables: BTreeMap<String, Value> =
            special.iter().map(|(n, t)| (n.to_string(), t.as_str().into())).collect();
        variables.insert("messages".into(), messages.into());
        variables.insert("add_generation_prompt".into(), generate.into());
        variables.insert("date_string".into(), DATE_STRING.into());
        variables.insert("tools".into(), Value::from(()));
        variables.insert("documents".into(), Value::from(()));
        let template = environment.template_from_str(&source).map_err(|e| self.error(&e))?;
        template.render(Value::from(variables)).map_err(|e| self.error(&e))
    }

    fn error(&self, e: &minijinja::Error) -> Error {
        let detail = e.detail().unwrap_or_default();
        match detail.strip_prefix(python::RAISED) {
            Some(message) => Error::Refused {
                path: self.path.clone(),
                what: "chat template".into(),
                why: format!("it raised: {message}"),
            },
            None => {
                let line = e.line().map_or(String::new(), |n| format!(", line {n}"));
                Error::malformed(&self.path, format!("chat template{line}: {}: {detail}", e.kind()))
            }
        }
    }
}

/// The jinja2 environment that HF builds, in minijinja's terms.
fn environment() -> std::result::Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", python::raise_exception);
    environment.add_function("strftime_now", python::strftime_now);
    environment.add_filter("tojson", python::tojson);
    environment.set_fuel(Some(FUEL));
    Ok(environment)
}

/// `chat_template` of a tokenizer_config: a string, or a list of `{name, template}`.
fn from_config(path: &Path, value: Option<&Json>) -> Result<Option<String>> {
    let wrong = |found: &str, expected: &str| Error::Key {
        path: path.into(),
        key: "chat_template".into(),
        found: found.into(),
        expected: expected.into(),
    };
    match value {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(s)) => Ok(Some(s.clone())),
        Some(Json::Array(list)) => {
            let name = |v: &Json| v.get("name").and_then(Json::as_str).map(str::to_owned);
            let default = list.iter().find(|v| name(v).as_deref() == Some("default"));
            match default.and_then(|v| v.get("template")).and_then(Json::as_str) {
                Some(s) => Ok(Some(s.to_owned())),
                None => {
                    let names: Vec<String> = list.iter().filter_map(name).collect();
                    Err(wrong(&format!("templates {names:?}"), "one named default, with its template"))
                }
            }
        }
        Some(_) => Err(wrong("another value", "a string or a list of templates")),
    }
}
