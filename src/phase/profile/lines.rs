//! The lines of a profile: watched steps summed by dispatch, call site, kernel or host op.

use crate::kernel::{Rows, Work};
use crate::plan::{BufferId, HostOp, Launch, Op, Plan, Step};
use crate::runner::StepTime;

/// Launches that are summed in one line. Everything is per call: one prefill, or one token.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub name: String,
    /// The kernels' ids.
    pub kernel: String,
    /// Units: device calls.
    pub calls: f64,
    /// Units: milliseconds.
    pub ms: f64,
    /// What the kernels read and write, of the rows they compute. Units: bytes.
    pub bytes_read: f64,
    pub bytes_written: f64,
    /// Units: operations, a multiply-add counted as two.
    pub flops: f64,
}

impl Line {
    pub fn gflops(&self) -> f64 {
        self.flops / self.ms / 1e6
    }

    /// Units: 10^9 bytes per second, read and written.
    pub fn gbytes(&self) -> f64 {
        (self.bytes_read + self.bytes_written) / self.ms / 1e6
    }
}

/// A host op, summed over its layers; per call.
#[derive(Debug, Clone, PartialEq)]
pub struct HostLine {
    pub name: String,
    pub calls: f64,
    /// Units: milliseconds.
    pub ms: f64,
    /// What it does to the KV cache; none for an op that has nothing to do with it.
    pub work: Option<Work>,
}

/// Watched runs of a plan.
#[derive(Clone, Copy)]
pub(super) struct Runs<'a> {
    pub(super) plan: &'a Plan,
    /// For each step of the plan, the rows that the device computes; none for all.
    pub(super) rows: &'a [Option<Rows>],
    pub(super) steps: &'a [StepTime],
    /// How many runs.
    pub(super) calls: usize,
    /// What all of them took, from outside. Units: microseconds.
    pub(super) wall_us: u64,
    /// Positions in the cache before a run, on the mean, and those that it adds.
    pub(super) cached: f64,
    pub(super) tokens: usize,
}

/// By call site, without its layer: q_proj, attention, lm_head ...
pub(super) fn sites(runs: Runs<'_>) -> Vec<Line> {
    summed(runs, |step| step.launches().iter().map(Launch::site).collect::<Vec<_>>().join("+"))
}

/// By kernel and shape.
pub(super) fn kernels(runs: Runs<'_>) -> Vec<Line> {
    summed(runs, |step| step.launches().iter().map(|l| l.kernel.to_string()).collect::<Vec<_>>().join("+"))
}

/// Every dispatch of the plan.
pub(super) fn dispatches(runs: Runs<'_>) -> Vec<Line> {
    summed(runs, |step| step.name.clone())
}

/// By host op, without its layer. What CPU fallback runs is among them.
pub(super) fn host(runs: Runs<'_>) -> Vec<HostLine> {
    let share = 1.0 / runs.calls.max(1) as f64;
    let mut lines: Vec<HostLine> = vec![];
    for (at, time) in runs.steps.iter().enumerate().filter(|(_, time)| !time.on_device) {
        let step = &runs.plan.steps[at % runs.plan.steps.len()];
        let name = match step.layer {
            Some(_) => time.step.split_once('.').map_or("", |(_, site)| site),
            None => &time.step,
        };
        let line = lines.iter().position(|line| line.name == name).unwrap_or_else(|| {
            lines.push(HostLine { name: name.to_owned(), calls: 0.0, ms: 0.0, work: None });
            lines.len() - 1
        });
        let line = &mut lines[line];
        line.calls += share;
        line.ms += time.ns as f64 / 1e6 * share;
        if let Some(work) = cache_work(&step.op, &runs) {
            let sum = line.work.get_or_insert_default();
            sum.flops += work.flops * share;
            sum.bytes_read += work.bytes_read * share;
            sum.bytes_written += work.bytes_written * share;
        }
    }
    lines
}

/// What an op reads of the KV cache, writes into it and computes over it.
fn cache_work(op: &Op, runs: &Runs<'_>) -> Option<Work> {
    let cols = |id: BufferId| runs.plan.buffer(id).spec.cols as f64;
    let bf16 = size_of::<half::bf16>() as f64;
    match *op {
        Op::Host(HostOp::KvAppend { k, v, .. }) => {
            let bytes = bf16 * (cols(k) + cols(v)) * runs.tokens as f64;
            Some(Work { flops: 0.0, bytes_read: bytes, bytes_written: bytes })
        }
        Op::Host(HostOp::DecodeAttention { layer, q, out }) => {
            let appended = runs.plan.steps.iter().find_map(|step| match step.op {
                Op::Host(HostOp::KvAppend { layer: of, k, v }) if of == layer => Some(cols(k) + cols(v)),
                _ => None,
            });
            // Its own position is in the cache by then.
            let seen = runs.cached + 1.0;
            Some(Work {
                flops: 4.0 * seen * cols(q),
                bytes_read: bf16 * (seen * appended.unwrap_or(0.0) + cols(q)),
                bytes_written: bf16 * cols(out),
            })
        }
        _ => None,
    }
}

/// The device calls, summed by the name of their launches.
fn summed(Runs { plan, rows, steps, calls, .. }: Runs<'_>, name: impl Fn(&Step) -> String) -> Vec<Line> {
    let mut lines: Vec<Line> = vec![];
    // Where each step's line stands, worked out once per plan and not once per run.
    let mut lines_of: Vec<Option<usize>> = vec![];
    for step in &plan.steps {
        let launches = step.launches();
        lines_of.push((!launches.is_empty()).then(|| {
            let name = name(step);
            lines.iter().position(|line| line.name == name).unwrap_or_else(|| {
                let mut ids: Vec<&str> = launches.iter().map(|launch| launch.kernel.id()).collect();
                ids.dedup();
                let kernel = ids.join("+");
                let (calls, ms, bytes_read, bytes_written, flops) = Default::default();
                lines.push(Line { name, kernel, calls, ms, bytes_read, bytes_written, flops });
                lines.len() - 1
            })
        }));
    }
    let share = 1.0 / calls.max(1) as f64;
    for (at, time) in steps.iter().enumerate() {
        let step = &plan.steps[at % plan.steps.len()];
        let Some(line) = lines_of[at % plan.steps.len()].filter(|_| time.on_device && step.name == time.step) else {
            continue;
        };
        let line = &mut lines[line];
        line.calls += share;
        line.ms += time.ns as f64 / 1e6 * share;
        for kernel in step.launches().iter().map(|launch| &launch.kernel) {
            let work = kernel.work(rows[at % plan.steps.len()]);
            line.bytes_read += work.bytes_read * share;
            line.bytes_written += work.bytes_written * share;
            line.flops += work.flops * share;
        }
    }
    lines.retain(|line| line.calls > 0.0);
    lines
}
