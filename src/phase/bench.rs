//! A subject on a device: the runner that every phase, `verify` and `diagnosis` share, and its cached records.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::devices::{isa, open_device, unavailable};
use super::phase3::PromptFinding;
use super::{Subject, perplexity};
use crate::check::token_set::STEPS;
use crate::device::Arithmetic;
use crate::error::{Error, Result};
use crate::model::config::CONFIG_FILE;
use crate::model::hashes::sha256;
use crate::plan::{PlanOptions, Tuning};
use crate::reference::PromptCapture;
use crate::runner::external::{External, ExternalRunner, LABEL, protocol::Hello};
use crate::runner::{Alteration, Forced, NpuRunner, Record, RunCache, Runner, RunnerOptions, Sound, TapRequest};
use crate::runner::{RunKey, npu, plan_hash};
use crate::settings;

/// Prompts that decode side by side.
const AT_ONCE: usize = 4;

/// Positions of the longest of them: each has a KV cache of its own.
const BESIDE: usize = 256;

/// A subject set up on one device for some of its prompts. The weights are uploaded when the first record needs it.
pub struct Bench {
    subject: Arc<Subject>,
    device: String,
    prompts: Vec<String>,
    options: RunnerOptions,
    cache: RunCache,
    alteration: Arc<dyn Alteration>,
    runner: Mutex<Option<NpuRunner>>,
    /// What the device said of itself when it was opened for the runner.
    described: OnceLock<(String, String)>,
    /// Whether an alteration may be in force: then every run is production's own, one sequence at a time.
    altered: bool,
    /// Another engine that makes the records, if it is not the device.
    external: Option<Mutex<ExternalRunner>>,
    arithmetic: Arithmetic,
    records: Mutex<HashMap<String, Arc<Record>>>,
    findings: Mutex<HashMap<String, Arc<PromptFinding>>>,
}

impl Bench {
    /// For these prompts (ids of the capture), 32 steps each.
    ///
    /// Errors: for an unknown prompt; [`Error::Io`] from the run cache.
    pub fn new(subject: Arc<Subject>, device: &str, prompts: &[String], plan: PlanOptions) -> Result<Bench> {
        if let Some(error) = unavailable(device) {
            return Err(error);
        }
        let lengths: Vec<usize> =
            prompts.iter().map(|id| Ok(subject.capture()?.prompt(id)?.ids.len())).collect::<Result<_>>()?;
        let longest = subject.config.max_position_embeddings;
        if let Some((id, length)) = prompts.iter().zip(&lengths).find(|(_, length)| *length + STEPS - 1 > longest) {
            return Err(Error::Key {
                path: subject.located.checkpoint_dir.join(CONFIG_FILE),
                key: "max_position_embeddings".into(),
                found: longest.to_string(),
                // The first of the steps is the prefill's own.
                expected: format!(
                    "at least {}: prompt {id} has {length} tokens, and {} decode steps follow",
                    length + STEPS - 1,
                    STEPS - 1
                ),
            });
        }
        let mut options = RunnerOptions::for_prompts(lengths, STEPS, longest);
        options.max_positions = options.max_positions.max(perplexity::positions(longest));
        if !options.buckets.contains(&perplexity::bucket(longest)) {
            options.buckets.push(perplexity::bucket(longest));
        }
        options.plan = plan;
        // What the virtual NPU computes depends on a library and on orders that no key knows.
        let cache = if device == "vnpu" { RunCache::off() } else { RunCache::open()? };
        // The virtual NPU computes with emu's kernels.
        let ieee = matches!(device, "emu" | "vnpu");
        let arithmetic = if ieee { Arithmetic::Ieee } else { Arithmetic::Npu2 };
        let (runner, described, records, findings) = Default::default();
        let (device, prompts, alteration) = (device.into(), prompts.to_vec(), Arc::new(Sound));
        let (external, altered) = (None, false);
        Ok(Bench {
            described,
            altered,
            subject,
            device,
            prompts,
            options,
            cache,
            alteration,
            runner,
            external,
            arithmetic,
            records,
            findings,
        })
    }

