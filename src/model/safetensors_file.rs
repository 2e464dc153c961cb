//! One safetensors file: memory-mapped, its header checked before anything is believed.
//!
//! The `safetensors` crate parses; this adds what a message needs (file, tensor, found, expected) and the guards
//! that keep a damaged length from becoming an allocation. Knows nothing of models.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// The header's length prefix.
const PREFIX_BYTES: usize = 8;
/// The format's own bound on a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Where a tensor lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the file, absolute.
    range: (usize, usize),
}

impl StoredTensor {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of data.
    pub fn bytes(&self) -> usize {
        self.range.1 - self.range.0
    }
}

/// An open file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    tensors: BTreeMap<String, StoredTensor>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Maps `path` and reads its header.
    ///
    /// Errors: [`Error::Io`]; [`Error::Malformed`] for a damaged, truncated or foreign file.
    pub fn open(path: &Path) -> Result<SafetensorsFile> {
        let file = File::open(path).map_err(Error::io(path))?;
        let size = file.metadata().map_err(Error::io(path))?.len();
        if size == 0 {
            return Err(Error::malformed(path, "an empty file, expected safetensors"));
        }
        // SAFETY: the map is read-only and lives as long as this struct. A checkpoint that another process truncates
        // while it is mapped would raise SIGBUS; weights are written once (by rename, here and in the HF cache) and
        // never in place, and every reader of large checkpoints makes the same assumption.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let (tensors, metadata) = parse(path, &map)?;
        Ok(SafetensorsFile { path: path.into(), file, map, tensors, metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// The header's `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// A tensor's raw little-endian bytes, without copying.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let t = self.tensors.get(name)?;
        self.map.get(t.range.0..t.range.1)
    }
}

/// How far around a page that is read the system may map others of the file: a piece of its cache, at most a huge page.
/// What lies there of a neighbour that was given back would stay.
#[cfg(unix)]
const MAPPED_AROUND: usize = 2 << 20;

impl SafetensorsFile {
    /// Reads a tensor's bytes from `offset` on without touching the map.
    ///
    /// Errors: [`Error::Io`]; [`Error::Malformed`] for bytes that the tensor does not have.
    pub fn read(&self, name: &str, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let within = self.tensors.get(name).filter(|t| offset + bytes.len() <= t.bytes());
        let Some(tensor) = within else {
            let end = offset + bytes.len();
            return Err(Error::malformed(&self.path, format!("tensor {name}: no bytes {offset}..{end}")));
        };
        let start = tensor.range.0 + offset;
        #[cfg(unix)]
        {
            use std::os::unix::fs::FileExt;
            self.file.read_exact_at(bytes, start as u64).map_err(Error::io(&self.path))
        }
        #[cfg(not(unix))]
        {
            bytes.copy_from_slice(&self.map[start..start + bytes.len()]);
            Ok(())
        }
    }

    /// Gives a tensor's pages back to the system: they no longer count as this process's memory, and whoever reads the
    /// tensor next gets them anew from the file or the system's cache of it.
    pub fn release(&self, name: &str) {
        #[cfg(unix)]
        if let Some(t) = self.tensors.get(name) {
            let start = t.range.0.saturating_sub(MAPPED_AROUND);
            let end = t.range.1.saturating_add(MAPPED_AROUND).min(self.map.len());
            // Advice: where it is refused, the pages stay.
            // SAFETY: the map is read-only and backed by a file that nobody changes (see `open`), so a page that is
            // dropped comes back with the same bytes, whoever holds a slice of it.
            let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
        }
        #[cfg(not(unix))]
        let _ = name;
    }
}

type Header = (BTreeMap<String, StoredTensor>, BTreeMap<String, String>);

/// Checks and reads a header; `bytes` is the whole file.
///
/// Errors: [`Error::Malformed`].
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Header> {
    let bad = |why: String| Error::malformed(path, why);
    if let Some(what) = foreign(bytes) {
        return Err(bad(format!("{what}, expected safetensors")));
    }
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else {
        return Err(bad(format!("{} bytes, expected at least the {PREFIX_BYTES} of a header length", bytes.len())));
    };
    let header = u64::from_le_bytes(*prefix);
    let rest = (bytes.len() - PREFIX_BYTES) as u64;
    if header > rest {
        return Err(bad(format!("header length: found {header}, expected at most the {rest} bytes that follow it")));
    }
    if header > MAX_HEADER_BYTES {
        return Err(bad(format!("header length: found {header}, expected at most {MAX_HEADER_BYTES}")));
    }
    let (n, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| bad(explain(e, bytes)))?;
    let start = PREFIX_BYTES + n;
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let range = (start + info.data_offsets.0, start + info.data_offsets.1);
        tensors.insert(name, StoredTensor { dtype: info.dtype, shape: info.shape.clone(), range });
    }
    Ok((tensors, notes(&metadata)))
}

