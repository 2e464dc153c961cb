//! Phase 1: is every kernel right at every shape that is needed?
//!
//! One case a kernel and shape: what the models' plans launch, and a sweep of the registry's small shapes and of odd
//! ones. Needs no checkpoint. Each case judges two sets of inputs, runs the first three times, and shows that its judge
//! tells nonsense apart.

mod bound;
mod inputs;
mod judge;
mod nulls;
mod shapes;
#[cfg(test)]
mod tests;

use ndarray::Array2;

use self::bound::Bound;
use self::inputs::{Inputs, Random, Set};
use self::judge::{Limits, Target};
use super::bench::open_device;
use super::{Case, Finding, Outline};
use crate::check::metrics::Metrics;
use crate::check::{Extent, Verdict};
use crate::device::Device;
use crate::error::Result;
use crate::kernel::oracle::{self, Answer, Sample};
use crate::kernel::registry::{self, Gate};
use crate::kernel::{ArgRole, Dtype, Kernel};

/// Multiply-adds up to which every output is compared.
const FULL: u64 = 64 << 20;

/// Rows (or columns of a single row) at each border that a sampled comparison holds.
const BORDER: usize = 16;

/// One case per kernel and shape, each name once.
///
/// Errors: from the plans and the registry.
pub fn cases(outlines: &[Outline]) -> Result<Vec<Case>> {
    let kernels = shapes::all(outlines)?;
    Ok(kernels.into_iter().map(|k| Case::on_device(k.to_string(), "", move |device| case(&k, device))).collect())
}

/// Runs and judges one kernel on the device of that label.
///
/// Errors: those of the device; an incomplete run, a damaged guard.
fn case(kernel: &Kernel, device: &str) -> Result<Finding> {
    judge_on(kernel, open_device(device)?)
}

/// Runs and judges one kernel on an open device.
///
/// Errors: those of the device; an incomplete run, a damaged guard.
pub fn judge_on(kernel: &Kernel, device: Box<dyn Device>) -> Result<Finding> {
    let gate = registry::gate(kernel)?;
    let name = kernel.to_string();
    let sample = sample(kernel, &mut Random::of(&format!("{name} sample")));
    let measured = inputs::make(kernel, Set::Measured, &gate, &name);
    let wild = inputs::make(kernel, Set::Wild, &gate, &name);
    let mut bound = Bound::open(device, kernel)?;
    bound.write(&measured)?;
    let (first, repeated) = bound.three_times(&measured)?;
    let answer = answer(kernel, &measured, &sample)?;
    let unit = answer.magnitude.iter().map(|&m| f64::from(m)).sum::<f64>() / sample.len() as f64;
    let mut judged = judge_measured(kernel, &gate, &first, &answer, &sample, unit, &name)?;
    judged.failures.splice(0..0, repeated);
    bound.write(&wild)?;
    let second = bound.run()?;
    let wild = self::answer(kernel, &wild, &sample)?;
    let target = Target::scaled(kernel, &gate, &wild, unit);
    let limits = Limits { rtol: gate.rtol, mean_rel_l1: None, cosine: judge::WILD_COSINE_MIN };
    let output = pick(&second, &sample);
    let failed = judge::unwritten(&second).into_iter().chain(judge::judge(output.view(), &target, &limits)?);
    judged.failures.extend(failed.map(|why| format!("wild inputs: {why}")));
    judged.failures.extend(nulls::survivors(&target, &limits, &name)?.into_iter().map(|n| format!("wild inputs: {n}")));
    let (compared, all) = (2 * sample.len() as u64, 2 * first.len() as u64);
    let mut extent = Extent::new().require("outputs", compared).compare("outputs", compared).require("runs", 4);
    extent.add("runs", 4);
    extent.add("outputs in all", all);
    let verdict = judged.warnings.into_iter().fold(Verdict::judge(judged.failures, extent), Verdict::warn);
    Ok(Finding { verdict, numbers: judged.numbers })
}

/// What the inputs as the registry measured them gave.
struct Judged {
    failures: Vec<String>,
    warnings: Vec<String>,
    numbers: Vec<(&'static str, f64)>,
}

/// The registry's own check; where its `atol` is known to mis-fire near zero, the scaled one decides and a warning says so.
fn judge_measured(
    kernel: &Kernel,
    gate: &Gate,
    output: &Array2<f32>,
    answer: &Answer,
    sample: &Sample,
    unit: f64,
    name: &str,
) -> Result<Judged> {
    let mut failures: Vec<String> = judge::unwritten(output).into_iter().collect();
    let mut warnings = vec![];
    let output = pick(output, sample);
    let limits = Limits::measured(gate, sample.len());
    let mut target = Target::fixed(kernel, gate, answer);
    let mut found = judge::judge(output.view(), &target, &limits)?;
    if judge::near_zero(kernel, gate)? && found.iter().any(|why| why.starts_with(judge::ELEMENTS)) {
        warnings.push(format!("gate_false_failures: {}; judged by atol scaled to sum |a| |b|", found[0]));
        target = Target::scaled(kernel, gate, answer, unit);
        found = judge::judge(output.view(), &target, &limits)?;
    }
    failures.extend(found);
    failures.extend(nulls::survivors(&target, &limits, name)?);
    // Against the reference before its rounding: one rounding more or less would move a figure of few outputs far.
    let exact = Metrics::measure(output.view(), answer.values.view())?;
    let numbers = vec![("mean_rel_l1", exact.mean_rel_l1), ("max_abs", exact.max_abs)];
    Ok(Judged { failures, warnings, numbers })
}

fn answer(kernel: &Kernel, inputs: &Inputs, sample: &Sample) -> Result<Answer> {
    let slices: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
    oracle::answer(kernel, &slices, sample)
}

/// The sampled part of a whole output.
fn pick(output: &Array2<f32>, sample: &Sample) -> Array2<f32> {
    let shape = (sample.rows.len(), sample.cols.len());
    Array2::from_shape_fn(shape, |(i, j)| output[[sample.rows[i], sample.cols[j]]])
}

/// Everything up to [`FULL`] multiply-adds; beyond, the border rows and seeded ones until as many are spent. Of a single
/// row, columns instead.
fn sample(kernel: &Kernel, random: &mut Random) -> Sample {
    let mut sample = Sample::all(kernel);
    let work = kernel.flops() / 2;
    if work <= FULL {
        return sample;
    }
    let axis = if sample.rows.len() > 1 { &mut sample.rows } else { &mut sample.cols };
    let len = axis.len();
    let wanted = ((len as u64 * FULL / work) as usize).max(2 * BORDER).min(len);
    let mut chosen: std::collections::BTreeSet<usize> =
        (0..BORDER.min(len)).chain(len.saturating_sub(BORDER)..len).collect();
    while chosen.len() < wanted {
        chosen.insert(random.below(len));
    }
    *axis = chosen.into_iter().collect();
    sample
}

/// The type of a kernel's output.
fn output_dtype(kernel: &Kernel) -> Dtype {
    kernel.args().iter().find(|arg| arg.role == ArgRole::Output).map_or(Dtype::Bf16, |arg| arg.dtype)
}
