//! Damaged and odd checkpoints, made on the fly: each loads, or one line says what is wrong.

use std::borrow::Cow;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use rstest::rstest;
use safetensors::View;
use serde_json::json;
use tempfile::TempDir;

use super::super::safetensors_file::parse;
use super::*;
use crate::model::ModelConfig;

#[derive(Clone)]
struct Made {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl View for Made {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

type Tensors = BTreeMap<String, Made>;

fn made(dtype: Dtype, shape: &[usize], seed: u8) -> Made {
    let n: usize = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Made {
        dtype,
        shape: shape.into(),
        data: (0..n).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed) & 0x3f).collect(),
    }
}

fn config(tied: bool) -> ModelConfig {
    let json = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "tie_word_embeddings": tied,
        "bos_token_id": 0, "eos_token_id": 0});
    ModelConfig::from_json(Path::new("config.json"), &json).expect("a config in scope").0
}

/// Every tensor that the config implies, bf16.
fn sound(tied: bool) -> Tensors {
    let specs = config(tied).tensors().into_iter().enumerate();
    specs.map(|(i, s)| (s.name, made(Dtype::BF16, &s.shape, i as u8))).collect()
}

fn write(dir: &Path, file: &str, tensors: &Tensors) {
    safetensors::serialize_to_file(tensors.clone(), None, &dir.join(file)).expect("written");
}

fn single(tensors: &Tensors) -> TempDir {
    let dir = TempDir::new().expect("a folder");
    write(dir.path(), "model.safetensors", tensors);
    dir
}

