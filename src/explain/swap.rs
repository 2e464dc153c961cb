//! Launches answered by the f32 oracle in place of the device, and each launch held against the oracle on its own inputs.
//!
//! What comes from the checkpoint or the config (weights, RoPE rows, the cache's rows) is taken from there and not from the
//! device, so that a wrong upload is the launch's fault and not its input.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use half::bf16;

use super::trace::Stage;
use crate::error::Result;
use crate::kernel::oracle::{self, Sample};
use crate::kernel::{Epsilon, Kernel};
use crate::model::{ModelConfig, RopeTable, Weights};
use crate::plan::{self, BufferId, HostOp, Launch, Op, Source};
use crate::runner::{Hook, StepContext};

/// Squared error against the oracle, and the oracle's own square.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Off {
    error: f64,
    size: f64,
}

impl Off {
    fn add(&mut self, found: &[bf16], right: &[f32]) {
        for (found, &right) in found.iter().zip(right) {
            self.error += (found.to_f64() - f64::from(right)).powi(2);
            self.size += f64::from(right).powi(2);
        }
    }

    /// Relative L2; not a number when the launch left one.
    pub(super) fn rel_l2(self) -> f64 {
        if self.size == 0.0 { self.error.sqrt() } else { (self.error / self.size).sqrt() }
    }
}

/// Answers for the launches whose names it holds, and looks at all of `layers`.
pub(super) struct Swapper {
    config: ModelConfig,
    weights: Arc<dyn Weights>,
    rope: RopeTable,
    /// Call sites (`l01.q_proj`, `l01.kv_append`, `rope_row`), of prefill and decode alike.
    pub(super) swapped: BTreeSet<String>,
    /// The layers whose launches are held against the oracle; none: every one.
    pub(super) layer: Option<usize>,
    pub(super) off: HashMap<(Stage, String), Off>,
    /// Token ids of the run, for the embedding.
    pub(super) ids: Vec<u32>,
    inputs: Option<Vec<Vec<bf16>>>,
    /// The cache as the launches' own K and V rows make it.
    cache: HashMap<usize, (Vec<bf16>, Vec<bf16>)>,
}

impl Swapper {
    pub(super) fn new(config: &ModelConfig, weights: Arc<dyn Weights>, layer: Option<usize>) -> Swapper {
        let (rope, config) = (RopeTable::new(config), config.clone());
        let (swapped, off, cache) = Default::default();
        Swapper { config, weights, rope, swapped, layer, off, ids: vec![], inputs: None, cache }
    }

    fn looks_at(&self, cx: &StepContext<'_>) -> bool {
        let there = cx.step.layer.is_none() || self.layer.is_none() || self.layer == cx.step.layer;
        there || self.swapped.iter().any(|name| cx.step.is(name) || *name == cx.step.name)
    }

    fn note(&mut self, cx: &StepContext<'_>, name: &str, found: &[bf16], right: &[f32]) {
        self.off.entry((stage(cx), name.to_owned())).or_default().add(found, right);
    }

    fn input(&self, cx: &mut StepContext<'_>, buffer: BufferId) -> Result<Vec<bf16>> {
        let (source, rows) = (cx.plan.buffer(buffer).source.clone(), cx.plan.buffer(buffer).spec.rows);
        Ok(match source {
            Source::Run => cx.read(buffer)?,
            Source::Tensor(name) => self.weights.bf16(&name)?.into_owned(),
            Source::Padded { tensor, padding } => padding.apply(&self.weights.bf16(&tensor)?)?,
            Source::RopeLut { heads } => self.lut(&(0..rows).collect::<Vec<_>>(), heads),
        })
    }

    /// Shapes: `[positions, heads * head_dim]`; per head cos half, then sin half.
    fn lut(&self, positions: &[usize], heads: usize) -> Vec<bf16> {
        let len = positions.last().map_or(0, |p| p + 1);
        let (cos, sin) = self.rope.bf16_rows(positions, len);
        let row = |p: usize| cos.row(p).iter().chain(sin.row(p).iter()).copied().collect::<Vec<_>>().repeat(heads);
        (0..positions.len()).flat_map(row).collect()
    }

    fn launch(&mut self, cx: &mut StepContext<'_>, launch: &Launch, inputs: &[Vec<bf16>]) -> Result<()> {
        let Some(out) = launch.output() else { return Ok(()) };
        let (rows, cols) = oracle::output_shape(&launch.kernel);
        // Rows behind the prompt are padding.
        let valid = rows * cx.valid_rows / cx.plan.stage.rows();
        let sample = Sample { rows: (0..valid.clamp(1, rows)).collect(), cols: (0..cols).collect() };
        let inputs: Vec<&[bf16]> = inputs.iter().map(Vec::as_slice).collect();
        let right = oracle::answer(&launch.kernel, &inputs, &sample)?.values;
        let mut found = cx.read(out)?;
        let right = right.as_slice().expect("standard layout");
        self.note(cx, &launch.name, &found[..right.len()], right);
        if self.swapped.contains(&launch.name) {
            found.iter_mut().zip(right).for_each(|(x, &y)| *x = bf16::from_f32(y));
            cx.write(out, &found)?;
        }
        Ok(())
    }

