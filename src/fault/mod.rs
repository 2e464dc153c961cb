//! Named faults: how each is injected into a run, which gates must see it, what must point at it, and what to do about it.
//!
//! One place for what can go wrong. A fault is an [`Alteration`] of a run; nothing here judges, prints or opens a file.
//! Production code knows the seam and no fault.

mod catalogue;
mod device;
mod hooks;
mod kernels;
mod launch;
pub mod symptoms;
#[cfg(test)]
mod tests;
mod weights;

use std::sync::{Arc, Mutex, PoisonError};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{ModelConfig, Weights};
use crate::plan::Stage;
use crate::runner::{Alteration, Record, SharedHook};

pub use catalogue::catalogue;
pub use launch::Site;

/// What a fault is a fault of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Config,
    Weights,
    Rope,
    Attention,
    Kv,
    Arithmetic,
    Buffer,
    Device,
    Input,
    Harness,
}

/// What can see a fault: the columns of the kill matrix, cheapest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The run was refused or did not complete.
    Refused,
    /// Phase 0: config, tensors, tokens, the reference.
    Phase0,
    /// Phase 1: the kernel against its oracle.
    Phase1,
    /// Phase 2: block 0.
    Block,
    /// Phase 3: upstream's rule.
    TokenSet,
    /// Phase 3: each side's choice in the other's five at every step.
    Agreement,
    /// Phase 3: divergence from HF f32.
    Kl,
    /// Phase 3: distance of every layer to HF f32.
    Noise,
    /// Phase 3: what a layer adds when it starts from HF's input.
    Added,
    /// Phase 3: single positions of the long prompt.
    Positions,
    /// Phase 3: rows of the KV cache.
    Kv,
    /// Phase 3: decode against prefill.
    Decode,
    /// Phase 3: perplexity of a held text.
    Perplexity,
    /// Any of these on the ieee datapath, where the device's own arithmetic hides the fault.
    IeeeRerun,
}

impl Gate {
    pub const ALL: [Gate; 14] = [
        Gate::Refused,
        Gate::Phase0,
        Gate::Phase1,
        Gate::Block,
        Gate::TokenSet,
        Gate::Agreement,
        Gate::Kl,
        Gate::Noise,
        Gate::Added,
        Gate::Positions,
        Gate::Kv,
        Gate::Decode,
        Gate::Perplexity,
        Gate::IeeeRerun,
    ];

    /// As it stands at the head of a column.
    pub fn name(self) -> &'static str {
        match self {
            Gate::Refused => "refused",
            Gate::Phase0 => "phase0",
            Gate::Phase1 => "phase1",
            Gate::Block => "block",
            Gate::TokenSet => "token_set",
            Gate::Agreement => "agreement",
            Gate::Kl => "kl",
            Gate::Noise => "noise",
            Gate::Added => "added",
            Gate::Positions => "positions",
            Gate::Kv => "kv",
            Gate::Decode => "decode",
            Gate::Perplexity => "perplexity",
            Gate::IeeeRerun => "ieee_rerun",
        }
    }
}

/// What must point at the place of the fault.
#[derive(Debug, Clone, Copy)]
pub enum Lens {
    /// The first layer that adds error of its own is the fault's, or the first of all when it is everywhere.
    Layer,
    /// Phase 1 fails the kernel of this id, and no other.
    Kernel(&'static str),
    /// The first tap of layer 0 that is off.
    Tap(&'static str),
    /// The first layer whose cached rows are off, at the fault's head if it has one.
    KvLayer,
    /// The first bad position is the first sampled one from here on.
    Position(fn(&At) -> usize),
    /// The first bad decode step after a prefill of one token is this one.
    Step(fn(&At) -> usize),
    /// The message of a refusal or of phase 0 names this.
    Message(&'static str),
    /// Nothing but the verdict.
    None,
}

/// One instance's parameters. What an entry has no use for is left alone by it.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct At {
    /// None: every layer.
    pub layer: Option<usize>,
    pub head: usize,
    /// Of the sequence; for faults of decode, the number of decode steps before it.
    pub position: usize,
    /// What an entry scales by; its meaning stands in the entry's title.
    pub strength: f64,
    pub seed: u64,
}

/// Where an instance lies when nobody says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Every layer: a kernel's fault is wherever the kernel is launched.
    Everywhere,
    /// One layer.
    OneLayer,
}

/// How a fault gets into a run.
#[derive(Clone, Copy)]
pub enum Injection {
    /// Another config than the checkpoint's.
    Config(fn(&mut ModelConfig, &At)),
    /// Tensors other than the checkpoint's.
    Weights(fn(&dyn Weights, &ModelConfig, &At) -> Result<weights::Changes>),
    /// Launches of these kernels (at these sites, where any are named) run by other means.
    Launch { kernels: &'static [&'static str], sites: &'static [&'static str], stages: Stages, tamper: launch::Tamper },
    /// A hook.
    Hook(fn(&ModelConfig, &At) -> SharedHook),
    /// Other prompt ids.
    Prompt(fn(&[u32], &ModelConfig, &At) -> Vec<u32>),
    /// Another record than the runner's; the one of the run before, where there was one, comes along.
    Record(fn(Record, Option<&Record>, &At) -> Record),
    /// A fault of whoever asks and judges; `phase::escape` carries it out.
    Harness(Harness),
}

