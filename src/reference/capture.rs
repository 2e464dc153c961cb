//! One `reference.safetensors`, opened and checked.

use std::path::Path;
use std::sync::OnceLock;

use ndarray::{Array1, Array2};

use super::identity::Identity;
use super::lens::Lens;
use super::metadata::{About, CapturedPrompt, DeclaredFloor, Provenance};
use super::prompt::PromptCapture;
use super::schema;
use super::tensors::Tensors;
use crate::check::Summary;
use crate::error::{Error, Result};

/// HF's rotary tables at sampled positions, f32, attention scaling included.
///
/// Shapes: `cos`, `sin` `[positions, head_dim]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub positions: Vec<u32>,
    pub cos: Array2<f32>,
    pub sin: Array2<f32>,
}

/// Negative log-likelihood of each next token of the held-out text, -ln p(ids\[i+1\] | ids\[..=i\]).
///
/// Shapes: `ids [T]`; `bf16`, `f32` `[T - 1]`.
///
/// Units: nats.
#[derive(Debug, Clone, PartialEq)]
pub struct Nll {
    pub ids: Vec<u32>,
    pub bf16: Array1<f32>,
    pub f32: Array1<f32>,
}

/// A capture that is complete and of the right shapes. Whether it is the right one is asked by [`Capture::matches`],
/// whether its numbers make sense by [`Capture::sound`].
pub struct Capture {
    tensors: Tensors,
    about: About,
    floor: OnceLock<Summary>,
    regret: OnceLock<f64>,
}

impl Capture {
    /// Opens and checks header, metadata, every tensor's dtype and shape, and all ids and positions.
    ///
    /// Errors: [`Error::Io`]; [`Error::Malformed`] for a file that is not a complete safetensors file;
    /// [`Error::Capture`] for its metadata; [`Error::Tensor`] for a tensor that is missing, left over or wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Capture> {
        let tensors = Tensors::open(path.as_ref())?;
        let about = About::parse(path.as_ref(), &tensors.strings())?;
        schema::check_shapes(&tensors, &about)?;
        schema::check_ids(&tensors, &about)?;
        Ok(Capture { tensors, about, floor: OnceLock::new(), regret: OnceLock::new() })
    }

    pub fn path(&self) -> &Path {
        &self.tensors.path
    }

    /// The fixture's name.
    pub fn model(&self) -> &str {
        &self.about.model
    }

    pub fn prompts(&self) -> &[CapturedPrompt] {
        &self.about.prompts
    }

    /// Ids of the prompts that have a [`Lens`].
    pub fn lens_prompts(&self) -> &[String] {
        &self.about.lens
    }

    /// Errors: [`Error::Unknown`] for a prompt that was not captured.
    pub fn prompt(&self, id: &str) -> Result<PromptCapture> {
        self.known(id)?;
        PromptCapture::read(&self.tensors, id)
    }

    /// `None` for a captured prompt without lens tensors.
    ///
    /// Errors: [`Error::Unknown`] for a prompt that was not captured.
    pub fn lens(&self, id: &str) -> Result<Option<Lens>> {
        self.known(id)?;
        let has = self.about.lens.iter().any(|lens| lens == id);
        has.then(|| Lens::read(&self.tensors, id)).transpose()
    }

    pub fn rope(&self) -> Result<Rope> {
        let t = &self.tensors;
        Ok(Rope { positions: t.ids("rope.positions")?, cos: t.matrix("rope.cos")?, sin: t.matrix("rope.sin")? })
    }

    pub fn nll(&self) -> Result<Nll> {
        let t = &self.tensors;
        Ok(Nll { ids: t.ids("nll.ids")?, bf16: t.vector("nll.bf16")?, f32: t.vector("nll.f32")? })
    }

    pub(super) fn known_floor(&self) -> &OnceLock<Summary> {
        &self.floor
    }

    pub(super) fn known_regret(&self) -> &OnceLock<f64> {
        &self.regret
    }

    pub(super) fn declared_floor(&self) -> Option<DeclaredFloor> {
        self.about.floor
    }

    /// HF's config class after loading, defaults filled in.
    pub fn resolved_config(&self) -> &serde_json::Value {
        &self.about.resolved_config
    }

    pub fn provenance(&self) -> &Provenance {
        &self.about.provenance
    }

    /// Ids that end generation.
    pub fn stop_ids(&self) -> &[u32] {
        &self.about.stop_ids
    }

    /// The hashes of what it was made from.
    pub fn identity(&self) -> Identity {
        Identity {
            weights_sha256: self.about.weights_sha256.clone(),
            files_sha256: self.about.files_sha256.clone(),
            prompts_sha256: self.about.prompts_sha256.clone(),
        }
    }

    pub(super) fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    fn known(&self, id: &str) -> Result<()> {
        let ids = || self.about.prompts.iter().map(|p| p.id.as_str());
        if ids().any(|known| known == id) {
            return Ok(());
        }
        Err(Error::Unknown { kind: "prompt", name: id.to_owned(), known: ids().collect::<Vec<_>>().join(", ") })
    }
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").field("path", &self.path()).field("model", &self.model()).finish_non_exhaustive()
    }
}
