//! The judge of one output: not written, NaN, element by element, then as a whole.

use ndarray::{Array2, ArrayView2};

use super::output_dtype;
use crate::check::metrics::Metrics;
use crate::error::Result;
use crate::kernel::oracle::Answer;
use crate::kernel::registry::{self, Gate};
use crate::kernel::{Dtype, Kernel};
use half::bf16;

/// How the reason begins that says elements are beyond their limit.
pub(super) const ELEMENTS: &str = "elements: ";

/// Minimum of the cosine on wild inputs, whose errors no table gives.
pub(super) const WILD_COSINE_MIN: Option<f64> = Some(0.98);

/// Share of [`Answer::shared`] that shared exponents may cost: a step is at most 2^-6 of the largest of its block, so an
/// error has at most a standard deviation of 0.0064 of it; four of them.
const SHARED: f64 = 0.0256;

/// A subnormal operand may be flushed to zero, as AVX-512's bf16 products do: the smallest normal number times what
/// multiplies it, up to 2^20.
const FLUSHED: f32 = f32::MIN_POSITIVE * (1 << 20) as f32;

/// Two values that round to other neighbours, each 2^-7 of a value up to twice the mean: what a mean over few outputs
/// holds beside its limit.
const ROUNDED_APART: f64 = 2.0 * 2.0 / 128.0;

/// What an output is held against.
pub(super) struct Target {
    /// Rounded to the output's type, as the registry does.
    pub(super) values: Array2<f32>,
    /// `atol` of each element.
    pub(super) atol: Array2<f32>,
}

impl Target {
    /// The registry's: one `atol`.
    pub(super) fn fixed(kernel: &Kernel, gate: &Gate, answer: &Answer) -> Target {
        let atol = Array2::from_elem(answer.values.raw_dim(), gate.atol as f32);
        Target { values: rounded(kernel, answer), atol }
    }

    /// `atol` in proportion to the magnitude, the registry's at the magnitude `unit`, and for a GEMM what shared
    /// exponents cost.
    pub(super) fn scaled(kernel: &Kernel, gate: &Gate, answer: &Answer, unit: f64) -> Target {
        let scale = if unit > 0.0 { gate.atol / unit } else { 0.0 };
        let mut atol = answer.magnitude.mapv(|m| (scale * f64::from(m)) as f32);
        atol.zip_mut_with(&answer.shared, |atol, &shared| *atol += (SHARED * f64::from(shared)) as f32);
        atol.mapv_inplace(|x| x.max(FLUSHED));
        Target { values: rounded(kernel, answer), atol }
    }
}

fn rounded(kernel: &Kernel, answer: &Answer) -> Array2<f32> {
    match output_dtype(kernel) {
        Dtype::Bf16 => answer.values.mapv(|x| bf16::from_f32(x).to_f32()),
        Dtype::F32 => answer.values.clone(),
    }
}

/// The limits beside `atol`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) rtol: f64,
    pub(super) mean_rel_l1: Option<f64>,
    pub(super) cosine: Option<f64>,
}

impl Limits {
    /// The registry's. Its `mean_rel_l1` is that of a million outputs; a mean over `count` varies by `1 / sqrt(count)`
    /// (four of them), and by single values that round to the other neighbour.
    pub(super) fn measured(gate: &Gate, count: usize) -> Limits {
        let count = count.max(1) as f64;
        let limit = gate.mean_rel_l1_limit * (1.0 + 4.0 / count.sqrt()) + ROUNDED_APART / count;
        Limits { rtol: gate.rtol, mean_rel_l1: Some(limit), cosine: None }
    }
}

/// Whether the registry's `atol` is known to mis-fire near zero. Its facts say so of one GEMM; the arithmetic of the
/// other, which differs in the rounding of its output only, is the same.
///
/// Errors: as [`registry::gate`].
pub(super) fn near_zero(kernel: &Kernel, gate: &Gate) -> Result<bool> {
    Ok(match *kernel {
        Kernel::Gemm { m, k, n, .. } => {
            registry::gate(&Kernel::Gemm { m, k, n, out: Dtype::Bf16 })?.near_zero.is_some()
        }
        _ => gate.near_zero.is_some(),
    })
}

/// The first output of the whole that is NaN or infinite, which one never written is.
pub(super) fn unwritten(output: &Array2<f32>) -> Option<String> {
    let bad = output.iter().filter(|x| !x.is_finite()).count();
    let ((row, col), x) = output.indexed_iter().find(|(_, x)| !x.is_finite())?;
    let why = if x.is_nan() { "NaN (not written, or computed)" } else { "infinite" };
    Some(format!("{bad} of {} outputs are not finite, the first at [{row}, {col}]: {why}", output.len()))
}

/// Everything that is wrong with an output, in the order of the checks; empty is good.
///
/// Shapes: as the target.
///
/// Errors: [`crate::error::Error::Comparison`] for another shape.
pub(super) fn judge(output: ArrayView2<'_, f32>, target: &Target, limits: &Limits) -> Result<Vec<String>> {
    let metrics = Metrics::measure(output, target.values.view())?;
    if let Some((row, col)) = metrics.first_bad {
        return Ok(vec![format!("{} outputs are NaN or infinite, the first at [{row}, {col}]", metrics.nan_count)]);
    }
    let mut failures = vec![];
    let mut bad = output.indexed_iter().filter_map(|(at, &d)| {
        let (r, atol) = (f64::from(target.values[at]), f64::from(target.atol[at]));
        let (error, limit) = ((f64::from(d) - r).abs(), atol + limits.rtol * r.abs());
        (error > limit || error.is_nan()).then_some((at, d, r, limit))
    });
    if let Some(((row, col), d, r, limit)) = bad.next() {
        let count = 1 + bad.count();
        failures.push(format!(
            "{ELEMENTS}{count} of {} beyond atol + rtol |r|, the first at [{row}, {col}]: {d}, reference {r}, limit {limit:.3e}",
            metrics.count
        ));
    }
    if let Some(limit) = limits.mean_rel_l1.filter(|&limit| metrics.mean_rel_l1.is_nan() || metrics.mean_rel_l1 > limit)
    {
        failures.push(format!("mean_rel_l1 {:.3e} > {limit:.3e}", metrics.mean_rel_l1));
    }
    if let Some(min) = limits.cosine.filter(|&min| metrics.cosine.is_nan() || metrics.cosine < min) {
        failures.push(format!("cosine {:.6} < {min}", metrics.cosine));
    }
    if let Some(last) = failures.last_mut() {
        last.push_str(&format!(" (max_abs {:.3e}, bias {:.3e})", metrics.max_abs, metrics.bias));
    }
    Ok(failures)
}
