//! What a fixture can show, and what no run of it could: a blind spot of one must be covered by another.
//!
//! A fault that swaps two KV heads passes on a model with one KV head; a fault in the head passes where the head is the
//! embedding. Judged from the checkpoint and its capture alone.

use super::Subject;
use crate::error::Result;
use crate::model::{PromptSet, RopeKind};

/// One property that some fault needs in order to be seen.
pub struct Property {
    /// What the model has.
    pub name: &'static str,
    /// What goes unseen without it.
    pub unseen: &'static str,
    pub shown: fn(&Subject) -> Result<bool>,
}

/// Prompts up to here do not reach the rows that scaling, KV blocks and buckets get wrong.
const SHORT: usize = 512;

/// A step whose two best logits are closer than this says nothing of the order. Units: logits.
const FLAT: f32 = 0.5;

/// Every property.
pub const PROPERTIES: &[Property] = &[
    Property {
        name: "several query heads",
        unseen: "heads mixed up or left out",
        shown: |s| Ok(s.config.num_attention_heads > 1),
    },
    Property { name: "several KV heads", unseen: "KV heads swapped", shown: |s| Ok(s.config.num_key_value_heads > 1) },
    Property {
        name: "grouped queries",
        unseen: "query heads mapped to the wrong KV head",
        shown: |s| Ok(s.config.group() > 1),
    },
    Property {
        name: "group other than KV heads",
        unseen: "group size and number of KV heads exchanged",
        shown: |s| Ok(s.config.group() > 1 && s.config.group() != s.config.num_key_value_heads),
    },
    Property {
        name: "head_dim of its own",
        unseen: "head_dim taken from hidden_size / heads, o_proj transposed",
        shown: |s| Ok(s.config.q_dim() != s.config.hidden_size),
    },
    Property {
        name: "head_dim 128",
        unseen: "faults of the wide attention kernels",
        shown: |s| Ok(s.config.head_dim == 128),
    },
    Property { name: "layers differ", unseen: "a layer run with another layer's weights", shown: layers_differ },
    Property {
        name: "head other than embedding",
        unseen: "embedding used as head, or the other way round",
        shown: |s| Ok(!s.config.tie_word_embeddings),
    },
    Property { name: "tied head", unseen: "a tied head left at random", shown: |s| Ok(s.config.tie_word_embeddings) },
    Property {
        name: "norm weights vary",
        unseen: "a norm without its weight",
        shown: |s| varies(s, "model.layers.0.input_layernorm.weight"),
    },
    Property { name: "QKV bias", unseen: "a bias forgotten or added twice", shown: qkv_bias },
    Property { name: "QK norm", unseen: "QK norm forgotten or behind RoPE", shown: qk_norm },
    Property {
        name: "RoPE scaling",
        unseen: "rope_type parsed and never applied",
        shown: |s| Ok(s.config.rope.kind != RopeKind::Default),
    },
    Property {
        name: "rope_theta not 10000",
        unseen: "rope_theta parsed and never applied",
        shown: |s| Ok(s.config.rope.rope_theta != 10_000.0),
    },
    Property {
        name: "rms_norm_eps not 1e-6",
        unseen: "rms_norm_eps parsed and never applied",
        shown: |s| Ok(s.config.rms_norm_eps != 1e-6),
    },
    Property { name: "prompt beyond 512", unseen: "late positions: RoPE, KV blocks, buckets", shown: long_prompt },
    Property { name: "layer outputs beyond 512", unseen: "the layer that gets late positions wrong", shown: long_lens },
    Property { name: "clear choices", unseen: "nothing moves a flat choice the same way twice", shown: clear_choices },
    Property {
        name: "BOS of the tokenizer",
        unseen: "a BOS forgotten",
        shown: |s| starts_with_bos(s, PromptSet::Base),
    },
    Property {
        name: "BOS of the template",
        unseen: "a second BOS in a chat",
        shown: |s| starts_with_bos(s, PromptSet::Chat),
    },
    Property { name: "several shards", unseen: "a shard mixed up", shown: |s| Ok(s.checkpoint.files().count() > 1) },
];

/// The properties that `subject` cannot show.
///
/// Errors: those of reading its weights and its capture.
pub fn blind_spots(subject: &Subject) -> Result<Vec<&'static Property>> {
    let mut blind = vec![];
    for property in PROPERTIES {
        if !(property.shown)(subject)? {
            blind.push(property);
        }
    }
    Ok(blind)
}

fn layers_differ(subject: &Subject) -> Result<bool> {
    let hashes = subject.checkpoint.tensor_hashes()?;
    let of = |layer: usize, part: &str| {
        let name = format!("model.layers.{layer}.{part}.weight");
        hashes.get(subject.checkpoint.stored_name(&name).as_ref()).cloned()
    };
    let parts = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "input_layernorm"];
    let layers = subject.config.num_hidden_layers;
    let all_distinct = |part: &&str| {
        let distinct: std::collections::BTreeSet<_> = (0..layers).map(|layer| of(layer, part)).collect();
        distinct.len() == layers
    };
    Ok(layers > 1 && parts.iter().all(all_distinct))
}

