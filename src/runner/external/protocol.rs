//! The messages between phasegate and an engine in another process: one JSON object a line, each way, one answer to each
//! request. docs/external_runner.md says the same in prose, docs/external_runner.schema.json as a schema.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use half::bf16;
use ndarray::Array2;
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tensor;

/// Version of the protocol; both sides say it in `hello`.
pub const PROTOCOL: u32 = 1;

/// What phasegate asks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// Counts up; the answer repeats it.
    pub id: u64,
    #[serde(flatten)]
    pub ask: Ask,
}

/// The requests, by `op`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Ask {
    /// The first one: which model is wanted. The engine loads it before it answers.
    Hello { protocol: u32, model: String, checkpoint: PathBuf, vocab_size: usize, max_positions: usize },
    /// Forget everything, run the prompt, give the logits of its last position; keep layer outputs if `layers` is there.
    Prefill {
        ids: Vec<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        layers: Option<Rows>,
    },
    /// Run one token at `position` (positions before it: the prompt and the tokens fed since).
    DecodeStep { token: u32, position: usize },
    /// Write the KV cache's rows as they stand.
    Kv(Rows),
    /// Whether everything asked so far was carried out to its end.
    Status,
    /// The last one.
    Bye,
}

impl Ask {
    /// The value of `op`.
    pub fn op(&self) -> &'static str {
        match self {
            Ask::Hello { .. } => "hello",
            Ask::Prefill { .. } => "prefill",
            Ask::DecodeStep { .. } => "decode_step",
            Ask::Kv(_) => "kv",
            Ask::Status => "status",
            Ask::Bye => "bye",
        }
    }
}

/// Rows to be left in a safetensors file, one row a position, tensors bf16 or f32.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    pub positions: Vec<usize>,
    pub file: PathBuf,
}

/// What every answer holds beside its own fields.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Answer {
    pub id: u64,
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(flatten)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// The answer to `hello`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol: u32,
    /// The model that is loaded.
    pub model: String,
    /// Name and version of the engine, and where it runs.
    pub engine: String,
    pub vocab_size: usize,
    /// File name to sha256 of every weight file that was read; empty when the engine does not say.
    #[serde(default)]
    pub weights_sha256: BTreeMap<String, String>,
    /// `layers` and `kv`, of what is optional.
    #[serde(default)]
    pub capabilities: Vec<String>,
}

/// The answer to `prefill` and `decode_step`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Step {
    pub logits: Numbers,
}

/// The answer to `status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// `completed`, or anything else: then no number may be taken.
    pub state: String,
    #[serde(default)]
    pub detail: String,
}

/// The state of a run that may be judged.
pub const COMPLETED: &str = "completed";

/// A vector of numbers: little-endian bytes in base64.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// `f32` or `bf16`.
    pub dtype: String,
    pub base64: String,
}

impl Numbers {
    pub fn of(values: &[bf16]) -> Numbers {
        Numbers { dtype: "bf16".into(), base64: STANDARD.encode(tensor::bytes_of(values)) }
    }

    /// The values; f32 rounded to nearest even.
    ///
    /// Errors: what is wrong, as text.
    pub fn values(&self) -> std::result::Result<Vec<bf16>, String> {
        let bytes = STANDARD.decode(&self.base64).map_err(|e| format!("logits are no base64: {e}"))?;
        to_bf16(&self.dtype, &bytes)
    }
}

fn to_bf16(dtype: &str, bytes: &[u8]) -> std::result::Result<Vec<bf16>, String> {
    match dtype {
        "bf16" if bytes.len().is_multiple_of(2) => Ok(tensor::bf16_from_le_bytes(bytes)),
        "f32" if bytes.len().is_multiple_of(4) => {
            let value = |b: &[u8]| bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            Ok(bytes.chunks_exact(4).map(value).collect())
        }
        "bf16" | "f32" => Err(format!("{} bytes are no whole number of {dtype} values", bytes.len())),
        other => Err(format!("dtype {other:?}, expected f32 or bf16")),
    }
}

/// Tap name to rows.
pub type Taps = BTreeMap<String, Array2<bf16>>;

