//! Phase 1: is every kernel right at every shape that is needed?
//!
//! One case a kernel and shape: what the models' plans launch, and a sweep of the registry's small shapes and of odd
//! ones. Needs no checkpoint. Each case judges two sets of inputs, runs the first three times, and shows that its judge
//! tells nonsense apart.

mod bound;
#[cfg(test)]
mod broken;
mod inputs;
mod judge;
mod limits;
mod nulls;
mod sample;
mod shapes;
#[cfg(test)]
mod tests;

use ndarray::Array2;

use self::bound::Bound;
use self::inputs::{Inputs, Set};
use self::judge::{Limits, Target, Unit};
use super::devices::open_device;
use super::{Case, Finding, Outline};
use crate::check::metrics::Metrics;
use crate::check::{Extent, Verdict};
use crate::device::Device;
use crate::error::Result;
use crate::kernel::oracle::{self, Answer, Sample};
use crate::kernel::registry::{self, Gate};
use crate::kernel::{ArgRole, Dtype, Kernel};
use crate::random::Random;

/// One case per kernel and shape, each name once.
///
/// Errors: from the plans and the registry.
pub fn cases(outlines: &[Outline]) -> Result<Vec<Case>> {
    Ok(shapes::all(outlines)?.into_iter().map(case_of).collect())
}

/// Every kernel and shape that a case runs: its own, and the one between two runs of it.
///
/// Errors: from the plans and the registry.
pub fn kernels(outlines: &[Outline]) -> Result<Vec<Kernel>> {
    let mut kernels = shapes::all(outlines)?;
    kernels.push(bound::OTHER_KERNEL);
    Ok(kernels)
}

/// The case of a kernel's name, for a shape that is no case yet. It has no baseline: its figures are in a warning, to be
/// appended to the registry. None for any other text.
pub fn on_demand(name: &str) -> Option<Case> {
    let kernel: Kernel = name.parse().ok()?;
    let measured = Case::on_device(kernel.to_string(), "", move |device| {
        let Finding { verdict, numbers } = judge_on(&kernel, open_device(device)?)?;
        let figures: Vec<String> = numbers.iter().map(|(name, value)| format!("{name} {value:.3e}")).collect();
        Ok(Finding::of(verdict.warn(format!("measured: {}", figures.join(", ")))))
    });
    Some(Case { baseline: false, ..measured })
}

fn case_of(kernel: Kernel) -> Case {
    Case::on_device(kernel.to_string(), "", move |device| judge_on(&kernel, open_device(device)?))
}

/// Runs and judges one kernel on a device.
///
/// The checks in their order: every run completed and no guard is damaged (or there is an error and no finding), the shape,
/// NaN and infinity, what was not written, every element, `mean_rel_l1`; then whether three runs gave the same bits.
///
/// Errors: those of the device; an incomplete run, a damaged guard.
pub fn judge_on(kernel: &Kernel, device: Box<dyn Device>) -> Result<Finding> {
    let gate = registry::gate(kernel)?;
    let name = kernel.to_string();
    let samples = sample::samples(kernel, &mut Random::of(&format!("{name} sample")));
    let measured = inputs::make(kernel, Set::Measured, &gate, &name);
    let wild = inputs::make(kernel, Set::Wild, &gate, &name);
    let mut bound = Bound::open(device, kernel)?;
    bound.write(&measured)?;
    let (first, repeated) = bound.three_times(&measured)?;
    bound.write(&wild)?;
    let second = bound.run()?;
    let mut judged = Judged { failures: judge::not_numbers(kernel, &first), ..Judged::default() };
    let strange = judge::not_numbers(kernel, &second);
    judged.failures.extend(strange.into_iter().map(|why| format!("wild inputs: {why}")));
    for sample in &samples {
        let answer = answer(kernel, &measured, sample)?;
        judged.measured(kernel, &gate, &pick(&first, sample), &answer)?;
        let wild = self::answer(kernel, &wild, sample)?;
        judged.wild(kernel, &gate, &pick(&second, sample), &wild, Unit::of(&answer))?;
    }
    judged.failures.extend(repeated);
    let extent = extent(kernel, &samples);
    let verdict = judged.warnings.into_iter().fold(Verdict::judge(judged.failures, extent), Verdict::warn);
    Ok(Finding { verdict, numbers: judged.numbers })
}

