//! Kernels that compute something else, or with too little precision.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::launch::Tamper;
use crate::fault::{Stages, kernels};

/// A kernel that is wrong wherever it runs: phase 1 names it.
const fn kernel(
    id: &'static str,
    texts: [&'static str; 3],
    kernels: &'static [&'static str],
    named: &'static str,
    tamper: Tamper,
) -> Entry {
    let injection = Injection::Launch { kernels, sites: &[], stages: Stages::Both, tamper };
    everywhere(entry(id, Kind::Arithmetic, texts, &[Gate::Phase1], Lens::Kernel(named), injection))
}

/// A call site of one layer that is wrong.
const fn site(
    id: &'static str,
    texts: [&'static str; 3],
    kernels: &'static [&'static str],
    sites: &'static [&'static str],
    tamper: Tamper,
) -> Entry {
    let injection = Injection::Launch { kernels, sites, stages: Stages::Both, tamper };
    entry(id, Kind::Arithmetic, texts, &[Gate::Added, Gate::Noise, Gate::Kl], Lens::Layer, injection)
}

/// The head: no layer shows it, the logits do.
const fn head(id: &'static str, texts: [&'static str; 3], tamper: Tamper) -> Entry {
    let injection = Injection::Launch { kernels: &["gemv"], sites: &["lm_head"], stages: Stages::Both, tamper };
    everywhere(entry(id, Kind::Arithmetic, texts, &[Gate::Kl, Gate::Agreement], Lens::None, injection))
}

const PRODUCTS: &[&str] = &["gemm_bf16", "gemv"];

pub(super) static ENTRIES: &[Entry] = &[
    kernel(
        "gemm_sums_in_bf16",
        [
            "the GEMM adds up in bf16",
            "the accumulator was declared in the output's type",
            "accumulate in f32, round once",
        ],
        &["gemm_bf16"],
        "gemm_bf16",
        kernels::sums_in_bf16,
    ),
    site(
        "down_sums_in_bf16",
        [
            "down_proj of one layer adds up in bf16",
            "the low-precision tier of the GEMM was chosen for the longest sum",
            "use the high-precision tier for down_proj",
        ],
        &["gemm_bf16"],
        &["down_proj"],
        kernels::sums_in_bf16,
    ),
    Entry {
        strengths: &[32.0, 16.0, 64.0],
        ..kernel(
            "gemm_last_block_dropped",
            [
                "the last block of K is left out of every product",
                "a loop over K in tiles that K is no multiple of",
                "pad K or finish the last tile",
            ],
            PRODUCTS,
            "gem",
            kernels::last_block_dropped,
        )
    },
    Entry {
        strengths: &[32.0, 16.0, 64.0],
        ..site(
            "o_proj_block_dropped",
            [
                "the last block of K is left out of one layer's o_proj",
                "a tile config of another shape",
                "choose the tile config by the shape",
            ],
            PRODUCTS,
            &["o_proj"],
            kernels::last_block_dropped,
        )
    },
    head(
        "head_partition_duplicated",
        [
            "the second half of the vocabulary has the first half's logits",
            "one partition of the head was run twice, under the other's name",
            "one buffer key per partition",
        ],
        kernels::partition_duplicated,
    ),
    Entry {
        strengths: &[3.0, 2.0, 4.0],
        ..head(
            "head_low_precision",
            ["logits with few mantissa bits", "the head runs in an 8-bit type", "run the head in bf16 with f32 sums"],
            kernels::low_precision,
        )
    },
    Entry {
        strengths: &[32.0, 16.0],
        ..head(
            "head_block_dropped",
            [
                "the last block of K is left out of the head",
                "hidden_size is no multiple of the head's tile",
                "pad K or finish the last tile",
            ],
            kernels::last_block_dropped,
        )
    },
    Entry {
        strengths: &[1e-3, 1e-2],
        ..kernel(
            "norm_of_other_eps",
            [
                "RMSNorm is compiled with another eps",
                "eps is a constant in the kernel's source",
                "compile eps from the config",
            ],
            &["rms_norm"],
            "rms_norm",
            kernels::norm_of_other_eps,
        )
    },
    kernel(
        "norm_unweighted",
        ["RMSNorm without its weight", "the weight's argument is not read", "multiply by the weight"],
        &["rms_norm"],
        "rms_norm",
        kernels::norm_unweighted,
    ),
    Entry {
        absent: |c| (!c.qk_norm).then_some("no QK-norm"),
        ..site(
            "qk_norm_behind_rope",
            ["q and k are normed after RoPE", "the order of another family", "norm, then RoPE"],
            &["qk_norm", "rope"],
            &["q_norm", "k_norm", "q_rope", "k_rope"],
            kernels::norm_behind_rope,
        )
    },
    Entry {
        absent: |c| (!c.qk_norm).then_some("no QK-norm"),
        injection: Injection::Launch {
            kernels: &["qk_norm"],
            sites: &["q_norm", "k_norm"],
            stages: Stages::Decode,
            tamper: kernels::copies_input,
        },
        catches: &[Gate::Kv, Gate::Decode],
        lens: Lens::KvLayer,
        ..site(
            "qk_norm_in_prefill_only",
            [
                "decode leaves the norm of q and k out",
                "decode's plan was made for another family",
                "norm in both halves",
            ],
            &[],
            &[],
            kernels::copies_input,
        )
    },
    Entry {
        absent: |c| (!c.qkv_bias).then_some("no bias on q, k and v"),
        ..site(
            "bias_behind_rope",
            [
                "the bias of q and k is added after RoPE, as it is",
                "the bias was moved to the host without turning it",
                "add it before RoPE, or add RoPE(bias)",
            ],
            &["bias_add", "rope"],
            &["q_proj_bias", "k_proj_bias", "q_rope", "k_rope"],
            kernels::bias_behind_rope,
        )
    },
    Entry {
        absent: |c| (!c.qkv_bias).then_some("no bias on q, k and v"),
        ..kernel(
            "bias_twice",
            ["the bias is added twice", "a fused kernel adds it and a launch adds it again", "one of the two"],
            &["bias_add"],
            "bias_add",
            kernels::bias_twice,
        )
    },
    site(
        "residual_dropped",
        [
            "the residual around attention is dropped",
            "the add reads one operand",
            "add the block's input to o_proj's output",
        ],
        &["add"],
        &["attention_add"],
        kernels::residual_dropped,
    ),
    site(
        "residual_twice",
        [
            "the residual around the MLP is added twice",
            "a fused kernel adds it and a launch adds it again",
            "one of the two",
        ],
        &["add"],
        &["mlp_add"],
        kernels::residual_twice,
    ),
    site(
        "residual_from_normed",
        [
            "the residual is taken behind the norm",
            "the norm runs in place over the block's input",
            "keep the input; norm into a buffer of its own",
        ],
        &["add"],
        &["attention_add"],
        kernels::residual_from_normed,
    ),
    kernel(
        "gelu_for_silu",
        ["GELU in place of SiLU", "hidden_act is not read", "silu(gate) * up"],
        &["silu_mul"],
        "silu_mul",
        kernels::gelu_for_silu,
    ),
    kernel(
        "silu_on_up",
        ["SiLU is applied to up", "the kernel's two inputs are bound in the wrong order", "silu(gate) * up"],
        &["silu_mul"],
        "silu_mul",
        kernels::gate_and_up_exchanged,
    ),
];
