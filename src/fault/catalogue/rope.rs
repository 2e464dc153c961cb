//! Rotary position embedding.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::{Stages, hooks, kernels};

const fn table(
    id: &'static str,
    texts: [&'static str; 3],
    catches: &'static [Gate],
    lens: Lens,
    hook: Injection,
) -> Entry {
    everywhere(entry(id, Kind::Rope, texts, catches, lens, hook))
}

pub(super) static ENTRIES: &[Entry] = &[
    everywhere(entry(
        "rope_interleaved",
        Kind::Rope,
        [
            "neighbouring elements are turned as a pair in place of the two halves",
            "a kernel or table in the interleaved convention (GPT-J, llama.cpp's weights)",
            "use the half-split rotation, or permute the rows of q_proj and k_proj",
        ],
        &[Gate::Phase1],
        Lens::Kernel("rope"),
        Injection::Launch { kernels: &["rope"], sites: &[], stages: Stages::Both, tamper: kernels::rope_interleaved },
    )),
    everywhere(entry(
        "rope_backwards",
        Kind::Rope,
        ["turned the other way", "the sign of sin", "y = x cos + rotate_half(x) sin"],
        &[Gate::Phase1],
        Lens::Kernel("rope"),
        Injection::Launch { kernels: &["rope"], sites: &[], stages: Stages::Both, tamper: kernels::rope_backwards },
    )),
    entry(
        "rope_missing_on_k",
        Kind::Rope,
        ["k is not turned", "the launch on k was left out of the plan", "launch rope on q and on k"],
        &[Gate::Added, Gate::Kv],
        Lens::Layer,
        Injection::Launch {
            kernels: &["rope"],
            sites: &["k_rope"],
            stages: Stages::Both,
            tamper: kernels::copies_input,
        },
    ),
    Entry {
        strengths: &[1.0, 2.0],
        ..table(
            "rope_late_in_prefill",
            [
                "prefill's positions are too large by one: no prefill shows it, decode does",
                "a BOS counted that is not there",
                "position 0 is the first token's",
            ],
            &[Gate::Kv, Gate::Decode],
            Lens::KvLayer,
            Injection::Hook(hooks::rope_late_prefill),
        )
    },
    Entry {
        strengths: &[1.0, 2.0],
        ..table(
            "rope_late_in_decode",
            [
                "decode's positions are too large by one",
                "the position is counted before and not after the step",
                "the position of a decode step is the number of rows before it",
            ],
            &[Gate::Kv, Gate::Decode],
            Lens::KvLayer,
            Injection::Hook(hooks::rope_late_decode),
        )
    },
    table(
        "rope_stuck_in_decode",
        [
            "every decode step turns by the first one's position",
            "the row of the table is an input marked static",
            "write the row before every decode step",
        ],
        &[Gate::Kv, Gate::Decode],
        Lens::KvLayer,
        Injection::Hook(hooks::rope_stuck),
    ),
    table(
        "rope_bf16_angles",
        [
            "angles computed in bf16: right up to position 256, coarse beyond",
            "the table or the positions were cast before the product",
            "compute angles in f32, round cos and sin",
        ],
        &[Gate::Kl, Gate::Noise, Gate::Kv],
        Lens::Position(|_| 257),
        Injection::Hook(hooks::rope_bf16_angles),
    ),
];
