//! Plans keep their rules, and inheritance names the first breaker.

use half::bf16;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::model::ModelConfig;

fn config(architecture: &str, heads: usize, kv_heads: usize) -> ModelConfig {
    let json = json!({
        "architectures": [format!("{architecture}ForCausalLM")], "model_type": architecture.to_lowercase(),
        "hidden_size": 64 * heads, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 64, "vocab_size": 100, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "sliding_window": null,
    });
    ModelConfig::from_json(std::path::Path::new("config.json"), &json).unwrap().0
}

#[rstest]
#[case("Llama", "inherits llama's layer")]
#[case("Mistral", "inherits llama's layer")]
#[case("Qwen2", "kernel-first: l00.q_proj_bias stands where llama's layer has k_proj")]
#[case("Qwen3", "kernel-first: l00.q_norm stands where llama's layer has q_rope")]
fn inheritance_names_the_first_breaker(#[case] architecture: &str, #[case] verdict: &str) {
    let config = config(architecture, 4, 2);
    for plan in [prefill(&config, 32, &PlanOptions::default()), decode(&config, &PlanOptions::default())] {
        assert_eq!(inheritance(&plan.unwrap()).to_string(), verdict);
    }
}

#[rstest]
fn plans_are_sound(
    #[values("Llama", "Qwen2", "Qwen3")] architecture: &str,
    #[values(BiasLowering::Device, BiasLowering::Host)] bias: BiasLowering,
    #[values(None, Some(3))] pad_gqa: Option<usize>,
) {
    let options = PlanOptions { bias, pad_gqa, host: vec!["attention".into()] };
    let config = config(architecture, 4, 2);
    prefill(&config, 32, &options).unwrap();
    decode(&config, &options).unwrap();
}

#[test]
fn an_unknown_kernel_and_too_small_a_group_are_errors() {
    let config = config("Llama", 4, 2);
    let unknown = PlanOptions { host: vec!["conv".into()], ..PlanOptions::default() };
    assert!(
        prefill(&config, 32, &unknown).unwrap_err().to_string().starts_with("unknown kernel \"conv\"; known: add,")
    );
    let small = PlanOptions { pad_gqa: Some(1), ..PlanOptions::default() };
    assert!(prefill(&config, 32, &small).is_err());
}

/// Each way to break a plan that the check must see.
#[rstest]
#[case::too_few_arguments(|p: &mut Plan| launch(p, "l01.mlp_add").args.truncate(2), "found 2 arguments, expected 3")]
#[case::wrong_size(|p: &mut Plan| launch(p, "l00.down_proj").args.swap(0, 2), "argument a")]
#[case::read_before_written(|p: &mut Plan| drop(p.steps.remove(4)), "before it is written")]
#[case::writes_a_weight(|p: &mut Plan| { let w = launch(p, "l00.input_layernorm").args[1];
    *launch(p, "l00.input_layernorm") = Launch { kernel: Kernel::Add { rows: 1, cols: 256 }, args: vec![w, w, w] } }, "writes the static")]
#[case::no_logits(|p: &mut Plan| drop(p.steps.pop()), "no step writes the logits")]
fn a_broken_plan_is_refused(#[case] damage: fn(&mut Plan), #[case] message: &str) {
    let mut plan = prefill(&config("Llama", 4, 2), 32, &PlanOptions::default()).unwrap();
    damage(&mut plan);
    let error = plan.check().unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

fn launch<'a>(plan: &'a mut Plan, step: &str) -> &'a mut Launch {
    let step = plan.steps.iter_mut().find(|s| s.name == step).unwrap();
    match &mut step.op {
        Op::Dispatch(launches) => &mut launches[0],
        Op::Host(_) => panic!("{} is a host op", step.name),
    }
}

#[test]
fn phantom_heads_go_inside_each_group() {
    let x: Vec<bf16> = (1..=8).map(|i| bf16::from_f32(i as f32)).collect();
    let pad = |axis, x: &[bf16]| {
        let padded = HeadPadding { axis, groups: 2, from: 2, to: 3 }.apply(x).unwrap();
        padded.iter().map(|v| v.to_f32() as i32).collect::<Vec<_>>()
    };
    // Rows: [4, 2] -> [6, 2]; columns: [2, 4] -> [2, 6].
    assert_eq!(pad(Axis::Rows, &x), [1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 0, 0]);
    assert_eq!(pad(Axis::Cols, &x), [1, 2, 0, 3, 4, 0, 5, 6, 0, 7, 8, 0]);
    assert!(HeadPadding { axis: Axis::Rows, groups: 3, from: 1, to: 2 }.apply(&x).is_err());
}
