//! Config variants, each with the config that HF would resolve or the words of the refusal.

use std::path::Path;

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::rope::*;
use super::*;

/// A small config of a family with nothing optional stated.
fn base(family: &str) -> Value {
    let class = match family {
        "llama" => "LlamaForCausalLM",
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        _ => "Qwen3ForCausalLM",
    };
    let mut v = json!({
        "architectures": [class], "model_type": family, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0,
    });
    if family == "mistral" {
        v["sliding_window"] = Value::Null;
    }
    v
}

/// `patch` laid over the family's base; the string "-" takes a key away.
fn patched(family: &str, patch: Value) -> Value {
    let mut v = base(family);
    for (key, value) in patch.as_object().expect("a patch is an object") {
        if value == "-" {
            v.as_object_mut().expect("an object").shift_remove(key);
        } else {
            v[key] = value.clone();
        }
    }
    v
}

fn read(family: &str, patch: Value) -> Result<(ModelConfig, Coverage)> {
    ModelConfig::from_json(Path::new("config.json"), &patched(family, patch))
}

fn ok(family: &str, patch: Value) -> ModelConfig {
    match read(family, patch) {
        Ok((config, _)) => config,
        Err(e) => panic!("{e}"),
    }
}

/// Keys of the resolved config that a variant is expected to have.
#[rstest]
// Family defaults, exactly those of HF's config classes.
#[case("llama", json!({}), json!({"num_key_value_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false}))]
#[case("llama", json!({"vocab_size": "-", "bos_token_id": "-", "eos_token_id": "-"}), json!({"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": [2]}))]
#[case("llama", json!({"hidden_size": "-", "num_attention_heads": "-", "intermediate_size": "-", "num_hidden_layers": "-"}), json!({"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 11008, "num_hidden_layers": 32}))]
#[case("mistral", json!({}), json!({"num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 131072}))]
#[case("mistral", json!({"num_attention_heads": 16}), json!({"num_key_value_heads": 8, "head_dim": 8}))]
#[case("mistral", json!({"num_attention_heads": 16, "num_key_value_heads": null}), json!({"num_key_value_heads": 16}))]
#[case("mistral", json!({"intermediate_size": "-"}), json!({"intermediate_size": 14336}))]
#[case("qwen2", json!({"num_key_value_heads": 2, "vocab_size": "-", "eos_token_id": "-", "bos_token_id": "-"}), json!({"vocab_size": 151936, "bos_token_id": null, "eos_token_id": [], "max_position_embeddings": 32768, "head_dim": 16}))]
#[case("qwen2", json!({"num_attention_heads": 32}), json!({"num_key_value_heads": 32, "head_dim": 4}))]
#[case("qwen3", json!({"num_key_value_heads": 2}), json!({"head_dim": 128, "attention_bias": false}))]
#[case("qwen3", json!({"num_key_value_heads": 2, "head_dim": null}), json!({"head_dim": 128}))]
#[case("qwen3", json!({"num_key_value_heads": 2, "attention_bias": true}), json!({"attention_bias": true}))]
#[case("qwen2", json!({"num_key_value_heads": 2, "intermediate_size": "-"}), json!({"intermediate_size": 22016}))]
// null is absent, or HF's None where its class knows None.
#[case("llama", json!({"head_dim": null, "num_key_value_heads": null}), json!({"head_dim": 16, "num_key_value_heads": 8}))]
#[case("llama", json!({"eos_token_id": null, "bos_token_id": null}), json!({"eos_token_id": [], "bos_token_id": null}))]
#[case("llama", json!({"tie_word_embeddings": null, "rms_norm_eps": null}), json!({"tie_word_embeddings": false, "rms_norm_eps": 1e-6}))]
#[case("llama", json!({"quantization_config": null, "num_experts": null, "sliding_window": null}), json!({"head_dim": 16}))]
// Numbers however they are written; ids one or many.
#[case("llama", json!({"rope_theta": 500000}), json!({"rope_parameters.rope_theta": 500000.0}))]
#[case("llama", json!({"eos_token_id": [2, 5]}), json!({"eos_token_id": [2, 5]}))]
#[case("llama", json!({"head_dim": 64}), json!({"head_dim": 64}))]
#[case("llama", json!({"hidden_act": "swish"}), json!({"hidden_act": "silu"}))]
#[case("llama", json!({"tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true}), json!({"tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true}))]
// RoPE in the old and the new spelling.
#[case("llama", json!({}), json!({"rope_parameters.rope_theta": 10000.0, "rope_parameters.rope_type": "default"}))]
#[case("llama", json!({"rope_theta": 1e6, "rope_scaling": null}), json!({"rope_parameters.rope_theta": 1e6, "rope_parameters.rope_type": "default"}))]
#[case("llama", json!({"rope_parameters": {}}), json!({"rope_parameters.rope_theta": 10000.0}))]
#[case("llama", json!({"rope_parameters": {"rope_theta": 1e6}}), json!({"rope_parameters.rope_type": "default", "rope_parameters.rope_theta": 1e6}))]
#[case("llama", json!({"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2}}), json!({"rope_parameters.rope_type": "linear", "rope_parameters.factor": 2.0, "rope_parameters.rope_theta": 2e4}))]
#[case("llama", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}), json!({"rope_parameters.rope_type": "dynamic", "rope_parameters.factor": 4.0}))]
#[case("llama", json!({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}}), json!({"rope_parameters.rope_type": "linear"}))]
#[case("llama", json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}), json!({"rope_parameters.rope_type": "llama3", "rope_parameters.factor": 8.0, "rope_parameters.original_max_position_embeddings": 8192}))]
#[case("llama", json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}}), json!({"rope_parameters.original_max_position_embeddings": 2048}))]
#[case("llama", json!({"original_max_position_embeddings": 512, "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}}), json!({"rope_parameters.original_max_position_embeddings": 512}))]
#[case("llama", json!({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}), json!({"rope_parameters.rope_theta": 1e6}))]
#[case("llama", json!({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2}}), json!({"rope_parameters.factor": 2.0}))]
#[case("llama", json!({"partial_rotary_factor": 1.0}), json!({"head_dim": 16}))]
// Windows that are switched off.
#[case("qwen2", json!({"num_key_value_heads": 2, "sliding_window": 4096, "use_sliding_window": false}), json!({"sliding_window": null}))]
#[case("qwen2", json!({"num_key_value_heads": 2, "sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 4}), json!({"sliding_window": null}))]
#[case("qwen2", json!({"num_key_value_heads": 2, "use_sliding_window": true, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"], "max_window_layers": 0}), json!({"sliding_window": null}))]
#[case("qwen2", json!({"num_key_value_heads": 2, "use_sliding_window": true, "sliding_window": null, "max_window_layers": 0}), json!({"sliding_window": null}))]
#[case("qwen3", json!({"num_key_value_heads": 2, "use_sliding_window": true}), json!({"sliding_window": null}))]
// Both spellings of the dtype.
#[case("llama", json!({"torch_dtype": "bfloat16", "dtype": "bfloat16"}), json!({"head_dim": 16}))]
#[case("llama", json!({"torch_dtype": "float16"}), json!({"head_dim": 16}))]
#[case("llama", json!({"architectures": null}), json!({"model_type": "llama"}))]
fn resolves(#[case] family: &str, #[case] patch: Value, #[case] expected: Value) {
    let resolved = ok(family, patch).resolved();
    for (key, value) in expected.as_object().expect("an object") {
        assert_eq!(resolved.get(key), Some(value), "{key}");
    }
}

