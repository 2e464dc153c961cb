//! Another engine in the place of the device: started for a subject, held to be of the same model, judged by the same
//! gates. What an engine does instead of answering becomes a verdict of its own.

use std::path::Path;

use super::Subject;
use crate::check::token_set::STEPS;
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::model::hashes::sha256_file;
use crate::runner::external::protocol::Hello;
use crate::runner::external::{External, ExternalRunner};

/// Starts the engine for this subject.
///
/// Errors: as [`ExternalRunner::start`].
pub fn start(subject: &Subject, external: &External) -> Result<ExternalRunner> {
    ExternalRunner::start(external, &subject.name, &subject.located.checkpoint_dir, &subject.config)
}

/// Whether the weights that the engine read are the checkpoint's: a failure for a file of the checkpoint with another
/// hash, a warning for other files and for none, which leave it to the figures.
///
/// Errors: [`Error::Io`].
pub fn identity(subject: &Subject, hello: &Hello) -> Result<Verdict> {
    let mut failures = vec![];
    let mut warnings = vec![];
    let mut compared = 0;
    for (name, hash) in &hello.weights_sha256 {
        let path = subject.located.checkpoint_dir.join(name);
        // Only a plain name can be a file of the checkpoint.
        if Path::new(name).file_name() != Some(name.as_ref()) || !path.is_file() {
            warnings.push(format!("the engine's weights {name} ({hash:.12}) are no file of the checkpoint"));
            continue;
        }
        compared += 1;
        let ours = sha256_file(&path)?;
        if !ours.eq_ignore_ascii_case(hash) {
            failures.push(format!(
                "another model: the engine read {name} with sha256 {hash:.12}, the checkpoint's has {ours:.12}"
            ));
        }
    }
    if hello.weights_sha256.is_empty() {
        warnings.push("the engine names no weights: that they are the checkpoint's shows in the figures only".into());
    }
    let extent = Extent::new().require("answers", 1).compare("answers", 1).compare("weight files", compared);
    Ok(warnings.into_iter().fold(Verdict::judge(failures, extent), Verdict::warn))
}

/// What an engine that could not be compared comes to: INCONCLUSIVE when it did not answer, FAIL when it answered what
/// cannot be. Any other error is handed back.
///
/// Errors: `error` itself.
pub fn verdict(error: Error) -> Result<Verdict> {
    match error {
        Error::Incomplete { .. } => Ok(Verdict::inconclusive(error.to_string())),
        Error::Engine { .. } => {
            Ok(Verdict::judge(vec![error.to_string()], Extent::new().require("steps", STEPS as u64)))
        }
        other => Err(other),
    }
}
