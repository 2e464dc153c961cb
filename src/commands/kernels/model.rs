//! `kernels --model`: every kernel and shape of a model's plans against the registry, and the tiles they use.

use serde_json::{Value, json};

use super::fused::Fused;
use super::{KernelsArgs, config, matching, print, print_json, row_config, speed};
use crate::error::{Error, Result};
use crate::kernel::facts::{Bound, Tier};
use crate::kernel::placement::{self, Assessment, Killer, RegistryStatus};
use crate::kernel::registry::Near;
use crate::model::{self, ModelConfig};
use crate::phase::Outline;
use crate::phase::needs::{Need, needs};
use crate::plan::PlanOptions;
use crate::report::{Cell, Table};
use crate::settings;

/// Upstream's prefill length, taken for a model without a manifest.
const SEQ_LEN: usize = 2048;

/// A model's name, config and prefill length; of a fixture without checkpoint here, those of its capture.
fn model_of(name: &str, variant: Option<&str>) -> Result<(String, ModelConfig, usize)> {
    match model::locate(name, variant) {
        Ok(located) => {
            let (config, _) = ModelConfig::from_file(&located.checkpoint_dir)?;
            Ok((located.name, config, located.manifest.map_or(SEQ_LEN, |m| m.seq_len)))
        }
        Err(missing @ Error::Unavailable { .. }) => {
            let outline = Outline::all()?.into_iter().find(|o| o.name == name).ok_or(missing)?;
            let manifests = model::fixtures(&settings::root())?;
            let seq_len = manifests.iter().find(|m| m.name == name).map_or(SEQ_LEN, |m| m.seq_len);
            Ok((outline.name, outline.config, seq_len))
        }
        Err(error) => Err(error),
    }
}

/// Lists what a model needs.
pub(super) fn needs_of(name: &str, args: &KernelsArgs, tier: Option<Tier>) -> anyhow::Result<()> {
    let (name, config, bucket) = model_of(name, args.variant.as_deref())?;
    let seq_len = args.seq_len.map_or(bucket, |n| n as usize);
    let wanted = matching(args.id.as_deref())?;
    let mut assessed = Vec::new();
    for need in needs(&config, seq_len, &PlanOptions::default())? {
        let assessment = placement::assess(&need.kernel, tier)?;
        if wanted.iter().any(|facts| facts.id == assessment.facts.id) {
            assessed.push((need, assessment));
        }
    }
    let refused = placement::refuse(assessed.iter().map(|(need, _)| &need.kernel))?;
    let fused = Fused::of(&config, seq_len)?;
    if args.json {
        let rows: Vec<Value> = assessed.iter().map(|(need, a)| need_json(need, a)).collect();
        return print_json(
            &json!({"model": name, "seq_len": seq_len, "kernels": rows, "tiles": utilisation_json(&assessed),
                "refused": refused, "upstream": fused.json()}),
        );
    }
    say!("{name}: prefill of {seq_len} positions and decode\n");
    let columns = ["kernel", "shape", "prefill", "decode", "status", "config or reason"];
    let mut table = Table::new("kernels and shapes", &columns);
    for (need, a) in &assessed {
        let (status, config) = status(a);
        table.row([
            Cell::from(a.facts.id.as_str()),
            a.facts.name_shape(&a.shape).into(),
            need.prefill.to_string().into(),
            need.decode.to_string().into(),
            status.into(),
            config.into(),
        ]);
    }
    print(&table);
    let mut table =
        Table::new("tile utilisation", &["kernel", "shape", "bound", "tiles", "target", "reason for a shortfall"]);
    for (_, a) in &assessed {
        let tiles = a.tiles.map_or_else(|| "?".into(), |t| t.to_string());
        table.row([
            Cell::from(a.facts.id.as_str()),
            a.facts.name_shape(&a.shape).into(),
            a.facts.tiles.bound.name().into(),
            tiles.into(),
            a.facts.tiles.target.to_string().into(),
            reason(a).into(),
        ]);
    }
    print(&table);
    for (bound, what) in
        [(Bound::Compute, "compute-bound"), (Bound::Memory, "memory-bound"), (Bound::RowParallel, "row-parallel")]
    {
        let (full, of) = utilisation(&assessed, bound);
        say!("{what}: {full} of {of} shapes use all tiles of their target");
    }
    let count = |of: fn(&RegistryStatus) -> bool| assessed.iter().filter(|(_, a)| of(&a.status)).count();
    say!(
        "{} kernels x shapes: {} measured, {} to be measured, {} unplaceable",
        assessed.len(),
        count(|s| matches!(s, RegistryStatus::Measured(_))),
        count(|s| matches!(s, RegistryStatus::Unmeasured { .. })),
        count(|s| matches!(s, RegistryStatus::Unplaceable { .. }))
    );
    fused.print()?;
    match refused {
        Some(why) => say!("an NPU refuses it: {why}"),
        None => say!("an NPU has a config for each of them"),
    }
    Ok(())
}