#[rstest]
// What cannot be right, by key.
#[case("llama", json!({"hidden_size": 0}), "hidden_size: found 0, expected a whole number from 1")]
#[case("llama", json!({"hidden_size": -1}), "hidden_size: found -1")]
#[case("llama", json!({"hidden_size": 128.0}), "hidden_size: found 128.0")]
#[case("llama", json!({"hidden_size": "128"}), "hidden_size: found \"128\"")]
#[case("llama", json!({"hidden_size": 18446744073709551615u64}), "hidden_size: found 18446744073709551615")]
#[case("llama", json!({"hidden_size": 130}), "hidden_size: found 130, expected a multiple of num_attention_heads 8")]
#[case("llama", json!({"num_hidden_layers": 0}), "num_hidden_layers: found 0")]
#[case("llama", json!({"num_hidden_layers": 1000000000}), "num_hidden_layers: found 1000000000")]
#[case("llama", json!({"num_key_value_heads": 3}), "num_key_value_heads: found 3, expected a divisor of num_attention_heads 8")]
#[case("llama", json!({"num_key_value_heads": 16}), "num_key_value_heads: found 16")]
#[case("llama", json!({"head_dim": 15}), "head_dim: found 15, expected an even number")]
#[case("qwen3", json!({"num_attention_heads": 1048576, "num_key_value_heads": 1048576, "head_dim": 4096}), "num_attention_heads: found 1048576 heads of 4096")]
#[case("llama", json!({"vocab_size": 1e3}), "vocab_size: found 1000.0")]
#[case("llama", json!({"rms_norm_eps": 0}), "rms_norm_eps: found 0, expected a number above 0")]
#[case("llama", json!({"rms_norm_eps": 1e300}), "rms_norm_eps: found 1e+300, expected a number above 0, normal in f32 and below 1")]
#[case("llama", json!({"rms_norm_eps": 1}), "rms_norm_eps: found 1, expected a number above 0")]
#[case("llama", json!({"rms_norm_eps": -1e-6}), "rms_norm_eps: found -1e-6, expected a number above 0")]
#[case("llama", json!({"rms_norm_eps": 1e-40}), "rms_norm_eps: found 1e-40, expected a number above 0, normal in f32")]
#[case("llama", json!({"rope_theta": 1e300}), "rope_theta: found 1e+300, expected a number of at least 1, within f32")]
#[case("llama", json!({"rope_theta": 1e-30}), "rope_theta: found 1e-30, expected a number of at least 1")]
#[case("llama", json!({"rope_parameters": {"rope_theta": 1e300}}), "rope_parameters.rope_theta: found 1e+300")]
#[case("llama", json!({"rope_scaling": {"type": "linear", "factor": 1e39}}), "rope_scaling.factor: found 1e+39, expected a number of at least 1, within f32")]
#[case("llama", json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1e-320, "high_freq_factor": 4}}), "rope_parameters.low_freq_factor: found 1e-320")]
#[case("llama", json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1e39}}), "rope_parameters.high_freq_factor: found 1e+39")]
#[case("llama", json!({"rms_norm_eps": "1e-5"}), "rms_norm_eps: found \"1e-5\", expected a number")]
#[case("llama", json!({"tie_word_embeddings": 1}), "tie_word_embeddings: found 1, expected true or false")]
#[case("llama", json!({"eos_token_id": 1024}), "eos_token_id: found 1024, expected a token id below vocab_size 1024")]
#[case("llama", json!({"eos_token_id": [1, -1]}), "eos_token_id: found -1")]
#[case("llama", json!({"bos_token_id": [1]}), "bos_token_id: found [1], expected one token id")]
#[case("llama", json!({"model_type": "-"}), "model_type: found nothing")]
#[case("llama", json!({"architectures": "LlamaForCausalLM"}), "architectures: found \"LlamaForCausalLM\", expected a list")]
#[case("llama", json!({"architectures": ["Qwen2ForCausalLM"]}), "model_type: found llama beside architectures = Qwen2ForCausalLM")]
#[case("llama", json!({"rope_theta": 0}), "rope_theta: found 0")]
#[case("llama", json!({"rope_scaling": "linear"}), "rope_scaling: found \"linear\", expected an object")]
#[case("llama", json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor: found nothing")]
#[case("llama", json!({"rope_scaling": {"type": "linear", "factor": 0.5}}), "rope_scaling.factor: found 0.5")]
#[case("llama", json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}}), "rope_parameters.high_freq_factor: found nothing")]
#[case("llama", json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}), "rope_parameters.high_freq_factor: found 4, expected more than low_freq_factor 4")]
// The two spellings in conflict.
#[case("llama", json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta: found 10000 beside rope_parameters.rope_theta = 1000000")]
#[case("llama", json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 4}}), "expected the same in both spellings")]
#[case("llama", json!({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2}}), "rope_scaling.type: found linear beside rope_type = dynamic")]
#[case("llama", json!({"original_max_position_embeddings": 512, "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 256}}), "original_max_position_embeddings: found 512 beside")]
#[case("llama", json!({"dtype": "bfloat16", "torch_dtype": "float32"}), "torch_dtype: found float32 beside dtype = bfloat16")]
#[case("llama", json!({"dtype": "complex64"}), "dtype: found \"complex64\"")]
#[case("qwen2", json!({"num_key_value_heads": 2, "layer_types": ["full_attention"]}), "layer_types: found 1 entries, expected num_hidden_layers 4")]
// Sound, and out of scope.
#[case("mistral", json!({"sliding_window": 4096}), "refused: sliding_window = 4096: sliding-window attention is out of scope")]
#[case("mistral", json!({"sliding_window": "-"}), "MistralConfig's default is 4096")]
#[case("llama", json!({"sliding_window": 1024}), "refused: sliding_window = 1024")]
#[case("qwen2", json!({"num_key_value_heads": 2, "use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 2}), "layers 2 to 3 lie beyond max_window_layers")]
#[case("qwen2", json!({"num_key_value_heads": 2, "use_sliding_window": true, "max_window_layers": 0}), "refused: sliding_window = 4096")]
#[case("qwen3", json!({"num_key_value_heads": 2, "layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]}), "refused: layer_types[3] = \"sliding_attention\"")]
#[case("llama", json!({"attention_chunk_size": 8192}), "refused: attention_chunk_size = 8192")]
#[case("llama", json!({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}), "refused: architectures = MixtralForCausalLM: mixture of experts")]
#[case("llama", json!({"num_local_experts": 8}), "refused: num_local_experts = 8: mixture of experts")]
#[case("llama", json!({"kv_lora_rank": 512}), "multi-head latent attention")]
#[case("llama", json!({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}), "multi-head latent attention")]
#[case("llama", json!({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}), "encoder-decoder and multimodal")]
#[case("llama", json!({"is_encoder_decoder": true}), "refused: is_encoder_decoder = true: encoder-decoder")]
#[case("llama", json!({"architectures": ["LlamaForSequenceClassification"]}), "not a causal language model")]
#[case("llama", json!({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}), "Gemma scales its embedding")]
#[case("llama", json!({"architectures": null, "model_type": "phi3"}), "refused: model_type = \"phi3\"")]
#[case("llama", json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}), "refused: quantization_config")]
#[case("llama", json!({"dtype": "float8_e4m3fn"}), "quantised checkpoints are out of scope")]
#[case("llama", json!({"partial_rotary_factor": 0.5}), "refused: partial_rotary_factor = 0.5: partial rotary")]
#[case("llama", json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}), "rope_parameters.partial_rotary_factor = 0.25")]
#[case("llama", json!({"final_logit_softcapping": 30.0}), "logit soft-capping")]
#[case("llama", json!({"hidden_act": "gelu"}), "refused: hidden_act = \"gelu\"")]
#[case("llama", json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "refused: rope_scaling.type = \"yarn\": YaRN scaling is not built yet")]
#[case("llama", json!({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}), "LongRoPE scaling is not built yet")]
#[case("llama", json!({"rope_scaling": {"type": "su", "factor": 4.0}}), "LongRoPE")]
#[case("llama", json!({"rope_parameters": {"rope_type": "spiral"}}), "an unknown rope type; in scope: default, linear, dynamic, llama3")]
#[case("qwen2", json!({"num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}), "multimodal RoPE")]
#[case("qwen3", json!({"num_key_value_heads": 2, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}), "RoPE that differs by layer type")]
#[case("llama", json!({"rope_parameters": {"rope_type": "default", "beta_fast": 32}}), "refused: rope_parameters.beta_fast")]
#[case("llama", json!({"rope_parameters": {"rope_type": "default", "factor": 8.0}}), "refused: rope_parameters.factor")]
#[case("llama", json!({"rope_interleaved": true}), "HF rotates halves")]
#[case("mistral", json!({"attention_bias": true}), "MistralForCausalLM has no biases")]
#[case("qwen2", json!({"num_key_value_heads": 2, "mlp_bias": true}), "Qwen2ForCausalLM has no MLP biases")]
#[case("llama", json!({"per_layer_config": {"0": {"num_key_value_heads": 2}}}), "layers that differ")]
#[case("llama", json!({"residual_multiplier": 0.22}), "no in-scope architecture scales here")]
#[case("llama", json!({"vision_config": {"model_type": "siglip"}}), "multimodal wrapper is out of scope; and it has no text_config")]
// Unknown keys that smell of a computation.
#[case("llama", json!({"attention_temperature": 1.5}), "refused: attention_temperature = 1.5: an unknown key that seems to belong to a computation (attention)")]
#[case("llama", json!({"post_norm": true}), "(norm)")]
#[case("llama", json!({"rope_fancy": 2}), "(rope)")]
#[case("llama", json!({"head_bias": true}), "a computation")]
fn refuses(#[case] family: &str, #[case] patch: Value, #[case] expected: &str) {
    let error = read(family, patch).expect_err("this config is to be refused").to_string();
    assert!(error.starts_with("config.json: "), "{error}");
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
    assert!(!error.ends_with('.'), "{error}");
}

