//! Phase 3's question about the KV cache: are the rows of prefill and of decode HF's, layer by layer, head by head?

use ndarray::{ArrayView2, Axis, s};

use super::{Bench, Finding, limits};
use crate::check::floor::Three;
use crate::check::tolerance::at_most;
use crate::check::{Extent, Verdict};
use crate::error::Result;
use crate::reference::Lens;
use crate::tensor;

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    K,
    V,
}

/// One head's rows of one layer.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Rows {
    pub layer: usize,
    pub part: Part,
    pub head: usize,
    /// Whether decode wrote them.
    pub decode: bool,
    /// Distance to HF f32 over HF bf16's own.
    pub over_own: f64,
}

/// The most that a head's rows may be, over HF bf16's own distance to HF f32.
///
/// Errors: as [`limits::required`].
pub fn limit(bench: &Bench) -> Result<f64> {
    limits::required(bench, limits::Gate::Kv)
}

/// Every head of every layer of one lens prompt, rows of prefill and of decode apart.
///
/// Errors: those of the run and the capture.
pub fn rows(bench: &Bench, prompt: &str) -> Result<Vec<Rows>> {
    let (lens, record) = (bench.subject().lens(prompt)?, bench.record(prompt)?);
    let len = bench.subject().capture()?.prompt(prompt)?.ids.len() as u32;
    let border = lens.kv_positions.iter().filter(|&&p| p < len).count();
    let mut found = vec![];
    for layer in 0..lens.k_f32.len_of(Axis(0)) {
        for part in [Part::K, Part::V] {
            let name = format!("l{layer:02}.{}", if part == Part::K { "k_cache" } else { "v_cache" });
            let Some(kept) = record.taps.get(&name) else { continue };
            let device = tensor::to_f32(kept.view());
            let (bf16, f32) = sides(&lens, part, layer);
            if device.dim() != f32.dim() {
                continue;
            }
            for (decode, range) in [(false, 0..border), (true, border..f32.nrows())] {
                if range.is_empty() {
                    continue;
                }
                let cut = s![range, ..];
                let three = Three { device: device.slice(cut), bf16: bf16.slice(cut), f32: f32.slice(cut) };
                let heads = three.heads_over_own(bench.subject().config.head_dim)?;
                let row = |(head, over_own)| Rows { layer, part, head, decode, over_own };
                found.extend(heads.into_iter().enumerate().map(row));
            }
        }
    }
    Ok(found)
}

fn sides(lens: &Lens, part: Part, layer: usize) -> (ArrayView2<'_, f32>, ArrayView2<'_, f32>) {
    let (bf16, f32) = match part {
        Part::K => (&lens.k_bf16, &lens.k_f32),
        Part::V => (&lens.v_bf16, &lens.v_f32),
    };
    (bf16.index_axis(Axis(0), layer), f32.index_axis(Axis(0), layer))
}

/// Judges these lens prompts.
///
/// Errors: as [`rows`].
pub fn judge(bench: &Bench, prompts: &[String]) -> Result<Finding> {
    let (limit, config) = (limit(bench)?, &bench.subject().config);
    let (mut failures, mut compared, mut worst) = (vec![], 0, 0f64);
    for id in prompts {
        for found in rows(bench, id)? {
            compared += 1;
            worst = if found.over_own > worst || found.over_own.is_nan() { found.over_own } else { worst };
            if !at_most(found.over_own, limit) {
                let Rows { layer, part, head, decode, over_own } = found;
                let half = if decode { "decode" } else { "prefill" };
                failures.push(format!(
                    "{id}: layer {layer}, {part:?} of head {head}, rows of {half}: {over_own:.2} times HF bf16's own distance to HF f32, at most {limit}"
                ));
            }
        }
    }
    // Two parts, two halves.
    let wanted = (prompts.len() * config.num_hidden_layers * config.num_key_value_heads * 4) as u64;
    let extent = Extent::new().require("heads of the KV cache", wanted).compare("heads of the KV cache", compared);
    Ok(Finding { verdict: Verdict::judge(failures, extent), numbers: vec![("kv_over_own_max", worst)] })
}
