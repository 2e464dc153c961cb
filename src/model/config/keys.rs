//! Typed access to one JSON object of a config, keeping account of every key touched.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// What a key holds: `null` is told from absence because a few HF classes tell them apart.
pub enum Slot<'a> {
    Absent,
    Null,
    Set(&'a Value),
}

/// A JSON object, where it stands in the file, and what became of its keys.
pub struct Keys<'a> {
    pub path: &'a Path,
    /// `""`, or `rope_parameters.` for a nested object.
    prefix: String,
    map: &'a Map<String, Value>,
    /// Key -> none when used, else why it is irrelevant.
    seen: BTreeMap<String, Option<String>>,
}

impl<'a> Keys<'a> {
    pub fn new(path: &'a Path, prefix: &str, map: &'a Map<String, Value>) -> Keys<'a> {
        Keys { path, prefix: prefix.into(), map, seen: BTreeMap::new() }
    }

    /// Looks without marking the key as used.
    pub fn peek(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Takes a key: from here on it counts as used.
    pub fn slot(&mut self, key: &str) -> Slot<'a> {
        match self.map.get(key) {
            None => Slot::Absent,
            Some(Value::Null) => {
                self.seen.insert(key.into(), None);
                Slot::Null
            }
            Some(v) => {
                self.seen.insert(key.into(), None);
                Slot::Set(v)
            }
        }
    }

    /// Takes a key where null means absent.
    pub fn value(&mut self, key: &str) -> Option<&'a Value> {
        match self.slot(key) {
            Slot::Set(v) => Some(v),
            Slot::Absent | Slot::Null => None,
        }
    }

    /// Takes a key that changes nothing, and says why.
    pub fn irrelevant(&mut self, key: &str, reason: &str) {
        if self.map.contains_key(key) {
            self.seen.insert(key.into(), Some(reason.into()));
        }
    }

    /// Every key with its account: used (none), irrelevant (a reason), or absent from the account.
    pub fn account(&self) -> impl Iterator<Item = (&'a String, &'a Value, Option<&Option<String>>)> {
        self.map.iter().map(|(k, v)| (k, v, self.seen.get(k)))
    }

    /// A key's full name in messages.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// A value that cannot be right.
    pub fn wrong(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::Key { path: self.path.into(), key: self.name(key), found: found.into(), expected: expected.into() }
    }

    /// A sound value that is out of scope; `what` names key and value.
    pub fn refused(&self, key: &str, value: &Value, why: impl Into<String>) -> Error {
        Error::Refused {
            path: self.path.into(),
            what: format!("{} = {}", self.name(key), brief(value)),
            why: why.into(),
        }
    }

    /// A required value.
    pub fn required(&self, key: &str, expected: &str) -> Error {
        let found = if self.map.contains_key(key) { "null" } else { "nothing" };
        self.wrong(key, found, expected)
    }

    /// A size: a whole number from 1 to `max`.
    pub fn size(&mut self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(v) = self.value(key) else { return Ok(None) };
        match v.as_u64() {
            Some(n) if n >= 1 && n <= max as u64 => Ok(Some(n as usize)),
            _ => Err(self.wrong(key, brief(v), format!("a whole number from 1 to {max}"))),
        }
    }

    /// A number that is computed with in f32, where it must be `sound`; `expected` says what that is.
    pub fn f32(&mut self, key: &str, expected: &str, sound: impl Fn(f32) -> bool) -> Result<Option<f64>> {
        let Some(v) = self.value(key) else { return Ok(None) };
        match v.as_f64() {
            Some(x) if (x as f32).is_finite() && sound(x as f32) => Ok(Some(x)),
            _ => Err(self.wrong(key, brief(v), expected)),
        }
    }

    pub fn bool(&mut self, key: &str) -> Result<Option<bool>> {
        let Some(v) = self.value(key) else { return Ok(None) };
        v.as_bool().map(Some).ok_or_else(|| self.wrong(key, brief(v), "true or false"))
    }

    pub fn string(&mut self, key: &str) -> Result<Option<&'a str>> {
        let Some(v) = self.value(key) else { return Ok(None) };
        v.as_str().map(Some).ok_or_else(|| self.wrong(key, brief(v), "a string"))
    }

    /// An object; an empty one counts as absent, as HF's truth test has it.
    pub fn object(&mut self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        let Some(v) = self.value(key) else { return Ok(None) };
        let map = v.as_object().ok_or_else(|| self.wrong(key, brief(v), "an object"))?;
        Ok((!map.is_empty()).then_some(map))
    }

    /// A token id below `vocab_size`, or a list of them.
    pub fn token_ids(&self, key: &str, v: &Value, vocab_size: usize) -> Result<Vec<u32>> {
        let one = |v: &Value| match v.as_u64() {
            Some(id) if id < vocab_size as u64 => Ok(id as u32),
            _ => Err(self.wrong(key, brief(v), format!("a token id below vocab_size {vocab_size}"))),
        };
        match v {
            Value::Array(ids) => ids.iter().map(one).collect(),
            v => Ok(vec![one(v)?]),
        }
    }
}

/// A JSON value in few characters.
pub fn brief(v: &Value) -> String {
    let text = v.to_string();
    match text.char_indices().nth(80) {
        None => text,
        Some((i, _)) => format!("{}...", &text[..i]),
    }
}
