//! A wrong value in any field of the config fails a case: no field is parsed and then never looked at.

use std::collections::BTreeSet;

use super::damage::Project;
use crate::model::config::Activation;
use crate::model::{Architecture, ModelConfig, RopeKind};

type Change = fn(&mut ModelConfig);

/// Every field by its name in the serialised config, with a wrong value.
const WRONG: &[(&str, Change)] = &[
    ("architecture", |c| {
        c.architecture = if c.architecture == Architecture::Llama { Architecture::Mistral } else { Architecture::Llama }
    }),
    ("vocab_size", |c| c.vocab_size += 1),
    ("hidden_size", |c| c.hidden_size += 64),
    ("intermediate_size", |c| c.intermediate_size += 1),
    ("num_hidden_layers", |c| c.num_hidden_layers -= 1),
    ("num_hidden_layers", |c| c.num_hidden_layers += 1),
    ("num_attention_heads", |c| c.num_attention_heads *= 2),
    ("num_key_value_heads", |c| c.num_key_value_heads = 1),
    ("head_dim", |c| c.head_dim *= 2),
    ("max_position_embeddings", |c| c.max_position_embeddings *= 2),
    ("rms_norm_eps", |c| c.rms_norm_eps *= 1.001),
    ("tie_word_embeddings", |c| c.tie_word_embeddings ^= true),
    ("qkv_bias", |c| c.qkv_bias ^= true),
    ("o_bias", |c| c.o_bias ^= true),
    ("mlp_bias", |c| c.mlp_bias ^= true),
    ("qk_norm", |c| c.qk_norm ^= true),
    ("bos_token_id", |c| c.bos_token_id = Some(c.bos_token_id.map_or(0, |id| id + 1))),
    ("bos_token_id", |c| c.bos_token_id = None),
    ("eos_token_ids", |c| c.eos_token_ids.push(7)),
    ("eos_token_ids", |c| c.eos_token_ids.clear()),
    ("rope", |c| c.rope.rope_theta *= 1.001),
    ("rope", |c| c.rope.kind = RopeKind::Linear { factor: 2.0 }),
    ("rope", |c| c.rope.kind = RopeKind::Dynamic { factor: 2.0 }),
];

/// Of the one model whose RoPE has parameters.
const WRONG_LLAMA3: [Change; 5] = [
    |c| c.rope.kind = RopeKind::Default,
    |c| llama3(c, |[factor, ..], _| *factor *= 1.001),
    |c| llama3(c, |[_, low, _], _| *low *= 1.001),
    |c| llama3(c, |[.., high], _| *high *= 1.001),
    |c| llama3(c, |_, original| *original += 1),
];

fn llama3(config: &mut ModelConfig, change: impl FnOnce([&mut f64; 3], &mut usize)) {
    let RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
        &mut config.rope.kind
    else {
        panic!("not scaled")
    };
    change([factor, low_freq_factor, high_freq_factor], original_max_position_embeddings);
}

#[test]
fn a_wrong_value_in_any_field_fails_a_case() {
    for model in ["tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3"] {
        let project = Project::of(model);
        assert_eq!(project.failing(), Vec::<String>::new(), "{model}");
        let llama3 = WRONG_LLAMA3.iter().map(|change| ("rope", *change)).filter(|_| model == "tiny_llama");
        for (at, (field, change)) in WRONG.iter().copied().chain(llama3).enumerate() {
            let failing = project.failing_with(|subject| change(&mut subject.config));
            // A tensor's case alone could fail for a size that only happens to show in a shape.
            let named = |case: &String| case.starts_with("config::") || case == "tensor::nothing_left_over";
            let bias = field.ends_with("_bias") || field == "qk_norm";
            let seen = if bias { !failing.is_empty() } else { failing.iter().any(named) };
            assert!(seen, "{model}: {field} (change {at}) is wrong and only {failing:?} fail");
        }
    }
}

/// The table above has every field; `hidden_act` has one value only.
#[test]
fn no_field_is_missing_from_the_table() {
    let project = Project::of("tiny_llama");
    let mut fields = BTreeSet::new();
    project.failing_with(|subject| {
        let Activation::Silu = subject.config.hidden_act;
        let json = serde_json::to_value(&subject.config).unwrap();
        fields = json.as_object().unwrap().keys().cloned().collect();
    });
    let mut table: BTreeSet<String> = WRONG.iter().map(|(field, _)| (*field).to_owned()).collect();
    table.insert("hidden_act".into());
    assert_eq!(table, fields);
}
