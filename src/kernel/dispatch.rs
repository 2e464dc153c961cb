//! The fused dispatches that upstream's models are built of, as data: `kernels/dispatch/<id>.json`, embedded.
//!
//! Each file lists a dispatch's arguments in binding order, its launches over them, and which arguments are static,
//! intermediate, sent at every call, or read back. Which launch reads which argument is derived from their names and
//! shapes, and kept by the tests below.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernel::expr::{Bindings, Expr};
use crate::kernel::facts::{self, FactDtype, Point};

/// Every file of `kernels/dispatch/`, by its name without `.json`.
const FILES: [(&str, &str); 22] = [
    ("rms_gemms_rope", include_str!("../../kernels/dispatch/rms_gemms_rope.json")),
    ("rms_qkv_qknorm_rope", include_str!("../../kernels/dispatch/rms_qkv_qknorm_rope.json")),
    ("rms_qkv_bias_rope", include_str!("../../kernels/dispatch/rms_qkv_bias_rope.json")),
    ("flash_attn", include_str!("../../kernels/dispatch/flash_attn.json")),
    ("o_ffn", include_str!("../../kernels/dispatch/o_ffn.json")),
    ("o_ffn_qwen", include_str!("../../kernels/dispatch/o_ffn_qwen.json")),
    ("o_ffn_head", include_str!("../../kernels/dispatch/o_ffn_head.json")),
    ("down_add", include_str!("../../kernels/dispatch/down_add.json")),
    ("o_res_norm", include_str!("../../kernels/dispatch/o_res_norm.json")),
    ("gate_up", include_str!("../../kernels/dispatch/gate_up.json")),
    ("gate", include_str!("../../kernels/dispatch/gate.json")),
    ("up", include_str!("../../kernels/dispatch/up.json")),
    ("swiglu", include_str!("../../kernels/dispatch/swiglu.json")),
    ("rms_gemv_rope", include_str!("../../kernels/dispatch/rms_gemv_rope.json")),
    ("rms_qkv_qknorm_rope_gemv", include_str!("../../kernels/dispatch/rms_qkv_qknorm_rope_gemv.json")),
    ("rms_qkv_bias_rope_gemv", include_str!("../../kernels/dispatch/rms_qkv_bias_rope_gemv.json")),
    ("o_gemv_ffn", include_str!("../../kernels/dispatch/o_gemv_ffn.json")),
    ("o_gemv", include_str!("../../kernels/dispatch/o_gemv.json")),
    ("gate_gemv", include_str!("../../kernels/dispatch/gate_gemv.json")),
    ("up_gemv", include_str!("../../kernels/dispatch/up_gemv.json")),
    ("down_gemv", include_str!("../../kernels/dispatch/down_gemv.json")),
    ("lm_head_gemv", include_str!("../../kernels/dispatch/lm_head_gemv.json")),
];

/// What the shapes and conditions of a dispatch are written in.
pub const SYMBOLS: [(&str, &str); 16] = [
    ("S", "positions of the prefill, padding included"),
    ("E", "hidden_size"),
    ("Q", "num_attention_heads * head_dim"),
    ("KV", "num_key_value_heads * head_dim"),
    ("F", "intermediate_size"),
    ("hd", "head_dim"),
    ("H", "num_attention_heads"),
    ("Hkv", "num_key_value_heads"),
    ("V", "vocab_size"),
    ("P", "partitions of the vocabulary"),
    ("n_part", "rows of a partition"),
    ("Epad", "E with padded columns"),
    ("Qpad", "Q with padded columns"),
    ("KVpad", "KV with padded columns"),
    ("dv_chunks", "pieces of a value head"),
    ("dv_tile", "columns of a piece"),
];