#[rstest]
#[case("unknown_key", None)]
#[case("api_key", None)]
#[case("default_value", None)]
#[case("key_scale_exponent", Some("attention"))]
#[case("use_key_value_cache", Some("attention"))]
#[case("normalised", None)]
#[case("post_norm", Some("norm"))]
fn words_betray_a_computation(#[case] key: &str, #[case] part: Option<&str>) {
    assert_eq!(super::coverage::computation(key), part);
}

#[rstest]
#[case(json!([]), "expected a JSON object")]
#[case(json!("config"), "expected a JSON object")]
#[case(Value::Null, "expected a JSON object")]
fn not_an_object(#[case] json: Value, #[case] expected: &str) {
    let error = ModelConfig::from_json(Path::new("c"), &json).expect_err("no object").to_string();
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case("", "an empty file")]
#[case("  <!DOCTYPE html><html>", "an HTML or XML page")]
#[case("version https://git-lfs.github.com/spec/v1", "a git-lfs pointer")]
#[case("{\"a\": ", "not JSON")]
#[case("{\"hidden_size\": NaN}", "not JSON")]
fn not_json(#[case] text: &str, #[case] expected: &str) {
    let error = parse_json(Path::new("config.json"), text.as_bytes()).expect_err("no JSON").to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_wrapper_offers_its_text_model() {
    let wrapper = json!({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "text_config": base("llama")});
    let error = ModelConfig::from_json(Path::new("c"), &wrapper).expect_err("a wrapper").to_string();
    assert!(error.contains("its text_config is in scope (LlamaForCausalLM, 4 layers)"), "{error}");
    let moe = json!({"model_type": "llava", "text_config": {"model_type": "mixtral"}});
    let error = ModelConfig::from_json(Path::new("c"), &moe).expect_err("a wrapper").to_string();
    assert!(error.contains("its text_config is not in scope either (model_type"), "{error}");
}

#[test]
fn every_key_is_in_the_account() {
    let patch = json!({"transformers_version": "5.24.0", "attention_dropout": 0.0, "favourite_colour": "blue",
        "torch_dtype": "bfloat16", "use_cache": true, "some_null": null, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}});
    let (_, coverage) = read("llama", patch).expect("in scope");
    assert_eq!(coverage.unknown, ["favourite_colour"]);
    for used in ["hidden_size", "rope_parameters", "rope_parameters.rope_theta", "rope_parameters.rope_type"] {
        assert!(coverage.used.iter().any(|k| k == used), "{used}");
    }
    let reason = |key: &str| coverage.irrelevant.iter().find(|(k, _)| k == key).map(|(_, r)| r.as_str());
    assert_eq!(reason("attention_dropout"), Some("training only"));
    assert_eq!(reason("some_null"), Some("null means absent"));
    assert!(reason("torch_dtype").is_some());
}

