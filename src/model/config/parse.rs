//! Resolves a config the way the four HF config classes do: family defaults, old and new spellings, conflicts.
//!
//! Source: transformers 5.24.0, `configuration_{llama,mistral,qwen2,qwen3}.py` and `configuration_utils.py`.

use std::path::Path;

use serde_json::{Map, Value};

use super::keys::{Keys, Slot, brief};
use super::{Activation, Architecture, Coverage, ModelConfig, RopeKind, RopeParameters, refuse};
use crate::error::{Error, Result};

/// Upper bounds of sizes, far above any real model: beyond them a product could overflow.
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_POSITIONS: usize = 1 << 31;

/// Where the families' classes differ.
struct Family {
    vocab_size: usize,
    intermediate_size: usize,
    /// None: as many as heads.
    num_key_value_heads: Option<usize>,
    /// None: hidden_size / num_attention_heads.
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    /// Whether the class has a field `attention_bias` that the model honours.
    reads_attention_bias: bool,
    /// The same for `mlp_bias`.
    reads_mlp_bias: bool,
}

const ROPE_THETA: f64 = 10_000.0;
const RMS_NORM_EPS: f64 = 1e-6;
const HIDDEN_SIZE: usize = 4096;
const LAYERS: usize = 32;
const HEADS: usize = 32;

fn family(architecture: Architecture) -> Family {
    match architecture {
        Architecture::Llama => Family {
            vocab_size: 32_000,
            intermediate_size: 11_008,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            bos_token_id: Some(1),
            eos_token_id: Some(2),
            reads_attention_bias: true,
            reads_mlp_bias: true,
        },
        Architecture::Mistral => Family {
            vocab_size: 32_000,
            intermediate_size: 14_336,
            num_key_value_heads: Some(8),
            head_dim: None,
            max_position_embeddings: 131_072,
            bos_token_id: Some(1),
            eos_token_id: Some(2),
            reads_attention_bias: false,
            reads_mlp_bias: false,
        },
        Architecture::Qwen2 | Architecture::Qwen3 => Family {
            vocab_size: 151_936,
            intermediate_size: 22_016,
            num_key_value_heads: Some(32),
            head_dim: (architecture == Architecture::Qwen3).then_some(128),
            max_position_embeddings: 32_768,
            bos_token_id: None,
            eos_token_id: None,
            reads_attention_bias: architecture == Architecture::Qwen3,
            reads_mlp_bias: false,
        },
    }
}

/// The whole way from JSON to config and account.
pub fn parse(path: &Path, json: &Value) -> Result<(ModelConfig, Coverage)> {
    let mut keys = Keys::new(path, "", refuse::object(path, json)?);
    let mut coverage = Coverage::default();
    refuse::switches(&mut keys)?;
    let architecture = refuse::architecture(&mut keys)?;
    let family = family(architecture);
    refuse::dtype(&mut keys)?;

    let vocab_size = keys.size("vocab_size", MAX_VOCAB)?.unwrap_or(family.vocab_size);
    let hidden_size = keys.size("hidden_size", MAX_WIDTH)?.unwrap_or(HIDDEN_SIZE);
    let intermediate_size = keys.size("intermediate_size", MAX_WIDTH)?.unwrap_or(family.intermediate_size);
    let num_hidden_layers = keys.size("num_hidden_layers", MAX_LAYERS)?.unwrap_or(LAYERS);
    let max_position_embeddings =
        keys.size("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(family.max_position_embeddings);
    let heads = heads(&mut keys, &family, hidden_size, architecture)?;
    refuse::window(&mut keys, architecture, num_hidden_layers)?;
    let attention_bias = attention_bias(&mut keys, architecture, &family)?;
    let config = ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads: heads.query,
        num_key_value_heads: heads.key_value,
        head_dim: heads.dim,
        max_position_embeddings,
        rms_norm_eps: eps(&mut keys)?.unwrap_or(RMS_NORM_EPS),
        hidden_act: activation(&mut keys)?,
        rope: rope(&mut keys, &mut coverage, max_position_embeddings)?,
        tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: attention_bias || architecture == Architecture::Qwen2,
        o_bias: attention_bias,
        mlp_bias: mlp_bias(&mut keys, architecture, &family)?,
        qk_norm: architecture == Architecture::Qwen3,
        bos_token_id: special(&mut keys, "bos_token_id", vocab_size, family.bos_token_id)?.first().copied(),
        eos_token_ids: special(&mut keys, "eos_token_id", vocab_size, family.eos_token_id)?,
    };
    coverage.add(&keys)?;
    coverage.used.sort();
    coverage.irrelevant.sort();
    coverage.unknown.sort();
    Ok((config, coverage))
}