fn open_and_account(dir: &Path, tied: bool) -> Result<Accounting> {
    Checkpoint::open(dir)?.account(&config(tied))
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const Q1: &str = "model.layers.1.self_attn.q_proj.weight";

fn renamed(tensors: Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.into_iter().map(|(n, t)| (rename(&n), t)).collect()
}

#[rstest]
#[case(|n: &str| n.to_owned(), Prefix::Model)]
#[case(|n: &str| n.strip_prefix("model.").unwrap_or(n).to_owned(), Prefix::None)]
#[case(|n: &str| format!("language_model.{n}"), Prefix::LanguageModel)]
#[case(|n: &str| n.replace("model.", "model.language_model."), Prefix::ModelLanguageModel)]
fn prefixes_are_detected(#[case] rename: fn(&str) -> String, #[case] prefix: Prefix) {
    let dir = single(&renamed(sound(false), rename));
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!(checkpoint.account(&config(false)).expect("accounted").prefix, prefix);
    assert_eq!(checkpoint.shape(Q1), Some(&[8, 8][..]));
    assert_eq!(checkpoint.bf16("lm_head.weight").expect("a head").len(), 128);
}

/// Sound odd ones: they load.
#[rstest]
#[case::tied(true, |_: &mut Tensors| ())]
#[case::untied(false, |_: &mut Tensors| ())]
#[case::f16(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::F16, &[8, 8], 3)); })]
#[case::f32(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::F32, &[8, 8], 3)); })]
#[case::inv_freq(false, |t: &mut Tensors| { t.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), made(Dtype::F32, &[2], 0)); })]
#[case::tied_and_equal(true, |t: &mut Tensors| { let e = t[EMBEDDING].clone(); t.insert("lm_head.weight".into(), e); })]
fn odd_but_sound(#[case] tied: bool, #[case] change: fn(&mut Tensors)) {
    let mut tensors = sound(tied);
    change(&mut tensors);
    let accounting = open_and_account(single(&tensors).path(), tied).expect("loads");
    assert_eq!(accounting.tensors.len(), config(tied).tensors().len());
    assert_eq!(accounting.extras.len(), tensors.len() - accounting.tensors.len());
}

/// Unsound tensors in a sound file.
#[rstest]
#[case::missing(false, |t: &mut Tensors| { t.remove(Q1); }, "tensor model.layers.1.self_attn.q_proj.weight: found nothing, expected shape [8, 8]")]
#[case::missing_head(false, |t: &mut Tensors| { t.remove("lm_head.weight"); }, "tensor lm_head.weight: found nothing, expected shape [16, 8], as tie_word_embeddings is false")]
#[case::transposed(false, |t: &mut Tensors| { t.insert("model.layers.0.mlp.up_proj.weight".into(), made(Dtype::BF16, &[8, 12], 0)); }, "found shape [8, 12], expected [12, 8] (intermediate_size, hidden_size)")]
#[case::zero_size(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::BF16, &[0, 8], 0)); }, "found shape [0, 8], expected [8, 8]")]
#[case::scalar(false, |t: &mut Tensors| { t.insert("model.norm.weight".into(), made(Dtype::BF16, &[], 0)); }, "found shape [], expected [8]")]
#[case::padded_vocab(false, |t: &mut Tensors| { t.insert(EMBEDDING.into(), made(Dtype::BF16, &[24, 8], 0)); }, "found shape [24, 8], expected [16, 8] (vocab_size, hidden_size)")]
#[case::f64(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::F64, &[8, 8], 0)); }, "found F64, expected BF16, F16 or F32")]
#[case::i32(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::I32, &[8, 8], 0)); }, "found I32")]
#[case::fp8(false, |t: &mut Tensors| { t.insert(Q1.into(), made(Dtype::F8_E4M3, &[8, 8], 0)); }, "of dtype F8_E4M3: quantised checkpoints are out of scope")]
#[case::fp8_scale(false, |t: &mut Tensors| { t.insert("model.layers.0.mlp.up_proj.weight_scale_inv".into(), made(Dtype::F32, &[1], 0)); }, "quantised checkpoints are out of scope")]
#[case::gptq(false, |t: &mut Tensors| { t.insert("model.layers.0.mlp.up_proj.qweight".into(), made(Dtype::I32, &[1, 12], 0)); }, "quantised checkpoints are out of scope")]
#[case::left_over(false, |t: &mut Tensors| { t.insert("model.layers.0.self_attn.q_proj.bias".into(), made(Dtype::BF16, &[8], 0)); }, "tensor model.layers.0.self_attn.q_proj.bias: found BF16 [8], expected no such tensor")]
#[case::third_layer(false, |t: &mut Tensors| { t.insert("model.layers.2.input_layernorm.weight".into(), made(Dtype::BF16, &[8], 0)); }, "expected no such tensor")]
#[case::vision(false, |t: &mut Tensors| { t.insert("vision_tower.patch.weight".into(), made(Dtype::BF16, &[8], 0)); }, "tensor vision_tower.patch.weight")]
#[case::tied_but_differs(true, |t: &mut Tensors| { t.insert("lm_head.weight".into(), made(Dtype::BF16, &[16, 8], 99)); }, "expected the embedding, as tie_word_embeddings is true")]
#[case::two_embeddings(false, |t: &mut Tensors| { let e = t[EMBEDDING].clone(); t.insert("embed_tokens.weight".into(), e); }, "found model.embed_tokens.weight and embed_tokens.weight")]
#[case::no_embedding(false, |t: &mut Tensors| { t.remove(EMBEDDING); }, "tensors without one, such as lm_head.weight")]
#[case::no_tensors(false, |t: &mut Tensors| t.clear(), "no tensors at all")]
fn unsound_tensors(#[case] tied: bool, #[case] change: fn(&mut Tensors), #[case] expected: &str) {
    let mut tensors = sound(tied);
    change(&mut tensors);
    let error = open_and_account(single(&tensors).path(), tied).expect_err("unsound").to_string();
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
}

fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Files that are not what their name says.
#[rstest]
#[case::empty(vec![], "an empty file")]
#[case::short(vec![1, 2, 3], "3 bytes, expected at least the 8")]
#[case::huge_prefix(vec![0xff; 64], "header length: found 18446744073709551615, expected at most the 56 bytes")]
#[case::long_prefix([&1000u64.to_le_bytes()[..], b"{}"].concat(), "header length: found 1000, expected at most the 2")]
#[case::html(b"<!DOCTYPE html><html><body>Not found</body></html>".to_vec(), "an HTML or XML page, expected safetensors")]
#[case::lfs(b"version https://git-lfs.github.com/spec/v1\noid sha256:00".to_vec(), "a git-lfs pointer")]
#[case::pickle(b"PK\x03\x04zipped pickle".to_vec(), "a zip archive")]
#[case::gguf(b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0".to_vec(), "a GGUF file")]
#[case::not_json(with_header("hello", 0), "not the JSON of safetensors")]
#[case::not_utf8([&2u64.to_le_bytes()[..], &[0xc3, 0x28]].concat(), "not UTF-8")]
#[case::truncated(
    with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#, 4),
    "do not end where the file does"
)]
#[case::trailing(with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#, 9), "trailing bytes")]
#[case::beyond(
    with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[1000000,1000008]}}"#, 8),
    "tensor a: data_offsets"
)]
#[case::overlap(with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[4,12]}}"#, 12), "tensor b: data_offsets overlap")]
#[case::backwards(with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[8,0]}}"#, 8), "data_offsets")]
#[case::wrong_size(
    with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,16]}}"#, 16),
    "tensor b: data_offsets do not span shape times dtype"
)]
#[case::overflow(
    with_header(r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[4611686018427387904,16],"data_offsets":[8,16]}}"#, 16),
    "tensor b: shape overflows"
)]
#[case::unknown_dtype(
    with_header(r#"{"a":{"dtype":"Q4","shape":[4],"data_offsets":[0,8]}}"#, 8),
    "not the JSON of safetensors"
)]
fn foreign_and_damaged_files(#[case] bytes: Vec<u8>, #[case] expected: &str) {
    let dir = TempDir::new().expect("a folder");
    fs::write(dir.path().join("model.safetensors"), &bytes).expect("written");
    let error = Checkpoint::open(dir.path()).expect_err("damaged").to_string();
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
    assert!(error.contains("model.safetensors"), "{error}");
}

