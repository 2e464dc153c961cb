//! `run`: generate text, stream it, and say how fast.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;

use super::generate::{Generation, Reply, SamplingArgs, check_tokens, generate, setup};
use super::{ModelArgs, TuningArgs};
use crate::check::{Extent, Verdict};
use crate::model::chat_template::Message;
use crate::phase::Subject;
use crate::report::Report;
use crate::runner::{NpuRunner, Runner};

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate run                                                  # the smallest model says something
  phasegate run smollm2_135m --prompt \"The capital of France is\" --n-tokens 20
  phasegate run smollm2_135m --chat --prompt \"Name a colour.\" --temperature 0.8 --top-p 0.95 --seed 7
  phasegate run smollm2_135m --json | jq .facts")]
pub(super) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Text to continue
    #[arg(long, short, default_value = "The capital of France is")]
    prompt: String,
    /// Tokens to generate
    #[arg(long, short, default_value_t = 100)]
    n_tokens: usize,
    /// Put the prompt through the chat template
    #[arg(long)]
    chat: bool,
    /// Do not stop at an end-of-sequence token
    #[arg(long)]
    ignore_eos: bool,
    /// Print text and figures as JSON instead of streaming
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut sampler = args.sampling.sampler()?;
    check_tokens(args.n_tokens)?;
    let subject = Subject::open(&args.model.model, args.model.variant.as_deref())?;
    let (text, ids) =
        if args.chat { subject.chat_ids(&[Message::user(&args.prompt)])? } else { subject.raw_ids(&args.prompt)? };
    let mut runner = setup(&subject, &args.model, args.tuning, ids.len(), args.n_tokens)?;
    if !args.chat && !args.json {
        write!(std::io::stdout(), "{text}")?;
    }
    let (n_tokens, stop_at_eos) = (args.n_tokens, !args.ignore_eos);
    let generation = Generation { ids: &ids, n_tokens, stop_at_eos, show: !args.json };
    let reply = generate(&subject, &mut runner, &mut sampler, &generation)?;
    if args.json {
        let mut report = report(&subject, &runner, &reply);
        for (option, value) in args.tuning.facts(&args.model) {
            report.fact(option, value);
        }
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::from(report.verdict.exit_code()));
    }
    say!("\n{}", reply.line(&subject.name));
    Ok(ExitCode::SUCCESS)
}

/// One run as a report: that it completed, and what it took.
fn report(subject: &Subject, runner: &NpuRunner, reply: &Reply) -> Report {
    let extent = Extent::new().require("tokens", 1).compare("tokens", reply.ids.len() as u64);
    let device = (runner.info().label.clone(), runner.info().description.clone());
    let mut report = Report::new("run", &subject.name, device, Verdict::judge(vec![], extent));
    report.fact("text", reply.text.as_str());
    report.fact("ids", reply.ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    report.fact("ended_by", reply.ended_by);
    report.fact("prompt_tokens", reply.prompt_tokens);
    report.fact("tokens", reply.ids.len());
    report.fact("ttft_ms", reply.ttft_ms);
    report.fact("tok_s", reply.tok_s);
    super::device_facts(&mut report, reply.counters, 1, reply.decode_steps);
    report
}
