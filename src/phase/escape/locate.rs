//! Where the lenses point.

use super::gates::Walked;
use crate::check::tolerance::at_most;
use crate::device::Arithmetic;
use crate::error::Result;
use crate::phase::{Bench, Subject, added, decode, kv_rows, positions};

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
    /// The first captured position of the long prompt one of whose rows is off.
    pub position: Option<u32>,
    /// The first decode step (from 0) after a prefill of one token whose logits are not a prefill's.
    pub step: Option<usize>,
}

/// A tap may be this many times as far as HF bf16's before it is pointed at.
const TAP: f64 = 4.0;

/// Share of HF's own distance between prefill and decode that a step of `ieee`, where the two are the same bits, may have.
const CLOSE: f64 = 0.1;

/// Looks at everything.
///
/// Errors: those of the runs.
pub(super) fn look(bench: &Bench, lens: &[String], walked: &Walked, place: &mut Place) -> Result<()> {
    let limit = added::limit(bench)?;
    for id in added::prompts(bench)? {
        let layers = added::layers(bench, &id)?;
        let first = layers.iter().find(|found| !at_most(found.over_first, limit)).map(|found| found.layer);
        place.layer = place.layer.into_iter().chain(first).min();
        let off = added::taps(bench, &id)?.into_iter().find(|(_, over)| !at_most(*over, TAP.max(limit)));
        place.tap = place.tap.take().or(off.map(|(name, _)| name.to_owned()));
    }
    let mut off = vec![];
    let kv_limit = kv_rows::limit(bench)?;
    for id in lens {
        let rows = kv_rows::rows(bench, id)?;
        off.extend(rows.into_iter().filter(|rows| !at_most(rows.over_own, kv_limit)));
    }
    let first = off.iter().map(|rows| (rows.layer, rows.head)).min();
    (place.kv_layer, place.kv_head) = (first.map(|f| f.0), first.map(|f| f.1));
    if let Some(id) = positions::longest(bench.subject(), lens)? {
        let limit = positions::limit(bench)?;
        let off =
            positions::rows(bench, &id)?.into_iter().find(|row| row.position > 0 && !at_most(row.over_own, limit));
        place.position = off.map(|row| row.position);
    }
    // A lens may look closer than the gate does.
    let most = match bench.arithmetic() {
        Arithmetic::Ieee => CLOSE * decode::hf_distance(bench)?.median,
        Arithmetic::Npu2 => decode::limits(bench)?.0,
    };
    place.step = walked.iter().find(|(_, distance)| !at_most(*distance, most)).map(|(p, _)| p - 1);
    Ok(())
}

/// The first sampled position of the longest lens prompt from `from` on.
///
/// Errors: those of the capture.
pub(super) fn sampled(subject: &Subject, from: usize) -> Result<Option<u32>> {
    let lens = subject.capture()?.lens_prompts().to_vec();
    let Some(id) = positions::longest(subject, &lens)? else { return Ok(None) };
    Ok(subject.lens(&id)?.positions.iter().copied().find(|&p| p as usize >= from))
}
