//! Which kernels at which shapes: what the plans launch, the registry's small shapes, and odd ones.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::kernel::{Dtype, Epsilon, Kernel};
use crate::kernel::{facts, registry};
use crate::phase::Outline;
use crate::phase::needs::needs;
use crate::plan::PlanOptions;

/// Positions of the prefill whose launches are cases.
const PREFILL: usize = 64;

/// Multiply-adds, and elements of all arguments, of a measured shape that is swept: phase 1 is to be run often.
const SMALL: (u64, usize) = (48 << 20, 8 << 20);

/// Of the registry's norms, and of Qwen's.
const EPS: [f64; 2] = [1e-5, 1e-6];

/// Heads and KV heads: SmolLM2-like, Qwen2-0.5B, Qwen2-7B, and no sharing.
const HEAD_MAPS: [(usize, usize); 4] = [(6, 2), (14, 2), (28, 4), (8, 8)];

/// One, two, around a tile, around a KV block, and beyond two.
const LENGTHS: [usize; 9] = [1, 2, 15, 16, 17, 127, 128, 129, 257];

/// Every kernel once by name: needs first.
///
/// Errors: from the plans and the registry.
pub(super) fn all(outlines: &[Outline]) -> Result<Vec<Kernel>> {
    let mut kernels = vec![];
    for outline in outlines {
        let found = needs(&outline.config, PREFILL, &PlanOptions::default())?;
        kernels.extend(found.into_iter().map(|need| need.kernel));
    }
    kernels.extend(measured()?);
    kernels.extend(odd());
    let mut names = BTreeSet::new();
    kernels.retain(|kernel| names.insert(kernel.to_string()));
    Ok(kernels)
}

/// The small ones of the shapes that the registry has measured.
fn measured() -> Result<Vec<Kernel>> {
    let mut kernels = vec![];
    for facts in facts::all()? {
        for row in &facts.measured {
            kernels.extend(registry::kernel_of(facts, &row.shape, row.tier).filter(is_small));
        }
    }
    Ok(kernels)
}

fn is_small(kernel: &Kernel) -> bool {
    let elements: usize = kernel.args().iter().map(|arg| arg.rows * arg.cols).sum();
    kernel.flops() / 2 <= SMALL.0 && elements <= SMALL.1
}

/// Shapes that no tile divides, and the borders of blocks.
fn odd() -> Vec<Kernel> {
    let mut kernels = products();
    kernels.extend(norms());
    for head_dim in [32, 64, 128, 256] {
        kernels.extend([1, 7, 32, 129].map(|rows| Kernel::Rope { rows, head_dim }));
        let attention = |seq| Kernel::Attention { seq, heads: 6, kv_heads: 2, head_dim, causal: true };
        kernels.extend([2, 17, 129].map(attention));
    }
    for (heads, kv_heads) in HEAD_MAPS {
        for causal in [true, false] {
            kernels.extend(LENGTHS.map(|seq| Kernel::Attention { seq, heads, kv_heads, head_dim: 64, causal }));
        }
    }
    for cols in [16, 33, 576, 1000] {
        for rows in [3, 17, 65] {
            kernels.push(Kernel::Add { rows, cols });
            kernels.push(Kernel::BiasAdd { rows, cols });
            kernels.push(Kernel::SiluMul { rows, cols });
            kernels.push(Kernel::GeluTanh { rows, cols });
        }
    }
    kernels
}

fn products() -> Vec<Kernel> {
    let mut kernels = vec![];
    for m in [3, 17, 63, 65, 129] {
        for (k, n) in [(8, 16), (33, 65), (100, 50), (257, 31), (512, 96), (1023, 129)] {
            kernels.push(Kernel::Gemm { m, k, n, out: Dtype::Bf16 });
        }
        for (k, n) in [(33, 65), (512, 96), (1023, 129)] {
            kernels.push(Kernel::Gemm { m, k, n, out: Dtype::F32 });
            kernels.push(Kernel::GemmLow { m, k, n });
        }
    }
    // Beyond what is compared as a whole.
    kernels.push(Kernel::Gemm { m: 512, k: 512, n: 512, out: Dtype::F32 });
    kernels.push(Kernel::GemmLow { m: 512, k: 512, n: 512 });
    for m in [17, 31, 65, 257] {
        kernels.extend([8, 33, 100, 576, 1025].map(|k| Kernel::Gemv { m, k }));
    }
    for m in [17, 64, 257] {
        // 2048 and 8192 are decode's; 512 is the piece after which a sum is rounded.
        kernels.extend([33, 512, 513, 1025, 2048, 8192].map(|k| Kernel::GemvAdd { m, k }));
        kernels.extend([33, 64, 576, 2048].map(|k| Kernel::SwigluRms { m, k, eps: Epsilon::new(EPS[0]) }));
    }
    kernels
}

fn norms() -> Vec<Kernel> {
    let mut kernels = vec![];
    for eps in EPS.map(Epsilon::new) {
        for cols in [33, 64, 100, 576, 896, 2048] {
            kernels.extend([1, 2, 3, 17, 65].map(|rows| Kernel::RmsNorm { rows, cols, eps }));
        }
        for head_dim in [32, 64, 128, 256] {
            kernels.extend([2, 9, 64, 130].map(|rows| Kernel::QkNorm { rows, head_dim, eps }));
        }
    }
    let eps = Epsilon::new(EPS[0]);
    for cols in [33, 100, 768, 1000] {
        kernels.extend([1, 3, 17, 65].map(|rows| Kernel::LayerNorm { rows, cols, eps }));
    }
    kernels
}
