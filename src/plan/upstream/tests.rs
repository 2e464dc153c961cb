//! Every model of upstream's, bound argument by argument; and models that upstream has no ELFs for.

use std::collections::BTreeMap;

use serde_json::json;

use super::*;

/// `config.json` of upstream's models, as far as shapes go.
fn model(name: &str) -> ModelConfig {
    let (class, kind, [e, h, kv, hd, f, v]): (&str, &str, [usize; 6]) = match name {
        "llama32_1b" => ("LlamaForCausalLM", "llama", [2048, 32, 8, 64, 8192, 128256]),
        "llama32_3b" => ("LlamaForCausalLM", "llama", [3072, 24, 8, 128, 8192, 128256]),
        "smollm2_1_7b" => ("LlamaForCausalLM", "llama", [2048, 32, 32, 64, 8192, 49152]),
        "smollm2_135m" => ("LlamaForCausalLM", "llama", [576, 9, 3, 64, 1536, 49152]),
        "qwen25_0_5b" => ("Qwen2ForCausalLM", "qwen2", [896, 14, 2, 64, 4864, 151936]),
        "qwen25_1_5b" => ("Qwen2ForCausalLM", "qwen2", [1536, 12, 2, 128, 8960, 151936]),
        "qwen25_3b" => ("Qwen2ForCausalLM", "qwen2", [2048, 16, 2, 128, 11008, 151936]),
        "qwen3_0_6b" => ("Qwen3ForCausalLM", "qwen3", [1024, 16, 8, 128, 3072, 151936]),
        "qwen3_1_7b" => ("Qwen3ForCausalLM", "qwen3", [2048, 16, 8, 128, 6144, 151936]),
        "qwen3_4b" => ("Qwen3ForCausalLM", "qwen3", [2560, 32, 8, 128, 9728, 151936]),
        other => panic!("{other}"),
    };
    let mut text = json!({
        "architectures": [class], "model_type": kind, "hidden_size": e, "num_attention_heads": h,
        "num_key_value_heads": kv, "intermediate_size": f, "vocab_size": v, "num_hidden_layers": 2,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    // Qwen2's class has no such key.
    if kind != "qwen2" {
        text["head_dim"] = hd.into();
    }
    let (config, _) = ModelConfig::from_json("config.json".as_ref(), &text).unwrap();
    assert_eq!(config.head_dim, hd);
    config
}

/// Per layer of the prefill and decode, and the head.
///
/// Source: mlir-air's runners.
const CHAINS: [(&str, &str); 9] = [
    ("llama32_1b", "rms_gemms_rope flash_attn o_ffn | rms_gemv_rope o_gemv_ffn | lm_head_gemv"),
    ("smollm2_1_7b", "rms_gemms_rope flash_attn o_ffn | rms_gemv_rope o_gemv_ffn | lm_head_gemv"),
    ("llama32_3b", "rms_gemms_rope flash_attn o_ffn | rms_gemv_rope o_gemv gate_gemv up_gemv down_gemv | lm_head_gemv"),
    (
        "qwen25_0_5b",
        "rms_qkv_bias_rope flash_attn o_ffn_head down_add \
         | rms_qkv_bias_rope_gemv o_gemv gate_gemv up_gemv down_gemv | lm_head_gemv",
    ),
    (
        "qwen25_1_5b",
        "rms_qkv_bias_rope flash_attn o_res_norm gate_up swiglu down_add \
         | rms_qkv_bias_rope_gemv o_gemv gate_gemv up_gemv down_gemv | lm_head_gemv",
    ),
    (
        "qwen25_3b",
        "rms_qkv_bias_rope flash_attn o_res_norm gate up swiglu down_add \
         | rms_qkv_bias_rope_gemv o_gemv gate_gemv up_gemv down_gemv | lm_head_gemv",
    ),
    ("qwen3_0_6b", "rms_qkv_qknorm_rope flash_attn o_ffn_qwen | rms_qkv_qknorm_rope_gemv o_gemv_ffn | lm_head_gemv"),
    ("qwen3_1_7b", "rms_qkv_qknorm_rope flash_attn o_ffn_qwen | rms_qkv_qknorm_rope_gemv o_gemv_ffn | lm_head_gemv"),
    (
        "qwen3_4b",
        "rms_qkv_qknorm_rope flash_attn o_res_norm gate up swiglu down_add \
         | rms_qkv_qknorm_rope_gemv o_gemv gate_gemv up_gemv down_gemv | lm_head_gemv",
    ),
];

fn sorted<'a>(ids: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut ids: Vec<_> = ids.collect();
    ids.sort_unstable();
    ids
}

#[test]
fn every_model_of_upstreams_runs_its_dispatches() {
    for (name, chains) in CHAINS {
        let plan = bind(&model(name), 2048).unwrap();
        let stages = [DispatchStage::Prefill, DispatchStage::Decode, DispatchStage::Head];
        for (chain, stage) in chains.split('|').zip(stages) {
            let found = plan.dispatches.iter().filter(|d| d.stage == stage).map(|d| d.id);
            assert_eq!(sorted(found), sorted(chain.split_whitespace()), "{name} {stage:?}");
        }
        assert!(plan.fallbacks.is_empty(), "{name}: {:?}", plan.fallbacks);
    }
}

/// Shape of each tensor of layer 0 and of the head, by HF name.
fn tensors(config: &ModelConfig) -> BTreeMap<String, (usize, usize)> {
    let matrix = |shape: &[usize]| if shape.len() == 1 { (1, shape[0]) } else { (shape[0], shape[1]) };
    config.tensors().into_iter().map(|spec| (spec.name, matrix(&spec.shape))).collect()
}

/// What is packed fills its argument exactly; what is not packed is activation, scratch or dead; every weight of the
/// layer is bound once per stage.
#[test]
fn every_argument_is_filled_by_what_it_is_for() {
    for (name, _) in CHAINS {
        let config = model(name);
        let (known, plan) = (tensors(&config), bind(&config, 2048).unwrap());
        let mut bound: BTreeMap<(bool, String), usize> = BTreeMap::new();
        for dispatch in &plan.dispatches {
            for argument in &dispatch.arguments {
                let place = format!("{name}: {}: {}", dispatch.id, argument.name);
                let is_static = matches!(argument.role, DispatchRole::StaticWeight | DispatchRole::StaticLut);
                match &argument.content {
                    Content::Weight { tensors, packing } => {
                        let shapes: Vec<_> = tensors.iter().map(|t| known[t]).collect();
                        let (rows, cols) = packing.shape(&shapes).unwrap();
                        assert_eq!(rows * cols, argument.len(), "{place}");
                        let [.., last] = argument.dims[..] else { panic!("{place}") };
                        assert_eq!(cols, last, "{place}");
                        assert!(argument.role == DispatchRole::StaticWeight, "{place}");
                        let decode = dispatch.stage == DispatchStage::Decode;
                        tensors.iter().for_each(|t| *bound.entry((decode, t.clone())).or_default() += 1);
                    }
                    Content::Lut { positions, heads } => {
                        let expected = if dispatch.stage == DispatchStage::Decode { 1 } else { 2048 };
                        assert_eq!(
                            (*positions, positions * heads * config.head_dim),
                            (expected, argument.len()),
                            "{place}"
                        );
                    }
                    Content::Scratch => {
                        assert!(argument.dtype == FactDtype::F32 && argument.dims[0] == 2048, "{place}")
                    }
                    Content::Dead => assert_eq!(argument.role, DispatchRole::Dead, "{place}"),
                    Content::Activation => assert!(!is_static, "{place}"),
                }
                assert!(!argument.is_empty(), "{place}");
            }
        }
        for (tensor, _) in known.iter().filter(|(tensor, _)| tensor.starts_with("model.layers.0.")) {
            for decode in [false, true] {
                // Where decode is five dispatches the host norms in between.
                let on_host = decode
                    && tensor.contains("post_attention_layernorm")
                    && !plan.dispatches.iter().any(|d| d.id == "o_gemv_ffn");
                let count = bound.get(&(decode, tensor.clone())).copied().unwrap_or(0);
                assert_eq!(count, usize::from(!on_host), "{name}: {tensor}, decode {decode}");
            }
        }
    }
}

#[rstest::rstest]
#[case("llama32_1b", "rms_gemms_rope", 14)]
#[case("smollm2_1_7b", "rms_gemms_rope", 16)]
#[case("llama32_1b", "lm_head_gemv", 17)]
#[case("qwen3_0_6b", "lm_head_gemv", 39)]
fn arguments_with_scratch_and_partitions(#[case] name: &str, #[case] id: &str, #[case] count: usize) {
    let plan = bind(&model(name), 2048).unwrap();
    let dispatch = plan.dispatches.iter().find(|d| d.id == id).unwrap();
    let names: Vec<_> = dispatch.arguments.iter().map(|a| (a.name.as_str(), a.dims.clone())).collect();
    assert_eq!(dispatch.arguments.len(), count, "{names:?}");
}

/// Partitions cover the vocabulary once, and weight and logits alternate.
#[test]
fn partitions_of_the_head() {
    for (name, _) in CHAINS {
        let config = model(name);
        let plan = bind(&config, 2048).unwrap();
        let head = plan.dispatches.iter().find(|d| d.id == "lm_head_gemv").unwrap();
        let mut next = 0;
        for (p, pair) in head.arguments[1..].chunks(2).enumerate() {
            let [weight, logits] = pair else { panic!("{name}") };
            let Content::Weight { packing: Packing::Part { first, rows }, .. } = weight.content else {
                panic!("{name}")
            };
            assert_eq!((first, vec![rows]), (next, logits.dims.clone()), "{name}: partition {p}");
            assert_eq!(weight.name, format!("weight_{p}"));
            next += rows;
        }
        assert!(next >= config.vocab_size, "{name}: {next} rows for {}", config.vocab_size);
    }
}

/// Wide heads go head-first, values in pieces; narrow ones stay as they are.
#[rstest::rstest]
#[case("llama32_1b", false, vec![2048, 2048], vec![2048, 512])]
#[case("qwen3_0_6b", true, vec![16, 2048, 128], vec![16, 2048, 64])]
#[case("qwen25_1_5b", true, vec![12, 2048, 128], vec![4, 2048, 64])]
fn attention_layout(#[case] name: &str, #[case] head_first: bool, #[case] q: Vec<usize>, #[case] v: Vec<usize>) {
    let plan = bind(&model(name), 2048).unwrap();
    let attention = plan.dispatches.iter().find(|d| d.id == "flash_attn").unwrap();
    assert_eq!(attention.head_first, head_first);
    assert_eq!((&attention.arguments[0].dims, &attention.arguments[2].dims), (&q, &v));
}

#[test]
fn columns_are_padded_where_the_hidden_size_cannot_be_placed() {
    let dims = |name: &str, id: &str, argument: &str| {
        let plan = bind(&model(name), 2048).unwrap();
        let dispatch = plan.dispatches.into_iter().find(|d| d.id == id).unwrap();
        dispatch.arguments.into_iter().find(|a| a.name == argument).unwrap().dims
    };
    assert_eq!(dims("qwen25_0_5b", "rms_qkv_bias_rope", "wk"), [896, 1024]);
    assert_eq!(dims("qwen25_0_5b", "down_add", "w_down"), [4864, 1024]);
    assert_eq!(dims("qwen25_1_5b", "rms_qkv_bias_rope", "wk"), [1536, 256]);
}

#[test]
fn a_model_without_elves_falls_back_and_says_why() {
    let plan = bind(&model("smollm2_135m"), 2048).unwrap();
    assert!(plan.dispatches.is_empty());
    let why = |id: &str| plan.fallbacks.iter().find(|f| f.id == id).unwrap().to_string();
    let ffn = why("o_gemv_ffn");
    assert!(ffn.contains("requires E < 2560 && E % 512 == 0") && ffn.contains("E = 576"), "{ffn}");
    assert!(why("flash_attn").contains("none of upstream's"), "{}", why("flash_attn"));
    assert!(why("lm_head_gemv").contains("none of upstream's"));
    // Q = E is what a model with other heads breaks.
    let mut wide = model("llama32_1b");
    wide.num_attention_heads = 16;
    let plan = bind(&wide, 2048).unwrap();
    let fallback = plan.fallbacks.iter().find(|f| f.id == "rms_gemms_rope").unwrap();
    assert_eq!(fallback.why, "requires Q == E, found E = 2048, Q = 1024");
}
