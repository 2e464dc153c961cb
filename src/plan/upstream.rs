//! On paper: which of upstream's fused dispatches a model's prefill, decode and head run, and what each argument of them
//! holds. Where a dispatch does not fit the model, its work is left to leaf dispatches, with the reason.
//!
//! From the config and `kernels/dispatch/` alone; no device, no weight is touched here (`packing` says how one is laid out).

pub mod packing;
#[cfg(test)]
mod tests;

use std::fmt;

use self::packing::Packing;
use crate::error::{Error, Result};
use crate::kernel::dispatch::{self, Dispatch, DispatchRole, DispatchStage, Partition};
use crate::kernel::expr::Bindings;
use crate::kernel::facts::{self, FactDtype, Tier};
use crate::model::ModelConfig;

/// Columns that a GEMM's output is padded to a multiple of, where the hidden size is no multiple of [`PLACEABLE`].
///
/// Source: Qwen2.5-0.5B pads 896 and 128 to 1024; 1536 and 256 of Qwen2.5-1.5B are not padded.
const PADDED_TO: usize = 1024;
const PLACEABLE: usize = 512;

/// The widest head that attention takes in one piece.
const HEAD_PIECE: usize = 64;

/// What an argument holds when its dispatch is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Activations: from the host or an earlier dispatch, or for it.
    Activation,
    /// Tensors of the checkpoint, by HF name, packed.
    Weight { tensors: Vec<String>, packing: Packing },
    /// RoPE rows (cos half, then sin half), each repeated per head.
    Lut { positions: usize, heads: usize },
    /// The f32 scratch of a GEMM.
    Scratch,
    /// Nothing: bound and never touched.
    Dead,
}

/// One argument in binding order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundArgument {
    pub name: String,
    pub role: DispatchRole,
    pub dtype: FactDtype,
    /// As the dispatch is compiled for; head-first for attention on wide heads.
    pub dims: Vec<usize>,
    pub content: Content,
}

impl BoundArgument {
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A fused dispatch with its arguments.
#[derive(Debug, Clone)]
pub struct BoundDispatch {
    pub id: &'static str,
    pub stage: DispatchStage,
    pub arguments: Vec<BoundArgument>,
    /// Whether the host transposes q, k, v before it and the output behind it.
    pub head_first: bool,
}

/// Work that no fused dispatch does for this model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    pub stage: DispatchStage,
    /// The dispatch that was considered.
    pub id: &'static str,
    pub why: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: leaf dispatches: {}", self.id, self.why)
    }
}

/// How a model runs on upstream's ELFs.
#[derive(Debug, Clone)]
pub struct UpstreamPlan {
    pub dispatches: Vec<BoundDispatch>,
    pub fallbacks: Vec<Fallback>,
}

/// Upstream's models, by what their dispatches are compiled for: hidden_size, heads' widths (q, kv), intermediate_size,
/// head_dim, vocab_size.
///
/// Source: mlir-air's `programming_examples/llms`.
const MODELS: [(&str, [usize; 6]); 9] = [
    ("llama32_1b", [2048, 2048, 512, 8192, 64, 128256]),
    ("llama32_3b", [3072, 3072, 1024, 8192, 128, 128256]),
    ("smollm2_1_7b", [2048, 2048, 2048, 8192, 64, 49152]),
    ("qwen25_0_5b", [896, 896, 128, 4864, 64, 151936]),
    ("qwen25_1_5b", [1536, 1536, 256, 8960, 128, 151936]),
    ("qwen25_3b", [2048, 2048, 256, 11008, 128, 151936]),
    ("qwen3_0_6b", [1024, 2048, 1024, 3072, 128, 151936]),
    ("qwen3_1_7b", [2048, 2048, 1024, 6144, 128, 151936]),
    ("qwen3_4b", [2560, 4096, 1024, 9728, 128, 151936]),
];