#[test]
fn lists_do_not_overlap() {
    let mut all: Vec<&str> = super::coverage::IRRELEVANT.iter().flat_map(|(_, keys)| keys.iter().copied()).collect();
    let n = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), n);
}

#[test]
fn tensors_of_each_family() {
    let count = |family, patch| ok(family, patch).tensors().len();
    assert_eq!(count("llama", json!({})), 2 + 4 * 9 + 1);
    assert_eq!(count("llama", json!({"tie_word_embeddings": true})), 2 + 4 * 9);
    assert_eq!(count("llama", json!({"attention_bias": true, "mlp_bias": true})), 3 + 4 * (9 + 4 + 3));
    assert_eq!(count("qwen2", json!({"num_key_value_heads": 2})), 3 + 4 * (9 + 3));
    assert_eq!(count("qwen3", json!({"num_key_value_heads": 2})), 3 + 4 * (9 + 2));
    let config = ok("qwen3", json!({"num_key_value_heads": 2}));
    assert_eq!((config.q_dim(), config.kv_dim(), config.group()), (1024, 256, 4));
    let q = config.tensors().into_iter().find(|t| t.part == "q_proj").expect("a q_proj");
    assert_eq!(
        (q.name.as_str(), q.shape, q.layer),
        ("model.layers.0.self_attn.q_proj.weight", vec![1024, 128], Some(0))
    );
}

