//! `kernels ID` and `kernels --dispatch`: everything that is known of one.

use super::{print, print_json, row_config, speed, word};
use crate::kernel::dispatch;
use crate::kernel::facts::{KernelFacts, Wanted};
use crate::report::{Cell, Table};

/// One kernel.
pub(super) fn kernel(facts: &KernelFacts, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return print_json(facts);
    }
    say!("{}: {}\n{}\nsource: {}", facts.id, facts.title, facts.math, facts.source);
    if !facts.upstream_registry {
        say!("upstream's registry has no page for it");
    }
    let mut table = Table::new("arguments", &["#", "name", "dtype", "shape", "role", "layout"]);
    for (index, a) in facts.args.iter().enumerate() {
        let shape: Vec<&str> = a.shape.iter().map(|e| e.text()).collect();
        let layout: Vec<&str> = a.layout.iter().chain(&a.note).map(String::as_str).collect();
        let (dtype, role) = (word(&a.dtype)?, word(&a.role)?);
        let shape = format!("[{}]", shape.join(", "));
        table.row([
            index.to_string().into(),
            Cell::from(a.name.as_str()),
            dtype.into(),
            shape.into(),
            role.into(),
            layout.join("; ").into(),
        ]);
    }
    print(&table);
    let mut table = Table::new("arithmetic", &["step", "how"]);
    for step in &facts.arithmetic {
        table.row([Cell::from(step.step.as_str()), step.how.as_str().into()]);
    }
    table.row([Cell::from("casts round"), word(&facts.rounding)?.into()]);
    print(&table);
    let mut table = Table::new("tolerances", &["tier", "rtol", "atol", "mean_rel_l1", "origin", "why"]);
    for t in &facts.tolerances {
        let tier = t.tier.map_or_else(String::new, |tier| tier.to_string());
        let per_column = t.per_column.map(|p| (format!(" + {:e} N", p.rtol), format!(" + {:e} N", p.mean_rel_l1)));
        let (rtol, mean) = per_column.unwrap_or_default();
        let mean = format!("<= {}{mean} ({})", t.mean_rel_l1.limit, t.mean_rel_l1.why);
        let rtol = format!("{}{rtol}", t.rtol);
        table.row([
            tier.into(),
            rtol.into(),
            t.atol.to_string().into(),
            mean.into(),
            Cell::from(word(&t.origin)?),
            t.why.as_str().into(),
        ]);
    }
    print(&table);
    let mut table = Table::new("constraints", &["id", "kind", "inferred", "rule"]);
    for c in &facts.constraints {
        let rule: Vec<&str> = c.expr.iter().map(|e| e.text()).chain(c.note.as_deref()).collect();
        let inferred = if c.inferred { "inferred" } else { "" };
        table.row([Cell::from(c.id.as_str()), c.kind.name().into(), inferred.into(), rule.join(" -- ").into()]);
    }
    print(&table);
    let mut table = Table::new("measured", &["shape", "config", "speed", "mean_rel_l1", "max_abs", "used by"]);
    for row in &facts.measured {
        let number = |v: Option<f64>| v.map_or_else(String::new, |v| v.to_string());
        let used = row.used_by.as_deref().unwrap_or("");
        table.row([
            facts.name_shape(&row.shape).into(),
            row_config(facts, row).into(),
            speed(row).into(),
            number(row.mean_rel_l1).into(),
            number(row.max_abs).into(),
            Cell::from(used),
        ]);
    }
    if !facts.measured.is_empty() {
        print(&table);
    }
    let mut table = Table::new("known bad", &["shape", "config", "outcome", "note"]);
    for bad in &facts.known_bad {
        let wanted = |(name, wanted): (&String, &Wanted)| match wanted {
            Wanted::Exactly(value) => format!("{name}={value}"),
            Wanted::AtLeast(least) => format!("{name}>={}", least.at_least),
        };
        let config: Vec<String> = bad.method.iter().cloned().chain(bad.config.iter().map(wanted)).collect();
        let shape = facts.name_shape(&bad.shape);
        let note = bad.note.as_deref().unwrap_or("");
        table.row([shape.into(), config.join(" ").into(), Cell::from(bad.outcome.name()), note.into()]);
    }
    if !facts.known_bad.is_empty() {
        print(&table);
    }
    for note in &facts.notes {
        say!("- {note}");
    }
    Ok(())
}

/// The fused dispatches, or one of them.
pub(super) fn dispatches(id: Option<&str>, as_json: bool) -> anyhow::Result<()> {
    let Some(id) = id else {
        if as_json {
            return print_json(&dispatch::all()?);
        }
        let mut table =
            Table::new("fused dispatches", &["id", "stage", "arguments", "launches", "requires", "used by"]);
        for d in dispatch::all()? {
            let launches: Vec<&str> = d.launches.iter().map(|l| l.name.as_str()).collect();
            let args =
                d.repeated.as_ref().map_or_else(|| d.args.len().to_string(), |r| format!("1 + {}{}", r.args, r.count));
            let requires = d.requires.as_ref().map_or_else(String::new, |r| r.expr.to_string());
            table.row([
                Cell::from(d.id.as_str()),
                word(&d.stage)?.into(),
                args.into(),
                launches.join(", ").into(),
                requires.into(),
                d.used_by.join(", ").into(),
            ]);
        }
        print(&table);
        return Ok(());
    };
    let d = dispatch::of(id)?;
    if as_json {
        return print_json(d);
    }
    say!("{} ({})", d.id, word(&d.stage)?);
    let mut table = Table::new("arguments", &["#", "name", "dtype", "shape", "role", "note"]);
    for (index, a) in d.args.iter().enumerate() {
        let shape: Vec<&str> = a.shape.iter().map(|e| e.text()).collect();
        let (dtype, role, note) = (word(&a.dtype)?, word(&a.role)?, a.note.as_deref().unwrap_or(""));
        let shape = format!("[{}]", shape.join(", "));
        table.row([
            index.to_string().into(),
            Cell::from(a.name.as_str()),
            dtype.into(),
            shape.into(),
            role.into(),
            note.into(),
        ]);
    }
    print(&table);
    let mut table = Table::new("launches", &["name", "kernel", "arguments", "note"]);
    for l in &d.launches {
        let note = l.note.as_deref().unwrap_or("");
        table.row([Cell::from(l.name.as_str()), l.kernel.as_str().into(), format!("{:?}", l.args).into(), note.into()]);
    }
    print(&table);
    let sets = &d.index_sets;
    say!("static {:?}, intermediate {:?}", sets.static_inputs, sets.intermediate);
    say!("sent at every call {:?}, read back {:?}", sets.per_call, sets.outputs);
    if let Some(requires) = &d.requires {
        say!("requires {}", requires.expr);
    }
    if let Some(scratch) = &d.scratch {
        let gemms = scratch.gemms.join(", ");
        say!(
            "scratch: one f32 [M,N] argument behind the others for each of {gemms} whose method is fused_cast, in this order"
        );
    }
    d.notes.iter().for_each(|note| say!("- {note}"));
    Ok(())
}
