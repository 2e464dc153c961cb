//! The HF capture of a new model: made here if a Python can, else by the command that is handed out.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::model::Manifest;
use crate::phase::Subject;

/// Tried in this order when none is named.
const PYTHONS: [&str; 2] = ["python3", "python"];

/// Makes sure that the capture is there and belongs to the checkpoint. Gives the command that makes it when nothing here
/// can.
///
/// Errors: a capture that belongs to another checkpoint; [`Error::Unavailable`] for a named Python without torch;
/// [`Error::Capture`] when the script fails.
pub(super) fn capture(root: &Path, name: &str, python: Option<&str>) -> Result<Option<String>> {
    let subject = Subject::open(name, None)?;
    match subject.capture() {
        Ok(_) => return Ok(None),
        Err(Error::Unavailable { .. }) => {}
        Err(other) => return Err(other),
    }
    let dir = root.join("fixtures").join(name);
    let manifest = Manifest::read(&dir)?;
    let sets: Vec<&str> = manifest.prompts.iter().map(|set| set.name()).collect();
    let args = [
        root.join("fixtures/hf/capture.py").display().to_string(),
        subject.located.checkpoint_dir.display().to_string(),
        dir.display().to_string(),
        "--name".into(),
        name.into(),
        "--prompts-dir".into(),
        root.join("prompts").display().to_string(),
        "--sets".into(),
        sets.join(","),
    ];
    let Some(python) = find(python)? else {
        let words = ["python3"].into_iter().chain(args.iter().map(String::as_str));
        let quoted =
            shlex::try_join(words).map_err(|e| Error::malformed(&dir, format!("a path no shell can take: {e}")))?;
        return Ok(Some(quoted));
    };
    eprintln!("capturing with {python}; this runs the model in bf16 and in f32 ...");
    let status = Command::new(&python).args(&args).stdin(Stdio::null()).stdout(Stdio::inherit()).status();
    let status = status.map_err(Error::io(&python))?;
    if !status.success() {
        let why = format!("{python} fixtures/hf/capture.py ended with {status}");
        return Err(Error::Capture { path: manifest.reference(), why });
    }
    // Opened anew: what the script wrote must belong to the checkpoint.
    Subject::open(name, None)?.capture()?;
    Ok(None)
}

/// The interpreter that has torch and transformers.
///
/// Errors: [`Error::Unavailable`] when one was named and has them not.
fn find(named: Option<&str>) -> Result<Option<String>> {
    let has = |python: &str| {
        let imports = Command::new(python)
            .args(["-c", "import torch, transformers"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        imports.is_ok_and(|status| status.success())
    };
    match named {
        None => Ok(PYTHONS.into_iter().find(|python| has(python)).map(str::to_owned)),
        Some(python) if has(python) => Ok(Some(python.to_owned())),
        Some(python) => Err(Error::Unavailable {
            what: format!("a capture with {python}"),
            why: "it cannot import torch and transformers; fixtures/hf/capture.py names the versions".into(),
        }),
    }
}
