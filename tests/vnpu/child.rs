//! Child processes: how they are started, how long they may take, and what this binary does as one.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use super::misuse;

/// The word that makes this binary a child; the act's name and its words follow.
const WORD: &str = "act-as-a-child";

/// No child of these tests takes this long; one that does hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// What a child left behind.
#[derive(Debug)]
pub struct Left {
    /// None when a signal ended it.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Left {
    /// Checks exit code and a text on stderr.
    pub fn expect(&self, code: i32, text: &str) -> Result<(), Failed> {
        if self.code == Some(code) && self.err.contains(text) {
            return Ok(());
        }
        Err(format!("expected exit {code} and {text:?}, found {self:#?}").into())
    }
}

/// Plays the act that the command line names, if this process is a child.
pub fn act() -> Option<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (first, rest) = words.split_first()?;
    if first != WORD {
        return None;
    }
    let (name, rest) = rest.split_first()?;
    Some(match misuse::act(name, rest) {
        Ok(said) => {
            eprintln!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    })
}

/// This binary as a child, under these orders for the virtual NPU.
pub fn of_this(act: &str, words: &[&str], orders: &str) -> Result<Left, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    // Some acts are tried on folders that nobody sealed.
    command.arg(WORD).arg(act).args(words).env("PHASEGATE_VNPU", orders).env_remove("PHASEGATE_REQUIRE");
    run(command)
}

/// `phasegate` under these orders.
pub fn of_phasegate(words: &[&str], orders: &str) -> Result<Left, Failed> {
    let mut command = phasegate(words);
    command.env("PHASEGATE_VNPU", orders);
    run(command)
}

/// `phasegate` where XRT finds no device.
pub fn without_device(words: &[&str]) -> Result<Left, Failed> {
    let mut command = phasegate(words);
    command.env_remove("LD_PRELOAD").env("PHASEGATE_KERNELS", "/");
    run(command)
}

pub fn phasegate(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phasegate"));
    command.args(words).env("PHASEGATE_NPU_TIMEOUT", "1").env("PHASEGATE_RUN_CACHE", "off");
    command
}

/// A folder that goes with the value.
pub fn folder() -> Result<tempfile::TempDir, Failed> {
    Ok(tempfile::tempdir()?)
}

/// The kernel cache of these tests.
pub fn kernels() -> Result<PathBuf, Failed> {
    phasegate::settings::kernels().ok_or_else(|| "no kernel cache".into())
}

/// Copies a kernel cache's file.
pub fn copy(from: &Path, to: &Path) -> Result<(), Failed> {
    std::fs::copy(from, to)?;
    Ok(())
}

/// Runs a child to its end, or fails when it hangs.
pub fn run(mut command: Command) -> Result<Left, Failed> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let drain = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = vec![];
            let _ = from.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = drain(Box::new(child.stdout.take().ok_or("no stdout")?));
    let err = drain(Box::new(child.stderr.take().ok_or("no stderr")?));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Err(format!("{command:?} hangs: {}", err.join().unwrap_or_default()).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    Ok(Left { code: status.code(), out: text(out), err: text(err) })
}