/// One fused dispatch.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dispatch {
    pub id: String,
    pub stage: DispatchStage,
    /// Upstream's models that run it.
    pub used_by: Vec<String>,
    /// When it may be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requires: Option<Requires>,
    pub launches: Vec<DispatchLaunch>,
    pub args: Vec<DispatchArg>,
    /// Arguments that come once per partition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<Repeated>,
    pub index_sets: IndexSets,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<Scratch>,
    pub buffers: Buffers,
    /// Whether layers share what is not static.
    pub shared_nonstatic: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiles: Vec<LaunchTiles>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DispatchStage {
    Prefill,
    Decode,
    /// Decode and the last position of a prefill.
    Head,
}

/// A condition on the model, over [`SYMBOLS`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requires {
    pub expr: Expr,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// One leaf kernel over the dispatch's arguments, in the kernel's argument order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DispatchLaunch {
    pub name: String,
    /// The registry's id.
    pub kernel: String,
    /// Places in [`Dispatch::args`]; a GEMM's scratch is not among them.
    pub args: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DispatchArg {
    pub name: String,
    pub dtype: FactDtype,
    pub shape: Vec<Expr>,
    /// Its shape in the head-first layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_first: Option<Vec<Expr>>,
    pub role: DispatchRole,
    /// A static argument that the device writes in part.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device_written: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DispatchRole {
    Input,
    StaticWeight,
    StaticLut,
    Intermediate,
    Output,
    /// Bound and never touched.
    Dead,
}

/// Arguments `first ..` that come `count` times, `args` at a time.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeated {
    pub count: String,
    pub first: usize,
    pub args: usize,
    pub note: String,
}

/// Places in [`Dispatch::args`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexSets {
    /// Read back after a call.
    pub outputs: Vec<usize>,
    /// Written by the host once.
    #[serde(rename = "static")]
    pub static_inputs: Vec<usize>,
    /// Never written by the host.
    pub intermediate: Vec<usize>,
    /// Written by the host at every call.
    pub per_call: Vec<usize>,
}

/// How upstream cuts a vocabulary.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    pub models: Vec<String>,
    #[serde(rename = "P")]
    pub count: i64,
    pub n_part: i64,
    pub vocab: i64,
    pub padded: i64,
}

/// The scratch rule: for each of these GEMMs whose method is `fused_cast`, one f32 `[M,N]` argument is appended behind
/// the declared ones, in this order, and is intermediate.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scratch {
    pub gemms: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffers {
    /// A set of buffers a layer.
    PerLayer,
    /// One set for all calls.
    Shared,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_loop_tiling: Option<[i64; 2]>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub omit_pingpong: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omit_while_true_loop: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Tile config of a launch, for some models or shapes only where it says so.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchTiles {
    pub launch: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<Expr>,
    pub config: Point,
}

impl Dispatch {
    /// Whether a model, given as values of [`SYMBOLS`], meets its condition.
    ///
    /// Errors: [`Error::Usage`] when a symbol is missing.
    pub fn fits(&self, model: &Bindings) -> Result<bool> {
        self.requires.as_ref().map_or(Ok(true), |requires| requires.expr.holds(model))
    }

    /// The GEMMs that get a scratch argument, in the order of the arguments, by the method of each launch.
    pub fn scratch_of<'a>(&'a self, method: impl Fn(&str) -> Option<&'a str>) -> Vec<&'a str> {
        let gemms = self.scratch.iter().flat_map(|s| &s.gemms);
        gemms.map(String::as_str).filter(|gemm| method(gemm) == Some("fused_cast")).collect()
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let symbols: BTreeSet<&str> = SYMBOLS.iter().map(|(name, _)| *name).collect();
        let shapes = self.args.iter().flat_map(|a| a.shape.iter().chain(a.head_first.iter().flatten()));
        let conditions = self.requires.iter().map(|r| &r.expr).chain(self.tiles.iter().filter_map(|t| t.when.as_ref()));
        for expr in shapes.chain(conditions) {
            if let Some(name) = expr.reads().iter().find(|name| !symbols.contains(name.as_str())) {
                faults.push(format!("{expr} reads {name}, which is no symbol"));
            }
        }
        let sets = &self.index_sets;
        let mut indices =
            sets.outputs.iter().chain(&sets.static_inputs).chain(&sets.intermediate).chain(&sets.per_call);
        let mut of_launches = self.launches.iter().flat_map(|l| &l.args);
        if indices.any(|&i| i >= self.args.len()) || of_launches.any(|&i| i >= self.args.len()) {
            faults.push("an index is beyond the arguments".into());
        }
        let launches: BTreeSet<&str> = self.launches.iter().map(|l| l.name.as_str()).collect();
        let named = self.scratch.iter().flat_map(|s| &s.gemms).chain(self.tiles.iter().map(|t| &t.launch));
        for name in named.filter(|name| !launches.contains(name.as_str())) {
            faults.push(format!("no launch is called {name}"));
        }
        for launch in self.launches.iter().filter(|l| !facts::FILES.iter().any(|(id, _)| *id == l.kernel)) {
            faults.push(format!("{}: no kernel is called {}", launch.name, launch.kernel));
        }
        faults
    }
}

/// Every fused dispatch.
///
/// Errors: [`Error::Malformed`] for a file that breaks the schema, which the tests of this module rule out.
pub fn all() -> Result<&'static [Dispatch]> {
    static ALL: OnceLock<std::result::Result<Vec<Dispatch>, (String, String)>> = OnceLock::new();
    let all = ALL.get_or_init(|| FILES.iter().map(|(id, text)| read(id, text)).collect());
    match all {
        Ok(all) => Ok(all),
        Err((path, why)) => Err(Error::malformed(path, why.clone())),
    }
}

