//! A safetensors file written anew with other content in some of its tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use phasegate::error::{Error, Result};
use safetensors::tensor::{Dtype, SafeTensors, View};

struct Tensor(Dtype, Vec<usize>, Vec<u8>);

impl View for Tensor {
    fn dtype(&self) -> Dtype {
        self.0
    }
    fn shape(&self) -> &[usize] {
        &self.1
    }
    fn data(&self) -> Cow<'_, [u8]> {
        (&self.2).into()
    }
    fn data_len(&self) -> usize {
        self.2.len()
    }
}

/// Errors: those of reading and writing; a changed tensor must be bf16.
pub fn rewrite(from: &Path, to: &Path, changes: &BTreeMap<String, Vec<bf16>>) -> Result<()> {
    let bytes = fs::read(from).map_err(Error::io(from))?;
    let wrong = |e: safetensors::SafeTensorError| Error::malformed(from, e.to_string());
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(wrong)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(wrong)?;
    let mut written = vec![];
    for (name, view) in tensors.iter() {
        let content = match changes.get(name) {
            Some(changed) => changed.iter().flat_map(|x| x.to_le_bytes()).collect(),
            None => view.data().to_vec(),
        };
        written.push((name.to_owned(), Tensor(view.dtype(), view.shape().to_vec(), content)));
    }
    let image = safetensors::serialize(written, metadata.metadata().clone()).map_err(wrong)?;
    fs::write(to, image).map_err(Error::io(to))
}
