//! Rotary position embedding: its parameters, its frequencies, and the cos/sin rows that HF computes.
//!
//! Source: transformers 5.24.0 `modeling_rope_utils.py` and `LlamaRotaryEmbedding`; frequencies and angles are f32,
//! with torch's own `pow` (see `sleef`), because HF keeps them so however the model is loaded.

use half::bf16;
use ndarray::Array2;
use serde::Serialize;

use super::sleef::powf;
use crate::tensor::{Bf16Matrix, F32Matrix};

/// Elements per turn of torch's vector loop with AVX-512 (two vectors of 16). What is left over after the last whole
/// turn goes to the C library's `powf`, which rounds correctly but for one case in a thousand million; a machine
/// without AVX-512 has shorter turns and may differ there by one ULP.
const TORCH_BLOCK: usize = 32;

/// How frequencies are scaled, HF's `rope_type`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "snake_case")]
pub enum RopeKind {
    Default,
    Linear {
        factor: f64,
    },
    /// NTK scaling: the base grows once the sequence is longer than `max_position_embeddings`.
    Dynamic {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
}

impl RopeKind {
    /// HF's `rope_type`.
    pub fn name(self) -> &'static str {
        match self {
            RopeKind::Default => "default",
            RopeKind::Linear { .. } => "linear",
            RopeKind::Dynamic { .. } => "dynamic",
            RopeKind::Llama3 { .. } => "llama3",
        }
    }
}

/// HF's `rope_parameters`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RopeParameters {
    pub rope_theta: f64,
    #[serde(flatten)]
    pub kind: RopeKind,
}

/// The rows of cos and sin for one model.
#[derive(Clone, Debug)]
pub struct RopeTable {
    parameters: RopeParameters,
    head_dim: usize,
    max_position_embeddings: usize,
    /// f32 `[head_dim / 2]`, for sequences up to `max_position_embeddings`.
    inv_freq: Vec<f32>,
}

impl RopeTable {
    pub fn new(config: &super::ModelConfig) -> RopeTable {
        Self::from_parts(config.rope, config.head_dim, config.max_position_embeddings)
    }

    /// From the three values that determine it; `head_dim` is even.
    pub fn from_parts(parameters: RopeParameters, head_dim: usize, max_position_embeddings: usize) -> RopeTable {
        let mut table = RopeTable { parameters, head_dim, max_position_embeddings, inv_freq: Vec::new() };
        table.inv_freq = table.inv_freq(max_position_embeddings);
        table
    }

    /// The same model with its scaling taken away: what a config whose `rope_type` is parsed and never applied gives.
    pub fn unscaled(&self) -> RopeTable {
        let parameters = RopeParameters { kind: RopeKind::Default, ..self.parameters };
        Self::from_parts(parameters, self.head_dim, self.max_position_embeddings)
    }

    pub fn parameters(&self) -> RopeParameters {
        self.parameters
    }

    /// Inverse frequencies for a forward pass whose largest position is `seq_len - 1`.
    ///
    /// Shapes: `[head_dim / 2]`.
    pub fn inv_freq(&self, seq_len: usize) -> Vec<f32> {
        let base = self.parameters.rope_theta;
        match self.parameters.kind {
            RopeKind::Default => self.unscaled_inv_freq(base as f32),
            RopeKind::Linear { factor } => {
                let factor = factor as f32;
                self.unscaled_inv_freq(base as f32).into_iter().map(|f| f / factor).collect()
            }
            RopeKind::Dynamic { factor } => self.unscaled_inv_freq(self.dynamic_base(base, factor, seq_len)),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let scale = Llama3 {
                    factor: factor as f32,
                    low: low_freq_factor,
                    high: high_freq_factor,
                    old: original_max_position_embeddings as f64,
                };
                self.unscaled_inv_freq(base as f32).into_iter().map(|f| scale.apply(f)).collect()
            }
        }
    }

    /// `1 / base^(2i/head_dim)`; the quotient, the power and the reciprocal are each rounded to f32.
    fn unscaled_inv_freq(&self, base: f32) -> Vec<f32> {
        let dim = self.head_dim as f32;
        let whole = self.head_dim / 2 / TORCH_BLOCK * TORCH_BLOCK;
        let pow = |i: usize, exponent: f32| match i < whole {
            true => powf(base, exponent),
            false => f64::from(base).powf(f64::from(exponent)) as f32,
        };
        (0..self.head_dim / 2).map(|i| 1.0 / pow(i, (2 * i) as f32 / dim)).collect()
    }

    /// `base * (factor * n / max - (factor - 1))^(dim / (dim - 2))` with n the longer of sequence and maximum: f64
    /// where HF has Python floats (up to the maximum), f32 where it has a tensor (beyond).
    fn dynamic_base(&self, base: f64, factor: f64, seq_len: usize) -> f32 {
        let (max, dim) = (self.max_position_embeddings as f64, self.head_dim as f64);
        let exponent = dim / (dim - 2.0);
        if seq_len <= self.max_position_embeddings {
            return (base * (factor * max / max - (factor - 1.0)).powf(exponent)) as f32;
        }
        let n = seq_len as f32;
        let stretch = n * factor as f32 / max as f32 - (factor - 1.0) as f32;
        powf(stretch, exponent as f32) * base as f32
    }

    /// cos and sin rows before any rounding; `seq_len` is the largest position of the forward pass plus one and only
    /// matters to `dynamic`.
    ///
    /// Shapes: `[n], -> [n, head_dim / 2]` twice (HF repeats the half to full width).
    pub fn rows(&self, positions: &[usize], seq_len: usize) -> (F32Matrix, F32Matrix) {
        let longer = seq_len > self.max_position_embeddings && matches!(self.parameters.kind, RopeKind::Dynamic { .. });
        let own = longer.then(|| self.inv_freq(seq_len));
        let inv_freq = own.as_deref().unwrap_or(&self.inv_freq);
        let angle = |(row, col): (usize, usize)| f64::from(positions[row] as f32 * inv_freq[col]);
        let shape = (positions.len(), self.head_dim / 2);
        (
            Array2::from_shape_fn(shape, |i| angle(i).cos() as f32),
            Array2::from_shape_fn(shape, |i| angle(i).sin() as f32),
        )
    }

    /// [`RopeTable::rows`] rounded to bf16, as HF hands them to attention.
    ///
    /// Shapes: `[n], -> [n, head_dim / 2]` twice.
    pub fn bf16_rows(&self, positions: &[usize], seq_len: usize) -> (Bf16Matrix, Bf16Matrix) {
        let (cos, sin) = self.rows(positions, seq_len);
        (cos.mapv(bf16::from_f32), sin.mapv(bf16::from_f32))
    }
}

/// Llama 3.1's scaling of one frequency, in torch's order of operations (`a / tensor` is `reciprocal * a` there).
struct Llama3 {
    factor: f32,
    low: f64,
    high: f64,
    old: f64,
}

impl Llama3 {
    fn apply(&self, f: f32) -> f32 {
        let wavelen = (1.0 / f) * (2.0 * std::f64::consts::PI) as f32;
        let (low_wavelen, high_wavelen) = ((self.old / self.low) as f32, (self.old / self.high) as f32);
        let scaled = if wavelen > low_wavelen { f / self.factor } else { f };
        if wavelen < high_wavelen || wavelen > low_wavelen {
            return scaled;
        }
        let smooth = ((1.0 / wavelen) * self.old as f32 - self.low as f32) / (self.high - self.low) as f32;
        (1.0 - smooth) * scaled / self.factor + smooth * scaled
    }
}