struct Heads {
    query: usize,
    key_value: usize,
    dim: usize,
}

fn heads(keys: &mut Keys<'_>, family: &Family, hidden_size: usize, architecture: Architecture) -> Result<Heads> {
    let query = keys.size("num_attention_heads", MAX_WIDTH)?.unwrap_or(HEADS);
    // HF tells null (as many as heads) from absence (the class's default) here.
    let key_value = match keys.slot("num_key_value_heads") {
        Slot::Absent => family.num_key_value_heads.unwrap_or(query),
        Slot::Null => query,
        Slot::Set(_) => keys.size("num_key_value_heads", MAX_WIDTH)?.unwrap_or(query),
    };
    if query % key_value != 0 {
        let found = format!("{key_value}");
        return Err(keys.wrong("num_key_value_heads", found, format!("a divisor of num_attention_heads {query}")));
    }
    let stated = keys.size("head_dim", MAX_HEAD_DIM)?.or(family.head_dim);
    let divides = hidden_size.is_multiple_of(query);
    if !divides && (stated.is_none() || architecture == Architecture::Llama) {
        let expected = format!("a multiple of num_attention_heads {query}");
        return Err(keys.wrong("hidden_size", hidden_size.to_string(), expected));
    }
    let dim = stated.unwrap_or(hidden_size / query);
    if dim % 2 != 0 || dim > MAX_HEAD_DIM {
        return Err(keys.wrong(
            "head_dim",
            dim.to_string(),
            format!("an even number up to {MAX_HEAD_DIM} (RoPE rotates pairs)"),
        ));
    }
    if query.saturating_mul(dim) > MAX_WIDTH {
        let found = format!("{query} heads of {dim}");
        return Err(keys.wrong("num_attention_heads", found, format!("at most {MAX_WIDTH} channels in all")));
    }
    Ok(Heads { query, key_value, dim })
}

fn attention_bias(keys: &mut Keys<'_>, architecture: Architecture, family: &Family) -> Result<bool> {
    let stated = keys.bool("attention_bias")?;
    if family.reads_attention_bias {
        return Ok(stated.unwrap_or(false));
    }
    match (architecture, stated) {
        (Architecture::Mistral, Some(true)) => {
            Err(keys.refused("attention_bias", &true.into(), "MistralForCausalLM has no biases: HF ignores the key"))
        }
        (_, Some(_)) => {
            let reason = match architecture {
                Architecture::Qwen2 => "HF ignores it: Qwen2 always has bias on q, k and v and none on o",
                _ => "the class has no biases",
            };
            keys.irrelevant("attention_bias", reason);
            Ok(false)
        }
        (_, None) => Ok(false),
    }
}

fn mlp_bias(keys: &mut Keys<'_>, architecture: Architecture, family: &Family) -> Result<bool> {
    let stated = keys.bool("mlp_bias")?.unwrap_or(false);
    if stated && !family.reads_mlp_bias {
        let why = format!("{} has no MLP biases: HF ignores the key", architecture.class());
        return Err(keys.refused("mlp_bias", &true.into(), why));
    }
    Ok(stated)
}

