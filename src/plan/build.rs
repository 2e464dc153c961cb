//! Composes leaf kernels into the steps of one model: the unfused plan, one launch per dispatch.

use std::collections::{BTreeSet, HashMap};

use super::{
    Axis, BiasLowering, BufferId, HeadPadding, HostOp, Launch, Op, Placement, Plan, PlanBuffer, PlanOptions, Source,
    Stage, Step, Tap,
};
use crate::device::{BufferSpec, Layout, Role};
use crate::error::{Error, Result};
use crate::kernel::{Dtype, Epsilon, Kernel};
use crate::model::config::ModelConfig;

/// The prefill of up to `seq_len` positions.
///
/// Errors: [`crate::error::Error::Plan`] when the plan would break its own rules.
pub fn prefill(config: &ModelConfig, seq_len: usize, options: &PlanOptions) -> Result<Plan> {
    finish(Builder::new(config, Stage::Prefill { seq_len }, options)?.model(), options)
}

/// One decode step.
///
/// Errors: as [`prefill`].
pub fn decode(config: &ModelConfig, options: &PlanOptions) -> Result<Plan> {
    finish(Builder::new(config, Stage::Decode, options)?.model(), options)
}

fn finish(mut plan: Plan, options: &PlanOptions) -> Result<Plan> {
    for id in &options.host {
        // Attention is a host op at decode already.
        if plan.place(id, Placement::Host) == 0 && matches!(plan.stage, Stage::Prefill { .. }) && id != "gemv" {
            let known: BTreeSet<&str> = plan.launches().map(|(_, l)| l.kernel.id()).collect();
            let sites: BTreeSet<&str> = plan.launches().filter_map(|(_, l)| l.name.rsplit('.').next()).collect();
            let list = |names: BTreeSet<&str>| names.into_iter().collect::<Vec<_>>().join(", ");
            let known = format!("{}; call sites {}, or one launch, as l00.q_proj", list(known), list(sites));
            return Err(Error::Unknown { kind: "kernel", name: id.clone(), known });
        }
    }
    plan.check()?;
    Ok(plan)
}

/// `l07.q_proj`, or the bare name of what belongs to no layer.
fn site_name(layer: Option<usize>, site: &str) -> String {
    match layer {
        Some(layer) => format!("l{layer:02}.{site}"),
        None => site.to_owned(),
    }
}

struct Builder<'a> {
    config: &'a ModelConfig,
    stage: Stage,
    bias: BiasLowering,
    /// Query heads, phantom ones included.
    heads: usize,
    rows: usize,
    buffers: Vec<PlanBuffer>,
    by_name: HashMap<String, BufferId>,
    steps: Vec<Step>,
}

impl<'a> Builder<'a> {
    fn new(config: &'a ModelConfig, stage: Stage, options: &PlanOptions) -> Result<Self> {
        let heads = options.group(config)? * config.num_key_value_heads;
        let (rows, bias) = (stage.rows(), options.bias);
        Ok(Builder { config, stage, bias, heads, rows, buffers: vec![], by_name: HashMap::new(), steps: vec![] })
    }

    /// A tensor whose rows or columns are query heads, with room for the phantom ones.
    fn by_heads(&self, tensor: String, axis: Axis) -> Source {
        let c = self.config;
        if self.heads == c.num_attention_heads {
            return Source::Tensor(tensor);
        }
        let groups = c.num_key_value_heads;
        let (from, to) = (c.group() * c.head_dim, self.heads / groups * c.head_dim);
        Source::Padded { tensor, padding: HeadPadding { axis, groups, from, to } }
    }

    /// The buffer of this name, made on first use. Layers share intermediates; static names are unique per layer.
    fn buffer(&mut self, name: &str, rows: usize, cols: usize, role: Role, layout: Layout, source: Source) -> BufferId {
        if let Some(&id) = self.by_name.get(name) {
            return id;
        }
        let id = BufferId(self.buffers.len());
        let spec = BufferSpec { name: name.into(), dtype: Dtype::Bf16, rows, cols, role, layout };
        self.buffers.push(PlanBuffer { spec, source, lies_in: None });
        self.by_name.insert(name.into(), id);
        id
    }

    fn intermediate(&mut self, name: &str, cols: usize) -> BufferId {
        self.buffer(name, self.rows, cols, Role::Intermediate, Layout::Rows, Source::Run)
    }

    fn weight(&mut self, tensor: &str, rows: usize, cols: usize, layout: Layout) -> BufferId {
        self.buffer(tensor, rows, cols, Role::StaticWeight, layout, self.source(tensor))
    }

    fn source(&self, tensor: &str) -> Source {
        let axis = match tensor {
            t if t.contains(".q_proj.") => Axis::Rows,
            t if t.ends_with(".o_proj.weight") => Axis::Cols,
            _ => return Source::Tensor(tensor.into()),
        };
        self.by_heads(tensor.into(), axis)
    }

