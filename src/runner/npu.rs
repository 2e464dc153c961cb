//! The production runner: a plan's steps on a device, with the KV cache and the host ops beside it.
//!
//! Setup uploads every static buffer and prepares every dispatch; after it, prefill and decode make no buffer, pack no
//! weight and upload nothing but their inputs. Everything that uses a model uses this type.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use half::bf16;

use super::compiled::{Compiled, compile};
use super::execute::{Run, Span};
use super::external::{Served, protocol::Taps};
use super::host::HostKernels;
use super::kv::KvCache;
use super::{Alteration, Record, Runner, SharedHook, Sound, TapRecorder, TapRequest, teacher_forced};
use crate::compute::{Isa, Pool};
use crate::device::{BufferHandle, Counters, Device, DeviceInfo};
use crate::error::{Error, Result};
use crate::kernel::Rows;
use crate::model::{ModelConfig, RopeTable, Weights};
use crate::plan::{self, Plan, PlanOptions, Source, Tuning};

mod together;

pub use together::Forced;

/// The table that rows are looked up in.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// What a runner is set up for.
#[derive(Debug, Clone)]
pub struct RunnerOptions {
    /// Padded prompt lengths to prepare a prefill for. Units: positions.
    pub buckets: Vec<usize>,
    /// Positions the KV cache holds: the longest prompt plus the tokens decoded after it.
    pub max_positions: usize,
    pub plan: PlanOptions,
    /// How each stage's plan is carried out.
    pub prefill: Tuning,
    pub decode: Tuning,
    /// Fill every intermediate with NaN before each prefill, so that a stale value cannot pass for a fresh one.
    pub poison: bool,
}

impl RunnerOptions {
    /// Enough for prompts of these lengths, each followed by `steps` tokens.
    pub fn for_prompts(lengths: impl IntoIterator<Item = usize>, steps: usize, max_positions: usize) -> RunnerOptions {
        let lengths: Vec<usize> = lengths.into_iter().collect();
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let mut buckets: Vec<usize> = lengths.into_iter().map(|n| bucket(n, max_positions)).collect();
        buckets.sort_unstable();
        buckets.dedup();
        let capacity = longest.saturating_add(steps).min(max_positions.max(longest));
        let (plan, tuning) = (PlanOptions::default(), Tuning::default());
        RunnerOptions { buckets, max_positions: capacity, plan, prefill: tuning, decode: tuning, poison: true }
    }

    /// The plan of a prefill of `seq_len` positions.
    ///
    /// Errors: [`Error::Plan`].
    pub fn prefill_plan(&self, config: &ModelConfig, seq_len: usize) -> Result<Plan> {
        self.prefill.apply(plan::prefill(config, seq_len, &self.plan)?)
    }

    /// The plan of a decode step.
    ///
    /// Errors: [`Error::Plan`].
    pub fn decode_plan(&self, config: &ModelConfig) -> Result<Plan> {
        self.decode.apply(plan::decode(config, &self.plan)?)
    }
}

/// The padded length a prompt of `len` runs in: a power of two from 16 to 64, then a multiple of 64.
pub fn bucket(len: usize, max_positions: usize) -> usize {
    let padded = if len <= 64 { len.next_power_of_two().max(16) } else { len.next_multiple_of(64) };
    padded.min(max_positions.max(len))
}

/// A model set up on a device.
pub struct NpuRunner {
    config: ModelConfig,
    weights: Arc<dyn Weights>,
    rope: RopeTable,
    device: Box<dyn Device>,
    host: HostKernels,
    prefill: BTreeMap<usize, Compiled>,
    /// The first is where everything runs; more are made for sequences that decode side by side.
    lanes: Vec<Lane>,
    decode: Tuning,
    /// Buffers that all plans share.
    statics: HashMap<(Source, usize), BufferHandle>,
    hooks: Vec<SharedHook>,
    poison: bool,
    pad_id: u32,
}

/// What a sequence needs for itself: its decode step's intermediates and its KV cache.
pub(super) struct Lane {
    decode: Compiled,
    kv: KvCache,
}

impl NpuRunner {
    /// Uploads the weights, prepares the dispatches, allocates the KV cache.
    ///
    /// Errors: from the plan, the weights or the device; nothing is left half set up.
    pub fn new(
        config: ModelConfig,
        weights: Arc<dyn Weights>,
        device: Box<dyn Device>,
        host: (Arc<Pool>, Isa),
        options: &RunnerOptions,
    ) -> Result<NpuRunner> {
        NpuRunner::altered(config, weights, device, host, options, &Sound)
    }

