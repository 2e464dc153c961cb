//! Every case of phase 0 can fail: a copy of a fixture is damaged, and exactly the named cases see it.

use std::collections::BTreeSet;

use rstest::rstest;
use serde_json::{Value, json};

use super::damage::Project;

type Damage = fn(&Project);

/// What stands for all cases that need the capture, or all cases.
const EVERY_CASE: &str = "*";

fn config(p: &Project, key: &str, value: Value) {
    p.config(|c| c[key] = value);
}

fn shape(p: &Project, tensor: &str) {
    p.tensors(|t| t[tensor]["shape"].as_array_mut().unwrap().reverse());
    p.rebind();
}

fn rename(p: &Project, from: &str, to: &str) {
    p.tensors(|t| {
        let info = t.as_object_mut().unwrap().shift_remove(from).unwrap();
        t[to] = info;
    });
    p.rebind();
}

fn resolved(p: &Project, key: &str, value: Value) {
    p.said("resolved_config", |c| c[key] = value);
}

const Q0: &str = "model.layers.0.self_attn.q_proj.weight";

#[rstest]
#[case::nothing(|_: &Project| {}, &[])]
// Other files than the captured ones.
#[case::weights_of_another(|p: &Project| p.weight(Q0, 5, 0.25), &["every case with the capture"])]
#[case::config_of_another(|p: &Project| p.rewrite("checkpoint/config.json", "\"use_cache\": true", "\"use_cache\": false"), &["every case with the capture"])]
#[case::prompts_of_another(|p: &Project| p.rewrite("prompts/base.txt", "France", "Spain"), &["every case with the capture"])]
#[case::out_of_scope(|p: &Project| p.rewrite("checkpoint/config.json", "LlamaForCausalLM", "MixtralForCausalLM"), &[EVERY_CASE])]
#[case::no_tokenizer(|p: &Project| p.rewrite("checkpoint/tokenizer.json", "{", "["), &["every case with the capture", "vocabulary"])]
// config.json against HF's reading of it.
#[case::eps(|p: &Project| config(p, "rms_norm_eps", json!(1e-6)), &["config::rms_norm_eps"])]
#[case::theta(|p: &Project| p.config(|c| c["rope_parameters"]["rope_theta"] = json!(1e4)), &["config::rope_parameters", "rope::pos_*"])]
#[case::scaling(|p: &Project| config(p, "rope_parameters", json!({"rope_theta": 5e5, "rope_type": "default"})), &["config::rope_parameters", "rope::pos_*"])]
#[case::positions(|p: &Project| config(p, "max_position_embeddings", json!(4096)), &["config::max_position_embeddings"])]
#[case::tied(|p: &Project| config(p, "tie_word_embeddings", json!(true)), &["config::tie_word_embeddings", "tensor::lm_head", "tensor::nothing_left_over"])]
#[case::heads(|p: &Project| config(p, "num_key_value_heads", json!(4)), &["config::num_key_value_heads", "tensor::*::k_proj", "tensor::*::v_proj"])]
#[case::bias(|p: &Project| config(p, "attention_bias", json!(true)), &["config::attention_bias", "tensor::nothing_missing"])]
#[case::eos(|p: &Project| config(p, "eos_token_id", json!([0, 2])), &["config::eos_token_id", "stop_set"])]
#[case::irrelevant_key(|p: &Project| config(p, "use_cache", json!(false)), &["config::use_cache"])]
#[case::hf_ran_another_class(|p: &Project| resolved(p, "architectures", json!(["MistralForCausalLM"])), &["scope", "config::architectures"])]
#[case::hf_has_a_window(|p: &Project| resolved(p, "sliding_window", json!(128)), &["config::sliding_window"])]
// Tensors.
#[case::missing(|p: &Project| rename(p, Q0, "model.layers.0.self_attn.q_porj.weight"), &["tensor::l00::q_proj", "tensor::nothing_missing", "tensor::nothing_left_over"])]
#[case::transposed(|p: &Project| shape(p, "model.layers.2.mlp.down_proj.weight"), &["tensor::l02::down_proj"])]
#[case::dtype(|p: &Project| { p.tensors(|t| t["model.layers.1.mlp.up_proj.weight"]["dtype"] = json!("I16")); p.rebind() }, &["tensor::l01::up_proj"])]
#[case::not_a_number(|p: &Project| { p.weight("model.layers.3.input_layernorm.weight", 7, f32::NAN); p.rebind() }, &["tensor::l03::input_layernorm"])]
#[case::infinite(|p: &Project| { p.weight("lm_head.weight", 77, f32::INFINITY); p.rebind() }, &["tensor::lm_head"])]
// Text.
#[case::second_bos(|p: &Project| { p.rewrite("checkpoint/chat_template.jinja", "{", "{{ bos_token }}{"); p.rebind() }, &["tokens::chat_*", "template"])]
#[case::deaf_template(|p: &Project| { p.rewrite("checkpoint/chat_template.jinja", "add_generation_prompt", "false"); p.rebind() }, &["tokens::chat_*", "template"])]
#[case::no_template(|p: &Project| { p.rewrite("checkpoint/chat_template.jinja", "{", "{{ raise_exception('no') }}{"); p.rebind() }, &["tokens::chat_*", "template"])]
#[case::another_prompt(|p: &Project| { p.rewrite("prompts/base.txt", "The capital of France", "The capital of Spain"); p.rebind() }, &["tokens::base_00"])]
#[case::fewer_prompts(|p: &Project| { p.rewrite("prompts/long.txt", "The country is an island", "The country
# is an island"); p.rebind() }, &["tokens::long_00"])]
#[case::another_held_out(|p: &Project| p.rewrite("fixtures/hf/held_out.txt", "a", "b"), &["tokens::held_out"])]
#[case::more_stops(|p: &Project| { p.rewrite("checkpoint/generation_config.json", "\"eos_token_id\": 0", "\"eos_token_id\": [0, 1]"); p.rebind() }, &["stop_set"])]
// The capture.
#[case::rope_row(|p: &Project| p.captured("rope.cos", 3 * 64 + 1, 0.5f32.to_le_bytes()), &["rope::pos_0015"])]
#[case::rope_position(|p: &Project| p.captured("rope.positions", 10, 513u32.to_le_bytes()), &["rope::pos_0512", "rope::positions"])]
#[case::nan_in_the_capture(|p: &Project| p.captured("base_03.f32.top_logits", 9, f32::NAN.to_le_bytes()), &["baseline::sound"])]
#[case::uniform(|p: &Project| p.captured("base_04.bf16.lse", 6, 60f32.to_le_bytes()), &["baseline::base_04", "baseline::sound"])]
#[case::surprised(|p: &Project| (0..400).for_each(|i| p.captured("nll.bf16", i, 9f32.to_le_bytes())), &["baseline::perplexity"])]
#[case::two_models(|p: &Project| (0..200).for_each(|i| p.captured("nll.bf16", i, 3.5f32.to_le_bytes())), &["baseline::perplexity"])]
#[case::wrong_answer(|p: &Project| p.rewrite(MANIFEST, "\"base_07\"", "\"base_03\""), &["baseline::base_03"])]
#[case::nothing_expected(|p: &Project| { p.rewrite("prompts/base.txt", " => Berlin", ""); p.rebind() }, &["baseline::complete"])]
#[case::prompt_not_captured(|p: &Project| { p.forget(|t| t.starts_with("instruct_07.")); p.said("prompts", |l| l.as_array_mut().unwrap().retain(|x| x["id"] != "instruct_07")) }, &["tokens::instruct_07", "baseline::instruct_07", "baseline::complete", "baseline::sound"])]
fn damage_is_seen_by_exactly(#[case] damage: Damage, #[case] expected: &[&str]) {
    let project = Project::of("tiny_llama");
    damage(&project);
    let failing = project.failing();
    println!("{failing:#?}");
    if expected == [EVERY_CASE] {
        assert!(failing.len() > 130, "only {failing:?}");
        return;
    }
    if let ["every case with the capture", also @ ..] = expected {
        // What looks at the checkpoint alone has nothing to say against it.
        let alone = |case: &String| {
            let checkpoint_only = case.starts_with("tensor::") || case == "coverage" || case == "vocabulary";
            checkpoint_only && !also.contains(&case.as_str())
        };
        assert!(also.iter().all(|case| failing.iter().any(|f| f == case)), "{failing:?}");
        assert!(failing.len() > 90 && !failing.iter().any(alone), "{failing:?}");
        assert!(failing.contains(&"identity".to_owned()));
        return;
    }
    let unexpected: Vec<&String> = failing.iter().filter(|case| !expected.iter().any(|e| matches(e, case))).collect();
    let unseen: Vec<&&str> = expected.iter().filter(|e| !failing.iter().any(|case| matches(e, case))).collect();
    assert!(unexpected.is_empty() && unseen.is_empty(), "unexpected {unexpected:?}, unseen {unseen:?}");
}

