//! The judge of one output: NaN and infinity, not written, element by element, then as a whole.

use ndarray::{Array2, ArrayView2, Zip};

use super::{limits, output_dtype};
use crate::check::metrics::Metrics;
use crate::device::POISON;
use crate::error::Result;
use crate::kernel::oracle::{Answer, SHARED_DEVIATION};
use crate::kernel::registry::{self, Gate};
use crate::kernel::{Dtype, Kernel};
use half::bf16;

/// How the reason begins that says elements are beyond their limit.
pub(super) const ELEMENTS: &str = "elements: ";

/// Standard deviations that the error of shared exponents may have in one element.
const SHARED_SIGMAS: f64 = 4.0;

/// A subnormal operand may be flushed to zero, as AVX-512's bf16 products do: the smallest normal number times what
/// multiplies it, up to 2^20.
const FLUSHED: f32 = f32::MIN_POSITIVE * (1 << 20) as f32;

/// Mean error of a value that was rounded down, 2^-8 of it: what counts where an output is as large as its terms.
const ROUNDED: f64 = 1.0 / 256.0;

/// How often a value in proportion to the output is rounded. In the fused decode kernel: rstd, which counts twice for it is
/// in gate and up; gate, up, the sigmoid, SiLU and the output.
fn roundings(kernel: &Kernel) -> f64 {
    if matches!(kernel, Kernel::SwigluRms { .. }) { 7.0 } else { 1.0 }
}

/// What an output is held against.
pub(super) struct Target {
    /// Rounded to the output's type, as the registry does.
    pub(super) values: Array2<f32>,
    /// `atol` of each element.
    pub(super) atol: Array2<f32>,
    /// The mean error that each element may have, where they are of unlike size.
    pub(super) expected: Option<Array2<f32>>,
}

/// The mean sizes of the measured inputs' outputs: what ties the registry's figures to other inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    /// Mean of [`Answer::magnitude`].
    magnitude: f64,
    /// Mean of `|output|`.
    output: f64,
}

impl Unit {
    pub(super) fn of(answer: &Answer) -> Unit {
        let mean = |x: &Array2<f32>| x.iter().map(|&x| f64::from(x.abs())).sum::<f64>() / x.len().max(1) as f64;
        Unit { magnitude: mean(&answer.magnitude), output: mean(&answer.values) }
    }
}

impl Target {
    /// The registry's: one `atol`.
    pub(super) fn fixed(kernel: &Kernel, gate: &Gate, answer: &Answer) -> Target {
        let atol = Array2::from_elem(answer.values.raw_dim(), gate.atol as f32);
        Target { values: rounded(kernel, answer), atol, expected: None }
    }

    /// `atol` in proportion to the magnitude, the registry's at the magnitude of the measured inputs: rounding errors are
    /// proportional to what is rounded, and that is a partial sum of the magnitude's terms. Beside it what shared exponents
    /// cost, [`SHARED_SIGMAS`] of their standard deviation.
    pub(super) fn scaled(kernel: &Kernel, gate: &Gate, answer: &Answer, unit: Unit) -> Target {
        let scale = if unit.magnitude > 0.0 { gate.atol / unit.magnitude } else { 0.0 };
        let shared = SHARED_SIGMAS * SHARED_DEVIATION;
        let atol = Zip::from(&answer.magnitude)
            .and(&answer.shared)
            .map_collect(|&m, &s| (scale * f64::from(m) + shared * f64::from(s)) as f32);
        Target { values: rounded(kernel, answer), atol: atol.mapv(|x| x.max(FLUSHED)), expected: None }
    }

    /// [`Target::scaled`] for inputs that no table measured, with the mean error that each element may have by the same
    /// argument: the registry's limit in proportion to the magnitude, the output's own roundings, and the standard deviation of
    /// shared exponents.
    pub(super) fn unmeasured(kernel: &Kernel, gate: &Gate, answer: &Answer, unit: Unit) -> Target {
        let scale = if unit.magnitude > 0.0 { gate.mean_rel_l1_limit * unit.output / unit.magnitude } else { 0.0 };
        let rounded = ROUNDED * roundings(kernel);
        let mut expected = answer.magnitude.mapv(|m| scale * f64::from(m));
        Zip::from(&mut expected)
            .and(&answer.values)
            .and(&answer.shared)
            .for_each(|x, &r, &s| *x += rounded * f64::from(r.abs()) + SHARED_DEVIATION * f64::from(s));
        let expected = expected.mapv(|x| (x as f32).max(FLUSHED));
        Target { expected: Some(expected), ..Target::scaled(kernel, gate, answer, unit) }
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
    /// Of inputs as the registry measured them.
    pub(super) mean_rel_l1: Option<f64>,
    /// Of the mean of `|error|` over [`Target::expected`].
    pub(super) mean_scaled: f64,
}

impl Limits {
    /// For inputs as the registry measured them.
    pub(super) fn measured(kernel: &Kernel, gate: &Gate, count: usize) -> Limits {
        Limits {
            mean_rel_l1: Some(limits::mean_rel_l1(kernel, gate, count)),
            ..Limits::unmeasured(kernel, gate, count)
        }
    }

    /// For inputs whose errors no table gives.
    pub(super) fn unmeasured(kernel: &Kernel, gate: &Gate, count: usize) -> Limits {
        Limits { rtol: gate.rtol, mean_rel_l1: None, mean_scaled: limits::mean_scaled(kernel, count) }
    }
}

/// Whether the registry's `atol` is known to mis-fire near zero. Its facts say so of one GEMM (and ours of LayerNorm); the
/// arithmetic of the other GEMM, which differs in the rounding of its output only, is the same.
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

/// What is wrong with the whole output before any figure is: NaN and infinity that were computed, then what was never
/// written and is still as [`POISON`] left it.
pub(super) fn not_numbers(kernel: &Kernel, output: &Array2<f32>) -> Vec<String> {
    let poison = match output_dtype(kernel) {
        Dtype::Bf16 => bf16::from_le_bytes(POISON).to_f32().to_bits(),
        Dtype::F32 => u32::from_le_bytes([POISON[0], POISON[1], POISON[0], POISON[1]]),
    };
    let describe = |what: &str, wrong: &dyn Fn(f32) -> bool| {
        let count = output.iter().filter(|&&x| wrong(x)).count();
        let ((row, col), x) = output.indexed_iter().find(|(_, x)| wrong(**x))?;
        Some(format!("{count} of {} outputs {what}, the first at [{row}, {col}]: {x}", output.len()))
    };
    let computed = |x: f32| !x.is_finite() && x.to_bits() != poison;
    let untouched = |x: f32| x.to_bits() == poison;
    let computed = describe("are NaN or infinite", &computed);
    computed.into_iter().chain(describe("were never written", &untouched)).collect()
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
    if let Some(expected) = &target.expected {
        let errors = Zip::from(&target.values).and(&output).and(expected);
        let sum = errors.fold(0.0, |sum, &r, &d, &x| sum + (f64::from(d) - f64::from(r)).abs() / f64::from(x));
        let mean = sum / metrics.count.max(1) as f64;
        if mean.is_nan() || mean > limits.mean_scaled {
            failures.push(format!("mean error {mean:.3} of the expected > {:.3}", limits.mean_scaled));
        }
    }
    if let Some(last) = failures.last_mut() {
        last.push_str(&format!(" (max_abs {:.3e}, bias {:.3e})", metrics.max_abs, metrics.bias));
    }
    Ok(failures)
}
