//! The embedded fixtures against what HF said of them, from their captures: config, tensors, RoPE, tokens, stop ids.

use std::path::{Path, PathBuf};

use rstest::rstest;
use serde_json::Value;

use super::chat_template::ChatTemplate;
use super::safetensors_file::SafetensorsFile;
use super::*;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

struct Case {
    located: Located,
    config: ModelConfig,
    coverage: Coverage,
    checkpoint: Checkpoint,
    capture: SafetensorsFile,
}

impl Case {
    /// None where the model is not here.
    fn open(name: &str) -> Option<Case> {
        let located = locate::locate_in(&root(), name, None).ok()?;
        let capture = SafetensorsFile::open(located.reference.as_ref()?).expect("a sound capture");
        let (config, coverage) = ModelConfig::from_file(&located.checkpoint_dir).expect("in scope");
        let checkpoint = Checkpoint::open(&located.checkpoint_dir).expect("opens");
        Some(Case { located, config, coverage, checkpoint, capture })
    }

    fn said(&self, key: &str) -> Value {
        serde_json::from_str(&self.capture.metadata()[key]).expect("JSON")
    }

    fn ids(&self, tensor: &str) -> Vec<u32> {
        let bytes = self.capture.bytes(tensor).expect("a tensor");
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        let bytes = self.capture.bytes(tensor).expect("a tensor");
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn dir(&self) -> &Path {
        &self.located.checkpoint_dir
    }
}

#[rstest]
#[case("tiny_llama", true)]
#[case("tiny_mistral", true)]
#[case("tiny_qwen2", true)]
#[case("tiny_qwen3", true)]
#[case("smollm2_135m", false)]
fn as_hf_says(#[case] name: &str, #[case] embedded: bool) {
    let Some(case) = Case::open(name) else {
        assert!(!embedded, "{name} is embedded and has to be here");
        return;
    };
    config_and_tensors(&case);
    rope(&case);
    tokens(&case);
}

fn config_and_tensors(case: &Case) {
    assert_eq!(case.config.resolved_differences(&case.said("resolved_config")), []);
    assert!(case.coverage.complete(), "{:?}", case.coverage.unknown);
    let accounting = case.checkpoint.account(&case.config).expect("accounted");
    assert_eq!(accounting.extras, []);
    let hashes = case.checkpoint.tensor_hashes_uncached().expect("hashed");
    assert_eq!(serde_json::json!(hashes), case.said("weights_sha256"));
    let files = case.checkpoint.side_file_hashes().expect("hashed");
    assert_eq!(serde_json::json!(files), case.said("files_sha256"));
}

fn rope(case: &Case) {
    let positions: Vec<usize> = case.ids("rope.positions").into_iter().map(|p| p as usize).collect();
    for p in [0, 1, 64, 511, 512, 2047] {
        assert!(positions.contains(&p), "position {p}");
    }
    let (cos, sin) = RopeTable::new(&case.config).rows(&positions, 2048);
    let half = case.config.head_dim / 2;
    for (ours, theirs) in [(cos, case.floats("rope.cos")), (sin, case.floats("rope.sin"))] {
        for ((row, col), x) in ours.indexed_iter() {
            for at in [col, col + half] {
                let hf = theirs[row * 2 * half + at];
                assert!((x - hf).abs() <= 1e-6, "position {}, channel {at}: found {x}, HF has {hf}", positions[row]);
            }
        }
    }
}

fn tokens(case: &Case) {
    let tokenizer = Tokenizer::open(case.dir()).expect("a tokenizer");
    let template = ChatTemplate::open(case.dir()).expect("readable");
    let manifest = case.located.manifest.as_ref().expect("a fixture");
    let said = case.said("prompts");
    let said = said.as_array().expect("a list");
    let mut n = 0;
    for &set in &manifest.prompts {
        for prompt in prompts::load(&root(), set, &tokenizer, template.as_ref()).expect("prompts") {
            let hf = said.iter().find(|p| p["id"] == prompt.id.as_str()).expect("the same prompts");
            assert_eq!(hf["text"], prompt.text.as_str(), "{}", prompt.id);
            assert_eq!(hf["rendered"], prompt.rendered.as_str(), "{}", prompt.id);
            assert_eq!(case.ids(&format!("{}.ids", prompt.id)), prompt.ids, "{}", prompt.id);
            let wanted = usize::from(manifest.name == "tiny_llama");
            if prompt.set != PromptSet::Chat || wanted == 1 {
                assert_eq!(tokenizer.leading_bos(&prompt.ids, &case.config), wanted, "{}", prompt.id);
            }
            n += 1;
        }
    }
    assert_eq!(n, said.len());
    let stop = tokenizer.stop_ids(case.dir(), &case.config).expect("stop ids");
    assert_eq!(serde_json::json!(stop), case.said("stop_ids"));
}

/// A config whose RoPE scaling is parsed and never applied differs from HF beyond the band that scaling leaves alone.
#[test]
fn scaling_switched_off_is_seen() {
    let case = Case::open("tiny_llama").expect("embedded");
    let positions = [511];
    let table = RopeTable::new(&case.config);
    let (with, _) = table.rows(&positions, 512);
    let (without, _) = table.unscaled().rows(&positions, 512);
    assert!((&with - &without).iter().any(|d| d.abs() > 0.5));
}

#[test]
fn decoding_streams_whole_characters() {
    let case = Case::open("tiny_llama").expect("embedded");
    let tokenizer = Tokenizer::open(case.dir()).expect("a tokenizer");
    let text = "São Paulo \u{1f600} naïve 123";
    let ids = tokenizer.encode(text, false).expect("encodes");
    let mut stream = tokenizer.stream();
    let mut out = String::new();
    for id in ids {
        let piece = stream.push(id).expect("decodes");
        assert!(!piece.contains('\u{fffd}'));
        out.push_str(&piece);
    }
    out.push_str(&stream.finish().expect("decodes"));
    assert_eq!(out, text);
    assert_eq!(tokenizer.unnamed_ids(1026), [1024, 1025]);
}
