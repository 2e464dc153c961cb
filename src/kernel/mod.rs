//! Leaf kernels: what one launch computes, on which arguments, in which order. The names are the registry's.
//!
//! Description: nothing here knows a device, and only [`oracle`] computes.

pub mod cache;
pub mod contract;
pub mod dispatch;
pub mod expr;
pub mod facts;
pub mod oracle;
pub mod placement;
pub mod registry;
mod work;

pub use work::{Rows, Work};

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Element type of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
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

impl fmt::Display for Epsilon {
    /// `eps1em5` for 1e-5: as test names may have it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("eps{:e}", self.value());
        f.write_str(&text.replace('-', "m").replace('.', "p"))
    }
}

/// One leaf kernel at one shape.
///
/// Source: argument lists and arithmetic of the NPU kernels of mlir-air's `programming_examples`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Kernel {
    /// `C[m,n] = A[m,k] * W^T`, W an HF linear weight `[n,k]`. Arguments: a, w, c.
    Gemm { m: usize, k: usize, n: usize, out: Dtype },
    /// The low tier of the GEMM to bf16: the same product in a bf16 accumulator. Arguments: a, w, c.
    GemmLow { m: usize, k: usize, n: usize },
    /// `y[m] = W[m,k] * x[k]`, W an HF linear weight. Arguments: w, x, y.
    Gemv { m: usize, k: usize },
    /// `y[m] = W[m,k] * x[k] + r[m]`, decode's projection and residual. Arguments: w, x, r, y.
    GemvAdd { m: usize, k: usize },
    /// `out[m] = silu(Wg h) * (Wu h)`, `h = rms_norm(r; w)`, decode's norm, gate, up and SwiGLU. Arguments: packed (row 0
    /// r, row 1 w), w (row 2i gate row i, row 2i + 1 up row i), out.
    SwigluRms { m: usize, k: usize, eps: Epsilon },
    /// `y = x * rsqrt(mean(x^2) + eps) * w` per row. Arguments: x, w, y.
    RmsNorm { rows: usize, cols: usize, eps: Epsilon },
    /// RMSNorm over each head of each token (`rows` = tokens * heads). Arguments: x, w, y.
    QkNorm { rows: usize, head_dim: usize, eps: Epsilon },
    /// `y = (x - mean(x)) * rsqrt(var(x) + eps) * w + b` per row. Arguments: x, params (row 0 w, row 1 b), y.
    LayerNorm { rows: usize, cols: usize, eps: Epsilon },
    /// Half-split rotation, one LUT row (cos half, then sin half) per row. Arguments: x, lut, y.
    Rope { rows: usize, head_dim: usize },
    /// Grouped-query attention over one sequence; causal: position i sees 0..=i. Arguments: q, k, v, out.
    Attention { seq: usize, heads: usize, kv_heads: usize, head_dim: usize, causal: bool },
    /// `y = a + b`. Arguments: a, b, y.
    Add { rows: usize, cols: usize },
    /// `y[r,c] = x[r,c] + bias[c]`. Arguments: x, bias, y.
    BiasAdd { rows: usize, cols: usize },
    /// `y = silu(gate) * up`. Arguments: gate, up, y.
    SiluMul { rows: usize, cols: usize },
    /// `y = x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`. Arguments: x, y.
    GeluTanh { rows: usize, cols: usize },
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
            Kernel::GemmLow { .. } => "gemm_bf16_low",
            Kernel::Gemv { .. } => "gemv",
            Kernel::GemvAdd { .. } => "matvec_2tile_add",
            Kernel::SwigluRms { .. } => "matvec_swiglu_rms",
            Kernel::RmsNorm { .. } => "rms_norm",
            Kernel::QkNorm { .. } => "qk_norm",
            Kernel::LayerNorm { .. } => "layer_norm",
            Kernel::Rope { .. } => "rope",
            Kernel::Attention { .. } => "attention",
            Kernel::Add { .. } => "add",
            Kernel::BiasAdd { .. } => "bias_add",
            Kernel::SiluMul { .. } => "silu_mul",
            Kernel::GeluTanh { .. } => "gelu_tanh",
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
            Kernel::GemmLow { m, k, n } => {
                vec![arg("a", Input, m, k), arg("w", LinearWeight, n, k), arg("c", Output, m, n)]
            }
            Kernel::Gemv { m, k } => {
                vec![arg("w", LinearWeight, m, k), arg("x", Input, 1, k), arg("y", Output, 1, m)]
            }
            Kernel::GemvAdd { m, k } => {
                vec![arg("w", LinearWeight, m, k), arg("x", Input, 1, k), arg("r", Input, 1, m), arg("y", Output, 1, m)]
            }
            Kernel::SwigluRms { m, k, .. } => {
                vec![arg("packed", Input, 2, k), arg("w", LinearWeight, 2 * m, k), arg("out", Output, 1, m)]
            }
            Kernel::RmsNorm { rows, cols, .. } => {
                vec![arg("x", Input, rows, cols), arg("w", Input, 1, cols), arg("y", Output, rows, cols)]
            }
            Kernel::QkNorm { rows, head_dim, .. } => {
                vec![arg("x", Input, rows, head_dim), arg("w", Input, 1, head_dim), arg("y", Output, rows, head_dim)]
            }
            Kernel::LayerNorm { rows, cols, .. } => {
                vec![arg("x", Input, rows, cols), arg("params", Input, 2, cols), arg("y", Output, rows, cols)]
            }
            Kernel::Rope { rows, head_dim } => {
                vec![
                    arg("x", Input, rows, head_dim),
                    arg("lut", Input, rows, head_dim),
                    arg("y", Output, rows, head_dim),
                ]
            }
            Kernel::Attention { seq, heads, kv_heads, head_dim, .. } => vec![
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
            Kernel::GeluTanh { rows, cols } => vec![arg("x", Input, rows, cols), arg("y", Output, rows, cols)],
        }
    }

    /// Whether row i of the output depends on row i of the inputs that have as many rows, and on no other row of theirs.
    pub fn is_row_wise(&self) -> bool {
        match self {
            Kernel::Gemm { .. }
            | Kernel::GemmLow { .. }
            | Kernel::RmsNorm { .. }
            | Kernel::QkNorm { .. }
            | Kernel::LayerNorm { .. }
            | Kernel::Rope { .. }
            | Kernel::Add { .. }
            | Kernel::BiasAdd { .. }
            | Kernel::SiluMul { .. }
            | Kernel::GeluTanh { .. } => true,
            // One vector has no rows to choose from.
            Kernel::Gemv { .. } | Kernel::GemvAdd { .. } | Kernel::SwigluRms { .. } | Kernel::Attention { .. } => false,
        }
    }

    /// Units: multiply-adds counted as two operations.
    pub fn flops(&self) -> u64 {
        let n = match *self {
            Kernel::Gemm { m, k, n, .. } | Kernel::GemmLow { m, k, n } => 2 * m * k * n,
            Kernel::Gemv { m, k } => 2 * m * k,
            Kernel::GemvAdd { m, k } => 2 * m * k + m,
            Kernel::SwigluRms { m, k, .. } => 4 * m * k + 4 * k + 5 * m,
            // Causal: half of the scores, twice (QK^T and PV).
            Kernel::Attention { seq, heads, head_dim, causal: true, .. } => 2 * seq * (seq + 1) * heads * head_dim,
            Kernel::Attention { seq, heads, head_dim, .. } => 4 * seq * seq * heads * head_dim,
            Kernel::RmsNorm { rows, cols, .. } => 4 * rows * cols,
            Kernel::LayerNorm { rows, cols, .. } => 7 * rows * cols,
            Kernel::QkNorm { rows, head_dim, .. } => 4 * rows * head_dim,
            Kernel::Rope { rows, head_dim } => 3 * rows * head_dim,
            Kernel::Add { rows, cols } | Kernel::BiasAdd { rows, cols } => rows * cols,
            Kernel::SiluMul { rows, cols } => 5 * rows * cols,
            Kernel::GeluTanh { rows, cols } => 8 * rows * cols,
        };
        n as u64
    }
}

