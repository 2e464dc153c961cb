//! GGUF, version 2 and 3: metadata, tensor table and the dequantisation of the few types that are met here.
//!
//! Every length is checked against the bytes that are left before anything is allocated. Only `fetch` reads GGUF;
//! a GGUF file is no checkpoint.

mod dequantise;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};

/// Deepest array in an array; the format knows no use for more than one.
const MAX_DEPTH: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMS: usize = 4;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Vec<GgufValue>),
}

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    F32,
    F16,
    /// Blocks of 32: scale d and minimum m in f16, then 4-bit q; the value is d * q + m.
    Q4_1,
    /// Blocks of 32: scale d in f16, then 8-bit signed q; the value is d * q.
    Q8_0,
}

impl GgufType {
    fn from_id(id: u32) -> Option<GgufType> {
        match id {
            0 => Some(GgufType::F32),
            1 => Some(GgufType::F16),
            3 => Some(GgufType::Q4_1),
            8 => Some(GgufType::Q8_0),
            _ => None,
        }
    }

    /// Elements and bytes of one block.
    pub fn block(self) -> (usize, usize) {
        match self {
            GgufType::F32 => (1, 4),
            GgufType::F16 => (1, 2),
            GgufType::Q4_1 => (32, 20),
            GgufType::Q8_0 => (32, 34),
        }
    }
}

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    pub kind: GgufType,
    /// Row-major, outermost first (GGUF stores the reverse).
    pub shape: Vec<usize>,
    /// Bytes of the file, absolute.
    range: (usize, usize),
}

/// A parsed file over borrowed bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    pub metadata: BTreeMap<String, GgufValue>,
    pub tensors: BTreeMap<String, GgufTensor>,
}

impl<'a> Gguf<'a> {
    /// Reads metadata and tensor table of `bytes`, the whole file; `path` is for messages only.
    ///
    /// Errors: [`Error::Malformed`].
    pub fn parse(path: &'a Path, bytes: &'a [u8]) -> Result<Gguf<'a>> {
        let mut r = Reader { path, bytes, at: 0 };
        if r.take(4)? != b"GGUF" {
            return Err(Error::malformed(path, "found no GGUF magic, expected a GGUF file"));
        }
        let version = r.u32()?;
        if !(2..=3).contains(&version) {
            return Err(Error::malformed(path, format!("found GGUF version {version}, expected 2 or 3")));
        }
        let (n_tensors, n_values) = (r.u64()?, r.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..n_values {
            let key = r.string()?;
            let kind = r.u32()?;
            metadata.insert(key, r.value(kind, 0)?);
        }
        let mut table = Vec::new();
        for _ in 0..n_tensors {
            table.push(r.tensor()?);
        }
        let alignment = match metadata.get("general.alignment") {
            Some(GgufValue::Unsigned(a)) if a.is_power_of_two() => *a,
            Some(_) => return Err(Error::malformed(path, "general.alignment: expected a power of two")),
            None => DEFAULT_ALIGNMENT,
        };
        let data = (r.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, kind, shape, offset) in table {
            let range = r.range(&name, kind, &shape, data, offset)?;
            tensors.insert(name, GgufTensor { kind, shape, range });
        }
        Ok(Gguf { path, bytes, metadata, tensors })
    }

    /// A metadata value.
    ///
    /// Errors: [`Error::Key`] where there is none.
    pub fn value(&self, key: &str) -> Result<&GgufValue> {
        self.metadata.get(key).ok_or_else(|| self.wrong(key, "nothing", "a value"))
    }

    fn wrong(&self, key: &str, found: &str, expected: &str) -> Error {
        Error::Key { path: self.path.into(), key: key.into(), found: found.into(), expected: expected.into() }
    }

    /// A whole number.
    ///
    /// Errors: [`Error::Key`].
    pub fn uint(&self, key: &str) -> Result<u64> {
        match self.value(key)? {
            GgufValue::Unsigned(n) => Ok(*n),
            GgufValue::Signed(n) if *n >= 0 => Ok(*n as u64),
            other => Err(self.wrong(key, &format!("{other:?}"), "a whole number")),
        }
    }

    /// A number.
    ///
    /// Errors: [`Error::Key`].
    pub fn float(&self, key: &str) -> Result<f64> {
        match self.value(key)? {
            GgufValue::Float(x) => Ok(*x),
            other => Err(self.wrong(key, &format!("{other:?}"), "a float")),
        }
    }

    /// A string.
    ///
    /// Errors: [`Error::Key`].
    pub fn string(&self, key: &str) -> Result<&str> {
        match self.value(key)? {
            GgufValue::String(s) => Ok(s),
            other => Err(self.wrong(key, &format!("{other:?}"), "a string")),
        }
    }

