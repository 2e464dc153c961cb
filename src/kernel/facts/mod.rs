//! What is known of each leaf kernel, as data: `kernels/<id>.json`, one file a kernel, embedded in the binary.
//!
//! Sources: mlir-air's kernel registry and examples (commit e972f2942, measured on NPU2), and own analysis where a
//! constraint says `inferred`. Only reads and checks; [`crate::kernel::registry`] looks up,
//! [`crate::kernel::placement`] places.

mod schema;

use std::collections::BTreeSet;
use std::sync::OnceLock;

pub use schema::*;

use crate::error::{Error, Result};
use crate::kernel::expr::Expr;

/// Every file of `kernels/`, by its name without `.json`.
pub(crate) const FILES: [(&str, &str); 15] = [
    ("gemm_bf16_bf16", include_str!("../../../kernels/gemm_bf16_bf16.json")),
    ("gemm_bf16_f32", include_str!("../../../kernels/gemm_bf16_f32.json")),
    ("gemv_bf16", include_str!("../../../kernels/gemv_bf16.json")),
    ("attention", include_str!("../../../kernels/attention.json")),
    ("rms_norm", include_str!("../../../kernels/rms_norm.json")),
    ("rms_norm_decode", include_str!("../../../kernels/rms_norm_decode.json")),
    ("qk_norm", include_str!("../../../kernels/qk_norm.json")),
    ("layer_norm", include_str!("../../../kernels/layer_norm.json")),
    ("rope", include_str!("../../../kernels/rope.json")),
    ("add", include_str!("../../../kernels/add.json")),
    ("bias_add", include_str!("../../../kernels/bias_add.json")),
    ("silu_mul", include_str!("../../../kernels/silu_mul.json")),
    ("gelu_tanh", include_str!("../../../kernels/gelu_tanh.json")),
    ("matvec_2tile_add", include_str!("../../../kernels/matvec_2tile_add.json")),
    ("matvec_swiglu_rms", include_str!("../../../kernels/matvec_swiglu_rms.json")),
];

impl KernelFacts {
    /// The variables of the shape, in order.
    pub fn shape_names(&self) -> impl Iterator<Item = &str> {
        self.variables.shape.iter().map(|v| v.name.as_str())
    }

    /// Constraints checked by machine, and prose.
    pub fn constraint_counts(&self) -> (usize, usize) {
        let checked = self.constraints.iter().filter(|c| c.expr.is_some()).count();
        (checked, self.constraints.len() - checked)
    }

    /// Whether the tier means something to this kernel.
    pub fn has_tiers(&self) -> bool {
        self.tolerances.iter().any(|t| t.tier.is_some())
    }

    /// What is wrong with the file beyond its syntax.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let variables = &self.variables;
        let shape: BTreeSet<&str> = self.shape_names().collect();
        let tile: BTreeSet<&str> = variables.tile.iter().map(|v| v.name.as_str()).collect();
        let given: BTreeSet<&str> = variables.given.iter().map(|v| v.name.as_str()).collect();
        let methods: BTreeSet<&str> = self.methods.iter().map(|m| m.name.as_str()).collect();
        let mut known: BTreeSet<&str> = shape.iter().chain(&tile).chain(&given).chain(&methods).copied().collect();
        if known.len() != shape.len() + tile.len() + given.len() + methods.len() {
            faults.push("a variable is declared twice".into());
        }
        let mut check = |what: &str, expr: &Expr, known: &BTreeSet<&str>| {
            if let Some(name) = expr.reads().iter().find(|name| !known.contains(name.as_str())) {
                faults.push(format!("{what}: {expr} reads {name}, which is not declared"));
            }
        };
        for derived in &variables.derived {
            check(&derived.name, &derived.expr, &known);
            known.insert(&derived.name);
        }
        for constraint in &self.constraints {
            constraint.expr.iter().for_each(|expr| check(&constraint.id, expr, &known));
        }
        self.tiles.used.iter().for_each(|expr| check("tiles", expr, &known));
        for arg in &self.args {
            let mut names = shape.clone();
            names.extend(["dv_chunks", "dv_tile"]);
            arg.shape.iter().for_each(|expr| check(&arg.name, expr, &names));
        }
        let ids: BTreeSet<&str> = self.constraints.iter().map(|c| c.id.as_str()).collect();
        if ids.len() != self.constraints.len() {
            faults.push("two constraints have the same id".into());
        }
        for c in self.constraints.iter().filter(|c| c.expr.is_none() && c.note.is_none()) {
            faults.push(format!("{}: neither expr nor note", c.id));
        }
        if self.tolerances.is_empty() {
            faults.push("no tolerance".into());
        }
        if self.args.last().map(|a| a.role) != Some(Role::Output) {
            faults.push("the last argument is not the output".into());
        }
        self.configs_in_order(&shape, &tile, &given, &methods, &mut faults);
        faults
    }

    fn configs_in_order(
        &self,
        shape: &BTreeSet<&str>,
        tile: &BTreeSet<&str>,
        given: &BTreeSet<&str>,
        methods: &BTreeSet<&str>,
        faults: &mut Vec<String>,
    ) {
        for row in &self.measured {
            let whole = row.shape.keys().map(String::as_str).collect::<BTreeSet<_>>() == *shape;
            let method =
                row.method.as_deref().is_none_or(|m| methods.contains(m)) && row.method.is_some() != methods.is_empty();
            if !whole || !method || !row.config.keys().all(|k| tile.contains(k.as_str())) {
                faults.push(format!(
                    "measured {:?} {:?}: not of the declared variables and methods",
                    row.shape, row.config
                ));
            }
        }
        let good = self.known_good.iter().chain(&self.known_slow);
        let good = good.map(|g| (&g.shape, &g.method, g.config.keys().collect::<Vec<_>>()));
        let bad = self.known_bad.iter().map(|b| (&b.shape, &b.method, b.config.keys().collect::<Vec<_>>()));
        for (at, method, config) in good.chain(bad) {
            let named = |names: &BTreeSet<&str>, key: &str| names.contains(key);
            if !at.keys().all(|k| named(shape, k))
                || !config.iter().all(|k| named(tile, k) || named(given, k))
                || !method.as_deref().is_none_or(|m| methods.contains(m))
            {
                faults.push(format!("known {at:?} {config:?}: not of the declared variables and methods"));
            }
        }
    }
}

