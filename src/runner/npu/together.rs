//! Several sequences decoded side by side: each step of the plan for all of them, then the next step.
//!
//! Each has its own intermediates and KV cache and runs production's own dispatches; they only share the weights. A device
//! that reads a weight once for all of them saves most of a decode step, whose time is that of reading weights.

use std::time::Instant;

use half::bf16;

use super::{Lane, NpuRunner};
use crate::error::{Error, Result};
use crate::runner::compiled::compile;
use crate::runner::execute::Span;
use crate::runner::external::protocol::Taps;
use crate::runner::greedy::{Made, check_teacher};
use crate::runner::{KvCache, Record, Runner, TapRequest};

/// A teacher-forced run that is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Forced<'a> {
    pub ids: &'a [u32],
    pub teacher: &'a [u32],
    pub taps: &'a TapRequest,
}

impl NpuRunner {
    /// [`NpuRunner::record`] of several prompts, bit for bit, decoded side by side. Where a hook looks on they run one after
    /// the other: it has to see every step of each.
    ///
    /// A record's decode time is that of the whole step, [`at_once`](crate::runner::StepTiming) says of how many sequences.
    /// Errors: as `record`; then there is no record of any.
    pub fn record_together(&mut self, wanted: &[Forced<'_>], steps: usize) -> Result<Vec<Record>> {
        if wanted.len() < 2 || !self.hooks.is_empty() {
            return wanted.iter().map(|run| self.record(run.ids, run.teacher, steps, run.taps)).collect();
        }
        for run in wanted {
            check_teacher(run.teacher, steps)?;
            self.check_ids(&run.teacher[..steps - 1])?;
        }
        let positions = wanted.iter().skip(1).map(|run| run.ids.len() + steps - 1).max().unwrap_or(0);
        self.make_lanes(wanted.len(), positions)?;
        let mut made: Vec<(Made, Taps)> = vec![];
        for (lane, run) in wanted.iter().enumerate() {
            let before = self.counters();
            let begin = |runner: &mut NpuRunner| {
                let started = Instant::now();
                runner.prefill_in(lane, run.ids).map(|logits| Made::prefilled(run.ids, &logits, steps, started))
            };
            let (mut prefilled, taps) = self.tapped(run.taps, begin)?;
            prefilled.counters = self.counters().since(before);
            made.push((prefilled, taps));
        }
        for step in 0..steps - 1 {
            let spans: Vec<Span> = wanted
                .iter()
                .map(|run| Span { ids: &run.teacher[step..=step], position: run.ids.len() + step })
                .collect();
            let (before, started) = (self.counters(), Instant::now());
            let logits = self.decode_together(&spans)?;
            // One plan in every lane: each has done the same.
            let counters = self.counters().since(before).share_of(spans.len() as u64).ok_or_else(|| Error::Device {
                device: self.info().label.clone(),
                why: "sequences side by side did not cost the same".into(),
            })?;
            for (((made, _), logits), span) in made.iter_mut().zip(logits).zip(&spans) {
                made.decoded(span.ids[0], &logits, started);
                made.counters += counters;
            }
        }
        let device = self.info().label.clone();
        let records = made.into_iter().zip(&self.lanes).zip(wanted).map(|(((mut made, mut taps), lane), run)| {
            made.timing.at_once = wanted.len();
            taps.extend(lane.kv_taps(&run.taps.kv_positions));
            Ok(Record { taps, ..made.record(&device)? })
        });
        records.collect()
    }

    /// Lanes there are.
    #[cfg(test)]
    pub(in crate::runner) fn lanes_made(&self) -> usize {
        self.lanes.len()
    }

    /// Lanes enough for `count` sequences, those after the first with room for `positions`.
    fn make_lanes(&mut self, count: usize, positions: usize) -> Result<()> {
        while self.lanes.len() < count {
            let plan = self.lanes[0].decode.plan.clone();
            let (device, weights) = (&mut *self.device, &*self.weights);
            let decode = compile(plan, &self.decode, device, weights, &self.rope, &mut self.statics)?;
            self.lanes.push(Lane { decode, kv: KvCache::new(&self.config, 0, self.host.pool()) });
        }
        for lane in &mut self.lanes[1..count] {
            if lane.kv.capacity() < positions {
                // The old one goes before the new one comes.
                lane.kv = KvCache::new(&self.config, 0, self.host.pool());
                lane.kv = KvCache::new(&self.config, positions, self.host.pool());
            }
        }
        Ok(())
    }

    /// One decode step in each of the first lanes: one `span` each.
    fn decode_together(&mut self, spans: &[Span<'_>]) -> Result<Vec<Vec<bf16>>> {
        for index in 0..self.decode_plan().steps.len() {
            let dispatches = self.lanes[..spans.len()].iter().map(|lane| lane.decode.dispatches[index]);
            match dispatches.collect::<Option<Vec<_>>>() {
                Some(dispatches) => {
                    for (lane, &span) in spans.iter().enumerate() {
                        self.begun(lane, None, span).hand_over_all(index)?;
                    }
                    self.device.run_all(&dispatches)?;
                }
                None => {
                    for (lane, &span) in spans.iter().enumerate() {
                        self.begun(lane, None, span).step(index)?;
                    }
                }
            }
        }
        let read = |(lane, &span): (usize, &Span<'_>)| {
            let mut run = self.begun(lane, None, span);
            run.read(run.compiled.plan.logits)
        };
        spans.iter().enumerate().map(read).collect()
    }
}
