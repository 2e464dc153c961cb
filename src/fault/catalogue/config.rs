//! A config that is parsed and not applied, or applied wrongly.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::model::{ModelConfig, RopeKind};

const fn config(
    id: &'static str,
    texts: [&'static str; 3],
    key: &'static str,
    injection: Injection,
    absent: fn(&ModelConfig) -> Option<&'static str>,
) -> Entry {
    // Phase 0 holds every key against HF's resolved config; what the logits see of it comes on top.
    let config = entry(id, Kind::Config, texts, &[Gate::Phase0], Lens::Message(key), injection);
    everywhere(Entry { absent, ..config })
}

pub(super) static ENTRIES: &[Entry] = &[
    config(
        "rope_theta_default",
        [
            "rope_theta is 10000 whatever the config says",
            "the key is read under another name, or the RoPE table was built from the default",
            "read rope_theta (or rope_parameters.rope_theta) and build the table from it",
        ],
        "rope",
        Injection::Config(|c, _| c.rope.rope_theta = 10_000.0),
        |c| (c.rope.rope_theta == 10_000.0).then_some("rope_theta is 10000"),
    ),
    Entry {
        strengths: &[1.5, 2.0, 0.5],
        ..config(
            "rope_theta_scaled",
            [
                "rope_theta times a factor",
                "a theta of another model, or one that was scaled twice",
                "take rope_theta as it stands in config.json",
            ],
            "rope",
            Injection::Config(|c, at| c.rope.rope_theta *= at.strength),
            |_| None,
        )
    },
    config(
        "rope_scaling_ignored",
        [
            "the RoPE scaling of the config is not applied",
            "rope_scaling is parsed and dropped; short prompts do not show it",
            "apply rope_type's formula to the frequencies before building the table",
        ],
        "rope",
        Injection::Config(|c, _| c.rope.kind = RopeKind::Default),
        |c| (c.rope.kind == RopeKind::Default).then_some("no RoPE scaling"),
    ),
    config(
        "eps_of_another_family",
        [
            "rms_norm_eps is 1e-6 for 1e-5, or the reverse",
            "a family's default was taken in place of the key",
            "read rms_norm_eps; compile the norm with it",
        ],
        "rms_norm_eps",
        Injection::Config(|c, _| c.rms_norm_eps = if c.rms_norm_eps == 1e-5 { 1e-6 } else { 1e-5 }),
        |_| None,
    ),
    config(
        "head_dim_derived",
        [
            "head_dim is hidden_size / num_attention_heads although the config says otherwise",
            "the key head_dim is not read",
            "read head_dim where it is there",
        ],
        "head_dim",
        Injection::Config(|c, _| c.head_dim = c.hidden_size / c.num_attention_heads),
        |c| (c.q_dim() == c.hidden_size).then_some("head_dim is hidden_size / heads"),
    ),
    config(
        "tied_head",
        [
            "the embedding is used as the head although the model has one of its own",
            "tie_word_embeddings is not read, or lm_head.weight was not found",
            "use lm_head.weight where tie_word_embeddings is false",
        ],
        "tie_word_embeddings",
        Injection::Config(|c, _| c.tie_word_embeddings = true),
        |c| c.tie_word_embeddings.then_some("the head is the embedding"),
    ),
    config(
        "qkv_bias_dropped",
        [
            "the bias of q, k and v is not added",
            "the family's bias is not in the plan",
            "add the bias launches, or the host bias of the plan's options",
        ],
        "bias",
        Injection::Config(|c, _| c.qkv_bias = false),
        |c| (!c.qkv_bias).then_some("no bias on q, k and v"),
    ),
    config(
        "qk_norm_skipped",
        [
            "the norm of q and k heads is left out",
            "the family's QK-norm is not in the plan",
            "launch qk_norm on q and k before RoPE",
        ],
        "norm",
        Injection::Config(|c, _| c.qk_norm = false),
        |c| (!c.qk_norm).then_some("no QK-norm"),
    ),
    config(
        "last_layer_missing",
        [
            "one layer fewer than the model has",
            "num_hidden_layers of a smaller sibling, or a loop that ends early",
            "take num_hidden_layers from config.json",
        ],
        "num_hidden_layers",
        Injection::Config(|c, _| c.num_hidden_layers -= 1),
        |c| (c.num_hidden_layers < 2).then_some("one layer"),
    ),
    config(
        "kv_heads_halved",
        [
            "half of the key-value heads",
            "num_key_value_heads is guessed from another model",
            "take num_key_value_heads from config.json",
        ],
        "num_key_value_heads",
        Injection::Config(|c, _| c.num_key_value_heads /= 2),
        |c| (c.num_key_value_heads < 2).then_some("one KV head"),
    ),
];
