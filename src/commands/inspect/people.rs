//! The inspection as tables.

use super::Inspection;
use crate::plan::Memory;
use crate::report::{Cell, Table};

/// Ids of a prompt that are shown.
const SHOWN: usize = 12;

pub(super) fn print(inspection: &Inspection) -> anyhow::Result<()> {
    let Inspection { subject, accounting, memory, verdict, .. } = inspection;
    say!("{} ({})\n", subject.name, subject.located.checkpoint_dir.display());
    for table in [config(inspection)?, keys(inspection), tensors(inspection), prompts(inspection), sites(inspection)] {
        say!("{}", table.render());
    }
    let stored = mib(accounting.bytes);
    say!("{} parameters, {stored} stored, prefix {:?}", accounting.parameters, accounting.prefix.text());
    for extra in &accounting.extras {
        say!("extra tensor {}: {}", extra.stored, extra.reason);
    }
    say!("memory: {}", need(memory));
    let unnamed = subject.masked_ids()?;
    match (unnamed.first(), unnamed.last()) {
        (Some(first), Some(last)) => {
            say!("ids without a token: {} from {first} to {last}, masked in greedy choice", unnamed.len());
        }
        _ => say!("ids without a token: none"),
    }
    say!("stop ids: {:?}\ncomposition: {}", subject.stop_ids()?, inspection.composition);
    say!("capture: {}", inspection.capture);
    if !inspection.blind.is_empty() {
        say!("cannot show (see fixtures/README.md): {}", inspection.blind.join(", "));
    }
    say!("{verdict}");
    Ok(())
}

fn config(inspection: &Inspection) -> anyhow::Result<Table> {
    let config = &inspection.subject.config;
    let mut table = Table::new("config", &["key", "value"]);
    for (key, value) in serde_json::to_value(config)?.as_object().into_iter().flatten() {
        table.row([Cell::from(key.as_str()), value.to_string().into()]);
    }
    for (size, value) in [("q_dim", config.q_dim()), ("kv_dim", config.kv_dim()), ("group", config.group())] {
        table.row([Cell::from(format!("({size})")), value.into()]);
    }
    Ok(table)
}

fn keys(inspection: &Inspection) -> Table {
    let coverage = &inspection.subject.coverage;
    let mut table = Table::new("config.json, key by key", &["key", "account"]);
    for key in &coverage.used {
        table.row([Cell::from(key.as_str()), "used".into()]);
    }
    for (key, reason) in &coverage.irrelevant {
        table.row([Cell::from(key.as_str()), format!("irrelevant: {reason}").into()]);
    }
    for key in &coverage.unknown {
        table.row([Cell::from(key.as_str()), "UNKNOWN, and no part of a computation".into()]);
    }
    table
}

fn tensors(inspection: &Inspection) -> Table {
    let mut table = Table::new("tensors", &["tensor", "shape", "stored"]);
    for tensor in &inspection.accounting.tensors {
        let shape = format!("{:?}", tensor.spec.shape);
        table.row([Cell::from(tensor.spec.name.as_str()), shape.into(), format!("{:?}", tensor.dtype).into()]);
    }
    table
}

fn prompts(inspection: &Inspection) -> Table {
    let mut table = Table::new("first prompt of each set", &["prompt", "tokens", "ids"]);
    for prompt in &inspection.prompts {
        let shown: Vec<String> = prompt.ids.iter().take(SHOWN).map(u32::to_string).collect();
        let more = if prompt.ids.len() > SHOWN { " ..." } else { "" };
        table.row([
            Cell::from(prompt.id.as_str()),
            prompt.ids.len().into(),
            format!("{}{more}", shown.join(" ")).into(),
        ]);
    }
    table
}

fn sites(inspection: &Inspection) -> Table {
    let title = format!("NPU placement outlook, prefill of {}", inspection.memory.seq_len);
    let mut table = Table::new(&title, &["kernel", "launches", "by the registry"]);
    for site in &inspection.sites {
        table.row([Cell::from(site.kernel.as_str()), site.launches.into(), site.hint.as_str().into()]);
    }
    table
}

fn need(memory: &Memory) -> String {
    let Memory { seq_len, positions, weights, tables, activations, kv_cache } = *memory;
    format!(
        "{} = weights {} + RoPE tables {} + activations {} (prefill of {seq_len}) + KV cache {} ({positions} positions)",
        mib(memory.total()),
        mib(weights),
        mib(tables),
        mib(activations),
        mib(kv_cache),
    )
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
