//! Upstream's `manifest.json`, as its KernelCache writes it: read, never written.
//!
//! It says which file an ELF name stands for and which kernel to open in it. It knows no shape, no argument and no hash.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::UPSTREAM;
use crate::error::{Error, Result};

/// One compiled dispatch.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Entry {
    /// Absolute where it was compiled.
    output_binary: String,
    /// `main:<instance>`.
    pub kernel: String,
}

impl Entry {
    /// Where it lies now: as written, or by its name in the cache's folder, for a cache that was moved.
    pub fn path(&self, dir: &Path) -> PathBuf {
        let written = PathBuf::from(&self.output_binary);
        let here = written.file_name().map(|name| dir.join(name));
        here.filter(|path| path.exists()).unwrap_or(written)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Manifest {
    /// Versions as upstream notes them.
    pub toolchain: BTreeMap<String, String>,
    /// ELF name, which is a dispatch's id, to entry.
    entries: BTreeMap<String, Entry>,
}

impl Manifest {
    /// The manifest of a folder, if it has one.
    ///
    /// Errors: [`Error::Malformed`].
    pub fn read(dir: &Path) -> Result<Option<Manifest>> {
        #[derive(Deserialize)]
        struct File {
            #[serde(rename = "_toolchain", default)]
            toolchain: BTreeMap<String, String>,
            entries: BTreeMap<String, Entry>,
        }
        let path = dir.join(UPSTREAM);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&path)(e)),
        };
        let file: File = serde_json::from_str(&text).map_err(|e| Error::not_json(&path, text.as_bytes(), &e))?;
        Ok(Some(Manifest { toolchain: file.toolchain, entries: file.entries }))
    }

    pub fn entry(&self, id: &str) -> Option<&Entry> {
        self.entries.get(id)
    }
}
