//! A made capture reads back; every damage is refused by name; the embedded fixtures are sound.

use rstest::rstest;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::made::{Made, Written, full_logits, hash, identity};
use super::noise::{Floor, perplexity, prompt_floor};
use super::*;
use crate::check::logits::{AtTruth, Kl};
use crate::check::token_set::TokenSet;
use crate::error::Error;

fn refusal(damage: impl FnOnce(&mut Made)) -> String {
    let mut made = Made::new();
    damage(&mut made);
    let written = made.write();
    let capture = Capture::open(&written.path);
    strip(capture.and_then(|c| c.sound()).expect_err("damaged"), &written)
}

fn strip(error: Error, written: &Written) -> String {
    error
        .to_string()
        .replace(&format!("{}: ", written.path.display()), "")
        .replace("; re-make it with fixtures/hf/capture.py", "")
}

#[test]
fn a_made_capture_reads_back() {
    let written = Made::new().write();
    let capture = Capture::open(&written.path).unwrap();
    capture.sound().unwrap();
    capture.matches(&identity(), |_| unreachable!()).unwrap();
    assert_eq!((capture.model(), capture.prompts().len(), capture.stop_ids()), ("made", 2, &[0][..]));
    assert_eq!((capture.prompts()[1].id.as_str(), capture.prompts()[1].set.as_str()), ("chat_00", "chat"));
    assert_eq!(
        (capture.provenance().attn_implementation.as_str(), capture.lens_prompts()),
        ("sdpa", &["base_00".to_owned()][..])
    );
    assert_eq!(capture.resolved_config()["hidden_size"], 8);

    let prompt = capture.prompt("base_00").unwrap();
    assert_eq!((prompt.ids.as_slice(), prompt.chosen.len()), (&[1, 2, 3, 4, 5][..], STEPS));
    assert_eq!((prompt.bf16.ids.dim(), prompt.rel_l2.dim()), ((32, 20), (32, 2)));

    let lens = capture.lens("base_00").unwrap().expect("a lens prompt");
    assert_eq!((lens.layers_bf16.dim(), lens.k_f32.dim()), ((2, 3, 8), (2, 4, 4)));
    assert_eq!((lens.taps.len(), lens.tap("gate").map(|t| t.f32.dim())), (TAPS.len(), Some((2, 6))));
    assert!(lens.tap("nothing").is_none() && capture.lens("chat_00").unwrap().is_none());
    assert_eq!(lens.layers_f32[[1, 2, 7]], (47f32 + 1.0).cos());

    assert_eq!((capture.rope().unwrap().positions, capture.rope().unwrap().cos.dim()), (vec![0, 1, 15], (3, 4)));
    assert_eq!(capture.nll().unwrap().bf16.to_vec(), [1.0, 2.0, 3.0, 2.0, 2.0]);
}

#[test]
fn an_unknown_prompt_is_named_with_the_known() {
    let written = Made::new().write();
    let error = Capture::open(&written.path).unwrap().prompt("base_99").unwrap_err().to_string();
    assert_eq!(error, "unknown prompt \"base_99\"; known: base_00, chat_00");
}

#[test]
fn the_cost_of_hfs_own_choices_is_that_of_the_worst_and_read_once() {
    let of = |made: &Made| {
        let written = made.write();
        let capture = Capture::open(&written.path).unwrap();
        (capture.regret_floor().unwrap(), capture, written)
    };
    let mut made = Made::new();
    assert_eq!(of(&made).0, 0.0, "rounding keeps the order: HF f32's choice is among bf16's highest");
    // The last step of the last prompt, three bf16 steps lower.
    let tensor = made.tensors.get_mut("chat_00.bf16.at_f32").unwrap();
    let at = (STEPS - 1) * (tensor.bytes.len() / STEPS);
    assert!(tensor.bytes[at] & 0x7f >= 3, "not across a power of two");
    tensor.bytes[at] -= 3;
    let (regret, capture, written) = of(&made);
    assert_eq!(regret, 3.0);
    std::fs::File::options().write(true).open(&written.path).unwrap().set_len(0).unwrap();
    assert!(capture.prompt("base_00").is_err(), "nothing is left to read");
    assert_eq!(capture.regret_floor().unwrap(), 3.0);
}

