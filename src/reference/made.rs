//! A small capture made on the fly, and the means to damage it.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use half::bf16;
use ndarray::Array2;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::lens::TAPS;
use super::{Identity, STEPS};
use crate::check::logits::log_sum_exp;
use crate::check::token_set::top_k;

const VOCAB: usize = 20;
const LAYERS: usize = 2;
const HIDDEN: usize = 8;
const KV_WIDTH: usize = 4;
const INTERMEDIATE: usize = 6;
const N_PROMPT: usize = 5;

/// Dtype, shape and bytes of one tensor.
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A sound capture of two prompts, one with a lens; every part may be changed before it is written.
pub struct Made {
    pub strings: HashMap<String, String>,
    pub tensors: BTreeMap<String, Stored>,
}

/// Hash-like text that differs by name.
pub fn hash(name: &str) -> String {
    let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(1_099_511_628_211).wrapping_add(u64::from(b)));
    format!("{seed:016x}").repeat(4)
}

fn hashes(names: &[&str]) -> BTreeMap<String, String> {
    names.iter().map(|name| ((*name).to_owned(), hash(name))).collect()
}

/// What a loaded checkpoint would have to be for this capture.
pub fn identity() -> Identity {
    Identity {
        weights_sha256: hashes(&["model.embed_tokens.weight", "model.norm.weight"]),
        files_sha256: hashes(&["config.json", "tokenizer.json"]),
        prompts_sha256: hashes(&["base", "instruct", "long"]),
    }
}

impl Made {
    pub fn new() -> Made {
        let mut made = Made { strings: strings(), tensors: BTreeMap::new() };
        for (seed, id) in ["base_00", "chat_00"].into_iter().enumerate() {
            made.prompt(id, seed as f32);
        }
        made.lens("base_00");
        made.ints("rope.positions", &[3], &[0, 1, 15]);
        made.values("rope.cos", Dtype::F32, &[3, 4], 0.1);
        made.values("rope.sin", Dtype::F32, &[3, 4], 0.2);
        made.ints("nll.ids", &[6], &[1, 2, 3, 4, 5, 6]);
        made.floats("nll.bf16", Dtype::F32, &[5], &[1.0, 2.0, 3.0, 2.0, 2.0]);
        made.floats("nll.f32", Dtype::F32, &[5], &[2.0; 5]);
        made
    }

    fn prompt(&mut self, id: &str, seed: f32) {
        let f32 = Array2::from_shape_fn((STEPS, VOCAB), |(i, j)| 6.0 * ((i * 31 + j * 17) as f32 + seed).sin());
        let prefill = f32.mapv(|x| bf16::from_f32(x * 0.999).to_f32());
        let bf16 = f32.mapv(|x| bf16::from_f32(x).to_f32());
        let ids = |logits: &Array2<f32>| -> Vec<i32> {
            logits.outer_iter().flat_map(|row| top_k(row, VOCAB).unwrap()).map(|id| id as i32).collect()
        };
        let (f32_ids, bf16_ids) = (ids(&f32), ids(&bf16));
        let at = |logits: &Array2<f32>, ids: &[i32]| -> Vec<f32> {
            ids.iter().enumerate().map(|(i, &id)| logits[[i / VOCAB, id as usize]]).collect()
        };
        let lse = |logits: &Array2<f32>| logits.outer_iter().map(|row| log_sum_exp(row) as f32).collect::<Vec<_>>();
        let name = |what: &str| format!("{id}.{what}");
        let top = [STEPS, VOCAB];
        self.ints(&name("ids"), &[N_PROMPT], &[1, 2, 3, 4, 5]);
        self.ints(&name("chosen"), &[STEPS], &bf16_ids.iter().step_by(VOCAB).copied().collect::<Vec<_>>());
        self.ints(&name("bf16.top_ids"), &top, &bf16_ids);
        self.floats(&name("bf16.top_logits"), Dtype::BF16, &top, &at(&bf16, &bf16_ids));
        self.floats(&name("bf16.lse"), Dtype::F32, &[STEPS], &lse(&bf16));
        self.ints(&name("f32.top_ids"), &top, &f32_ids);
        self.floats(&name("f32.top_logits"), Dtype::F32, &top, &at(&f32, &f32_ids));
        self.floats(&name("f32.lse"), Dtype::F32, &[STEPS], &lse(&f32));
        self.floats(&name("bf16.at_f32"), Dtype::BF16, &top, &at(&bf16, &f32_ids));
        self.floats(&name("bf16_prefill.at_f32"), Dtype::BF16, &top, &at(&prefill, &f32_ids));
        self.floats(&name("bf16_prefill.lse"), Dtype::F32, &[STEPS], &lse(&prefill));
        self.values(&name("rel_l2"), Dtype::F32, &[STEPS, 2], 0.01);
    }

