//! A model under test: its checkpoint as loaded, its tokenizer and prompts, and the HF capture it is judged by.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::Value;

use super::devices;
use crate::check::token_set::STEPS;
use crate::error::{Error, Result};
use crate::model::{
    self, Checkpoint, Coverage, Difference, Located, Manifest, ModelConfig, PromptSet, Tokenizer,
    chat_template::{ChatTemplate, Message},
    config,
    hashes::sha256_file,
};
use crate::plan::Memory;
use crate::reference::{Capture, Identity, Lens};
use crate::runner::{Alteration, NpuRunner, RunnerOptions, Sound};
use crate::settings;

/// Characters of a config value that a message shows.
const LONGEST_VALUE: usize = 40;

/// What is known of a fixture without opening its checkpoint: enough to name its cases.
#[derive(Debug, Clone)]
pub struct Outline {
    pub name: String,
    /// Why its cases cannot run here, if they cannot.
    pub missing: Option<String>,
    /// What its config implies, read from HF's resolved config in the capture.
    pub config: ModelConfig,
    /// Keys of HF's resolved config and of ours.
    pub config_keys: Vec<String>,
    /// Ids of the captured prompts, in capture order.
    pub prompts: Vec<String>,
    /// Their lengths. Units: tokens.
    pub prompt_lengths: Vec<usize>,
    /// Ids of those with layer outputs.
    pub lens: Vec<String>,
    /// Positions at which the capture holds RoPE rows.
    pub rope_positions: Vec<u32>,
    pub layers: usize,
}

impl Outline {
    /// Every fixture, by name.
    ///
    /// Errors: as [`Outline::of`].
    pub fn all() -> Result<Vec<Outline>> {
        let root = settings::root();
        model::fixtures(&root)?.iter().map(|manifest| Outline::of(&root, manifest)).collect()
    }

    /// One fixture under `root`.
    ///
    /// Errors: a capture that cannot be read; a fixture without one is an error too.
    pub fn of(root: &Path, manifest: &Manifest) -> Result<Outline> {
        let capture = Capture::open(manifest.reference())?;
        let missing = missing(root, manifest)?;
        let (config, _) = ModelConfig::from_json(capture.path(), capture.resolved_config())?;
        Outline::read(&capture, &manifest.name, config, missing)
    }

    fn read(capture: &Capture, name: &str, config: ModelConfig, missing: Option<String>) -> Result<Outline> {
        let hf = capture.resolved_config().as_object().into_iter().flat_map(|o| o.keys().cloned());
        // What HF's class derives in the model and does not state is a key too.
        let ours =
            config.resolved().keys().map(|key| key.split('.').next().unwrap_or(key).to_owned()).collect::<Vec<_>>();
        Ok(Outline {
            name: name.into(),
            missing,
            layers: config.num_hidden_layers,
            config,
            config_keys: hf.chain(ours).collect::<BTreeSet<_>>().into_iter().collect(),
            prompts: capture.prompts().iter().map(|p| p.id.clone()).collect(),
            prompt_lengths: capture.prompts().iter().map(|p| p.n_prompt).collect(),
            lens: capture.lens_prompts().to_vec(),
            rope_positions: capture.rope()?.positions,
        })
    }
}

/// Why a fixture's checkpoint is not here, if it is not.
///
/// Errors: whatever else is wrong with its manifest.
pub fn missing(root: &Path, manifest: &Manifest) -> Result<Option<String>> {
    match model::fixture(root, manifest.clone(), None) {
        Ok(_) => Ok(None),
        Err(Error::Unavailable { what, why }) => Ok(Some(format!("{what} is not available: {why}"))),
        Err(error) => Err(error),
    }
}

/// A checkpoint with everything that is needed to run and to judge it.
pub struct Subject {
    pub name: String,
    /// The project it belongs to: its prompt files.
    pub root: PathBuf,
    pub located: Located,
    pub config: ModelConfig,
    pub coverage: Coverage,
    pub checkpoint: Arc<Checkpoint>,
    pub default_prompts: PromptSet,
    /// Its tokenizer and stop ids.
    pub(super) text: OnceLock<(Tokenizer, Vec<u32>)>,
    template: OnceLock<ChatTemplate>,
    capture: OnceLock<Capture>,
    lenses: Mutex<HashMap<String, Arc<Lens>>>,
}

impl Subject {
    /// Opens a fixture, a checkpoint directory or an id of the local HF cache.
    ///
    /// Errors: [`Error::Unavailable`], [`Error::Unknown`], and whatever is wrong with the checkpoint.
    pub fn open(model: &str, variant: Option<&str>) -> Result<Subject> {
        let subject = Subject::unaccounted(&settings::root(), model, variant)?;
        subject.checkpoint.account(&subject.config)?;
        Ok(subject)
    }