impl fmt::Display for Kernel {
    /// `id::shape` in the form of test names: zero-padded and `[a-z0-9_:]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.id();
        match *self {
            Kernel::Gemm { m, k, n, .. } | Kernel::GemmLow { m, k, n } => write!(f, "{id}::m{m:04}_k{k:04}_n{n:04}"),
            Kernel::Gemv { m, k } | Kernel::GemvAdd { m, k } => write!(f, "{id}::m{m:05}_k{k:04}"),
            Kernel::SwigluRms { m, k, eps } => write!(f, "{id}::m{m:05}_k{k:04}_{eps}"),
            Kernel::RmsNorm { rows, cols, eps } | Kernel::LayerNorm { rows, cols, eps } => {
                write!(f, "{id}::r{rows:04}_c{cols:04}_{eps}")
            }
            Kernel::Add { rows, cols }
            | Kernel::BiasAdd { rows, cols }
            | Kernel::SiluMul { rows, cols }
            | Kernel::GeluTanh { rows, cols } => write!(f, "{id}::r{rows:04}_c{cols:04}"),
            Kernel::QkNorm { rows, head_dim, eps } => write!(f, "{id}::r{rows:05}_d{head_dim:03}_{eps}"),
            Kernel::Rope { rows, head_dim } => write!(f, "{id}::r{rows:05}_d{head_dim:03}"),
            Kernel::Attention { seq, heads, kv_heads, head_dim, causal } => {
                let mask = if causal { "" } else { "_full" };
                write!(f, "{id}::s{seq:04}_h{heads:02}_kv{kv_heads:02}_d{head_dim:03}{mask}")
            }
        }
    }
}

