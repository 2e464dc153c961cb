//! The whole model in f32, in plain loops: what a run should have left at every launch.
//!
//! Shares config and weights with what it is held against and nothing else: no plan, no runner, no kernel of a device. An
//! error of reading the config is in both; only HF can tell.

use std::collections::HashMap;

use ndarray::{Array2, ArrayView2, s};

use super::trace::{Segment, Stage};
use crate::error::Result;
use crate::kernel::attention_scale;
use crate::model::{ModelConfig, RopeTable, Weights};

/// Every launch's output at every position, by call site.
pub struct Truth {
    /// Length of the prompt: rows from here on are decode's.
    prompt: usize,
    taps: HashMap<String, Array2<f32>>,
    /// The first position of a tap that is computed for the last ones only.
    from: HashMap<String, usize>,
}

/// Computes a sequence whose first `prompt` ids are prefilled.
///
/// Errors: those of the weights.
pub fn forward(config: &ModelConfig, weights: &dyn Weights, ids: &[u32], prompt: usize) -> Result<Truth> {
    let mut model = Forward { config, weights, truth: Truth { prompt, taps: HashMap::new(), from: HashMap::new() } };
    let embed = model.weight("model.embed_tokens.weight", config.hidden_size)?;
    let mut x = Array2::zeros((ids.len(), config.hidden_size));
    for (mut row, &id) in x.rows_mut().into_iter().zip(ids) {
        row.assign(&embed.row(id as usize));
    }
    model.keep("embed_tokens", &x);
    let table = RopeTable::new(config);
    let positions: Vec<usize> = (0..ids.len()).collect();
    let rope = table.rows(&positions, ids.len());
    for layer in 0..config.num_hidden_layers {
        x = model.layer(layer, x, &rope)?;
    }
    let from = prompt.saturating_sub(1);
    let normed = model.norm("final_norm", "model.norm.weight", &x.slice(s![from.., ..]).to_owned())?;
    let head = if config.tie_word_embeddings { embed } else { model.weight("lm_head.weight", config.hidden_size)? };
    let logits = linear(&normed, head.view());
    model.keep("lm_head", &logits);
    for name in ["final_norm", "lm_head"] {
        model.truth.from.insert(name.into(), from);
    }
    Ok(model.truth)
}

impl Truth {
    /// The rows that a run's segment should hold; none where this computes no such launch or another width.
    ///
    /// Shapes: as the segment's values, row-major.
    pub fn rows_of(&self, segment: &Segment, positions: &[usize]) -> Option<Vec<f32>> {
        let tap = self.taps.get(&segment.name)?;
        let from = self.from.get(&segment.name).copied().unwrap_or(0);
        let rows = segment.values.len() / segment.cols;
        let wanted: Vec<usize> = match segment.stage {
            Stage::Prefill if from > 0 => vec![self.prompt - 1],
            Stage::Prefill => positions.to_vec(),
            Stage::Decode => (self.prompt..self.prompt + rows).collect(),
            Stage::End => positions.iter().copied().chain(self.prompt..).take(rows).collect(),
        };
        let fits = tap.ncols() == segment.cols && wanted.len() == rows;
        let inside = wanted.iter().all(|&p| p >= from && p - from < tap.nrows());
        (fits && inside).then(|| wanted.iter().flat_map(|&p| tap.row(p - from).to_vec()).collect())
    }

    /// A tap's rows over all positions it is computed for.
    pub fn tap(&self, name: &str) -> Option<ArrayView2<'_, f32>> {
        self.taps.get(name).map(|tap| tap.view())
    }
}

struct Forward<'a> {
    config: &'a ModelConfig,
    weights: &'a dyn Weights,
    truth: Truth,
}

