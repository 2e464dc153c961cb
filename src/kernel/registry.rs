//! Looks a kernel's shape up among the measured ones, and says which tolerance its output is judged by.
//!
//! Never guesses: a shape that was not measured is an error with the nearest measured ones and the way to add it.

use crate::error::{Error, Result};
use crate::kernel::facts::{
    self, Figure, Inputs, KernelFacts, NearZero, Origin, Point, Role, Rounding, Row, Sign, Tier, Tolerance,
};
use crate::kernel::{Dtype, Epsilon, Kernel};

/// `eps` of the registry's norms.
const EPS: f64 = 1e-5;

/// Columns of a flat shape.
const FLAT: usize = 1024;

/// How many measured shapes an error names.
const NEAREST: usize = 3;

/// The tolerance a kernel's output is judged by, for one shape and tier. See [`gate`].
#[derive(Debug, Clone)]
pub struct Gate {
    /// The registry's id, which is not the plan's ([`Kernel::id`]).
    pub id: &'static str,
    /// `|y - reference| <= atol + rtol * |reference|` for every element.
    pub rtol: f64,
    pub atol: f64,
    /// Limit of `mean |y - reference| / mean |reference|`.
    pub mean_rel_l1_limit: f64,
    /// Smallest and largest `mean_rel_l1` that the hardware was measured with, where it was.
    pub mean_rel_l1_measured: Option<[f64; 2]>,
    /// Why these numbers, and whether they are upstream's.
    pub why: &'static str,
    pub origin: Origin,
    /// The sign the hardware's mean error has, where the facts give one.
    pub bias: Option<Sign>,
    pub rounding: Rounding,
    /// How the registry's inputs are made. Units of `scale`: standard deviation.
    pub seed: u64,
    pub scale: f64,
    /// The same of each input in binding order: `scale`, but for those that the registry makes otherwise.
    pub scales: Vec<f64>,
    /// Set where `atol` is known to mis-fire on elements near zero: judge by an `atol` scaled to the reference then.
    pub near_zero: Option<&'static NearZero>,
}

/// The registry's id of a kernel of the plan. RMSNorm of a single row is a kernel of its own.
pub fn id_of(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Gemm { out: Dtype::Bf16, .. } | Kernel::GemmLow { .. } => "gemm_bf16_bf16",
        Kernel::Gemm { out: Dtype::F32, .. } => "gemm_bf16_f32",
        Kernel::Gemv { .. } => "gemv_bf16",
        Kernel::GemvAdd { .. } => "matvec_2tile_add",
        Kernel::SwigluRms { .. } => "matvec_swiglu_rms",
        Kernel::LayerNorm { .. } => "layer_norm",
        Kernel::GeluTanh { .. } => "gelu_tanh",
        Kernel::RmsNorm { rows: 1, .. } => "rms_norm_decode",
        Kernel::RmsNorm { .. } => "rms_norm",
        Kernel::QkNorm { .. } => "qk_norm",
        Kernel::Rope { .. } => "rope",
        Kernel::Attention { .. } => "attention",
        Kernel::Add { .. } => "add",
        Kernel::BiasAdd { .. } => "bias_add",
        Kernel::SiluMul { .. } => "silu_mul",
    }
}

