//! Our manifest of a kernel cache: which ELF is which contract, by the hash of its content.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::upstream::Manifest;
use super::{SEAL, UPSTREAM, refused, sha256};
use crate::begun::write_atomically;
use crate::error::{Error, Result};
use crate::kernel::contract::Contract;

const SCHEMA: &str = "phasegate/kernels/1";

/// What stands beside an ELF, as `<stem>.json`: whoever compiles one writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapeTable {
    /// The kernel to open.
    pub kernel: String,
    pub contract: Contract,
    /// Name to version of what compiled it.
    #[serde(default)]
    pub toolchain: BTreeMap<String, String>,
    /// Flags it was compiled with.
    #[serde(default)]
    pub flags: Vec<String>,
}

/// One sealed ELF.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealEntry {
    /// File name in the cache's folder.
    pub elf: String,
    pub sha256: String,
    pub kernel: String,
    pub contract_sha256: String,
    pub contract: Contract,
    pub toolchain: BTreeMap<String, String>,
    pub flags: Vec<String>,
}

/// The manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    pub schema: String,
    pub entries: Vec<SealEntry>,
}

impl SealEntry {
    /// The file's bytes, if they are the sealed ones.
    ///
    /// Errors: [`Error::Refused`] for a missing or changed ELF.
    pub(super) fn verified(&self, path: &Path) -> Result<Vec<u8>> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(refused(path, "missing ELF", "it is sealed and not there"));
            }
            Err(e) => return Err(Error::io(path)(e)),
        };
        let found = sha256(&bytes);
        if found == self.sha256 {
            return Ok(bytes);
        }
        let why = format!("found sha256 {}, sealed is {}", &found[..16], self.sha256.get(..16).unwrap_or("nothing"));
        Err(refused(path, "changed ELF", &why))
    }
}

impl Seal {
    /// The seal of a folder, if it has one.
    pub(super) fn read(dir: &Path) -> Result<Option<Seal>> {
        let path = dir.join(SEAL);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&path)(e)),
        };
        let seal: Seal = serde_json::from_str(&text).map_err(|e| Error::not_json(&path, text.as_bytes(), &e))?;
        if seal.schema != SCHEMA {
            return Err(Error::malformed(&path, format!("schema: found {:?}, expected {SCHEMA:?}", seal.schema)));
        }
        for entry in &seal.entries {
            if entry.contract.hash() != entry.contract_sha256 {
                return Err(refused(&dir.join(&entry.elf), "changed contract", "it is not the one that was sealed"));
            }
            if Path::new(&entry.elf).components().count() != 1 {
                return Err(refused(&dir.join(&entry.elf), "ELF", "a sealed ELF lies in the cache's own folder"));
            }
        }
        distinct(dir, &seal.entries)?;
        Ok(Some(seal))
    }

    /// Every sealed ELF is there and unchanged; with `all`, no other lies beside them.
    pub(super) fn check(&self, dir: &Path, all: bool) -> Result<()> {
        for entry in &self.entries {
            entry.verified(&dir.join(&entry.elf))?;
        }
        if !all {
            return Ok(());
        }
        let stranger = elves(dir)?.into_iter().find(|name| !self.entries.iter().any(|entry| entry.elf == *name));
        match stranger {
            None => Ok(()),
            Some(name) => Err(refused(&dir.join(name), "unsealed ELF", "it is not in the seal of its folder")),
        }
    }
}

/// One content is one contract, and one contract one ELF.
fn distinct(dir: &Path, entries: &[SealEntry]) -> Result<()> {
    let mut contents: BTreeMap<&str, &SealEntry> = BTreeMap::new();
    let mut contracts: BTreeMap<&str, &SealEntry> = BTreeMap::new();
    for entry in entries {
        let path = dir.join(&entry.elf);
        if let Some(other) = contents.insert(&entry.sha256, entry) {
            let why = format!("the same content as {}, which is {}", other.elf, other.contract.describe());
            return Err(refused(&path, "duplicated ELF", &why));
        }
        if let Some(other) = contracts.insert(&entry.contract_sha256, entry) {
            return Err(refused(&path, "duplicated contract", &format!("{} is of the same contract", other.elf)));
        }
    }
    Ok(())
}

/// Names of the ELFs in a folder, sorted.
pub(super) fn elves(dir: &Path) -> Result<Vec<String>> {
    let mut names = vec![];
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let name = entry.map_err(Error::io(dir))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".elf") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Contract hash to ELF, of those with a shape table beside them.
pub(super) fn tables(dir: &Path) -> Result<BTreeMap<String, (PathBuf, ShapeTable)>> {
    let mut tables = BTreeMap::new();
    for name in elves(dir)? {
        if let Some(table) = table(dir, &name)? {
            tables.insert(table.contract.hash(), (dir.join(name), table));
        }
    }
    Ok(tables)
}

fn table(dir: &Path, elf: &str) -> Result<Option<ShapeTable>> {
    let path = dir.join(elf).with_extension("json");
    match fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|e| Error::not_json(&path, text.as_bytes(), &e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(&path)(e)),
    }
}

/// Seals a folder: every ELF in it with the contract of its shape table, under the hash of its content. Writes
/// `phasegate.json` whole or not at all.
///
/// Errors: [`Error::Refused`] naming an ELF without a shape table, or one whose content or contract another has too;
/// [`Error::Unavailable`] for a folder without ELFs.
pub fn seal(dir: &Path) -> Result<Seal> {
    let upstream = Manifest::read(dir)?;
    let mut entries = vec![];
    for name in elves(dir)? {
        let path = dir.join(&name);
        let Some(table) = table(dir, &name)? else {
            let beside = path.with_extension("json");
            let beside = beside.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let why = format!("no shape table {beside} beside it, so nothing says what it computes");
            return Err(refused(&path, "ELF", &why));
        };
        let bytes = fs::read(&path).map_err(Error::io(&path))?;
        let mut toolchain = upstream.as_ref().map(|manifest| manifest.toolchain.clone()).unwrap_or_default();
        toolchain.extend(table.toolchain);
        entries.push(SealEntry {
            elf: name,
            sha256: sha256(&bytes),
            kernel: table.kernel,
            contract_sha256: table.contract.hash(),
            contract: table.contract,
            toolchain,
            flags: table.flags,
        });
    }
    if entries.is_empty() {
        let why = format!("no ELF in it (neither sealed nor named by {UPSTREAM})");
        return Err(Error::Unavailable { what: format!("kernel cache {}", dir.display()), why });
    }
    distinct(dir, &entries)?;
    let seal = Seal { schema: SCHEMA.into(), entries };
    let path = dir.join(SEAL);
    let text = serde_json::to_string_pretty(&seal).map_err(|e| Error::malformed(&path, e.to_string()))?;
    write_atomically(&path, text.as_bytes())?;
    Ok(seal)
}
