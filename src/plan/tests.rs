//! Plans keep their rules, and inheritance names the first breaker.

use half::bf16;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::device::Role;
use crate::kernel::Kernel;
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
    let norm = launch(p, "l00.input_layernorm");
    (norm.kernel, norm.args) = (Kernel::Add { rows: 1, cols: 256 }, vec![w, w, w]) }, "writes the static")]
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

/// Upstream's boundaries, and nothing lost on the way there or back.
#[rstest]
#[case::llama("Llama", BiasLowering::Device, 6)]
#[case::qwen2("Qwen2", BiasLowering::Device, 9)]
#[case::qwen2_host("Qwen2", BiasLowering::Host, 6)]
#[case::qwen3("Qwen3", BiasLowering::Device, 8)]
fn merged_dispatches_have_upstreams_boundaries(
    #[case] architecture: &str,
    #[case] bias: BiasLowering,
    #[case] first: usize,
) {
    let options = PlanOptions { bias, ..PlanOptions::default() };
    let config = config(architecture, 4, 2);
    for (plan, attention) in [(prefill(&config, 32, &options).unwrap(), 1), (decode(&config, &options).unwrap(), 0)] {
        let merged = merge(plan.clone());
        merged.check().unwrap();
        let sizes = |layer| {
            let steps = merged.steps.iter().filter(move |s| s.layer == Some(layer) && !s.launches().is_empty());
            steps.map(|s| (s.name.clone(), s.launches().len())).collect::<Vec<_>>()
        };
        let mut expected = vec![("l01.rms_qkv_rope".to_owned(), first), ("l01.o_ffn".to_owned(), 8)];
        if attention == 1 {
            expected.insert(1, ("l01.attention".to_owned(), 1));
        }
        assert_eq!(sizes(1), expected);
        assert_eq!(merged.dispatches(), 2 * (2 + attention) + 1);
        assert_eq!(stands_between(&merged), Vec::<String>::new());
        let launches = |p: &Plan| p.launches().map(|(_, l)| l.clone()).collect::<Vec<_>>();
        assert_eq!(launches(&merged), launches(&plan));
        assert_eq!(split(merged.clone()), plan);
        assert_eq!(inheritance(&merged), inheritance(&plan));
        let taps = |p: &Plan| p.steps.iter().flat_map(|s| s.taps.clone()).collect::<Vec<_>>();
        assert_eq!(taps(&merged), taps(&plan));
    }
}

#[test]
fn a_launch_on_the_host_stands_between_and_is_named() {
    let options = PlanOptions { host: vec!["up_proj".into(), "l01.k_proj".into()], ..PlanOptions::default() };
    let merged = merge(prefill(&config("Llama", 4, 2), 32, &options).unwrap());
    let names: Vec<&str> = merged.steps.iter().filter(|s| s.layer == Some(1)).map(|s| s.name.as_str()).collect();
    let expected =
        "l01.rms_qkv_rope l01.k_proj l01.rms_qkv_rope_2 l01.kv_append l01.attention l01.o_ffn l01.up_proj l01.o_ffn_2";
    assert_eq!(names.join(" "), expected);
    let between = stands_between(&merged);
    assert_eq!(between, ["l00.up_proj", "l01.k_proj", "l01.up_proj"].map(|n| format!("{n}: placed on the host")));
}

/// A launch inside a merged dispatch can be moved by its name; the dispatch comes apart for it.
#[test]
fn a_launch_inside_a_dispatch_can_be_placed() {
    let mut merged = merge(prefill(&config("Llama", 4, 2), 32, &PlanOptions::default()).unwrap());
    assert_eq!(merged.place("l00.gate_proj", Placement::Host), 1);
    assert_eq!(merged.dispatches(), 2 * 3 + 1 - 1 + 7);
    assert_eq!(merged.place("silu_mul", Placement::Host), 2);
    merged.check().unwrap();
}

#[rstest]
fn shared_memory_is_sound_and_smaller(
    #[values("Llama", "Qwen2", "Qwen3")] architecture: &str,
    #[values(true, false)] merged: bool,
) {
    let config = config(architecture, 4, 2);
    for plan in [prefill(&config, 32, &PlanOptions::default()), decode(&config, &PlanOptions::default())] {
        let plan = if merged { merge(plan.unwrap()) } else { plan.unwrap() };
        let shared = share(plan.clone());
        shared.check().unwrap();
        let bytes = |p: &Plan| {
            let own = p.buffers.iter().filter(|b| b.lies_in.is_none() && b.spec.role == Role::Intermediate);
            own.map(|b| b.spec.bytes()).sum::<usize>()
        };
        // Merged, the tapped ones have to stand until the end of their dispatch.
        let most = if merged { 0.95 } else { 0.65 };
        assert!((bytes(&shared) as f64) < most * bytes(&plan) as f64, "{} of {}", bytes(&shared), bytes(&plan));
    }
}

/// The check sees a memory that is shared while it is needed.
#[test]
fn memory_shared_too_early_is_refused() {
    let mut plan = prefill(&config("Llama", 4, 2), 32, &PlanOptions::default()).unwrap();
    let id = |plan: &Plan, name: &str| BufferId(plan.buffers.iter().position(|b| b.spec.name == name).unwrap());
    let (gate, up) = (id(&plan, "gate"), id(&plan, "up"));
    plan.buffers[up.0].lies_in = Some(gate);
    let error = plan.check().unwrap_err().to_string();
    assert!(
        error.contains("l00.silu_mul: silu_mul::r0032_c0096: reads gate, whose memory holds up by then"),
        "{error}"
    );
}

