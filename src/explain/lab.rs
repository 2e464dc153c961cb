//! A model that can be set up on any device, sound or altered, as often as an explanation needs it.

use std::sync::{Arc, Mutex, PoisonError};

use super::trace::{Recorder, Stage, Trace};
use crate::compute::{Isa, Pool};
use crate::device::Device;
use crate::error::Result;
use crate::model::{ModelConfig, Weights};
use crate::plan::PlanOptions;
use crate::runner::{Alteration, NpuRunner, Runner, RunnerOptions};

/// Opens a device by its label.
pub type Open = fn(&str) -> Result<Box<dyn Device>>;

/// What a model is made of, and where it can run.
#[derive(Clone)]
pub struct Lab {
    pub config: ModelConfig,
    pub weights: Arc<dyn Weights>,
    pub pool: Arc<Pool>,
    pub isa: Isa,
    pub open: Open,
    pub plan: PlanOptions,
}

/// What is run: two prompts, of which the second is looked at (a stale value shows only behind another run), then decode
/// steps with given tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    pub before: Vec<u32>,
    pub ids: Vec<u32>,
    /// Token fed at each decode step.
    pub teacher: Vec<u32>,
    /// Positions of the prompt whose rows are kept.
    pub positions: Vec<usize>,
}

/// Positions that a script keeps: borders of blocks, tables and tiles, and the ends.
const BORDERS: [usize; 18] = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 127, 128, 129, 257, 300, 511, 512];

/// Prompts of up to this many tokens are kept whole.
const SHORT: usize = 32;

impl Script {
    /// The prompt `ids`, with the first tokens of it in other order before, and `teacher` behind.
    pub fn new(ids: &[u32], teacher: &[u32]) -> Script {
        let before = ids.iter().rev().take(12).copied().collect();
        let every = if ids.len() <= SHORT { ids.len() } else { 0 };
        let mut positions: Vec<usize> = BORDERS.into_iter().filter(|&p| p < ids.len()).chain(0..every).collect();
        positions.extend([ids.len() * 3 / 4, ids.len().saturating_sub(2), ids.len() - 1]);
        positions.sort_unstable();
        positions.dedup();
        Script { before, ids: ids.to_vec(), teacher: teacher.to_vec(), positions }
    }

    /// All ids that end up in the sequence.
    pub fn sequence(&self) -> Vec<u32> {
        self.ids.iter().chain(&self.teacher).copied().collect()
    }
}

impl Lab {
    /// A runner for a script.
    ///
    /// Errors: those of setting it up.
    pub fn runner(&self, device: &str, script: &Script, alteration: &dyn Alteration) -> Result<NpuRunner> {
        let lengths = [script.before.len(), script.ids.len(), alteration.prompt(&script.ids).len()];
        let steps = script.teacher.len() + 1;
        let most = self.config.max_position_embeddings;
        let options = RunnerOptions {
            plan: self.plan.clone(),
            ..RunnerOptions::for_prompts(lengths.into_iter().filter(|&n| n > 0), steps, most)
        };
        let host = (self.pool.clone(), self.isa);
        NpuRunner::altered(self.config.clone(), self.weights.clone(), (self.open)(device)?, host, &options, alteration)
    }

    /// Runs a script and keeps every launch's rows.
    ///
    /// Errors: those of the run, which are part of what an altered run shows.
    pub fn trace(&self, device: &str, script: &Script, alteration: &dyn Alteration) -> Result<Trace> {
        trace(&mut self.runner(device, script, alteration)?, script, alteration)
    }
}

/// Runs a script on a runner, with the hooks it has.
///
/// Errors: those of the run.
pub(super) fn trace(runner: &mut NpuRunner, script: &Script, alteration: &dyn Alteration) -> Result<Trace> {
    if !script.before.is_empty() {
        runner.prefill(&alteration.prompt(&script.before))?;
        if let Some(&token) = script.before.first() {
            runner.decode_step(token, script.before.len())?;
        }
    }
    let recorder = Arc::new(Mutex::new(Recorder { positions: script.positions.clone(), trace: Trace::default() }));
    let ids = alteration.prompt(&script.ids);
    runner.with_hook(recorder.clone(), |runner| {
        runner.prefill(&ids)?;
        for (step, &token) in script.teacher.iter().enumerate() {
            runner.decode_step(token, ids.len() + step)?;
        }
        Ok(())
    })?;
    let mut trace = std::mem::take(&mut recorder.lock().unwrap_or_else(PoisonError::into_inner).trace);
    let decoded = ids.len()..ids.len() + script.teacher.len();
    for layer in 0..runner.kv().layers() {
        let positions = script.positions.iter().copied().chain(decoded.clone());
        trace.push_cache(Stage::End, runner.kv(), layer, positions);
    }
    Ok(trace)
}