fn activation(keys: &mut Keys<'_>) -> Result<Activation> {
    match keys.string("hidden_act")? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some(other) => {
            let why = "an activation without a kernel here; in scope: silu";
            Err(keys.refused("hidden_act", &Value::String(other.into()), why))
        }
    }
}

/// A special token's ids: null means none, absence the family's default.
fn special(keys: &mut Keys<'_>, key: &str, vocab_size: usize, default: Option<u32>) -> Result<Vec<u32>> {
    match keys.slot(key) {
        Slot::Null => Ok(Vec::new()),
        Slot::Absent => Ok(default.into_iter().filter(|&id| (id as usize) < vocab_size).collect()),
        Slot::Set(v) if key == "bos_token_id" && v.is_array() => Err(keys.wrong(key, brief(v), "one token id")),
        Slot::Set(v) => keys.token_ids(key, v, vocab_size),
    }
}

/// RoPE from either spelling: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`.
fn rope(keys: &mut Keys<'_>, coverage: &mut Coverage, max_positions: usize) -> Result<RopeParameters> {
    let (new, old) = (keys.object("rope_parameters")?, keys.object("rope_scaling")?);
    let theta = theta(keys)?;
    let own_original = keys.size("original_max_position_embeddings", MAX_POSITIONS)?;
    let Some((key, map)) = new.map(|m| ("rope_parameters", m)).or(old.map(|m| ("rope_scaling", m))) else {
        if own_original.is_some() {
            keys.irrelevant("original_max_position_embeddings", "only scaled rope types read it");
        }
        return Ok(RopeParameters { rope_theta: theta.unwrap_or(ROPE_THETA), kind: RopeKind::Default });
    };
    let read = |key: &str, map| rope_object(keys.path, key, map, max_positions);
    let parsed = read(key, map)?;
    if let (Some(_), Some(old)) = (new, old) {
        let other = read("rope_scaling", old)?;
        let same_theta = other.theta.is_none() || parsed.theta.is_none() || other.theta == parsed.theta;
        if other.kind != parsed.kind || !same_theta {
            let found = format!("{} beside rope_parameters = {}", brief_map(old), brief_map(map));
            return Err(keys.wrong("rope_scaling", found, "the same in both spellings"));
        }
        coverage.add(&other.keys)?;
    }
    coverage.add(&parsed.keys)?;
    if let (Some(outer), Some(inner)) = (theta, parsed.theta)
        && outer != inner
    {
        let found = format!("{outer} beside {key}.rope_theta = {inner}");
        return Err(keys.wrong("rope_theta", found, "the same in both spellings"));
    }
    let mut kind = parsed.kind;
    match (&mut kind, own_original) {
        // HF gives the outer key priority over the inner one; a config in which they differ is not to be trusted.
        (RopeKind::Llama3 { original_max_position_embeddings: inner, .. }, Some(outer)) => {
            if parsed.states_original && *inner != outer {
                let found = format!("{outer} beside {key}.original_max_position_embeddings = {inner}");
                return Err(keys.wrong("original_max_position_embeddings", found, "the same in both places"));
            }
            *inner = outer;
        }
        (_, Some(_)) => keys.irrelevant("original_max_position_embeddings", "only rope type llama3 reads it"),
        (_, None) => {}
    }
    Ok(RopeParameters { rope_theta: parsed.theta.or(theta).unwrap_or(ROPE_THETA), kind })
}

fn brief_map(map: &Map<String, Value>) -> String {
    brief(&Value::Object(map.clone()))
}

/// One `rope_parameters` or `rope_scaling` object.
struct RopeObject<'a> {
    theta: Option<f64>,
    kind: RopeKind,
    states_original: bool,
    keys: Keys<'a>,
}

