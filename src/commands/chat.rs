//! `chat`: a conversation through the model's chat template, one user turn a line.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args;

use super::ModelArgs;
use super::run::{generate, setup};
use crate::phase::Subject;

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
    let mut conversation: Vec<(&str, String)> = vec![];
    let mut turn = |text: String| -> anyhow::Result<()> {
        conversation.push(("user", text));
        let turns: Vec<(&str, &str)> = conversation.iter().map(|(role, text)| (*role, text.as_str())).collect();
        let (_, ids) = subject.chat_ids(&turns)?;
        let mut runner = setup(&subject, &args.model, ids.len(), args.n_tokens)?;
        let reply = generate(&subject, &mut runner, &ids, args.n_tokens, true)?;
        conversation.push(("assistant", subject.tokenizer.decode(&reply)?));
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