/// One fused dispatch.
///
/// Errors: [`Error::Unknown`] with the known ids.
pub fn of(id: &str) -> Result<&'static Dispatch> {
    let all = all()?;
    all.iter().find(|d| d.id == id).ok_or_else(|| {
        let known = all.iter().map(|d| d.id.as_str()).collect::<Vec<_>>().join(", ");
        Error::Unknown { kind: "dispatch", name: id.into(), known }
    })
}

fn read(id: &str, text: &str) -> std::result::Result<Dispatch, (String, String)> {
    let path = format!("kernels/dispatch/{id}.json");
    let dispatch: Dispatch = serde_json::from_str(text).map_err(|e| (path.clone(), e.to_string()))?;
    let mut faults = dispatch.faults();
    if dispatch.id != id {
        faults.push(format!("id: found {}", dispatch.id));
    }
    if faults.is_empty() { Ok(dispatch) } else { Err((path, faults.join("; "))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::facts::Role;
    use rstest::rstest;

    fn set(indices: &[usize]) -> BTreeSet<usize> {
        indices.iter().copied().collect()
    }

    #[test]
    fn every_file_is_embedded_and_sound() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/dispatch");
        let files = std::fs::read_dir(folder).unwrap();
        let there: BTreeSet<String> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(there, FILES.iter().map(|(id, _)| format!("{id}.json")).collect());
        assert_eq!(all().unwrap().len(), 22);
    }

    #[test]
    fn every_argument_is_static_intermediate_or_sent() {
        for d in all().unwrap() {
            let IndexSets { outputs, static_inputs, intermediate, per_call } = &d.index_sets;
            let together = static_inputs.len() + intermediate.len() + per_call.len();
            let union = set(static_inputs).into_iter().chain(set(intermediate)).chain(set(per_call)).collect();
            assert_eq!((together, set(&(0..d.args.len()).collect::<Vec<_>>())), (d.args.len(), union), "{}", d.id);
            // Attention's output is sent at every call, for want of the mark.
            assert!(d.id == "flash_attn" || set(outputs).is_subset(&set(intermediate)), "{}", d.id);
        }
    }

    #[test]
    fn roles_agree_with_the_index_sets() {
        for d in all().unwrap() {
            for (index, arg) in d.args.iter().enumerate() {
                let is = |indices: &[usize]| indices.contains(&index);
                let sets = &d.index_sets;
                let place = format!("{}: {}", d.id, arg.name);
                let launched = d.launches.iter().any(|l| l.args.contains(&index));
                let fixed = matches!(arg.role, DispatchRole::StaticWeight | DispatchRole::StaticLut);
                assert_eq!(fixed, is(&sets.static_inputs), "{place}");
                assert_eq!(arg.role == DispatchRole::Output, is(&sets.outputs), "{place}");
                assert_eq!(arg.role == DispatchRole::Dead, !launched, "{place}");
                assert!(arg.role != DispatchRole::Input || is(&sets.per_call), "{place}");
            }
        }
    }

    /// A launch has its kernel's arguments, of the same rank or flat, and reads only what is there by then.
    #[test]
    fn launches_follow_their_kernels() {
        for d in all().unwrap() {
            let mut written: BTreeSet<usize> = set(&d.index_sets.static_inputs);
            written.extend(d.args.iter().enumerate().filter(|(_, a)| a.role == DispatchRole::Input).map(|(i, _)| i));
            for launch in &d.launches {
                let place = format!("{}: {}", d.id, launch.name);
                let kernel = facts::of(&launch.kernel).unwrap();
                let args: Vec<_> = kernel.args.iter().filter(|a| a.role != Role::Scratch).collect();
                assert_eq!(args.len(), launch.args.len(), "{place}");
                for (arg, index) in args.iter().zip(&launch.args) {
                    let there = &d.args[*index];
                    assert_eq!(arg.dtype, there.dtype, "{place}: {}", there.name);
                    match arg.role {
                        Role::Output => assert!(written.insert(*index) || there.device_written, "{place}"),
                        _ => assert!(written.contains(index), "{place} reads {} too early", there.name),
                    }
                    let fixed = matches!(there.role, DispatchRole::StaticWeight | DispatchRole::StaticLut);
                    assert!(!fixed || arg.role != Role::Input || there.device_written, "{place}: {}", there.name);
                }
            }
            assert!(d.index_sets.outputs.iter().all(|i| written.contains(i)), "{}: an output is never written", d.id);
        }
    }

    #[rstest]
    #[case("rms_gemms_rope", 13)]
    #[case("rms_qkv_qknorm_rope", 17)]
    #[case("rms_qkv_bias_rope", 19)]
    #[case("o_ffn", 15)]
    #[case("o_ffn_head", 12)]
    #[case("o_gemv_ffn", 15)]
    #[case("lm_head_gemv", 3)]
    fn arguments_without_scratch(#[case] id: &str, #[case] args: usize) {
        assert_eq!(of(id).unwrap().args.len(), args);
    }

    #[rstest]
    // Llama-3.2-1B and Qwen3-0.6B.
    #[case(2048, 2048, 8192, "rms_gemms_rope", true)]
    #[case(1024, 2048, 3072, "rms_gemms_rope", false)]
    #[case(1024, 2048, 3072, "o_gemv_ffn", true)]
    #[case(2560, 4096, 9728, "o_gemv_ffn", false)]
    #[case(2560, 4096, 9728, "rms_qkv_qknorm_rope", true)]
    fn conditions(#[case] e: i64, #[case] q: i64, #[case] f: i64, #[case] id: &str, #[case] fits: bool) {
        let model = [("E", e), ("Q", q), ("F", f)].into_iter().collect();
        assert_eq!(of(id).unwrap().fits(&model).unwrap(), fits);
    }

    #[test]
    fn a_fused_cast_gets_scratch_in_gemm_order() {
        let d = of("rms_gemms_rope").unwrap();
        assert_eq!(d.scratch_of(|_| Some("fused_cast")), ["gemm_q", "gemm_k", "gemm_v"]);
        assert_eq!(d.scratch_of(|gemm| Some(if gemm == "gemm_q" { "fused_cast" } else { "drain" })), ["gemm_q"]);
    }
}