/// Reads the tensors an engine left: matrices of `rows` rows, bf16 or f32.
///
/// Errors: [`Error::Malformed`] naming file and tensor.
pub fn read_rows(path: &Path, rows: usize) -> Result<Taps> {
    let bad = |why: String| Error::malformed(path, why);
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
    let mut taps = Taps::new();
    for (name, view) in tensors.iter() {
        let &[found, width] = view.shape() else {
            return Err(bad(format!("tensor {name}: shape {:?}, expected [{rows}, width]", view.shape())));
        };
        if found != rows {
            return Err(bad(format!("tensor {name}: {found} rows, expected one for each of {rows} positions")));
        }
        let dtype = match view.dtype() {
            Dtype::BF16 => "bf16",
            Dtype::F32 => "f32",
            other => return Err(bad(format!("tensor {name}: dtype {other:?}, expected BF16 or F32"))),
        };
        let values = to_bf16(dtype, view.data()).map_err(|why| bad(format!("tensor {name}: {why}")))?;
        let matrix = Array2::from_shape_vec((rows, width), values).map_err(|e| bad(format!("tensor {name}: {e}")))?;
        taps.insert(name.to_owned(), matrix);
    }
    Ok(taps)
}

/// Writes what [`read_rows`] reads.
///
/// Errors: [`Error::Io`], [`Error::Malformed`].
pub fn write_rows(path: &Path, taps: &Taps) -> Result<()> {
    struct Matrix<'a>(&'a Array2<bf16>);
    impl View for Matrix<'_> {
        fn dtype(&self) -> Dtype {
            Dtype::BF16
        }
        fn shape(&self) -> &[usize] {
            self.0.shape()
        }
        fn data(&self) -> std::borrow::Cow<'_, [u8]> {
            tensor::bytes_of(self.0.as_slice().expect("taps are in standard layout")).into()
        }
        fn data_len(&self) -> usize {
            self.0.len() * 2
        }
    }
    let tensors = taps.iter().map(|(name, rows)| (name.clone(), Matrix(rows)));
    let bytes = safetensors::serialize(tensors, None).map_err(|e| Error::malformed(path, e.to_string()))?;
    std::fs::write(path, bytes).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_and_f32_is_rounded_to_nearest_even() {
        let values: Vec<bf16> = [1.0, -2.5, f32::INFINITY].map(bf16::from_f32).into();
        assert_eq!(Numbers::of(&values).values().unwrap(), values);
        let f32s: Vec<u8> = [1.0 + 1.0 / 256.0, 1.0 + 3.0f32 / 256.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let numbers = Numbers { dtype: "f32".into(), base64: STANDARD.encode(f32s) };
        assert_eq!(numbers.values().unwrap(), [1.0, 1.015625].map(bf16::from_f32));
    }

    #[test]
    fn what_is_no_number_says_so() {
        let of = |dtype: &str, base64: &str| Numbers { dtype: dtype.into(), base64: base64.into() }.values();
        assert!(of("f32", "????").unwrap_err().contains("no base64"));
        assert!(of("f32", "AAA=").unwrap_err().contains("no whole number"));
        assert!(of("f16", "AAA=").unwrap_err().contains("expected f32 or bf16"));
    }

    #[test]
    fn rows_are_checked_against_the_positions() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.safetensors");
        let taps = Taps::from([("l00.output".to_owned(), Array2::from_elem((2, 3), bf16::ONE))]);
        write_rows(&path, &taps).unwrap();
        assert_eq!(read_rows(&path, 2).unwrap(), taps);
        assert!(read_rows(&path, 3).unwrap_err().to_string().contains("expected one for each of 3 positions"));
        std::fs::write(&path, b"<html>").unwrap();
        assert!(read_rows(&path, 2).is_err());
    }

    #[test]
    fn requests_read_as_documented() {
        let ask = Ask::DecodeStep { token: 7, position: 3 };
        let text = serde_json::to_string(&Request { id: 2, ask }).unwrap();
        assert_eq!(text, r#"{"id":2,"op":"decode_step","token":7,"position":3}"#);
        let back: Request = serde_json::from_str(r#"{"id":3,"op":"kv","positions":[0],"file":"/x"}"#).unwrap();
        assert_eq!(back.ask, Ask::Kv(Rows { positions: vec![0], file: "/x".into() }));
    }
}
