//! Generated text, streamed to stdout: what `run` and `chat` share.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;

use super::{ModelArgs, TuningArgs};
use crate::device::Counters;
use crate::error::Error;
use crate::phase::Subject;
use crate::runner::{NpuRunner, RunnerOptions, Sampler, Sampling, argmax, chosen_run};

/// Set by Ctrl-C: the reply in progress ends, the program does not.
pub(super) static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// How tokens are chosen.
#[derive(Args, Clone)]
pub(super) struct SamplingArgs {
    /// Draw tokens at this temperature (default 0: always the likeliest)
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Draw from the likeliest tokens that make up this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the draws: the same seed gives the same text (default 0)
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Errors: [`Error::Usage`] for a temperature or share that cannot be.
    pub(super) fn sampler(&self) -> Result<Sampler, Error> {
        let wrong = |what: &str, found: f64, expected: &str| {
            Err(Error::Usage { what: what.into(), found: found.to_string(), expected: expected.into() })
        };
        if !(0.0..=100.0).contains(&self.temperature) {
            return wrong("temperature", self.temperature, "0 to 100");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top-p", self.top_p, "more than 0 and at most 1");
        }
        if self.temperature == 0.0 && self.top_p < 1.0 {
            return wrong("top-p", self.top_p, "a --temperature above 0 to go with it");
        }
        if let (true, Some(seed)) = (self.temperature == 0.0, self.seed) {
            let (what, expected) = ("seed".into(), "a --temperature above 0 to go with it".into());
            return Err(Error::Usage { what, found: seed.to_string(), expected });
        }
        let SamplingArgs { temperature, top_p, seed } = *self;
        Ok(Sampler::new(Sampling { temperature, top_p, seed: seed.unwrap_or_default() }))
    }
}

/// What came of one generation.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    /// `stop_token`, `length` or `interrupted`.
    pub(super) ended_by: &'static str,
    pub(super) prompt_tokens: usize,
    pub(super) ttft_ms: f64,
    pub(super) tok_s: f64,
    pub(super) device: String,
    /// What the device did for it.
    pub(super) counters: Counters,
    pub(super) decode_steps: usize,
}

impl Reply {
    /// One line for people.
    pub(super) fn line(&self, model: &str) -> String {
        let Reply { ids, prompt_tokens, ttft_ms, tok_s, device, .. } = self;
        let generated = ids.len();
        format!(
            "[{model}: {prompt_tokens} prompt tokens, {generated} generated | TTFT {ttft_ms:.1} ms | {tok_s:.1} TPS | {device}]"
        )
    }
}

/// What to generate, and whether to show it while it comes.
pub(super) struct Generation<'a> {
    pub(super) ids: &'a [u32],
    pub(super) n_tokens: usize,
    pub(super) stop_at_eos: bool,
    pub(super) show: bool,
}

/// Generates a continuation, streaming it to stdout if that is wanted.
pub(super) fn generate(
    subject: &Subject,
    runner: &mut NpuRunner,
    sampler: &mut Sampler,
    generation: &Generation<'_>,
) -> anyhow::Result<Reply> {
    let stop_ids = subject.stop_ids()?;
    let masked = subject.masked_ids()?;
    let mut stream = subject.tokenizer()?.stream();
    let mut out = std::io::stdout().lock();
    let (mut tokens, mut text, mut first, mut failed) = (vec![], String::new(), None, None);
    let mut ended_by = "length";
    let started = Instant::now();
    INTERRUPTED.store(false, Ordering::Relaxed);
    let mut put = |out: &mut std::io::StdoutLock<'_>, piece: &str| {
        text.push_str(piece);
        let written = if generation.show { write!(out, "{piece}").and_then(|()| out.flush()) } else { Ok(()) };
        written.map_err(Error::io("stdout"))
    };
    let choose = |logits: &[half::bf16]| sampler.choose(logits, &masked);
    let record = chosen_run(runner, generation.ids, generation.n_tokens, choose, |id| {
        first.get_or_insert_with(|| started.elapsed());
        if generation.stop_at_eos && stop_ids.contains(&id) {
            ended_by = "stop_token";
            return false;
        }
        if INTERRUPTED.load(Ordering::Relaxed) {
            ended_by = "interrupted";
            return false;
        }
        tokens.push(id);
        failed = stream.push(id).and_then(|piece| put(&mut out, &piece)).err();
        failed.is_none()
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    put(&mut out, &stream.finish()?)?;
    if generation.show {
        writeln!(out)?;
    }
    if record.logits.outer_iter().next_back().is_some_and(|row| argmax(&row.to_vec(), &[]).is_none()) {
        anyhow::bail!("the logits hold a NaN after {} tokens; nothing after that is text", tokens.len());
    }
    let decode = record.timing.decode_us.iter().sum::<u64>() as f64 / 1e6;
    let tok_s = if decode > 0.0 { record.timing.decode_us.len() as f64 / decode } else { 0.0 };
    Ok(Reply {
        ids: tokens,
        text,
        ended_by,
        prompt_tokens: generation.ids.len(),
        ttft_ms: first.unwrap_or_default().as_secs_f64() * 1e3,
        tok_s,
        device: record.device,
        counters: record.counters,
        decode_steps: record.fed.len(),
    })
}

/// A runner for one conversation of `prompt` tokens and up to `n_tokens` more.
///
/// Errors: [`Error::Usage`] when that is more than the model has positions.
pub(super) fn setup(
    subject: &Subject,
    model: &ModelArgs,
    tuning: TuningArgs,
    prompt: usize,
    n_tokens: usize,
) -> anyhow::Result<NpuRunner> {
    check_room(subject, prompt, n_tokens)?;
    let mut options = RunnerOptions::for_prompts([prompt], n_tokens, subject.config.max_position_embeddings);
    options.plan = model.plan();
    [options.prefill, options.decode] = tuning.halves();
    Ok(subject.runner(&model.label(), &options)?)
}

/// Errors: [`Error::Usage`] for no tokens at all.
pub(super) fn check_tokens(n_tokens: usize) -> Result<(), Error> {
    if n_tokens > 0 {
        return Ok(());
    }
    Err(Error::Usage { what: "n-tokens".into(), found: "0".into(), expected: "at least 1".into() })
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