    /// As it was before its first run.
    fn unused(self) -> Bench {
        let (runner, described, records, findings) = Default::default();
        Bench { runner, described, records, findings, ..self }
    }

    /// The bench with each stage's plan carried out like this.
    #[must_use]
    pub fn tuned(mut self, prefill: Tuning, decode: Tuning) -> Bench {
        (self.options.prefill, self.options.decode) = (prefill, decode);
        self.unused()
    }

    /// What its runner is set up for.
    pub fn options(&self) -> &RunnerOptions {
        &self.options
    }

    /// The bench of a run with altered parts, of which nothing is cached on disk. The judge keeps the sound ones.
    #[must_use]
    pub fn altered(self, alteration: Arc<dyn Alteration>) -> Bench {
        Bench { cache: RunCache::off(), alteration, altered: true, ..self.unused() }
    }

    /// The bench set up for nothing but its prompts' records: the held text, and walks beyond the records, have no room.
    ///
    /// Errors: those of the capture.
    pub fn for_records(mut self) -> Result<Bench> {
        let captured = self.subject.capture()?.prompts().iter().filter(|p| self.prompts.contains(&p.id));
        let longest = self.subject.config.max_position_embeddings;
        let lean = RunnerOptions::for_prompts(captured.map(|p| p.n_prompt), STEPS, longest);
        (self.options.buckets, self.options.max_positions) = (lean.buckets, lean.max_positions);
        Ok(self.unused())
    }

    /// For these prompts, run by another engine instead of a device of ours. Nothing is cached beyond this process.
    ///
    /// Errors: as [`super::external::start`].
    pub fn external(subject: Arc<Subject>, external: &External, prompts: &[String]) -> Result<(Bench, Hello)> {
        let runner = super::external::start(&subject, external)?;
        let hello = runner.hello().clone();
        let bench = Bench::new(subject, "emu", prompts, PlanOptions::default())?;
        let (device, arithmetic) = (LABEL.into(), external.arithmetic);
        Ok((Bench { device, arithmetic, external: Some(Mutex::new(runner)), ..bench }, hello))
    }

    /// Whether another engine than ours makes its records.
    pub fn is_external(&self) -> bool {
        self.external.is_some()
    }

    /// The class of rounding whose limits hold.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// The bench for all captured prompts of a fixture, shared by the cases of this process.
    pub fn shared(model: &str, device: &str) -> Result<Arc<Bench>> {
        type Shared = Mutex<HashMap<(String, String), Arc<Bench>>>;
        static BENCHES: OnceLock<Shared> = OnceLock::new();
        let mut benches = BENCHES.get_or_init(Default::default).lock().unwrap_or_else(PoisonError::into_inner);
        let key = (model.to_owned(), device.to_owned());
        if let Some(bench) = benches.get(&key) {
            return Ok(bench.clone());
        }
        let subject = Subject::shared(model)?;
        let prompts: Vec<String> = subject.capture()?.prompts().iter().map(|p| p.id.clone()).collect();
        let bench = Arc::new(Bench::new(subject, device, &prompts, PlanOptions::default())?);
        benches.insert(key, bench.clone());
        Ok(bench)
    }

    /// A prompt's ids as they reach the runner.
    pub(super) fn altered_prompt(&self, ids: &[u32]) -> Vec<u32> {
        self.alteration.prompt(ids)
    }

    /// Positions that a run may have.
    pub(super) fn capacity(&self) -> usize {
        self.options.max_positions
    }

    pub fn subject(&self) -> &Arc<Subject> {
        &self.subject
    }

    pub fn device(&self) -> &str {
        &self.device
    }

    /// Options of its plans.
    pub fn plan(&self) -> PlanOptions {
        self.options.plan.clone()
    }

    /// Ids of the prompts it is set up for.
    pub fn prompts(&self) -> &[String] {
        &self.prompts
    }

    /// The device's label and what it says of itself; opens a device only to ask, and only before the first run: after
    /// a time-out it could not be opened again.
    ///
    /// Errors: as [`open_device`].
    pub fn describe(&self) -> Result<(String, String)> {
        if let Some(external) = &self.external {
            let external = external.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok((external.info().label.clone(), external.info().description.clone()));
        }
        if let Some(described) = self.described.get() {
            return Ok(described.clone());
        }
        let device = open_device(&self.device)?;
        Ok((device.info().label.clone(), device.info().description.clone()))
    }

