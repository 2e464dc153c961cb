//! Phase 2: is one block right?
//!
//! Block 0's output against HF bf16 on every lens prompt: whole cosine, per-position minimum by head_dim, no NaN.

use ndarray::Axis;

use super::subject::{Outline, Subject};
use super::{Bench, Case, Finding};
use crate::check::tolerance;
use crate::error::{Error, Result};
use crate::plan::{self, Inheritance, PlanOptions, inheritance};
use crate::tensor;

/// The name of its progress document.
pub const DOCUMENT: &str = "phase2_block";

/// One case per lens prompt.
pub fn cases(outline: &Outline) -> Vec<Case> {
    let model = &outline.name;
    outline
        .lens
        .iter()
        .map(|prompt| {
            let (model, prompt) = (model.clone(), prompt.clone());
            let name = format!("block::{model}::{prompt}");
            Case::on_device(name, &model.clone(), move |device| block(&*Bench::shared(&model, device)?, &prompt))
        })
        .collect()
}

/// Judges block 0 on one lens prompt.
///
/// Errors: those of the run; [`Error::Capture`] when the prompt has no lens.
pub fn block(bench: &Bench, prompt: &str) -> Result<Finding> {
    let subject = bench.subject();
    let lens = subject.lens(prompt)?;
    let record = bench.record(prompt)?;
    let rows = record.taps.get("l00.output").ok_or_else(|| missing("l00.output"))?;
    let reference = lens.layers_bf16.index_axis(Axis(0), 0);
    let device = tensor::to_f32(rows.view());
    let (metrics, positions, verdict) =
        tolerance::block(device.view(), reference, subject.config.head_dim, lens.positions.len())?;
    let numbers = vec![
        ("cosine", metrics.cosine),
        ("cosine_median", positions.median),
        ("max_abs", metrics.max_abs),
        ("mean_rel_l1", metrics.mean_rel_l1),
        ("rel_l2", metrics.rel_l2),
    ];
    Ok(Finding { verdict, numbers })
}

/// How the block is put together: Llama's kernel sequence, or the first that breaks it.
///
/// Errors: [`Error::Plan`].
pub fn composition(subject: &Subject) -> Result<Inheritance> {
    Ok(inheritance(&plan::prefill(&subject.config, 16, &PlanOptions::default())?))
}

/// A tap that the runner did not leave.
pub(super) fn missing(tap: &str) -> Error {
    Error::Plan { why: format!("the run left no tap {tap}") }
}