/// The last layer's keys and values need the prompt's rows; behind them the last token's is enough.
#[rstest]
fn a_prefill_needs_the_prompts_rows_and_at_its_end_the_last_ones(
    #[values("Llama", "Qwen2", "Qwen3")] architecture: &str,
    #[values(BiasLowering::Device, BiasLowering::Host)] bias: BiasLowering,
    #[values(false, true)] share: bool,
) {
    let options = PlanOptions { bias, ..PlanOptions::default() };
    let tuning = Tuning { share, ..Tuning::default() };
    let plan = tuning.apply(prefill(&config(architecture, 4, 2), 32, &options).unwrap()).unwrap();
    for (step, needed) in plan.steps.iter().zip(plan.rows_needed()) {
        let of_kv = ["input_layernorm", "k_proj", "v_proj", "k_proj_bias", "v_proj_bias", "k_norm", "k_rope"];
        let expected = match step.launches() {
            [] => Needed::All,
            _ if step.layer.is_none() => Needed::All,
            [launch] if step.layer == Some(1) && !of_kv.contains(&launch.site()) => Needed::Last,
            _ => Needed::Prompt,
        };
        assert_eq!(needed, expected, "{}", step.name);
    }
}

#[test]
fn a_merged_dispatch_needs_what_the_widest_of_its_launches_needs() {
    let tuning = Tuning { merge: true, ..Tuning::default() };
    let plan = tuning.apply(prefill(&config("Llama", 4, 2), 32, &PlanOptions::default()).unwrap()).unwrap();
    let needed: Vec<(&str, Needed)> = plan.steps.iter().map(|s| s.name.as_str()).zip(plan.rows_needed()).collect();
    for (step, expected) in [
        ("l00.rms_qkv_rope", Needed::Prompt),
        ("l00.o_ffn", Needed::Prompt),
        ("l01.rms_qkv_rope", Needed::Prompt),
        ("l01.attention", Needed::Last),
        ("l01.o_ffn", Needed::Last),
    ] {
        assert!(needed.contains(&(step, expected)), "{step}: {needed:?}");
    }
}

/// What the host computes, what attends to the padding and what nobody in the plan reads is computed in full, and so is what it
/// reads.
#[test]
fn what_cannot_be_cut_needs_every_row_of_what_it_reads() {
    let plain = prefill(&config("Llama", 4, 2), 32, &PlanOptions::default()).unwrap();
    let needed =
        |plan: &Plan, name: &str| plan.rows_needed()[plan.steps.iter().position(|step| step.name == name).unwrap()];
    let mut host = plain.clone();
    host.place("l01.silu_mul", Placement::Host);
    let mut whole = plain.clone();
    if let Kernel::Attention { causal, .. } = &mut launch(&mut whole, "l01.attention").kernel {
        *causal = false;
    }
    let without = |name: &str| {
        let mut plan = plain.clone();
        plan.steps.retain(|step| step.name != name);
        plan
    };
    let unread = without("l01.mlp_add");
    // Cache and attention each need the prompt's keys and values, whatever the other does.
    let (not_kept, not_attended) = (without("l01.kv_append"), without("l01.attention"));
    for (plan, step, expected) in [
        (&plain, "l01.up_proj", Needed::Last),
        (&host, "l01.silu_mul", Needed::All),
        (&host, "l01.up_proj", Needed::All),
        (&host, "l01.post_attention_layernorm", Needed::All),
        (&host, "l01.down_proj", Needed::Last),
        (&plain, "l01.q_rope", Needed::Last),
        (&whole, "l01.attention", Needed::All),
        (&whole, "l01.q_rope", Needed::All),
        (&whole, "l01.v_proj", Needed::All),
        (&whole, "l00.mlp_add", Needed::All),
        (&whole, "l01.o_proj", Needed::Last),
        (&unread, "l01.down_proj", Needed::All),
        (&not_kept, "l01.v_proj", Needed::Prompt),
        (&not_kept, "l01.k_rope", Needed::Prompt),
        (&not_attended, "l01.v_proj", Needed::Prompt),
        (&not_attended, "l01.k_rope", Needed::Prompt),
    ] {
        assert_eq!(needed(plan, step), expected, "{step}");
    }
}

/// Packed keys and values come in whole blocks and panels, and those of one layer are needed for prefill's attention.
#[rstest]
#[case(10, 128)]
#[case(128, 128)]
#[case(129, 256)]
fn memory_counts_whole_blocks(#[case] positions: usize, #[case] held: u64) {
    let (config, options) = (config("Llama", 4, 2), PlanOptions::default());
    let memory = |seq_len, positions| Memory::of(&config, seq_len, positions, &options).unwrap();
    // Two layers of two heads of 64, keys and values, two bytes each.
    assert_eq!(memory(32, positions).kv_cache, 2 * 2 * 64 * 2 * 2 * held);
    let written = |plan: Plan| {
        let buffers = plan.buffers.into_iter().filter(|b| !b.spec.role.is_static());
        buffers.map(|b| b.spec.bytes() as u64).sum::<u64>()
    };
    let buffers = written(prefill(&config, positions, &options).unwrap()) + written(decode(&config, &options).unwrap());
    assert_eq!(memory(positions, 1).activations, buffers + 2 * 64 * 2 * 2 * held);
}
