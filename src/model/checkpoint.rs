//! A checkpoint's tensors: one file or indexed shards, memory-mapped, read without copying where they are bf16.
//!
//! Says what is stored and whether that is what the config implies (`account.rs`); knows nothing of how it is used.

mod account;
mod layout;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;

pub use account::{Accounting, Extra, TensorRow};
pub use layout::Prefix;

use super::hashes;
use super::safetensors_file::{SafetensorsFile, StoredTensor};
use crate::error::{Error, Result};
use crate::settings;

/// Files beside the weights whose hashes a capture is bound to, where they exist.
const SIDE_FILES: &[&str] =
    &["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// Where a runner takes its weights from.
pub trait Weights: Send + Sync {
    /// A tensor's elements in bf16, row-major, by its canonical HF name.
    ///
    /// Errors: [`Error::Tensor`] where there is none.
    fn bf16(&self, name: &str) -> Result<Cow<'_, [bf16]>>;

    /// Rows of a matrix as [`Weights::bf16`] gives them.
    ///
    /// Shapes: of `[N, cols]`, result `[rows.len(), cols]`.
    /// Errors: as `bf16`; [`Error::Tensor`] for a row that is not there.
    fn bf16_rows(&self, name: &str, cols: usize, rows: &[usize]) -> Result<Vec<bf16>> {
        let matrix = self.bf16(name)?;
        let mut out = Vec::with_capacity(rows.len() * cols);
        for &row in rows {
            let row = matrix.get(row * cols..(row + 1) * cols).ok_or_else(|| Error::Tensor {
                path: "weights".into(),
                tensor: name.into(),
                found: format!("{} elements", matrix.len()),
                expected: format!("a row {row} of {cols}"),
            })?;
            out.extend_from_slice(row);
        }
        Ok(out)
    }

    /// Says that a tensor has been taken over and that its memory may go; it can still be read.
    fn release(&self, _name: &str) {}
}

/// Appends the elements of `bytes`, the first of which is the tensor's element `first`, in bf16.
fn narrow(path: &Path, tensor: &str, dtype: Dtype, bytes: &[u8], first: usize, out: &mut Vec<bf16>) -> Result<()> {
    let wrong = |found: String, expected: &str| Error::Tensor {
        path: path.into(),
        tensor: tensor.into(),
        found,
        expected: expected.into(),
    };
    let mut each = |values: &mut dyn Iterator<Item = f32>| {
        for (i, x) in values.enumerate() {
            let y = bf16::from_f32(x);
            if x.is_finite() && !y.is_finite() {
                return Err(wrong(format!("{x} at element {}", first + i), "a value within bf16's range"));
            }
            out.push(y);
        }
        Ok(())
    };
    match dtype {
        Dtype::BF16 => {
            out.extend(crate::tensor::bf16_from_le_bytes(bytes));
            Ok(())
        }
        Dtype::F16 => each(&mut bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Dtype::F32 => each(&mut bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
        other => Err(wrong(format!("{other:?}"), "BF16, F16 or F32")),
    }
}

impl Weights for Checkpoint {
    fn bf16(&self, name: &str) -> Result<Cow<'_, [bf16]>> {
        Checkpoint::bf16(self, name)
    }

    fn bf16_rows(&self, name: &str, cols: usize, rows: &[usize]) -> Result<Vec<bf16>> {
        Checkpoint::bf16_rows(self, name, cols, rows)
    }

    fn release(&self, name: &str) {
        if let Some((file, _, stored)) = self.find(name) {
            file.release(&stored);
        }
    }
}

/// An open checkpoint directory.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Stored name -> file that holds it (the one that the index names, if there is one).
    owner: BTreeMap<String, usize>,
    prefix: Prefix,
    /// Tensors that lie in two files, byte for byte the same.
    duplicates: Vec<String>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, else the shards of `model.safetensors.index.json`, in HF's order of precedence.
    ///
    /// Errors: [`Error::Malformed`] for damaged files or a missing shard, [`Error::Tensor`] for a tensor that two
    /// files tell differently, [`Error::Refused`] for pickled, adapter or quantised checkpoints.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        layout::scope(dir)?;
        let shards = layout::shards(dir)?;
        let files = shards.paths.iter().map(|p| SafetensorsFile::open(p)).collect::<Result<Vec<_>>>()?;
        let (owner, duplicates) = layout::owners(&shards, &files)?;
        let prefix = layout::prefix(dir, &owner)?;
        Ok(Checkpoint { dir: dir.into(), files, owner, prefix, duplicates })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SafetensorsFile::path)
    }

    /// How the stored names differ from HF's canonical ones.
    pub fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// Tensors found in two files with the same bytes.
    pub fn duplicates(&self) -> &[String] {
        &self.duplicates
    }

    /// Stored names, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.owner.keys().map(String::as_str)
    }

    /// The stored name of a canonical one (`model.layers.0...`); a stored name is its own.
    pub fn stored_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.owner.contains_key(name) { Cow::Borrowed(name) } else { self.prefix.stored(name) }
    }

    fn find(&self, name: &str) -> Option<(&SafetensorsFile, &StoredTensor, String)> {
        let stored = self.stored_name(name);
        let file = self.files.get(*self.owner.get(stored.as_ref())?)?;
        Some((file, file.tensors().get(stored.as_ref())?, stored.into_owned()))
    }

    fn need(&self, name: &str) -> Result<(&SafetensorsFile, &StoredTensor, String)> {
        self.find(name).ok_or_else(|| Error::Tensor {
            path: self.dir.clone(),
            tensor: name.into(),
            found: "nothing".into(),
            expected: "a tensor of this name".into(),
        })
    }

    /// Whether a tensor is there, by canonical or stored name.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Row-major, as stored.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|(_, t, _)| t.shape.as_slice())
    }

    /// The dtype as stored.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.find(name).map(|(_, t, _)| t.dtype)
    }

    /// A tensor's raw little-endian bytes, without copying.
    ///
    /// Errors: [`Error::Tensor`] where there is none.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (file, _, stored) = self.need(name)?;
        file.bytes(&stored).ok_or_else(|| Error::malformed(file.path(), format!("tensor {stored}: beyond the file")))
    }

    /// A tensor's elements in bf16, row-major: without copying where they are stored so and aligned, else rounded to
    /// nearest even.
    ///
    /// Errors: [`Error::Tensor`] where there is none, for another dtype, or where a finite value becomes infinite.
    pub fn bf16(&self, name: &str) -> Result<Cow<'_, [bf16]>> {
        let bytes = self.bytes(name)?;
        let (file, tensor, stored) = self.need(name)?;
        if tensor.dtype == Dtype::BF16
            && cfg!(target_endian = "little")
            && let Ok(aligned) = bytemuck::try_cast_slice(bytes)
        {
            return Ok(Cow::Borrowed(aligned));
        }
        let mut out = Vec::with_capacity(tensor.elements());
        narrow(file.path(), &stored, tensor.dtype, bytes, 0, &mut out)?;
        Ok(Cow::Owned(out))
    }

    /// Rows of a matrix as [`Checkpoint::bf16`] gives them, read from the file and not through the map: around a row the system
    /// maps up to megabytes of the file, and rows enough would bring all of it.
    ///
    /// Shapes: of `[N, cols]`, result `[rows.len(), cols]`.
    /// Errors: as `bf16`, [`Error::Io`], and [`Error::Tensor`] for a row that is not there.
    pub fn bf16_rows(&self, name: &str, cols: usize, rows: &[usize]) -> Result<Vec<bf16>> {
        let (file, tensor, stored) = self.need(name)?;
        let width = cols * (tensor.bytes() / tensor.elements().max(1));
        let mut bytes = vec![0; width];
        let mut out = Vec::with_capacity(rows.len() * cols);
        for &row in rows {
            if (row + 1) * width > tensor.bytes() {
                return Err(Error::Tensor {
                    path: file.path().into(),
                    tensor: stored,
                    found: format!("{:?}", tensor.shape),
                    expected: format!("a row {row} of {cols}"),
                });
            }
            file.read(&stored, row * width, &mut bytes)?;
            narrow(file.path(), &stored, tensor.dtype, &bytes, row * cols, &mut out)?;
        }
        Ok(out)
    }

    /// NaN and infinite elements of a tensor, in bf16.
    ///
    /// Errors: those of [`Checkpoint::bf16`].
    pub fn nonfinite(&self, name: &str) -> Result<usize> {
        Ok(self.bf16(name)?.iter().filter(|x| !x.is_finite()).count())
    }

    /// sha256 of every tensor's raw bytes as stored, by stored name; cached by path, size and modification time.
    ///
    /// Errors: [`Error::Io`], [`Error::Usage`] for a wrong number of threads.
    pub fn tensor_hashes(&self) -> Result<BTreeMap<String, String>> {
        let (cache, threads) = (hashes::cache_dir(), settings::threads()?);
        self.owned(|file| hashes::of_tensors_cached(file, &cache, threads))
    }

    /// [`Checkpoint::tensor_hashes`] computed anew, for the audit.
    ///
    /// Errors: [`Error::Usage`] for a wrong number of threads.
    pub fn tensor_hashes_uncached(&self) -> Result<BTreeMap<String, String>> {
        let threads = settings::threads()?;
        self.owned(|file| Ok(hashes::of_tensors(file, threads)))
    }

    fn owned(
        &self,
        hash: impl Fn(&SafetensorsFile) -> Result<BTreeMap<String, String>>,
    ) -> Result<BTreeMap<String, String>> {
        let mut all = BTreeMap::new();
        for (i, file) in self.files.iter().enumerate() {
            all.extend(hash(file)?.into_iter().filter(|(name, _)| self.owner.get(name) == Some(&i)));
        }
        Ok(all)
    }

    /// sha256 of the files beside the weights that a capture is bound to, where they exist.
    ///
    /// Errors: [`Error::Io`].
    pub fn side_file_hashes(&self) -> Result<BTreeMap<String, String>> {
        let mut hashes = BTreeMap::new();
        for name in SIDE_FILES {
            if let Some(path) = side_file(&self.dir, name)? {
                hashes.insert(name.to_string(), hashes::sha256_file(&path)?);
            }
        }
        Ok(hashes)
    }
}

/// The path of a file that a checkpoint need not have, if it has it.
///
/// Errors: [`Error::Malformed`] for something else in its place; a link that leads nowhere is what a half-made copy of the HF cache
/// has.
pub(super) fn side_file(dir: &Path, name: &str) -> Result<Option<PathBuf>> {
    let path = dir.join(name);
    match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(&path)(error)),
        Ok(_) if path.is_file() => Ok(Some(path)),
        Ok(found) => {
            let what = match (found.is_symlink(), found.is_dir()) {
                (true, _) => "a link to no file",
                (_, true) => "a folder",
                _ => "something else",
            };
            Err(Error::malformed(&path, format!("found {what}, expected a file")))
        }
    }
}