/// The shape of a kernel of the plan in the registry's variables.
pub fn shape_of(kernel: &Kernel) -> Point {
    let point = |values: &[(&str, usize)]| -> Point {
        values.iter().map(|&(name, value)| (name.to_owned(), i64::try_from(value).unwrap_or(i64::MAX))).collect()
    };
    match *kernel {
        Kernel::Gemm { m, k, n, .. } | Kernel::GemmLow { m, k, n } => point(&[("M", m), ("K", k), ("N", n)]),
        Kernel::Gemv { m, k } | Kernel::GemvAdd { m, k } | Kernel::SwigluRms { m, k, .. } => {
            point(&[("M", m), ("K", k)])
        }
        Kernel::RmsNorm { rows: 1, cols, .. } => point(&[("N", cols)]),
        Kernel::RmsNorm { rows, cols, .. } | Kernel::LayerNorm { rows, cols, .. } | Kernel::BiasAdd { rows, cols } => {
            point(&[("M", rows), ("N", cols)])
        }
        Kernel::QkNorm { rows, head_dim, .. } => point(&[("M", rows), ("N", head_dim)]),
        Kernel::Rope { rows, head_dim } => point(&[("rows", rows), ("head_dim", head_dim)]),
        Kernel::Attention { seq, heads, kv_heads, head_dim, causal } => point(&[
            ("lq", seq),
            ("lk", seq),
            ("dk", head_dim),
            ("dv", head_dim),
            ("n_heads", heads),
            ("n_kv_heads", kv_heads),
            ("causal", usize::from(causal)),
        ]),
        Kernel::Add { rows, cols } | Kernel::SiluMul { rows, cols } | Kernel::GeluTanh { rows, cols } => {
            point(&[("N", rows.saturating_mul(cols))])
        }
    }
}

/// The kernel of the plan that has this shape; none where the registry's shape is wider than the plan's kernels (a value
/// head of another width, a query longer or shorter than the keys). Norms are those of the registry's `eps`, and flat
/// element-wise shapes rows of at most 1024.
pub fn kernel_of(facts: &KernelFacts, shape: &Point, tier: Option<Tier>) -> Option<Kernel> {
    let at = |name: &str| shape.get(name).and_then(|&x| usize::try_from(x).ok()).filter(|&x| x > 0);
    let eps = Epsilon::new(EPS);
    let flat = || {
        let len = at("N")?;
        let cols = if len.is_multiple_of(FLAT) { FLAT } else { len };
        Some((len / cols, cols))
    };
    Some(match facts.id.as_str() {
        "gemm_bf16_bf16" if tier == Some(Tier::Low) => Kernel::GemmLow { m: at("M")?, k: at("K")?, n: at("N")? },
        "gemm_bf16_bf16" => Kernel::Gemm { m: at("M")?, k: at("K")?, n: at("N")?, out: Dtype::Bf16 },
        "gemm_bf16_f32" => Kernel::Gemm { m: at("M")?, k: at("K")?, n: at("N")?, out: Dtype::F32 },
        "gemv_bf16" => Kernel::Gemv { m: at("M")?, k: at("K")? },
        "matvec_2tile_add" => Kernel::GemvAdd { m: at("M")?, k: at("K")? },
        "matvec_swiglu_rms" => Kernel::SwigluRms { m: at("M")?, k: at("K")?, eps },
        "rms_norm" => Kernel::RmsNorm { rows: at("M")?, cols: at("N")?, eps },
        "rms_norm_decode" => Kernel::RmsNorm { rows: 1, cols: at("N")?, eps },
        "qk_norm" => Kernel::QkNorm { rows: at("M")?, head_dim: at("N")?, eps },
        "layer_norm" => Kernel::LayerNorm { rows: at("M")?, cols: at("N")?, eps },
        "rope" => Kernel::Rope { rows: at("rows")?, head_dim: at("head_dim")? },
        "attention" if at("dk")? == at("dv")? && at("lq")? == at("lk")? => Kernel::Attention {
            seq: at("lq")?,
            heads: at("n_heads")?,
            kv_heads: at("n_kv_heads")?,
            head_dim: at("dk")?,
            causal: shape.get("causal")? == &1,
        },
        "bias_add" => Kernel::BiasAdd { rows: at("M")?, cols: at("N")? },
        "add" => flat().map(|(rows, cols)| Kernel::Add { rows, cols })?,
        "silu_mul" => flat().map(|(rows, cols)| Kernel::SiluMul { rows, cols })?,
        "gelu_tanh" => flat().map(|(rows, cols)| Kernel::GeluTanh { rows, cols })?,
        _ => return None,
    })
}

