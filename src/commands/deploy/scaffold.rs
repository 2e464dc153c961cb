//! The fixture of a new model: scope check, then a manifest. Nothing is written for a checkpoint out of scope.

use std::path::Path;

use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;
use crate::model::{self, Manifest};
use crate::phase::Subject;

/// Positions below which the long prompts have no room.
const LONG_NEEDS: usize = 1024;

/// Checks the scope and makes `fixtures/<name>/manifest.toml` where there is none; gives the fixture's name.
///
/// Errors: whatever is wrong with the checkpoint; [`Error::Usage`] for a name that another checkpoint has.
pub(super) fn scaffold(root: &Path, model: &str, name: Option<&str>) -> Result<String> {
    let subject = Subject::unaccounted(root, model, None)?;
    subject.checkpoint.account(&subject.config)?;
    if let Some(manifest) = &subject.located.manifest {
        return Ok(manifest.name.clone());
    }
    let name = name.map_or_else(|| plain(&subject.name), str::to_owned);
    let dir = root.join("fixtures").join(&name);
    let path = dir.join(model::manifest::MANIFEST_FILE);
    let checkpoint = reference(root, model, &subject)?;
    if path.is_file() {
        let known = Manifest::read(&dir)?.variant(None)?.checkpoint.clone();
        if known == checkpoint {
            return Ok(name);
        }
        return Err(Error::Usage {
            what: "name".into(),
            found: format!("{name}, whose checkpoint is {known}"),
            expected: format!("another --name for {checkpoint}"),
        });
    }
    let text = manifest(&name, &checkpoint, &subject)?;
    // Held against the rules of a manifest before it is there.
    Manifest::parse(&path, &text)?;
    std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    write_atomically(&path, text.as_bytes())?;
    Ok(name)
}

/// As test names may have it.
fn plain(name: &str) -> String {
    name.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// How the manifest names the checkpoint: an HF id as such, a folder under the root from there, any other absolute.
fn reference(root: &Path, model: &str, subject: &Subject) -> Result<String> {
    if !Path::new(model).is_dir() {
        return Ok(format!("hf:{model}"));
    }
    let dir = &subject.located.checkpoint_dir;
    let full = dir.canonicalize().map_err(Error::io(dir))?;
    let root = root.canonicalize().map_err(Error::io(root))?;
    Ok(full.strip_prefix(&root).unwrap_or(&full).display().to_string())
}

fn manifest(name: &str, checkpoint: &str, subject: &Subject) -> Result<String> {
    let chat = subject.template().is_ok();
    let max = subject.config.max_position_embeddings;
    let mut sets = vec!["base", "instruct"];
    sets.extend(chat.then_some("chat"));
    sets.extend((max >= LONG_NEEDS).then_some("long"));
    let (variant, prompts) = if chat { ("instruct", "chat") } else { ("base", "base") };
    let quoted = |text: &str| toml::Value::String(text.into()).to_string();
    let sets = sets.into_iter().map(quoted).collect::<Vec<_>>().join(", ");
    Ok(format!(
        "name = {}\nlicence = \"not stated: see the checkpoint\"\nmade_by = \"phasegate deploy\"\nseq_len = {}\n\
         prompts = [{sets}]\ndefault_variant = \"{variant}\"\n\n[variants.{variant}]\ncheckpoint = {}\nprompts = \"{prompts}\"\n",
        quoted(name),
        max.min(2048),
        quoted(checkpoint),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_parts_of_test_names() {
        assert_eq!(plain("SmolLM2-135M-Instruct"), "smollm2_135m_instruct");
        assert_eq!(plain("a.b c"), "a_b_c");
    }
}
