//! `chat`: a conversation through the model's chat template, one user turn a line.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args;

use super::ModelArgs;
use super::run::{check_room, generate};
use crate::model::chat_template::Message;
use crate::phase::Subject;
use crate::runner::{NpuRunner, RunnerOptions};

/// Units: positions. What a chat sets aside room for, however many the model could do.
const LONGEST_CONVERSATION: usize = 2048;

#[derive(Args)]
pub(super) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Say this and end; without it, turns are read from stdin
    #[arg(long, short)]
    prompt: Option<String>,
    /// Most tokens of one reply
    #[arg(long, short, default_value_t = 200)]
    n_tokens: usize,
}

pub(super) fn run(args: ChatArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.model.model, args.model.variant.as_deref())?;
    let mut conversation: Vec<Message> = vec![];
    let mut runner = conversation_runner(&subject, &args)?;
    let mut turn = |text: String| -> anyhow::Result<()> {
        conversation.push(Message::user(text));
        let (_, ids) = subject.chat_ids(&conversation)?;
        check_room(&subject, ids.len(), args.n_tokens)?;
        let reply = generate(&subject, &mut runner, &ids, args.n_tokens, true, &mut std::io::stdout().lock())?;
        say!("{}", reply.line(&subject));
        conversation.push(Message::assistant(subject.tokenizer()?.decode(&reply.tokens, true)?));
        Ok(())
    };
    if let Some(text) = args.prompt {
        turn(text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let prompt = || -> std::io::Result<()> {
        if std::io::stdin().is_terminal() {
            print!("> ");
            std::io::stdout().flush()?;
        }
        Ok(())
    };
    prompt()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if !line.trim().is_empty() {
            turn(line)?;
        }
        prompt()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A runner for a conversation that grows: set up once, for every prompt length the model has positions for.
fn conversation_runner(subject: &Subject, args: &ChatArgs) -> anyhow::Result<NpuRunner> {
    let max = subject.config.max_position_embeddings.min(LONGEST_CONVERSATION);
    let lengths = (4..=max.ilog2()).map(|power| 1 << power).chain([max]);
    let mut options = RunnerOptions::for_prompts(lengths, args.n_tokens, max);
    options.plan = args.model.plan();
    Ok(subject.runner(&args.model.label(), &options)?)
}
