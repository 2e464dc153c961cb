//! A folder of compiled ELFs, and what is known of them: our seal (`phasegate.json`), the shape tables beside the ELFs,
//! or upstream's `manifest.json`, which proves nothing about the content.
//!
//! Reads and hashes files; loads nothing into a device. An ELF is handed out as bytes that were hashed.

mod seal;
#[cfg(test)]
mod tests;
mod upstream;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

pub use seal::{Seal, SealEntry, ShapeTable, seal};

use self::upstream::Manifest;
use super::contract::{Contract, hex};
use crate::error::{Error, Result};

/// Our manifest's file name.
pub const SEAL: &str = "phasegate.json";

/// Upstream's manifest's file name.
pub const UPSTREAM: &str = "manifest.json";

/// A compiled dispatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    pub path: PathBuf,
    /// The kernel to open in it.
    pub kernel: String,
    pub bytes: Vec<u8>,
    /// Whether its content is the sealed one.
    pub sealed: bool,
}

/// A kernel cache as opened.
#[derive(Debug)]
pub struct KernelCache {
    dir: PathBuf,
    seal: Option<Seal>,
    /// Contract hash to file, of ELFs with a shape table and no seal.
    tables: BTreeMap<String, (PathBuf, ShapeTable)>,
    upstream: Option<Manifest>,
    warnings: Vec<String>,
    sealed_only: bool,
}

impl KernelCache {
    /// Opens a folder. With `sealed_only` every ELF in it must be sealed and unchanged.
    ///
    /// Errors: [`Error::Unavailable`] for a folder that is not there or holds no kernels, [`Error::Malformed`] for a
    /// manifest that cannot be read, [`Error::Refused`] naming the ELF that is changed, missing, sealed twice or, with
    /// `sealed_only`, unsealed.
    pub fn open(dir: &Path, sealed_only: bool) -> Result<KernelCache> {
        let absent =
            |why: &str| Error::Unavailable { what: format!("kernel cache {}", dir.display()), why: why.into() };
        if !dir.is_dir() {
            return Err(absent("no such folder"));
        }
        let seal = Seal::read(dir)?;
        let upstream = Manifest::read(dir)?;
        let mut cache =
            KernelCache { dir: dir.into(), seal, tables: BTreeMap::new(), upstream, warnings: vec![], sealed_only };
        match &cache.seal {
            Some(seal) if sealed_only => seal.check(dir, true)?,
            Some(_) => {}
            None if sealed_only => return Err(cache.unsealed()?),
            None => cache.tables = seal::tables(dir)?,
        }
        let proves_nothing = |of: &str| format!("{}: {of} proves nothing about the content of an ELF", dir.display());
        match (&cache.seal, cache.tables.is_empty(), &cache.upstream) {
            (Some(_), ..) => {}
            (None, false, _) => cache.warnings.push(proves_nothing("a shape table without a seal")),
            (None, true, Some(_)) => cache.warnings.push(proves_nothing("upstream's manifest")),
            (None, true, None) => return Err(absent(&format!("neither {SEAL} nor {UPSTREAM} in it"))),
        }
        Ok(cache)
    }

    /// Holds every sealed ELF against its seal and gives the entries; none without a seal.
    ///
    /// Errors: [`Error::Refused`] naming the ELF that is changed or missing.
    pub fn verify(&self) -> Result<&[SealEntry]> {
        let Some(seal) = &self.seal else { return Ok(&[]) };
        seal.check(&self.dir, false)?;
        Ok(&seal.entries)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What a reader of the results must know.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A hash over everything sealed, for keys of cached results; none without a seal.
    pub fn identity(&self) -> Option<String> {
        let seal = self.seal.as_ref()?;
        let all: Vec<_> = seal.entries.iter().map(|entry| (&entry.contract_sha256, &entry.sha256)).collect();
        Some(hex(&Sha256::digest(serde_json::to_vec(&all).expect("texts"))))
    }

    /// The ELF of a contract.
    ///
    /// Errors: [`Error::Unavailable`] when there is none, naming the contract and the shapes that there are;
    /// [`Error::Refused`] when it is not what was sealed.
    pub fn elf(&self, contract: &Contract) -> Result<Elf> {
        let hash = contract.hash();
        if let Some(seal) = &self.seal {
            if let Some(entry) = seal.entries.iter().find(|entry| entry.contract_sha256 == hash) {
                let path = self.dir.join(&entry.elf);
                let bytes = entry.verified(&path)?;
                return Ok(Elf { path, kernel: entry.kernel.clone(), bytes, sealed: true });
            }
        } else if let Some((path, table)) = self.tables.get(&hash) {
            let bytes = fs::read(path).map_err(Error::io(path))?;
            return Ok(Elf { path: path.clone(), kernel: table.kernel.clone(), bytes, sealed: false });
        }
        if !self.sealed_only
            && let Some(entry) = self.upstream.as_ref().and_then(|manifest| manifest.entry(&contract.id()))
        {
            let path = entry.path(&self.dir);
            let bytes = fs::read(&path).map_err(Error::io(&path))?;
            return Ok(Elf { path, kernel: entry.kernel.clone(), bytes, sealed: false });
        }
        Err(Error::Unavailable {
            what: format!("ELF of {}", contract.describe()),
            why: format!("{} holds none with this contract ({})", self.dir.display(), self.alike(contract)),
        })
    }

    /// What there is of the same kernels in other shapes.
    fn alike(&self, contract: &Contract) -> String {
        let sealed = self.seal.iter().flat_map(|seal| &seal.entries).map(|entry| &entry.contract);
        let known = sealed.chain(self.tables.values().map(|(_, table)| &table.contract));
        let id = contract.id();
        let mut shapes: Vec<String> = known.filter(|c| c.id() == id).map(Contract::describe).collect();
        shapes.sort();
        match shapes.len() {
            0 => format!("nor any {id}"),
            n if n <= 4 => format!("but {}", shapes.join(", ")),
            n => format!("but {}, {} and {} more", shapes[0], shapes[1], n - 2),
        }
    }

    /// The refusal of a folder without a seal, naming the first ELF that needs one.
    fn unsealed(&self) -> Result<Error> {
        let first = seal::elves(&self.dir)?.into_iter().next();
        let path = first.map_or_else(|| self.dir.clone(), |name| self.dir.join(name));
        Ok(refused(&path, "unsealed ELF", "seal the folder with `phasegate kernels --seal DIR`"))
    }
}

fn refused(path: &Path, what: &str, why: &str) -> Error {
    Error::Refused { path: path.into(), what: what.into(), why: why.into() }
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