fn notes(metadata: &Metadata) -> BTreeMap<String, String> {
    metadata.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// What another kind of file at this place would be.
fn foreign(bytes: &[u8]) -> Option<&'static str> {
    let start = bytes.get(..64).unwrap_or(bytes).trim_ascii_start();
    let lower = start.to_ascii_lowercase();
    if lower.starts_with(b"<!doctype") || lower.starts_with(b"<html") || lower.starts_with(b"<?xml") {
        Some("an HTML or XML page")
    } else if start.starts_with(b"version https://git-lfs") {
        Some("a git-lfs pointer (git lfs pull)")
    } else if start.starts_with(b"PK\x03\x04") {
        Some("a zip archive (a pickled torch file?)")
    } else if start.starts_with(b"GGUF") {
        Some("a GGUF file")
    } else {
        None
    }
}

/// The first tensor whose shape overflows, or whose offsets are not those of its shape and dtype: the library knows but does not
/// say.
fn culprit(bytes: &[u8], overflow: bool) -> String {
    let end =
        bytes.first_chunk::<PREFIX_BYTES>().map_or(0, |n| u64::from_le_bytes(*n) as usize).saturating_add(PREFIX_BYTES);
    let header = bytes.get(PREFIX_BYTES..end).and_then(|header| serde_json::from_slice(header).ok());
    let header: serde_json::Map<String, serde_json::Value> = header.unwrap_or_default();
    let broken = |(name, tensor): (&String, &serde_json::Value)| {
        let info: TensorInfo = serde_json::from_value(tensor.clone()).ok()?;
        let len = info.shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let bits = len.and_then(|len| len.checked_mul(info.dtype.bitsize()));
        let spanned = info.data_offsets.1.checked_sub(info.data_offsets.0);
        let wrong = if overflow { bits.is_none() } else { bits.map(|bits| bits / 8) != spanned };
        wrong.then(|| name.clone())
    };
    header.iter().find_map(broken).unwrap_or_else(|| "that the header does not tell".into())
}

fn explain(e: SafeTensorError, bytes: &[u8]) -> String {
    use SafeTensorError as E;
    match e {
        E::InvalidHeader(e) => format!("header: not UTF-8: {e}"),
        E::InvalidHeaderDeserialization(e) => format!("header: not the JSON of safetensors: {e}"),
        E::InvalidOffset(name) => {
            format!("tensor {name}: data_offsets overlap another tensor, run backwards or leave a hole")
        }
        E::TensorInvalidInfo => format!("tensor {}: data_offsets do not span shape times dtype", culprit(bytes, false)),
        E::MetadataIncompleteBuffer => format!(
            "the tensors' data_offsets do not end where the file does, at {} bytes: truncated, or with trailing bytes",
            bytes.len()
        ),
        E::ValidationOverflow => format!("tensor {}: shape overflows", culprit(bytes, true)),
        e => format!("header: {e}"),
    }
}
