//! sha256 of files and tensors, in parallel, and the cache that spares every process but the first from hashing.
//!
//! A cached entry belongs to a path and to one state of the file ([`state`]); the audit computes anew.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use super::safetensors_file::SafetensorsFile;
pub use crate::begun::{keep, write_atomically};
use crate::error::{Error, Result};
use crate::settings;

/// sha256 of bytes, in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// sha256 of a file's bytes, in hex, read in pieces.
///
/// Errors: [`Error::Io`].
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).map_err(Error::io(path))?;
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).map_err(Error::io(path))? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&piece[..n]),
        }
    }
}

/// sha256 of every tensor's raw bytes as stored, by stored name, largest first over `threads` workers.
pub fn of_tensors(file: &SafetensorsFile, threads: usize) -> BTreeMap<String, String> {
    let mut jobs: Vec<(&str, &[u8])> =
        file.tensors().keys().filter_map(|name| Some((name.as_str(), file.bytes(name)?))).collect();
    jobs.sort_by_key(|(_, bytes)| std::cmp::Reverse(bytes.len()));
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((name, bytes)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((name.to_string(), sha256(bytes)));
            file.release(name);
        }
        done
    };
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(jobs.len())).map(|_| scope.spawn(work)).collect();
        let mut all: BTreeMap<_, _> = work().into_iter().collect();
        for helper in helpers {
            match helper.join() {
                Ok(done) => all.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    })
}

/// [`of_tensors`] through the cache in `cache`.
///
/// Errors: [`Error::Io`] where the file itself cannot be looked at; a cache that cannot be read or written is only slow.
pub fn of_tensors_cached(file: &SafetensorsFile, cache: &Path, threads: usize) -> Result<BTreeMap<String, String>> {
    let entry = entry(file.path(), cache)?;
    if let Some(known) = read(&entry)
        && known.keys().eq(file.tensors().keys())
    {
        return Ok(known);
    }
    let hashes = of_tensors(file, threads);
    if let Ok(text) = serde_json::to_vec(&hashes) {
        keep(&entry, &text);
    }
    Ok(hashes)
}

/// Where hashes are cached.
pub fn cache_dir() -> PathBuf {
    settings::work_dir().join("hashes")
}

fn read(entry: &Path) -> Option<BTreeMap<String, String>> {
    let known: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(entry).ok()?).ok()?;
    known.values().all(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit())).then_some(known)
}

/// The cache file for one state of one file.
fn entry(path: &Path, cache: &Path) -> Result<PathBuf> {
    let full = path.canonicalize().map_err(Error::io(path))?;
    let key = format!("{}\n{}", full.display(), state(&full)?);
    Ok(cache.join(format!("{}.json", sha256(key.as_bytes()))))
}

/// What tells one state of a file from the next without reading it: size and modification time, and where the system has
/// them device, inode and the time of the last change of any kind, which no `cp -p`, `rsync -t` or `touch` can set back.
///
/// Errors: [`Error::Io`].
pub fn state(path: &Path) -> Result<String> {
    let meta = std::fs::metadata(path).map_err(Error::io(path))?;
    let modified = meta.modified().map_err(Error::io(path))?;
    let stamp = match modified.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_nanos() as i128,
        Err(before) => -(before.duration().as_nanos() as i128),
    };
    let size = meta.len();
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let (device, inode, changed, nanos) = (meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec());
        Ok(format!("{size} {stamp} {device} {inode} {changed}.{nanos:09}"))
    }
    #[cfg(not(unix))]
    Ok(format!("{size} {stamp}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cp -p`, `rsync -t`, an archive: other bytes of the same size under the old modification time.
    #[cfg(unix)]
    #[test]
    fn other_bytes_of_the_same_size_and_time_are_another_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, [1; 64]).unwrap();
        let before = (state(&path).unwrap(), std::fs::metadata(&path).unwrap().modified().unwrap());
        // The clock that stamps changes may tick as rarely as a hundred times a second.
        std::thread::sleep(std::time::Duration::from_millis(50));
        std::fs::write(&path, [2; 64]).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(before.1).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), before.1);
        assert_ne!(state(&path).unwrap(), before.0);
    }
}