    /// [`Subject::open`] under a given root, without holding the tensors against the config: phase 0 does that tensor
    /// by tensor, so that a wrong one fails its own case.
    ///
    /// Errors: as [`Subject::open`].
    pub fn unaccounted(root: &Path, model: &str, variant: Option<&str>) -> Result<Subject> {
        let located = model::locate_in(root, model, variant)?;
        let dir = located.checkpoint_dir.clone();
        let (config, coverage) = ModelConfig::from_file(&dir)?;
        let checkpoint = Arc::new(Checkpoint::open(&dir)?);
        Ok(Subject {
            name: located.name.clone(),
            root: root.into(),
            default_prompts: located.default_prompts,
            located,
            config,
            coverage,
            checkpoint,
            text: OnceLock::new(),
            template: OnceLock::new(),
            capture: OnceLock::new(),
            lenses: Mutex::default(),
        })
    }

    /// [`Subject::open`], to be shared.
    ///
    /// Errors: as [`Subject::open`].
    pub fn open_arc(model: &str, variant: Option<&str>) -> Result<Arc<Subject>> {
        Subject::open(model, variant).map(Arc::new)
    }

    /// The fixture of this name, opened once per process.
    ///
    /// Errors: as [`Subject::open`].
    pub fn shared(name: &str) -> Result<Arc<Subject>> {
        static SUBJECTS: Shared = OnceLock::new();
        once(&SUBJECTS, name, || Subject::open(name, None))
    }

    /// The fixture of this name as phase 0 looks at it, opened once per process.
    ///
    /// Errors: as [`Subject::unaccounted`].
    pub fn shared_unaccounted(name: &str) -> Result<Arc<Subject>> {
        static SUBJECTS: Shared = OnceLock::new();
        once(&SUBJECTS, name, || Subject::unaccounted(&settings::root(), name, None))
    }

