//! Records on disk, so that nextest's process per test costs one prefill and not thirty.
//!
//! `<work dir>/runs/<hash of binary>/<hash of everything else>.safetensors`, made under one lock for all binaries and then renamed. The
//! key covers all that a record depends on; a record that cannot be read is made again, and one that cannot be written
//! is only not there the next time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Record, TapRequest};
use crate::begun::not_kept;
use crate::error::{Error, Result};
use crate::model::hashes::{cache_dir, keep, sha256, sha256_file, state};
use crate::plan::Plan;
use crate::settings;

/// Folders of other binaries that are kept; the oldest go.
const BINARIES_KEPT: usize = 12;

/// Everything a record depends on beside the binary.
#[derive(Debug, Clone, Serialize)]
pub struct RunKey {
    /// One hash over all weights.
    pub weights: String,
    pub plans: Vec<String>,
    /// Label, datapath and instruction set; never the number of threads.
    pub device: String,
    pub ids: Vec<u32>,
    pub teacher: Vec<u32>,
    pub steps: usize,
    pub taps: TapRequest,
    /// Faults in force, by name and parameters.
    pub faults: Vec<String>,
}

impl RunKey {
    fn hash(&self) -> Result<String> {
        let text = serde_json::to_vec(self).map_err(|e| Error::malformed("run key", e.to_string()))?;
        Ok(sha256(&text))
    }
}

/// A short hash of a plan, for [`RunKey::plans`].
pub fn plan_hash(plan: &Plan) -> String {
    sha256(format!("{plan:?}").as_bytes())
}

/// Where records of this binary are kept, or nowhere.
#[derive(Debug, Clone)]
pub struct RunCache {
    dir: Option<PathBuf>,
}

impl RunCache {
    /// The cache of this process's binary; off when `PHASEGATE_RUN_CACHE=off`.
    ///
    /// Errors: [`Error::Io`] when the binary cannot be read, [`Error::Usage`] for another value of that variable.
    pub fn open() -> Result<RunCache> {
        if !settings::run_cache()? {
            return Ok(RunCache::off());
        }
        let exe = std::env::current_exe().map_err(Error::io("this binary"))?;
        Ok(RunCache::at(settings::work_dir().join("runs"), &binary_hash(&exe)?[..16]))
    }

    /// A cache that keeps nothing.
    pub fn off() -> RunCache {
        RunCache { dir: None }
    }

    /// A cache under `root` for the binary with this hash.
    pub fn at(root: PathBuf, binary: &str) -> RunCache {
        RunCache { dir: Some(root.join(binary)) }
    }

    /// The record of `key` if it is there.
    ///
    /// Errors: none that a sound key can cause.
    pub fn get(&self, key: &RunKey) -> Result<Option<Record>> {
        let Some(dir) = &self.dir else { return Ok(None) };
        Ok(load(&record_path(dir, key)?))
    }

    /// The record of `key`: read if it is there, else made by `run`. One process runs at a time: two that share the
    /// cores would only slow each other down, and the next one may find its record made meanwhile.
    ///
    /// Errors: those of `run`. A cache that cannot be written is only slow.
    pub fn get_or_run(&self, key: &RunKey, run: impl FnOnce() -> Result<Record>) -> Result<Record> {
        let Some(dir) = &self.dir else { return run() };
        let path = record_path(dir, key)?;
        if let Some(record) = load(&path) {
            return Ok(record);
        }
        let _lock = match lock(dir) {
            Ok(lock) => lock,
            Err(error) => {
                not_kept(&error);
                return run();
            }
        };
        if let Some(record) = load(&path) {
            return Ok(record);
        }
        let record = run()?;
        keep(&path, &record.to_bytes(&path)?);
        Ok(record)
    }
}

/// Makes the folder of one binary's records and takes the lock of all of them.
fn lock(dir: &Path) -> Result<File> {
    if !dir.exists() {
        fs::create_dir_all(dir).map_err(Error::io(dir))?;
        prune(dir);
    }
    let path = dir.parent().unwrap_or(dir).join("running.lock");
    let lock = File::create(&path).map_err(Error::io(&path))?;
    lock.lock().map_err(Error::io(&path))?;
    Ok(lock)
}

