//! Phase 3's question about one layer alone: what it adds when it starts from HF's own input.
//!
//! One prefill in which every layer's output is looked at and then replaced by HF bf16's: what a layer inherits is HF's,
//! what it shows is its own. Needs every position of a prompt in the capture.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use ndarray::{Array2, Array3, Axis};

use super::{Bench, Finding, limits};
use crate::check::floor::Three;
use crate::check::tolerance::at_most;
use crate::check::{Extent, Metrics, Verdict};
use crate::error::{Error, Result};
use crate::reference::Lens;
use crate::runner::{Hook, Runner, StepContext};
use crate::tensor;

/// One layer, started from HF bf16's own input.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Added {
    pub layer: usize,
    /// Relative L2 of what was added, over that of HF bf16's own first layer, whose input is exact: one layer's noise.
    pub over_first: f64,
    /// Relative L2 of what was inherited: HF bf16's own input against HF f32's; 0 at the embedding.
    pub inherited_rel_l2: f64,
    /// Relative L2 of what was added.
    pub added_rel_l2: f64,
}

/// The lens prompts all of whose positions are captured.
///
/// Errors: those of reading the capture.
pub fn prompts(bench: &Bench) -> Result<Vec<String>> {
    let capture = bench.subject().capture()?;
    let mut whole = vec![];
    for id in capture.lens_prompts() {
        let (prompt, lens) = (capture.prompt(id)?, bench.subject().lens(id)?);
        if lens.positions.len() == prompt.ids.len() {
            whole.push(id.clone());
        }
    }
    Ok(whole)
}

/// Keeps each layer's output and puts HF's in its place.
struct Teacher {
    lens: Arc<Lens>,
    outputs: Vec<Array2<f32>>,
}

impl Hook for Teacher {
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let (Some(buffer), Some(layer)) = (cx.step.tap("output"), cx.step.layer) else { return Ok(()) };
        let mut content = cx.read(buffer)?;
        let reference = self.lens.layers_bf16.index_axis(Axis(0), layer);
        let (rows, width) = reference.dim();
        let own = content[..rows * width].iter().map(|x| x.to_f32()).collect();
        self.outputs.push(Array2::from_shape_vec((rows, width), own).expect("rows of one width"));
        content.iter_mut().zip(reference.iter()).for_each(|(x, &hf)| *x = bf16::from_f32(hf));
        cx.write(buffer, &content)
    }
}

/// Every layer of one prompt.
///
/// Errors: those of the runner; [`Error::Capture`] for a prompt without a whole lens.
pub fn layers(bench: &Bench, prompt: &str) -> Result<Vec<Added>> {
    let subject = bench.subject();
    let (lens, ids) = (subject.lens(prompt)?, subject.capture()?.prompt(prompt)?.ids);
    if lens.positions.len() != ids.len() {
        let path = subject.capture()?.path().to_owned();
        return Err(Error::Capture { path, why: format!("{prompt}: not every position has layer outputs") });
    }
    let teacher = Arc::new(Mutex::new(Teacher { lens: lens.clone(), outputs: vec![] }));
    let ids = bench.altered_prompt(&ids);
    bench.with_runner(|runner| runner.with_hook(teacher.clone(), |runner| runner.prefill(&ids)))?;
    let outputs = std::mem::take(&mut teacher.lock().unwrap_or_else(PoisonError::into_inner).outputs);
    let own = |layer: usize| {
        let side = |x: &Array3<f32>| x.index_axis(Axis(0), layer).to_owned();
        let (bf16, f32) = (side(&lens.layers_bf16), side(&lens.layers_f32));
        let three = Three { device: bf16.view(), bf16: bf16.view(), f32: f32.view() }.body();
        Ok(Metrics::measure(three.bf16, three.f32)?.rel_l2)
    };
    let first = own(0)?;
    let mut found = vec![];
    for (layer, device) in outputs.iter().enumerate().take(lens.layers_bf16.len_of(Axis(0))) {
        let (bf16, f32) = (lens.layers_bf16.index_axis(Axis(0), layer), lens.layers_f32.index_axis(Axis(0), layer));
        let three = Three { device: device.view(), bf16, f32 }.body();
        let added_rel_l2 = Metrics::measure(three.device, three.bf16)?.rel_l2;
        let inherited_rel_l2 = if layer == 0 { 0.0 } else { own(layer - 1)? };
        found.push(Added { layer, over_first: added_rel_l2 / first, inherited_rel_l2, added_rel_l2 });
    }
    Ok(found)
}

/// Every layer adds no more than the class's factor allows.
///
/// Errors: as [`layers`].
pub fn judge(bench: &Bench, prompts: &[String]) -> Result<Finding> {
    let found = prompts.iter().map(|id| Ok((id.as_str(), layers(bench, id)?))).collect::<Result<Vec<_>>>()?;
    judge_layers(bench, &found)
}

/// [`judge`] of what [`layers`] found on each prompt.
///
/// Errors: as [`limit`].
pub fn judge_layers(bench: &Bench, found: &[(&str, Vec<Added>)]) -> Result<Finding> {
    let limit = limit(bench)?;
    let (mut failures, mut compared, mut worst) = (vec![], 0, 0f64);
    for (id, layers) in found {
        for found in layers {
            compared += 1;
            worst = if found.over_first > worst || found.over_first.is_nan() { found.over_first } else { worst };
            if !at_most(found.over_first, limit) {
                let Added { layer, over_first, added_rel_l2, .. } = found;
                failures.push(format!(
                    "{id}: layer {layer} adds {over_first:.2} times what HF bf16's own first layer does, at most {limit} (relative L2 {added_rel_l2:.2e})"
                ));
            }
        }
    }
    let wanted = (found.len() * bench.subject().config.num_hidden_layers) as u64;
    let extent = Extent::new().require("layers", wanted).compare("layers", compared);
    Ok(Finding { verdict: Verdict::judge(failures, extent), numbers: vec![("added_over_first_max", worst)] })
}

/// The most a layer may add, over HF bf16's own first layer.
///
/// Errors: as [`limits::required`].
pub fn limit(bench: &Bench) -> Result<f64> {
    limits::required(bench, limits::Gate::Added)
}

/// The taps of layer 0 in order of computation, each over HF bf16's own distance.
///
/// Errors: those of the run and the capture.
pub fn taps(bench: &Bench, prompt: &str) -> Result<Vec<(&'static str, f64)>> {
    let (lens, record) = (bench.subject().lens(prompt)?, bench.record(prompt)?);
    let mut found = vec![];
    for tap in &lens.taps {
        let Some(rows) = record.taps.get(&format!("l00.{}", tap.name)) else { continue };
        let device = tensor::to_f32(rows.view());
        if device.dim() != tap.f32.dim() {
            continue;
        }
        found.push((tap.name, Three { device: device.view(), bf16: tap.bf16.view(), f32: tap.f32.view() }.over_own()?));
    }
    Ok(found)
}
