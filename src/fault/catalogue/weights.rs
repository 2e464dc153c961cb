//! A loader that puts the wrong numbers in the right places.

use half::bf16;

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::weights::{
    Changes, change, change_named, copy_layer, exchange, layer, noise_like, transpose, truncate,
};

/// Gates that see one layer's weights wrong.
const LAYER: &[Gate] = &[Gate::Added, Gate::Noise, Gate::Kl, Gate::Kv];

const fn weights(id: &'static str, texts: [&'static str; 3], injection: Injection) -> Entry {
    entry(id, Kind::Weights, texts, LAYER, Lens::Layer, injection)
}

pub(super) static ENTRIES: &[Entry] = &[
    weights(
        "layers_shifted",
        [
            "from one layer on, every layer has the next one's weights",
            "an index that starts at 1, or one block skipped while loading",
            "key weights by the layer's own index",
        ],
        Injection::Weights(|w, c, at| {
            let mut changes = Changes::new();
            for to in layer(at)..c.num_hidden_layers - 1 {
                changes.extend(copy_layer(w, c, to + 1, to, "")?);
            }
            // The last one has none after it: it takes the first one's.
            if layer(at) + 1 == c.num_hidden_layers {
                changes.extend(copy_layer(w, c, 0, layer(at), "")?);
            }
            Ok(changes)
        }),
    ),
    weights(
        "layers_swapped",
        [
            "two neighbouring layers in each other's place",
            "files or keys sorted as text (layer 10 before layer 2)",
            "sort layers by number",
        ],
        Injection::Weights(|w, c, at| {
            let (one, other) =
                (layer(at), if layer(at) + 1 < c.num_hidden_layers { layer(at) + 1 } else { layer(at) - 1 });
            let mut changes = copy_layer(w, c, one, other, "")?;
            changes.extend(copy_layer(w, c, other, one, "")?);
            Ok(changes)
        }),
    ),
    weights(
        "attention_key_collides",
        [
            "a layer runs with the attention weights of the layer before",
            "one buffer key for two layers: the static weights were written once, for the first of them",
            "put the layer into the buffer key",
        ],
        Injection::Weights(|w, c, at| {
            copy_layer(w, c, (layer(at) + c.num_hidden_layers - 1) % c.num_hidden_layers, layer(at), "self_attn.")
        }),
    ),
    weights(
        "mlp_key_collides",
        [
            "a layer runs with the MLP weights of the layer before",
            "one buffer key for two layers: the static weights were written once, for the first of them",
            "put the layer into the buffer key",
        ],
        Injection::Weights(|w, c, at| {
            copy_layer(w, c, (layer(at) + c.num_hidden_layers - 1) % c.num_hidden_layers, layer(at), "mlp.")
        }),
    ),
    weights(
        "q_and_k_exchanged",
        [
            "q_proj and k_proj in each other's place, as far as their sizes go",
            "a name map with two lines exchanged",
            "compare the name map with the checkpoint's index",
        ],
        Injection::Weights(|w, _, at| exchange(w, at, "self_attn.q_proj.weight", "self_attn.k_proj.weight")),
    ),
    weights(
        "k_and_v_exchanged",
        [
            "k_proj and v_proj in each other's place",
            "a fused QKV cut in the wrong order",
            "cut q, k, v in the order in which they were joined",
        ],
        Injection::Weights(|w, _, at| exchange(w, at, "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ),
    weights(
        "gate_and_up_exchanged",
        [
            "gate_proj and up_proj in each other's place",
            "a fused gate_up cut in the wrong order",
            "gate is the operand of SiLU",
        ],
        Injection::Weights(|w, _, at| exchange(w, at, "mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ),
    weights(
        "norms_exchanged",
        [
            "input_layernorm and post_attention_layernorm in each other's place",
            "the order of the norms is taken from another family",
            "input_layernorm stands before attention",
        ],
        Injection::Weights(|w, _, at| exchange(w, at, "input_layernorm.weight", "post_attention_layernorm.weight")),
    ),
    weights(
        "matrix_transposed",
        [
            "o_proj is read as its transpose",
            "the file's [out, in] was taken for [in, out]",
            "HF stores linear weights as [out, in]",
        ],
        Injection::Weights(|w, c, at| change(w, at, "self_attn.o_proj.weight", |x| transpose(x, c.q_dim()))),
    ),
    weights(
        "mlp_of_another_checkpoint",
        [
            "the MLP of one layer comes from another training",
            "one shard of another revision among the right ones",
            "download all shards of one revision; compare their hashes",
        ],
        Injection::Weights(|w, _, at| {
            let mut changes = Changes::new();
            for (i, part) in ["gate_proj", "up_proj", "down_proj"].iter().enumerate() {
                changes.extend(change(w, at, &format!("mlp.{part}.weight"), |x| noise_like(x, at.seed + i as u64))?);
            }
            Ok(changes)
        }),
    ),
    weights(
        "tensor_zero",
        [
            "down_proj of one layer is zero",
            "a tensor was never read into its buffer",
            "load every tensor the config implies",
        ],
        Injection::Weights(|w, _, at| change(w, at, "mlp.down_proj.weight", |x| x.fill(bf16::ZERO))),
    ),
    weights(
        "rows_zero",
        [
            "the first head's rows of q_proj are zero",
            "the last tile of a strided copy was not written",
            "copy all rows; check the shape after padding",
        ],
        Injection::Weights(|w, c, at| {
            change(w, at, "self_attn.q_proj.weight", |x| x[..c.head_dim * c.hidden_size].fill(bf16::ZERO))
        }),
    ),
    weights(
        "row_flipped",
        ["one row of v_proj has its sign turned", "a damaged download or memory", "compare the tensor's hash"],
        Injection::Weights(|w, c, at| {
            change(w, at, "self_attn.v_proj.weight", |x| {
                let row = at.seed as usize % (x.len() / c.hidden_size);
                x[row * c.hidden_size..][..c.hidden_size].iter_mut().for_each(|x| *x = -*x);
            })
        }),
    ),
    Entry {
        strengths: &[3.0, 2.0, 0.5, 1.25],
        ..weights(
            "tensor_scaled",
            [
                "v_proj times a factor, which no cosine of one layer's input shows",
                "a quantisation scale applied twice or not at all",
                "dequantise once; compare norms of the tensors",
            ],
            Injection::Weights(|w, _, at| {
                change(w, at, "self_attn.v_proj.weight", |x| {
                    x.iter_mut().for_each(|x| *x = bf16::from_f64(x.to_f64() * at.strength));
                })
            }),
        )
    },
    Entry {
        strengths: &[3.0, 4.0, 2.0],
        ..weights(
            "tensor_truncated",
            [
                "gate_proj has fewer mantissa bits than bf16",
                "weights went through an 8-bit float",
                "keep bf16 from the file to the device",
            ],
            Injection::Weights(|w, _, at| change(w, at, "mlp.gate_proj.weight", |x| truncate(x, at.strength as u32))),
        )
    },
    weights(
        "norm_weight_ones",
        [
            "a norm without its weight",
            "the norm's weight was not found and ones stand in for it",
            "load input_layernorm.weight",
        ],
        Injection::Weights(|w, _, at| change(w, at, "input_layernorm.weight", |x| x.fill(bf16::ONE))),
    ),
    everywhere(entry(
        "final_norm_ones",
        Kind::Weights,
        [
            "the final norm without its weight",
            "model.norm.weight was not found and ones stand in for it",
            "load model.norm.weight",
        ],
        &[Gate::Noise, Gate::Kl],
        Lens::None,
        Injection::Weights(|w, _, _| change_named(w, "model.norm.weight".into(), |x| x.fill(bf16::ONE))),
    )),
    everywhere(entry(
        "embedding_shifted",
        Kind::Weights,
        [
            "every token has the embedding of the id before it",
            "ids that start at 1",
            "index the embedding by the id itself",
        ],
        &[Gate::Block, Gate::Noise],
        Lens::Layer,
        Injection::Weights(|w, c, _| {
            change_named(w, "model.embed_tokens.weight".into(), |x| x.rotate_right(c.hidden_size))
        }),
    )),
    weights(
        "nan_in_weight",
        ["one element of a weight is NaN", "a damaged file", "compare the tensor's hash; load again"],
        Injection::Weights(|w, _, at| change(w, at, "self_attn.k_proj.weight", |x| x[0] = bf16::NAN)),
    ),
];