/// Binds a model's layer (prefill of `seq_len` positions and decode) and head.
///
/// Errors: [`Error::Malformed`] for a dispatch file that names something unknown, which tests rule out.
pub fn bind(config: &ModelConfig, seq_len: usize) -> Result<UpstreamPlan> {
    let paper = Paper::new(config, seq_len);
    let mut plan = UpstreamPlan { dispatches: vec![], fallbacks: vec![] };
    for dispatch in dispatch::all()?.iter().filter(|dispatch| paper.is_of_family(dispatch)) {
        match paper.obstacle(dispatch)? {
            None => plan.dispatches.push(paper.bind(dispatch)?),
            Some(why) => plan.fallbacks.push(Fallback { stage: dispatch.stage, id: &dispatch.id, why }),
        }
    }
    // An alternative that was not taken is no reason, as long as something does the work.
    let taken = |stage| plan.dispatches.iter().any(|d| d.stage == stage && d.id != "flash_attn");
    let stages = [DispatchStage::Prefill, DispatchStage::Decode, DispatchStage::Head];
    for stage in stages.into_iter().filter(|&stage| taken(stage) && paper.model.is_some()) {
        plan.fallbacks.retain(|fallback| fallback.stage != stage);
    }
    Ok(plan)
}

/// A model as upstream's symbols see it.
struct Paper<'a> {
    config: &'a ModelConfig,
    /// Upstream's model of these shapes, if there is one.
    model: Option<&'static str>,
    symbols: Bindings,
}

impl<'a> Paper<'a> {
    fn new(config: &'a ModelConfig, seq_len: usize) -> Paper<'a> {
        let (e, f, hd) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.num_attention_heads * hd, config.kv_dim());
        let shape = [e, q, kv, f, hd, config.vocab_size];
        let model = MODELS.iter().find(|(name, known)| *known == shape && family(config, name)).map(|(name, _)| *name);
        let padded = |n: usize| if e.is_multiple_of(PLACEABLE) { n } else { n.next_multiple_of(PADDED_TO) };
        let symbols = [
            ("S", seq_len),
            ("E", e),
            ("Q", q),
            ("KV", kv),
            ("F", f),
            ("hd", hd),
            ("H", config.num_attention_heads),
            ("Hkv", config.num_key_value_heads),
            ("V", config.vocab_size),
            ("Epad", padded(e)),
            ("Qpad", padded(q)),
            ("KVpad", padded(kv)),
            ("dv_chunks", hd.div_ceil(HEAD_PIECE)),
            ("dv_tile", hd.min(HEAD_PIECE)),
        ];
        Paper { config, model, symbols: symbols.into_iter().map(|(name, value)| (name, value as i64)).collect() }
    }

    /// Whether a dispatch computes what this family's layers do.
    fn is_of_family(&self, dispatch: &Dispatch) -> bool {
        let id = dispatch.id.as_str();
        match (id.contains("bias"), id.contains("qknorm")) {
            (true, _) => self.config.qkv_bias,
            (_, true) => self.config.qk_norm,
            _ if id.starts_with("rms_") => !self.config.qkv_bias && !self.config.qk_norm,
            _ => true,
        }
    }

    /// Why a dispatch is not used for this model, if it is not.
    fn obstacle(&self, dispatch: &Dispatch) -> Result<Option<String>> {
        if !dispatch.fits(&self.symbols)? {
            let requires = dispatch.requires.as_ref().map_or("", |requires| requires.expr.text());
            let values = requires_values(requires, &self.symbols);
            return Ok(Some(format!("requires {requires}, found {values}")));
        }
        let used = |by: &str| by == "all" || Some(by) == self.model;
        if dispatch.id == "lm_head_gemv" {
            return Ok(self.partition(dispatch).is_none().then(|| self.compiled_for(dispatch)));
        }
        if dispatch.used_by.iter().any(|by| used(by)) && self.model.is_some() {
            return Ok(None);
        }
        Ok(Some(self.compiled_for(dispatch)))
    }

    fn compiled_for(&self, dispatch: &Dispatch) -> String {
        let of = match self.model {
            Some(model) => format!("not used for {model}"),
            None => "this model's shapes are none of upstream's".to_owned(),
        };
        format!("{of}; compiled for {}", dispatch.used_by.join(", "))
    }

