//! Is it the production path that verify drives? Counters, times, equality with verify's own records, and a prompt that
//! nobody has captured.

use std::time::Duration;

use super::{Exhibit, extent};
use crate::check::token_set::STEPS;
use crate::check::tolerance::at_most;
use crate::check::{Metrics, Verdict};
use crate::error::Result;
use crate::explain::forward::forward;
use crate::phase::{Bench, Subject};
use crate::plan::{Placement, Plan};
use crate::runner::{Record, Runner, RunnerOptions, npu, teacher_forced};
use crate::settings;
use crate::tensor;

/// Hands out the runner that is audited.
pub type Drive<'a> = &'a dyn Fn(&RunnerOptions) -> Result<Box<dyn Runner>>;

/// What no thread of a CPU reaches in bf16: two ports of 32 multiply-adds each at 5 GHz are 0.64e12.
///
/// Units: floating-point operations per second and thread.
const CPU_CEILING: f64 = 1e12;

/// What no NPU2 reaches: its peak is 50e12 operations per second in 8 bits.
const NPU_CEILING: f64 = 50e12;

/// Cosine of logits against our f32 forward pass: the loosest of upstream's floors for a block. Whoever does not compute
/// the model is nowhere near it.
const UNSEEN_COSINE: f64 = 0.97;

/// Tokens of the prompt nobody has captured, and decode steps behind it.
const UNSEEN: (usize, usize) = (12, 4);

/// Drives every prompt of a bench and asks all questions.
///
/// Errors: those of the runner.
pub(super) fn exhibits(subject: &Subject, bench: &Bench, drive: Drive<'_>, seed: u64) -> Result<Vec<Exhibit>> {
    let most = subject.config.max_position_embeddings;
    let lengths: Vec<usize> =
        bench.prompts().iter().map(|id| Ok(subject.capture()?.prompt(id)?.ids.len())).collect::<Result<_>>()?;
    let options = RunnerOptions::for_prompts(lengths.iter().copied().chain([UNSEEN.0]), STEPS, most);
    let mut runner = drive(&options)?;
    let mut records = vec![];
    for id in bench.prompts() {
        let captured = subject.capture()?.prompt(id)?;
        records.push((id.clone(), teacher_forced(&mut *runner, &captured.ids, &captured.chosen, STEPS)?));
    }
    Ok(vec![
        counters(subject, &options, &records)?,
        times(subject, bench, &records)?,
        same(bench, &records)?,
        unseen(subject, &mut *runner, seed)?,
    ])
}

/// Launches that a plan's device calls hold.
fn launches(plan: &Plan) -> u64 {
    let on_device = plan.steps.iter().filter(|step| step.placement == Placement::Device);
    on_device.map(|step| step.launches().len() as u64).sum()
}

fn counters(subject: &Subject, options: &RunnerOptions, records: &[(String, Record)]) -> Result<Exhibit> {
    let decode = options.decode_plan(&subject.config)?;
    let steps = STEPS as u64 - 1;
    let (mut failures, mut dispatches, mut all) = (vec![], 0, 0);
    for (id, record) in records {
        let seq_len = npu::bucket(record.prompt_ids.len(), subject.config.max_position_embeddings);
        let prefill = options.prefill_plan(&subject.config, seq_len)?;
        let wanted = prefill.dispatches() as u64 + steps * decode.dispatches() as u64;
        let wanted_launches = launches(&prefill) + steps * launches(&decode);
        let found = record.counters;
        if (found.dispatches, found.launches) != (wanted, wanted_launches) {
            failures.push(format!(
                "{id}: {} dispatches and {} launches, the plan needs {wanted} and {wanted_launches}",
                found.dispatches, found.launches
            ));
        }
        if found.static_uploads > 0 {
            failures.push(format!("{id}: {} static buffers were uploaded again", found.static_uploads));
        }
        dispatches += found.dispatches;
        all += found.launches;
    }
    Ok(Exhibit {
        name: "dispatch counters",
        question: "did the device run every dispatch that the plan needs, and no other?",
        found: format!("{dispatches} dispatches, {all} launches over {} prompts of {STEPS} steps", records.len()),
        verdict: Verdict::judge(failures, extent("prompts driven", records.len(), records.len())),
    })
}