/// The facts of a kernel of the plan.
///
/// Errors: as [`facts::all`].
pub fn facts_of(kernel: &Kernel) -> Result<&'static KernelFacts> {
    facts::of(id_of(kernel))
}

/// The tolerance that phase 1 judges a kernel by.
///
/// The check is upstream's: every element of the whole output within `atol + rtol * |reference|` of an f32 oracle whose
/// result is cast to the output's dtype first. `mean_rel_l1_limit` comes on top, for an element-wise tolerance alone
/// lets some nonsense pass.
///
/// Errors: as [`facts::all`].
pub fn gate(kernel: &Kernel) -> Result<Gate> {
    gate_at(kernel, own_tier(kernel).unwrap_or(Tier::High))
}

/// The tier that a kernel of the plan says itself.
pub fn own_tier(kernel: &Kernel) -> Option<Tier> {
    matches!(kernel, Kernel::GemmLow { .. }).then_some(Tier::Low)
}

/// [`gate`] of a tier; kernels without tiers have one gate.
///
/// Errors: as [`facts::all`].
pub fn gate_at(kernel: &Kernel, tier: Tier) -> Result<Gate> {
    let facts = facts_of(kernel)?;
    let shape = shape_of(kernel);
    let of_tier = |t: &&Tolerance| t.tier.is_none() || t.tier == Some(tier);
    let tolerance = facts.tolerances.iter().find(of_tier).ok_or_else(|| Error::Unknown {
        kind: "tier",
        name: format!("{} {tier}", facts.id),
        known: "high".into(),
    })?;
    let columns = shape.get("N").copied().unwrap_or(0) as f64;
    let extra = tolerance.per_column.map_or((0.0, 0.0), |p| (p.rtol * columns, p.mean_rel_l1 * columns));
    Ok(Gate {
        id: &facts.id,
        rtol: tolerance.rtol + extra.0,
        atol: tolerance.atol,
        mean_rel_l1_limit: tolerance.mean_rel_l1.limit + extra.1,
        mean_rel_l1_measured: tolerance.mean_rel_l1.measured,
        why: &tolerance.why,
        origin: tolerance.origin,
        bias: facts.signed_bias.as_ref().map(|b| b.sign),
        rounding: facts.rounding,
        seed: facts.inputs.seed,
        scale: scale(&facts.inputs, &shape),
        scales: scales(facts, &shape),
        near_zero: facts.near_zero.as_ref(),
    })
}

fn scale(inputs: &Inputs, shape: &Point) -> f64 {
    let over = inputs.over_sqrt.as_ref().and_then(|name| shape.get(name)).map_or(1.0, |&n| (n as f64).sqrt());
    inputs.factor / over
}

fn scales(facts: &KernelFacts, shape: &Point) -> Vec<f64> {
    let inputs = facts.args.iter().filter(|arg| matches!(arg.role, Role::Input | Role::Weight));
    let scale = scale(&facts.inputs, shape);
    inputs.map(|arg| facts.inputs.of.get(&arg.name).copied().unwrap_or(scale)).collect()
}

/// A measured row and how far its shape is away.
#[derive(Debug, Clone, Copy)]
pub struct Near {
    pub row: &'static Row,
    /// Euclidean, over the base-2 logarithms of the dimensions: 1 is a factor of 2 in one of them.
    pub distance: f64,
}

/// The rows measured for a kernel: its own, or those of the kernel it is another name of.
///
/// Errors: as [`facts::all`].
pub fn rows_of(facts: &KernelFacts) -> Result<&'static [Row]> {
    let id = facts.same_kernel_as.as_deref().unwrap_or(&facts.id);
    Ok(&facts::of(id)?.measured)
}

/// The best measured config of exactly this shape. Without a tier the high one comes before the low one.
///
/// Errors: as [`facts::all`].
pub fn best(facts: &KernelFacts, shape: &Point, tier: Option<Tier>) -> Result<Option<&'static Row>> {
    let rows = rows_of(facts)?.iter().filter(|r| r.shape == *shape && in_tier(r, tier));
    Ok(rows.min_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(std::cmp::Ordering::Equal)))
}

