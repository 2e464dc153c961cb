//! The host's share of a run: decode attention and the final norm by design, any kernel as CPU fallback.

use std::sync::Arc;

use half::bf16;

use crate::compute::{Call, Isa, PackedCache, PackedWeight, Pool};
use crate::error::{Error, Result};
use crate::kernel::{Dtype, Kernel, attention_scale};
use crate::model::{ModelConfig, Weights};

/// Kernels on the CPU for one model.
pub(super) struct HostKernels {
    pool: Arc<Pool>,
    isa: Isa,
    head_dim: usize,
    norm: Vec<bf16>,
    eps: f32,
}

impl HostKernels {
    pub(super) fn new(config: &ModelConfig, weights: &dyn Weights, pool: Arc<Pool>, isa: Isa) -> Result<HostKernels> {
        Ok(HostKernels {
            pool,
            isa,
            head_dim: config.head_dim,
            norm: weights.bf16("model.norm.weight")?.into_owned(),
            eps: config.rms_norm_eps as f32,
        })
    }

    pub(super) fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.pool)
    }

    fn call(&self) -> Call<'_> {
        Call { pool: &self.pool, isa: self.isa }
    }

    /// Shapes: `[hidden_size] -> [hidden_size]`.
    pub(super) fn final_norm(&self, x: &[bf16]) -> Vec<bf16> {
        let mut y = vec![bf16::NAN; x.len()];
        self.call().rms_norm(x, &self.norm, self.eps, &mut y);
        y
    }

    /// One query row over the cached rows.
    ///
    /// Shapes: `q`, result `[heads * head_dim]`.
    pub(super) fn decode_attention(&self, q: &[bf16], cache: &PackedCache) -> Vec<bf16> {
        let mut out = vec![bf16::NAN; q.len()];
        self.call().decode_attention(q, cache, q.len() / self.head_dim, attention_scale(self.head_dim), &mut out);
        out
    }

    /// One leaf kernel on copies of its inputs (in the kernel's order, output left out).
    ///
    /// Errors: [`Error::Plan`] for an f32 output, which no model's plan has.
    pub(super) fn launch(&self, kernel: &Kernel, inputs: &[Vec<bf16>]) -> Result<Vec<bf16>> {
        let call = self.call();
        let out = kernel.args().pop().expect("every kernel has an output");
        let mut y = vec![bf16::NAN; out.rows * out.cols];
        match *kernel {
            Kernel::Gemm { out: Dtype::F32, .. } => {
                return Err(Error::Plan { why: format!("{kernel} cannot run on the host") });
            }
            Kernel::Gemm { k, n, .. } | Kernel::GemmLow { k, n, .. } => {
                call.gemm(&inputs[0], &PackedWeight::pack(&self.pool, &inputs[1], n, k), &mut y);
            }
            Kernel::Gemv { m, k } => {
                call.gemv(&inputs[1], &PackedWeight::pack(&self.pool, &inputs[0], m, k), &mut y);
            }
            Kernel::GemvAdd { m, k } => {
                call.gemv_add(&inputs[1], &PackedWeight::pack(&self.pool, &inputs[0], m, k), &inputs[2], &mut y);
            }
            Kernel::SwigluRms { m, k, eps } => {
                let weight = PackedWeight::pack(&self.pool, &inputs[1], 2 * m, k);
                call.swiglu_rms(&inputs[0], &weight, eps.value(), &mut y);
            }
            Kernel::LayerNorm { eps, .. } => call.layer_norm(&inputs[0], &inputs[1], eps.value(), &mut y),
            Kernel::RmsNorm { eps, .. } | Kernel::QkNorm { eps, .. } => {
                call.rms_norm(&inputs[0], &inputs[1], eps.value(), &mut y);
            }
            Kernel::Rope { head_dim, .. } => call.rope(&inputs[0], &inputs[1], head_dim, &mut y),
            Kernel::Attention { heads, kv_heads, head_dim, causal, .. } => {
                let scale = attention_scale(head_dim);
                call.attention(&inputs[0], &inputs[1], &inputs[2], (heads, kv_heads, head_dim), scale, causal, &mut y);
            }
            Kernel::Add { .. } => call.add(&inputs[0], &inputs[1], &mut y),
            Kernel::BiasAdd { .. } => call.bias_add(&inputs[0], &inputs[1], &mut y),
            Kernel::SiluMul { .. } => call.silu_mul(&inputs[0], &inputs[1], &mut y),
            Kernel::GeluTanh { .. } => call.gelu_tanh(&inputs[0], &mut y),
        }
        Ok(y)
    }
}
