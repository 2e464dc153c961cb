//! `completions` and `man`: what a shell and `man` need to know of this program, from its own command line.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::Cli;
use crate::error::Error;

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate completions bash > ~/.local/share/bash-completion/completions/phasegate
  phasegate completions zsh > ~/.zfunc/_phasegate
  phasegate completions fish > ~/.config/fish/completions/phasegate.fish")]
pub(super) struct CompletionsArgs {
    /// The shell that shall complete
    shell: Shell,
}

pub(super) fn completions(args: CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut Cli::command(), "phasegate", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate man --dir ~/.local/share/man/man1 && man phasegate-verify")]
pub(super) struct ManArgs {
    /// Folder for the pages of all commands (default: the page of phasegate itself, on stdout)
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn man(args: ManArgs) -> anyhow::Result<ExitCode> {
    match args.dir {
        Some(dir) => {
            std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
            clap_mangen::generate_to(Cli::command(), &dir).map_err(Error::io(&dir))?;
        }
        None => clap_mangen::Man::new(Cli::command()).render(&mut std::io::stdout())?,
    }
    Ok(ExitCode::SUCCESS)
}
