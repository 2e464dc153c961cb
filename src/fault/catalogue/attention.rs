//! Attention: on the device at prefill, on the host at decode.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::launch::Tamper;
use crate::fault::{Stages, hooks, kernels};
use crate::model::ModelConfig;

const fn kernel(id: &'static str, texts: [&'static str; 3], tamper: Tamper) -> Entry {
    let injection = Injection::Launch { kernels: &["attention"], sites: &[], stages: Stages::Both, tamper };
    everywhere(entry(id, Kind::Attention, texts, &[Gate::Phase1], Lens::Kernel("attention"), injection))
}

const fn decode(id: &'static str, texts: [&'static str; 3], hook: Injection) -> Entry {
    entry(id, Kind::Attention, texts, &[Gate::Decode, Gate::Kl], Lens::Step(|_| 0), hook)
}

fn no_groups(config: &ModelConfig) -> Option<&'static str> {
    let (group, kv_heads) = (config.group(), config.num_key_value_heads);
    (group == 1 || kv_heads == 1).then_some("every head map is the same")
}

pub(super) static ENTRIES: &[Entry] = &[
    kernel(
        "attention_not_causal",
        ["every position sees every other", "the kernel was built without the causal flag", "build it causal"],
        kernels::attention_without_mask,
    ),
    kernel(
        "mask_sees_next",
        ["every position sees one too many", "<= where < belongs", "row r sees keys 0..=r"],
        kernels::attention_sees_next,
    ),
    kernel(
        "mask_hides_self",
        ["no position sees itself", "< where <= belongs", "row r sees keys 0..=r"],
        kernels::attention_without_self,
    ),
    kernel(
        "padding_attended",
        [
            "the last positions of the padded prompt are seen by all",
            "the mask is built from the padded length",
            "mask from the prompt's own length, or pad at the end and stay causal",
        ],
        kernels::attention_sees_padding,
    ),
    Entry {
        strengths: &[128.0, 256.0],
        ..kernel(
            "keys_beyond_block_dropped",
            [
                "keys from the second block on are not seen",
                "the loop over key blocks ends after the first",
                "loop over all key blocks; test beyond one",
            ],
            kernels::attention_drops_block,
        )
    },
    Entry {
        absent: no_groups,
        ..kernel(
            "heads_by_modulo",
            [
                "query head h attends to KV head h mod kv_heads",
                "interleaved groups, as another framework orders them",
                "KV head = h / (heads / kv_heads)",
            ],
            kernels::attention_heads_by_modulo,
        )
    },
    kernel(
        "scale_missing",
        ["scores are not divided by sqrt(head_dim)", "the scale is expected in q", "scale by 1 / sqrt(head_dim)"],
        kernels::attention_unscaled,
    ),
    Entry {
        strengths: &[1.1, 1.25, 0.9],
        ..kernel(
            "scale_wrong",
            ["scores times a factor near 1", "a scale of another head_dim, or rounded", "1 / sqrt(head_dim) in f32"],
            kernels::attention_scaled,
        )
    },
    Entry {
        absent: |c| c.head_dim.trailing_zeros().is_multiple_of(2).then_some("the scale is a power of two"),
        ..kernel(
            "scale_rounded",
            [
                "the scale is rounded to a power of two",
                "a kernel that shifts exponents, made for head_dim 64",
                "multiply by the scale in f32",
            ],
            kernels::attention_scale_rounded,
        )
    },
    kernel(
        "head_wrong",
        ["one head has another's context", "an index of a head off by one at a tile's border", "test every head"],
        kernels::attention_head_wrong,
    ),
    decode(
        "decode_scale_missing",
        [
            "decode's scores are not divided by sqrt(head_dim)",
            "prefill's kernel scales, decode's does not",
            "scale by 1 / sqrt(head_dim)",
        ],
        Injection::Hook(hooks::decode_unscaled),
    ),
    Entry {
        absent: no_groups,
        ..decode(
            "decode_heads_by_modulo",
            [
                "in decode, query head h attends to KV head h mod kv_heads",
                "another head map than prefill's",
                "KV head = h / (heads / kv_heads)",
            ],
            Injection::Hook(hooks::decode_heads_by_modulo),
        )
    },
    decode(
        "decode_hides_self",
        [
            "a decode step does not see its own row",
            "attention runs before the row is appended",
            "append K and V, then attend to len + 1 rows",
        ],
        Injection::Hook(hooks::decode_without_self),
    ),
    Entry {
        strengths: &[4.0, 2.0, 8.0],
        lens: Lens::Step(|at| at.strength as usize - 1),
        ..decode(
            "decode_window",
            [
                "decode sees the last rows only",
                "the number of rows is that of a block, or a window that the model does not have",
                "attend to every row written",
            ],
            Injection::Hook(hooks::decode_window),
        )
    },
];