/// Not all elements alike.
fn varies(subject: &Subject, tensor: &str) -> Result<bool> {
    let values = subject.checkpoint.bf16(tensor)?;
    Ok(values.iter().any(|x| x != &values[0]))
}

fn qkv_bias(subject: &Subject) -> Result<bool> {
    Ok(subject.config.qkv_bias && all_vary(subject, &["q_proj.bias", "k_proj.bias", "v_proj.bias"])?)
}

fn qk_norm(subject: &Subject) -> Result<bool> {
    Ok(subject.config.qk_norm && all_vary(subject, &["q_norm.weight", "k_norm.weight"])?)
}

fn all_vary(subject: &Subject, parts: &[&str]) -> Result<bool> {
    for part in parts {
        if !varies(subject, &format!("model.layers.0.self_attn.{part}"))? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn long_prompt(subject: &Subject) -> Result<bool> {
    Ok(subject.capture()?.prompts().iter().any(|p| p.n_prompt > SHORT))
}

fn long_lens(subject: &Subject) -> Result<bool> {
    for id in subject.capture()?.lens_prompts() {
        if subject.lens(id)?.positions.iter().any(|&p| p as usize >= SHORT) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Most steps of most prompts have a winner by a margin.
fn clear_choices(subject: &Subject) -> Result<bool> {
    let capture = subject.capture()?;
    let (mut clear, mut steps) = (0, 0);
    for prompt in capture.prompts() {
        for row in capture.prompt(&prompt.id)?.bf16.logits.rows() {
            steps += 1;
            clear += usize::from(row.len() > 1 && row[0] - row[1] > FLAT);
        }
    }
    Ok(2 * clear > steps)
}

fn starts_with_bos(subject: &Subject, set: PromptSet) -> Result<bool> {
    let capture = subject.capture()?;
    let Some(prompt) = capture.prompts().iter().find(|p| p.set == set.name()) else { return Ok(false) };
    let ids = capture.prompt(&prompt.id)?.ids;
    // A template may write a BOS that is no BOS of the tokenizer's: only one that both could write can be doubled.
    Ok(subject.tokenizer()?.leading_bos(&ids, &subject.config) == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures;
    use crate::settings;

    fn here() -> Vec<(String, Option<std::sync::Arc<Subject>>)> {
        let all = fixtures(&settings::root()).unwrap();
        all.into_iter().map(|m| (m.name.clone(), Subject::shared(&m.name).ok())).collect()
    }

    /// Only what is embedded counts: the others may not be here.
    #[test]
    fn every_blind_spot_is_covered_by_an_embedded_fixture() {
        let embedded: Vec<_> = here().into_iter().filter(|(name, _)| name.starts_with("tiny_")).collect();
        assert!(embedded.len() >= 4);
        for property in PROPERTIES {
            let shown = |s: &Option<std::sync::Arc<Subject>>| (property.shown)(s.as_ref().unwrap()).unwrap();
            let seeing: Vec<&String> = embedded.iter().filter(|(_, s)| shown(s)).map(|(name, _)| name).collect();
            assert!(!seeing.is_empty(), "no fixture has {:?}: nothing would see {}", property.name, property.unseen);
        }
    }

    /// The table in fixtures/README.md says what is so. The column of a fixture that is not here is taken as it stands.
    #[test]
    fn the_readme_has_the_table() {
        let readme = std::fs::read_to_string(settings::root().join("fixtures/README.md")).unwrap();
        let fixtures = here();
        let names: Vec<&str> = fixtures.iter().map(|(name, _)| name.as_str()).collect();
        let mut table = vec![format!("| property | {} | unseen without it |", names.join(" | "))];
        table.push(format!("|---|{}---|", "---|".repeat(names.len())));
        for property in PROPERTIES {
            let old =
                readme.lines().find(|line| line.starts_with(&format!("| {} |", property.name))).unwrap_or_default();
            let old: Vec<&str> = old.split('|').map(str::trim).collect();
            let cells = fixtures.iter().enumerate().map(|(i, (_, subject))| match subject {
                Some(subject) if (property.shown)(subject).unwrap() => "yes",
                Some(_) => "no",
                None => old.get(i + 2).copied().unwrap_or("?"),
            });
            let cells = cells.collect::<Vec<_>>().join(" | ");
            table.push(format!("| {} | {cells} | {} |", property.name, property.unseen));
        }
        let table = table.join("\n");
        assert!(readme.contains(&table), "fixtures/README.md, \"What each can show\", should hold:\n\n{table}\n");
    }
}
