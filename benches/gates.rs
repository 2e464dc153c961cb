//! What the gates cost beside the model's own work: metrics, listing cases, opening a checkpoint, a whole `verify`.
//!
//! `cargo bench --bench gates` prints a table: medians of five, each beside the limit it is meant to keep. Time of
//! `verify` is from the start of the process to its end, without the run cache; memory is the largest resident set of any
//! of these processes, pages of mapped files included.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use ndarray::Array2;
use phasegate::{
    check::{Metrics, Summary},
    error::Result,
    harness::{Arguments, Case, Suite},
    model::{self, Checkpoint},
    phase::{Outline, Subject, phase3},
    runner::RunnerOptions,
    settings,
};

const ROUNDS: usize = 5;
const MODEL: &str = "smollm2_135m";
const CASES: usize = 10_000;
/// Makes this binary list [`CASES`] cases instead of measuring.
const LIST: &str = "--ten-thousand-cases";

fn main() -> ExitCode {
    let outcome = if std::env::args().any(|arg| arg == LIST) { list() } else { table().map(|()| ExitCode::SUCCESS) };
    outcome.unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}

/// Lists the cases of as many copies of the fixtures as it takes, reading each copy's header anew.
fn list() -> Result<ExitCode> {
    let root = settings::root();
    let mut suite = Suite::new("phase3");
    let mut count = 0;
    for copy in 0.. {
        for manifest in model::fixtures(&root)? {
            let mut outline = Outline::of(&root, &manifest)?;
            outline.name = format!("{}_{copy:04}", outline.name);
            for case in phase3::cases(&outline) {
                if count == CASES {
                    return Ok(suite.run_with(&Arguments { list: true, ..Arguments::default() }));
                }
                suite.case(Case::new(case.name, |_| Ok(())).without_device());
                count += 1;
            }
        }
    }
    unreachable!("the loop ends by returning")
}

fn table() -> Result<()> {
    let (device, reference) = (noise(1), noise(2));
    row("metrics of a 2048 x 2048 pair", "ms", 1e3, Some(10.0), || {
        Metrics::measure(device.view(), reference.view()).map(drop)
    })?;
    row("listing 10,000 cases", "s", 1.0, Some(0.3), || run(&std::env::current_exe().expect("this binary"), &[LIST]))?;
    let subject = Subject::open(MODEL, None)?;
    let dir = subject.checkpoint.dir().to_owned();
    row("opening the checkpoint", "ms", 1e3, None, || Checkpoint::open(&dir).map(drop))?;
    let options = RunnerOptions::for_prompts([16], 32, subject.config.max_position_embeddings);
    row("setup: weights read and packed", "s", 1.0, None, || subject.runner("emu", &options).map(drop))?;
    let binary = Path::new(env!("CARGO_BIN_EXE_phasegate"));
    // Only what `verify` alone takes from here on counts as its memory: these are its first processes.
    row("verify, 2 prompts", "s", 1.0, Some(0.8), || run(binary, &["verify", MODEL, "--max-prompts", "2"]))?;
    row("verify, 8 prompts", "s", 1.0, Some(2.0), || run(binary, &["verify", MODEL, "--max-prompts", "8"]))?;
    let size: u64 = subject.checkpoint.files().filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum();
    show(
        "peak memory of verify / checkpoint",
        "x",
        usage(libc::RUSAGE_CHILDREN).1 as f64 / size as f64,
        Some(1.3),
        None,
    );
    Ok(())
}

fn noise(seed: u64) -> Array2<f32> {
    Array2::from_shape_fn((2048, 2048), |(r, c)| {
        (((r * 2048 + c) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed) >> 40) as f32 / 1e7 - 0.5
    })
}

/// Measures `work` and shows its median in `unit`, of which a second has `per_second`.
fn row(
    what: &str,
    unit: &str,
    per_second: f64,
    limit: Option<f64>,
    mut work: impl FnMut() -> Result<()>,
) -> Result<()> {
    work()?;
    let (mut seconds, before) = (vec![], cpu_seconds());
    for _ in 0..ROUNDS {
        let started = Instant::now();
        work()?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    let cpu = (cpu_seconds() - before) / ROUNDS as f64 * per_second;
    show(what, unit, Summary::of(&seconds).median * per_second, limit, Some(cpu));
    Ok(())
}

fn show(what: &str, unit: &str, value: f64, limit: Option<f64>, cpu: Option<f64>) {
    let cpu = cpu.map_or(String::new(), |cpu| format!("CPU time {cpu:.3} {unit}"));
    let verdict =
        limit.map_or(String::new(), |limit| format!("{} {limit} {unit}", if value < limit { "under" } else { "OVER" }));
    println!("{what:36} {value:9.3} {unit:2} {verdict:16} {cpu}");
}

fn run(binary: &Path, args: &[&str]) -> Result<()> {
    let status = Command::new(binary)
        .args(args)
        .env(settings::RUN_CACHE, "off")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(phasegate::error::Error::io(binary))?;
    assert!(status.success(), "{} {args:?}: {status}", binary.display());
    Ok(())
}

/// CPU time of this process and of the children it has waited for: what a busy machine does not falsify much.
fn cpu_seconds() -> f64 {
    usage(libc::RUSAGE_SELF).0 + usage(libc::RUSAGE_CHILDREN).0
}

/// CPU seconds, and bytes of the largest resident set, of this process or of any child.
fn usage(who: libc::c_int) -> (f64, u64) {
    // SAFETY: all zeros is a valid `rusage`, and the call writes one.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(who, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    // Linux counts in KiB, macOS in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_maxrss as u64 * unit)
}