impl std::str::FromStr for Kernel {
    type Err = Error;

    /// Reads a kernel from its name, as [`fmt::Display`] writes it.
    ///
    /// Errors: [`Error::Usage`] for any other text, and for a size of zero.
    fn from_str(name: &str) -> Result<Kernel> {
        let bad = || Error::Usage {
            what: "kernel".into(),
            found: name.into(),
            expected: "a name such as gemm_bf16::m0128_k0576_n1536".into(),
        };
        let (id, shape) = name.split_once("::").ok_or_else(bad)?;
        let text = |prefix: &str| shape.split('_').find_map(|part| part.strip_prefix(prefix));
        let size = |prefix: &str| {
            let size = text(prefix).and_then(|digits| digits.parse().ok());
            size.filter(|&size: &usize| size > 0 && size <= 1 << 24).ok_or_else(bad)
        };
        let eps = || {
            let eps = text("eps").and_then(|eps| eps.replace('m', "-").replace('p', ".").parse().ok());
            eps.map(Epsilon::new).ok_or_else(bad)
        };
        let kernel = match id {
            "gemm_bf16" => Kernel::Gemm { m: size("m")?, k: size("k")?, n: size("n")?, out: Dtype::Bf16 },
            "gemm_f32" => Kernel::Gemm { m: size("m")?, k: size("k")?, n: size("n")?, out: Dtype::F32 },
            "gemm_bf16_low" => Kernel::GemmLow { m: size("m")?, k: size("k")?, n: size("n")? },
            "gemv" => Kernel::Gemv { m: size("m")?, k: size("k")? },
            "matvec_2tile_add" => Kernel::GemvAdd { m: size("m")?, k: size("k")? },
            "matvec_swiglu_rms" => Kernel::SwigluRms { m: size("m")?, k: size("k")?, eps: eps()? },
            "rms_norm" => Kernel::RmsNorm { rows: size("r")?, cols: size("c")?, eps: eps()? },
            "layer_norm" => Kernel::LayerNorm { rows: size("r")?, cols: size("c")?, eps: eps()? },
            "qk_norm" => Kernel::QkNorm { rows: size("r")?, head_dim: size("d")?, eps: eps()? },
            "rope" => Kernel::Rope { rows: size("r")?, head_dim: size("d")? },
            "attention" => Kernel::Attention {
                seq: size("s")?,
                heads: size("h")?,
                kv_heads: size("kv")?,
                head_dim: size("d")?,
                causal: text("full").is_none(),
            },
            "add" => Kernel::Add { rows: size("r")?, cols: size("c")? },
            "bias_add" => Kernel::BiasAdd { rows: size("r")?, cols: size("c")? },
            "silu_mul" => Kernel::SiluMul { rows: size("r")?, cols: size("c")? },
            "gelu_tanh" => Kernel::GeluTanh { rows: size("r")?, cols: size("c")? },
            _ => return Err(bad()),
        };
        // What this left out, or read otherwise than it is written, is another name.
        if kernel.to_string() == name && kernel.is_possible() { Ok(kernel) } else { Err(bad()) }
    }
}

