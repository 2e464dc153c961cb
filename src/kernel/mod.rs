//! Leaf kernels: what one launch computes, on which arguments, in which order. The names are the registry's.
//!
//! Description: nothing here knows a device, and only [`oracle`] computes.

pub mod dispatch;
pub mod expr;
pub mod facts;
pub mod oracle;
pub mod placement;
pub mod registry;

use std::fmt;

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    Bf16,
    F32,
}

impl Dtype {
    /// Units: bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// An epsilon that can be compared and hashed: the f32 the kernel is compiled with, by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epsilon(u32);

impl Epsilon {
    pub fn new(value: f64) -> Self {
        Epsilon((value as f32).to_bits())
    }

    pub fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl fmt::Debug for Epsilon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:e}", self.value())
    }
}

/// One leaf kernel at one shape.
///
/// Source: argument lists and arithmetic of the NPU kernels of mlir-air's `programming_examples`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// `C[m,n] = A[m,k] * W^T`, W an HF linear weight `[n,k]`. Arguments: a, w, c.
    Gemm { m: usize, k: usize, n: usize, out: Dtype },
    /// `y[m] = W[m,k] * x[k]`, W an HF linear weight. Arguments: w, x, y.
    Gemv { m: usize, k: usize },
    /// `y = x * rsqrt(mean(x^2) + eps) * w` per row. Arguments: x, w, y.
    RmsNorm { rows: usize, cols: usize, eps: Epsilon },
    /// RMSNorm over each head of each token (`rows` = tokens * heads). Arguments: x, w, y.
    QkNorm { rows: usize, head_dim: usize, eps: Epsilon },
    /// Half-split rotation, one LUT row (cos half, then sin half) per row. Arguments: x, lut, y.
    Rope { rows: usize, head_dim: usize },
    /// Causal grouped-query attention over one sequence. Arguments: q, k, v, out.
    Attention { seq: usize, heads: usize, kv_heads: usize, head_dim: usize },
    /// `y = a + b`. Arguments: a, b, y.
    Add { rows: usize, cols: usize },
    /// `y[r,c] = x[r,c] + bias[c]`. Arguments: x, bias, y.
    BiasAdd { rows: usize, cols: usize },
    /// `y = silu(gate) * up`. Arguments: gate, up, y.
    SiluMul { rows: usize, cols: usize },
}

/// What an argument is to its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ArgRole {
    Input,
    /// An HF linear weight `[out, in]`, which a device may pack as it likes.
    LinearWeight,
    Output,
}

/// One argument of a kernel.
///
/// Shapes: `rows x cols`, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arg {
    pub name: &'static str,
    pub role: ArgRole,
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
}

impl Kernel {
    /// The registry's name of the kernel.
    pub fn id(&self) -> &'static str {
        match self {
            Kernel::Gemm { out: Dtype::Bf16, .. } => "gemm_bf16",
            Kernel::Gemm { out: Dtype::F32, .. } => "gemm_f32",
            Kernel::Gemv { .. } => "gemv",
            Kernel::RmsNorm { .. } => "rms_norm",
            Kernel::QkNorm { .. } => "qk_norm",
            Kernel::Rope { .. } => "rope",
            Kernel::Attention { .. } => "attention",
            Kernel::Add { .. } => "add",
            Kernel::BiasAdd { .. } => "bias_add",
            Kernel::SiluMul { .. } => "silu_mul",
        }
    }

    /// The arguments in the order in which they are bound.
    pub fn args(&self) -> Vec<Arg> {
        use ArgRole::*;
        use Dtype::Bf16;
        let arg = |name, role, rows, cols| Arg { name, role, dtype: Bf16, rows, cols };
        match *self {
            Kernel::Gemm { m, k, n, out } => vec![
                arg("a", Input, m, k),
                arg("w", LinearWeight, n, k),
                Arg { name: "c", role: Output, dtype: out, rows: m, cols: n },
            ],
            Kernel::Gemv { m, k } => {
                vec![arg("w", LinearWeight, m, k), arg("x", Input, 1, k), arg("y", Output, 1, m)]
            }
            Kernel::RmsNorm { rows, cols, .. } => {
                vec![arg("x", Input, rows, cols), arg("w", Input, 1, cols), arg("y", Output, rows, cols)]
            }
            Kernel::QkNorm { rows, head_dim, .. } => {
                vec![arg("x", Input, rows, head_dim), arg("w", Input, 1, head_dim), arg("y", Output, rows, head_dim)]
            }
            Kernel::Rope { rows, head_dim } => {
                vec![
                    arg("x", Input, rows, head_dim),
                    arg("lut", Input, rows, head_dim),
                    arg("y", Output, rows, head_dim),
                ]
            }
            Kernel::Attention { seq, heads, kv_heads, head_dim } => vec![
                arg("q", Input, seq, heads * head_dim),
                arg("k", Input, seq, kv_heads * head_dim),
                arg("v", Input, seq, kv_heads * head_dim),
                arg("out", Output, seq, heads * head_dim),
            ],
            Kernel::Add { rows, cols } => {
                vec![arg("a", Input, rows, cols), arg("b", Input, rows, cols), arg("y", Output, rows, cols)]
            }
            Kernel::BiasAdd { rows, cols } => {
                vec![arg("x", Input, rows, cols), arg("bias", Input, 1, cols), arg("y", Output, rows, cols)]
            }
            Kernel::SiluMul { rows, cols } => {
                vec![arg("gate", Input, rows, cols), arg("up", Input, rows, cols), arg("y", Output, rows, cols)]
            }
        }
    }

    /// Units: multiply-adds counted as two operations.
    pub fn flops(&self) -> u64 {
        let n = match *self {
            Kernel::Gemm { m, k, n, .. } => 2 * m * k * n,
            Kernel::Gemv { m, k } => 2 * m * k,
            // Causal: half of the scores, twice (QK^T and PV).
            Kernel::Attention { seq, heads, head_dim, .. } => 2 * seq * (seq + 1) * heads * head_dim,
            Kernel::RmsNorm { rows, cols, .. } => 4 * rows * cols,
            Kernel::QkNorm { rows, head_dim, .. } => 4 * rows * head_dim,
            Kernel::Rope { rows, head_dim } => 3 * rows * head_dim,
            Kernel::Add { rows, cols } | Kernel::BiasAdd { rows, cols } => rows * cols,
            Kernel::SiluMul { rows, cols } => 5 * rows * cols,
        };
        n as u64
    }
}

