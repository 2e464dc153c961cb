//! `chat`: a conversation through the model's chat template, one user turn a line.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;

use super::generate::{Generation, INTERRUPTED, SamplingArgs, check_tokens, generate};
use super::{ModelArgs, TuningArgs};
use crate::error::{Error, Result};
use crate::model::chat_template::Message;
use crate::phase::Subject;
use crate::runner::{NpuRunner, RunnerOptions, Sampler};

/// Units: positions. What a chat sets aside room for, however many the model could do.
const LONGEST_CONVERSATION: usize = 2048;

/// Whether a reply is being generated: Ctrl-C then ends it, and otherwise the program.
static REPLYING: AtomicBool = AtomicBool::new(false);

#[derive(Args)]
#[command(
    after_help = "A line is a turn; /clear forgets the conversation, /exit or the end of stdin ends it. Ctrl-C ends a reply, and at
the prompt the program. When a conversation has no more room its oldest turns are forgotten.

Examples:
  phasegate chat smollm2_135m
  phasegate chat smollm2_135m --temperature 0.7 --top-p 0.9 --seed 1
  phasegate chat smollm2_135m --prompt \"Name the capital of France.\"
  printf 'My name is Ada.\\nWhat is my name?\\n' | phasegate chat smollm2_135m"
)]
pub(super) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Say this and end; without it, turns are read from stdin
    #[arg(long, short)]
    prompt: Option<String>,
    /// Most tokens of one reply
    #[arg(long, short, default_value_t = 200)]
    n_tokens: usize,
}

pub(super) fn run(args: ChatArgs) -> anyhow::Result<ExitCode> {
    let sampler = args.sampling.sampler()?;
    check_tokens(args.n_tokens)?;
    let subject = Subject::open(&args.model.model, args.model.variant.as_deref())?;
    let runner = conversation_runner(&subject, &args)?;
    let room = subject.config.max_position_embeddings.min(LONGEST_CONVERSATION);
    let mut chat = Chat { subject: &subject, runner, sampler, turns: vec![], n_tokens: args.n_tokens, room };
    // A second handler is refused; then the first one is there.
    let _ = ctrlc::set_handler(|| {
        INTERRUPTED.store(true, Ordering::Relaxed);
        if !REPLYING.load(Ordering::Relaxed) {
            super::interrupted();
        }
    });
    if let Some(text) = args.prompt {
        chat.turn(text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let prompt = || -> std::io::Result<()> {
        if std::io::stdin().is_terminal() {
            write!(std::io::stdout(), "> ")?;
            std::io::stdout().flush()?;
        }
        Ok(())
    };
    prompt()?;
    let mut refused = 0u8;
    for line in std::io::stdin().lock().split(b'\n') {
        let mut line = line.map_err(Error::io("stdin"))?;
        line.truncate(line.strip_suffix(b"\r").unwrap_or(&line).len());
        let line = String::from_utf8(line);
        match line.as_deref().map(str::trim) {
            Ok("") => {}
            Ok("/exit") => break,
            Ok("/clear") => chat.turns.clear(),
            // The conversation goes on without a turn that cannot be answered.
            _ => match line.map_err(|_| not_text()).map_err(Into::into).and_then(|line| chat.turn(line)) {
                Err(error) if matches!(error.downcast_ref(), Some(Error::Usage { .. })) => {
                    eprintln!("error: {error}");
                    refused = super::USAGE;
                }
                answered => answered?,
            },
        }
        prompt()?;
    }
    Ok(ExitCode::from(refused))
}

fn not_text() -> Error {
    Error::Usage { what: "turn on stdin".into(), found: "bytes that are no text".into(), expected: "UTF-8".into() }
}

/// A conversation so far.
struct Chat<'a> {
    subject: &'a Subject,
    runner: NpuRunner,
    sampler: Sampler,
    turns: Vec<Message>,
    n_tokens: usize,
    /// Units: positions.
    room: usize,
}

impl Chat<'_> {
    /// Answers one turn; what was said of it before an interruption stays in the conversation.
    fn turn(&mut self, text: String) -> anyhow::Result<()> {
        self.turns.push(Message::user(text));
        let ids = self.fitting()?;
        let generation = Generation { ids: &ids, n_tokens: self.n_tokens, stop_at_eos: true, show: true };
        REPLYING.store(true, Ordering::Relaxed);
        let reply = generate(self.subject, &mut self.runner, &mut self.sampler, &generation);
        REPLYING.store(false, Ordering::Relaxed);
        let reply = reply?;
        say!("\n{}", reply.line(&self.subject.name));
        self.turns.push(Message::assistant(self.subject.tokenizer()?.decode(&reply.ids, true)?));
        Ok(())
    }

    /// The conversation's ids, without its oldest turns where all of them leave no room for a reply.
    ///
    /// Errors: [`Error::Usage`] when the last turn alone has none; the conversation is then what it was before it.
    fn fitting(&mut self) -> Result<Vec<u32>> {
        let mut forgotten = 0;
        loop {
            let (_, ids) = self.subject.chat_ids(&self.turns[forgotten..])?;
            if ids.len().saturating_add(self.n_tokens) <= self.room {
                self.turns.drain(..forgotten);
                if forgotten > 0 {
                    eprintln!("[the oldest {forgotten} turns are forgotten: {} positions in all]", self.room);
                }
                return Ok(ids);
            }
            if self.turns.len() - forgotten < 3 {
                self.turns.pop();
                return Err(Error::Usage {
                    what: "turn".into(),
                    found: format!("{} tokens and a reply of {}", ids.len(), self.n_tokens),
                    expected: format!("at most {} positions in all; see --n-tokens", self.room),
                });
            }
            forgotten += 2;
        }
    }
}

/// A runner for a conversation that grows: set up once, for every prompt length the model has positions for.
fn conversation_runner(subject: &Subject, args: &ChatArgs) -> anyhow::Result<NpuRunner> {
    let max = subject.config.max_position_embeddings.min(LONGEST_CONVERSATION);
    let lengths = (4..=max.ilog2()).map(|power| 1 << power).chain([max]);
    let mut options = RunnerOptions::for_prompts(lengths, args.n_tokens, max);
    options.plan = args.model.plan();
    [options.prefill, options.decode] = args.tuning.halves();
    Ok(subject.runner(&args.model.label(), &options)?)
}