    fn partition<'d>(&self, dispatch: &'d Dispatch) -> Option<&'d Partition> {
        let named = |pattern: &String| match (pattern.strip_suffix('*'), self.model) {
            (Some(prefix), Some(model)) => model.starts_with(prefix),
            (None, Some(model)) => pattern == model,
            (_, None) => false,
        };
        dispatch.partitions.iter().find(|partition| partition.models.iter().any(named))
    }

    fn bind(&self, dispatch: &'static Dispatch) -> Result<BoundDispatch> {
        let head_first = dispatch.id == "flash_attn" && self.config.head_dim > HEAD_PIECE;
        let mut arguments = vec![];
        for arg in &dispatch.args {
            let shape = arg.head_first.as_ref().filter(|_| head_first).unwrap_or(&arg.shape);
            let partitions = match self.partition(dispatch) {
                Some(partition) if arg.name.ends_with("_p") => (0..partition.count as usize).map(Some).collect(),
                _ => vec![None],
            };
            for part in partitions {
                let symbols = self.with_partition(dispatch);
                let dims = shape.iter().map(|expr| Ok(expr.value(&symbols)? as usize)).collect::<Result<Vec<_>>>()?;
                let name = part.map_or_else(|| arg.name.clone(), |p| arg.name.replace("_p", &format!("_{p}")));
                let content = self.content(dispatch, &arg.name, arg.role, &dims, part)?;
                arguments.push(BoundArgument { name, role: arg.role, dtype: arg.dtype, dims, content });
            }
        }
        interleave_partitions(dispatch, &mut arguments);
        let scratch = self.scratch(dispatch)?;
        arguments.extend(scratch);
        Ok(BoundDispatch { id: &dispatch.id, stage: dispatch.stage, arguments, head_first })
    }

    fn with_partition(&self, dispatch: &Dispatch) -> Bindings {
        let mut symbols = self.symbols.clone();
        if let Some(partition) = self.partition(dispatch) {
            symbols.set("P", partition.count);
            symbols.set("n_part", partition.n_part);
        }
        symbols
    }

    /// The f32 scratch of each GEMM whose best measured method of the high tier casts in a launch of its own.
    fn scratch(&self, dispatch: &Dispatch) -> Result<Vec<BoundArgument>> {
        let mut shapes = vec![];
        let mut methods = vec![];
        for launch in dispatch.launches.iter().filter(|launch| launch.kernel == "gemm_bf16_bf16") {
            let dims = |place: usize| -> Result<Vec<i64>> {
                dispatch.args[launch.args[place]].shape.iter().map(|expr| expr.value(&self.symbols)).collect()
            };
            let (a, c) = (dims(0)?, dims(2)?);
            let [m, k, n] = [a[0], a[1], c[c.len() - 1]];
            methods.push((launch.name.as_str(), best_method(m, k, n)?));
            shapes.push((launch.name.as_str(), vec![m as usize, n as usize]));
        }
        let method = |gemm: &str| methods.iter().find(|(name, _)| *name == gemm).and_then(|(_, method)| *method);
        let cast = dispatch.scratch_of(method).into_iter().map(|gemm| BoundArgument {
            name: format!("{gemm}_f32"),
            role: DispatchRole::Intermediate,
            dtype: FactDtype::F32,
            dims: shapes.iter().find(|(name, _)| *name == gemm).map(|(_, dims)| dims.clone()).unwrap_or_default(),
            content: Content::Scratch,
        });
        Ok(cast.collect())
    }

    /// What an argument holds, by its name in upstream's tables. Layer 0 stands for every layer.
    fn content(
        &self,
        dispatch: &Dispatch,
        name: &str,
        role: DispatchRole,
        dims: &[usize],
        part: Option<usize>,
    ) -> Result<Content> {
        let c = self.config;
        let layer = |module: &str| format!("model.layers.0.{module}");
        let weight = |module: &str, packing: Packing| Content::Weight { tensors: vec![layer(module)], packing };
        let transposed = |module: &str| weight(module, Packing::Transposed { cols: *dims.last().unwrap_or(&0) });
        let stored = |module: &str| weight(module, Packing::AsStored);
        Ok(match (name, role) {
            (_, DispatchRole::Dead) => Content::Dead,
            ("attn_norm_w", _) => stored("input_layernorm.weight"),
            ("ffn_norm_w", _) => stored("post_attention_layernorm.weight"),
            ("q_norm_w", _) => stored("self_attn.q_norm.weight"),
            ("k_norm_w", _) => stored("self_attn.k_norm.weight"),
            ("bq", _) => stored("self_attn.q_proj.bias"),
            ("bk", _) => stored("self_attn.k_proj.bias"),
            ("bv", _) => stored("self_attn.v_proj.bias"),
            ("wq", _) => transposed("self_attn.q_proj.weight"),
            ("wk", _) => transposed("self_attn.k_proj.weight"),
            ("wv", _) => transposed("self_attn.v_proj.weight"),
            ("wo", _) => transposed("self_attn.o_proj.weight"),
            ("w_gate", _) => transposed("mlp.gate_proj.weight"),
            ("w_up", _) => transposed("mlp.up_proj.weight"),
            ("w_down", _) => transposed("mlp.down_proj.weight"),
            ("w", _) => transposed(if dispatch.id == "gate" { "mlp.gate_proj.weight" } else { "mlp.up_proj.weight" }),
            ("wq_t", _) => stored("self_attn.q_proj.weight"),
            ("wk_t", _) => stored("self_attn.k_proj.weight"),
            ("wv_t", _) => stored("self_attn.v_proj.weight"),
            ("wo_t", _) => stored("self_attn.o_proj.weight"),
            ("w_down_t", _) => stored("mlp.down_proj.weight"),
            ("w_t", _) => stored(match dispatch.id.as_str() {
                "o_gemv" => "self_attn.o_proj.weight",
                "gate_gemv" => "mlp.gate_proj.weight",
                "up_gemv" => "mlp.up_proj.weight",
                _ => "mlp.down_proj.weight",
            }),
            ("packed", _) => weight("post_attention_layernorm.weight", Packing::SecondRow),
            ("w_gateup_t", _) => Content::Weight {
                tensors: vec![layer("mlp.gate_proj.weight"), layer("mlp.up_proj.weight")],
                packing: Packing::Interleaved,
            },
            ("weight_p", _) => {
                let head = if c.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
                let (part, rows) = (part.unwrap_or(0), dims[0]);
                Content::Weight { tensors: vec![head.into()], packing: Packing::Part { first: part * rows, rows } }
            }
            ("lut_q" | "lut_k", _) => {
                let heads = if name == "lut_q" { c.num_attention_heads } else { c.num_key_value_heads };
                let positions = dims.iter().product::<usize>() / (heads * c.head_dim);
                Content::Lut { positions, heads }
            }
            (_, DispatchRole::StaticWeight | DispatchRole::StaticLut) => {
                let path = format!("kernels/dispatch/{}.json", dispatch.id);
                return Err(Error::malformed(path, format!("static argument {name} is not known")));
            }
            _ => Content::Activation,
        })
    }
}