/// Every leaf kernel, in the order of [`FILES`].
///
/// Errors: [`Error::Malformed`] for a file that breaks the schema, which the tests of this module rule out.
pub fn all() -> Result<&'static [KernelFacts]> {
    static ALL: OnceLock<std::result::Result<Vec<KernelFacts>, (String, String)>> = OnceLock::new();
    let all = ALL.get_or_init(|| FILES.iter().map(|(id, text)| read(id, text)).collect());
    match all {
        Ok(all) => Ok(all),
        Err((path, why)) => Err(Error::malformed(path, why.clone())),
    }
}

/// One leaf kernel.
///
/// Errors: [`Error::Unknown`] with the known ids.
pub fn of(id: &str) -> Result<&'static KernelFacts> {
    let all = all()?;
    all.iter().find(|facts| facts.id == id).ok_or_else(|| {
        let known = all.iter().map(|facts| facts.id.as_str()).collect::<Vec<_>>().join(", ");
        Error::Unknown { kind: "kernel", name: id.into(), known }
    })
}

fn read(id: &str, text: &str) -> std::result::Result<KernelFacts, (String, String)> {
    let path = format!("kernels/{id}.json");
    let facts: KernelFacts = serde_json::from_str(text).map_err(|e| (path.clone(), e.to_string()))?;
    let mut faults = facts.faults();
    if facts.id != id {
        faults.push(format!("id: found {}", facts.id));
    }
    if faults.is_empty() { Ok(facts) } else { Err((path, faults.join("; "))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn every_file_is_embedded_and_sound() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".json").map(str::to_owned))
            .collect();
        there.sort();
        let mut embedded = FILES.map(|(id, _)| id.to_owned());
        embedded.sort();
        assert_eq!(there, embedded);
        assert_eq!(all().unwrap().len(), 15);
    }

    #[rstest]
    #[case("gemm_bf16_f32", 14)]
    #[case("gemm_bf16_bf16", 97)]
    #[case("gemv_bf16", 37)]
    #[case("rms_norm", 8)]
    #[case("rms_norm_decode", 0)]
    #[case("layer_norm", 1)]
    #[case("attention", 16)]
    #[case("add", 9)]
    #[case("silu_mul", 11)]
    #[case("rope", 13)]
    #[case("gelu_tanh", 5)]
    fn shapes_are_as_many_as_upstream_measured(#[case] id: &str, #[case] rows: usize) {
        assert_eq!(of(id).unwrap().measured.len(), rows);
    }

    #[test]
    fn they_are_211_in_all() {
        assert_eq!(all().unwrap().iter().map(|k| k.measured.len()).sum::<usize>(), 211);
    }

    #[test]
    fn constraints_by_machine_and_in_prose() {
        let counts = all().unwrap().iter().map(KernelFacts::constraint_counts);
        let (checked, prose) = counts.fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
        assert_eq!((checked, prose), (91, 5));
        let inferred: Vec<&str> =
            all().unwrap().iter().flat_map(|k| &k.constraints).filter(|c| c.inferred).map(|c| c.id.as_str()).collect();
        let gemm = ["pingpong_parity", "nonpow2_stride", "herd_n1"];
        assert_eq!(inferred, [&gemm[..], &gemm[..], &["parity"]].concat());
    }

    #[test]
    fn no_measured_row_is_beyond_its_tolerance_in_the_mean() {
        for facts in all().unwrap() {
            for row in &facts.measured {
                let of_tier = |t: &&Tolerance| t.tier.is_none() || t.tier == row.tier;
                let limit = facts.tolerances.iter().find(of_tier).unwrap().mean_rel_l1.limit;
                assert!(row.mean_rel_l1.unwrap() <= limit, "{}: {:?}", facts.id, row.shape);
            }
        }
    }

    #[test]
    fn a_shape_and_tier_has_at_most_one_best_row() {
        for facts in all().unwrap() {
            let mut seen = BTreeSet::new();
            for row in facts.measured.iter().filter(|r| r.best) {
                assert!(seen.insert((row.shape.clone(), row.tier)), "{}: {:?}", facts.id, row.shape);
            }
        }
    }

    #[rstest]
    #[case("\"id\"", "\"colour\": 1, \"id\"")]
    #[case("\"N % 16 == 0\"", "\"N % 16 == zero\"")]
    #[case("\"N % 16 == 0\"", "\"N % 16 ==\"")]
    #[case("\"herd_x\": 8", "\"herd_z\": 8")]
    #[case("\"bf16\"", "\"int8\"")]
    #[case("\"kind\": \"silent_zero\"", "\"kind\": \"quiet\"")]
    fn what_breaks_the_schema_is_refused(#[case] from: &str, #[case] to: &str) {
        let (id, text) = FILES[4];
        assert!(read(id, text).is_ok() && text.contains(from));
        assert!(read(id, &text.replacen(from, to, 1)).is_err(), "{to}");
    }
}