    fn lens(&mut self, id: &str) {
        let name = |what: &str| format!("{id}.{what}");
        self.ints(&name("positions"), &[3], &[0, 2, 4]);
        self.ints(&name("tap_positions"), &[2], &[0, 4]);
        self.ints(&name("kv_positions"), &[4], &[0, 4, 5, 35]);
        for (side, dtype) in [("bf16", Dtype::BF16), ("f32", Dtype::F32)] {
            let name = |what: &str| format!("{id}.{side}.{what}");
            self.values(&name("layers"), dtype, &[LAYERS, 3, HIDDEN], 1.0);
            self.values(&name("final_norm"), dtype, &[3, HIDDEN], 0.5);
            for (rows, seed) in [("k", 2.0), ("v", 3.0)] {
                self.values(&name(rows), dtype, &[LAYERS, 4, KV_WIDTH], seed);
            }
            for tap in TAPS {
                let width = match tap {
                    "k" | "v" => KV_WIDTH,
                    "gate" | "up" | "silu_mul" => INTERMEDIATE,
                    _ => HIDDEN,
                };
                self.values(&name(&format!("tap.{tap}")), dtype, &[2, width], 4.0);
            }
        }
    }

    pub fn ints(&mut self, name: &str, shape: &[usize], values: &[i32]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensors.insert(name.to_owned(), Stored { dtype: Dtype::I32, shape: shape.to_vec(), bytes });
    }

    pub fn floats(&mut self, name: &str, dtype: Dtype, shape: &[usize], values: &[f32]) {
        let bytes = match dtype {
            Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        self.tensors.insert(name.to_owned(), Stored { dtype, shape: shape.to_vec(), bytes });
    }

    /// Some values, by a seed.
    pub fn values(&mut self, name: &str, dtype: Dtype, shape: &[usize], seed: f32) {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i as f32 + seed).cos()).collect();
        self.floats(name, dtype, shape, &values);
    }

    /// Replaces one element of an i32 tensor.
    pub fn set_int(&mut self, name: &str, at: usize, value: i32) {
        self.tensors.get_mut(name).unwrap().bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
    }

    /// Replaces one element of an f32 tensor.
    pub fn set_float(&mut self, name: &str, at: usize, value: f32) {
        self.tensors.get_mut(name).unwrap().bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
    }

    pub fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, t)| {
            (name.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("bytes fit the shape"))
        });
        safetensors::serialize(views, Some(self.strings.clone())).unwrap()
    }

    pub fn write(&self) -> Written {
        Written::of(&self.bytes())
    }
}

/// A file in a folder of its own, removed with it.
pub struct Written {
    _folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl Written {
    pub fn of(bytes: &[u8]) -> Written {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reference.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Written { _folder: folder, path }
    }
}

fn strings() -> HashMap<String, String> {
    let identity = identity();
    let prompt =
        |id: &str, set: &str| json!({"id": id, "set": set, "text": "a", "rendered": "a", "n_prompt": N_PROMPT});
    let values = [
        (
            "provenance",
            json!({"transformers": "5.24.0", "torch": "2.9.1", "python": "3.11", "tokenizers": "0.23", "threads": 2,
                   "attn_implementation": "sdpa", "dtype": "bfloat16", "cpu": "any"}),
        ),
        ("weights_sha256", json!(identity.weights_sha256)),
        ("files_sha256", json!(identity.files_sha256)),
        ("prompts_sha256", json!(identity.prompts_sha256)),
        (
            "resolved_config",
            json!({"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "intermediate_size": INTERMEDIATE, "max_position_embeddings": 64}),
        ),
        ("stop_ids", json!([0])),
        ("prompts", json!([prompt("base_00", "base"), prompt("chat_00", "chat")])),
        ("lens", json!(["base_00"])),
    ];
    let texts = [("schema", super::SCHEMA), ("model", "made")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    values.into_iter().map(|(k, v)| (k.to_owned(), v.to_string())).chain(texts).collect()
}

/// Full logits of one side from its top ids: here they are the whole vocabulary.
pub fn full_logits(top: &super::Top) -> Array2<f32> {
    let mut full = Array2::zeros((STEPS, VOCAB));
    for ((step, k), &id) in top.ids.indexed_iter() {
        full[[step, id as usize]] = top.logits[[step, k]];
    }
    full
}
