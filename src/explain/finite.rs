//! Whether the model itself computes with numbers: where a sound run holds a NaN, nothing can be told from it, and every
//! fault looks like the run in question. Judges no run but the sound one.

use super::lab::{Lab, Script};
use crate::error::Result;
use crate::runner::Sound;

/// Why a sound run of this script is none of numbers, if it is not: the tensor that holds a NaN or an infinity, or, where
/// none does, the first launch that leaves one.
///
/// Errors: those of the run and of reading the weights.
pub fn not_finite(lab: &Lab, device: &str, script: &Script) -> Result<Option<String>> {
    let trace = lab.trace(device, script, &Sound)?;
    let Some(first) = trace.segments.iter().find(|s| s.values.iter().any(|x| !x.is_finite())) else { return Ok(None) };
    let found = in_weights(lab)?;
    Ok(Some(found.unwrap_or_else(|| {
        format!("a sound run leaves bf16's range at {} of {:?}, and every weight is finite", first.name, first.stage)
    })))
}

/// The first tensor of the model that holds a NaN or an infinity.
fn in_weights(lab: &Lab) -> Result<Option<String>> {
    for spec in lab.config.tensors() {
        let values = lab.weights.bf16(&spec.name)?;
        let Some(at) = values.iter().position(|x| !x.is_finite()) else { continue };
        let what = if values[at].is_nan() { "a NaN" } else { "an infinity" };
        let place = match spec.shape[..] {
            [_, columns] => format!("row {}, column {}", at / columns.max(1), at % columns.max(1)),
            _ => format!("element {at}"),
        };
        return Ok(Some(format!("{} holds {what} (first at {place})", spec.name)));
    }
    Ok(None)
}
