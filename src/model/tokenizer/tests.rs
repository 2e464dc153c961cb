//! Tokenizers: ids, text streams, special tokens, stop ids.

use std::path::Path;

use rstest::rstest;
use serde_json::json;
use tempfile::TempDir;

use super::*;

/// Three words and a special token, with side files as given.
fn made(tokenizer_config: Option<Value>, generation: Option<Value>) -> TempDir {
    let dir = TempDir::new().expect("a folder");
    let tokenizer = json!({"version": "1.0", "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": [{"id": 3, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "</s>": 3}, "unk_token": "a"}});
    let write = |file: &str, v: Value| std::fs::write(dir.path().join(file), v.to_string()).expect("written");
    write("tokenizer.json", tokenizer);
    if let Some(v) = tokenizer_config {
        write("tokenizer_config.json", v);
    }
    if let Some(v) = generation {
        write("generation_config.json", v);
    }
    dir
}

fn config(eos: Value) -> ModelConfig {
    let json = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "bos_token_id": null, "eos_token_id": eos});
    ModelConfig::from_json(Path::new("c"), &json).expect("in scope").0
}

#[rstest]
#[case(json!(null), None, None, &[])]
#[case(json!(1), None, None, &[1])]
#[case(json!([2, 1]), None, Some(json!({})), &[1, 2])]
#[case(json!(1), None, Some(json!({"eos_token_id": 5})), &[1, 5])]
#[case(json!(1), None, Some(json!({"eos_token_id": [5, 6, 1]})), &[1, 5, 6])]
#[case(json!(1), Some(json!({"eos_token": "</s>"})), Some(json!({"eos_token_id": null})), &[1, 3])]
#[case(json!(1), Some(json!({"eos_token": {"content": "</s>"}})), None, &[1, 3])]
#[case(json!(1), Some(json!({"eos_token": null})), None, &[1])]
fn stop_ids_are_a_union(
    #[case] eos: Value,
    #[case] own: Option<Value>,
    #[case] generation: Option<Value>,
    #[case] expected: &[u32],
) {
    let dir = made(own, generation);
    let tokenizer = Tokenizer::open(dir.path()).expect("opens");
    assert_eq!(tokenizer.stop_ids(dir.path(), &config(eos)).expect("ids"), expected);
}

#[test]
fn a_file_does_not_truncate_prompts() {
    let dir = made(None, None);
    let tokenizer = Tokenizer::open(dir.path()).expect("opens");
    assert_eq!(tokenizer.encode("a b c", true).expect("encodes"), [0, 1, 2]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.unnamed_ids(6)), (4, vec![4, 5]));
}

#[test]
fn says_what_is_wrong() {
    let error = |dir: &Path| Tokenizer::open(dir).expect_err("no tokenizer").to_string();
    let dir = made(Some(json!({"eos_token": 3})), None);
    assert!(error(dir.path()).contains("eos_token: found 3, expected a string or an object with content"));
    std::fs::write(dir.path().join("tokenizer.json"), "{}").expect("written");
    assert!(error(dir.path()).contains("not a tokenizer"));
    std::fs::write(dir.path().join("tokenizer.json"), "<html>").expect("written");
    assert!(error(dir.path()).contains("an HTML or XML page"));
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("removed");
    std::fs::write(dir.path().join("tokenizer.model"), "x").expect("written");
    assert!(error(dir.path()).contains("refused: tokenizer.model: only tokenizer.json is read"));
    let dir = made(None, Some(json!({"eos_token_id": "</s>"})));
    let tokenizer = Tokenizer::open(dir.path()).expect("opens");
    assert!(tokenizer.stop_ids(dir.path(), &config(json!(1))).is_err());
}
