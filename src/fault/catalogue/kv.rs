//! The KV cache.

use super::{Entry, Gate, Injection, Kind, Lens, entry};
use crate::fault::hooks;

const fn kv(
    id: &'static str,
    texts: [&'static str; 3],
    catches: &'static [Gate],
    lens: Lens,
    hook: Injection,
) -> Entry {
    entry(id, Kind::Kv, texts, catches, lens, hook)
}

pub(super) static ENTRIES: &[Entry] = &[
    Entry {
        strengths: &[],
        ..kv(
            "kv_row_missing",
            [
                "the row of one decode step is never written",
                "an append skipped after the prompt's length was counted",
                "append at every step; count rows per layer",
            ],
            &[Gate::Kv, Gate::Decode, Gate::Kl],
            Lens::Step(|at| at.position),
            Injection::Hook(hooks::kv_row_missing),
        )
    },
    kv(
        "kv_row_late",
        [
            "every decode row is written one step late",
            "the append comes after attention, or a buffer is synced too late",
            "append and sync before attention",
        ],
        &[Gate::Decode, Gate::Kl, Gate::Kv],
        Lens::KvLayer,
        Injection::Hook(hooks::kv_one_late),
    ),
    kv(
        "kv_stale_row",
        [
            "one row is still the previous prompt's",
            "the cache is not cleared and one row not overwritten",
            "clear the cache when a prompt begins",
        ],
        &[Gate::Decode, Gate::Kv, Gate::Kl],
        Lens::Step(|_| 0),
        Injection::Hook(hooks::kv_stale),
    ),
    Entry {
        absent: |c| (c.num_hidden_layers < 2).then_some("one layer"),
        ..kv(
            "kv_layer_shared",
            ["two layers share one cache", "the cache is keyed without the layer", "one cache per layer"],
            &[Gate::Kv],
            Lens::KvLayer,
            Injection::Hook(hooks::kv_shared),
        )
    },
    Entry {
        strengths: &[512.0, 256.0],
        ..kv(
            "kv_wraps",
            [
                "rows beyond a ring's size overwrite the first ones",
                "the cache is smaller than the prompt and wraps",
                "a cache of max positions, or an error",
            ],
            &[Gate::Kv],
            Lens::KvLayer,
            Injection::Hook(hooks::kv_wraps),
        )
    },
    Entry {
        absent: |c| (c.num_key_value_heads < 2).then_some("one KV head"),
        ..kv(
            "kv_heads_exchanged",
            [
                "decode writes two KV heads in each other's place",
                "head-first rows appended to a position-first cache",
                "one layout for prefill and decode",
            ],
            &[Gate::Kv],
            Lens::KvLayer,
            Injection::Hook(hooks::kv_heads_exchanged),
        )
    },
    kv(
        "kv_head_missing",
        [
            "the values of one head are zero in the cache",
            "a strided copy that ends one head early",
            "copy kv_heads * head_dim elements a row",
        ],
        &[Gate::Kv],
        Lens::KvLayer,
        Injection::Hook(hooks::kv_head_missing),
    ),
    kv(
        "kv_before_rope",
        [
            "keys are kept as they were before RoPE",
            "the append reads the projection's buffer",
            "append the rotated keys",
        ],
        &[Gate::Kv],
        Lens::KvLayer,
        Injection::Hook(hooks::kv_before_rope),
    ),
];