#[test]
fn differences_to_hf_are_named() {
    let config = ok("llama", json!({}));
    let mut hf = json!({"model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 0, "attention_bias": false, "mlp_bias": false,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "attention_dropout": 0.1, "use_cache": true});
    assert_eq!(config.resolved_differences(&hf), []);
    hf["rms_norm_eps"] = json!(1e-5);
    hf["rope_parameters"]["rope_theta"] = json!(5e5);
    hf["attention_sinks"] = json!(4);
    let keys: Vec<String> = config.resolved_differences(&hf).into_iter().map(|d| d.key).collect();
    assert_eq!(keys, ["rms_norm_eps", "rope_parameters.rope_theta", "attention_sinks"]);
}

/// High frequencies stay, low ones are divided by the factor, those between are blended; the rows themselves are held
/// against HF in `model::tests`.
#[test]
fn llama3_scaling_reaches_every_band() {
    let kind = RopeKind::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 256,
    };
    let table = RopeTable::from_parts(RopeParameters { rope_theta: 5e5, kind }, 64, 2048);
    let (scaled, plain) = (table.inv_freq(1), table.unscaled().inv_freq(1));
    assert_eq!(scaled[0], plain[0]);
    assert_eq!(scaled[31], plain[31] / 8.0);
    let between = scaled.iter().zip(&plain).filter(|(s, p)| **s < **p && **s > **p / 8.0 * 1.0001).count();
    assert!(between > 0);
}

#[test]
fn linear_and_dynamic_scaling() {
    let table = |kind| RopeTable::from_parts(RopeParameters { rope_theta: 1e4, kind }, 64, 2048);
    let plain = table(RopeKind::Default).inv_freq(1);
    let halved = table(RopeKind::Linear { factor: 2.0 }).inv_freq(1);
    assert!(plain.iter().zip(&halved).all(|(p, h)| *h == p / 2.0));
    let dynamic = table(RopeKind::Dynamic { factor: 2.0 });
    assert_eq!(dynamic.inv_freq(2048), plain);
    let longer = dynamic.inv_freq(4096);
    assert_eq!(longer[0], 1.0);
    // base * (2 * 4096 / 2048 - 1)^(64 / 62)
    let base = 1e4 * 3f64.powf(64.0 / 62.0);
    assert!((f64::from(longer[31]) * base.powf(62.0 / 64.0) - 1.0).abs() < 1e-5);
    assert_eq!(dynamic.rows(&[4095], 4096).0[[0, 31]], (4095.0 * longer[31]).cos());
}

#[test]
fn powers_are_torchs() {
    // Bits of 1e6 ** (torch.arange(0, 128, 2) / 128): the exponents whose result is not the correctly rounded one.
    for line in TORCH_POW.lines().filter(|l| !l.is_empty()) {
        let mut words = line.split(' ');
        let mut next = || words.next().expect("three words");
        let (base, exponent): (f32, f32) = (next().parse().expect("a base"), next().parse().expect("an exponent"));
        assert_eq!(
            super::sleef::powf(base, exponent).to_bits(),
            u32::from_str_radix(next(), 16).expect("bits"),
            "{line}"
        );
    }
}

const TORCH_POW: &str = include_str!("torch_pow.txt");

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9_.]{0,12}".prop_map(Value::from),
        Just(json!("llama3")),
        Just(json!("linear")),
        Just(json!(2)),
        Just(json!(1.0)),
    ];
    let key = prop_oneof![
        "[a-z_]{1,12}",
        Just("factor".to_owned()),
        Just("rope_type".to_owned()),
        Just("rope_theta".to_owned())
    ];
    leaf.prop_recursive(3, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..5).prop_map(|kv| Value::Object(kv.into_iter().collect())),
        ]
    })
}