/// The status in a word, and the config or the reason.
fn status(a: &Assessment) -> (&'static str, String) {
    match &a.status {
        RegistryStatus::Measured(row) => ("measured", format!("{}: {}", row_config(a.facts, row), speed(row))),
        RegistryStatus::Unmeasured { near, proposals } => {
            let near = near.first().map_or_else(
                || "none".into(),
                |n| format!("{} at distance {:.1}", a.facts.name_shape(&n.row.shape), n.distance),
            );
            let fits = proposals.first().map_or_else(String::new, |p| config(a.facts, p.method.as_deref(), &p.config));
            let fits = if fits.is_empty() { String::new() } else { format!("; fits: {fits}") };
            ("nearest", format!("{near}{fits}"))
        }
        RegistryStatus::Unplaceable { killers, .. } => {
            let lines: Vec<String> = killers.iter().map(Killer::line).collect();
            ("unplaceable", lines.join("; "))
        }
    }
}

fn reason(a: &Assessment) -> String {
    match (&a.shortfall, &a.status) {
        (Some(why), _) => why.clone(),
        (None, RegistryStatus::Unplaceable { .. }) => "unplaceable".into(),
        (None, _) => String::new(),
    }
}

fn need_json(need: &Need, a: &Assessment) -> Value {
    let near = |near: &[Near]| -> Vec<Value> {
        near.iter().map(|n| json!({"distance": n.distance, "shape": n.row.shape})).collect()
    };
    let (word, _) = status(a);
    let detail = match &a.status {
        RegistryStatus::Measured(row) => json!({"row": row}),
        RegistryStatus::Unmeasured { near: n, proposals } => json!({"nearest": near(n), "proposals": proposals}),
        RegistryStatus::Unplaceable { near: n, killers } => json!({"nearest": near(n), "killers": killers}),
    };
    json!({
        "kernel": a.facts.id, "case": need.kernel.to_string(), "shape": a.shape, "step": need.step,
        "prefill": need.prefill, "decode": need.decode, "status": word, "detail": detail,
        "tiles": a.tiles, "target": a.facts.tiles.target, "bound": a.facts.tiles.bound, "shortfall": reason(a),
    })
}

/// How many shapes of this bound use their target's tiles, of how many.
fn utilisation(assessed: &[(Need, Assessment)], bound: Bound) -> (usize, usize) {
    let of_bound: Vec<_> = assessed.iter().filter(|(_, a)| a.facts.tiles.bound == bound).collect();
    let full = of_bound.iter().filter(|(_, a)| a.tiles.is_some_and(|t| t >= a.facts.tiles.target)).count();
    (full, of_bound.len())
}

fn utilisation_json(assessed: &[(Need, Assessment)]) -> Value {
    let of = |bound| {
        let (full, of) = utilisation(assessed, bound);
        json!({"full": full, "of": of})
    };
    json!({"compute": of(Bound::Compute), "memory": of(Bound::Memory), "row_parallel": of(Bound::RowParallel)})
}
