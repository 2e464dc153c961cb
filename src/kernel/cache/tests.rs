//! Kernel caches of every kind, good and damaged.

use super::*;
use crate::kernel::Kernel;

fn contract(rows: usize) -> Contract {
    Contract::of(&[(Kernel::Add { rows, cols: 64 }, vec![0, 1, 2])]).unwrap().0
}

/// A folder with an ELF per number of rows.
fn folder(rows: &[usize]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for &rows in rows {
        put(dir.path(), rows, format!("elf {rows}").as_bytes());
    }
    dir
}

fn put(dir: &Path, rows: usize, content: &[u8]) -> PathBuf {
    let contract = contract(rows);
    let elf = dir.join(format!("{}.elf", contract.stem()));
    let table = ShapeTable { kernel: "add".into(), contract, toolchain: BTreeMap::new(), flags: vec![] };
    fs::write(elf.with_extension("json"), serde_json::to_vec(&table).unwrap()).unwrap();
    fs::write(&elf, content).unwrap();
    elf
}

#[test]
fn a_sealed_folder_gives_what_was_sealed() {
    let dir = folder(&[2, 3]);
    assert_eq!(seal(dir.path()).unwrap().entries.len(), 2);
    let cache = KernelCache::open(dir.path(), true).unwrap();
    let elf = cache.elf(&contract(3)).unwrap();
    assert_eq!((elf.bytes.as_slice(), elf.kernel.as_str(), elf.sealed), (&b"elf 3"[..], "add", true));
    assert!(cache.warnings().is_empty() && cache.identity().is_some());
    let message = cache.elf(&contract(4)).unwrap_err().to_string();
    assert!(message.contains("ELF of add::r0004_c0064") && message.contains("but add::r0002_c0064"), "{message}");
}

/// What is done to a sealed folder, and the refusal that it must meet under `PHASEGATE_REQUIRE=sealed`.
#[rstest::rstest]
#[case::changed("changed ELF", |dir: &Path, elf: &Path| { let _ = dir; fs::write(elf, "other").unwrap() })]
#[case::missing("missing ELF", |_: &Path, elf: &Path| fs::remove_file(elf).unwrap())]
#[case::unsealed("unsealed ELF", |dir: &Path, _: &Path| { put(dir, 9, b"elf 9"); })]
#[case::no_seal("unsealed ELF", |dir: &Path, _: &Path| fs::remove_file(dir.join(SEAL)).unwrap())]
fn a_damaged_folder_is_refused_by_name(#[case] what: &str, #[case] damage: fn(&Path, &Path)) {
    let dir = folder(&[2, 3]);
    seal(dir.path()).unwrap();
    let elf = dir.path().join(format!("{}.elf", contract(2).stem()));
    damage(dir.path(), &elf);
    let message = KernelCache::open(dir.path(), true).unwrap_err().to_string();
    assert!(message.contains(&format!(".elf: refused: {what}")), "{message}");
}

#[test]
fn a_changed_elf_is_refused_even_where_no_seal_is_required() {
    let dir = folder(&[2]);
    seal(dir.path()).unwrap();
    put(dir.path(), 2, b"other");
    let cache = KernelCache::open(dir.path(), false).unwrap();
    assert!(matches!(cache.elf(&contract(2)), Err(Error::Refused { what, .. }) if what == "changed ELF"));
}

#[test]
fn one_content_for_two_shapes_is_no_seal() {
    let dir = folder(&[2]);
    put(dir.path(), 3, b"elf 2");
    let message = seal(dir.path()).unwrap_err().to_string();
    assert!(message.contains("duplicated ELF") && message.contains("add::r0002_c0064"), "{message}");
    assert!(!dir.path().join(SEAL).exists());
}

#[test]
fn a_seal_that_was_edited_is_no_seal() {
    let dir = folder(&[2]);
    seal(dir.path()).unwrap();
    let path = dir.path().join(SEAL);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"rows\": 2", "\"rows\": 4", 1)).unwrap();
    assert!(KernelCache::open(dir.path(), false).unwrap_err().to_string().contains("changed contract"));
    fs::write(&path, "{").unwrap();
    assert!(matches!(KernelCache::open(dir.path(), false), Err(Error::Malformed { .. })));
}

#[test]
fn an_elf_that_nothing_describes_cannot_be_sealed() {
    let dir = folder(&[2]);
    fs::write(dir.path().join("main.elf"), "elf").unwrap();
    let message = seal(dir.path()).unwrap_err().to_string();
    assert!(message.contains("main.elf") && message.contains("no shape table main.json"), "{message}");
}

/// Upstream's folder as its KernelCache leaves it: used by the dispatch's id, with a warning.
#[test]
fn upstreams_manifest_is_used_with_a_warning_and_refused_when_sealed_is_required() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = r#"{"_toolchain": {"llvm-aie": "?", "peano_clang": "unset"},
        "entries": {"add": {"output_binary": "/elsewhere/add.elf", "kernel": "main:add", "insts": null}}}"#;
    fs::write(dir.path().join(UPSTREAM), manifest).unwrap();
    fs::write(dir.path().join("add.elf"), "elf").unwrap();
    let cache = KernelCache::open(dir.path(), false).unwrap();
    let elf = cache.elf(&contract(2)).unwrap();
    assert_eq!((elf.kernel.as_str(), elf.sealed, elf.path), ("main:add", false, dir.path().join("add.elf")));
    assert!(cache.warnings()[0].contains("upstream's manifest proves nothing"));
    let message = KernelCache::open(dir.path(), true).unwrap_err().to_string();
    assert!(message.contains("add.elf: refused: unsealed ELF"), "{message}");
}

#[test]
fn an_empty_or_absent_folder_is_not_available() {
    let dir = tempfile::tempdir().unwrap();
    for dir in [dir.path(), &dir.path().join("nothing")] {
        assert!(matches!(KernelCache::open(dir, false), Err(Error::Unavailable { .. })));
    }
}
