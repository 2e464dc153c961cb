//! The catalogue keeps its rules: names, texts, and that an injection changes what it says.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use half::bf16;

use super::symptoms::{Answer, SYMPTOMS, Table};
use super::*;
use crate::model::{Checkpoint, ModelConfig};

fn checkpoint(model: &str) -> (ModelConfig, Arc<Checkpoint>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(model).join("checkpoint");
    (ModelConfig::from_file(&dir).unwrap().0, Arc::new(Checkpoint::open(&dir).unwrap()))
}

const MODELS: [&str; 4] = ["tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3"];

#[test]
fn names_are_segments_and_unique_and_every_fault_is_explained() {
    let mut names = BTreeSet::new();
    for entry in catalogue() {
        let fits = entry.id.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_');
        assert!(fits && names.insert(entry.id), "{}", entry.id);
        assert!(!entry.catches.is_empty(), "{}: no gate has to see it", entry.id);
        for text in [entry.title, entry.cause, entry.remedy] {
            assert!(!text.is_empty() && !text.ends_with('.'), "{}: {text:?}", entry.id);
        }
    }
    assert!(names.len() >= 60, "{} faults", names.len());
}

#[test]
fn every_fault_is_on_some_embedded_model() {
    let configs = MODELS.map(|model| checkpoint(model).0);
    for entry in catalogue() {
        let here = configs.iter().filter(|c| (entry.absent)(c).is_none() && (entry.unseen)(c).is_none());
        assert!(here.count() > 0, "{}", entry.id);
    }
}

#[test]
fn every_row_of_the_failure_tables_is_answered() {
    for (table, rows) in Table::ALL {
        let found: BTreeSet<&str> = SYMPTOMS.iter().filter(|s| s.table == table).map(|s| s.row).collect();
        assert_eq!(found.len(), rows, "{table:?}");
    }
    assert_eq!(SYMPTOMS.len(), Table::ALL.iter().map(|(_, rows)| rows).sum::<usize>());
    for symptom in SYMPTOMS {
        match symptom.answer {
            Answer::Faults(ids) => {
                assert!(!ids.is_empty(), "{:?} {}", symptom.table, symptom.row);
                for id in ids {
                    assert!(Fault::entry(id).is_ok(), "{:?} {}: no fault {id}", symptom.table, symptom.row);
                }
            }
            Answer::None(why) => assert!(!why.is_empty()),
        }
    }
}

/// Every change of weights keeps names and sizes, changes something, and knows its layer.
#[test]
fn changed_weights_fit_and_differ() {
    for (config, checkpoint) in MODELS.map(checkpoint) {
        for entry in catalogue().iter().filter(|e| matches!(e.injection, Injection::Weights(_))) {
            for at in entry.library(&config) {
                let Injection::Weights(alter) = entry.injection else { continue };
                let changes = alter(&*checkpoint, &config, &at).unwrap();
                assert!(!changes.is_empty(), "{}", entry.id);
                let mut differs = false;
                for (name, content) in &changes {
                    let sound: Cow<'_, [bf16]> = checkpoint.bf16(name).unwrap();
                    assert_eq!(content.len(), sound.len(), "{}: {name}", entry.id);
                    differs |= content.iter().zip(&*sound).any(|(a, b)| a.to_bits() != b.to_bits());
                }
                assert!(differs, "{}: {at:?} changes nothing", entry.id);
            }
        }
    }
}

#[test]
fn a_site_is_read_from_its_name() {
    let site = Site::parse("prefill.l07.q_proj").unwrap();
    assert_eq!((site.stage, site.layer, site.name), ("prefill", Some(7), "q_proj"));
    let head = Site::parse("decode.lm_head").unwrap();
    assert_eq!((head.stage, head.layer, head.name), ("decode", None, "lm_head"));
    assert_eq!(Site::parse("gemm_bf16::m0064_k0128_n0128"), None);
}

/// What would inject nothing, or something else, is refused; the library's own and what lies about it is not.
#[test]
fn a_layer_or_strength_out_of_bounds_is_a_usage_error() {
    let (config, _) = checkpoint("tiny_llama");
    let layers = config.num_hidden_layers;
    for entry in catalogue().iter().copied().filter(|e| (e.absent)(&config).is_none()) {
        let default = entry.default_at(&config);
        let usage = |at: At| match Fault::new(entry, &config, at.clone()) {
            Err(Error::Usage { what, .. }) => what,
            other => panic!("{}: {at:?}: {}", entry.id, if other.is_ok() { "accepted" } else { "another error" }),
        };
        assert_eq!(usage(At { layer: Some(layers), ..default.clone() }), "layer");
        assert!(Fault::new(entry, &config, At { layer: Some(layers - 1), ..default.clone() }).is_ok());
        for at in entry.library(&config) {
            assert!(Fault::new(entry, &config, at.clone()).is_ok(), "{}: {at:?}", entry.id);
        }
        if entry.strengths.is_empty() {
            continue;
        }
        for strength in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert_eq!(usage(At { strength, ..default.clone() }), "strength");
        }
        let factor = entry.strengths.iter().any(|&x| x < 1.0) && entry.strengths.iter().any(|&x| x > 1.0);
        let whole = entry.strengths.iter().all(|x| x.fract() == 0.0);
        if factor {
            assert_eq!(usage(At { strength: 1.0, ..default.clone() }), "strength");
        }
        if whole {
            assert_eq!(usage(At { strength: entry.strengths[0] + 0.5, ..default.clone() }), "strength");
        }
    }
}

#[test]
fn an_unknown_fault_and_one_the_model_cannot_have_are_errors() {
    let (config, _) = checkpoint("tiny_qwen3");
    assert!(Fault::entry("nonsense").is_err());
    let bias = Fault::entry("qkv_bias_dropped").unwrap();
    assert!(Fault::of(bias, &config).is_err());
    assert!(Fault::of(bias, &checkpoint("tiny_qwen2").0).is_ok());
}