const MANIFEST: &str = "fixtures/tiny_llama/manifest.toml";

/// The capture has no copy of the file, but HF's reading of it: the refusal says more than two hashes.
#[rstest]
#[case::used("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06", "rms_norm_eps 1e-6 loaded, 0.00001 captured")]
#[case::nested("\"factor\": 8.0", "\"factor\": 4.0", "rope_parameters.factor 4.0 loaded, 8.0 captured")]
#[case::bias("\"attention_bias\": false", "\"attention_bias\": true", "attention_bias true loaded, false captured")]
#[case::irrelevant("\"use_cache\": true", "\"use_cache\": false", "use_cache false loaded, true captured")]
#[case::unknown("\"use_cache\"", "\"colour\": \"blue\", \"use_cache\"", "colour \"blue\" loaded, nothing captured")]
#[case::form("{", "{ ", "no key of another value than HF resolved it to")]
#[case::many(
    "1024\n",
    "1024, \"use_cache\": false, \"bos_token_id\": 3, \"x\": 1, \"rms_norm_eps\": 1e-06",
    "rms_norm_eps 1e-6 loaded, 0.00001 captured; bos_token_id 3 loaded, 0 captured; use_cache false loaded, true captured; and 1 more"
)]
fn a_changed_config_is_refused_by_its_keys(#[case] from: &str, #[case] to: &str, #[case] keys: &str) {
    let project = Project::of("tiny_llama");
    project.rewrite("checkpoint/config.json", from, to);
    let error = project.refusal();
    assert!(
        error.contains("file config.json: sha256 ") && error.contains(&format!(" captured ({keys}); re-make")),
        "{error}"
    );
}