impl Forward<'_> {
    fn keep(&mut self, name: &str, rows: &Array2<f32>) {
        self.truth.taps.insert(name.into(), rows.clone());
    }

    fn weight(&self, name: &str, cols: usize) -> Result<Array2<f32>> {
        let content = self.weights.bf16(name)?;
        let wide: Vec<f32> = content.iter().map(|x| x.to_f32()).collect();
        Ok(Array2::from_shape_vec((wide.len() / cols, cols), wide).expect("the loader checked the shape"))
    }

    /// Source: HF's RMSNorm.
    fn norm(&mut self, site: &str, tensor: &str, x: &Array2<f32>) -> Result<Array2<f32>> {
        let weight = self.weight(tensor, x.ncols())?;
        let y = normed(x, weight.row(0).as_slice().expect("standard layout"), self.config.rms_norm_eps);
        self.keep(site, &y);
        Ok(y)
    }

    fn project(&mut self, layer: usize, module: &str, bias: bool, x: &Array2<f32>) -> Result<Array2<f32>> {
        let site = module.rsplit('.').next().unwrap_or(module);
        let mut y = linear(x, self.weight(&format!("model.layers.{layer}.{module}.weight"), x.ncols())?.view());
        self.keep(&format!("l{layer:02}.{site}"), &y);
        if bias {
            let bias = self.weight(&format!("model.layers.{layer}.{module}.bias"), y.ncols())?;
            y += &bias;
            self.keep(&format!("l{layer:02}.{site}_bias"), &y);
        }
        Ok(y)
    }

    fn rotate(
        &mut self,
        layer: usize,
        which: &str,
        x: Array2<f32>,
        (cos, sin): &(Array2<f32>, Array2<f32>),
    ) -> Result<Array2<f32>> {
        let (dim, rows) = (self.config.head_dim, x.nrows());
        let mut x = x;
        if self.config.qk_norm {
            let weight = self.weight(&format!("model.layers.{layer}.self_attn.{which}_norm.weight"), dim)?;
            let shape = x.dim();
            let heads = x.into_shape_with_order((shape.0 * shape.1 / dim, dim)).expect("whole heads");
            let y = normed(&heads, weight.row(0).as_slice().expect("standard layout"), self.config.rms_norm_eps);
            x = y.into_shape_with_order(shape).expect("the same elements");
            self.keep(&format!("l{layer:02}.{which}_norm"), &x);
        }
        let half = dim / 2;
        let mut y = x.clone();
        for p in 0..rows {
            for start in (0..x.ncols()).step_by(dim) {
                for i in 0..half {
                    let (a, b) = (x[[p, start + i]], x[[p, start + i + half]]);
                    y[[p, start + i]] = a * cos[[p, i]] - b * sin[[p, i]];
                    y[[p, start + i + half]] = b * cos[[p, i]] + a * sin[[p, i]];
                }
            }
        }
        self.keep(&format!("l{layer:02}.{which}_rope"), &y);
        Ok(y)
    }

    fn layer(&mut self, layer: usize, x: Array2<f32>, rope: &(Array2<f32>, Array2<f32>)) -> Result<Array2<f32>> {
        let config = self.config;
        let site = |name: &str| format!("l{layer:02}.{name}");
        let tensor = |name: &str| format!("model.layers.{layer}.{name}.weight");
        let input = self.norm(&site("input_layernorm"), &tensor("input_layernorm"), &x)?;
        let q = self.project(layer, "self_attn.q_proj", config.qkv_bias, &input)?;
        let k = self.project(layer, "self_attn.k_proj", config.qkv_bias, &input)?;
        let v = self.project(layer, "self_attn.v_proj", config.qkv_bias, &input)?;
        let q = self.rotate(layer, "q", q, rope)?;
        let k = self.rotate(layer, "k", k, rope)?;
        self.keep(&site("k_cache"), &k);
        self.keep(&site("v_cache"), &v);
        let context = attention(config, &q, &k, &v);
        self.keep(&site("attention"), &context);
        let o = self.project(layer, "self_attn.o_proj", config.o_bias, &context)?;
        let mid = x + o;
        self.keep(&site("attention_add"), &mid);
        let post = "post_attention_layernorm";
        let input = self.norm(&site(post), &tensor(post), &mid)?;
        let gate = self.project(layer, "mlp.gate_proj", config.mlp_bias, &input)?;
        let up = self.project(layer, "mlp.up_proj", config.mlp_bias, &input)?;
        let act = gate.mapv(|x| x / (1.0 + (-x).exp())) * up;
        self.keep(&site("silu_mul"), &act);
        let down = self.project(layer, "mlp.down_proj", config.mlp_bias, &act)?;
        let out = mid + down;
        self.keep(&site("mlp_add"), &out);
        Ok(out)
    }
}

/// `y = x / sqrt(mean(x^2) + eps) * w` per row.
fn normed(x: &Array2<f32>, weight: &[f32], eps: f64) -> Array2<f32> {
    let mut y = x.clone();
    for mut row in y.rows_mut() {
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
        let rstd = (1.0 / (mean + eps).sqrt()) as f32;
        row.iter_mut().zip(weight).for_each(|(x, w)| *x *= rstd * w);
    }
    y
}

/// `y = x W^T`.
///
/// Shapes: `[n, k]`, `[m, k] -> [n, m]`.
fn linear(x: &Array2<f32>, w: ArrayView2<'_, f32>) -> Array2<f32> {
    let mut y = Array2::zeros((x.nrows(), w.nrows()));
    // Weight rows outside: each is read once for all positions.
    for (m, w) in w.rows().into_iter().enumerate() {
        let w = w.to_slice().expect("standard layout");
        for (n, x) in x.rows().into_iter().enumerate() {
            y[[n, m]] = dot(x.to_slice().expect("standard layout"), w);
        }
    }
    y
}

/// In sixteen partial sums of f32, added in f64.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(a * b)).sum();
    (sums.iter().map(|&x| f64::from(x)).sum::<f64>() + rest) as f32
}

/// Causal grouped-query attention.
fn attention(config: &ModelConfig, q: &Array2<f32>, k: &Array2<f32>, v: &Array2<f32>) -> Array2<f32> {
    let (dim, group) = (config.head_dim, config.group());
    let scale = attention_scale(dim);
    let mut out = Array2::zeros(q.dim());
    for p in 0..q.nrows() {
        for head in 0..config.num_attention_heads {
            let (at, from) = (head * dim, head / group * dim);
            let query = q.slice(s![p, at..at + dim]);
            let scores: Vec<f32> = (0..=p)
                .map(|key| {
                    let key = k.slice(s![key, from..from + dim]);
                    scale * dot(query.to_slice().expect("contiguous"), key.to_slice().expect("contiguous"))
                })
                .collect();
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|score| (score - top).exp()).collect();
            let total: f32 = weights.iter().sum();
            let mut context = out.slice_mut(s![p, at..at + dim]);
            for (key, weight) in weights.iter().enumerate() {
                context.scaled_add(weight / total, &v.slice(s![key, from..from + dim]));
            }
        }
    }
    out
}