/// Content hash of a binary; remembered by path, size and time of change, since every test process asks for it.
fn binary_hash(exe: &Path) -> Result<String> {
    let seen = format!("{} {}", exe.display(), state(exe)?);
    let known = cache_dir().join(format!("binary-{}", sha256(seen.as_bytes())));
    match fs::read_to_string(&known) {
        Ok(hash) if hash.len() == 64 => Ok(hash),
        _ => {
            let hash = sha256_file(exe)?;
            keep(&known, hash.as_bytes());
            Ok(hash)
        }
    }
}

fn record_path(dir: &Path, key: &RunKey) -> Result<PathBuf> {
    Ok(dir.join(format!("{}.safetensors", key.hash()?)))
}

fn load(path: &Path) -> Option<Record> {
    Record::from_bytes(&fs::read(path).ok()?, path).ok()
}

/// Drops the oldest folders of other binaries. Best effort: a folder in use by another process is only made again.
fn prune(newest: &Path) {
    let Some(root) = newest.parent() else { return };
    let Ok(entries) = fs::read_dir(root) else { return };
    let mut dirs: Vec<_> = entries
        .filter_map(|e| e.ok())
        .filter(|e| e.path() != newest && e.path().is_dir())
        .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
        .collect();
    dirs.sort();
    let surplus = dirs.len().saturating_sub(BINARIES_KEPT);
    for (_, dir) in dirs.into_iter().take(surplus) {
        let _ = fs::remove_dir_all(dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use std::cell::Cell;

    fn key() -> RunKey {
        RunKey {
            weights: "w".into(),
            plans: vec![],
            device: "emu".into(),
            ids: vec![1],
            teacher: vec![],
            steps: 1,
            taps: TapRequest::default(),
            faults: vec![],
        }
    }

    fn record() -> Record {
        Record {
            prompt_ids: vec![1],
            fed: vec![],
            logits: ndarray::Array2::from_elem((1, 2), bf16::ONE),
            taps: Default::default(),
            timing: Default::default(),
            counters: Default::default(),
            device: "emu".into(),
        }
    }

    #[test]
    fn a_record_is_made_once_and_again_when_the_key_or_the_file_changes() {
        let root = tempfile::tempdir().unwrap();
        let cache = RunCache::at(root.path().into(), "binary");
        let runs = Cell::new(0);
        let get = |key: &RunKey| {
            cache.get_or_run(key, || {
                runs.set(runs.get() + 1);
                Ok(record())
            })
        };
        assert_eq!(get(&key()).unwrap(), get(&key()).unwrap());
        assert_eq!(runs.get(), 1);
        get(&RunKey { steps: 2, ..key() }).unwrap();
        assert_eq!(runs.get(), 2);
        for entry in fs::read_dir(root.path().join("binary")).unwrap() {
            fs::write(entry.unwrap().path(), b"damaged").unwrap();
        }
        get(&key()).unwrap();
        assert_eq!(runs.get(), 3);
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_only_slow() {
        let root = tempfile::tempdir().unwrap();
        let taken = root.path().join("a file");
        fs::write(&taken, "").unwrap();
        let cache = RunCache::at(taken, "binary");
        let runs = Cell::new(0);
        for _ in 0..2 {
            let run = || {
                runs.set(runs.get() + 1);
                Ok(record())
            };
            assert_eq!(cache.get_or_run(&key(), run).unwrap(), record());
        }
        assert_eq!(runs.get(), 2);
    }

    #[test]
    fn a_failed_run_leaves_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let cache = RunCache::at(root.path().into(), "binary");
        let failed = cache.get_or_run(&key(), || Err(Error::Plan { why: "no".into() }));
        assert!(failed.is_err());
        assert_eq!(cache.get_or_run(&key(), || Ok(record())).unwrap(), record());
    }
}
