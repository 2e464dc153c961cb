//! `run`: generate text greedily, stream it, and say how fast.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;

use super::ModelArgs;
use crate::check::{Extent, Verdict};
use crate::error::Error;
use crate::model::chat_template::Message;
use crate::phase::Subject;
use crate::report::Report;
use crate::runner::{NpuRunner, Record, Runner, RunnerOptions, argmax, free_run};

#[derive(Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
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
    /// Print the text and the figures as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.model.model, args.model.variant.as_deref())?;
    let (text, ids) =
        if args.chat { subject.chat_ids(&[Message::user(&args.prompt)])? } else { subject.raw_ids(&args.prompt)? };
    if args.n_tokens == 0 {
        let (what, expected) = ("n-tokens".into(), "at least 1".into());
        return Err(Error::Usage { what, found: "0".into(), expected }.into());
    }
    let mut runner = setup(&subject, &args.model, ids.len(), args.n_tokens)?;
    if args.json {
        let mut shown = vec![];
        let generated = generate(&subject, &mut runner, &ids, args.n_tokens, !args.ignore_eos, &mut shown)?;
        let report = report(&subject, &runner, &generated, String::from_utf8_lossy(&shown).trim_end());
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(ExitCode::from(report.verdict.exit_code()));
    }
    let mut out = std::io::stdout().lock();
    if !args.chat {
        write!(out, "{text}")?;
    }
    let generated = generate(&subject, &mut runner, &ids, args.n_tokens, !args.ignore_eos, &mut out)?;
    writeln!(out, "{}", generated.line(&subject))?;
    Ok(ExitCode::SUCCESS)
}

fn report(subject: &Subject, runner: &NpuRunner, generated: &Generated, text: &str) -> Report {
    let Generated { tokens, record, ttft_ms } = generated;
    let extent = Extent::new().require("tokens", 1).compare("tokens", tokens.len() as u64);
    let device = (runner.info().label.clone(), runner.info().description.clone());
    let mut report = Report::new("run", &subject.name, device, Verdict::judge(vec![], extent));
    report.fact("text", text);
    report.fact("prompt_tokens", record.prompt_ids.len());
    report.fact("tokens", tokens.len());
    report.fact("ttft_ms", *ttft_ms);
    report.fact("tok_s", generated.tok_s());
    super::device_facts(&mut report, record.counters, 1, record.fed.len());
    report
}

/// What a generation left behind.
pub(super) struct Generated {
    /// The new ids, without the one that ended it.
    pub(super) tokens: Vec<u32>,
    record: Record,
    ttft_ms: f64,
}

impl Generated {
    /// Decoded tokens per second; 0 when nothing was decoded.
    fn tok_s(&self) -> f64 {
        let seconds = self.record.timing.decode_us.iter().sum::<u64>() as f64 / 1e6;
        if seconds > 0.0 { self.record.timing.decode_us.len() as f64 / seconds } else { 0.0 }
    }

    /// The figures for people, on a line of their own.
    pub(super) fn line(&self, subject: &Subject) -> String {
        format!(
            "\n[{}: {} prompt tokens, {} generated | TTFT {:.1} ms | {:.1} TPS | {}]",
            subject.name,
            self.record.prompt_ids.len(),
            self.tokens.len(),
            self.ttft_ms,
            self.tok_s(),
            self.record.device,
        )
    }
}

/// A runner for one conversation of `prompt` tokens and up to `n_tokens` more.
///
/// Errors: [`Error::Usage`] when that is more than the model has positions.
pub(super) fn setup(subject: &Subject, model: &ModelArgs, prompt: usize, n_tokens: usize) -> anyhow::Result<NpuRunner> {
    check_room(subject, prompt, n_tokens)?;
    let mut options = RunnerOptions::for_prompts([prompt], n_tokens, subject.config.max_position_embeddings);
    options.plan = model.plan();
    Ok(subject.runner(&model.label(), &options)?)
}

/// Whether the model has positions for a prompt and its continuation.
///
/// Errors: [`Error::Usage`] when it has not, or when there is no prompt at all.
pub(super) fn check_room(subject: &Subject, prompt: usize, n_tokens: usize) -> Result<(), Error> {
    let max = subject.config.max_position_embeddings;
    if prompt > 0 && prompt.saturating_add(n_tokens) <= max {
        return Ok(());
    }
    Err(Error::Usage {
        what: "prompt and tokens to generate".into(),
        found: format!("{prompt} + {n_tokens} positions"),
        expected: format!("a prompt, and at most max_position_embeddings {max} in all"),
    })
}

/// Streams a greedy continuation to `out`.
///
/// Errors: those of the run and of `out`; a NaN in the last logits.
pub(super) fn generate(
    subject: &Subject,
    runner: &mut NpuRunner,
    ids: &[u32],
    n_tokens: usize,
    stop_at_eos: bool,
    out: &mut dyn Write,
) -> anyhow::Result<Generated> {
    let stop_ids = subject.stop_ids()?;
    let mut stream = subject.tokenizer()?.stream();
    let mut tokens = vec![];
    let mut first = None;
    let mut failed = None;
    let started = Instant::now();
    let record = free_run(runner, ids, n_tokens, &subject.masked_ids()?, |id| {
        first.get_or_insert_with(|| started.elapsed());
        if stop_at_eos && stop_ids.contains(&id) {
            return false;
        }
        tokens.push(id);
        let shown = stream.push(id).and_then(|text| {
            let written = write!(out, "{text}").and_then(|()| out.flush());
            written.map_err(Error::io("stdout"))
        });
        failed = shown.err();
        failed.is_none()
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    writeln!(out, "{}", stream.finish()?)?;
    if record.logits.outer_iter().next_back().is_some_and(|row| argmax(&row.to_vec(), &[]).is_none()) {
        anyhow::bail!("the logits hold a NaN after {} tokens; nothing after that is text", tokens.len());
    }
    Ok(Generated { tokens, record, ttft_ms: first.unwrap_or_default().as_secs_f64() * 1e3 })
}