/// In which half of inference a launch is tampered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stages {
    Both,
    Prefill,
    Decode,
}

impl Stages {
    fn has(self, stage: &str) -> bool {
        match self {
            Stages::Both => true,
            Stages::Prefill => stage == Stage::Prefill { seq_len: 0 }.name(),
            Stages::Decode => stage == Stage::Decode.name(),
        }
    }
}

/// Faults of the harness and of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harness {
    /// The chat template is not applied.
    TemplateMissing,
    /// No prompt at all.
    NoPrompts,
    /// No step, or one, of 32.
    Steps(usize),
    /// No layer is looked at.
    NoLayers,
    /// The capture of another fixture.
    OtherCapture,
    /// A capture made before the prompts changed.
    StaleCapture,
    /// A NaN among the reference's logits.
    NanReference,
    /// A checkpoint file in which one byte of one tensor has changed.
    CorruptedFile,
}

/// One named fault.
pub struct Entry {
    /// `[a-z0-9_]`, a segment of test names.
    pub id: &'static str,
    pub kind: Kind,
    pub title: &'static str,
    /// The likely cause.
    pub cause: &'static str,
    pub remedy: &'static str,
    /// Gates of which at least one must see it.
    pub catches: &'static [Gate],
    pub lens: Lens,
    pub reach: Reach,
    /// The first is the default, the others are the library's. Empty: it has none.
    pub strengths: &'static [f64],
    /// Why the fault cannot be on a model of this config, if it cannot.
    pub absent: fn(&ModelConfig) -> Option<&'static str>,
    /// Why no run of a model shows it that can have it, if none does.
    pub unseen: fn(&ModelConfig) -> Option<&'static str>,
    pub injection: Injection,
}

impl Entry {
    /// The instance that is injected when nobody asks for another: in the second layer where it is of one.
    pub fn default_at(&self, config: &ModelConfig) -> At {
        let layer = match self.reach {
            Reach::Everywhere => None,
            Reach::OneLayer => Some(1.min(config.num_hidden_layers.saturating_sub(1))),
        };
        let strength = self.strengths.first().copied().unwrap_or(1.0);
        At { layer, head: 1.min(config.num_attention_heads - 1), position: 3, strength, seed: 0x5eed }
    }

    /// Instances to fit a residual by: every layer and strength, the default seed.
    pub fn library(&self, config: &ModelConfig) -> Vec<At> {
        let default = self.default_at(config);
        let layers: Vec<Option<usize>> = match self.reach {
            Reach::Everywhere => vec![None],
            Reach::OneLayer => (0..config.num_hidden_layers).map(Some).collect(),
        };
        let strengths = if self.strengths.is_empty() { &[1.0][..] } else { self.strengths };
        let each = |&layer: &Option<usize>| {
            let default = default.clone();
            strengths.iter().map(move |&strength| At { layer, strength, ..default.clone() })
        };
        layers.iter().flat_map(each).collect()
    }

    /// Errors: [`Error::Usage`] for a strength at which the fault does nothing or is another one.
    fn check_strength(&self, strength: f64) -> Result<()> {
        let Some(Range { least, most, whole, factor }) = self.range() else { return Ok(()) };
        let fits = (least..=most).contains(&strength) && !(whole && strength.fract() != 0.0);
        if fits && !(factor && strength == 1.0) {
            return Ok(());
        }
        let (kind, but) = (if whole { "a whole number" } else { "a number" }, if factor { ", not 1" } else { "" });
        let expected = format!("{kind} from {least} to {most}{but} for {}", self.id);
        Err(Error::Usage { what: "strength".into(), found: strength.to_string(), expected })
    }

