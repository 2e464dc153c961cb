//! A Llama GGUF -> an HF checkpoint directory: bf16 weights, config and tokenizer.
//!
//! Weights are dequantised in f32 and rounded once to bf16; from then on the bf16 values ARE the model. llama.cpp
//! stores the rows of attn_q and attn_k permuted for interleaved RoPE, which is undone.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use half::bf16;
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer};

use super::super::gguf::{Gguf, GgufValue};
use super::Progress;
use crate::error::{Error, Result};
use crate::tensor::bytes_of;

/// GGUF block part -> HF module.
const PARTS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// GGUF name -> HF name outside the blocks.
const TOP: &[(&str, &str)] = &[
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// GGUF's token type of control tokens.
const CONTROL: u64 = 3;

/// Writes the checkpoint that `gguf` holds into `out`, an empty folder.
///
/// Errors: [`Error::Malformed`], [`Error::Key`], [`Error::Tensor`] for what is no Llama GGUF; [`Error::Io`].
pub fn convert(gguf: &Path, out: &Path, progress: &mut dyn FnMut(Progress)) -> Result<()> {
    let file = std::fs::File::open(gguf).map_err(Error::io(gguf))?;
    // SAFETY: read-only, alive for this call only, over a file that is written by rename and whose hash was just
    // checked; nobody shortens it in place.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(Error::io(gguf))?;
    let gguf = Gguf::parse(gguf, &map)?;
    let config = config(&gguf)?;
    write_json(&out.join("config.json"), &config)?;
    let generation = json!({
        "_from_model_config": true,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    });
    write_json(&out.join("generation_config.json"), &generation)?;
    tokenizer(&gguf, out)?;
    weights(&gguf, &out.join("model.safetensors"), progress)
}

/// `config.json` in the spelling of transformers 4, as the published Llama repositories have it.
fn config(gguf: &Gguf<'_>) -> Result<Value> {
    let (hidden, heads) = (gguf.uint("llama.embedding_length")?, gguf.uint("llama.attention.head_count")?);
    let eps = gguf.float("llama.attention.layer_norm_rms_epsilon")?;
    // Stored in f32: six digits are what was meant.
    let eps: f64 = format!("{eps:.5e}").parse().unwrap_or(eps);
    Ok(json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": gguf.uint("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": gguf.uint("tokenizer.ggml.eos_token_id")?,
        "pad_token_id": gguf.uint("tokenizer.ggml.padding_token_id")?,
        "head_dim": hidden.checked_div(heads).unwrap_or(0),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": gguf.uint("llama.feed_forward_length")?,
        "max_position_embeddings": gguf.uint("llama.context_length")?,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.uint("llama.block_count")?,
        "num_key_value_heads": gguf.uint("llama.attention.head_count_kv")?,
        "rms_norm_eps": eps,
        "rope_scaling": null,
        "rope_theta": gguf.float("llama.rope.freq_base")?,
        "tie_word_embeddings": !gguf.tensors.contains_key("output.weight"),
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": gguf.uint("llama.vocab_size")?,
    }))
}

/// JSON as Python's `json.dump(indent=2)` writes it, so that the file's hash is the prototype's.
fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::malformed(path, e.to_string()))?;
    std::fs::write(path, text.replace(": 0.00001,", ": 1e-05,")).map_err(Error::io(path))
}

fn tokenizer(gguf: &Gguf<'_>, out: &Path) -> Result<()> {
    let tokens = gguf.strings("tokenizer.ggml.tokens")?;
    let types = gguf.array("tokenizer.ggml.token_type")?;
    let control = |v: &GgufValue| matches!(v, GgufValue::Signed(3) | GgufValue::Unsigned(CONTROL));
    let special: Vec<(usize, &str)> =
        tokens.iter().zip(types).enumerate().filter(|(_, (_, t))| control(t)).map(|(i, (s, _))| (i, *s)).collect();
    let path = out.join("tokenizer.json");
    build_tokenizer(gguf, &tokens, &special, &path)?;

    let token = |key: &str| -> Result<&str> {
        let id = gguf.uint(key)? as usize;
        let wrong = || Error::malformed(&path, format!("{key}: found {id}, expected an id below {}", tokens.len()));
        tokens.get(id).copied().ok_or_else(wrong)
    };
    let added = |content: &str| json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true});
    let decoder: serde_json::Map<String, Value> = special.iter().map(|(i, s)| (i.to_string(), added(s))).collect();
    let settings = json!({
        "add_prefix_space": false,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": token("tokenizer.ggml.bos_token_id")?,
        "eos_token": token("tokenizer.ggml.eos_token_id")?,
        "pad_token": token("tokenizer.ggml.padding_token_id")?,
        "unk_token": token("tokenizer.ggml.unknown_token_id")?,
        "chat_template": gguf.string("tokenizer.chat_template")?,
        "clean_up_tokenization_spaces": false,
        "model_max_length": gguf.uint("llama.context_length")?,
        // Not GPT2Tokenizer, what the published repository says: transformers 5 would rebuild the pre-tokenizer as a
        // plain ByteLevel and drop Digits; this class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    write_json(&out.join("tokenizer_config.json"), &settings)
}

fn build_tokenizer(gguf: &Gguf<'_>, tokens: &[&str], special: &[(usize, &str)], path: &Path) -> Result<()> {
    let bad = |e: tokenizers::Error| Error::malformed(path, format!("the GGUF's tokenizer: {e}"));
    let vocab: Vocab = tokens.iter().enumerate().map(|(i, t)| (t.to_string(), i as u32)).collect();
    let mut merges = Vec::new();
    for merge in gguf.strings("tokenizer.ggml.merges")? {
        match merge.split_once(' ') {
            Some((a, b)) => merges.push((a.to_string(), b.to_string())),
            None => return Err(Error::malformed(path, format!("merge: found {merge:?}, expected two tokens"))),
        }
    }
    let model = BPE::builder().vocab_and_merges(vocab, merges).build().map_err(bad)?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Digits(Digits::new(true)),
        PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true)),
    ])));
    tokenizer.with_decoder(Some(ByteLevel::new(true, true, true)));
    let added = special.iter().map(|(_, t)| AddedToken::from(*t, true).normalized(false));
    tokenizer.add_special_tokens(added).map_err(bad)?;
    tokenizer.save(path, true).map_err(bad)
}

