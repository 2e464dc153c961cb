//! `config.json` -> [`ModelConfig`]: what Hugging Face's config class would make of it, or the reason why not.
//!
//! Every key is used, known to be irrelevant, or refused ([`Coverage`]); nothing is guessed and no family borrows
//! another's defaults. Reads no tensor.

pub mod coverage;
mod keys;
mod parse;
mod refuse;
mod resolved;
pub mod rope;
mod sleef;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

pub use coverage::Coverage;
pub(super) use refuse::{quantised, quantised_beside};
pub use resolved::Difference;
pub use rope::{RopeKind, RopeParameters, RopeTable};

use crate::error::{Error, Result};

/// The file's name inside a checkpoint.
pub const CONFIG_FILE: &str = "config.json";

/// A JSON file larger than this is not a configuration.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// The decoder families in scope, by HF class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`, without sliding window
    Mistral,
    /// `Qwen2ForCausalLM`: bias on q, k and v
    Qwen2,
    /// `Qwen3ForCausalLM`: per-head RMSNorm of q and k before RoPE, head_dim of its own
    Qwen3,
}

impl Architecture {
    pub const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3];

    /// The HF class name, as `architectures` has it.
    pub fn class(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// HF's `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
        }
    }
}

/// The activation between gate and up projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    Silu,
}

/// One in-scope decoder, defaults resolved as HF's config class resolves them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub hidden_act: Activation,
    pub rope: RopeParameters,
    pub tie_word_embeddings: bool,
    /// Bias on q_proj, k_proj and v_proj.
    pub qkv_bias: bool,
    /// Bias on o_proj.
    pub o_bias: bool,
    /// Bias on gate_proj, up_proj and down_proj.
    pub mlp_bias: bool,
    /// RMSNorm of each q and k head before RoPE (`q_norm`, `k_norm`).
    pub qk_norm: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

/// One tensor that the config implies, under its canonical HF name (with the `model.` prefix).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Row-major, as stored: `[out_features, in_features]` for a projection.
    pub shape: Vec<usize>,
    /// Block index; none for the embedding, the final norm and the head.
    pub layer: Option<usize>,
    /// What it is within its block: `q_proj`, `q_proj_bias`, `input_layernorm`, `embed_tokens`, `norm`, `lm_head` ...
    pub part: &'static str,
}

impl ModelConfig {
    /// Reads `path`; a directory means the `config.json` in it.
    ///
    /// Errors: [`Error::Io`], [`Error::Malformed`], and those of [`ModelConfig::from_json`].
    pub fn from_file(path: &Path) -> Result<(ModelConfig, Coverage)> {
        let path = if path.is_dir() { path.join(CONFIG_FILE) } else { path.to_owned() };
        Self::from_json(&path, &read_json(&path)?)
    }

    /// Resolves a parsed `config.json`; `path` is for messages only.
    ///
    /// Errors: [`Error::Key`] for a value that cannot be right, [`Error::Refused`] for what is sound but out of scope.
    pub fn from_json(path: &Path, json: &Value) -> Result<(ModelConfig, Coverage)> {
        parse::parse(path, json)
    }

    /// Width of all query heads together: `num_attention_heads * head_dim`.
    pub fn q_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together: `num_key_value_heads * head_dim`.
    pub fn kv_dim(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Every tensor a checkpoint of this config holds, in forward order. A tied head has no tensor of its own.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let (h, i, q, kv) = (self.hidden_size, self.intermediate_size, self.q_dim(), self.kv_dim());
        let mut specs = vec![top("model.embed_tokens.weight", vec![self.vocab_size, h], "embed_tokens")];
        for layer in 0..self.num_hidden_layers {
            let mut block = |module: &str, kind: &str, shape: Vec<usize>, part| {
                specs.push(TensorSpec {
                    name: format!("model.layers.{layer}.{module}.{kind}"),
                    shape,
                    layer: Some(layer),
                    part,
                });
            };
            block("input_layernorm", "weight", vec![h], "input_layernorm");
            let qkv = [
                ("self_attn.q_proj", q, "q_proj", "q_proj_bias"),
                ("self_attn.k_proj", kv, "k_proj", "k_proj_bias"),
                ("self_attn.v_proj", kv, "v_proj", "v_proj_bias"),
            ];
            for (module, rows, part, bias) in qkv {
                block(module, "weight", vec![rows, h], part);
                if self.qkv_bias {
                    block(module, "bias", vec![rows], bias);
                }
            }
            if self.qk_norm {
                block("self_attn.q_norm", "weight", vec![self.head_dim], "q_norm");
                block("self_attn.k_norm", "weight", vec![self.head_dim], "k_norm");
            }
            block("self_attn.o_proj", "weight", vec![h, q], "o_proj");
            if self.o_bias {
                block("self_attn.o_proj", "bias", vec![h], "o_proj_bias");
            }
            block("post_attention_layernorm", "weight", vec![h], "post_attention_layernorm");
            let mlp = [
                ("mlp.gate_proj", i, h, "gate_proj", "gate_proj_bias"),
                ("mlp.up_proj", i, h, "up_proj", "up_proj_bias"),
                ("mlp.down_proj", h, i, "down_proj", "down_proj_bias"),
            ];
            for (module, rows, cols, part, bias) in mlp {
                block(module, "weight", vec![rows, cols], part);
                if self.mlp_bias {
                    block(module, "bias", vec![rows], bias);
                }
            }
        }
        specs.push(top("model.norm.weight", vec![h], "norm"));
        if !self.tie_word_embeddings {
            specs.push(top("lm_head.weight", vec![self.vocab_size, h], "lm_head"));
        }
        specs
    }

    /// Parameters in all tensors of [`ModelConfig::tensors`].
    pub fn parameters(&self) -> u64 {
        self.tensors().iter().map(|t| t.shape.iter().map(|&d| d as u64).product::<u64>()).sum()
    }
}

fn top(name: &str, shape: Vec<usize>, part: &'static str) -> TensorSpec {
    TensorSpec { name: name.into(), shape, layer: None, part }
}

/// Reads a JSON file of reasonable size, naming the usual mistake: a page saved in place of the file.
///
/// Errors: [`Error::Io`], [`Error::Malformed`].
pub fn read_json(path: &Path) -> Result<Value> {
    parse_json(path, &read_bytes(path)?)
}

/// [`read_json`] of a file that must hold an object.
///
/// Errors: as [`read_json`].
pub fn read_object(path: &Path) -> Result<Value> {
    let json = read_json(path)?;
    let found = match &json {
        Value::Object(_) => return Ok(json),
        Value::Array(_) => "an array",
        Value::String(_) => "a string",
        _ => "a single value",
    };
    Err(Error::malformed(path, format!("found {found}, expected an object")))
}

/// Reads a file of the size that a JSON file may have.
///
/// Errors: [`Error::Io`], [`Error::Malformed`].
pub(super) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let size = std::fs::metadata(path).map_err(Error::io(path))?.len();
    if size > MAX_JSON_BYTES {
        return Err(Error::malformed(path, format!("{size} bytes, expected a JSON file of at most {MAX_JSON_BYTES}")));
    }
    std::fs::read(path).map_err(Error::io(path))
}

/// Parses JSON bytes; `path` is for messages only.
///
/// Errors: [`Error::Malformed`].
pub fn parse_json(path: &Path, bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|e| Error::not_json(path, bytes, &e))
}
