//! What a run's figures come from: enough to say whether two runs may be compared.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::bundle::ModelIdentity;
use crate::error::{Error, Result};
use crate::model::hashes::{sha256, sha256_file};
use crate::phase::{Subject, devices};
use crate::reference::Capture;

/// Commit of the project under `root`, `+changes` behind it where files differ from it; `unknown` where git cannot say.
pub fn commit(root: &Path) -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(args).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    match git(&["rev-parse", "--short=12", "HEAD"]) {
        None => "unknown".into(),
        // Documents and baselines that a run itself writes do not make another program.
        Some(commit) => {
            match git(&["status", "--porcelain", "--untracked-files=no", "--", "src", "kernels", "Cargo.lock"]) {
                Some(changes) if changes.is_empty() => commit,
                _ => format!("{commit}+changes"),
            }
        }
    }
}

/// One hash over all tensors of a checkpoint.
///
/// Errors: [`crate::error::Error::Io`].
pub fn weights(subject: &Subject) -> Result<String> {
    let hashes = subject.checkpoint.tensor_hashes()?;
    let lines: String = hashes.iter().map(|(name, hash)| format!("{name} {hash}\n")).collect();
    Ok(sha256(lines.as_bytes()))
}

/// What a capture's judgements rest on. Its own hashes of the weights stand for them: a run refuses any others.
///
/// Errors: a capture that cannot be read.
pub fn capture(reference: &Path) -> Result<ModelIdentity> {
    let identity = Capture::open(reference)?.identity();
    let lines: String = identity.weights_sha256.iter().map(|(name, hash)| format!("{name} {hash}\n")).collect();
    Ok(ModelIdentity { capture_sha256: sha256_file(reference)?, weights_sha256: sha256(lines.as_bytes()) })
}

/// Name and value of everything a model's figures rest on.
///
/// Errors: a capture that does not belong; [`Error::Io`].
pub fn of(subject: &Subject) -> Result<Vec<(String, String)>> {
    let capture = match subject.capture() {
        Ok(capture) => Some(capture),
        // A checkpoint that nobody has captured can be timed all the same.
        Err(Error::Unavailable { .. }) => None,
        Err(error) => return Err(error),
    };
    let mut all = vec![
        ("commit".into(), commit(&subject.root)),
        ("phasegate".into(), env!("CARGO_PKG_VERSION").into()),
        ("checkpoint".into(), subject.located.checkpoint_dir.display().to_string()),
        ("weights_sha256".into(), weights(subject)?),
    ];
    if let Some(capture) = &capture {
        all.push(("capture_sha256".into(), sha256_file(capture.path())?));
        all.push(("reference".into(), capture.provenance().line()));
    }
    all.push(("instruction_set".into(), devices::isa()?.to_string()));
    let prompts = capture.into_iter().flat_map(|capture| capture.identity().prompts_sha256);
    all.extend(prompts.map(|(file, hash)| (format!("prompts {file}"), hash)));
    Ok(all)
}

/// The largest resident set of this process so far, pages of mapped files included; where the system tells (Linux).
///
/// Units: bytes.
pub fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}
