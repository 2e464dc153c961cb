//! `merge`: the result bundles of several shards as one report.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::ReportArgs;
use crate::report::bundle::merge;

#[derive(Args)]
#[command(after_help = "Examples:
  PHASEGATE_BUNDLE=one cargo nextest run --partition hash:1/2 -E 'binary(/^phase/)'
  PHASEGATE_BUNDLE=two cargo nextest run --partition hash:2/2 -E 'binary(/^phase/)'
  phasegate merge one two")]
pub(super) struct MergeArgs {
    /// Folders that PHASEGATE_BUNDLE named, one a shard
    #[arg(required = true, value_name = "DIR")]
    bundles: Vec<PathBuf>,
    #[command(flatten)]
    report: ReportArgs,
}

pub(super) fn run(args: MergeArgs) -> anyhow::Result<ExitCode> {
    let merged = merge(&args.bundles)?;
    Ok(args.report.publish(&merged.report(), |report| {
        for table in &report.tables {
            say!("{}", table.render());
        }
    })?)
}
