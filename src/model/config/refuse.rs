//! Refusals: what is sound but out of scope, by key, each with what, where and why.

use std::path::Path;

use serde_json::{Map, Value};

use super::coverage::off;
use super::keys::{Keys, brief};
use super::{Architecture, ModelConfig};
use crate::error::{Error, Result};

/// The way on for quantised checkpoints.
const QUANTISED: &str = "quantised checkpoints are out of scope; use the bf16, f16 or f32 release of the model";

const MOE: &str = "mixture of experts is out of scope: this harness gates dense decoders only";
const MLA: &str = "multi-head latent attention is out of scope: k and v must be projections of the hidden state";
const SOFTCAP: &str = "logit soft-capping is out of scope: no in-scope architecture has it and no kernel computes it";
const PARTIAL: &str = "partial rotary embedding is out of scope: every channel of a head is rotated";
const ENCODER: &str = "encoder-decoder models are out of scope: this harness gates decoder-only models";
const SCALED: &str = "no in-scope architecture scales here and HF would ignore the key";
const HETEROGENEOUS: &str = "layers that differ from each other are out of scope";
const CHUNKED: &str = "chunked or windowed attention is out of scope: attention must be causal over every position";

/// Keys that put a model out of scope unless they are switched off, with the reason.
const SWITCHES: &[(&[&str], &str)] = &[
    (&["quantization_config", "compression_config", "quantization"], QUANTISED),
    (&["is_encoder_decoder", "add_cross_attention"], ENCODER),
    (
        &[
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "moe_intermediate_size",
            "moe_num_experts",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "output_router_logits",
            "router_aux_loss_coef",
            "mlp_only_layers",
        ],
        MOE,
    ),
    (&["kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], MLA),
    (&["attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "logit_softcap"], SOFTCAP),
    (&["rotary_dim"], PARTIAL),
    (&["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"], SCALED),
    (&["per_layer_config", "layer_config", "pruned_heads"], HETEROGENEOUS),
    (&["attention_chunk_size", "attention_window", "window_size"], CHUNKED),
    (&["rope_interleaved", "rope_interleave"], "HF rotates halves, not neighbours, in every in-scope architecture"),
    (&["use_mrope", "mrope_section"], "multimodal RoPE is out of scope"),
    (&["qk_layernorm", "use_qk_norm"], "no in-scope architecture reads this key; Qwen3 has its QK-norm by class"),
];

/// Sub-configs of wrappers that hold a text model beside something else.
const WRAPPERS: &[&str] = &[
    "text_config",
    "vision_config",
    "audio_config",
    "speech_config",
    "thinker_config",
    "talker_config",
    "llm_config",
    "perceiver_config",
    "mm_vision_tower",
];

/// Refuses what a key alone puts out of scope.
///
/// Errors: [`Error::Refused`].
pub fn switches(keys: &mut Keys<'_>) -> Result<()> {
    wrapper(keys)?;
    for (names, why) in SWITCHES {
        for &key in *names {
            match keys.peek(key) {
                Some(v) if !off(v) => return Err(keys.refused(key, v, *why)),
                Some(_) => keys.irrelevant(key, "switched off"),
                None => {}
            }
        }
    }
    for key in ["partial_rotary_factor", "rotary_pct"] {
        match keys.peek(key) {
            Some(v) if v.as_f64() != Some(1.0) => return Err(keys.refused(key, v, PARTIAL)),
            Some(_) => keys.irrelevant(key, "1: every channel is rotated"),
            None => {}
        }
    }
    Ok(())
}

/// A multimodal wrapper; offers its text model where that would load.
fn wrapper(keys: &Keys<'_>) -> Result<()> {
    let Some((key, value)) = WRAPPERS.iter().find_map(|k| keys.peek(k).map(|v| (*k, v))) else { return Ok(()) };
    let text = ["text_config", "llm_config"].iter().find_map(|k| keys.peek(k).map(|v| (*k, v)));
    let offer = match text.map(|(k, v)| (k, ModelConfig::from_json(keys.path, v))) {
        Some((k, Ok((c, _)))) => format!(
            "its {k} is in scope ({}, {} layers): put that object into a config.json of its own beside the same \
             safetensors; the tensor prefix language_model. is recognised",
            c.architecture.class(),
            c.num_hidden_layers
        ),
        Some((k, Err(e))) => format!("and its {k} is not in scope either ({})", reason(&e)),
        None => "and it has no text_config".into(),
    };
    Err(keys.refused(key, &Value::String(kind(value)), format!("a multimodal wrapper is out of scope; {offer}")))
}

fn kind(v: &Value) -> String {
    v.get("model_type").and_then(Value::as_str).map_or_else(|| "{...}".into(), str::to_owned)
}

/// An error without its path, to be put into another one.
fn reason(e: &Error) -> String {
    match e {
        Error::Refused { what, why, .. } => format!("{what}: {why}"),
        Error::Key { key, found, expected, .. } => format!("{key}: found {found}, expected {expected}"),
        e => e.to_string(),
    }
}

/// The architecture by `model_type`, which is what HF goes by, agreeing with `architectures`.
///
/// Errors: [`Error::Key`] where it is missing or contradictory, [`Error::Refused`] where it is another one.
pub fn architecture(keys: &mut Keys<'_>) -> Result<Architecture> {
    let scope = || Architecture::ALL.map(Architecture::class).join(", ");
    let classes = match keys.value("architectures") {
        None => Vec::new(),
        Some(Value::Array(a)) if a.iter().all(Value::is_string) => a.iter().filter_map(Value::as_str).collect(),
        Some(v) => return Err(keys.wrong("architectures", brief(v), "a list of class names")),
    };
    let model_type = keys.string("model_type")?;
    let by_class = |c: &str| Architecture::ALL.into_iter().find(|a| a.class() == c);
    let by_type = |t: &str| Architecture::ALL.into_iter().find(|a| a.model_type() == t);
    for class in &classes {
        if by_class(class).is_none() {
            let why = out_of_scope(class, model_type.unwrap_or_default());
            let what = format!("architectures = {class}");
            return Err(Error::Refused { path: keys.path.into(), what, why: format!("{why}; in scope: {}", scope()) });
        }
    }
    let Some(model_type) = model_type else {
        return Err(keys.required("model_type", "llama, mistral, qwen2 or qwen3"));
    };
    let Some(architecture) = by_type(model_type) else {
        let why = format!("{}; in scope: {}", out_of_scope("", model_type), scope());
        return Err(keys.refused("model_type", &Value::String(model_type.into()), why));
    };
    match classes.iter().find(|c| by_class(c) != Some(architecture)) {
        None => Ok(architecture),
        Some(class) => Err(keys.wrong(
            "model_type",
            format!("{model_type} beside architectures = {class}"),
            format!("one family, {} or the like", architecture.class()),
        )),
    }
}

/// Why another architecture is out of scope, as precisely as its name allows.
fn out_of_scope(class: &str, model_type: &str) -> &'static str {
    let name = format!("{} {}", class.to_ascii_lowercase(), model_type.to_ascii_lowercase());
    let has = |marks: &[&str]| marks.iter().any(|m| name.contains(m));
    if has(&["deepseek", "kimi", "minicpm3"]) {
        MLA
    } else if has(&["moe", "mixtral", "dbrx", "arctic", "jamba", "gpt_oss", "gptoss"]) {
        MOE
    } else if has(&["t5", "bart", "whisper", "marian", "conditionalgeneration"]) {
        "encoder-decoder and multimodal models are out of scope"
    } else if has(&["gemma"]) {
        "Gemma scales its embedding, norms with 1 + w and uses GELU: other kernels than this harness gates"
    } else if has(&["phi", "gptneox", "gpt_neox", "stablelm", "persimmon"]) {
        "a fused projection or partial rotary embedding is out of scope"
    } else if has(&["mamba", "rwkv", "recurrent", "bamba"]) {
        "recurrent layers are out of scope"
    } else if has(&["bert", "sequenceclassification", "tokenclassification", "questionanswering", "reward"]) {
        "not a causal language model"
    } else {
        "an architecture that nobody here has checked against HF"
    }
}

/// Sliding windows: set, in use, and not switched off.
///
/// Errors: [`Error::Refused`] where any layer would see a window; [`Error::Key`] for values that contradict.
pub fn window(keys: &mut Keys<'_>, architecture: Architecture, layers: usize) -> Result<()> {
    let why = |more: &str| format!("sliding-window attention is out of scope: {more}");
    layer_types(keys, layers)?;
    let qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);
    let stated = keys.peek("layer_types").is_some();
    let present = matches!(keys.slot("sliding_window"), super::keys::Slot::Null | super::keys::Slot::Set(_));
    let window = keys.size("sliding_window", 1 << 31)?;
    if !qwen {
        for key in ["use_sliding_window", "max_window_layers"] {
            keys.irrelevant(key, "only Qwen's classes read it");
        }
        return match window {
            Some(w) => Err(keys.refused("sliding_window", &w.into(), why("HF applies it in every layer"))),
            None if architecture == Architecture::Mistral && !present => {
                let found = Value::String("nothing".into());
                let more = "MistralConfig's default is 4096; null switches it off";
                Err(keys.refused("sliding_window", &found, why(more)))
            }
            None => Ok(()),
        };
    }
    let in_use = keys.bool("use_sliding_window")?.unwrap_or(false);
    let from = match keys.value("max_window_layers") {
        None => 28,
        Some(v) => v.as_u64().ok_or_else(|| keys.wrong("max_window_layers", brief(v), "a whole number"))? as usize,
    };
    let window = if present { window } else { Some(4096) };
    match window {
        Some(w) if in_use && !stated && from < layers => {
            let more =
                format!("use_sliding_window is true and layers {from} to {} lie beyond max_window_layers", layers - 1);
            Err(keys.refused("sliding_window", &w.into(), why(&more)))
        }
        _ => Ok(()),
    }
}

/// `layer_types`: one entry per layer, each `full_attention`.
fn layer_types(keys: &mut Keys<'_>, layers: usize) -> Result<()> {
    let Some(v) = keys.value("layer_types") else { return Ok(()) };
    let Some(types) = v.as_array() else { return Err(keys.wrong("layer_types", brief(v), "a list")) };
    if types.len() != layers {
        return Err(keys.wrong(
            "layer_types",
            format!("{} entries", types.len()),
            format!("num_hidden_layers {layers}"),
        ));
    }
    let full = |t: &Value| matches!(t.as_str(), Some("full_attention" | "attention"));
    match types.iter().position(|t| !full(t)) {
        None => Ok(()),
        Some(i) => Err(Error::Refused {
            path: keys.path.into(),
            what: format!("layer_types[{i}] = {}", brief(&types[i])),
            why: "only full_attention layers are in scope".into(),
        }),
    }
}

/// `dtype` and its older spelling: the stored type is the tensors' affair, but an 8-bit one is refused at once.
pub fn dtype(keys: &mut Keys<'_>) -> Result<()> {
    let (new, old) = (keys.string("dtype")?, keys.string("torch_dtype")?);
    let bare = |s: &str| s.trim_start_matches("torch.").to_owned();
    if let (Some(new), Some(old)) = (new, old)
        && bare(new) != bare(old)
    {
        return Err(keys.wrong("torch_dtype", format!("{old} beside dtype = {new}"), "one dtype in both spellings"));
    }
    let Some(dtype) = new.or(old) else { return Ok(()) };
    let key = if new.is_some() { "dtype" } else { "torch_dtype" };
    match bare(dtype).as_str() {
        "bfloat16" | "float16" | "half" | "float32" | "float" | "auto" => {
            for key in ["dtype", "torch_dtype"] {
                keys.irrelevant(key, "every tensor's own dtype is checked; model and reference run in bf16");
            }
            Ok(())
        }
        d if d.starts_with("float8") || d.starts_with("int") || d.starts_with("uint") => {
            Err(keys.refused(key, &Value::String(dtype.into()), QUANTISED))
        }
        _ => Err(keys.wrong(key, format!("{dtype:?}"), "bfloat16, float16 or float32")),
    }
}

/// Whether a file beside the config says that the checkpoint is quantised.
pub fn quantised_beside(dir: &Path) -> Option<Error> {
    let path = dir.join("quantize_config.json");
    path.is_file().then(|| Error::Refused { path, what: "quantize_config.json".into(), why: QUANTISED.into() })
}

/// The reason given for quantised tensors, for the checkpoint's own check of dtypes.
pub fn quantised() -> &'static str {
    QUANTISED
}

/// A JSON object or the error that says what stands in its place.
pub fn object<'a>(path: &Path, json: &'a Value) -> Result<&'a Map<String, Value>> {
    json.as_object().ok_or_else(|| Error::malformed(path, format!("found {}, expected a JSON object", brief(json))))
}