#[test]
fn the_floor_is_the_judges_own_kl() {
    let written = Made::new().write();
    let capture = Capture::open(&written.path).unwrap();
    let prompt = capture.prompt("base_00").unwrap();
    let logits = full_logits(&prompt.bf16);
    // HF's own bf16 logits, run through the device's path, stand exactly on the floor and pass the token set.
    let device = Kl::measure(&prompt.truth(), &AtTruth::gather(prompt.f32.ids.view(), logits.view()).unwrap()).unwrap();
    let own = prompt_floor(&prompt).unwrap();
    assert!(device.steps.iter().zip(&own.steps).all(|(a, b)| (a - b).abs() < 1e-6), "{device:?}\n{own:?}");
    assert!(TokenSet::compare(&prompt.chosen, prompt.bf16.ids.view(), logits.view()).unwrap().judge().is_pass());

    let floor = Floor::of(&capture).unwrap();
    assert_eq!((floor.kl.summary.count, floor.kl_prefill.summary.count), (64, 64));
    assert!(floor.kl.summary.median > 0.0 && floor.perplexity_bf16 == floor.perplexity_f32);
    assert!((perplexity(&[2.0; 5]) - 2f64.exp()).abs() < 1e-12 && perplexity(&[]).is_nan());
}

#[rstest]
#[case::missing(|m: &mut Made| { m.tensors.remove("chat_00.f32.lse"); }, "tensor chat_00.f32.lse: found nothing, expected the tensor")]
#[case::missing_lens(|m: &mut Made| { m.tensors.remove("base_00.positions"); }, "tensor base_00.positions: found nothing, expected the tensor")]
#[case::missing_tap(|m: &mut Made| { m.tensors.remove("base_00.f32.tap.up"); }, "tensor base_00.f32.tap.up: found nothing, expected the tensor")]
#[case::left_over(|m: &mut Made| m.values("extra", Dtype::F32, &[1], 0.0), "tensor extra: found the tensor, expected none of this name in the schema")]
#[case::dtype(|m: &mut Made| m.values("base_00.bf16.at_f32", Dtype::F32, &[32, 20], 0.0), "tensor base_00.bf16.at_f32: found F32 [32, 20], expected BF16 [32, 20]")]
#[case::steps(|m: &mut Made| m.ints("base_00.chosen", &[1], &[1]), "tensor base_00.chosen: found I32 [1], expected I32 [32]")]
#[case::layers(|m: &mut Made| m.values("base_00.f32.layers", Dtype::F32, &[1, 3, 8], 0.0), "tensor base_00.f32.layers: found F32 [1, 3, 8], expected F32 [2, 3, 8]")]
#[case::length(|m: &mut Made| m.ints("chat_00.ids", &[4], &[1, 2, 3, 4]), "tensor chat_00.ids: found I32 [4], expected I32 [5]")]
#[case::empty(|m: &mut Made| m.ints("nll.ids", &[0], &[]), "tensor nll.ids: found shape [0], expected one dimension, not empty")]
#[case::negative(|m: &mut Made| m.set_int("base_00.ids", 2, -1), "tensor base_00.ids: found -1, expected no negative value")]
#[case::vocabulary(|m: &mut Made| m.set_int("chat_00.f32.top_ids", 9, 20), "tensor chat_00.f32.top_ids: found id 20, expected ids below 20")]
#[case::positions(|m: &mut Made| m.set_int("base_00.positions", 2, 3), "tensor base_00.positions: found [0, 2, 3], expected 0 and 4 among them")]
#[case::order(|m: &mut Made| m.set_int("base_00.kv_positions", 1, 9), "tensor base_00.kv_positions: found [0, 9, 5, 35], expected ascending positions below 36")]
#[case::tap_position(|m: &mut Made| m.set_int("base_00.tap_positions", 1, 3), "tensor base_00.tap_positions: found 3, expected one of the positions")]
#[case::rope_position(|m: &mut Made| m.set_int("rope.positions", 2, 64), "tensor rope.positions: found [0, 1, 64], expected ascending positions below 64")]
fn a_wrong_tensor_is_named(#[case] damage: fn(&mut Made), #[case] message: &str) {
    assert_eq!(refusal(damage), message);
}

fn set(made: &mut Made, key: &str, value: serde_json::Value) {
    made.strings.insert(key.to_owned(), value.to_string());
}