    /// [`NpuRunner::new`] with parts that an alteration replaces.
    ///
    /// Errors: as [`NpuRunner::new`].
    pub fn altered(
        mut config: ModelConfig,
        weights: Arc<dyn Weights>,
        device: Box<dyn Device>,
        (pool, isa): (Arc<Pool>, Isa),
        options: &RunnerOptions,
        alteration: &dyn Alteration,
    ) -> Result<NpuRunner> {
        alteration.config(&mut config);
        let weights = alteration.weights(weights)?;
        let mut device = alteration.device(device);
        // Only rows of it are read later: what is wrong with any other is said now, as of every other tensor.
        drop(weights.bf16(EMBEDDING)?);
        let rope = RopeTable::new(&config);
        let host = HostKernels::new(&config, &*weights, pool, isa)?;
        let mut statics = HashMap::new();
        let mut compile = |mut plan: Plan, tuning: &Tuning| {
            alteration.plan(&mut plan);
            compile(plan, tuning, &mut *device, &*weights, &rope, &mut statics)
        };
        let decode = compile(options.decode_plan(&config)?, &options.decode)?;
        let mut prefill = BTreeMap::new();
        for &seq_len in &options.buckets {
            prefill.insert(seq_len, compile(options.prefill_plan(&config, seq_len)?, &options.prefill)?);
        }
        let kv = KvCache::new(&config, options.max_positions, host.pool());
        let lanes = vec![Lane { decode, kv }];
        let pad_id = config.eos_token_ids.first().copied().unwrap_or(0);
        let poison = options.poison;
        let hooks = alteration.hooks();
        let decode = options.decode;
        Ok(NpuRunner { config, weights, rope, device, host, prefill, lanes, decode, statics, hooks, poison, pad_id })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn kv(&self) -> &KvCache {
        &self.lanes[0].kv
    }

    /// The plans this runner executes: the decode step and one prefill per bucket.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        std::iter::once(self.decode_plan()).chain(self.prefill.values().map(|c| &c.plan))
    }

    /// The plan of a decode step.
    pub fn decode_plan(&self) -> &Plan {
        &self.lanes[0].decode.plan
    }

    /// The prefill plan that a prompt of `len` tokens would run.
    ///
    /// Errors: [`Error::Usage`] when no bucket is long enough.
    pub fn prefill_plan(&self, len: usize) -> Result<&Plan> {
        Ok(&self.bucket_for(len)?.1.plan)
    }

    /// Shows every later step to `hook`, after those already there.
    pub fn add_hook(&mut self, hook: SharedHook) {
        self.hooks.push(hook);
    }

    /// Lends the runner with one more hook, which is gone afterwards.
    pub fn with_hook<T>(&mut self, hook: SharedHook, f: impl FnOnce(&mut NpuRunner) -> T) -> T {
        self.hooks.push(hook);
        let result = f(self);
        self.hooks.pop();
        result
    }

    pub fn clear_hooks(&mut self) {
        self.hooks.clear();
    }

    /// For each step of the prefill of `len` tokens, the rows that its dispatch computes where nobody looks into the run; none for
    /// all of them.
    ///
    /// Errors: as [`NpuRunner::prefill_plan`].
    pub fn rows_computed(&self, len: usize) -> Result<Vec<Option<Rows>>> {
        let (_, compiled) = self.bucket_for(len)?;
        let cuts = self.device.cuts_rows();
        Ok((0..compiled.plan.steps.len()).map(|step| compiled.rows(step, len).filter(|_| cuts)).collect())
    }

    /// A teacher-forced run that also keeps the rows `request` names.
    ///
    /// Taps: `lNN.output`, `l00.<tap>` from prefill; `final_norm` at the layer positions (the final norm of the last
    /// layer's rows); `lNN.k_cache` and `lNN.v_cache` as they stand at the end.
    /// Errors: as [`teacher_forced`].
    pub fn record(&mut self, ids: &[u32], teacher: &[u32], steps: usize, request: &TapRequest) -> Result<Record> {
        let (record, taps) = self.tapped(request, |runner| teacher_forced(runner, ids, teacher, steps))?;
        let mut record = Record { taps, ..record };
        record.taps.extend(self.lanes[0].kv_taps(&request.kv_positions));
        Ok(record)
    }

    /// Runs `run` and keeps the rows that `request` names of its prefill, the final norm's among them.
    fn tapped<T>(&mut self, request: &TapRequest, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, Taps)> {
        if request.is_empty() {
            return Ok((run(self)?, Taps::new()));
        }
        let recorder = Arc::new(Mutex::new(TapRecorder::new(request.clone())));
        let result = self.with_hook(recorder.clone(), run)?;
        let mut taps = recorder.lock().unwrap_or_else(|e| e.into_inner()).taps().clone();
        let last = format!("l{:02}.output", self.config.num_hidden_layers - 1);
        if let Some(rows) = taps.get(&last) {
            let mut normed = rows.clone();
            for mut row in normed.rows_mut() {
                let out = self.host.final_norm(&row.to_vec());
                row.assign(&ndarray::ArrayView1::from(&out));
            }
            taps.insert("final_norm".into(), normed);
        }
        Ok((result, taps))
    }

