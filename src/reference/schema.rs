//! Which tensors a capture must hold, with dtype and shape, and which values its ids and positions may have.

use std::collections::BTreeSet;

use safetensors::tensor::Dtype;

use super::lens::TAPS;
use super::metadata::{About, CapturedPrompt, Sizes};
use super::tensors::Tensors;
use super::{STEPS, TOP_IDS};
use crate::error::Result;

/// One tensor that must be there.
struct Expected {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
}

/// Every tensor is there with its dtype and shape, and none is left over.
///
/// Errors: [`crate::error::Error::Tensor`] naming the first that is not.
pub(super) fn check_shapes(stored: &Tensors, about: &About) -> Result<()> {
    let mut known = BTreeSet::new();
    for Expected { name, dtype, shape } in expected(stored, about)? {
        let info = stored.info(&name)?;
        if (info.dtype, &info.shape) != (dtype, &shape) {
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(stored.wrong(&name, found, format!("{dtype:?} {shape:?}")));
        }
        known.insert(name);
    }
    match stored.names().into_iter().find(|name| !known.contains(name)) {
        Some(name) => Err(stored.wrong(&name, "the tensor", "none of this name in the schema")),
        None => Ok(()),
    }
}

fn expected(stored: &Tensors, about: &About) -> Result<Vec<Expected>> {
    let mut list = List { stored, sizes: about.sizes, tensors: Vec::new() };
    for prompt in &about.prompts {
        list.prompt(prompt);
        if about.lens.contains(&prompt.id) {
            list.lens(&prompt.id)?;
        }
    }
    let positions = list.own_length("rope.positions")?;
    for table in ["rope.cos", "rope.sin"] {
        list.push(table, Dtype::F32, &[positions, about.sizes.head_dim]);
    }
    let tokens = list.own_length("nll.ids")?;
    for side in ["nll.bf16", "nll.f32"] {
        list.push(side, Dtype::F32, &[tokens - 1]);
    }
    Ok(list.tensors)
}

struct List<'a> {
    stored: &'a Tensors,
    sizes: Sizes,
    tensors: Vec<Expected>,
}

impl List<'_> {
    fn push(&mut self, name: impl Into<String>, dtype: Dtype, shape: &[usize]) {
        self.tensors.push(Expected { name: name.into(), dtype, shape: shape.to_vec() });
    }

    /// A one-dimensional i32 tensor whose length the capture chose; at least one.
    fn own_length(&mut self, name: &str) -> Result<usize> {
        let shape = self.stored.info(name)?.shape.clone();
        let Some(&length) = shape.first().filter(|&&length| length > 0 && shape.len() == 1) else {
            return Err(self.stored.wrong(name, format!("shape {shape:?}"), "one dimension, not empty"));
        };
        self.push(name, Dtype::I32, &[length]);
        Ok(length)
    }

    fn prompt(&mut self, prompt: &CapturedPrompt) {
        let (k, id) = (TOP_IDS.min(self.sizes.vocab_size), &prompt.id);
        self.push(format!("{id}.ids"), Dtype::I32, &[prompt.n_prompt]);
        self.push(format!("{id}.chosen"), Dtype::I32, &[STEPS]);
        for (side, dtype) in [("bf16", Dtype::BF16), ("f32", Dtype::F32)] {
            self.push(format!("{id}.{side}.top_ids"), Dtype::I32, &[STEPS, k]);
            self.push(format!("{id}.{side}.top_logits"), dtype, &[STEPS, k]);
        }
        for side in ["bf16", "bf16_prefill"] {
            self.push(format!("{id}.{side}.at_f32"), Dtype::BF16, &[STEPS, k]);
        }
        for side in ["bf16", "bf16_prefill", "f32"] {
            self.push(format!("{id}.{side}.lse"), Dtype::F32, &[STEPS]);
        }
        self.push(format!("{id}.rel_l2"), Dtype::F32, &[STEPS, 2]);
    }

    fn lens(&mut self, id: &str) -> Result<()> {
        let Sizes { num_hidden_layers: layers, hidden_size, kv_width, .. } = self.sizes;
        let n = self.own_length(&format!("{id}.positions"))?;
        let t = self.own_length(&format!("{id}.tap_positions"))?;
        let m = self.own_length(&format!("{id}.kv_positions"))?;
        for (side, dtype) in [("bf16", Dtype::BF16), ("f32", Dtype::F32)] {
            self.push(format!("{id}.{side}.layers"), dtype, &[layers, n, hidden_size]);
            self.push(format!("{id}.{side}.final_norm"), dtype, &[n, hidden_size]);
            for rows in ["k", "v"] {
                self.push(format!("{id}.{side}.{rows}"), dtype, &[layers, m, kv_width]);
            }
            for tap in TAPS {
                self.push(format!("{id}.{side}.tap.{tap}"), dtype, &[t, self.tap_width(tap)]);
            }
        }
        Ok(())
    }

    fn tap_width(&self, tap: &str) -> usize {
        match tap {
            "q" | "attn_context" => self.sizes.q_width,
            "k" | "v" => self.sizes.kv_width,
            "gate" | "up" | "silu_mul" => self.sizes.intermediate_size,
            _ => self.sizes.hidden_size,
        }
    }
}

/// Every token id is in the vocabulary, every position where it may be.
///
/// Errors: [`crate::error::Error::Tensor`] naming the first that is not.
pub(super) fn check_ids(tensors: &Tensors, about: &About) -> Result<()> {
    let vocab = about.sizes.vocab_size as u32;
    let token_ids = |name: &str| match tensors.ids(name)?.into_iter().find(|&id| id >= vocab) {
        Some(id) => Err(tensors.wrong(name, format!("id {id}"), format!("ids below {vocab}"))),
        None => Ok(()),
    };
    for CapturedPrompt { id, .. } in &about.prompts {
        for name in ["ids", "chosen", "bf16.top_ids", "f32.top_ids"] {
            token_ids(&format!("{id}.{name}"))?;
        }
    }
    token_ids("nll.ids")?;
    let end = about.sizes.max_position_embeddings;
    ascending(tensors, "rope.positions", end)?;
    let lens = about.prompts.iter().filter(|p| about.lens.contains(&p.id));
    lens.into_iter().try_for_each(|prompt| check_lens_positions(tensors, prompt))
}

fn check_lens_positions(tensors: &Tensors, prompt: &CapturedPrompt) -> Result<()> {
    let CapturedPrompt { id, n_prompt, .. } = prompt;
    let name = |what: &str| format!("{id}.{what}");
    let positions = ascending(tensors, &name("positions"), *n_prompt)?;
    let last = *n_prompt as u32 - 1;
    if (positions.first(), positions.last()) != (Some(&0), Some(&last)) {
        let found = format!("{positions:?}");
        return Err(tensors.wrong(&name("positions"), found, format!("0 and {last} among them")));
    }
    let taps = ascending(tensors, &name("tap_positions"), *n_prompt)?;
    if let Some(position) = taps.iter().find(|p| !positions.contains(p)) {
        return Err(tensors.wrong(&name("tap_positions"), position.to_string(), "one of the positions"));
    }
    ascending(tensors, &name("kv_positions"), n_prompt + STEPS - 1).map(|_| ())
}

fn ascending(tensors: &Tensors, name: &str, end: usize) -> Result<Vec<u32>> {
    let positions = tensors.ids(name)?;
    if !positions.is_sorted_by(|a, b| a < b) || positions.last().is_some_and(|&p| p as usize >= end) {
        return Err(tensors.wrong(name, format!("{positions:?}"), format!("ascending positions below {end}")));
    }
    Ok(positions)
}