    /// Strengths at which the fault is still itself: a little beyond the library's on both sides.
    fn range(&self) -> Option<Range> {
        let least = self.strengths.iter().copied().min_by(f64::total_cmp)?;
        let most = self.strengths.iter().copied().fold(least, f64::max);
        let whole = self.strengths.iter().all(|x| x.fract() == 0.0);
        // Rounded, so that people are told bounds that they can type.
        let (below, above) =
            if whole { ((least / 2.0).floor().max(1.0), (most * 1.5).floor()) } else { (least / 4.0, most * 4.0) };
        Some(Range { least: below, most: above, whole, factor: least < 1.0 && most > 1.0 })
    }

    /// Whether a fault of the kernel itself, which phase 1 can be run on.
    pub fn is_kernel(&self) -> bool {
        matches!(self.injection, Injection::Launch { sites: [], .. }) && self.catches.contains(&Gate::Phase1)
    }
}

/// The strengths of an entry.
struct Range {
    least: f64,
    most: f64,
    /// Counts: of bits, rows, positions.
    whole: bool,
    /// Factors: 1 changes nothing.
    factor: bool,
}

/// A fault of one model, ready to be injected.
pub struct Fault {
    pub entry: &'static Entry,
    pub at: At,
    config: ModelConfig,
    last: Mutex<Option<Record>>,
}

impl Fault {
    /// The entry's instance at `at`.
    ///
    /// Errors: [`Error::Unavailable`] where the model cannot have it; [`Error::Usage`] for a layer that the model has not,
    /// and for a strength at which the fault does nothing or is another one.
    pub fn new(entry: &'static Entry, config: &ModelConfig, at: At) -> Result<Fault> {
        if let Some(why) = (entry.absent)(config) {
            return Err(Error::Unavailable { what: format!("fault {}", entry.id), why: why.into() });
        }
        let layers = config.num_hidden_layers;
        if let Some(layer) = at.layer.filter(|&layer| layer >= layers) {
            let (what, expected) = ("layer".into(), format!("0 to {}", layers - 1));
            return Err(Error::Usage { what, found: layer.to_string(), expected });
        }
        entry.check_strength(at.strength)?;
        Ok(Fault { entry, at, config: config.clone(), last: Mutex::default() })
    }

    /// The entry's default instance.
    ///
    /// Errors: as [`Fault::new`].
    pub fn of(entry: &'static Entry, config: &ModelConfig) -> Result<Fault> {
        Fault::new(entry, config, entry.default_at(config))
    }

    /// The entry of this id.
    ///
    /// Errors: [`Error::Unknown`].
    pub fn entry(id: &str) -> Result<&'static Entry> {
        catalogue().iter().copied().find(|entry| entry.id == id).ok_or_else(|| Error::Unknown {
            kind: "fault",
            name: id.into(),
            known: catalogue().iter().map(|entry| entry.id).collect::<Vec<_>>().join(", "),
        })
    }

    /// The device for phase 1: every launch of the fault's kernel is tampered with.
    pub fn kernel_device(&self, sound: Box<dyn Device>) -> Box<dyn Device> {
        Alteration::device(self, sound)
    }
}

impl Alteration for Fault {
    fn config(&self, config: &mut ModelConfig) {
        if let Injection::Config(alter) = self.entry.injection {
            alter(config, &self.at);
        }
    }

    fn weights(&self, sound: Arc<dyn Weights>) -> Result<Arc<dyn Weights>> {
        let Injection::Weights(alter) = self.entry.injection else { return Ok(sound) };
        let changes = alter(&*sound, &self.config, &self.at)?;
        Ok(Arc::new(weights::Overlay { sound, changes }))
    }

    fn device(&self, sound: Box<dyn Device>) -> Box<dyn Device> {
        let Injection::Launch { kernels, sites, stages, tamper } = self.entry.injection else { return sound };
        let (config, at) = (self.config.clone(), self.at.clone());
        Box::new(device::Tampered::new(
            sound,
            launch::Targets { kernels, sites, stages, layer: at.layer },
            tamper,
            config,
            at,
        ))
    }

    fn hooks(&self) -> Vec<SharedHook> {
        match self.entry.injection {
            Injection::Hook(make) => vec![make(&self.config, &self.at)],
            _ => vec![],
        }
    }

    fn prompt(&self, ids: &[u32]) -> Vec<u32> {
        match self.entry.injection {
            Injection::Prompt(alter) => alter(ids, &self.config, &self.at),
            _ => ids.to_vec(),
        }
    }

    fn record(&self, record: Record) -> Record {
        let Injection::Record(alter) = self.entry.injection else { return record };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let altered = alter(record.clone(), last.as_ref(), &self.at);
        *last = Some(record);
        altered
    }
}