    fn bucket_for(&self, len: usize) -> Result<(usize, &Compiled)> {
        let found = self.prefill.range(len..).next().map(|(&n, c)| (n, c));
        found.filter(|_| len > 0).ok_or_else(|| Error::Usage {
            what: "prompt length".into(),
            found: len.to_string(),
            expected: format!("1 to {} positions", self.prefill.keys().next_back().copied().unwrap_or(0)),
        })
    }

    /// A plan on its way over `span`: a prefill of a bucket, or a decode step, in one of the lanes.
    fn begun<'a>(&'a mut self, lane: usize, seq_len: Option<usize>, span: Span<'a>) -> Run<'a> {
        let Lane { decode, kv } = &mut self.lanes[lane];
        Run {
            config: &self.config,
            weights: &*self.weights,
            rope: &self.rope,
            device: &mut *self.device,
            host: &self.host,
            kv,
            compiled: seq_len.map_or(decode, |n| &self.prefill[&n]),
            span,
            pad_id: self.pad_id,
            whole: self.hooks.iter().any(|hook| hook.lock().unwrap_or_else(|e| e.into_inner()).reads_rows()),
        }
    }

    /// Runs every step of one plan over `span`.
    fn execute(&mut self, lane: usize, seq_len: Option<usize>, span: Span<'_>) -> Result<Vec<bf16>> {
        let hooks = self.hooks.clone();
        let poison = self.poison && seq_len.is_some();
        let mut run = self.begun(lane, seq_len, span);
        if poison {
            run.poison_intermediates()?;
        }
        for index in 0..run.compiled.plan.steps.len() {
            for hook in &hooks {
                hook.lock().unwrap_or_else(|e| e.into_inner()).before_step(&mut run.context(index))?;
            }
            run.step(index)?;
            for hook in &hooks {
                hook.lock().unwrap_or_else(|e| e.into_inner()).after_step(&mut run.context(index))?;
            }
        }
        run.read(run.compiled.plan.logits)
    }

    fn prefill_in(&mut self, lane: usize, ids: &[u32]) -> Result<Vec<bf16>> {
        let (seq_len, _) = self.bucket_for(ids.len())?;
        self.check_ids(ids)?;
        self.lanes[lane].kv.restart(ids.len());
        self.execute(lane, Some(seq_len), Span { ids, position: 0 })
    }
}

impl Lane {
    /// The KV rows at those of `positions` that are there.
    fn kv_taps(&self, positions: &[usize]) -> Taps {
        let kv = &self.kv;
        let positions: Vec<usize> = positions.iter().copied().filter(|&p| p < kv.len(0)).collect();
        let dim = kv.kv_dim();
        let mut taps = Taps::new();
        for layer in (0..kv.layers()).filter(|_| !positions.is_empty()) {
            let (keys, values) = kv.rows_at(layer, positions.iter().copied());
            for (name, rows) in [("k_cache", keys), ("v_cache", values)] {
                let rows = ndarray::Array2::from_shape_vec((positions.len(), dim), rows).expect("rows of one width");
                taps.insert(format!("l{layer:02}.{name}"), rows);
            }
        }
        taps
    }
}

impl Runner for NpuRunner {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn prefill(&mut self, ids: &[u32]) -> Result<Vec<bf16>> {
        self.prefill_in(0, ids)
    }

    fn decode_step(&mut self, token: u32, position: usize) -> Result<Vec<bf16>> {
        self.check_ids(&[token])?;
        self.execute(0, None, Span { ids: &[token], position })
    }

    fn counters(&self) -> Counters {
        self.device.counters()
    }
}

impl Served for NpuRunner {
    fn prefill_with_layers(&mut self, ids: &[u32], positions: &[usize]) -> Result<(Vec<bf16>, Taps)> {
        self.check_positions(positions, ids.len())?;
        let request = TapRequest { layer_positions: positions.to_vec(), ..TapRequest::default() };
        self.tapped(&request, |runner| runner.prefill(ids))
    }

    fn kv_rows(&mut self, positions: &[usize]) -> Result<Taps> {
        self.check_positions(positions, self.kv().len(0))?;
        Ok(self.lanes[0].kv_taps(positions))
    }
}

impl NpuRunner {
    fn check_positions(&self, positions: &[usize], end: usize) -> Result<()> {
        match positions.iter().find(|&&p| p >= end) {
            None => Ok(()),
            Some(p) => Err(Error::Usage {
                what: "position".into(),
                found: p.to_string(),
                expected: format!("less than {end}, the positions there are"),
            }),
        }
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.config.vocab_size) {
            None => Ok(()),
            Some(id) => Err(Error::Usage {
                what: "token id".into(),
                found: id.to_string(),
                expected: format!("less than vocab_size {}", self.config.vocab_size),
            }),
        }
    }
}