const KEYS: &[&str] = &[
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rms_norm_eps",
    "eos_token_id",
    "bos_token_id",
    "layer_types",
    "sliding_window",
    "architectures",
    "model_type",
    "text_config",
    "dtype",
    "torch_dtype",
    "hidden_act",
    "tie_word_embeddings",
    "max_window_layers",
    "quantization_config",
];

proptest! {
    #[test]
    fn any_values_resolve_or_are_refused(family in prop::sample::select(vec!["llama", "mistral", "qwen2", "qwen3"]),
            patch in prop::collection::vec((prop::sample::select(KEYS.to_vec()), any_json()), 0..4)) {
        let mut v = base(family);
        for (key, value) in patch {
            v[key] = value;
        }
        if let Ok((config, _)) = ModelConfig::from_json(Path::new("c"), &v) {
            prop_assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
            prop_assert!(config.head_dim % 2 == 0 && config.head_dim > 0);
            prop_assert!(config.rope.rope_theta >= 1.0 && (config.rope.rope_theta as f32).is_finite());
            prop_assert!((config.rms_norm_eps as f32).is_normal() && config.rms_norm_eps < 1.0);
        }
    }

    #[test]
    fn any_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        if let Ok(json) = parse_json(Path::new("c"), &bytes) {
            let _ = ModelConfig::from_json(Path::new("c"), &json);
        }
    }
}
