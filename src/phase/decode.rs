//! Phase 3's question about decode alone: the logits of a decode step are those of a prefill that ends there.
//!
//! The limit is HF's own: how far its bf16 prefill is from its bf16 decode, in the capture. On the NPU the two are not the
//! same arithmetic (block products and f32 sums of squares against neither), and the limit is wider by what its class may
//! differ from HF at all.

use half::bf16;
use ndarray::Array2;

use super::{Bench, Finding, limits};
use crate::check::tolerance::at_most;
use crate::check::{Extent, Metrics, Summary, Verdict};
use crate::device::Arithmetic;
use crate::error::Result;
use crate::runner::{NpuRunner, Runner};

/// As far as logits that have nothing in common with the others.
const UNRELATED: f64 = 1.0;

/// Times HF's own distance, by the device's arithmetic. KL grows with the square of the distance of the logits, so a class
/// that may be x times the floor in KL may be the root of x times in distance. As with KL that is known of the median; a
/// single position of that class beyond it is a warning, unless its logits are [`UNRELATED`].
fn factor(bench: &Bench) -> Result<f64> {
    let layers = bench.subject().config.num_hidden_layers;
    let same_kernels = limits::of(limits::Gate::Decode, Arithmetic::Ieee, layers)?;
    Ok(match bench.arithmetic() {
        Arithmetic::Ieee => same_kernels,
        Arithmetic::Npu2 => same_kernels * limits::required(bench, limits::Gate::KlMedian)?.sqrt(),
    })
}

/// Runs of consecutive positions, each decoded in one go behind a prefill: the first tokens, both sides of a block of
/// 128 rows, and both sides of 512.
const RUNS: [(usize, usize); 3] = [(1, 41), (127, 130), (511, 514)];

/// HF's relative L2 between one prefill and decode, over all captured prompts and steps.
///
/// Errors: those of reading the capture.
pub fn hf_distance(bench: &Bench) -> Result<Summary> {
    let capture = bench.subject().capture()?;
    let mut all = vec![];
    for prompt in capture.prompts() {
        all.extend(capture.prompt(&prompt.id)?.rel_l2.column(1).iter().map(|&x| f64::from(x)));
    }
    Ok(Summary::of(&all))
}

/// Token ids to walk over: the longest captured prompt, repeated where it is too short.
///
/// Errors: those of reading the capture.
pub fn text(bench: &Bench, len: usize) -> Result<Vec<u32>> {
    let capture = bench.subject().capture()?;
    let longest = capture.prompts().iter().max_by_key(|p| p.n_prompt).map(|p| p.id.as_str()).unwrap_or_default();
    Ok(capture.prompt(longest)?.ids.into_iter().cycle().take(len).collect())
}

/// Relative L2 over the vocabulary of decode against prefill at positions `from..to`: a prefill of `from` tokens, then
/// one decode step per position, each against a prefill of `position + 1` tokens.
///
/// Shapes: ids `[>= to]`, result `[to - from]`.
/// Errors: those of the runner.
pub fn distances(runner: &mut NpuRunner, ids: &[u32], (from, to): (usize, usize)) -> Result<Vec<f64>> {
    runner.prefill(&ids[..from])?;
    let decoded = (from..to).map(|p| runner.decode_step(ids[p], p)).collect::<Result<Vec<_>>>()?;
    let distance = |(p, decoded): (usize, Vec<bf16>)| {
        let prefilled = runner.prefill(&ids[..=p])?;
        Ok(Metrics::measure(row(&decoded).view(), row(&prefilled).view())?.rel_l2)
    };
    (from..to).zip(decoded).map(distance).collect()
}

fn row(logits: &[bf16]) -> Array2<f32> {
    Array2::from_shape_fn((1, logits.len()), |(_, i)| logits[i].to_f32())
}

/// Decode equals prefill at the first positions and around block borders, within HF's own distance.
///
/// Errors: those of the runner and the capture.
pub fn case(bench: &Bench) -> Result<Finding> {
    over(bench, &RUNS)
}

/// [`case`] over these runs of positions.
///
/// Errors: those of the runner and the capture.
pub fn over(bench: &Bench, runs: &[(usize, usize)]) -> Result<Finding> {
    let end = bench.subject().config.max_position_embeddings;
    let wanted = runs.iter().filter(|(_, to)| *to <= end).map(|(from, to)| to - from).sum();
    judge(bench, &walk(bench, runs)?, wanted)
}

/// Position and distance, over these runs of positions as far as the model has them.
///
/// Errors: those of the runner and the capture.
pub fn walk(bench: &Bench, runs: &[(usize, usize)]) -> Result<Vec<(usize, f64)>> {
    let end = bench.subject().config.max_position_embeddings;
    let runs: Vec<_> = runs.iter().copied().filter(|&(_, to)| to <= end).collect();
    let ids = text(bench, runs.iter().map(|&(_, to)| to).max().unwrap_or(0))?;
    let mut found = vec![];
    for &run in &runs {
        let distances = bench.with_runner(|runner| distances(runner, &ids, run))?;
        found.extend((run.0..run.1).zip(distances));
    }
    Ok(found)
}

/// The farthest that one position may be, and the median.
///
/// Errors: as [`hf_distance`].
pub fn limits(bench: &Bench) -> Result<(f64, f64)> {
    let (hf, factor) = (hf_distance(bench)?, factor(bench)?);
    Ok((factor * hf.max, factor * hf.median))
}

/// Judges what [`walk`] found, of which `wanted` positions must be there.
///
/// Errors: those of the capture.
pub fn judge(bench: &Bench, found: &[(usize, f64)], wanted: usize) -> Result<Finding> {
    let (most, median) = limits(bench)?;
    let of_all = Summary::of(&found.iter().map(|&(_, distance)| distance).collect::<Vec<_>>());
    let over = found.iter().filter(|&&(_, distance)| !at_most(distance, most));
    let binding = |distance: f64| bench.arithmetic() == Arithmetic::Ieee || !at_most(distance, UNRELATED);
    let (mut failures, mut warnings) = (vec![], vec![]);
    for &(p, distance) in over {
        let why = format!("position {p}: relative L2 {distance:.5} between decode and prefill, at most {most:.5}");
        if binding(distance) { failures.push(why) } else { warnings.push(why) }
    }
    if !at_most(of_all.median, median) {
        failures
            .push(format!("median relative L2 {:.5} between decode and prefill, at most {median:.5}", of_all.median));
    }
    let extent = Extent::new().require("positions", wanted as u64).compare("positions", found.len() as u64);
    Ok(Finding::of(warnings.into_iter().fold(Verdict::judge(failures, extent), Verdict::warn)))
}