/// Every tensor, dequantised one at a time while the file is written.
fn weights(gguf: &Gguf<'_>, path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<()> {
    let heads = gguf.uint("llama.attention.head_count")? as usize;
    let kv_heads = gguf.uint("llama.attention.head_count_kv")? as usize;
    let mut tensors = Vec::new();
    for (i, (name, tensor)) in gguf.tensors.iter().enumerate() {
        progress(Progress { step: "convert", done: i as u64, total: gguf.tensors.len() as u64 });
        let (hf, part) = hf_name(path, name)?;
        let mut values = gguf.f32(name)?;
        match part {
            "attn_q" => values = unpermute(path, name, &values, &tensor.shape, heads)?,
            "attn_k" => values = unpermute(path, name, &values, &tensor.shape, kv_heads)?,
            _ => {}
        }
        let values = values.into_iter().map(bf16::from_f32).collect();
        tensors.push((hf, Bf16Tensor { shape: tensor.shape.clone(), values }));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(tensors, Some(metadata), path)
        .map_err(|e| Error::malformed(path, format!("cannot be written: {e}")))
}

/// A GGUF tensor's HF name, and its part within its block.
fn hf_name<'a>(path: &Path, name: &'a str) -> Result<(String, &'a str)> {
    if let Some((_, hf)) = TOP.iter().find(|(gguf, _)| *gguf == name) {
        return Ok((hf.to_string(), ""));
    }
    if let ["blk", layer, part, "weight"] = name.split('.').collect::<Vec<_>>()[..]
        && let Some((_, module)) = PARTS.iter().find(|(gguf, _)| *gguf == part)
        && layer.parse::<usize>().is_ok()
    {
        return Ok((format!("model.layers.{layer}.{module}.weight"), part));
    }
    Err(Error::malformed(path, format!("the GGUF's tensor {name}: expected a tensor of a Llama")))
}

/// Undoes llama.cpp's permutation of a head's rows: interleaved pairs -> two halves.
///
/// Shapes: `[heads * head_dim, cols] -> the same`.
fn unpermute(path: &Path, name: &str, w: &[f32], shape: &[usize], heads: usize) -> Result<Vec<f32>> {
    let [rows, cols] = shape[..] else {
        return Err(Error::malformed(
            path,
            format!("the GGUF's tensor {name}: found shape {shape:?}, expected a matrix"),
        ));
    };
    if heads == 0 || rows % (2 * heads) != 0 {
        return Err(Error::malformed(path, format!("the GGUF's tensor {name}: {rows} rows over {heads} heads")));
    }
    let (head_dim, half) = (rows / heads, rows / heads / 2);
    let mut out = Vec::with_capacity(w.len());
    for row in 0..rows {
        let (head, within) = (row / head_dim, row % head_dim);
        let from = head * head_dim + 2 * (within % half) + within / half;
        out.extend_from_slice(&w[from * cols..(from + 1) * cols]);
    }
    Ok(out)
}

struct Bf16Tensor {
    shape: Vec<usize>,
    values: Vec<bf16>,
}

impl View for Bf16Tensor {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(bytes_of(&self.values))
    }

    fn data_len(&self) -> usize {
        self.values.len() * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_put_back() {
        // Two heads of four rows, one column: llama.cpp stores (0, 2, 1, 3) for (0, 1, 2, 3).
        let stored = [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0];
        let w = unpermute(Path::new("x"), "q", &stored, &[8, 1], 2).expect("a matrix of two heads");
        assert_eq!(w, [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]);
        assert!(unpermute(Path::new("x"), "q", &stored, &[8, 1], 3).is_err());
    }
}