fn in_tier(row: &Row, tier: Option<Tier>) -> bool {
    tier.is_none() || row.tier.is_none() || row.tier == tier
}

/// High tier first, the row marked best first, then by time; what has no time comes last.
fn order(row: &Row) -> (bool, bool, f64) {
    let time = row.latency_us.map(Figure::mean).or(row.gflops.map(|g| 1e12 / g.mean()));
    (row.tier == Some(Tier::Low), !row.best, time.unwrap_or(f64::INFINITY))
}

/// The measured shapes nearest to this one, nearest first, each with its best config.
///
/// Errors: as [`facts::all`].
pub fn nearest(facts: &KernelFacts, shape: &Point, tier: Option<Tier>, count: usize) -> Result<Vec<Near>> {
    let mut near: Vec<Near> = Vec::new();
    for row in rows_of(facts)?.iter().filter(|r| in_tier(r, tier)) {
        if near.iter().any(|n| n.row.shape == row.shape) {
            continue;
        }
        let row = best(facts, &row.shape, tier)?.unwrap_or(row);
        near.push(Near { row, distance: distance(shape, &row.shape) });
    }
    near.sort_by(|a, b| a.distance.total_cmp(&b.distance));
    near.truncate(count);
    Ok(near)
}

/// Distance of two shapes over the dimensions they share; another mask counts as a factor of 4.
fn distance(a: &Point, b: &Point) -> f64 {
    let squares = a.iter().filter_map(|(name, &x)| {
        let &y = b.get(name)?;
        let log = |v: i64| (v.max(1) as f64).log2();
        Some(if name == "causal" { (4 * (x - y).pow(2)) as f64 } else { (log(x) - log(y)).powi(2) })
    });
    squares.sum::<f64>().sqrt()
}

/// The best measured config of a kernel of the plan.
///
/// Errors: [`Error::Unavailable`] for a shape that was never measured: the nearest measured shapes and how to add it.
pub fn lookup(kernel: &Kernel, tier: Option<Tier>) -> Result<&'static Row> {
    let facts = facts_of(kernel)?;
    let shape = shape_of(kernel);
    let tier = own_tier(kernel).or(tier);
    match best(facts, &shape, tier)? {
        Some(row) => Ok(row),
        None => {
            let test = kernel.to_string();
            Err(unmeasured(facts, &shape, tier, &test)?)
        }
    }
}

/// The error that [`lookup`] gives for this shape; `test` is the phase 1 case that measures it.
///
/// Errors: as [`facts::all`].
pub fn unmeasured(facts: &KernelFacts, shape: &Point, tier: Option<Tier>, test: &str) -> Result<Error> {
    let near: Vec<String> =
        nearest(facts, shape, tier, NEAREST)?.iter().map(|n| facts.name_shape(&n.row.shape)).collect();
    let near = if near.is_empty() { "none".into() } else { near.join("; ") };
    let spaced = facts.name_shape(shape);
    let tier = tier.filter(|_| facts.has_tiers()).map(|t| format!(" at the {t} tier")).unwrap_or_default();
    let why = format!(
        "never measured{tier}; nearest measured: {near}; to add it, measure it with `PHASEGATE_DEVICES=npu cargo test \
         --test phase1 -- {test}` and append the row to kernels/{id}.json; `phasegate kernels {id} --shape {commas}` \
         proposes its tile config",
        id = facts.id,
        commas = spaced.replace(' ', ",")
    );
    Ok(Error::Unavailable { what: format!("kernel {} at {spaced}", facts.id), why })
}

