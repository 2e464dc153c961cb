//! Environment variables: read in one place, listed there and in the README.

use std::collections::BTreeMap;

use phasegate::settings;

use super::files;
use super::source;

#[test]
fn only_settings_reads_the_environment() {
    let reads = ["env::var", "env::set_var", "env::remove_var", "use std::env", "std::env as"];
    for file in files::rust().iter().filter(|file| file.starts_with("src/") && *file != "src/settings.rs") {
        let code = source::code(&files::text(file).unwrap_or_default());
        let found = reads.iter().find(|read| code.contains(**read));
        assert!(found.is_none(), "{file}: {} outside of src/settings.rs", found.unwrap_or(&""));
    }
}

#[test]
fn every_variable_is_known() {
    let prefix = ["PHASE", "GATE_"].concat();
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for file in files::all() {
        let text = files::text(&file).unwrap_or_default();
        for (at, _) in text.match_indices(&prefix) {
            let name = |c: &char| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_';
            let name: String = text[at..].chars().take_while(name).collect();
            // `PHASEGATE_*` speaks of all of them.
            if name != prefix {
                found.insert(name, file.clone());
            }
        }
    }
    let known = |name: &str| settings::VARIABLES.iter().any(|variable| variable.name == name);
    found.retain(|name, _| !known(name));
    assert!(found.is_empty(), "not in settings::VARIABLES (name, a file): {found:#?}");
}

#[test]
fn the_readme_lists_every_variable() {
    let readme = files::text("README.md").expect("text");
    for variable in settings::VARIABLES {
        assert!(readme.contains(variable.name), "README.md does not list {}", variable.name);
    }
}
