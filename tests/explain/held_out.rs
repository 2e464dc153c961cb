//! An instance of each fault that the fitted library does not hold.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use phasegate::error::{Error, Result};
use phasegate::explain::Lab;
use phasegate::fault::{At, Entry, Fault, Injection, Reach};
use phasegate::model::{Checkpoint, ModelConfig};
use phasegate::phase::Subject;
use phasegate::runner::{Alteration, Record, SharedHook, Sound};
use serde_json::{Value, json};

use crate::rewrite;

/// In what the injected instance differs from all that is fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// A strength between or beyond the library's.
    Strength,
    /// Another head, seed or position.
    Parameter,
    /// Several layers at once, where the library has one or all.
    Layers,
    /// Checkpoint or config damaged on disk and loaded again, with content that no instance of the library has.
    File,
    /// The same, with content that an instance of the library has too.
    FileOfKnown,
    /// In nothing: the fault has no parameter.
    Known,
}

impl How {
    /// Whether the library holds an instance of the same content.
    pub fn is_known(self) -> bool {
        matches!(self, How::FileOfKnown | How::Known)
    }
}

/// A run to be explained.
pub struct Injected {
    pub how: How,
    pub lab: Lab,
    pub alteration: Box<dyn Alteration>,
}

/// Entries whose injection reads the head, the position or the seed.
const OTHER_PARAMETERS: [&str; 6] =
    ["attention_head_wrong", "head_wrong", "kv_head_missing", "kv_row_missing", "kv_stale_row", "row_flipped"];

/// Faults of weights that depend on the seed.
const WITH_SEED: [&str; 2] = ["mlp_of_another_checkpoint", "row_flipped"];

/// Faults of weights that move whole layers: two at once would move the same ones.
const WHOLE_LAYERS: [&str; 2] = ["layers_shifted", "layers_swapped"];

/// Faults of the whole model's RoPE table.
const NO_LAYER: [&str; 2] = ["rope_stuck_in_decode", "rope_bf16_angles"];

pub fn injected(entry: &'static Entry, lab: &Lab, subject: &Subject) -> Result<Injected> {
    let config = &lab.config;
    let default = entry.default_at(config);
    let last = config.num_hidden_layers - 1;
    let layer = default.layer.map(|_| 2.min(last));
    let (head, position, seed) = (0, 4, 77);
    let other = At { layer, head, position, seed, strength: strength(entry) };
    let one = |how, at: At| -> Result<Injected> {
        Ok(Injected { how, lab: lab.clone(), alteration: Box::new(Fault::new(entry, config, at)?) })
    };
    if let Injection::Weights(_) = entry.injection {
        return damaged(entry, lab, subject, other);
    }
    if let Some(edit) = edit(entry.id, other.strength) {
        let how = if entry.strengths.is_empty() { How::FileOfKnown } else { How::File };
        return edited(lab, subject, how, &edit);
    }
    if !entry.strengths.is_empty() && entry.id != "kv_row_missing" {
        return one(How::Strength, other);
    }
    if OTHER_PARAMETERS.contains(&entry.id) {
        return one(How::Parameter, other);
    }
    if matches!(entry.injection, Injection::Config(_)) || NO_LAYER.contains(&entry.id) {
        return one(How::Known, default);
    }
    // All but the first where the library has all; two where it has each.
    let layers: Vec<usize> = match entry.reach {
        Reach::Everywhere if is_of_head(entry) => return one(How::Known, default),
        Reach::Everywhere => (1..=last).collect(),
        Reach::OneLayer => vec![1, last],
    };
    let faults = layers.into_iter().map(|l| Fault::new(entry, config, At { layer: Some(l), ..default.clone() }));
    let faults = faults.collect::<Result<Vec<_>>>()?;
    Ok(Injected { how: How::Layers, lab: lab.clone(), alteration: Box::new(Several(faults)) })
}

fn is_of_head(entry: &Entry) -> bool {
    matches!(entry.injection, Injection::Launch { sites: ["lm_head"], .. })
}

/// A strength that the library does not hold: between its first two, or beyond all of whole ones.
fn strength(entry: &Entry) -> f64 {
    let whole = entry.strengths.iter().all(|x| x.fract() == 0.0);
    let between = match entry.strengths {
        [] => return 1.0,
        [one] => one * 1.5,
        [a, b, ..] => (a * b).sqrt(),
    };
    let beyond = entry.strengths.iter().copied().fold(0.0, f64::max) + 1.0;
    match whole {
        true if entry.strengths.contains(&between.round()) => beyond,
        true => between.round(),
        false => between,
    }
}

/// Faults at once.
struct Several(Vec<Fault>);