#[rstest]
#[case::no_key(|m: &mut Made| { m.strings.remove("prompts"); }, "metadata: no key \"prompts\"")]
#[case::nothing(|m: &mut Made| m.strings.clear(), "metadata: no key \"schema\"")]
#[case::schema(|m: &mut Made| { m.strings.insert("schema".into(), "phasegate.reference/2".into()); }, "schema \"phasegate.reference/2\", this version reads \"phasegate.reference/1\"")]
#[case::not_json(|m: &mut Made| { m.strings.insert("lens".into(), "[".into()); }, "metadata: lens: EOF while parsing a list at line 1 column 1")]
#[case::no_prompts(|m: &mut Made| set(m, "prompts", json!([])), "prompts: none")]
#[case::no_hashes(|m: &mut Made| set(m, "weights_sha256", json!({})), "metadata: weights_sha256: empty")]
#[case::no_hash(|m: &mut Made| set(m, "files_sha256", json!({"config.json": ""})), "metadata: files_sha256: config.json: \"\" is no sha256")]
#[case::lens(|m: &mut Made| set(m, "lens", json!(["long_00"])), "lens: \"long_00\" is no captured prompt")]
#[case::config(|m: &mut Made| set(m, "resolved_config", json!({"hidden_size": 8})), "resolved_config: num_attention_heads: missing or no positive number")]
#[case::twice(|m: &mut Made| { let p: serde_json::Value = serde_json::from_str(&m.strings["prompts"]).unwrap(); set(m, "prompts", json!([p[0], p[0]])); }, "prompts: \"base_00\" stands twice")]
#[case::set(|m: &mut Made| { let p = m.strings["prompts"].replace("\"chat\"", "\"talk\""); m.strings.insert("prompts".into(), p); }, "prompts: chat_00: unknown set \"talk\"")]
#[case::f32(|m: &mut Made| { let p = m.strings["provenance"].replace("bfloat16", "float32"); m.strings.insert("provenance".into(), p); }, "provenance: dtype \"float32\", expected bfloat16")]
fn wrong_metadata_is_named(#[case] damage: fn(&mut Made), #[case] message: &str) {
    assert_eq!(refusal(damage), format!("capture refused: {message}"));
}

#[rstest]
#[case::nan(|m: &mut Made| m.set_float("base_00.f32.layers", 7, f32::NAN), "tensor base_00.f32.layers: NaN at element 7")]
#[case::infinite(|m: &mut Made| m.set_float("nll.f32", 0, f32::INFINITY), "tensor nll.f32: inf at element 0")]
#[case::lse(|m: &mut Made| m.set_float("chat_00.f32.lse", 3, -9.0), "chat_00: f32: step 3: log-sum-exp -9 below ")]
#[case::chosen(|m: &mut Made| { let id = i32::from(m.tensors["base_00.chosen"].bytes[0] == 0); m.set_int("base_00.chosen", 0, id); }, "base_00: step 0: chosen ")]
#[case::flat(|m: &mut Made| { m.ints("base_00.f32.top_ids", &[32, 20], &(0..640).map(|i| i % 20).collect::<Vec<_>>()); m.floats("base_00.f32.top_logits", Dtype::F32, &[32, 20], &[1.0; 640]); }, "base_00: f32.top_logits: step 0 is flat")]
#[case::order(|m: &mut Made| m.set_float("base_00.f32.top_logits", 19, 99.0), "base_00: f32.top_logits: step 0 does not descend")]
#[case::inconsistent(|m: &mut Made| m.values("base_00.bf16.at_f32", Dtype::BF16, &[32, 20], 0.5), "base_00: step 0: bf16.at_f32 and bf16.top_logits differ for id ")]
#[case::floor(|m: &mut Made| set(m, "noise", json!({"kl_f32_bf16": {"median": 9.0, "p95": 9.5}})), "KL median ")]
fn an_unsound_capture_is_refused(#[case] damage: fn(&mut Made), #[case] message: &str) {
    let found = refusal(damage);
    assert!(found.starts_with(&format!("capture refused: {message}")), "{found}");
}

#[rstest]
#[case::html(|_: Vec<u8>| b"<!DOCTYPE html><html>not found</html>".to_vec(), "not a safetensors file: a header of ")]
#[case::empty(|_: Vec<u8>| Vec::new(), "0 bytes, too short for a safetensors file")]
#[case::short(|b: Vec<u8>| b[..7].to_vec(), "7 bytes, too short")]
#[case::length(|mut b: Vec<u8>| { b[..8].fill(0xff); b }, "not a safetensors file: a header of 18446744073709551615 bytes")]
#[case::truncated(|mut b: Vec<u8>| { b.truncate(b.len() - 1); b }, "truncated or overlong: ")]
#[case::overlong(|mut b: Vec<u8>| { b.push(0); b }, "truncated or overlong: ")]
#[case::cut_header(|b: Vec<u8>| b[..100].to_vec(), "not a safetensors file: a header of ")]
#[case::not_json(|mut b: Vec<u8>| { b[8] = b'['; b }, "damaged header: ")]
#[case::not_utf8(|mut b: Vec<u8>| { b[20] = 0xff; b }, "damaged header: ")]
fn a_damaged_file_is_one_clear_error(#[case] damage: fn(Vec<u8>) -> Vec<u8>, #[case] message: &str) {
    let written = Written::of(&damage(Made::new().bytes()));
    let error = Capture::open(&written.path).unwrap_err();
    assert!(matches!(error, Error::Malformed { .. }), "{error:?}");
    let found = strip(error, &written);
    assert!(found.starts_with(message) && !found.contains('\n'), "{found}");
}