fn rope_object<'a>(
    path: &'a Path,
    name: &str,
    map: &'a Map<String, Value>,
    max_positions: usize,
) -> Result<RopeObject<'a>> {
    let mut keys = Keys::new(path, &format!("{name}."), map);
    if let Some((layer_type, v)) = map.iter().find(|(_, v)| v.is_object()) {
        return Err(keys.refused(layer_type, v, "RoPE that differs by layer type is out of scope"));
    }
    let rope_type = rope_type(&mut keys)?;
    match keys.peek("partial_rotary_factor") {
        Some(v) if v.as_f64() != Some(1.0) => {
            return Err(keys.refused("partial_rotary_factor", v, "partial rotary embedding is out of scope"));
        }
        _ => keys.irrelevant("partial_rotary_factor", "1: every channel is rotated"),
    }
    if let Some(v) = keys.peek("mrope_section") {
        return Err(keys.refused("mrope_section", v, "multimodal RoPE is out of scope"));
    }
    let theta = theta(&mut keys)?;
    let states_original = keys.peek("original_max_position_embeddings").is_some();
    let kind = match rope_type {
        "default" => RopeKind::Default,
        "linear" => RopeKind::Linear { factor: factor(&mut keys)? },
        "dynamic" => RopeKind::Dynamic { factor: factor(&mut keys)? },
        "llama3" => llama3(&mut keys, max_positions)?,
        other => return Err(rope_refused(&keys, other)),
    };
    if !matches!(kind, RopeKind::Llama3 { .. }) {
        keys.irrelevant("original_max_position_embeddings", "only rope type llama3 reads it");
    }
    Ok(RopeObject { theta, kind, states_original, keys })
}

/// `rope_type`, or `type` in the oldest spelling.
fn rope_type<'a>(keys: &mut Keys<'a>) -> Result<&'a str> {
    let (new, old) = (keys.string("rope_type")?, keys.string("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(keys.wrong("type", format!("{old} beside rope_type = {new}"), "the same in both spellings"));
    }
    Ok(new.or(old).unwrap_or("default"))
}

fn rope_refused(keys: &Keys<'_>, rope_type: &str) -> Error {
    let key = if keys.peek("rope_type").is_some() { "rope_type" } else { "type" };
    let why = match rope_type {
        "yarn" => "YaRN scaling is not built yet",
        "longrope" | "su" => "LongRoPE scaling is not built yet",
        "mrope" => "multimodal RoPE is out of scope",
        _ => "an unknown rope type",
    };
    keys.refused(key, &Value::String(rope_type.into()), format!("{why}; in scope: default, linear, dynamic, llama3"))
}

/// What a scale or base must be.
const AT_LEAST_1: &str = "a number of at least 1, within f32";
/// What a share or a small amount must be.
const ABOVE_0: &str = "a number above 0, normal in f32";

/// Beside a mean of squares that is near 1 at every norm, an epsilon of 1 or more is a mistake.
fn eps(keys: &mut Keys<'_>) -> Result<Option<f64>> {
    let expected = format!("{ABOVE_0} and below 1");
    keys.f32("rms_norm_eps", &expected, |x| x.is_normal() && x > 0.0 && x < 1.0)
}

fn theta(keys: &mut Keys<'_>) -> Result<Option<f64>> {
    keys.f32("rope_theta", AT_LEAST_1, |x| x >= 1.0)
}

/// Errors: [`Error::Key`] unless a number of at least 1.
fn factor(keys: &mut Keys<'_>) -> Result<f64> {
    keys.f32("factor", AT_LEAST_1, |x| x >= 1.0)?.ok_or_else(|| keys.required("factor", AT_LEAST_1))
}

fn llama3(keys: &mut Keys<'_>, max_positions: usize) -> Result<RopeKind> {
    let factor = factor(keys)?;
    let mut need = |key| {
        let found = keys.f32(key, ABOVE_0, |x| x.is_normal() && x > 0.0)?;
        found.ok_or_else(|| keys.required(key, ABOVE_0))
    };
    let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
    if high <= low {
        return Err(keys.wrong("high_freq_factor", high.to_string(), format!("more than low_freq_factor {low}")));
    }
    let original = keys.size("original_max_position_embeddings", MAX_POSITIONS)?.unwrap_or(max_positions);
    Ok(RopeKind::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: original,
    })
}
