//! What each kernel should have answered: plain loops over bf16 inputs with f64 sums, and f32 outputs.
//!
//! Phase 1's judge of single kernels. Shares no code with `compute` or `device`; slow, and sampled where that matters.

mod attention;
mod norm;
#[cfg(test)]
mod tests;

use half::bf16;
use ndarray::Array2;

use crate::error::{Error, Result};
use crate::kernel::{Kernel, attention_scale};

/// Values that share one exponent along K in the NPU2's block floating point.
const BLOCK: usize = 8;

/// K after which the low tier rounds its sum.
const LOW_TILE_K: usize = 32;

/// K after which decode's projection rounds its sum.
const DECODE_K: usize = 512;

/// Standard deviation of one rounding to bf16, `2^-7 / sqrt(12)` of what is rounded, over that of [`Answer::shared`].
const ROUNDING_OVER_SHARED: f64 = 0.002_255 / SHARED_DEVIATION;

/// Largest error of the NPU2's tanh, halved by SiLU, over four standard deviations of [`Answer::shared`].
const TABLE_OVER_SHARED: f64 = 0.0388 / 2.0 / (4.0 * SHARED_DEVIATION);

/// The outputs that are computed: every chosen row at every chosen column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub rows: Vec<usize>,
    pub cols: Vec<usize>,
}

impl Sample {
    /// Every output of a kernel.
    pub fn all(kernel: &Kernel) -> Sample {
        let (rows, cols) = output_shape(kernel);
        Sample { rows: (0..rows).collect(), cols: (0..cols).collect() }
    }