/// A header by hand: one tensor with these offsets and shape, followed by 8 bytes.
#[rstest]
#[case::beyond("[4]", "[0, 16]")]
#[case::overlap("[1]", "[0, 8]")]
#[case::backwards("[1]", "[8, 4]")]
#[case::overflow("[18446744073709551615, 18446744073709551615]", "[0, 8]")]
fn bad_offsets_are_one_clear_error(#[case] shape: &str, #[case] offsets: &str) {
    let json = format!(r#"{{"a":{{"dtype":"I32","shape":{shape},"data_offsets":{offsets}}}}}"#);
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.bytes().chain([0; 8]));
    let error = Capture::open(&Written::of(&bytes).path).unwrap_err();
    assert!(matches!(error, Error::Malformed { .. }), "{error:?}");
}

#[test]
fn a_missing_file_is_an_io_error() {
    let error = Capture::open("fixtures/no_such_model/reference.safetensors").unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("no_such_model"), "{error}");
}

#[rstest]
#[case::weights(|i: &mut Identity| { i.weights_sha256.insert("model.norm.weight".into(), hash("other")); }, "weights model.norm.weight: sha256 ")]
#[case::no_weights(|i: &mut Identity| { i.weights_sha256.remove("model.norm.weight"); }, "weights model.norm.weight: captured, not loaded")]
#[case::more_weights(|i: &mut Identity| { i.weights_sha256.insert("lm_head.weight".into(), hash("x")); }, "weights lm_head.weight: loaded, not captured")]
#[case::config(|i: &mut Identity| { i.files_sha256.insert("config.json".into(), hash("other")); }, "file config.json: sha256 a4a65ec908c5 loaded, a172cc34f6af captured (2 layers captured)")]
#[case::tokenizer(|i: &mut Identity| { i.files_sha256.insert("tokenizer.json".into(), hash("other")); }, "file tokenizer.json: sha256 ")]
#[case::prompts(|i: &mut Identity| { i.prompts_sha256.insert("instruct".into(), hash("other")); }, "prompt file instruct: sha256 ")]
#[case::nothing(|i: &mut Identity| *i = Identity::default(), "weights model.embed_tokens.weight: captured, not loaded; weights model.norm.weight: captured, not loaded; file config.json: captured, not loaded; and 4 more")]
fn a_capture_of_something_else_is_refused_by_name(#[case] change: fn(&mut Identity), #[case] message: &str) {
    let written = Made::new().write();
    let mut other = identity();
    change(&mut other);
    let error = Capture::open(&written.path)
        .unwrap()
        .matches(&other, |hf| Ok(vec![format!("{} layers captured", hf["num_hidden_layers"])]))
        .unwrap_err();
    assert!(matches!(error, Error::Capture { .. }));
    let found = strip(error, &written);
    assert!(found.starts_with(&format!("capture refused: {message}")), "{found}");
}

#[test]
fn hex_case_does_not_matter() {
    let written = Made::new().write();
    let mut upper = identity();
    upper.weights_sha256.values_mut().for_each(|hash| *hash = hash.to_uppercase());
    Capture::open(&written.path).unwrap().matches(&upper, |_| unreachable!()).unwrap();
}

/// A sanity band, not equality: prompts differ from those of the figures in the training notes (medians 2e-5 to 1e-4).
#[rstest]
#[case("tiny_llama")]
#[case("tiny_mistral")]
#[case("tiny_qwen2")]
#[case("tiny_qwen3")]
fn an_embedded_capture_is_sound_and_its_floor_is_low(#[case] model: &str) {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let capture = Capture::open(fixtures.join(model).join("reference.safetensors")).unwrap();
    capture.sound().unwrap();
    assert_eq!(capture.model(), model);
    let floor = Floor::of(&capture).unwrap();
    let kl = floor.kl.summary;
    assert_eq!(kl.count, capture.prompts().len() * STEPS);
    assert!((5e-6..3e-4).contains(&kl.median) && kl.p95 < 3e-3 && kl.max < 5e-2, "{model}: {kl:?}");
    assert!((floor.kl_prefill.summary.median / kl.median - 1.0).abs() < 1.0, "{model}: {:?}", floor.kl_prefill.summary);
    assert!((floor.perplexity_bf16 / floor.perplexity_f32 - 1.0).abs() < 0.01 && floor.perplexity_f32 > 1.0);
    // The capture script has its own implementation of the same definition.
    let theirs: serde_json::Value = serde_json::from_str(&capture.tensors().strings()["noise"]).unwrap();
    for (name, ours) in [("median", kl.median), ("p95", kl.p95), ("mean", kl.mean), ("max", kl.max)] {
        let theirs = theirs["kl_f32_bf16"][name].as_f64().unwrap();
        assert!((ours / theirs - 1.0).abs() < 1e-3, "{model}: {name}: {ours:e}, {theirs:e} in the metadata");
    }
    for id in capture.lens_prompts() {
        assert!(capture.lens(id).unwrap().is_some_and(|lens| lens.positions.len() >= 2), "{model}: {id}");
    }
}
