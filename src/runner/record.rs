//! What one prompt's run leaves behind: logits of every step, taps, KV rows, device status and timings.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use ndarray::Array2;
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};

use crate::device::Counters;
use crate::error::{Error, Result};
use crate::tensor;

/// Wall time of the parts of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    /// Units: microseconds.
    pub prefill_us: u64,
    /// Units: microseconds, one per decode step.
    pub decode_us: Vec<u64>,
    /// Sequences that each decode step took one token further, in that time.
    pub at_once: usize,
}

impl Default for StepTiming {
    fn default() -> StepTiming {
        StepTiming { prefill_us: 0, decode_us: vec![], at_once: 1 }
    }
}

/// A completed run of one prompt. There is no record of a run that did not complete.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub prompt_ids: Vec<u32>,
    /// Token fed at each decode step (the teacher's, or the run's own); `logits` row `i` predicts token `i`.
    pub fed: Vec<u32>,
    /// Shapes: `[steps, vocab_size]`.
    pub logits: Array2<bf16>,
    /// Tap name to rows at the requested positions: `l07.output`, `l00.q`, `final_norm`, `l03.k_cache` ...
    pub taps: BTreeMap<String, Array2<bf16>>,
    pub timing: StepTiming,
    /// What the device did for this record.
    pub counters: Counters,
    /// Label of the device that made it.
    pub device: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    prompt_ids: Vec<u32>,
    fed: Vec<u32>,
    timing: StepTiming,
    counters: Counters,
    device: String,
}

struct Rows<'a>(&'a Array2<bf16>);

impl View for Rows<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }
    fn shape(&self) -> &[usize] {
        self.0.shape()
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        tensor::bytes_of(self.0.as_slice().expect("records are in standard layout")).into()
    }
    fn data_len(&self) -> usize {
        self.0.len() * 2
    }
}

const HEADER: &str = "phasegate.record";

impl Record {
    /// Serialises into a safetensors image.
    ///
    /// Errors: none that a sound record can cause.
    pub fn to_bytes(&self, path: &Path) -> Result<Vec<u8>> {
        let header = Header {
            prompt_ids: self.prompt_ids.clone(),
            fed: self.fed.clone(),
            timing: self.timing.clone(),
            counters: self.counters,
            device: self.device.clone(),
        };
        let header = serde_json::to_string(&header).map_err(|e| Error::malformed(path, e.to_string()))?;
        let tensors = std::iter::once(("logits".to_owned(), Rows(&self.logits)))
            .chain(self.taps.iter().map(|(name, rows)| (format!("tap.{name}"), Rows(rows))));
        safetensors::serialize(tensors, Some([(HEADER.to_owned(), header)].into()))
            .map_err(|e| Error::malformed(path, e.to_string()))
    }

    /// Reads what [`Record::to_bytes`] wrote.
    ///
    /// Errors: [`Error::Malformed`] naming `path`.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Record> {
        let bad = |why: String| Error::malformed(path, why);
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| bad(e.to_string()))?;
        let header = metadata.metadata().as_ref().and_then(|m| m.get(HEADER)).ok_or_else(|| bad("no header".into()))?;
        let header: Header = serde_json::from_str(header).map_err(|e| bad(e.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| bad(e.to_string()))?;
        let mut logits = None;
        let mut taps = BTreeMap::new();
        for (name, view) in tensors.iter() {
            let (&[rows, cols], Dtype::BF16) = (view.shape(), view.dtype()) else {
                return Err(bad(format!("tensor {name} is not a bf16 matrix")));
            };
            let rows = Array2::from_shape_vec((rows, cols), tensor::bf16_from_le_bytes(view.data()))
                .map_err(|e| bad(format!("tensor {name}: {e}")))?;
            match name.strip_prefix("tap.") {
                Some(tap) => drop(taps.insert(tap.to_owned(), rows)),
                None => logits = Some(rows),
            }
        }
        let logits = logits.ok_or_else(|| bad("no logits".into()))?;
        let Header { prompt_ids, fed, timing, counters, device } = header;
        Ok(Record { prompt_ids, fed, logits, taps, timing, counters, device })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_disk() {
        let record = Record {
            prompt_ids: vec![1, 2],
            fed: vec![3],
            logits: Array2::from_elem((2, 3), bf16::from_f32(0.5)),
            taps: [("l00.output".to_owned(), Array2::from_elem((1, 4), bf16::NAN))].into(),
            timing: StepTiming { prefill_us: 5, decode_us: vec![6], at_once: 2 },
            counters: Counters { dispatches: 7, ..Counters::default() },
            device: "emu".into(),
        };
        let path = Path::new("record");
        let back = Record::from_bytes(&record.to_bytes(path).unwrap(), path).unwrap();
        assert_eq!(back.logits, record.logits);
        assert_eq!((back.timing, back.counters, back.fed), (record.timing, record.counters, record.fed));
        assert!(back.taps["l00.output"].iter().all(|v| v.is_nan()));
    }

    #[test]
    fn garbage_is_an_error_not_a_panic() {
        assert!(Record::from_bytes(b"<html>", Path::new("x")).is_err());
    }
}
