//! `serve`: this program as an engine behind the external runner's protocol, so that a device elsewhere can be gated.

use std::process::ExitCode;

use clap::Args;

use super::planted::PlantedArgs;
use super::{ModelArgs, TuningArgs};
use crate::error::{Error, Result};
use crate::model::hashes::sha256_file;
use crate::model::locate::locate;
use crate::phase::Subject;
use crate::runner::external::protocol::{Ask, Hello, PROTOCOL};
use crate::runner::external::serve;
use crate::runner::{NpuRunner, Runner, RunnerOptions};

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate verify tiny_llama --runner \"phasegate serve tiny_llama\"
  phasegate verify tiny_llama --runner \"ssh npu-box phasegate serve tiny_llama --device npu\"
  phasegate verify tiny_llama --runner \"phasegate serve tiny_llama --fault kv_row_late\"      # must fail")]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    /// Positions to set aside room for (default: all of the model's, at most 2048)
    #[arg(long, value_name = "N")]
    max_positions: Option<usize>,
    #[command(flatten)]
    planted: PlantedArgs,
}

/// Units: positions.
const LONGEST: usize = 2048;

pub(super) fn run(args: ServeArgs) -> anyhow::Result<ExitCode> {
    // A model that is not here is said at once, and not only to who asks for it.
    locate(&args.model.model, args.model.variant.as_deref())?;
    serve(std::io::stdin().lock(), std::io::stdout().lock(), |ask| start(&args, ask))?;
    Ok(ExitCode::SUCCESS)
}

/// Sets the model up when hello asks for it.
fn start(args: &ServeArgs, ask: &Ask) -> Result<(NpuRunner, Hello)> {
    let subject = Subject::open(&args.model.model, args.model.variant.as_deref())?;
    if let Ask::Hello { protocol, .. } = ask
        && *protocol != PROTOCOL
    {
        let (what, expected) = ("protocol".into(), PROTOCOL.to_string());
        return Err(Error::Usage { what, found: protocol.to_string(), expected });
    }
    let most = args.max_positions.unwrap_or(LONGEST).min(subject.config.max_position_embeddings);
    let lengths = (4..=most.max(16).ilog2()).map(|power| 1 << power).chain([most]).filter(|&n| n <= most);
    let mut options = RunnerOptions::for_prompts(lengths, 0, subject.config.max_position_embeddings);
    options.plan = args.model.plan();
    [options.prefill, options.decode] = args.tuning.halves();
    let altered = args.planted.alteration(&subject.config)?;
    let runner = subject.altered_runner(&args.model.label(), &options, &*altered)?;
    let files = subject.checkpoint.files();
    let mut weights_sha256 = std::collections::BTreeMap::new();
    for path in files {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        weights_sha256.insert(name, sha256_file(path)?);
    }
    let hello = Hello {
        protocol: PROTOCOL,
        model: subject.name.clone(),
        engine: format!("phasegate {}, {}", env!("CARGO_PKG_VERSION"), runner.info().description),
        vocab_size: subject.config.vocab_size,
        weights_sha256,
        capabilities: vec!["layers".into(), "kv".into()],
    };
    Ok((runner, hello))
}