    fn host(&mut self, layer: Option<usize>, name: &str, op: HostOp) {
        let name = site_name(layer, name);
        self.steps.push(Step { name, layer, op: Op::Host(op), placement: Placement::Host, taps: vec![] });
    }

    /// Sets what the last step shows.
    fn tap(&mut self, name: Option<&'static str>, buffer: BufferId) {
        if let Some(step) = self.steps.last_mut() {
            step.taps = name.map(|name| Tap { name, buffer }).into_iter().collect();
        }
    }

    fn launch(
        &mut self,
        layer: impl Into<Option<usize>>,
        name: &str,
        kernel: Kernel,
        args: Vec<BufferId>,
        tap: Option<&'static str>,
    ) {
        let layer = layer.into();
        let name = site_name(layer, name);
        let out = *args.last().expect("every kernel has an output");
        let op = Op::Dispatch(vec![Launch { name: name.clone(), kernel, args }]);
        self.steps.push(Step { name, layer, op, placement: Placement::Device, taps: vec![] });
        self.tap(tap, out);
    }

    /// `y = W x (+ bias)`: a GEMM at prefill, a GEMV at decode; the bias is a launch of its own.
    #[allow(clippy::too_many_arguments)]
    fn linear(
        &mut self,
        layer: usize,
        module: &str,
        bias: bool,
        (x, k): (BufferId, usize),
        n: usize,
        out: &str,
        tap: Option<&'static str>,
    ) -> BufferId {
        let prefix = format!("model.layers.{layer}.{module}");
        let name = module.rsplit('.').next().expect("split gives at least one part").to_owned();
        let w = self.weight(&format!("{prefix}.weight"), n, k, Layout::LinearWeight);
        let y = self.intermediate(out, n);
        let (kernel, args) = match self.stage {
            Stage::Prefill { seq_len } => (Kernel::Gemm { m: seq_len, k, n, out: Dtype::Bf16 }, vec![x, w, y]),
            Stage::Decode => (Kernel::Gemv { m: n, k }, vec![w, x, y]),
        };
        let on_host =
            bias && self.bias == BiasLowering::Host && matches!(name.as_str(), "q_proj" | "k_proj" | "v_proj");
        self.launch(layer, &name, kernel, args, if bias { None } else { tap });
        if bias && !on_host {
            let b = self.weight(&format!("{prefix}.bias"), 1, n, Layout::Rows);
            let kernel = Kernel::BiasAdd { rows: self.rows, cols: n };
            self.launch(layer, &format!("{name}_bias"), kernel, vec![y, b, y], tap);
        }
        y
    }

    fn rms_norm(&mut self, layer: usize, module: &'static str, x: BufferId, out: &str) -> BufferId {
        let cols = self.config.hidden_size;
        let w = self.weight(&format!("model.layers.{layer}.{module}.weight"), 1, cols, Layout::Rows);
        let y = self.intermediate(out, cols);
        let kernel = Kernel::RmsNorm { rows: self.rows, cols, eps: Epsilon::new(self.config.rms_norm_eps) };
        self.launch(layer, module, kernel, vec![x, w, y], Some(module));
        y
    }

    /// QK-norm where the family has it, then RoPE.
    fn rotate(&mut self, layer: usize, which: &'static str, x: BufferId, heads: usize, lut: BufferId) -> BufferId {
        let head_dim = self.config.head_dim;
        let rows = self.rows * heads;
        let mut x = x;
        if self.config.qk_norm {
            let module = format!("{which}_norm");
            let w = self.weight(&format!("model.layers.{layer}.self_attn.{module}.weight"), 1, head_dim, Layout::Rows);
            let y = self.intermediate(&format!("{which}_normed"), heads * head_dim);
            let kernel = Kernel::QkNorm { rows, head_dim, eps: Epsilon::new(self.config.rms_norm_eps) };
            self.launch(layer, &module, kernel, vec![x, w, y], None);
            x = y;
        }
        let y = self.intermediate(&format!("{which}_rotated"), heads * head_dim);
        self.launch(layer, &format!("{which}_rope"), Kernel::Rope { rows, head_dim }, vec![x, lut, y], Some(which));
        y
    }

    /// The bias of q, k and v on the host, behind all launches that lead to attention.
    fn host_bias(&mut self, layer: usize, [q, k, v]: [BufferId; 3]) {
        // Each is shown with its bias and not before.
        let bare = self.steps.iter_mut().rev().take_while(|step| step.layer == Some(layer));
        bare.for_each(|step| step.taps.retain(|tap| ![q, k, v].contains(&tap.buffer)));
        for (which, x) in [("q", q), ("k", k), ("v", v)] {
            let bias = self.source(&format!("model.layers.{layer}.self_attn.{which}_proj.bias"));
            let op = if which == "v" { HostOp::AddBias { x, bias } } else { HostOp::AddRotatedBias { x, bias } };
            self.host(Some(layer), &format!("{which}_proj_bias"), op);
            self.tap(Some(which), x);
        }
    }