fn times(subject: &Subject, bench: &Bench, records: &[(String, Record)]) -> Result<Exhibit> {
    let ceiling = match bench.device() {
        "emu" | "emu_npu2" => CPU_CEILING * settings::threads()? as f64,
        _ => NPU_CEILING,
    };
    // The embedding is looked up, not multiplied; a tied head is one and the same tensor.
    let config = &subject.config;
    let table = (config.vocab_size * config.hidden_size) as u64;
    let per_layer = config.parameters() - if config.tie_word_embeddings { table } else { 2 * table };
    let (mut failures, mut spent, mut least) = (vec![], 0.0, 0.0);
    for (id, record) in records {
        let positions = (record.prompt_ids.len() + STEPS - 1) as f64;
        let operations = 2.0 * (per_layer as f64 * positions + table as f64 * STEPS as f64);
        let floor = operations / ceiling;
        let took = record.timing.prefill_us + record.timing.decode_us.iter().sum::<u64>();
        let took = Duration::from_micros(took).as_secs_f64();
        if took < floor {
            failures
                .push(format!("{id}: {took:.2e} s for {operations:.2e} operations, which take {floor:.2e} s at least"));
        }
        if record.timing.decode_us.len() + 1 != STEPS {
            failures.push(format!("{id}: {} decode steps were timed", record.timing.decode_us.len()));
        }
        spent += took;
        least += floor;
    }
    Ok(Exhibit {
        name: "wall time",
        question: "did it take as long as the arithmetic must?",
        found: format!("{spent:.3} s, at least {least:.2e} s at {ceiling:.1e} operations per second"),
        verdict: Verdict::judge(failures, extent("prompts timed", records.len(), records.len())),
    })
}

/// What is driven here and what verify judges are the same numbers, bit for bit.
fn same(bench: &Bench, records: &[(String, Record)]) -> Result<Exhibit> {
    let mut failures = vec![];
    for (id, record) in records {
        let verified = bench.record(id)?;
        let bits = |r: &Record| r.logits.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
        if bits(record) != bits(&verified) {
            let [a, b] = [record, &*verified].map(|r| tensor::to_f32(r.logits.view()));
            let apart = if a.dim() == b.dim() { Metrics::measure(a.view(), b.view())?.rel_l2 } else { f64::NAN };
            failures.push(format!("{id}: the driven run's logits are not verify's (relative L2 {apart:.2e})"));
        }
    }
    Ok(Exhibit {
        name: "one path",
        question: "are the numbers that verify judges those of the production path?",
        found: format!("{} prompts, logits compared bit for bit", records.len()),
        verdict: Verdict::judge(failures, extent("prompts compared", records.len(), records.len())),
    })
}

/// A prompt of seeded token ids, which no capture holds, against our own f32 forward pass.
fn unseen(subject: &Subject, runner: &mut dyn Runner, seed: u64) -> Result<Exhibit> {
    let (len, steps) = UNSEEN;
    let mut state = seed | 1;
    let ids: Vec<u32> = (0..len + steps)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % subject.config.vocab_size as u32
        })
        .collect();
    let truth = forward(&subject.config, &*subject.checkpoint, &ids, len)?;
    let mut answers = vec![runner.prefill(&ids[..len])?];
    for (step, &id) in ids[len..].iter().enumerate() {
        answers.push(runner.decode_step(id, len + step)?);
    }
    let own = truth.tap("lm_head");
    let (mut failures, mut least, mut compared) = (vec![], f64::INFINITY, 0);
    for (step, answer) in answers.iter().enumerate() {
        let Some(own) = own.and_then(|own| (step < own.nrows()).then(|| own.row(step).to_owned())) else { continue };
        let answer: ndarray::Array1<f32> = answer.iter().map(|x| x.to_f32()).collect();
        let cosine = if answer.len() == own.len() {
            Metrics::measure(answer.view().insert_axis(ndarray::Axis(0)), own.view().insert_axis(ndarray::Axis(0)))?
                .cosine
        } else {
            f64::NAN
        };
        compared += 1;
        least = if cosine < least || cosine.is_nan() { cosine } else { least };
        if !at_most(UNSEEN_COSINE, cosine) {
            failures.push(format!("step {step}: cosine {cosine:.4} to our f32 forward pass, at least {UNSEEN_COSINE}"));
        }
    }
    Ok(Exhibit {
        name: "unseen prompt",
        question: "does it compute the model, on a prompt that no capture holds?",
        found: format!("{len} seeded tokens and {steps} steps, least cosine {least:.5} to our own f32 forward pass"),
        verdict: Verdict::judge(failures, extent("unseen steps", steps + 1, compared)),
    })
}
