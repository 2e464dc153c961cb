//! `fixtures/<name>/manifest.toml`: which checkpoint a fixture is, which prompts it runs, where it came from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::prompts::PromptSet;
use crate::error::{Error, Result};

/// The file's name inside a fixture.
pub const MANIFEST_FILE: &str = "manifest.toml";
/// The capture's name inside a fixture.
pub const REFERENCE_FILE: &str = "reference.safetensors";

/// One fixture.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub name: String,
    pub licence: String,
    pub made_by: String,
    /// The prefill bucket: prompts are padded to it at most.
    pub seq_len: usize,
    pub prompts: Vec<PromptSet>,
    /// Prompts whose expectation holds for this model.
    #[serde(default)]
    pub expects: Vec<String>,
    pub default_variant: String,
    /// How to get the checkpoint, where it is not embedded.
    pub make: Option<String>,
    /// The engine that `--device external` gates: program and arguments, started at the project root.
    #[serde(default)]
    pub runner: Vec<String>,
    pub variants: BTreeMap<String, Variant>,
    /// The fixture's folder.
    #[serde(skip)]
    pub dir: PathBuf,
}

/// One checkpoint of a fixture.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// `embedded`, a path from the root, or `hf:ORG/NAME@REVISION`.
    pub checkpoint: String,
    /// The set that commands run unless told otherwise.
    pub prompts: PromptSet,
}

impl Manifest {
    /// Reads `manifest.toml` in `dir`.
    ///
    /// Errors: [`Error::Io`]; [`Error::Malformed`] for bad TOML, unknown keys and values that contradict.
    pub fn read(dir: &Path) -> Result<Manifest> {
        let path = dir.join(MANIFEST_FILE);
        let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
        let mut manifest = Self::parse(&path, &text)?;
        if dir.file_name().and_then(|n| n.to_str()) != Some(manifest.name.as_str()) {
            return Err(Error::malformed(
                &path,
                format!("name: found {:?}, expected the folder's name", manifest.name),
            ));
        }
        manifest.dir = dir.into();
        Ok(manifest)
    }

    /// Parses a manifest's text; `path` is for messages only.
    ///
    /// Errors: [`Error::Malformed`].
    pub fn parse(path: &Path, text: &str) -> Result<Manifest> {
        let bad = |why: String| Error::malformed(path, why);
        let m: Manifest = toml::from_str(text).map_err(|e| bad(e.to_string().trim().replace('\n', " ")))?;
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if m.name.is_empty() || !m.name.chars().all(plain) {
            return Err(bad(format!(
                "name: found {:?}, expected letters a-z, digits and _ (it is part of test names)",
                m.name
            )));
        }
        if m.seq_len == 0 {
            return Err(bad("seq_len: found 0, expected a number of positions".into()));
        }
        if !m.variants.contains_key(&m.default_variant) {
            let known: Vec<&str> = m.variants.keys().map(String::as_str).collect();
            return Err(bad(format!("default_variant: found {:?}, expected one of {known:?}", m.default_variant)));
        }
        if let Some(id) = m.expects.iter().find(|id| PromptSet::of_id(id).is_none_or(|s| !m.prompts.contains(&s))) {
            return Err(bad(format!("expects: found {id:?}, expected an id of one of its prompt sets")));
        }
        Ok(m)
    }

    /// A variant by name, or the default one.
    ///
    /// Errors: [`Error::Unknown`].
    pub fn variant(&self, name: Option<&str>) -> Result<&Variant> {
        let name = name.unwrap_or(&self.default_variant);
        self.variants.get(name).ok_or_else(|| Error::Unknown {
            kind: "variant",
            name: format!("{}:{name}", self.name),
            known: self.variants.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// Where the capture is, or would be.
    pub fn reference(&self) -> PathBuf {
        self.dir.join(REFERENCE_FILE)
    }
}

/// Every fixture under `root`, sorted by name; opens no checkpoint.
///
/// Errors: [`Error::Io`], and those of [`Manifest::read`].
pub fn fixtures(root: &Path) -> Result<Vec<Manifest>> {
    let dir = root.join("fixtures");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(Error::io(&dir))? {
        let path = entry.map_err(Error::io(&dir))?.path();
        if path.join(MANIFEST_FILE).is_file() {
            found.push(Manifest::read(&path)?);
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}