    pub fn len(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows and columns of a kernel's output.
pub fn output_shape(kernel: &Kernel) -> (usize, usize) {
    kernel.args().last().map_or((0, 0), |arg| (arg.rows, arg.cols))
}

/// The right outputs, and how large the terms were that they are sums of.
///
/// Shapes: `[sample.rows, sample.cols]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Rounded to f32 once.
    pub values: Array2<f32>,
    /// `sum |a| |b|` over the terms of an output: what its rounding errors are proportional to. For attention
    /// `sum p |v| + max scale sum |q| |k| * sum p |v - output|`: an error of a score grows with the score's terms, and moves
    /// the output by its share of what sets the value apart.
    pub magnitude: Array2<f32>,
    /// What an error of shared exponents is proportional to. GEMM: `sqrt(sum over blocks of 8 along K of
    /// 8 (max|a| max|b|)^2)`; where a sum is rounded on the way, its partial sums count by what that costs. SwiGLU of a
    /// product: `|gate up|`, by what the table of tanh costs. Attention: `sum p max|v| + max p |v|` over blocks of 8 positions, and
    /// `sum p |v - output|` times the largest score's as in a GEMM. Else 0.
    pub shared: Array2<f32>,
}

/// Standard deviation that shared exponents cost at most, as a share of [`Answer::shared`]: both operands of a product are
/// rounded in steps of 2^-6 of the largest of their block, evenly within half a step: `sqrt(2) * 2^-6 / sqrt(12)`.
pub const SHARED_DEVIATION: f64 = 0.006_379;

/// Output, magnitude and shared of one element.
type Term = (f64, f32, f32);

/// Computes a kernel's sampled outputs.
///
/// Shapes: `inputs` in the kernel's order without the output, row-major.
///
/// Errors: [`Error::Comparison`] for another number or size of inputs.
///
/// Source: the formulas of [`Kernel`]; RoPE as HF's `rotate_half`, attention as HF's `eager_attention_forward`.
pub fn answer(kernel: &Kernel, inputs: &[&[bf16]], sample: &Sample) -> Result<Answer> {
    let args = kernel.args();
    let expected: Vec<usize> = args[..args.len() - 1].iter().map(|arg| arg.rows * arg.cols).collect();
    let found: Vec<usize> = inputs.iter().map(|input| input.len()).collect();
    if found != expected {
        let what = format!("oracle of {kernel}");
        return Err(Error::comparison(what, format!("inputs of {found:?}"), format!("{expected:?}")));
    }
    Ok(match *kernel {
        Kernel::Gemm { k, .. } => product(inputs[0], inputs[1], k, sample, Sum { blocks: true, narrow: None }),
        Kernel::GemmLow { k, .. } => {
            product(inputs[0], inputs[1], k, sample, Sum { blocks: true, narrow: Some(LOW_TILE_K) })
        }
        Kernel::Gemv { k, .. } => product(inputs[1], inputs[0], k, sample, Sum { blocks: false, narrow: None }),
        Kernel::GemvAdd { k, .. } => {
            let sum = Sum { blocks: false, narrow: Some(DECODE_K) };
            plus(product(inputs[1], inputs[0], k, sample, sum), inputs[2], sample)
        }
        Kernel::SwigluRms { k, eps, .. } => swiglu_rms(inputs[0], inputs[1], k, f64::from(eps.value()), sample),
        Kernel::RmsNorm { cols, eps, .. } | Kernel::QkNorm { head_dim: cols, eps, .. } => {
            norm::rms_norm(inputs[0], inputs[1], cols, f64::from(eps.value()), sample)
        }
        Kernel::LayerNorm { cols, eps, .. } => {
            norm::layer_norm(inputs[0], inputs[1], cols, f64::from(eps.value()), sample)
        }
        Kernel::Rope { head_dim, .. } => rope(inputs[0], inputs[1], head_dim, sample),
        Kernel::Attention { heads, kv_heads, head_dim, causal, .. } => {
            let scale = f64::from(attention_scale(head_dim));
            attention::attention([inputs[0], inputs[1], inputs[2]], (heads, kv_heads, head_dim), scale, causal, sample)
        }
        Kernel::Add { cols, .. } => each(sample, |row, col| {
            let (a, b) = (inputs[0][row * cols + col].to_f64(), inputs[1][row * cols + col].to_f64());
            (a + b, (a.abs() + b.abs()) as f32, 0.0)
        }),
        Kernel::BiasAdd { cols, .. } => each(sample, |row, col| {
            let (x, bias) = (inputs[0][row * cols + col].to_f64(), inputs[1][col].to_f64());
            (x + bias, (x.abs() + bias.abs()) as f32, 0.0)
        }),
        Kernel::SiluMul { cols, .. } => each(sample, |row, col| {
            let (gate, up) = (inputs[0][row * cols + col].to_f64(), inputs[1][row * cols + col].to_f64());
            (silu(gate) * up, (gate * up).abs() as f32, 0.0)
        }),
        Kernel::GeluTanh { cols, .. } => each(sample, |row, col| {
            let x = inputs[0][row * cols + col].to_f64();
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            (0.5 * x * (1.0 + inner.tanh()), x.abs() as f32, 0.0)
        }),
    })
}

/// Collects `term(row, col)` of every sampled output.
fn each(sample: &Sample, mut term: impl FnMut(usize, usize) -> Term) -> Answer {
    let shape = (sample.rows.len(), sample.cols.len());
    let mut answer =
        Answer { values: Array2::zeros(shape), magnitude: Array2::zeros(shape), shared: Array2::zeros(shape) };
    for (i, &row) in sample.rows.iter().enumerate() {
        for (j, &col) in sample.cols.iter().enumerate() {
            let (value, magnitude, shared) = term(row, col);
            answer.values[[i, j]] = value as f32;
            answer.magnitude[[i, j]] = magnitude;
            answer.shared[[i, j]] = shared;
        }
    }
    answer
}

/// How a device may sum a product, which says what that costs.
#[derive(Clone, Copy)]
struct Sum {
    /// Operands in blocks that share an exponent.
    blocks: bool,
    /// The sum is rounded to bf16 after each of these.
    narrow: Option<usize>,
}

/// `C[r, c] = sum_k A[r, k] W[c, k]`.
///
/// Shapes: `a [rows, k]`, `w [cols, k]`.
fn product(a: &[bf16], w: &[bf16], k: usize, sample: &Sample, sum: Sum) -> Answer {
    let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (a, w) = (widen(a), widen(w));
    let maxima = |x: &[f32]| -> Vec<f32> {
        let row_maxima = |row| <[f32]>::chunks(row, BLOCK).map(|b| b.iter().fold(0.0, |max: f32, x| max.max(x.abs())));
        if sum.blocks { x.chunks(k).flat_map(row_maxima).collect() } else { vec![] }
    };
    let (a_max, w_max) = (maxima(&a), maxima(&w));
    let per_row = if sum.blocks { k.div_ceil(BLOCK) } else { 0 };
    each(sample, |row, col| {
        let (value, magnitude, rounded) = narrow_dot(&a[row * k..][..k], &w[col * k..][..k], sum.narrow.unwrap_or(k));
        let (a, w) = (&a_max[row * per_row..][..per_row], &w_max[col * per_row..][..per_row]);
        let squares: f64 = a.iter().zip(w).map(|(a, w)| (f64::from(*a) * f64::from(*w)).powi(2)).sum();
        let rounded = if sum.narrow.is_some() { ROUNDING_OVER_SHARED.powi(2) * rounded } else { 0.0 };
        (value, magnitude, (BLOCK as f64 * squares + rounded).sqrt() as f32)
    })
}

/// [`dot`], and the sum of the squares of the partial sums after every `step`.
fn narrow_dot(a: &[f32], b: &[f32], step: usize) -> (f64, f32, f64) {
    let (mut sum, mut size, mut squares) = (0.0, 0.0, 0.0);
    for (a, b) in a.chunks(step).zip(b.chunks(step)) {
        let part = dot(a, b);
        sum += part.0;
        size += part.1;
        squares += sum * sum;
    }
    (sum, size, squares)
}

/// `sum a b` in f64 and `sum |a b|`, in eight partial sums.
fn dot(a: &[f32], b: &[f32]) -> (f64, f32) {
    let (mut sums, mut sizes) = ([0f64; 8], [0f32; 8]);
    let ((a_eights, a_rest), (b_eights, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a_eights.iter().zip(b_eights) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
            sizes[i] += (a[i] * b[i]).abs();
        }
    }
    for (a, b) in a_rest.iter().zip(b_rest) {
        sums[0] += f64::from(*a) * f64::from(*b);
        sizes[0] += (a * b).abs();
    }
    (sums.iter().sum(), sizes.iter().sum())
}

/// `answer + r`.
fn plus(mut answer: Answer, r: &[bf16], sample: &Sample) -> Answer {
    for (j, &col) in sample.cols.iter().enumerate() {
        let r = r[col].to_f32();
        answer.values.column_mut(j).mapv_inplace(|y| y + r);
        answer.magnitude.column_mut(j).mapv_inplace(|m| m + r.abs());
    }
    answer
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `silu(Wg h) * (Wu h)`, `h = rms_norm(r, w)`; nothing between is rounded. An error of `h` or of a product grows with the
/// product's magnitude, and SiLU's slope is below 1.1.
///
/// Shapes: `packed [2, k]`, r over w; `weight [2 * outputs, k]`, gate and up rows in turn.
fn swiglu_rms(packed: &[bf16], weight: &[bf16], k: usize, eps: f64, sample: &Sample) -> Answer {
    let row = Sample { rows: vec![0], cols: (0..k).collect() };
    let normed = norm::rms_norm(&packed[..k], &packed[k..], k, eps, &row).values.into_raw_vec_and_offset().0;
    let widened: Vec<f32> = weight.iter().map(|w| w.to_f32()).collect();
    each(sample, |_, col| {
        let [(gate, gate_size), (up, up_size)] = [2 * col, 2 * col + 1].map(|r| dot(&normed, &widened[r * k..][..k]));
        let y = silu(gate) * up;
        let size = 1.1 * f64::from(gate_size) * up.abs() + silu(gate).abs() * f64::from(up_size);
        (y, size as f32, (TABLE_OVER_SHARED * (gate * up).abs()) as f32)
    })
}

/// Half-split rotation: `y[i] = x[i] cos[i] - x[i + h] sin[i]`, `y[i + h] = x[i + h] cos[i] + x[i] sin[i]`.
///
/// Shapes: `x`, `lut` `[rows, head_dim]`; a LUT row is cos (h), then sin (h).
fn rope(x: &[bf16], lut: &[bf16], head_dim: usize, sample: &Sample) -> Answer {
    let half = head_dim / 2;
    each(sample, |row, col| {
        let at = |table: &[bf16], i: usize| table[row * head_dim + i].to_f64();
        let i = col % half;
        let (cos, sin) = (at(lut, i), at(lut, i + half));
        let (own, other) = (at(x, col), at(x, (col + half) % head_dim));
        let turned = if col < half { -other } else { other };
        (own * cos + turned * sin, ((own * cos).abs() + (turned * sin).abs()) as f32, 0.0)
    })
}