    fn rope_lut(&mut self, which: &str, heads: usize) -> BufferId {
        let name = format!("{which}_rope_lut");
        let cols = heads * self.config.head_dim;
        match self.stage {
            Stage::Prefill { .. } => {
                self.buffer(&name, self.rows, cols, Role::StaticLut, Layout::Rows, Source::RopeLut { heads })
            }
            Stage::Decode => self.buffer(&name, 1, cols, Role::Input, Layout::Rows, Source::Run),
        }
    }

    fn model(mut self) -> Plan {
        let c = self.config;
        let x = self.buffer("hidden_states", self.rows, c.hidden_size, Role::Input, Layout::Rows, Source::Run);
        let q_lut = self.rope_lut("q", self.heads);
        let k_lut = self.rope_lut("k", c.num_key_value_heads);
        self.host(None, "embed_tokens", HostOp::Embed { out: x });
        if self.stage == Stage::Decode {
            self.host(None, "rope_row", HostOp::RopeRow { q_lut, k_lut });
        }
        for layer in 0..c.num_hidden_layers {
            self.layer(layer, x, q_lut, k_lut);
        }
        let normed = self.buffer("final_norm", 1, c.hidden_size, Role::Input, Layout::Rows, Source::Run);
        self.host(None, "final_norm", HostOp::FinalNorm { x, out: normed });
        let head = if c.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let w = self.weight(head, c.vocab_size, c.hidden_size, Layout::LinearWeight);
        let logits = self.buffer("logits", 1, c.vocab_size, Role::Output, Layout::Rows, Source::Run);
        let kernel = Kernel::Gemv { m: c.vocab_size, k: c.hidden_size };
        self.launch(None, "lm_head", kernel, vec![w, normed, logits], None);
        Plan { stage: self.stage, buffers: self.buffers, steps: self.steps, logits }
    }

    fn layer(&mut self, l: usize, x: BufferId, q_lut: BufferId, k_lut: BufferId) {
        let c = self.config;
        let (h, f) = (c.hidden_size, c.intermediate_size);
        let (heads, kv_heads, head_dim) = (self.heads, c.num_key_value_heads, c.head_dim);
        let add = Kernel::Add { rows: self.rows, cols: h };

        let normed = self.rms_norm(l, "input_layernorm", x, "normed");
        let q = self.linear(l, "self_attn.q_proj", c.qkv_bias, (normed, h), heads * head_dim, "q", None);
        let k = self.linear(l, "self_attn.k_proj", c.qkv_bias, (normed, h), kv_heads * head_dim, "k", None);
        let v = self.linear(l, "self_attn.v_proj", c.qkv_bias, (normed, h), kv_heads * head_dim, "v", Some("v"));
        let q = self.rotate(l, "q", q, heads, q_lut);
        let k = self.rotate(l, "k", k, kv_heads, k_lut);
        if c.qkv_bias && self.bias == BiasLowering::Host {
            self.host_bias(l, [q, k, v]);
        }
        self.host(Some(l), "kv_append", HostOp::KvAppend { layer: l, k, v });
        let context = self.intermediate_or_input("attn_context", heads * head_dim);
        match self.stage {
            Stage::Prefill { seq_len } => {
                let kernel = Kernel::Attention { seq: seq_len, heads, kv_heads, head_dim, causal: true };
                self.launch(l, "attention", kernel, vec![q, k, v, context], Some("attn_context"));
            }
            Stage::Decode => {
                self.host(Some(l), "attention", HostOp::DecodeAttention { layer: l, q, out: context });
                self.tap(Some("attn_context"), context);
            }
        }
        let o = self.linear(l, "self_attn.o_proj", c.o_bias, (context, heads * head_dim), h, "o", Some("o_proj"));
        let mid = self.intermediate("attention_residual", h);
        self.launch(l, "attention_add", add.clone(), vec![x, o, mid], None);

        let normed = self.rms_norm(l, "post_attention_layernorm", mid, "normed");
        let gate = self.linear(l, "mlp.gate_proj", c.mlp_bias, (normed, h), f, "gate", Some("gate"));
        let up = self.linear(l, "mlp.up_proj", c.mlp_bias, (normed, h), f, "up", Some("up"));
        let act = self.intermediate("silu_mul", f);
        self.launch(l, "silu_mul", Kernel::SiluMul { rows: self.rows, cols: f }, vec![gate, up, act], Some("silu_mul"));
        let down = self.linear(l, "mlp.down_proj", c.mlp_bias, (act, f), h, "down", Some("down"));
        self.launch(l, "mlp_add", add, vec![mid, down, x], Some("output"));
    }

    /// The attention context comes from the device at prefill and from the host at decode.
    fn intermediate_or_input(&mut self, name: &str, cols: usize) -> BufferId {
        let role = if self.stage == Stage::Decode { Role::Input } else { Role::Intermediate };
        self.buffer(name, self.rows, cols, role, Layout::Rows, Source::Run)
    }
}
