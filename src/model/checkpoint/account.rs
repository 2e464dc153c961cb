//! Every tensor accounted for: what the config implies is there with shape and dtype, and nothing else is, but for a
//! listed few.

use std::collections::BTreeSet;

use safetensors::Dtype;

use super::super::config::{ModelConfig, TensorSpec, quantised};
use super::{Checkpoint, Prefix};
use crate::error::{Error, Result};

/// One expected tensor as found.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRow {
    pub spec: TensorSpec,
    /// The name in the file.
    pub stored: String,
    pub dtype: Dtype,
    /// Bytes as stored.
    pub bytes: usize,
}

/// A tensor that the config does not imply and that may be there all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extra {
    pub stored: String,
    pub reason: &'static str,
}

/// The account of a checkpoint that holds what its config implies.
#[derive(Clone, Debug, PartialEq)]
pub struct Accounting {
    pub prefix: Prefix,
    /// In forward order.
    pub tensors: Vec<TensorRow>,
    pub extras: Vec<Extra>,
    /// Tensors in two files with the same bytes.
    pub duplicates: Vec<String>,
    pub parameters: u64,
    /// Bytes as stored, without extras.
    pub bytes: u64,
}

impl Checkpoint {
    /// Accounts for every tensor, expected and found.
    ///
    /// Errors: [`Error::Tensor`] for the first that is missing, of another shape or dtype, or left over;
    /// [`Error::Refused`] for quantised tensors.
    pub fn account(&self, config: &ModelConfig) -> Result<Accounting> {
        let tensors = config.tensors().into_iter().map(|s| self.check(config, s)).collect::<Result<Vec<_>>>()?;
        let extras = self.extras(config)?;
        Ok(Accounting {
            prefix: self.prefix,
            parameters: config.parameters(),
            bytes: tensors.iter().map(|t| t.bytes as u64).sum(),
            tensors,
            extras,
            duplicates: self.duplicates.clone(),
        })
    }

    /// One expected tensor: present, of the expected shape, of a dtype that can be read.
    ///
    /// Errors: as [`Checkpoint::account`].
    pub fn check(&self, config: &ModelConfig, spec: TensorSpec) -> Result<TensorRow> {
        let Some((file, tensor, stored)) = self.find(&spec.name) else {
            return Err(Error::Tensor {
                path: self.dir.clone(),
                found: "nothing".into(),
                expected: format!("shape {:?}{}", spec.shape, hint(config, &spec)),
                tensor: spec.name,
            });
        };
        if tensor.shape != spec.shape {
            return Err(Error::Tensor {
                path: file.path().into(),
                tensor: stored,
                found: format!("shape {:?}", tensor.shape),
                expected: format!("{:?}{}", spec.shape, shape_source(&spec)),
            });
        }
        if !matches!(tensor.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(self.dtype_error(&stored, tensor.dtype));
        }
        Ok(TensorRow { stored, dtype: tensor.dtype, bytes: tensor.bytes(), spec })
    }

    fn dtype_error(&self, stored: &str, dtype: Dtype) -> Error {
        if small(dtype) {
            let what = format!("tensor {stored} of dtype {dtype:?}");
            return Error::Refused { path: self.dir.clone(), what, why: quantised().into() };
        }
        Error::Tensor {
            path: self.dir.clone(),
            tensor: stored.into(),
            found: format!("{dtype:?}"),
            expected: "BF16, F16 or F32".into(),
        }
    }

    /// Tensors beyond the expected, each with the reason why it may be there.
    ///
    /// Errors: as [`Checkpoint::account`].
    pub fn extras(&self, config: &ModelConfig) -> Result<Vec<Extra>> {
        let expected: BTreeSet<String> =
            config.tensors().iter().map(|s| self.stored_name(&s.name).into_owned()).collect();
        let head = self.prefix.stored("lm_head.weight").into_owned();
        let mut extras = Vec::new();
        for name in self.owner.keys().filter(|n| !expected.contains(*n)) {
            let reason = if name.ends_with("rotary_emb.inv_freq") {
                "inverse frequencies that HF computes anew from the config"
            } else if *name == head && config.tie_word_embeddings {
                self.tied_head(name)?;
                "equal to the embedding that it is tied to"
            } else {
                return Err(self.left_over(name));
            };
            extras.push(Extra { stored: name.clone(), reason });
        }
        Ok(extras)
    }

    /// A head stored beside a tied embedding must be that embedding.
    fn tied_head(&self, head: &str) -> Result<()> {
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let same = self.dtype(head) == self.dtype(EMBEDDING)
            && self.shape(head) == self.shape(EMBEDDING)
            && self.bytes(head)? == self.bytes(EMBEDDING)?;
        if same {
            return Ok(());
        }
        Err(Error::Tensor {
            path: self.dir.clone(),
            tensor: head.into(),
            found: "values other than the embedding's".into(),
            expected: "the embedding, as tie_word_embeddings is true".into(),
        })
    }

    fn left_over(&self, name: &str) -> Error {
        const MARKS: &[&str] =
            &["qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "absmax", "input_scale"];
        if let Some(dtype) = self.dtype(name)
            && (small(dtype) || MARKS.iter().any(|m| name.ends_with(m)))
        {
            let what = format!("tensor {name} of dtype {dtype:?}");
            return Error::Refused { path: self.dir.clone(), what, why: quantised().into() };
        }
        Error::Tensor {
            path: self.dir.clone(),
            tensor: name.into(),
            found: format!("{:?} {:?}", self.dtype(name).unwrap_or(Dtype::U8), self.shape(name).unwrap_or(&[])),
            expected: "no such tensor: nothing in the config accounts for it".into(),
        }
    }
}

/// Eight bits or fewer: the storage of quantised weights.
fn small(dtype: Dtype) -> bool {
    dtype.bitsize() <= 8
}

fn hint(config: &ModelConfig, spec: &TensorSpec) -> String {
    match spec.part {
        "lm_head" => ", as tie_word_embeddings is false".into(),
        part if part.ends_with("_bias") => format!(", as {} has this bias by its config", config.architecture.class()),
        "q_norm" | "k_norm" => format!(", as {} norms q and k", config.architecture.class()),
        _ => String::new(),
    }
}

/// The keys that a shape follows from.
fn shape_source(spec: &TensorSpec) -> &'static str {
    match spec.part {
        "embed_tokens" | "lm_head" => " (vocab_size, hidden_size)",
        "q_proj" => " (num_attention_heads * head_dim, hidden_size)",
        "k_proj" | "v_proj" => " (num_key_value_heads * head_dim, hidden_size)",
        "o_proj" => " (hidden_size, num_attention_heads * head_dim)",
        "gate_proj" | "up_proj" => " (intermediate_size, hidden_size)",
        "down_proj" => " (hidden_size, intermediate_size)",
        _ => "",
    }
}
