//! The one error type of the library. Every message names the place (file, key, tensor, layer), what was found and
//! what was expected; lower case, no final period. Only `commands` wraps it (anyhow), nothing else invents its own.

use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong, by what the reader must do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    // Not its `source`: the message says it, and a chain would say it again.
    #[error("{path}: {os}", path = path.display())]
    Io { path: PathBuf, os: std::io::Error },

    /// A file is not what its name says: damaged, truncated, another format.
    #[error("{path}: {why}", path = path.display())]
    Malformed { path: PathBuf, why: String },

    /// A key of a configuration file has a value that cannot be right.
    #[error("{path}: {key}: found {found}, expected {expected}", path = path.display())]
    Key { path: PathBuf, key: String, found: String, expected: String },

    /// A tensor is missing, left over, or not of the shape or dtype that the config implies.
    #[error("{path}: tensor {tensor}: found {found}, expected {expected}", path = path.display())]
    Tensor { path: PathBuf, tensor: String, found: String, expected: String },

    /// A sound checkpoint that is out of scope: refused by name, with the reason and, where there is one, a way on.
    #[error("{path}: refused: {what}: {why}", path = path.display())]
    Refused { path: PathBuf, what: String, why: String },

    /// A reference capture that does not belong to the loaded checkpoint, prompts or tokenizer.
    #[error("{path}: capture refused: {why}; re-make it with fixtures/hf/capture.py", path = path.display())]
    Capture { path: PathBuf, why: String },

    /// Something asked for by name does not exist.
    #[error("unknown {kind} {name:?}; known: {known}")]
    Unknown { kind: &'static str, name: String, known: String },

    /// The device did not complete a dispatch; no number may be taken from it.
    #[error("device {device}: {dispatch}: {state} after {elapsed_us} us")]
    Incomplete { device: String, dispatch: String, state: String, elapsed_us: u64 },

    /// An external engine broke the protocol, or answered what cannot be of this model.
    #[error("external runner {engine:?}: {op}: {why}")]
    Engine { engine: String, op: String, why: String },

    /// The device was used against its contract, or a buffer was found damaged.
    #[error("device {device}: {why}")]
    Device { device: String, why: String },

    /// A plan that cannot be built for this model, or that breaks its own rules.
    #[error("plan: {why}")]
    Plan { why: String },

    /// What was asked for cannot be had here (no model, no library, no device): a reason to skip, never to pass.
    #[error("{what} is not available: {why}")]
    Unavailable { what: String, why: String },

    /// Two things that cannot be compared: other shapes, ids beyond the vocabulary, no number where one must be.
    #[error("{what}: cannot be compared: found {found}, expected {expected}")]
    Comparison { what: String, found: String, expected: String },

    /// A wrong argument or environment variable.
    #[error("{what}: found {found:?}, expected {expected}")]
    Usage { what: String, found: String, expected: String },
}

impl Error {
    /// Wraps an I/O error with the path it happened at; meant for `map_err`.
    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        move |os| Error::Io { path: path.as_ref().to_owned(), os }
    }

    /// A damaged file.
    pub fn malformed(path: impl AsRef<Path>, why: impl Into<String>) -> Error {
        Error::Malformed { path: path.as_ref().to_owned(), why: why.into() }
    }

    /// A file that could not be read as JSON, or as the JSON it should be; names the usual mistake, a page or a pointer
    /// saved in place of the file.
    pub fn not_json(path: impl AsRef<Path>, bytes: &[u8], error: &serde_json::Error) -> Error {
        let start = bytes.trim_ascii_start();
        let why = if start.is_empty() {
            "an empty file, expected JSON".into()
        } else if start.starts_with(b"<") {
            "an HTML or XML page, expected JSON".into()
        } else if start.starts_with(b"version https://git-lfs") {
            "a git-lfs pointer, expected the file itself (git lfs pull)".into()
        } else if error.is_data() {
            error.to_string()
        } else {
            format!("not JSON: {error}")
        };
        Error::malformed(path, why)
    }

    /// A comparison that has no meaning.
    pub fn comparison(what: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::Comparison { what: what.into(), found: found.into(), expected: expected.into() }
    }
}
