//! Whether a model's layer is Llama's, kernel for kernel: then Llama's fused dispatches may be used as they are.

use std::fmt;

use super::{HostOp, Op, Plan};

/// The layer whose fused dispatches exist.
///
/// Source: mlir-air's Llama runner: RMSNorm, Q/K/V, RoPE, attention, O, add, RMSNorm, gate/up, SwiGLU, down, add.
const LLAMA: &[&str] = &[
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_add",
    "post_attention_layernorm",
    "gate_proj",
    "up_proj",
    "silu_mul",
    "down_proj",
    "mlp_add",
];

/// Verdict of the comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inheritance {
    /// The same kernels in the same order.
    Inherits,
    /// Composed kernel by kernel: the first call site that Llama's layer does not have there.
    KernelFirst { breaker: String, expected: String },
}

impl fmt::Display for Inheritance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Inheritance::Inherits => f.write_str("inherits llama's layer"),
            Inheritance::KernelFirst { breaker, expected } => {
                write!(f, "kernel-first: {breaker} stands where llama's layer has {expected}")
            }
        }
    }
}

/// Compares the kernel sequence of each layer of `plan` with Llama's.
pub fn inheritance(plan: &Plan) -> Inheritance {
    let layers = plan.steps.iter().filter_map(|s| s.layer).max().map_or(0, |l| l + 1);
    for layer in 0..layers {
        let prefix = format!("l{layer:02}.");
        let sites: Vec<&str> = plan
            .steps
            .iter()
            .filter(|s| s.layer == Some(layer))
            .flat_map(|step| match &step.op {
                Op::Dispatch(launches) => launches.iter().map(|l| l.site()).collect(),
                // At decode attention is a host op, as upstream has it; the cache update is no kernel in either stage.
                Op::Host(HostOp::DecodeAttention { .. }) => vec!["attention"],
                Op::Host(_) => vec![],
            })
            .collect();
        let end = ["the end of the layer"];
        let differs =
            sites.iter().chain(&end).zip(LLAMA.iter().chain(&end)).find(|(found, expected)| found != expected);
        if let Some((found, expected)) = differs {
            return Inheritance::KernelFirst { breaker: format!("{prefix}{found}"), expected: (*expected).into() };
        }
    }
    Inheritance::Inherits
}
