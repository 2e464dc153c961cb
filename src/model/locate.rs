//! From what the user calls a model to the folder that holds it: a fixture's name, a path, or an HF id in the local
//! cache. Downloads nothing.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use hf_hub::{Cache, Repo, RepoType};

use super::config::CONFIG_FILE;
use super::manifest::{Manifest, fixtures};
use super::prompts::PromptSet;
use crate::error::{Error, Result};
use crate::settings;

/// A model that is here.
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    /// Short: the fixture's name, the folder's, or the id's last part.
    pub name: String,
    /// The fixture's manifest, if it is one.
    pub manifest: Option<Manifest>,
    /// The variant taken, of a fixture.
    pub variant: Option<String>,
    pub checkpoint_dir: PathBuf,
    /// The capture, where there is one and the variant is the one that it was made of.
    pub reference: Option<PathBuf>,
    pub default_prompts: PromptSet,
}

/// Finds `model` under the project root.
///
/// Errors: [`Error::Unavailable`] for a known model that is not here, with the way to get it; [`Error::Unknown`] for
/// another name, with the fixtures' names.
pub fn locate(model: &str, variant: Option<&str>) -> Result<Located> {
    locate_in(&settings::root(), model, variant)
}

/// [`locate`] under a given root.
///
/// Errors: as [`locate`].
pub fn locate_in(root: &Path, model: &str, variant: Option<&str>) -> Result<Located> {
    let known = fixtures(root).unwrap_or_default();
    if let Some(manifest) = known.iter().find(|m| m.name == model) {
        return fixture(root, manifest.clone(), variant);
    }
    // A fixture that cannot be read is an error of its own, not an unknown name.
    if root.join("fixtures").join(model).join(super::manifest::MANIFEST_FILE).is_file() && plain(model) {
        return fixture(root, Manifest::read(&root.join("fixtures").join(model))?, variant);
    }
    let path = Path::new(model);
    if path.is_dir() {
        return folder(path);
    }
    if let Some(id) = HfId::parse(model) {
        return match id.find() {
            Some(dir) => Ok(unlisted(id.name().to_owned(), dir)),
            None => Err(id.unavailable()),
        };
    }
    let names = known.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
    let fixtures = root.join("fixtures");
    let names = match (fixtures.is_dir(), names.is_empty()) {
        (false, _) => format!("nothing: the root {} ({}) has no fixtures/", root.display(), settings::ROOT),
        (true, true) => format!("nothing: no fixture in {}", fixtures.display()),
        (true, false) => names,
    };
    let known = format!("{names}; or a checkpoint folder, or an HF id ORG/NAME in the local cache");
    Err(Error::Unknown { kind: "model", name: model.into(), known })
}

fn plain(name: &str) -> bool {
    Path::new(name).file_name() == Some(name.as_ref())
}

fn folder(path: &Path) -> Result<Located> {
    if !path.join(CONFIG_FILE).is_file() {
        return Err(Error::malformed(path, format!("found no {CONFIG_FILE}, expected a checkpoint")));
    }
    let full = path.canonicalize().map_err(Error::io(path))?;
    let name = full.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
    Ok(unlisted(name, path.to_owned()))
}

fn unlisted(name: String, checkpoint_dir: PathBuf) -> Located {
    let reference = Some(checkpoint_dir.join(super::manifest::REFERENCE_FILE)).filter(|p| p.is_file());
    let template = super::chat_template::ChatTemplate::open(&checkpoint_dir).ok().flatten();
    let default_prompts = if template.is_some() { PromptSet::Chat } else { PromptSet::Base };
    Located { name, manifest: None, variant: None, checkpoint_dir, reference, default_prompts }
}

/// What a fixture's manifest means by this variant.
///
/// Errors: [`Error::Unavailable`] when the checkpoint is not there, [`Error::Unknown`] for a variant it has not.
pub fn fixture(root: &Path, manifest: Manifest, variant: Option<&str>) -> Result<Located> {
    let taken = manifest.variant(variant)?.clone();
    let name = variant.unwrap_or(&manifest.default_variant).to_owned();
    let missing = |why: String| Error::Unavailable { what: format!("model {}", manifest.name), why };
    let checkpoint_dir = match taken.checkpoint.as_str() {
        "embedded" => manifest.dir.join("checkpoint"),
        hf if hf.starts_with("hf:") => match HfId::parse(&hf[3..]) {
            Some(id) => id.find().ok_or_else(|| id.unavailable())?,
            None => return Err(missing(format!("its manifest names {hf:?}, expected hf:ORG/NAME@REVISION"))),
        },
        path => root.join(path),
    };
    if !checkpoint_dir.join(CONFIG_FILE).is_file() {
        let absent = if checkpoint_dir.is_dir() { checkpoint_dir.join(CONFIG_FILE) } else { checkpoint_dir };
        let make = manifest.make.as_ref().map_or(String::new(), |m| format!("; get it with: {m}"));
        return Err(missing(format!("{} is not there{make}", absent.display())));
    }
    // The capture belongs to the default variant; the hashes inside it have the last word.
    let reference = Some(manifest.reference()).filter(|p| name == manifest.default_variant && p.is_file());
    Ok(Located {
        name: manifest.name.clone(),
        manifest: Some(manifest),
        variant: Some(name),
        checkpoint_dir,
        reference,
        default_prompts: taken.prompts,
    })
}

/// `ORG/NAME` or `ORG/NAME@REVISION`.
struct HfId<'a> {
    repo: &'a str,
    revision: Option<&'a str>,
}

impl<'a> HfId<'a> {
    fn parse(text: &'a str) -> Option<HfId<'a>> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let part = |s: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !s.is_empty() && !s.starts_with('.') && s.chars().all(plain)
        };
        let (org, name) = repo.split_once('/')?;
        (part(org) && part(name) && revision.is_none_or(part)).then_some(HfId { repo, revision })
    }

    fn name(&self) -> &'a str {
        self.repo.rsplit('/').next().unwrap_or(self.repo)
    }

    /// The snapshot folder in the local cache: a branch by its ref, or a commit by its hash.
    fn find(&self) -> Option<PathBuf> {
        self.find_in(&cache())
    }

    fn find_in(&self, cache: &Cache) -> Option<PathBuf> {
        let revision = self.revision.unwrap_or("main").to_owned();
        let repo = Repo::with_revision(self.repo.to_owned(), RepoType::Model, revision.clone());
        if let Some(config) = cache.repo(repo).get(CONFIG_FILE) {
            return config.parent().map(Path::to_owned);
        }
        let snapshots = cache.path().join(format!("models--{}", self.repo.replace('/', "--"))).join("snapshots");
        let dir = snapshots.join(revision);
        dir.join(CONFIG_FILE).is_file().then_some(dir)
    }

    fn unavailable(&self) -> Error {
        let revision = self.revision.map_or(String::new(), |r| format!(" --revision {r}"));
        Error::Unavailable {
            what: format!("model {}", self.repo),
            why: format!(
                "not in the local cache {}; get it with: hf download {}{revision}",
                cache().path().display(),
                self.repo
            ),
        }
    }
}

/// The cache that HF's own tools use: `HF_HUB_CACHE`, else `HF_HOME`, else the home folder's.
fn cache() -> Cache {
    match settings::hf_hub_cache() {
        Some(path) => Cache::new(path),
        None => Cache::from_env(),
    }
}
