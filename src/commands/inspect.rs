//! `inspect`: what a checkpoint is, without running it.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use crate::check::{Extent, Verdict};
use crate::phase::{Subject, phase2};
use crate::report::{Cell, Table};

#[derive(Args)]
pub(super) struct InspectArgs {
    /// A fixture's name, a checkpoint directory, or an HF id in the local HF cache
    #[arg(default_value = "tiny_llama")]
    model: String,
    /// The manifest's variant (instruct or base)
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.model, args.variant.as_deref())?;
    subject.tokenizer()?;
    let accounting = subject.checkpoint.account(&subject.config)?;
    let capture = match subject.capture() {
        Ok(capture) => format!("belongs to this checkpoint ({})", capture.provenance().line()),
        Err(error) => error.to_string(),
    };
    let composition = phase2::composition(&subject)?.to_string();
    let extent = Extent::new().require("tensors", 1).compare("tensors", accounting.tensors.len() as u64);
    let verdict = Verdict::judge(vec![], extent);
    if args.json {
        let tensors: Vec<_> = accounting
            .tensors
            .iter()
            .map(|t| json!({"name": t.spec.name, "stored": t.stored, "shape": t.spec.shape, "dtype": format!("{:?}", t.dtype)}))
            .collect();
        let out = json!({
            "model": subject.name, "config": subject.config, "coverage": subject.coverage, "parameters": accounting.parameters,
            "bytes": accounting.bytes, "tensors": tensors, "composition": composition, "capture": capture,
            "stop_ids": subject.stop_ids()?, "verdict": verdict,
        });
        println!("{}", serde_json::to_string_pretty(&out)?);
        return Ok(ExitCode::SUCCESS);
    }
    let config = serde_json::to_value(&subject.config)?;
    let mut table = Table::new("config", &["key", "value"]);
    for (key, value) in config.as_object().into_iter().flatten() {
        table.row([Cell::from(key.as_str()), value.to_string().into()]);
    }
    println!("{} ({})\n\n{}", subject.name, subject.located.checkpoint_dir.display(), table.render());
    let mut table = Table::new("tensors", &["tensor", "shape", "stored"]);
    for tensor in &accounting.tensors {
        let shape = format!("{:?}", tensor.spec.shape);
        table.row([Cell::from(tensor.spec.name.as_str()), shape.into(), format!("{:?}", tensor.dtype).into()]);
    }
    println!("{}", table.render());
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("{} parameters, {:.1} MiB of weights", accounting.parameters, mib(accounting.bytes));
    let coverage = &subject.coverage;
    let (used, irrelevant) = (coverage.used.len(), coverage.irrelevant.len());
    println!("config keys: {used} used, {irrelevant} irrelevant, unknown: {:?}", coverage.unknown);
    println!("stop ids: {:?}\ncomposition: {composition}\ncapture: {capture}\n{verdict}", subject.stop_ids()?);
    Ok(ExitCode::SUCCESS)
}
