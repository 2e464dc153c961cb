//! Phase 3's question about positions: does the long prompt hold at every border that RoPE scaling, KV blocks and masks have?
//!
//! The longest lens prompt's captured rows (both ends, both sides of 16, 64, 128, 256, 512) of every layer, row by row: a bad
//! position does not hide among good ones.

use ndarray::Axis;

use super::{Bench, Finding, Subject, limits};
use crate::check::floor::Three;
use crate::check::tolerance::at_most;
use crate::check::{Extent, Verdict};
use crate::error::Result;
use crate::tensor;

/// Positions that must be among them, as far as the prompt has them.
const BORDERS: [u32; 11] = [0, 1, 15, 16, 17, 127, 128, 129, 511, 512, 600];

/// One row of one layer.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Row {
    pub position: u32,
    pub layer: usize,
    /// Distance to HF f32 over HF bf16's own, or over the median of its rows where that is larger.
    pub over_own: f64,
}

/// The most that a row may be.
///
/// Errors: as [`limits::required`].
pub fn limit(bench: &Bench) -> Result<f64> {
    limits::required(bench, limits::Gate::Positions)
}

/// The longest prompt among these.
///
/// Errors: those of the capture.
pub fn longest(subject: &Subject, lens: &[String]) -> Result<Option<String>> {
    let prompts = subject.capture()?.prompts().iter().filter(|p| lens.contains(&p.id));
    Ok(prompts.max_by_key(|p| p.n_prompt).map(|p| p.id.clone()))
}

/// Every captured row, by position, then by layer; the last layer's behind the final norm.
///
/// Errors: those of the run and the capture.
pub fn rows(bench: &Bench, prompt: &str) -> Result<Vec<Row>> {
    let (lens, record) = (bench.subject().lens(prompt)?, bench.record(prompt)?);
    let layers = bench.subject().config.num_hidden_layers;
    let mut found = vec![];
    for layer in 0..layers {
        let last = layer + 1 == layers;
        let tap = if last { "final_norm".to_owned() } else { format!("l{layer:02}.output") };
        let Some(kept) = record.taps.get(&tap) else { continue };
        let device = tensor::to_f32(kept.view());
        let (bf16, f32) = match last {
            true => (lens.final_norm_bf16.view(), lens.final_norm_f32.view()),
            false => (lens.layers_bf16.index_axis(Axis(0), layer), lens.layers_f32.index_axis(Axis(0), layer)),
        };
        if device.dim() != f32.dim() {
            continue;
        }
        let over = Three { device: device.view(), bf16, f32 }.rows_over_own()?;
        let row = |(&position, over_own)| Row { position, layer, over_own };
        found.extend(lens.positions.iter().zip(over).map(row));
    }
    found.sort_by_key(|row| (row.position, row.layer));
    Ok(found)
}

/// Judges the longest lens prompt.
///
/// Errors: as [`rows`].
pub fn judge(bench: &Bench, lens: &[String]) -> Result<Finding> {
    let Some(id) = longest(bench.subject(), lens)? else { return Ok(Finding::of(Verdict::not_run("no lens prompt"))) };
    let (limit, rows) = (limit(bench)?, rows(bench, &id)?);
    // Position 0 carries a massive activation in many models, of which one bf16 step is more than all else: it must be a
    // number, no more.
    let most = |row: &&Row| if row.position == 0 { f64::MAX } else { limit };
    let far = rows.iter().filter(|row| !at_most(row.over_own, most(row)));
    let mut failures: Vec<String> = far
        .map(|Row { position, layer, over_own }| {
            format!("{id}: position {position}, layer {layer}: {over_own:.2} times HF bf16's own distance to HF f32, at most {limit}")
        })
        .collect();
    let len = bench.subject().capture()?.prompt(&id)?.ids.len() as u32;
    // The last border stands for any position beyond 600.
    let held = |border: &u32| rows.iter().any(|row| row.position == *border || *border == 600 && row.position >= 600);
    let missing = BORDERS.iter().filter(|border| **border < len && !held(border));
    failures.extend(missing.map(|border| format!("{id}: the capture holds no row at {border}")));
    let worst = rows.iter().filter(|row| row.position > 0).map(|row| row.over_own).fold(0.0, f64::max);
    let wanted = bench.subject().config.num_hidden_layers as u64 * bench.subject().lens(&id)?.positions.len() as u64;
    let extent = Extent::new().require("rows", wanted).compare("rows", rows.len() as u64);
    Ok(Finding { verdict: Verdict::judge(failures, extent), numbers: vec![("rows_over_own_max", worst)] })
}