/// Weight and logits of a partition stand side by side, as upstream binds them.
fn interleave_partitions(dispatch: &Dispatch, arguments: &mut [BoundArgument]) {
    let Some(repeated) = &dispatch.repeated else { return };
    let parts = &mut arguments[repeated.first..];
    let count = parts.len() / repeated.args;
    let sorted: Vec<BoundArgument> =
        (0..parts.len()).map(|i| parts[i % repeated.args * count + i / repeated.args].clone()).collect();
    parts.clone_from_slice(&sorted);
}

/// Whether a config is of the family that upstream's model is of.
fn family(config: &ModelConfig, model: &str) -> bool {
    match (config.qkv_bias, config.qk_norm) {
        (true, _) => model.starts_with("qwen25"),
        (_, true) => model.starts_with("qwen3"),
        _ => !model.starts_with("qwen"),
    }
}

/// The symbols of a condition with this model's values.
fn requires_values(condition: &str, symbols: &Bindings) -> String {
    let named = dispatch::SYMBOLS
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| condition.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == *name));
    named.filter_map(|name| Some(format!("{name} = {}", symbols.get(name)?))).collect::<Vec<_>>().join(", ")
}

/// The method of the best measured row of a GEMM in the high tier, or of the low one where no other is.
fn best_method(m: i64, k: i64, n: i64) -> Result<Option<&'static str>> {
    let facts = facts::of("gemm_bf16_bf16")?;
    let here = |name: &str, value: i64, row: &facts::Row| row.shape.get(name) == Some(&value);
    let rows: Vec<_> =
        facts.measured.iter().filter(|r| here("M", m, r) && here("K", k, r) && here("N", n, r)).collect();
    let of = |tier: Tier, best: bool| rows.iter().find(|r| r.tier == Some(tier) && r.best == best);
    let row = of(Tier::High, true).or_else(|| of(Tier::High, false)).or_else(|| of(Tier::Low, true));
    Ok(row.and_then(|row| row.method.as_deref()))
}
