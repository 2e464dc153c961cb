//! Every gate of phases 0 to 3, asked about one injected run.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Sighting;
use super::locate::{self, Place};
use crate::check::Verdict;
use crate::error::Result;
use crate::fault::{Fault, Gate, Injection, Kind};
use crate::kernel::Kernel;
use crate::phase::devices::open_device;
use crate::phase::needs::needs;
use crate::phase::{Bench, Subject, added, decode, kv_rows, perplexity, phase0, phase1, phase2, phase3, positions};
use crate::plan::PlanOptions;
use crate::runner::Alteration;

/// Kernels of one id that phase 1 is run on.
const SHAPES: usize = 2;

/// Positions of the prefill whose launches phase 1 takes.
const PREFILL: usize = 64;

/// Positions that decode is walked over, within the shortest buckets.
pub(super) const WALK: &[(usize, usize)] = &[(1, 32)];

/// Tokens of the held text.
pub(super) const TOKENS: usize = 160;

type Gates = BTreeMap<Gate, Sighting>;

/// Asks every gate that can be asked, and looks where the lenses point.
///
/// Errors: what is wrong with the sound model; never what the fault does.
pub(super) fn of_fault(fault: &Arc<Fault>, bench: &Bench, prompts: &[String]) -> Result<(Gates, Place)> {
    let subject = bench.subject();
    let mut gates = Gates::new();
    let mut place = Place::default();
    if let Injection::Config(_) = fault.entry.injection {
        gates.insert(Gate::Phase0, phase0_of(fault, subject));
    }
    if fault.entry.is_kernel() {
        let (sighting, kernel) = phase1_of(fault, subject, bench.device())?;
        gates.insert(Gate::Phase1, sighting);
        place.kernel = kernel;
    }
    for id in prompts {
        if let Err(error) = bench.record(id) {
            gates.insert(Gate::Refused, Sighting::refused(&error));
            return Ok((gates, place));
        }
    }
    let lens = subject.capture()?.lens_prompts().to_vec();
    let (asked, walked) = of_run(bench, prompts, &lens)?;
    gates.extend(asked);
    if fault.entry.kind != Kind::Input {
        locate::look(bench, &lens, &walked, &mut place)?;
    }
    Ok((gates, place))
}

/// Position and distance of decode from prefill.
pub(super) type Walked = Vec<(usize, f64)>;

/// Phases 2 and 3 on a bench, and what walking decode over [`WALK`] found. A gate that cannot be carried out has refused.
///
/// Errors: those of the capture.
pub(super) fn of_run(bench: &Bench, prompts: &[String], lens: &[String]) -> Result<(Gates, Walked)> {
    let whole: Vec<String> = added::prompts(bench)?.into_iter().filter(|id| lens.contains(id)).collect();
    let of_all = |gate: &dyn Fn(&String) -> Result<Verdict>, ids: &[String]| -> Result<Verdict> {
        Ok(Verdict::all(ids.iter().map(gate).collect::<Result<Vec<_>>>()?))
    };
    let mut gates = Gates::new();
    let mut ask = |gate: Gate, verdict: Result<Verdict>| {
        gates.insert(gate, verdict.as_ref().map_or_else(Sighting::refused, Sighting::of));
    };
    if !lens.is_empty() {
        ask(Gate::Block, of_all(&|id| Ok(phase2::block(bench, id)?.verdict), lens));
        ask(Gate::Noise, of_all(&|id| Ok(phase3::noise(bench, id)?.verdict), lens));
        ask(Gate::Positions, positions::judge(bench, lens).map(|f| f.verdict));
        ask(Gate::Kv, kv_rows::judge(bench, lens).map(|f| f.verdict));
    }
    if !whole.is_empty() {
        ask(Gate::Added, added::judge(bench, &whole).map(|f| f.verdict));
    }
    ask(Gate::TokenSet, of_all(&|id| Ok(phase3::prompt(bench, id)?.verdict.clone()), prompts));
    ask(Gate::Agreement, phase3::agreement(bench, prompts));
    ask(Gate::Kl, phase3::kl(bench, prompts).map(|f| f.verdict));
    let walked = decode::walk(bench, WALK);
    let wanted = WALK.iter().map(|(from, to)| to - from).sum();
    let judged = match &walked {
        Ok(walked) => {
            decode::judge(bench, walked, wanted).as_ref().map_or_else(Sighting::refused, |f| Sighting::of(&f.verdict))
        }
        Err(error) => Sighting::refused(error),
    };
    ask(Gate::Perplexity, perplexity::judge(bench, TOKENS).map(|f| f.verdict));
    gates.insert(Gate::Decode, judged);
    Ok((gates, walked.unwrap_or_default()))
}

/// Phase 0 of a checkpoint whose config is read as the fault has it.
fn phase0_of(fault: &Fault, subject: &Subject) -> Sighting {
    let altered = || {
        let mut altered = Subject::unaccounted(&subject.root, &subject.name, None)?;
        fault.config(&mut altered.config);
        phase0::verdict(&Arc::new(altered))
    };
    match altered() {
        Ok(verdict) => joined(&verdict),
        Err(error) => Sighting::refused(&error),
    }
}

/// All reasons as one: the key that is named may be any of them.
fn joined(verdict: &Verdict) -> Sighting {
    Sighting { reason: verdict.reasons().join("; "), ..Sighting::of(verdict) }
}

/// Phase 1 on the model's own shapes of the fault's kernels, and the name of the first that fails; a kernel that is not
/// the fault's must pass.
fn phase1_of(fault: &Arc<Fault>, subject: &Subject, device: &str) -> Result<(Sighting, Option<String>)> {
    let Injection::Launch { kernels, .. } = fault.entry.injection else { unreachable!("a kernel's fault") };
    let mut counts = BTreeMap::<&str, usize>::new();
    let mut wanted: Vec<Kernel> = vec![];
    for need in needs(&subject.config, PREFILL, &PlanOptions::default())? {
        let count = counts.entry(need.kernel.id()).or_default();
        *count += 1;
        if kernels.contains(&need.kernel.id()) && *count <= SHAPES {
            wanted.push(need.kernel);
        }
    }
    if let Some(&Kernel::Attention { heads, kv_heads, head_dim, .. }) = wanted.first() {
        wanted.push(Kernel::Attention { seq: 257, heads, kv_heads, head_dim, causal: true });
    }
    let mut failed = None;
    let mut verdicts = vec![];
    for kernel in wanted {
        let verdict = match phase1::judge_on(&kernel, fault.device(open_device(device)?)) {
            Ok(finding) => finding.verdict,
            Err(error) => return Ok((Sighting::refused(&error), Some(kernel.to_string()))),
        };
        if !verdict.is_pass() && failed.is_none() {
            failed = Some(kernel.to_string());
        }
        verdicts.push(verdict);
    }
    let other = if kernels.contains(&"add") {
        Kernel::SiluMul { rows: 3, cols: 33 }
    } else {
        Kernel::Add { rows: 3, cols: 33 }
    };
    if !phase1::judge_on(&other, fault.device(open_device(device)?))?.verdict.is_pass() {
        failed = Some(other.to_string());
    }
    Ok((Sighting::of(&Verdict::all(verdicts)), failed))
}
