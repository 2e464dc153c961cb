//! Our reading of a config against HF's own (`config.to_dict()`), key by key.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::coverage::{Coverage, computation, irrelevant, off};
use super::{Architecture, ModelConfig, RopeKind};

/// A key that we resolve otherwise than HF.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    pub key: String,
    /// Null where we have no such key.
    pub ours: Value,
    /// Null where HF has none.
    pub hf: Value,
}

impl ModelConfig {
    /// This config in HF's words, flat: what `config.to_dict()` has to say for every key that we use.
    pub fn resolved(&self) -> Map<String, Value> {
        let mut map = Map::new();
        let mut set = |key: &str, value: Value| map.insert(key.into(), value);
        set("model_type", json!(self.architecture.model_type()));
        set("vocab_size", json!(self.vocab_size));
        set("hidden_size", json!(self.hidden_size));
        set("intermediate_size", json!(self.intermediate_size));
        set("num_hidden_layers", json!(self.num_hidden_layers));
        set("num_attention_heads", json!(self.num_attention_heads));
        set("num_key_value_heads", json!(self.num_key_value_heads));
        set("head_dim", json!(self.head_dim));
        set("max_position_embeddings", json!(self.max_position_embeddings));
        set("rms_norm_eps", json!(self.rms_norm_eps));
        set("hidden_act", json!("silu"));
        set("tie_word_embeddings", json!(self.tie_word_embeddings));
        set("bos_token_id", json!(self.bos_token_id));
        set("eos_token_id", json!(self.eos_token_ids));
        if matches!(self.architecture, Architecture::Llama | Architecture::Qwen3) {
            let one = self.qkv_bias == self.o_bias;
            set("attention_bias", if one { json!(self.o_bias) } else { json!("not the same of q, k, v and o") });
        }
        if self.architecture == Architecture::Llama {
            set("mlp_bias", json!(self.mlp_bias));
        }
        set("rope_parameters.rope_theta", json!(self.rope.rope_theta));
        set("rope_parameters.rope_type", json!(self.rope.kind.name()));
        match self.rope.kind {
            RopeKind::Default => {}
            RopeKind::Linear { factor } | RopeKind::Dynamic { factor } => {
                set("rope_parameters.factor", json!(factor));
            }
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                set("rope_parameters.factor", json!(factor));
                set("rope_parameters.low_freq_factor", json!(low_freq_factor));
                set("rope_parameters.high_freq_factor", json!(high_freq_factor));
                set("rope_parameters.original_max_position_embeddings", json!(original_max_position_embeddings));
            }
        }
        set("sliding_window", Value::Null);
        map
    }

    /// Every key that we and HF resolve differently, and every computing key of HF's that we do not know.
    pub fn resolved_differences(&self, hf: &Value) -> Vec<Difference> {
        let ours = self.resolved();
        let theirs = flatten(hf);
        let mut found = Vec::new();
        for (key, ours) in &ours {
            let hf = theirs.get(key).cloned().unwrap_or(Value::Null);
            if !self.agrees(key, ours, &hf, &theirs) {
                found.push(Difference { key: key.clone(), ours: ours.clone(), hf });
            }
        }
        if let Some(types) = theirs.get("layer_types").filter(|t| !t.is_null() && !self.all_full(t)) {
            let ours = json!(vec!["full_attention"; self.num_hidden_layers]);
            found.push(Difference { key: "layer_types".into(), ours, hf: types.clone() });
        }
        for (key, hf) in &theirs {
            if !self.accounts_for(key, hf) && computation(key).is_some() {
                found.push(Difference { key: key.clone(), ours: Value::Null, hf: hf.clone() });
            }
        }
        found
    }

    /// Whether a key of HF's resolved config is in our account: compared, settled elsewhere, irrelevant or switched off.
    pub fn accounts_for(&self, key: &str, hf: &Value) -> bool {
        let inside = format!("{key}.");
        let compared = |known: &String| known == key || known.starts_with(&inside);
        self.resolved().keys().any(compared) || knows(key) || off(hf)
    }

    /// Keys that we do not use and that config.json states otherwise than HF resolved them: HF did not read this file.
    /// HF keeps what it does not know as it stands, so an unknown key that HF has not is such a key too.
    pub fn stated_differences(&self, stated: &Value, coverage: &Coverage, hf: &Value) -> Vec<Difference> {
        let resolved = self.resolved();
        let difference = |(key, ours): (&String, &Value)| {
            let known = knows(key) && !REWRITTEN.contains(&key.as_str()) && !resolved.contains_key(key);
            let hf = match hf.get(key) {
                Some(hf) if known || coverage.unknown.contains(key) => hf,
                None if coverage.unknown.contains(key) => &Value::Null,
                _ => return None,
            };
            let differs = !ours.is_null() && !same(ours, hf);
            differs.then(|| Difference { key: key.clone(), ours: ours.clone(), hf: hf.clone() })
        };
        stated.as_object().into_iter().flatten().filter_map(difference).collect()
    }

    fn all_full(&self, layer_types: &Value) -> bool {
        let full = |types: &Vec<Value>| types.iter().all(|t| t == "full_attention");
        layer_types.as_array().is_some_and(|types| types.len() == self.num_hidden_layers && full(types))
    }

    fn agrees(&self, key: &str, ours: &Value, hf: &Value, theirs: &Map<String, Value>) -> bool {
        match key {
            // Qwen2's class derives it in the model, not in the config.
            "head_dim" if hf.is_null() => self.head_dim * self.num_attention_heads == self.hidden_size,
            "eos_token_id" => ids(ours) == ids(hf),
            "hidden_act" => matches!(hf.as_str(), Some("silu" | "swish")),
            // A window without a layer to apply it is none.
            "sliding_window" => hf.is_null() || theirs.get("layer_types").is_some_and(|t| self.all_full(t)),
            _ => same(ours, hf),
        }
    }
}

fn knows(key: &str) -> bool {
    OURS_ELSEWHERE.contains(&key) || irrelevant(key).is_some()
}

/// HF keys that [`ModelConfig`] knows under another name or has settled before.
const OURS_ELSEWHERE: &[&str] = &[
    "architectures",
    "layer_types",
    "max_window_layers",
    "use_sliding_window",
    "dtype",
    "torch_dtype",
    "rope_parameters.type",
    "rope_parameters.partial_rotary_factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "rope_parameters.original_max_position_embeddings",
    "attention_bias",
    "rope_theta",
];

/// Keys that HF writes anew when it loads a model, whatever the file says.
const REWRITTEN: &[&str] = &["transformers_version", "dtype", "torch_dtype", "rope_theta", "_commit_hash"];

/// The object's keys with `rope_parameters` lifted to `rope_parameters.<key>`.
fn flatten(hf: &Value) -> Map<String, Value> {
    let mut flat = Map::new();
    for (key, value) in hf.as_object().into_iter().flatten() {
        match (key.as_str(), value) {
            ("rope_parameters" | "rope_scaling", Value::Object(inner)) => {
                for (k, v) in inner {
                    flat.insert(format!("rope_parameters.{k}"), v.clone());
                }
            }
            _ => {
                flat.insert(key.clone(), value.clone());
            }
        }
    }
    flat
}

/// Equal as numbers, whichever way they are written.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// One id or a list of them, as a sorted list.
fn ids(v: &Value) -> Vec<u64> {
    let mut ids: Vec<u64> = match v {
        Value::Array(a) => a.iter().filter_map(Value::as_u64).collect(),
        v => v.as_u64().into_iter().collect(),
    };
    ids.sort_unstable();
    ids.dedup();
    ids
}
