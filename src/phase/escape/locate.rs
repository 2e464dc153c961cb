//! Where the lenses point.

use crate::check::floor::Three;
use crate::check::tolerance::at_most;
use crate::error::Result;
use crate::phase::{Bench, Subject, added, decode, kv_rows, phase3};
use crate::tensor;

/// What the lenses say of one run: the first of each that is off.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Place {
    /// The first layer that adds error of its own.
    pub layer: Option<usize>,
    /// The kernel and shape that phase 1 fails.
    pub kernel: Option<String>,
    /// The first tap of layer 0 that is off.
    pub tap: Option<String>,
    /// The first layer, and its first head, whose cached rows are off.
    pub kv_layer: Option<usize>,
    pub kv_head: Option<usize>,
    /// The first sampled position of the long prompt whose final row is off.
    pub position: Option<u32>,
    /// The first decode step (from 0) after a prefill of one token whose logits are not a prefill's.
    pub step: Option<usize>,
}

/// A single row or tap may be this many times as far as HF bf16's.
///
/// A row has a few hundred values and no average over rows: its own ratio scatters more than a layer's.
const ROW: f64 = 4.0;

/// Looks at everything.
///
/// Errors: those of the runs.
pub(super) fn look(bench: &Bench, lens: &[String], place: &mut Place) -> Result<()> {
    let arithmetic = phase3::arithmetic(bench);
    let limit = added::limit(arithmetic);
    for id in added::prompts(bench)? {
        let layers = added::layers(bench, &id)?;
        let first = layers.iter().find(|found| !at_most(found.over_own, limit)).map(|found| found.layer);
        place.layer = place.layer.into_iter().chain(first).min();
        let off = added::taps(bench, &id)?.into_iter().find(|(_, over)| !at_most(*over, ROW.max(limit)));
        place.tap = place.tap.take().or(off.map(|(name, _)| name.to_owned()));
    }
    let mut off = vec![];
    for id in lens {
        let rows = kv_rows::rows(bench, id)?;
        off.extend(rows.into_iter().filter(|rows| !at_most(rows.over_own, kv_rows::limit(arithmetic))));
    }
    let first = off.iter().map(|rows| (rows.layer, rows.head)).min();
    (place.kv_layer, place.kv_head) = (first.map(|f| f.0), first.map(|f| f.1));
    place.position = position(bench, lens, ROW.max(limit))?;
    let (most, _) = decode::limits(bench)?;
    let walked = decode::walk(bench, super::gates::WALK)?;
    place.step = walked.iter().find(|(_, distance)| !at_most(*distance, most)).map(|(p, _)| p - 1);
    Ok(())
}

/// The first sampled position of the longest lens prompt whose row behind the final norm is off.
fn position(bench: &Bench, lens: &[String], limit: f64) -> Result<Option<u32>> {
    let Some(id) = longest(bench.subject(), lens)? else { return Ok(None) };
    let (lens, record) = (bench.subject().lens(&id)?, bench.record(&id)?);
    let Some(rows) = record.taps.get("final_norm") else { return Ok(None) };
    let device = tensor::to_f32(rows.view());
    if device.dim() != lens.final_norm_f32.dim() {
        return Ok(None);
    }
    let (bf16, f32) = (lens.final_norm_bf16.view(), lens.final_norm_f32.view());
    let rows = Three { device: device.view(), bf16, f32 }.rows_over_own()?;
    Ok(rows.iter().zip(&lens.positions).find(|(over, _)| !at_most(**over, limit)).map(|(_, &p)| p))
}

fn longest(subject: &Subject, lens: &[String]) -> Result<Option<String>> {
    let prompts = subject.capture()?.prompts().iter().filter(|p| lens.contains(&p.id));
    Ok(prompts.max_by_key(|p| p.n_prompt).map(|p| p.id.clone()))
}

/// The first sampled position of the longest lens prompt from `from` on.
///
/// Errors: those of the capture.
pub(super) fn sampled(subject: &Subject, from: usize) -> Result<Option<u32>> {
    let lens = subject.capture()?.lens_prompts().to_vec();
    let Some(id) = longest(subject, &lens)? else { return Ok(None) };
    Ok(subject.lens(&id)?.positions.iter().copied().find(|&p| p as usize >= from))
}