    /// The teacher-forced record of a captured prompt, with the taps its lens asks for.
    ///
    /// Errors: those of the runner; nothing is recorded from a run that did not complete.
    pub fn record(&self, prompt: &str) -> Result<Arc<Record>> {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = records.get(prompt) {
            return Ok(record.clone());
        }
        let record = Arc::new(self.cached(prompt)?);
        records.insert(prompt.into(), record.clone());
        Ok(record)
    }

    /// What a prompt's record came to beside its capture, found out once.
    ///
    /// Errors: those of `look`.
    pub(super) fn finding(
        &self,
        prompt: &str,
        look: impl FnOnce() -> Result<PromptFinding>,
    ) -> Result<Arc<PromptFinding>> {
        let findings = || self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = findings().get(prompt) {
            return Ok(found.clone());
        }
        // Not under the lock: other prompts are looked at meanwhile.
        let found = Arc::new(look()?);
        Ok(findings().entry(prompt.into()).or_insert(found).clone())
    }

    /// Frees a prompt's record; what was found stays, and whoever asks for the record has it loaded or run again.
    pub fn release(&self, prompt: &str) {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).remove(prompt);
    }

    /// Takes a record as its own.
    #[cfg(test)]
    pub(super) fn keep(&self, prompt: &str, record: Arc<Record>) {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).remove(prompt);
        self.records.lock().unwrap_or_else(PoisonError::into_inner).insert(prompt.into(), record);
    }

    /// The record from the cache, or from a run. In a process that runs one test only, a run also serves the other
    /// prompts of the set: the processes after this one find theirs and need not set the model up again.
    fn cached(&self, prompt: &str) -> Result<Record> {
        if let Some(external) = &self.external {
            let (captured, taps) = self.wanted(prompt)?;
            let mut external = external.lock().unwrap_or_else(PoisonError::into_inner);
            return external.record(&captured.ids, &captured.chosen, STEPS, &taps);
        }
        let (key, captured) = self.request(prompt)?;
        if let Some(record) = self.cache.get(&key)? {
            return Ok(record);
        }
        let record = self.cache.get_or_run(&key, || self.run(&key, &captured))?;
        if settings::one_test_per_process() {
            let set = |id: &str| id.split('_').next().map(str::to_owned);
            let others = self.prompts.iter().filter(|id| *id != prompt && set(id) == set(prompt));
            for other in others {
                let (key, captured) = self.request(other)?;
                self.cache.get_or_run(&key, || self.run(&key, &captured))?;
            }
        }
        Ok(record)
    }

    /// How many prompts [`Bench::prepare`] decodes side by side at most: more save little, and each has its logits in memory.
    pub fn at_once(&self) -> usize {
        let emulated = matches!(self.device.as_str(), "emu" | "emu_npu2");
        if self.altered || self.external.is_some() || !emulated { 1 } else { AT_ONCE }
    }

    /// Makes the records of these prompts that are not there yet side by side, for [`Bench::record`] to find. The bits are
    /// those of one run after the other; a weight is read once for all of them.
    ///
    /// Errors: as [`Bench::record`].
    pub fn prepare(&self, prompts: &[String]) -> Result<()> {
        if self.at_once() == 1 {
            return Ok(());
        }
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing = vec![];
        for id in prompts {
            if records.contains_key(id) {
                continue;
            }
            let (key, captured) = self.request(id)?;
            match self.cache.get(&key)? {
                Some(record) => drop(records.insert(id.clone(), Arc::new(record))),
                None if captured.ids.len() + STEPS > BESIDE => {}
                None => missing.push((id, key, captured)),
            }
        }
        for group in missing.chunks(self.at_once()).filter(|group| group.len() > 1) {
            let mut made = HashMap::new();
            for (at, (id, key, _)) in group.iter().enumerate() {
                let record = self.cache.get_or_run(key, || {
                    if made.is_empty() {
                        let forced: Vec<Forced<'_>> = group[at..]
                            .iter()
                            .map(|(_, key, captured)| Forced {
                                ids: &captured.ids,
                                teacher: &captured.chosen,
                                taps: &key.taps,
                            })
                            .collect();
                        let side_by_side = self.with_runner(|runner| runner.record_together(&forced, STEPS))?;
                        made.extend((at..).zip(side_by_side));
                    }
                    made.remove(&at).ok_or_else(|| Error::Plan { why: format!("no record of {id}") })
                })?;
                records.insert((*id).clone(), Arc::new(record));
            }
        }
        Ok(())
    }

    fn run(&self, key: &RunKey, captured: &PromptCapture) -> Result<Record> {
        let ids = self.alteration.prompt(&captured.ids);
        let record = self.with_runner(|runner| runner.record(&ids, &captured.chosen, STEPS, &key.taps))?;
        Ok(self.alteration.record(record))
    }

    /// What a prompt's run depends on, and what HF did with it.
    fn request(&self, prompt: &str) -> Result<(RunKey, PromptCapture)> {
        let (captured, taps) = self.wanted(prompt)?;
        Ok((self.key(&captured.ids, &captured.chosen, &taps)?, captured))
    }

    /// What HF did with a prompt, and the rows that its lens compares.
    fn wanted(&self, prompt: &str) -> Result<(PromptCapture, TapRequest)> {
        let capture = self.subject.capture()?;
        let captured = capture.prompt(prompt)?;
        let taps = match capture.lens(prompt)? {
            Some(lens) => TapRequest {
                layer_positions: lens.positions.iter().map(|&p| p as usize).collect(),
                tap_positions: lens.tap_positions.iter().map(|&p| p as usize).collect(),
                kv_positions: lens.kv_positions.iter().map(|&p| p as usize).collect(),
            },
            None => TapRequest::default(),
        };
        Ok((captured, taps))
    }

    /// Lends the runner, set up on first use.
    pub fn with_runner<T>(&self, f: impl FnOnce(&mut NpuRunner) -> Result<T>) -> Result<T> {
        if self.external.is_some() {
            let (what, why) = ("this run".into(), "an external engine has no plan, hooks or buffers of ours".into());
            return Err(Error::Unavailable { what, why });
        }
        let mut runner = self.runner.lock().unwrap_or_else(PoisonError::into_inner);
        let runner = match &mut *runner {
            Some(runner) => runner,
            none => {
                let runner = self.subject.altered_runner(&self.device, &self.options, &*self.alteration)?;
                self.described.get_or_init(|| (runner.info().label.clone(), runner.info().description.clone()));
                none.insert(runner)
            }
        };
        f(runner)
    }

    /// Frees the runner and with it the packed weights; the records stay, and a later run sets it up anew.
    pub fn retire(&self) {
        *self.runner.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// What of the device a record depends on: of an NPU its driver and its kernels.
    fn device_key(&self) -> Result<String> {
        match self.device.as_str() {
            "npu" => self.describe().map(|(label, description)| format!("{label} {description}")),
            emulated => Ok(format!("{emulated} {}", isa()?)),
        }
    }

    fn key(&self, ids: &[u32], teacher: &[u32], taps: &TapRequest) -> Result<RunKey> {
        let config = &self.subject.config;
        let seq_len = npu::bucket(ids.len(), config.max_position_embeddings);
        let hashes = self.subject.checkpoint.tensor_hashes()?;
        let weights: String = hashes.iter().map(|(name, hash)| format!("{name} {hash}\n")).collect();
        Ok(RunKey {
            weights: sha256(weights.as_bytes()),
            plans: vec![
                plan_hash(&self.options.prefill_plan(config, seq_len)?),
                plan_hash(&self.options.decode_plan(config)?),
                format!("{:?} {:?}", self.options.prefill, self.options.decode),
                format!("{:?}", config.rope),
            ],
            device: self.device_key()?,
            ids: ids.to_vec(),
            teacher: teacher.to_vec(),
            steps: STEPS,
            taps: taps.clone(),
            faults: vec![],
        })
    }
}

#[cfg(test)]
mod tests;