    fn host(&mut self, cx: &mut StepContext<'_>, op: &HostOp) -> Result<()> {
        let name = cx.step.name.clone();
        let swap = self.swapped.contains(&name);
        match *op {
            HostOp::RopeRow { q_lut, k_lut } => {
                for buffer in [q_lut, k_lut] {
                    let heads = cx.plan.buffer(buffer).spec.cols / self.config.head_dim;
                    let right = self.lut(&[cx.position], heads);
                    self.replace(cx, &name, buffer, right, swap)?;
                }
            }
            HostOp::KvAppend { layer, k, v } => self.append(cx, (layer, k, v), swap)?,
            HostOp::DecodeAttention { layer, q, out } => {
                let right = self.decode_attention(cx, layer, q)?;
                self.replace(cx, &name, out, right, swap)?;
            }
            HostOp::FinalNorm { x, out } => {
                let cols = self.config.hidden_size;
                let row = cx.read_row(x, cx.valid_rows - 1)?;
                let weight = self.weights.bf16("model.norm.weight")?.into_owned();
                let kernel = Kernel::RmsNorm { rows: 1, cols, eps: Epsilon::new(self.config.rms_norm_eps) };
                let right = answer(&kernel, &[&row, &weight])?;
                self.replace(cx, &name, out, right, swap)?;
            }
            HostOp::Embed { out } => {
                let ids = self.ids.get(cx.position..cx.position + cx.valid_rows).unwrap_or_default();
                let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
                let right = self.weights.bf16_rows("model.embed_tokens.weight", self.config.hidden_size, &ids)?;
                self.replace(cx, &name, out, right, swap)?;
            }
            HostOp::AddBias { .. } | HostOp::AddRotatedBias { .. } => {}
        }
        Ok(())
    }

    /// The first values of a buffer against what they should be.
    fn replace(
        &mut self,
        cx: &mut StepContext<'_>,
        name: &str,
        buffer: BufferId,
        right: Vec<bf16>,
        swap: bool,
    ) -> Result<()> {
        let mut found = cx.read(buffer)?;
        let wide: Vec<f32> = right.iter().map(|x| x.to_f32()).collect();
        self.note(cx, name, &found[..right.len()], &wide);
        if swap {
            found[..right.len()].copy_from_slice(&right);
            cx.write(buffer, &found)?;
        }
        Ok(())
    }

    /// All rows of the layer's cache, not the new ones only: a fault may have gone for the old ones.
    fn append(
        &mut self,
        cx: &mut StepContext<'_>,
        (layer, k, v): (usize, BufferId, BufferId),
        swap: bool,
    ) -> Result<()> {
        let width = cx.plan.buffer(k).spec.cols;
        let (new_keys, new_values) = (cx.read(k)?, cx.read(v)?);
        let (keys, values) = self.cache.entry(layer).or_default();
        for (rows, new) in [(&mut *keys, new_keys), (&mut *values, new_values)] {
            rows.truncate(cx.position * width);
            rows.extend_from_slice(&new[..cx.valid_rows * width]);
        }
        let (keys, values) = (keys.clone(), values.clone());
        let name = cx.step.name.clone();
        let (own_keys, own_values) = cx.kv.rows(layer);
        for (right, found) in [(&keys, own_keys), (&values, own_values)] {
            let right: Vec<f32> = right.iter().map(|x| x.to_f32()).collect();
            self.note(cx, &name, &found, &right);
        }
        if swap {
            cx.kv.edit(layer, |own_keys, own_values| {
                own_keys[..keys.len()].copy_from_slice(&keys);
                own_values[..values.len()].copy_from_slice(&values);
            });
        }
        Ok(())
    }

    fn decode_attention(&self, cx: &mut StepContext<'_>, layer: usize, q: BufferId) -> Result<Vec<bf16>> {
        let query = cx.read(q)?;
        let (keys, values) = cx.kv.rows(layer);
        let (kv_heads, head_dim) = (self.config.num_key_value_heads, self.config.head_dim);
        let seq = keys.len() / (kv_heads * head_dim);
        let kernel = Kernel::Attention { seq, heads: query.len() / head_dim, kv_heads, head_dim, causal: true };
        let mut queries = vec![bf16::ZERO; (seq - 1) * query.len()];
        let cols = (0..query.len()).collect();
        queries.extend_from_slice(&query);
        let sample = Sample { rows: vec![seq - 1], cols };
        let right = oracle::answer(&kernel, &[&queries, &keys, &values], &sample)?.values;
        Ok(right.iter().map(|&x| bf16::from_f32(x)).collect())
    }
}

fn answer(kernel: &Kernel, inputs: &[&[bf16]]) -> Result<Vec<bf16>> {
    let right = oracle::answer(kernel, inputs, &Sample::all(kernel))?.values;
    Ok(right.iter().map(|&x| bf16::from_f32(x)).collect())
}

pub(super) fn stage(cx: &StepContext<'_>) -> Stage {
    if matches!(cx.plan.stage, plan::Stage::Prefill { .. }) { Stage::Prefill } else { Stage::Decode }
}

impl Hook for Swapper {
    fn before_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        self.inputs = None;
        if let Op::Dispatch(launches) = &cx.step.op
            && let [launch] = launches.as_slice()
            && self.looks_at(cx)
        {
            let args = &launch.args[..launch.args.len() - 1];
            self.inputs = Some(args.iter().map(|&arg| self.input(cx, arg)).collect::<Result<_>>()?);
        }
        Ok(())
    }

    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        match &cx.step.op {
            // The cache is followed in every layer, looked at or not.
            Op::Host(op) if self.looks_at(cx) || matches!(op, HostOp::KvAppend { .. }) => self.host(cx, op),
            Op::Host(_) => Ok(()),
            Op::Dispatch(launches) => match (launches.as_slice(), self.inputs.take()) {
                ([launch], Some(inputs)) => self.launch(cx, launch, &inputs),
                _ => Ok(()),
            },
        }
    }
}
