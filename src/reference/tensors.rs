//! The container: a safetensors file whose header is checked against the file's size before anything is read or
//! allocated after it. Knows nothing of the schema.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use half::bf16;
use ndarray::{Array1, Array2, Array3, ArrayBase, Dimension, OwnedRepr};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::{Error, Result};

/// Longest header that is taken for one; those of captures are a few 10 kB.
const HEADER_MAX: u64 = 100_000_000;

/// A sound header with the file it came from; tensors are read when they are asked for: a case that needs one prompt
/// does not wait for all. The file stays open, so a capture that is made anew (written beside it and renamed) does not
/// show in this one.
pub(super) struct Tensors {
    pub path: PathBuf,
    /// Moved by whoever reads.
    file: Mutex<File>,
    /// Where the data begins.
    start: u64,
    metadata: Metadata,
}

impl Tensors {
    /// Reads and checks the header alone.
    ///
    /// Errors: [`Error::Io`]; [`Error::Malformed`] for anything that is not a complete safetensors file.
    pub fn open(path: &Path) -> Result<Tensors> {
        let mut file = File::open(path).map_err(Error::io(path))?;
        let size = file.metadata().map_err(Error::io(path))?.len();
        let mut prefix = [0u8; 8];
        if size < 8 {
            return Err(Error::malformed(path, format!("{size} bytes, too short for a safetensors file")));
        }
        file.read_exact(&mut prefix).map_err(Error::io(path))?;
        let length = u64::from_le_bytes(prefix);
        if length > (size - 8).min(HEADER_MAX) {
            let why = format!("not a safetensors file: a header of {length} bytes in a file of {size}");
            return Err(Error::malformed(path, why));
        }
        let mut json = vec![0u8; length as usize];
        file.read_exact(&mut json).map_err(Error::io(path))?;
        let metadata: Metadata =
            serde_json::from_slice(&json).map_err(|e| Error::malformed(path, format!("damaged header: {e}")))?;
        let (declared, stored) = (metadata.data_len() as u64, size - 8 - length);
        if declared != stored {
            let why = format!("truncated or overlong: {stored} bytes of data, the header declares {declared}");
            return Err(Error::malformed(path, why));
        }
        Ok(Tensors { path: path.to_owned(), file: Mutex::new(file), start: 8 + length, metadata })
    }

    /// The string map `__metadata__`; empty when there is none.
    pub fn strings(&self) -> HashMap<String, String> {
        self.metadata.metadata().clone().unwrap_or_default()
    }

    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Errors: [`Error::Tensor`] when it is missing.
    pub fn info(&self, tensor: &str) -> Result<&TensorInfo> {
        self.metadata.info(tensor).ok_or_else(|| self.wrong(tensor, "nothing", "the tensor"))
    }

    /// An error about one tensor of this file.
    pub fn wrong(&self, tensor: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        let (found, expected) = (found.into(), expected.into());
        Error::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), found, expected }
    }

    /// `length` bytes of the data from `offset` on.
    fn read_at(&self, offset: usize, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; length];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(self.start + offset as u64)).map_err(Error::io(&self.path))?;
        file.read_exact(&mut bytes).map_err(Error::io(&self.path))?;
        Ok(bytes)
    }

    fn bytes(&self, tensor: &str, dtypes: &[Dtype]) -> Result<(&TensorInfo, Vec<u8>)> {
        let info = self.info(tensor)?;
        if !dtypes.contains(&info.dtype) {
            return Err(self.wrong(tensor, format!("{:?}", info.dtype), format!("one of {dtypes:?}")));
        }
        let (from, to) = info.data_offsets;
        Ok((info, self.read_at(from, to - from)?))
    }

    /// An i32 tensor's values in row-major order, as stored.
    pub fn signed(&self, tensor: &str) -> Result<Vec<i32>> {
        let (_, bytes) = self.bytes(tensor, &[Dtype::I32])?;
        Ok(bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect())
    }

    /// A bf16 or f32 tensor's values in row-major order, widened exactly.
    pub fn floats(&self, tensor: &str) -> Result<Vec<f32>> {
        let (info, bytes) = self.bytes(tensor, &[Dtype::BF16, Dtype::F32])?;
        Ok(match info.dtype {
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            _ => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        })
    }

    /// Ids or positions, `[n]`.
    ///
    /// Errors: [`Error::Tensor`] for a missing tensor, another dtype, and a negative value.
    pub fn ids(&self, tensor: &str) -> Result<Vec<u32>> {
        let id = |x: i32| u32::try_from(x).map_err(|_| self.wrong(tensor, x.to_string(), "no negative value"));
        self.signed(tensor)?.into_iter().map(id).collect()
    }

    /// Ids, `[r, c]`.
    pub fn id_matrix(&self, tensor: &str) -> Result<Array2<u32>> {
        self.shaped(tensor, self.ids(tensor)?)
    }

    pub fn vector(&self, tensor: &str) -> Result<Array1<f32>> {
        self.shaped(tensor, self.floats(tensor)?)
    }

    pub fn matrix(&self, tensor: &str) -> Result<Array2<f32>> {
        self.shaped(tensor, self.floats(tensor)?)
    }

    pub fn cube(&self, tensor: &str) -> Result<Array3<f32>> {
        self.shaped(tensor, self.floats(tensor)?)
    }

    fn shaped<T, D: Dimension>(&self, tensor: &str, values: Vec<T>) -> Result<ArrayBase<OwnedRepr<T>, D>> {
        let shape = &self.info(tensor)?.shape;
        let rank = D::NDIM.unwrap_or(shape.len());
        let wrong = || self.wrong(tensor, format!("shape {shape:?}"), format!("{rank} dimensions"));
        let dynamic = ndarray::ArrayD::from_shape_vec(shape.clone(), values).map_err(|_| wrong())?;
        dynamic.into_dimensionality().map_err(|_| wrong())
    }
}
