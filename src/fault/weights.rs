//! Tensors other than the checkpoint's, laid over it in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use half::bf16;

use super::At;
use crate::error::Result;
use crate::model::{ModelConfig, Weights};
use crate::random::Random;

/// Canonical name to content.
pub type Changes = BTreeMap<String, Vec<bf16>>;

/// The sound weights under the changed ones.
pub(super) struct Overlay {
    pub(super) sound: Arc<dyn Weights>,
    pub(super) changes: Changes,
}

impl Weights for Overlay {
    fn bf16(&self, name: &str) -> Result<Cow<'_, [bf16]>> {
        match self.changes.get(name) {
            Some(changed) => Ok(Cow::Borrowed(changed)),
            None => self.sound.bf16(name),
        }
    }
}

/// The layer of an instance that must have one.
pub(super) fn layer(at: &At) -> usize {
    at.layer.unwrap_or(0)
}

pub(super) fn tensor(at: &At, part: &str) -> String {
    format!("model.layers.{}.{part}", layer(at))
}

/// One tensor of the instance's layer, changed.
pub(super) fn change(
    weights: &dyn Weights,
    at: &At,
    part: &str,
    alter: impl FnOnce(&mut Vec<bf16>),
) -> Result<Changes> {
    change_named(weights, tensor(at, part), alter)
}

pub(super) fn change_named(weights: &dyn Weights, name: String, alter: impl FnOnce(&mut Vec<bf16>)) -> Result<Changes> {
    let mut content = weights.bf16(&name)?.into_owned();
    alter(&mut content);
    Ok([(name, content)].into())
}

/// Every tensor of layer `to` as layer `from` has it.
pub(super) fn copy_layer(
    weights: &dyn Weights,
    config: &ModelConfig,
    from: usize,
    to: usize,
    only: &str,
) -> Result<Changes> {
    let mut changes = Changes::new();
    for spec in config.tensors().iter().filter(|spec| spec.layer == Some(from)) {
        let part = spec.name.trim_start_matches(&format!("model.layers.{from}."));
        if part.starts_with(only) {
            changes.insert(format!("model.layers.{to}.{part}"), weights.bf16(&spec.name)?.into_owned());
        }
    }
    Ok(changes)
}

/// Two tensors of a layer in each other's place, as far as the shorter goes.
pub(super) fn exchange(weights: &dyn Weights, at: &At, one: &str, other: &str) -> Result<Changes> {
    let (one, other) = (tensor(at, one), tensor(at, other));
    let (mut a, mut b) = (weights.bf16(&one)?.into_owned(), weights.bf16(&other)?.into_owned());
    let len = a.len().min(b.len());
    a[..len].swap_with_slice(&mut b[..len]);
    Ok([(one, a), (other, b)].into())
}

/// Row-major `[rows, cols]` read as if it were `[cols, rows]`.
pub(super) fn transpose(x: &mut Vec<bf16>, cols: usize) {
    let rows = x.len() / cols;
    *x = (0..x.len()).map(|i| x[i % rows * cols + i / rows]).collect();
}

/// Noise of the same spread.
pub(super) fn noise_like(x: &mut [bf16], seed: u64) {
    let mut random = Random::new(seed);
    let spread = (x.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / x.len().max(1) as f64).sqrt();
    x.iter_mut().for_each(|x| *x = bf16::from_f64(random.normal() * spread));
}

/// Keeps `bits` of the seven mantissa bits.
pub(super) fn truncate(x: &mut [bf16], bits: u32) {
    let mask = !0u16 << 7u32.saturating_sub(bits);
    x.iter_mut().for_each(|x| *x = bf16::from_bits(x.to_bits() & mask));
}
