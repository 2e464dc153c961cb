//! Cargo.toml against the tree: every test and bench is listed, the card's packages are there and used.

use std::collections::BTreeSet;

use super::files;
use super::source;

/// The packages the project's card promises.
const CARD: [&str; 9] =
    ["rstest", "insta", "proptest", "half", "safetensors", "ndarray", "xrt-sys", "serde_json", "libtest-mimic"];

fn manifest() -> toml::Table {
    files::text("Cargo.toml").expect("text").parse().expect("TOML")
}

/// name -> harness, of each `[[test]]` or `[[bench]]`.
fn targets(manifest: &toml::Table, kind: &str) -> Vec<(String, bool)> {
    let tables = manifest.get(kind).and_then(toml::Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let target = |table: &toml::Value| {
        let name = table.get("name").and_then(toml::Value::as_str).expect("a name").to_owned();
        (name, table.get("harness").and_then(toml::Value::as_bool).unwrap_or(true))
    };
    tables.iter().map(target).collect()
}

#[test]
fn every_test_and_bench_is_listed_with_the_right_harness() {
    let manifest = manifest();
    for (folder, kind, switch) in [("tests/", "test", "autotests"), ("benches/", "bench", "autobenches")] {
        let package = manifest["package"].as_table().expect("a table");
        assert_eq!(package.get(switch).and_then(toml::Value::as_bool), Some(false), "{switch} must be off");
        let listed = targets(&manifest, kind);
        let names = listed.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>();
        let stem = |file: String| {
            let stem = file.strip_prefix(folder)?.strip_suffix(".rs")?.to_owned();
            (!stem.contains('/')).then_some(stem)
        };
        let found = files::rust().into_iter().filter_map(stem).collect::<BTreeSet<_>>();
        assert_eq!(names, found, "[[{kind}]] of Cargo.toml (left) against {folder} (right)");
        for (name, harness) in listed {
            let code = source::code(&files::text(&format!("{folder}{name}.rs")).expect("text"));
            // With libtest's harness a file's own main is dead and "0 tests" pass.
            assert_eq!(harness, !code.contains("\nfn main("), "{folder}{name}.rs: harness");
        }
    }
}

#[test]
fn the_packages_of_the_card_are_dependencies_and_used() {
    let manifest = manifest();
    let sections = ["dependencies", "dev-dependencies"];
    let code = files::rust()
        .into_iter()
        .filter(|file| !file.starts_with("xrt-sys/"))
        .map(|file| source::code(&files::text(&file).unwrap_or_default()))
        .collect::<Vec<_>>();
    for package in CARD {
        let direct = sections.iter().any(|section| manifest[*section].get(package).is_some());
        assert!(direct, "{package} is not a direct dependency");
        let name = package.replace('-', "_");
        let used = code.iter().any(|code| source::uses_crate(code, &name));
        assert!(used, "{package} is used nowhere");
    }
}