impl Alteration for Several {
    fn config(&self, config: &mut ModelConfig) {
        self.0.iter().for_each(|fault| fault.config(config));
    }

    fn weights(&self, sound: Arc<dyn phasegate::model::Weights>) -> Result<Arc<dyn phasegate::model::Weights>> {
        self.0.iter().try_fold(sound, |weights, fault| fault.weights(weights))
    }

    fn device(&self, sound: Box<dyn phasegate::device::Device>) -> Box<dyn phasegate::device::Device> {
        self.0.iter().fold(sound, |device, fault| fault.device(device))
    }

    fn hooks(&self) -> Vec<SharedHook> {
        self.0.iter().flat_map(Alteration::hooks).collect()
    }

    fn record(&self, record: Record) -> Record {
        record
    }
}

/// A change of a config file.
type Edit = Box<dyn Fn(&mut Value)>;

/// Key and value of config.json that come to the fault, where there are such.
fn edit(fault: &str, strength: f64) -> Option<Edit> {
    Some(match fault {
        "rope_theta_default" => Box::new(|c: &mut Value| c["rope_parameters"]["rope_theta"] = json!(10_000.0)),
        "rope_theta_scaled" => Box::new(move |c: &mut Value| {
            let theta = c["rope_parameters"]["rope_theta"].as_f64().unwrap_or(10_000.0);
            c["rope_parameters"]["rope_theta"] = json!(theta * strength);
        }),
        "rope_scaling_ignored" => Box::new(|c: &mut Value| {
            let theta = c["rope_parameters"]["rope_theta"].clone();
            c["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": theta });
        }),
        "eps_of_another_family" => Box::new(|c: &mut Value| {
            let eps = c["rms_norm_eps"].as_f64().unwrap_or(1e-6);
            c["rms_norm_eps"] = json!(if eps == 1e-5 { 1e-6 } else { 1e-5 });
        }),
        "tied_head" => Box::new(|c: &mut Value| c["tie_word_embeddings"] = json!(true)),
        _ => return None,
    })
}

/// The checkpoint with another config.json.
fn edited(lab: &Lab, subject: &Subject, how: How, edit: &dyn Fn(&mut Value)) -> Result<Injected> {
    let dir = &subject.located.checkpoint_dir;
    let path = dir.join("config.json");
    let text = fs::read_to_string(&path).map_err(Error::io(&path))?;
    let mut config: Value = serde_json::from_str(&text).map_err(|e| Error::malformed(&path, e.to_string()))?;
    edit(&mut config);
    let copy = tempfile::tempdir().map_err(Error::io("a temporary folder"))?;
    let path = copy.path().join("config.json");
    fs::write(&path, config.to_string()).map_err(Error::io(&path))?;
    let (config, _) = ModelConfig::from_file(copy.path())?;
    Ok(Injected { how, lab: Lab { config, ..lab.clone() }, alteration: Box::new(Sound) })
}

/// The checkpoint written anew with the fault's tensors, and loaded as any other.
fn damaged(entry: &'static Entry, lab: &Lab, subject: &Subject, at: At) -> Result<Injected> {
    let Injection::Weights(alter) = entry.injection else { unreachable!("a fault of weights") };
    // Without a parameter of its own: in two layers at once, which the library has one by one.
    let parameter = !entry.strengths.is_empty() || WITH_SEED.contains(&entry.id);
    let alone = at.layer.is_none() || WHOLE_LAYERS.contains(&entry.id);
    let mut changes = BTreeMap::new();
    let layers =
        if parameter || alone { vec![at.layer] } else { vec![Some(1), Some(lab.config.num_hidden_layers - 1)] };
    for layer in layers {
        changes.extend(alter(&*lab.weights, &lab.config, &At { layer, ..at.clone() })?);
    }
    let how = if alone && !parameter { How::FileOfKnown } else { How::File };
    let copy = tempfile::tempdir().map_err(Error::io("a temporary folder"))?;
    let dir = &subject.located.checkpoint_dir;
    for entry in fs::read_dir(dir).map_err(Error::io(dir))? {
        let from = entry.map_err(Error::io(dir))?.path();
        let to = copy.path().join(from.file_name().unwrap_or_default());
        if from.extension().is_some_and(|ext| ext == "safetensors") {
            rewrite::rewrite(&from, &to, &changes)?;
        } else {
            fs::copy(&from, &to).map_err(Error::io(&from))?;
        }
    }
    // The mapping keeps the file's content when the folder is gone.
    let weights = Arc::new(Checkpoint::open(copy.path())?);
    let (config, _) = ModelConfig::from_file(copy.path())?;
    Ok(Injected { how, lab: Lab { config, weights, ..lab.clone() }, alteration: Box::new(Sound) })
}
