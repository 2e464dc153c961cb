//! The account of a config's keys, and the one list of keys that are known to change nothing.

use serde::Serialize;
use serde_json::Value;

use super::keys::Keys;
use crate::error::Result;

/// What became of every key of a `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// Keys that determine the [`super::ModelConfig`].
    pub used: Vec<String>,
    /// Keys that change nothing, each with the reason.
    pub irrelevant: Vec<(String, String)>,
    /// Keys that nobody here knows and that do not look like part of a computation.
    pub unknown: Vec<String>,
}

impl Coverage {
    /// Adds an object's keys; a key in no account is looked up in [`IRRELEVANT`].
    ///
    /// Errors: refused when an unknown key looks like part of a computation.
    pub fn add(&mut self, keys: &Keys<'_>) -> Result<()> {
        for (key, value, account) in keys.account() {
            let name = keys.name(key);
            match account {
                Some(None) => self.used.push(name),
                Some(Some(reason)) => self.irrelevant.push((name, reason.clone())),
                None if value.is_null() => self.irrelevant.push((name, "null means absent".into())),
                None => match irrelevant(key) {
                    Some(reason) => self.irrelevant.push((name, reason.into())),
                    None if let Some(part) = computation(&name) => {
                        let why = format!("an unknown key that seems to belong to a computation ({part})");
                        return Err(keys.refused(key, value, why));
                    }
                    None => self.unknown.push(name),
                },
            }
        }
        Ok(())
    }

    /// Nothing unknown.
    pub fn complete(&self) -> bool {
        self.unknown.is_empty()
    }
}

/// Why a key is irrelevant whatever its value, if it is.
pub fn irrelevant(key: &str) -> Option<&'static str> {
    IRRELEVANT.iter().find(|(_, keys)| keys.contains(&key)).map(|(reason, _)| *reason)
}

/// Keys without influence on the logits of greedy inference, by reason.
pub const IRRELEVANT: &[(&str, &[&str])] = &[
    (
        "training only",
        &[
            "attention_dropout",
            "attn_pdrop",
            "dropout",
            "embd_pdrop",
            "resid_pdrop",
            "hidden_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "initializer_range",
            "neftune_noise_alpha",
            "gradient_checkpointing",
            "label_smoothing",
            "tf_legacy_loss",
        ],
    ),
    (
        "how the software runs, not what it computes",
        &[
            "use_cache",
            "cache_implementation",
            "torchscript",
            "use_bfloat16",
            "attn_implementation",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_attn_implementation_internal",
            "_flash_attn_2_enabled",
            "use_flash_attn",
            "use_flash_attention",
            "experts_implementation",
            "use_remove_padding",
            "chunk_size_feed_forward",
        ],
    ),
    (
        "selects what HF returns",
        &["return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "tie_last_hidden_states"],
    ),
    ("HF no longer applies it: the sum is the same but for rounding", &["pretraining_tp"]),
    (
        "provenance",
        &[
            "transformers_version",
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "unsloth_version",
            "unsloth_fixed",
            "auto_map",
            "transformers.js_config",
            "is_llama_config",
            "license",
            "model_name",
            "finetuning_task",
            "custom_pipelines",
        ],
    ),
    (
        "concerns the tokenizer or padding; pad positions never influence a logit",
        &[
            "pad_token_id",
            "pad_token",
            "sep_token_id",
            "cls_token_id",
            "unk_token_id",
            "mask_token_id",
            "tokenizer_class",
            "model_max_length",
            "prefix",
        ],
    ),
    (
        "classification heads only",
        &["id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "classifier_dropout"],
    ),
    (
        "encoder-decoder models only",
        &["decoder_start_token_id", "tie_encoder_decoder", "cross_attention_hidden_size", "is_decoder"],
    ),
    (
        "sampling; every gate decodes greedily",
        &[
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "max_length",
            "max_new_tokens",
            "min_length",
            "num_beams",
            "num_beam_groups",
            "num_return_sequences",
            "diversity_penalty",
            "length_penalty",
            "repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "early_stopping",
            "bad_words_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "remove_invalid_values",
            "return_dict_in_generate",
            "output_scores",
            "generation_config",
        ],
    ),
];

/// Parts of a computation, and the words in a key that betray each.
const COMPUTATION: &[(&str, &[&str])] = &[
    ("rope", &["rope", "rotary", "mrope", "yarn", "ntk", "position", "positional", "alibi"]),
    (
        "attention",
        &["attn", "attention", "qk", "qkv", "kv", "q", "k", "v", "query", "key", "value", "softmax", "lora", "latent"],
    ),
    ("norm", &["norm", "layernorm", "rmsnorm", "rms", "eps", "epsilon"]),
    ("activation", &["act", "activation", "gelu", "silu", "swiglu", "glu"]),
    ("head", &["head", "heads", "lm", "logit", "logits", "softcap", "softcapping", "tie", "tied"]),
    ("window", &["window", "sliding", "chunk", "local", "global"]),
    ("experts", &["expert", "experts", "moe", "router", "routed", "shared", "topk", "sparse"]),
    (
        "layers",
        &[
            "layer", "layers", "depth", "residual", "parallel", "mlp", "ffn", "bias", "biases", "conv", "ssm", "mamba",
            "mtp", "nextn",
        ],
    ),
    ("scale", &["scale", "scales", "scaling", "multiplier", "embed", "embedding", "embeddings", "clip", "alpha"]),
    ("quantisation", &["quant", "quantization", "quantized", "compression", "bits", "fp8"]),
];

/// The part of a computation that a key seems to belong to, by its words.
pub fn computation(key: &str) -> Option<&'static str> {
    let lower = key.to_ascii_lowercase();
    let mut words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    // A `.._key` or `.._value` may be any key or value.
    words.pop_if(|last| ["key", "value"].contains(last));
    COMPUTATION.iter().find(|(_, marks)| words.iter().any(|w| marks.contains(w))).map(|(part, _)| *part)
}

/// Whether a value switches its key off: false, zero, an empty list or object.
pub fn off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::Bool(true) | Value::String(_) => false,
    }
}
