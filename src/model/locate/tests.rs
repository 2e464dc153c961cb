//! Models are found by name, folder and HF id, or the message says what is known.

use std::fs;

use rstest::rstest;
use tempfile::TempDir;

use super::*;

const MANIFEST: &str = r#"
name = "small"
licence = "Apache-2.0"
made_by = "a test"
seq_len = 64
prompts = ["base"]
expects = ["base_00"]
default_variant = "base"
make = "make small"
[variants.base]
checkpoint = "embedded"
prompts = "base"
[variants.other]
checkpoint = "models/other"
prompts = "base"
"#;

fn root_with(manifest: &str) -> TempDir {
    let root = TempDir::new().expect("a folder");
    fs::create_dir_all(root.path().join("fixtures/small/checkpoint")).expect("made");
    fs::write(root.path().join("fixtures/small/manifest.toml"), manifest).expect("written");
    fs::write(root.path().join("fixtures/small/checkpoint/config.json"), "{}").expect("written");
    root
}

#[test]
fn by_name_by_folder_or_not_at_all() {
    let root = root_with(MANIFEST);
    let found = locate_in(root.path(), "small", None).expect("a fixture");
    assert_eq!((found.name.as_str(), found.variant.as_deref()), ("small", Some("base")));
    assert_eq!(found.reference, None);
    let folder = found.checkpoint_dir.to_str().expect("UTF-8").to_owned();
    assert_eq!(locate_in(root.path(), &folder, None).expect("a folder").name, "checkpoint");

    let error = |model: &str, variant| locate_in(root.path(), model, variant).expect_err("not here").to_string();
    assert!(error("small", Some("other")).contains("is not there; get it with: make small"));
    assert!(error("small", Some("third")).contains("unknown variant \"small:third\"; known: base, other"));
    assert!(error("nothing", None).contains("unknown model \"nothing\"; known: small"));
    assert!(error("no-such-org/no-such-model", None).contains("not in the local cache"));
    assert!(
        error("../small", None).contains("not in the local cache") || error("../small", None).contains("unknown model")
    );
    assert!(error(root.path().to_str().expect("UTF-8"), None).contains("found no config.json"));
    fs::remove_file(root.path().join("fixtures/small/checkpoint/config.json")).expect("removed");
    assert!(error("small", None).contains("checkpoint/config.json is not there"), "{}", error("small", None));
}

#[rstest]
#[case("seq_len = 64", "seq_len = 0", "seq_len: found 0")]
#[case("seq_len = 64", "seq_len = \"64\"", "seq_len")]
#[case("licence", "license", "unknown field `license`")]
#[case("default_variant = \"base\"", "default_variant = \"x\"", "default_variant: found \"x\"")]
#[case("base_00", "chat_00", "expects: found \"chat_00\"")]
#[case("name = \"small\"", "name = \"Small one\"", "name: found \"Small one\"")]
#[case("name = \"small\"", "name = \"large\"", "expected the folder's name")]
#[case("prompts = [\"base\"]", "prompts = [\"poems\"]", "poems")]
fn damaged_manifests(#[case] from: &str, #[case] to: &str, #[case] expected: &str) {
    let root = root_with(&MANIFEST.replacen(from, to, 1));
    let error = locate_in(root.path(), "small", None).expect_err("damaged").to_string();
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
    assert!(error.contains("manifest.toml"), "{error}");
}

#[rstest]
#[case("org/name", Some(("org/name", None)))]
#[case("org/name@v1.0", Some(("org/name", Some("v1.0"))))]
#[case("name", None)]
#[case("a/b/c", None)]
#[case("../name", None)]
#[case("org/..", None)]
#[case("org/name@", None)]
#[case("/name", None)]
fn hf_ids(#[case] text: &str, #[case] expected: Option<(&str, Option<&str>)>) {
    assert_eq!(HfId::parse(text).map(|id| (id.repo, id.revision)), expected);
}

#[test]
fn the_projects_own_fixtures() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names: Vec<String> = fixtures(root).expect("readable").into_iter().map(|m| m.name).collect();
    assert_eq!(names, ["smollm2_135m", "tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3"]);
}

#[test]
fn a_snapshot_in_a_cache() {
    let dir = TempDir::new().expect("a folder");
    let repo = dir.path().join("models--org--name");
    fs::create_dir_all(repo.join("snapshots/abc123")).expect("made");
    fs::create_dir_all(repo.join("refs")).expect("made");
    fs::write(repo.join("refs/main"), "abc123").expect("written");
    fs::write(repo.join("snapshots/abc123/config.json"), "{}").expect("written");
    let find = |id: &str| HfId::parse(id).expect("an id").find_in(&Cache::new(dir.path().into()));
    assert_eq!(find("org/name"), Some(repo.join("snapshots/abc123")));
    assert_eq!(find("org/name@abc123"), Some(repo.join("snapshots/abc123")));
    assert_eq!(find("org/name@v2"), None);
    assert_eq!(find("org/other"), None);
}