impl KernelFacts {
    /// `M=2048 K=896 N=128`, in the order in which the kernel declares its dimensions.
    pub fn name_shape(&self, shape: &Point) -> String {
        let named = self.shape_names().filter_map(|name| Some(format!("{name}={}", shape.get(name)?)));
        named.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn gemm(m: usize, k: usize, n: usize) -> Kernel {
        Kernel::Gemm { m, k, n, out: Dtype::Bf16 }
    }

    #[rstest]
    #[case(gemm(2048, 2048, 2048), None, "fused_cast", 6215.0)]
    #[case(gemm(2048, 2048, 2048), Some(Tier::Low), "direct", 5230.0)]
    // Measured at the low tier only.
    #[case(gemm(2048, 896, 4864), None, "direct", 4320.0)]
    #[case(gemm(512, 512, 512), Some(Tier::High), "drain", 1703.0)]
    #[case(Kernel::Gemm { m: 2048, k: 8192, n: 2048, out: Dtype::F32 }, None, "external", 9797.0)]
    fn the_best_measured_config(
        #[case] kernel: Kernel,
        #[case] tier: Option<Tier>,
        #[case] method: &str,
        #[case] gflops: f64,
    ) {
        let row = lookup(&kernel, tier).unwrap();
        assert_eq!((row.method.as_deref(), row.gflops), (Some(method), Some(Figure::One(gflops))));
    }

    #[test]
    fn every_measured_row_is_found() {
        for facts in facts::all().unwrap() {
            for row in &facts.measured {
                let found = best(facts, &row.shape, row.tier).unwrap().unwrap();
                assert!(found.shape == row.shape && found.tier == row.tier, "{}: {:?}", facts.id, row.shape);
            }
        }
    }

    #[test]
    fn qk_norm_is_looked_up_among_the_rows_of_rms_norm() {
        let row = lookup(&Kernel::QkNorm { rows: 2048, head_dim: 128, eps: Epsilon::new(1e-6) }, None).unwrap();
        assert_eq!(row.latency_us, Some(Figure::One(155.0)));
    }

    #[test]
    fn an_unmeasured_shape_is_an_error_that_helps() {
        let error = lookup(&gemm(128, 576, 1536), None).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Unavailable { .. }));
        for part in [
            "gemm_bf16_bf16 at M=128 K=576 N=1536",
            "nearest measured: M=64 K=720 N=1600;",
            "cargo test --test phase1 -- gemm_bf16::m0128_k0576_n1536",
            "phasegate kernels gemm_bf16_bf16 --shape M=128,K=576,N=1536",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let own = lookup(&Kernel::GemmLow { m: 2048, k: 2048, n: 2048 }, None).unwrap();
        assert_eq!((own.method.as_deref(), own.gflops), (Some("direct"), Some(Figure::One(5230.0))));
        let low = lookup(&gemm(2048, 2048, 1024), Some(Tier::Low)).unwrap_err().to_string();
        assert!(low.contains("at the low tier; nearest measured: M=2048 K=2048 N=512;"), "{low}");
    }

    #[test]
    fn nearer_is_nearer_in_every_dimension() {
        let facts = facts::of("rope").unwrap();
        let shape = shape_of(&Kernel::Rope { rows: 4097, head_dim: 64 });
        let near = nearest(facts, &shape, None, 3).unwrap();
        assert_eq!(near[0].row.shape["rows"], 4096);
        assert!(near[0].distance < 0.001 && near[1].distance >= 0.99);
    }

