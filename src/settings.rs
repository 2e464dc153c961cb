//! Every environment variable that phasegate reads, in one place, all named `PHASEGATE_*`. The README lists them.
//!
//! Two tools keep variables of their own: the Hugging Face cache (`HF_HUB_CACHE` here, `HF_HOME` in hf-hub) and nextest
//! (`NEXTEST`, which says that this process runs one test only).

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

/// One variable: name and what it does, for `--help` and the README's table.
pub struct Variable {
    pub name: &'static str,
    pub what: &'static str,
}

pub const DEVICES: &str = "PHASEGATE_DEVICES";
pub const MODELS: &str = "PHASEGATE_MODELS";
pub const REQUIRE: &str = "PHASEGATE_REQUIRE";
pub const ISA: &str = "PHASEGATE_ISA";
pub const THREADS: &str = "PHASEGATE_THREADS";
pub const ROOT: &str = "PHASEGATE_ROOT";
pub const RUN_CACHE: &str = "PHASEGATE_RUN_CACHE";
pub const KERNELS: &str = "PHASEGATE_KERNELS";
pub const NPU_TIMEOUT: &str = "PHASEGATE_NPU_TIMEOUT";
pub const VNPU: &str = "PHASEGATE_VNPU";

/// What `PHASEGATE_REQUIRE` calls kernel caches of sealed ELFs.
pub const SEALED: &str = "sealed";
pub const EXPLAIN_SECONDS: &str = "PHASEGATE_EXPLAIN_SECONDS";
pub const BUNDLE: &str = "PHASEGATE_BUNDLE";

/// The longest time that can be asked for: a day.
pub const MOST_SECONDS: u64 = 86400;

/// All of them.
pub const VARIABLES: &[Variable] = &[
    Variable { name: DEVICES, what: "devices the test cases are multiplied by, comma separated (default emu)" },
    Variable { name: MODELS, what: "fixtures the test cases are generated for, comma separated (default: every one)" },
    Variable { name: REQUIRE, what: "devices or models whose absence is a failure and not a skip, comma separated" },
    Variable { name: ISA, what: "instruction set of emu: portable, avx2, avx512f or avx512bf16 (default: the best)" },
    Variable { name: THREADS, what: "worker threads of emu (default: the machine's cores)" },
    Variable {
        name: ROOT,
        what: "project root with fixtures, prompts and models (default: found from the working directory)",
    },
    Variable { name: RUN_CACHE, what: "off: compute every run anew instead of taking it from target/phasegate/runs" },
    Variable {
        name: KERNELS,
        what: "folder of compiled ELFs for npu and vnpu: sealed by us, or upstream's kernel cache",
    },
    Variable { name: NPU_TIMEOUT, what: "seconds after which a dispatch counts as hung (default 10)" },
    Variable { name: VNPU, what: "what the virtual NPU does wrong, for tests: words such as hang, error, after=3" },
    Variable { name: EXPLAIN_SECONDS, what: "time for explaining a failure of phase 2 or 3; 0: do not (default 30)" },
    Variable { name: BUNDLE, what: "folder that receives what every test case came to, for phasegate merge" },
];

/// A variable's value; unset and empty are the same.
fn get(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.trim().is_empty())
}

/// That every variable can be read: one that cannot would pass for unset.
///
/// Errors: [`Error::Usage`] for one that is not UTF-8.
pub fn check() -> Result<()> {
    for Variable { name, .. } in VARIABLES {
        if let Err(std::env::VarError::NotUnicode(found)) = std::env::var(name) {
            let (what, found) = ((*name).into(), found.to_string_lossy().into_owned());
            return Err(Error::Usage { what, found, expected: "UTF-8".into() });
        }
    }
    Ok(())
}

/// A comma-separated list; empty when unset.
pub fn list(name: &str) -> Vec<String> {
    get(name).map(|v| v.split(',').map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()).collect()).unwrap_or_default()
}

/// Forced instruction set, if any, as written.
pub fn isa() -> Option<String> {
    get(ISA)
}