    /// Its tokenizer, parsed on first use: a large vocabulary takes longer than most cases.
    ///
    /// Errors: those of [`Tokenizer::open`].
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        Ok(&self.text()?.0)
    }

    /// Token ids that end a generation.
    ///
    /// Errors: as [`Subject::tokenizer`].
    pub fn stop_ids(&self) -> Result<&[u32]> {
        Ok(&self.text()?.1)
    }

    fn text(&self) -> Result<&(Tokenizer, Vec<u32>)> {
        if let Some(text) = self.text.get() {
            return Ok(text);
        }
        let dir = &self.located.checkpoint_dir;
        let tokenizer = Tokenizer::open(dir)?;
        let stop_ids = tokenizer.stop_ids(dir, &self.config)?;
        Ok(self.text.get_or_init(|| (tokenizer, stop_ids)))
    }

    /// Ids without a token (a padded vocabulary), ascending: no greedy choice may fall on them.
    ///
    /// Errors: as [`Subject::tokenizer`].
    pub fn masked_ids(&self) -> Result<Vec<u32>> {
        Ok(self.tokenizer()?.unnamed_ids(self.config.vocab_size))
    }

    /// Its HF capture, opened on first use and refused when it was made for another checkpoint, tokenizer or prompts.
    ///
    /// Errors: [`Error::Unavailable`] without a capture, [`Error::Capture`] for one that does not belong.
    pub fn capture(&self) -> Result<&Capture> {
        if let Some(capture) = self.capture.get() {
            return Ok(capture);
        }
        let path = self.located.reference.as_ref().ok_or_else(|| Error::Unavailable {
            what: format!("HF capture of {}", self.name),
            why: "no reference.safetensors beside its manifest; make one with fixtures/hf/capture.py".into(),
        })?;
        let capture = Capture::open(path)?;
        self.refuse_others(&capture, &self.identity()?)?;
        Ok(self.capture.get_or_init(|| capture))
    }

    /// Refuses a capture that was made for others than these hashes; keys of config.json are named.
    ///
    /// Errors: as [`Capture::matches`]; those of reading config.json.
    pub(super) fn refuse_others(&self, capture: &Capture, identity: &Identity) -> Result<()> {
        let told = |d: Difference| format!("{} {} loaded, {} captured", d.key, short(&d.ours), short(&d.hf));
        capture.matches(identity, |hf| Ok(self.config_differences(hf)?.into_iter().map(told).collect()))
    }

    /// Every key of config.json that HF's resolved config has otherwise: as we resolve it where we use it, as it is
    /// stated where nobody does.
    ///
    /// Errors: those of reading config.json.
    pub(super) fn config_differences(&self, hf: &Value) -> Result<Vec<Difference>> {
        let stated = config::read_json(&self.located.checkpoint_dir.join(config::CONFIG_FILE))?;
        let mut found = self.config.resolved_differences(hf);
        found.extend(self.config.stated_differences(&stated, &self.coverage, hf));
        Ok(found)
    }

    /// Hashes of what is loaded.
    ///
    /// Errors: [`Error::Io`].
    pub fn identity(&self) -> Result<Identity> {
        Ok(Identity {
            weights_sha256: self.checkpoint.tensor_hashes()?,
            files_sha256: self.checkpoint.side_file_hashes()?,
            prompts_sha256: prompt_hashes(&self.root)?,
        })
    }

    /// The layer captures of a prompt.
    ///
    /// Errors: [`Error::Capture`] when it has none.
    pub fn lens(&self, prompt: &str) -> Result<Arc<Lens>> {
        let mut lenses = self.lenses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lens) = lenses.get(prompt) {
            return Ok(lens.clone());
        }
        let capture = self.capture()?;
        let lens = capture.lens(prompt)?.ok_or_else(|| Error::Capture {
            path: capture.path().to_owned(),
            why: format!("prompt {prompt} has no layer outputs"),
        })?;
        let lens = Arc::new(lens);
        lenses.insert(prompt.into(), lens.clone());
        Ok(lens)
    }

    /// The chat template, parsed on first use.
    ///
    /// Errors: [`Error::Unavailable`] without one, [`Error::Malformed`] for one that cannot be parsed.
    pub fn template(&self) -> Result<&ChatTemplate> {
        if let Some(template) = self.template.get() {
            return Ok(template);
        }
        let dir = &self.located.checkpoint_dir;
        let template = ChatTemplate::open(dir)?.ok_or_else(|| Error::Unavailable {
            what: format!("chat template of {}", self.name),
            why: format!("neither chat_template.jinja nor tokenizer_config.json in {} has one", dir.display()),
        })?;
        Ok(self.template.get_or_init(|| template))
    }

    /// Text and its ids as the tokenizer's defaults give them.
    pub fn raw_ids(&self, text: &str) -> Result<(String, Vec<u32>)> {
        Ok((text.to_owned(), self.tokenizer()?.encode(text, true)?))
    }

    /// A conversation rendered through the template with the generation prompt, and its ids.
    pub fn chat_ids(&self, turns: &[Message]) -> Result<(String, Vec<u32>)> {
        let text = self.template()?.render(self.tokenizer()?, turns, true)?;
        let ids = self.tokenizer()?.encode(&text, false)?;
        Ok((text, ids))
    }

    /// Sets the model up on a device.
    ///
    /// Errors: [`Error::Unavailable`] for a device that is not here, or an emulated one that this machine has no memory for; from
    /// the plan, the device or the checkpoint.
    pub fn runner(&self, device: &str, options: &RunnerOptions) -> Result<NpuRunner> {
        self.altered_runner(device, options, &Sound)
    }

    /// [`Subject::runner`] with parts that an alteration replaces.
    ///
    /// Errors: as [`Subject::runner`].
    pub fn altered_runner(
        &self,
        device: &str,
        options: &RunnerOptions,
        alteration: &dyn Alteration,
    ) -> Result<NpuRunner> {
        if device.starts_with("emu") {
            self.fits(options)?;
        }
        let (config, host) = (self.config.clone(), (devices::pool()?, devices::isa()?));
        let device = devices::open_device(device)?;
        NpuRunner::altered(config, self.checkpoint.clone(), device, host, options, alteration)
    }

    /// Whether this machine has the memory for it, where the system tells how much that is: asked before the system ends the
    /// process in the middle.
    fn fits(&self, options: &RunnerOptions) -> Result<()> {
        let seq_len = options.buckets.iter().copied().max().unwrap_or(1);
        let needed = Memory::of(&self.config, seq_len, options.max_positions, &options.plan)?.total();
        match devices::memory() {
            Some(there) if needed > there => Err(Error::Unavailable {
                what: format!("memory for {} with {} positions", self.name, options.max_positions),
                why: format!(
                    "it needs {:.1} GB, and this machine has {:.1} GB",
                    needed as f64 / 1e9,
                    there as f64 / 1e9
                ),
            }),
            _ => Ok(()),
        }
    }

    /// The outline of this subject, when it has a capture.
    ///
    /// Errors: as [`Subject::capture`].
    pub fn outline(&self) -> Result<Outline> {
        Outline::read(self.capture()?, &self.name, self.config.clone(), None)
    }

    /// Steps of every gated run. Positions a run of the gates needs beyond a prompt.
    pub const STEPS: usize = STEPS;
}

type Shared = OnceLock<Mutex<BTreeMap<String, Arc<Subject>>>>;

fn once(subjects: &Shared, name: &str, open: impl FnOnce() -> Result<Subject>) -> Result<Arc<Subject>> {
    let mut subjects = subjects.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(subject) = subjects.get(name) {
        return Ok(subject.clone());
    }
    let subject = Arc::new(open()?);
    subjects.insert(name.into(), subject.clone());
    Ok(subject)
}

/// A config value for a message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match (value, text.char_indices().nth(LONGEST_VALUE)) {
        (Value::Null, _) => "nothing".into(),
        (_, Some((end, _))) => format!("{}...", &text[..end]),
        (_, None) => text,
    }
}

/// sha256 of every prompt file, under the capture's keys.
fn prompt_hashes(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut hashes = BTreeMap::new();
    for set in PromptSet::ALL {
        hashes.insert(set.file_key().to_owned(), sha256_file(&set.file(root))?);
    }
    Ok(hashes)
}