    #[rstest]
    #[case(gemm(1, 2, 3), "gemm_bf16_bf16", 0.016, 0.0015)]
    #[case(Kernel::Gemm { m: 1, k: 2, n: 3, out: Dtype::F32 }, "gemm_bf16_f32", 0.016, 0.0015)]
    #[case(Kernel::Gemv { m: 2, k: 3 }, "gemv_bf16", 0.016, 0.001)]
    #[case(Kernel::RmsNorm { rows: 2, cols: 64, eps: Epsilon::new(1e-5) }, "rms_norm", 0.016, 0.05)]
    #[case(Kernel::QkNorm { rows: 1, head_dim: 64, eps: Epsilon::new(1e-5) }, "qk_norm", 0.016, 0.05)]
    #[case(Kernel::Rope { rows: 2, head_dim: 64 }, "rope", 0.016, 0.05)]
    #[case(Kernel::Attention { seq: 2, heads: 2, kv_heads: 1, head_dim: 64, causal: true }, "attention", 0.016, 0.1)]
    #[case(Kernel::Add { rows: 1, cols: 2 }, "add", 0.016, 0.05)]
    #[case(Kernel::BiasAdd { rows: 1, cols: 2 }, "bias_add", 0.016, 0.05)]
    #[case(Kernel::SiluMul { rows: 1, cols: 2 }, "silu_mul", 0.016, 0.08)]
    #[case(Kernel::GemmLow { m: 1, k: 2, n: 3 }, "gemm_bf16_bf16", 0.016, 0.004)]
    #[case(Kernel::GemvAdd { m: 2, k: 3 }, "matvec_2tile_add", 0.016, 0.1)]
    #[case(Kernel::SwigluRms { m: 2, k: 3, eps: Epsilon::new(1e-5) }, "matvec_swiglu_rms", 0.08, 0.01)]
    #[case(Kernel::LayerNorm { rows: 2, cols: 64, eps: Epsilon::new(1e-5) }, "layer_norm", 0.016, 0.06)]
    #[case(Kernel::GeluTanh { rows: 1, cols: 2 }, "gelu_tanh", 0.016, 0.05)]
    fn gates(#[case] kernel: Kernel, #[case] id: &str, #[case] rtol: f64, #[case] atol: f64) {
        let gate = gate(&kernel).unwrap();
        assert_eq!((gate.id, gate.rtol, gate.atol), (id, rtol, atol));
        assert!(gate.mean_rel_l1_limit > 0.0 && gate.mean_rel_l1_limit < 0.1);
        assert!(gate.mean_rel_l1_measured.is_none_or(|[low, high]| low <= high && high <= gate.mean_rel_l1_limit));
    }

    /// A kernel of every measured shape that is one, and it has that shape.
    #[test]
    fn a_shape_and_its_kernel() {
        for facts in facts::all().unwrap() {
            for row in &facts.measured {
                match kernel_of(facts, &row.shape, row.tier) {
                    Some(kernel) => assert_eq!((shape_of(&kernel), id_of(&kernel)), (row.shape.clone(), &*facts.id)),
                    None => assert!(facts.id == "attention", "{}: {:?}", facts.id, row.shape),
                }
            }
        }
    }

    /// The plan's arguments are the registry's, one for one, scratch left out.
    #[rstest]
    #[case(gemm(1, 2, 3), &[1.0 / 2f64.sqrt(); 2])]
    #[case(Kernel::GemvAdd { m: 2, k: 3 }, &[0.02, 1.0, 1.0])]
    #[case(Kernel::SwigluRms { m: 2, k: 3, eps: Epsilon::new(1e-5) }, &[1.0, 0.02])]
    #[case(Kernel::LayerNorm { rows: 2, cols: 3, eps: Epsilon::new(1e-5) }, &[1.0, 1.0])]
    fn every_input_has_a_scale(#[case] kernel: Kernel, #[case] scales: &[f64]) {
        assert_eq!(gate(&kernel).unwrap().scales, scales);
        assert_eq!(scales.len() + 1, kernel.args().len());
    }

    #[test]
    fn tiers_scales_and_columns_enter_the_gate() {
        let low = gate_at(&gemm(64, 1024, 64), Tier::Low).unwrap();
        assert_eq!((low.atol, low.scale), (0.004, 1.0 / 32.0));
        assert_eq!(gate(&Kernel::Gemv { m: 2, k: 3 }).unwrap().scale, 4.0);
        let decode = gate(&Kernel::RmsNorm { rows: 1, cols: 2048, eps: Epsilon::new(1e-5) }).unwrap();
        assert_eq!(decode.id, "rms_norm_decode");
        // 6.7e-2 simulated, 6.9e-2 measured for the pattern.
        assert!((0.1..0.13).contains(&decode.mean_rel_l1_limit) && decode.bias == Some(Sign::Positive));
    }
}