impl Kernel {
    /// Whether the sizes go together (heads in groups, a head of two halves) and fit a machine.
    fn is_possible(&self) -> bool {
        const MOST: usize = 1 << 31;
        let fits = self.args().iter().all(|arg| arg.rows.saturating_mul(arg.cols) <= MOST);
        fits && match *self {
            Kernel::Attention { heads, kv_heads, head_dim, .. } => {
                heads.is_multiple_of(kv_heads) && head_dim.is_multiple_of(2)
            }
            Kernel::Rope { head_dim, .. } => head_dim.is_multiple_of(2),
            _ => true,
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
    #[case(Kernel::RmsNorm { rows: 2, cols: 64, eps: Epsilon::new(1e-5) }, "rms_norm::r0002_c0064_eps1em5")]
    #[case(Kernel::RmsNorm { rows: 2, cols: 64, eps: Epsilon::new(2.5e-6) }, "rms_norm::r0002_c0064_eps2p5em6")]
    #[case(
        Kernel::Attention { seq: 2, heads: 4, kv_heads: 2, head_dim: 64, causal: false },
        "attention::s0002_h04_kv02_d064_full"
    )]
    fn names_are_test_names(#[case] kernel: Kernel, #[case] name: &str) {
        assert_eq!(kernel.to_string(), name);
        assert_eq!(name.parse::<Kernel>().unwrap(), kernel);
    }

    #[rstest]
    #[case("")]
    #[case("gemm_bf16")]
    #[case("gemm_bf16::m128_k0576_n1536")]
    #[case("gemm_bf16::m0128_k0576")]
    #[case("gemm_bf16::m0128_k0576_n1536_x")]
    #[case("gemm_bf16::m0000_k0576_n1536")]
    #[case("gemm_bf16::m99999999999999999999_k0576_n1536")]
    #[case("gemm_bf16::m16777216_k0576_n16777216")]
    #[case("attention::s0002_h05_kv02_d064")]
    #[case("rms_norm::r0002_c0064_epsx")]
    #[case("convolution::m0128")]
    fn other_texts_are_no_kernels(#[case] name: &str) {
        assert!(matches!(name.parse::<Kernel>(), Err(Error::Usage { .. })), "{name}");
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
            Kernel::Attention { seq: 3, heads: 4, kv_heads: 2, head_dim: 8, causal: true },
            Kernel::Add { rows: 1, cols: 2 },
            Kernel::BiasAdd { rows: 1, cols: 2 },
            Kernel::SiluMul { rows: 1, cols: 2 },
            Kernel::GemmLow { m: 2, k: 3, n: 4 },
            Kernel::GemvAdd { m: 2, k: 3 },
            Kernel::SwigluRms { m: 2, k: 3, eps },
            Kernel::LayerNorm { rows: 2, cols: 3, eps },
            Kernel::GeluTanh { rows: 2, cols: 3 },
        ] {
            let args = kernel.args();
            let outputs = args.iter().filter(|a| a.role == ArgRole::Output).count();
            assert_eq!((outputs, args.last().unwrap().role), (1, ArgRole::Output), "{kernel}");
        }
    }
}