/// What a kernel answers to the case's measured inputs, for devices that must agree bit for bit.
///
/// Errors: those of the device.
pub fn output_on(kernel: &Kernel, device: Box<dyn Device>) -> Result<Array2<f32>> {
    let inputs = inputs::make(kernel, Set::Measured, &registry::gate(kernel)?, &kernel.to_string());
    let mut bound = Bound::open(device, kernel)?;
    bound.write(&inputs)?;
    bound.run()
}

/// Outputs compared of both inputs, the share of all that they are, and runs.
fn extent(kernel: &Kernel, samples: &[Sample]) -> Extent {
    let compared = 2 * samples.iter().map(|sample| sample.len() as u64).sum::<u64>();
    let all = 2 * Sample::all(kernel).len() as u64;
    let mut extent = Extent::new().require("outputs", compared).compare("outputs", compared).require("runs", 4);
    extent.add("runs", 4);
    extent.add("outputs in all", all);
    extent.add("percent of all outputs", 100 * compared / all.max(1));
    extent
}

/// What was found, part by part of the output.
#[derive(Default)]
struct Judged {
    failures: Vec<String>,
    warnings: Vec<String>,
    /// Of the first part.
    numbers: Vec<(&'static str, f64)>,
}

impl Judged {
    /// The registry's own check; where its `atol` is known to mis-fire near zero, the scaled one decides and a warning says
    /// so.
    fn measured(&mut self, kernel: &Kernel, gate: &Gate, output: &Array2<f32>, answer: &Answer) -> Result<()> {
        let limits = Limits::measured(kernel, gate, output.len());
        let mut target = Target::fixed(kernel, gate, answer);
        let mut found = judge::judge(output.view(), &target, &limits)?;
        if judge::near_zero(kernel, gate)? && found.iter().any(|why| why.starts_with(judge::ELEMENTS)) {
            self.warnings.push(format!("gate_false_failures: {}; judged by atol scaled to sum |a| |b|", found[0]));
            target = Target::scaled(kernel, gate, answer, Unit::of(answer));
            found = judge::judge(output.view(), &target, &limits)?;
        }
        self.failures.extend(found);
        self.failures.extend(nulls::survivors(&target, &limits, &kernel.to_string())?);
        if self.numbers.is_empty() {
            // Against the reference before its rounding: one rounding more or less would move a figure of few outputs far.
            let exact = Metrics::measure(output.view(), answer.values.view())?;
            self.numbers = vec![
                ("mean_rel_l1", exact.mean_rel_l1),
                ("max_abs", exact.max_abs),
                ("max_rel", max_rel(output, &answer.values)),
                ("bias", exact.bias),
            ];
        }
        Ok(())
    }

    /// Inputs that no table measured: scaled limits, element by element and in the mean.
    fn wild(&mut self, kernel: &Kernel, gate: &Gate, output: &Array2<f32>, answer: &Answer, unit: Unit) -> Result<()> {
        let target = Target::unmeasured(kernel, gate, answer, unit);
        let limits = Limits::unmeasured(kernel, gate, output.len());
        let found = judge::judge(output.view(), &target, &limits)?;
        let survivors = nulls::survivors(&target, &limits, &kernel.to_string())?;
        self.failures.extend(found.into_iter().chain(survivors).map(|why| format!("wild inputs: {why}")));
        Ok(())
    }
}

/// Largest relative error of the outputs that are at least as large as their mean. Near zero the last bit of a sum decides,
/// and that differs between instruction sets.
fn max_rel(output: &Array2<f32>, values: &Array2<f32>) -> f64 {
    let mean = values.iter().map(|&r| f64::from(r.abs())).sum::<f64>() / values.len().max(1) as f64;
    let pairs = output.iter().zip(values).map(|(&d, &r)| (f64::from(d), f64::from(r)));
    pairs.filter(|(_, r)| *r != 0.0 && r.abs() >= mean).map(|(d, r)| ((d - r) / r).abs()).fold(0.0, f64::max)
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

/// The type of a kernel's output.
fn output_dtype(kernel: &Kernel) -> Dtype {
    kernel.args().iter().find(|arg| arg.role == ArgRole::Output).map_or(Dtype::Bf16, |arg| arg.dtype)
}