impl fmt::Display for Kernel {
    /// `id::shape` in the form of test names: zero-padded and `[a-z0-9_:]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.id();
        match *self {
            Kernel::Gemm { m, k, n, .. } => write!(f, "{id}::m{m:04}_k{k:04}_n{n:04}"),
            Kernel::Gemv { m, k } => write!(f, "{id}::m{m:05}_k{k:04}"),
            Kernel::RmsNorm { rows, cols, .. }
            | Kernel::Add { rows, cols }
            | Kernel::BiasAdd { rows, cols }
            | Kernel::SiluMul { rows, cols } => write!(f, "{id}::r{rows:04}_c{cols:04}"),
            Kernel::QkNorm { rows, head_dim, .. } | Kernel::Rope { rows, head_dim } => {
                write!(f, "{id}::r{rows:05}_d{head_dim:03}")
            }
            Kernel::Attention { seq, heads, kv_heads, head_dim } => {
                write!(f, "{id}::s{seq:04}_h{heads:02}_kv{kv_heads:02}_d{head_dim:03}")
            }
        }
    }
}

/// Attention's scale, `1 / sqrt(head_dim)`, as HF computes it (f64) and hands it to a kernel (f32).
pub fn attention_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(Kernel::Gemm { m: 128, k: 576, n: 1536, out: Dtype::Bf16 }, "gemm_bf16::m0128_k0576_n1536")]
    #[case(Kernel::Rope { rows: 9, head_dim: 64 }, "rope::r00009_d064")]
    fn names_are_test_names(#[case] kernel: Kernel, #[case] name: &str) {
        assert_eq!(kernel.to_string(), name);
    }

    #[test]
    fn every_kernel_has_exactly_one_output_and_it_is_last() {
        let eps = Epsilon::new(1e-5);
        for kernel in [
            Kernel::Gemm { m: 2, k: 3, n: 4, out: Dtype::F32 },
            Kernel::Gemv { m: 2, k: 3 },
            Kernel::RmsNorm { rows: 2, cols: 3, eps },
            Kernel::QkNorm { rows: 2, head_dim: 4, eps },
            Kernel::Rope { rows: 2, head_dim: 4 },
            Kernel::Attention { seq: 3, heads: 4, kv_heads: 2, head_dim: 8 },
            Kernel::Add { rows: 1, cols: 2 },
            Kernel::BiasAdd { rows: 1, cols: 2 },
            Kernel::SiluMul { rows: 1, cols: 2 },
        ] {
            let args = kernel.args();
            let outputs = args.iter().filter(|a| a.role == ArgRole::Output).count();
            assert_eq!((outputs, args.last().unwrap().role), (1, ArgRole::Output), "{kernel}");
        }
    }
}