    /// A list.
    ///
    /// Errors: [`Error::Key`].
    pub fn array(&self, key: &str) -> Result<&[GgufValue]> {
        match self.value(key)? {
            GgufValue::Array(a) => Ok(a),
            other => Err(self.wrong(key, &format!("{other:?}"), "a list")),
        }
    }

    /// A list of strings.
    ///
    /// Errors: [`Error::Key`].
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        let one = |v: &'_ GgufValue| matches!(v, GgufValue::String(_));
        let array = self.array(key)?;
        if !array.iter().all(one) {
            return Err(self.wrong(key, "other values", "a list of strings"));
        }
        Ok(array.iter().filter_map(|v| if let GgufValue::String(s) = v { Some(s.as_str()) } else { None }).collect())
    }

    /// A tensor's values in f32, row-major: `d * q + m`, product and sum each rounded, as the `gguf` package does it.
    ///
    /// Errors: [`Error::Tensor`] where there is none.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>> {
        let missing = || Error::Tensor {
            path: self.path.into(),
            tensor: name.into(),
            found: "nothing".into(),
            expected: "a tensor of this name".into(),
        };
        let t = self.tensors.get(name).ok_or_else(missing)?;
        Ok(dequantise::to_f32(t.kind, self.bytes.get(t.range.0..t.range.1).ok_or_else(missing)?))
    }
}

/// A cursor that never reads beyond the file.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bad(&self, why: impl Into<String>) -> Error {
        Error::malformed(self.path, why)
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if n > left as u64 {
            return Err(self.bad(format!("at byte {}: found {left} bytes, expected {n} more", self.at)));
        }
        let piece = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(piece)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self) -> Result<String> {
        let n = self.u64()?;
        let bytes = self.take(n)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|_| self.bad(format!("at byte {}: a string that is not UTF-8", self.at)))
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<GgufValue> {
        use GgufValue as V;
        Ok(match kind {
            0 => V::Unsigned(self.array::<1>()?[0].into()),
            1 => V::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => V::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => V::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => V::Unsigned(self.u32()?.into()),
            5 => V::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => V::Float(f32::from_le_bytes(self.array()?).into()),
            7 => V::Bool(self.array::<1>()?[0] != 0),
            8 => V::String(self.string()?),
            9 if depth < MAX_DEPTH => {
                let (inner, n) = (self.u32()?, self.u64()?);
                // An element takes at least a byte of the file, so this loop and its list are bounded by the file.
                let mut items = Vec::new();
                for _ in 0..n {
                    items.push(self.value(inner, depth + 1)?);
                }
                V::Array(items)
            }
            10 => V::Unsigned(self.u64()?),
            11 => V::Signed(i64::from_le_bytes(self.array()?)),
            12 => V::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.bad(format!("at byte {}: found value type {other}, expected 0 to 12", self.at))),
        })
    }

    fn tensor(&mut self) -> Result<(String, GgufType, Vec<usize>, u64)> {
        let name = self.string()?;
        let n_dims = self.u32()? as usize;
        if n_dims > MAX_DIMS {
            return Err(self.bad(format!("tensor {name}: found {n_dims} dimensions, expected at most {MAX_DIMS}")));
        }
        let mut shape = Vec::with_capacity(n_dims);
        for _ in 0..n_dims {
            let d = self.u64()?;
            shape.push(usize::try_from(d).map_err(|_| self.bad(format!("tensor {name}: dimension {d}")))?);
        }
        shape.reverse();
        let id = self.u32()?;
        let offset = self.u64()?;
        let kind = GgufType::from_id(id)
            .ok_or_else(|| self.bad(format!("tensor {name}: found type {id}, expected F32, F16, Q4_1 or Q8_0")))?;
        Ok((name, kind, shape, offset))
    }

    /// Where a tensor's bytes lie, checked against the file.
    fn range(&self, name: &str, kind: GgufType, shape: &[usize], data: u64, offset: u64) -> Result<(usize, usize)> {
        let (per_block, block_bytes) = kind.block();
        let bad = |why: &str| self.bad(format!("tensor {name}: {why}"));
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| bad("shape overflows"))?;
        if shape.last().is_some_and(|row| row % per_block != 0) {
            return Err(bad("rows are not whole blocks"));
        }
        let bytes = (elements / per_block).checked_mul(block_bytes).ok_or_else(|| bad("size overflows"))?;
        let start = data.checked_add(offset).ok_or_else(|| bad("offset overflows"))?;
        match start.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes.len() as u64 => Ok((start as usize, end as usize)),
            _ => Err(bad(&format!("{bytes} bytes at {start} lie beyond the file's {}", self.bytes.len()))),
        }
    }
}
