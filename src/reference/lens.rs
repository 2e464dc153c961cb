//! HF's inner tensors for a lens prompt, at sampled positions. bf16 values are widened to f32 exactly.

use ndarray::{Array2, Array3};

use super::tensors::Tensors;
use crate::error::Result;

/// Taps of layer 0, in order of computation.
pub const TAPS: [&str; 11] = [
    "input_layernorm",
    "q",
    "k",
    "v",
    "attn_context",
    "o_proj",
    "post_attention_layernorm",
    "gate",
    "up",
    "silu_mul",
    "down",
];

/// One tap of layer 0: q, k, v after bias, QK-norm and RoPE; `attn_context` is o_proj's input, `silu_mul` down_proj's.
///
/// Shapes: `[t, width]` both.
#[derive(Debug, Clone, PartialEq)]
pub struct Tap {
    pub name: &'static str,
    pub bf16: Array2<f32>,
    pub f32: Array2<f32>,
}

/// Everything captured for one lens prompt.
///
/// Shapes: `layers_*` `[L, n, hidden_size]`, the raw output of each block; `final_norm_*` `[n, hidden_size]`; `k_*`, `v_*`
/// `[L, m, kv_heads * head_dim]`, K after norm and RoPE; n, t, m the lengths of the three lists of positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Lens {
    pub positions: Vec<u32>,
    pub layers_bf16: Array3<f32>,
    pub layers_f32: Array3<f32>,
    pub final_norm_bf16: Array2<f32>,
    pub final_norm_f32: Array2<f32>,
    pub tap_positions: Vec<u32>,
    pub taps: Vec<Tap>,
    /// Positions at or beyond the prompt's length were written by decode steps (bf16 side).
    pub kv_positions: Vec<u32>,
    pub k_bf16: Array3<f32>,
    pub k_f32: Array3<f32>,
    pub v_bf16: Array3<f32>,
    pub v_f32: Array3<f32>,
}

impl Lens {
    pub(super) fn read(tensors: &Tensors, id: &str) -> Result<Lens> {
        let name = |what: &str| format!("{id}.{what}");
        let tap = |tap: &'static str| {
            let bf16 = tensors.matrix(&name(&format!("bf16.tap.{tap}")))?;
            Ok(Tap { name: tap, bf16, f32: tensors.matrix(&name(&format!("f32.tap.{tap}")))? })
        };
        Ok(Lens {
            positions: tensors.ids(&name("positions"))?,
            layers_bf16: tensors.cube(&name("bf16.layers"))?,
            layers_f32: tensors.cube(&name("f32.layers"))?,
            final_norm_bf16: tensors.matrix(&name("bf16.final_norm"))?,
            final_norm_f32: tensors.matrix(&name("f32.final_norm"))?,
            tap_positions: tensors.ids(&name("tap_positions"))?,
            taps: TAPS.into_iter().map(tap).collect::<Result<_>>()?,
            kv_positions: tensors.ids(&name("kv_positions"))?,
            k_bf16: tensors.cube(&name("bf16.k"))?,
            k_f32: tensors.cube(&name("f32.k"))?,
            v_bf16: tensors.cube(&name("bf16.v"))?,
            v_f32: tensors.cube(&name("f32.v"))?,
        })
    }

    /// The tap of that name.
    pub fn tap(&self, name: &str) -> Option<&Tap> {
        self.taps.iter().find(|tap| tap.name == name)
    }
}