/// `*` stands for any text, once.
fn matches(pattern: &str, case: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == case,
        Some((start, end)) => case.starts_with(start) && case[start.len()..].ends_with(end),
    }
}

/// Cases whose damage is no file's: the account of keys and the ids that end a generation.
#[test]
fn an_account_with_a_hole_and_a_stop_id_without_a_token_are_seen() {
    let project = Project::of("tiny_llama");
    let failing = project.failing_with(|subject| drop(subject.coverage.used.remove(3)));
    assert_eq!(failing, ["coverage"]);
    let failing = project.failing_with(|subject| {
        subject.stop_ids().unwrap();
        subject.text.get_mut().unwrap().1.push(1024);
    });
    assert_eq!(failing, ["vocabulary", "stop_set"]);
}

/// The kinds of case that the tables above have made fail, against the kinds there are.
#[test]
fn every_kind_of_case_is_in_a_table() {
    let source = include_str!("tests.rs");
    let project = Project::of("tiny_llama");
    let kinds: BTreeSet<String> = super::cases(project.outline())
        .iter()
        .map(|case| case.name.replacen("::tiny_llama", "", 1))
        .map(|name| {
            let segments: Vec<&str> = name.split("::").collect();
            match segments[..] {
                ["tensor", .., "nothing_left_over"] | ["baseline", "sound" | "complete" | "perplexity"] => name,
                ["tokens", "held_out"] | ["rope", "positions"] => name,
                [kind, ..] => kind.to_owned(),
                [] => name,
            }
        })
        .collect();
    let missing: Vec<&String> = kinds.iter().filter(|kind| !source.contains(&format!("\"{kind}"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A vocabulary padded for the hardware: the rows without a token are reported, and nothing fails.
#[test]
fn a_padded_vocabulary_is_reported() {
    let project = Project::of("tiny_llama");
    let warnings = project.warnings("vocabulary", |subject| subject.config.vocab_size += 64);
    assert_eq!(warnings, ["64 ids from 1024 to 1087 have no token and are masked in greedy choice"]);
    let warnings = project.warnings("vocabulary", |subject| subject.config.vocab_size -= 24);
    assert_eq!(warnings, ["tokens with ids 1000 to 1023 have no row: text with them cannot run"]);
}