/// Two shards, even names in one and odd in the other, with an index.
fn sharded() -> (TempDir, serde_json::Value) {
    let dir = TempDir::new().expect("a folder");
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut map = serde_json::Map::new();
    for (i, (name, tensor)) in sound(false).into_iter().enumerate() {
        map.insert(name.clone(), json!(format!("model-0000{}-of-00002.safetensors", i % 2 + 1)));
        shards[i % 2].insert(name, tensor);
    }
    for (i, shard) in shards.iter().enumerate() {
        write(dir.path(), &format!("model-0000{}-of-00002.safetensors", i + 1), shard);
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    index_of(dir.path(), &index);
    (dir, index)
}

fn index_of(dir: &Path, index: &serde_json::Value) {
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("written");
}

fn error_of(dir: &Path) -> String {
    open_and_account(dir, false).expect_err("damaged").to_string()
}

const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn shards_are_one_checkpoint() {
    let (dir, _) = sharded();
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!(checkpoint.files().count(), 2);
    assert!(checkpoint.account(&config(false)).is_ok());
    assert_eq!(checkpoint.tensor_names().count(), config(false).tensors().len());
    let hashes = checkpoint.tensor_hashes_uncached().expect("hashed");
    assert_eq!(hashes[EMBEDDING], hashes::sha256(checkpoint.bytes(EMBEDDING).expect("bytes")));
}

#[test]
fn a_missing_shard_is_named_before_any_is_read() {
    let (dir, _) = sharded();
    fs::remove_file(dir.path().join(SECOND)).expect("removed");
    fs::write(dir.path().join("model-00001-of-00002.safetensors"), "damaged").expect("written");
    let error = error_of(dir.path());
    assert!(error.contains(&format!("shard {SECOND} is missing (1 of 2 shards are)")), "{error}");
}

#[test]
fn an_index_entry_that_its_shard_does_not_hold() {
    let (dir, mut index) = sharded();
    index["weight_map"]["model.extra.weight"] = json!(SECOND);
    index_of(dir.path(), &index);
    assert!(error_of(dir.path()).contains(&format!("model.extra.weight: not in shard {SECOND}")));
}

#[rstest]
#[case(json!({"weight_map": {"a": "../../etc/passwd"}}), "expected the name of a file beside the index")]
#[case(json!({"weight_map": {"a": 3}}), "expected the name of a file")]
#[case(json!({"weight_map": {}}), "found no weight_map")]
#[case(json!({}), "found no weight_map")]
#[case(json!([]), "found no weight_map")]
fn unsound_indexes(#[case] index: serde_json::Value, #[case] expected: &str) {
    let (dir, _) = sharded();
    index_of(dir.path(), &index);
    assert!(error_of(dir.path()).contains(expected), "{}", error_of(dir.path()));
}

#[test]
fn an_html_index() {
    let (dir, _) = sharded();
    fs::write(dir.path().join("model.safetensors.index.json"), "<html>404</html>").expect("written");
    assert!(error_of(dir.path()).contains("an HTML or XML page, expected JSON"));
}

#[test]
fn a_tensor_in_two_files() {
    let (dir, _) = sharded();
    let second = SafetensorsFile::open(&dir.path().join(SECOND)).expect("opens");
    let first = dir.path().join("model-00001-of-00002.safetensors");
    let (name, t) = second.tensors().iter().next().expect("a tensor");
    let twin = Made { dtype: t.dtype, shape: t.shape.clone(), data: second.bytes(name).expect("bytes").to_vec() };
    let mut tensors = Tensors::new();
    for (n, t) in SafetensorsFile::open(&first).expect("opens").tensors() {
        let all = SafetensorsFile::open(&first).expect("opens");
        tensors.insert(
            n.clone(),
            Made { dtype: t.dtype, shape: t.shape.clone(), data: all.bytes(n).expect("bytes").to_vec() },
        );
    }
    tensors.insert(name.clone(), twin.clone());
    write(dir.path(), "model-00001-of-00002.safetensors", &tensors);
    let accounting = open_and_account(dir.path(), false).expect("the same twice");
    assert_eq!(accounting.duplicates, std::slice::from_ref(name));

    tensors.get_mut(name).expect("the twin").data[0] ^= 1;
    write(dir.path(), "model-00001-of-00002.safetensors", &tensors);
    let error = error_of(dir.path());
    assert!(error.contains(&format!("tensor {name}: found other contents, expected the same as in")), "{error}");
}

#[rstest]
#[case("pytorch_model.bin", "refused: pytorch_model.bin: only safetensors are read")]
#[case("model.Q4_K.gguf", "refused: model.Q4_K.gguf")]
#[case("readme.md", "found neither model.safetensors nor model.safetensors.index.json")]
fn folders_without_safetensors(#[case] file: &str, #[case] expected: &str) {
    let dir = TempDir::new().expect("a folder");
    fs::write(dir.path().join(file), "x").expect("written");
    assert!(error_of(dir.path()).contains(expected), "{}", error_of(dir.path()));
}

#[rstest]
#[case("adapter_config.json", "a LoRA or other adapter")]
#[case("quantize_config.json", "quantised checkpoints")]
fn files_that_change_the_model(#[case] file: &str, #[case] expected: &str) {
    let dir = single(&sound(false));
    fs::write(dir.path().join(file), "{}").expect("written");
    assert!(error_of(dir.path()).contains(expected), "{}", error_of(dir.path()));
}

#[test]
fn no_folder() {
    assert!(error_of(&PathBuf::from("/nowhere/at/all")).contains("not a directory"));
}

fn f32_tensor(values: &[f32]) -> Made {
    let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    Made { dtype: Dtype::F32, shape: vec![values.len()], data }
}

#[test]
fn conversion_rounds_to_nearest_even_and_reports_overflow() {
    let mut tensors = sound(false);
    tensors.insert(
        "model.norm.weight".into(),
        f32_tensor(&[1.0 + 1.0 / 256.0, -0.0, f32::INFINITY, 3.0, 0.1, 1e-40, 5.0, 6.0]),
    );
    let dir = single(&tensors);
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    let norm = checkpoint.bf16("model.norm.weight").expect("converts");
    assert_eq!(norm[0], bf16::ONE);
    assert!(norm[1].is_sign_negative());
    assert_eq!(checkpoint.nonfinite("model.norm.weight").expect("counts"), 1);

    tensors.insert("model.norm.weight".into(), f32_tensor(&[0.0, f32::MAX, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    let dir = single(&tensors);
    let error =
        Checkpoint::open(dir.path()).expect("opens").bf16("model.norm.weight").expect_err("overflows").to_string();
    assert!(error.contains("at element 1, expected a value within bf16's range"), "{error}");
}

#[test]
fn bf16_is_not_copied() {
    let dir = single(&sound(false));
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    assert!(matches!(checkpoint.bf16(EMBEDDING), Ok(Cow::Borrowed(_))));
}

#[test]
fn hashes_are_cached_by_state() {
    let dir = single(&sound(false));
    let cache = TempDir::new().expect("a folder");
    let file = SafetensorsFile::open(&dir.path().join("model.safetensors")).expect("opens");
    let first = hashes::of_tensors_cached(&file, cache.path(), 2).expect("hashed");
    assert_eq!(first, hashes::of_tensors(&file, 1));
    let entry = fs::read_dir(cache.path()).expect("a folder").next().expect("an entry").expect("readable").path();
    // A cached value is believed; a damaged entry is computed anew.
    let text = fs::read_to_string(&entry).expect("readable").replace(&first[EMBEDDING], &"0".repeat(64));
    fs::write(&entry, text).expect("written");
    assert_eq!(hashes::of_tensors_cached(&file, cache.path(), 2).expect("cached")[EMBEDDING], "0".repeat(64));
    fs::write(&entry, "{").expect("written");
    assert_eq!(hashes::of_tensors_cached(&file, cache.path(), 2).expect("hashed"), first);
}

proptest! {
    /// Whatever the bytes, no panic; and no header is believed that names more bytes than there are.
    #[test]
    fn any_header(header in "[ -~]{0,80}", data in prop::collection::vec(any::<u8>(), 0..64), lie in any::<Option<u64>>()) {
        let mut bytes = lie.unwrap_or(header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&data);
        let _ = parse(Path::new("x"), &bytes);
    }

    #[test]
    fn any_offsets(begin in any::<u64>(), end in any::<u64>(), shape in prop::collection::vec(any::<u64>(), 0..4), data in 0usize..64) {
        let header = json!({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}}).to_string();
        if let Ok((tensors, _)) = parse(Path::new("x"), &with_header(&header, data)) {
            prop_assert!(tensors.values().all(|t| t.bytes() <= data));
        }
    }

    #[test]
    fn any_byte_flipped(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let dir = single(&sound(false));
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(&path).expect("readable");
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        fs::write(&path, bytes).expect("written");
        let _ = open_and_account(dir.path(), false);
    }
}

/// Resident KiB of the pages that this process maps from `path`.
#[cfg(target_os = "linux")]
fn resident_kib(path: &std::path::Path) -> u64 {
    let (maps, path) = (fs::read_to_string("/proc/self/smaps").unwrap(), path.display().to_string());
    let mut inside = false;
    let mut total = 0;
    for line in maps.lines() {
        if line.split_whitespace().next().is_some_and(|word| word.contains('-')) {
            inside = line.ends_with(&path);
        } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
            total += rest.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap();
        }
    }
    total
}

#[cfg(target_os = "linux")]
#[test]
fn released_pages_go_and_come_back_with_the_same_bytes() {
    const NAME: &str = "model.embed_tokens.weight";
    let tensors: Tensors = [(NAME.to_owned(), made(Dtype::BF16, &[1024, 4096], 3))].into();
    let dir = single(&tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = dir.path().join("model.safetensors");
    let sum = || checkpoint.bytes(NAME).unwrap().iter().map(|&b| u64::from(b)).sum::<u64>();
    let before = sum();
    let read = resident_kib(&file);
    Weights::release(&checkpoint, NAME);
    let released = resident_kib(&file);
    assert!(read >= 8 << 10 && released < 1 << 10, "{read} KiB, then {released} KiB");
    assert_eq!(sum(), before);
    Weights::release(&checkpoint, "nothing of this name");
}

/// Whatever they are stored as, and without mapping anything.
#[rstest]
fn rows_are_those_of_the_whole_matrix(#[values(Dtype::BF16, Dtype::F16, Dtype::F32)] dtype: Dtype) {
    const NAME: &str = "model.embed_tokens.weight";
    let tensors: Tensors = [(NAME.to_owned(), made(dtype, &[300, 77], 3))].into();
    let dir = single(&tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let whole = checkpoint.bf16(NAME).unwrap().into_owned();
    Weights::release(&checkpoint, NAME);
    let wanted = [299, 0, 7, 7];
    let rows = Weights::bf16_rows(&checkpoint, NAME, 77, &wanted).unwrap();
    #[cfg(target_os = "linux")]
    assert!(resident_kib(&dir.path().join("model.safetensors")) <= 8);
    let expected: Vec<_> = wanted.iter().flat_map(|row| whole[row * 77..(row + 1) * 77].to_vec()).collect();
    let bits = |x: &[half::bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&rows), bits(&expected));
    struct Held(Vec<half::bf16>);
    impl Weights for Held {
        fn bf16(&self, _: &str) -> crate::error::Result<std::borrow::Cow<'_, [half::bf16]>> {
            Ok((&self.0).into())
        }
    }
    let held = Held(whole);
    assert_eq!(bits(&held.bf16_rows(NAME, 77, &wanted).unwrap()), bits(&expected));
    for weights in [&checkpoint as &dyn Weights, &held] {
        let error = weights.bf16_rows(NAME, 77, &[0, 300]).unwrap_err().to_string();
        assert!(error.contains("expected a row 300 of 77"), "{error}");
    }
}

/// A read maps pages around it, those of a neighbour that was given back among them.
#[cfg(target_os = "linux")]
#[test]
fn tensors_read_and_released_one_after_the_other_leave_nothing_mapped() {
    let name = |i: usize| format!("model.layers.{i}.mlp.down_proj.weight");
    // Sizes that are no whole pages, in a file that lies in the system's cache in large pieces.
    let mut tensors: Tensors = (0..64).map(|i| (name(i), made(Dtype::BF16, &[96 + i, 577], i as u8))).collect();
    tensors.insert("model.embed_tokens.weight".to_owned(), made(Dtype::BF16, &[8, 577], 1));
    let dir = single(&tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = dir.path().join("model.safetensors");
    for i in (0..64).rev() {
        assert!(checkpoint.bytes(&name(i)).unwrap().iter().any(|&b| b != 0));
        Weights::release(&checkpoint, &name(i));
    }
    let left = resident_kib(&file);
    assert!(left <= 64, "{left} KiB of {} are mapped", file.metadata().unwrap().len() >> 10);
}