/// Whether runs may be served from the run cache.
///
/// Errors: [`Error::Usage`] for anything but `on` and `off`.
pub fn run_cache() -> Result<bool> {
    match get(RUN_CACHE) {
        None => Ok(true),
        Some(v) if v.trim().eq_ignore_ascii_case("on") => Ok(true),
        Some(v) if v.trim().eq_ignore_ascii_case("off") => Ok(false),
        Some(found) => Err(Error::Usage { what: RUN_CACHE.into(), found, expected: "on or off".into() }),
    }
}

/// The folder of compiled ELFs.
pub fn kernels() -> Option<PathBuf> {
    get(KERNELS).map(PathBuf::from)
}

/// Whether only sealed ELFs may be used.
pub fn sealed_only() -> bool {
    list(REQUIRE).iter().any(|name| name == SEALED)
}

/// How long a dispatch on an NPU may take before it counts as hung; longer than the driver's own limit of 6 s.
///
/// Errors: [`Error::Usage`] for anything but a number of seconds above zero.
pub fn npu_timeout() -> Result<Duration> {
    let Some(v) = get(NPU_TIMEOUT) else { return Ok(Duration::from_secs(10)) };
    let seconds = v.trim().parse().ok().filter(|s: &f64| *s > 0.0 && *s <= MOST_SECONDS as f64);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| Error::Usage {
        what: NPU_TIMEOUT.into(),
        found: v,
        expected: format!("seconds, above 0 and at most {MOST_SECONDS}"),
    })
}

/// The words of `PHASEGATE_VNPU`.
pub fn vnpu() -> Vec<String> {
    list(VNPU)
}

/// The folder of the result bundle, if results are kept.
pub fn bundle() -> Option<PathBuf> {
    get(BUNDLE).map(PathBuf::from)
}

/// The Hugging Face cache's folder where it is given; `HF_HOME` and the home folder are hf-hub's business.
pub fn hf_hub_cache() -> Option<PathBuf> {
    get("HF_HUB_CACHE").map(PathBuf::from)
}

/// Whether this process was started by nextest to run a single test.
pub fn one_test_per_process() -> bool {
    get("NEXTEST").is_some()
}

/// Worker threads of the emulated device.
///
/// Errors: [`Error::Usage`] for anything but a positive number.
pub fn threads() -> Result<usize> {
    match get(THREADS) {
        None => Ok(std::thread::available_parallelism().map_or(1, |n| n.get())),
        Some(v) => v.trim().parse().ok().filter(|n| (1..=1024).contains(n)).ok_or_else(|| Error::Usage {
            what: THREADS.into(),
            found: v,
            expected: "a number from 1 to 1024".into(),
        }),
    }
}

/// Time for explaining a failure; zero: it is not explained.
///
/// Errors: [`Error::Usage`] for anything but a number of seconds.
pub fn explain_budget() -> Result<Duration> {
    match get(EXPLAIN_SECONDS) {
        None => Ok(Duration::from_secs(30)),
        Some(v) => {
            let seconds = v.trim().parse().ok().filter(|&seconds: &u64| seconds <= MOST_SECONDS);
            seconds.map(Duration::from_secs).ok_or_else(|| Error::Usage {
                what: EXPLAIN_SECONDS.into(),
                found: v,
                expected: format!("a whole number of seconds, at most {MOST_SECONDS}"),
            })
        }
    }
}

/// The project root: `PHASEGATE_ROOT`, else the nearest folder upwards from the working directory that holds
/// `fixtures/` and `prompts/`, else the folder this binary was built in.
pub fn root() -> PathBuf {
    if let Some(root) = get(ROOT) {
        return root.into();
    }
    let is_root = |p: &std::path::Path| p.join("fixtures").is_dir() && p.join("prompts").is_dir();
    if let Ok(cwd) = std::env::current_dir()
        && let Some(found) = cwd.ancestors().find(|p| is_root(p))
    {
        return found.to_owned();
    }
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Where runs, caches and reports go: `target/phasegate` under the root.
pub fn work_dir() -> PathBuf {
    root().join("target").join("phasegate")
}
