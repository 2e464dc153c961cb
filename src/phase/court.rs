//! The reference court of phases 2 and 3: a failure is heard with HF f32 and our own f32 forward pass before it counts
//! against the device.

use std::sync::Arc;

use ndarray::{Array2, Axis};

use super::Bench;
use crate::check::Verdict;
use crate::device::Arithmetic;
use crate::error::Result;
use crate::explain::court::{Ruling, Witnesses};
use crate::explain::forward::{Truth, forward};
use crate::tensor;

/// Multiplications that a hearing may take: beyond, nobody is heard.
///
/// Units: parameters times positions.
const MOST: u64 = 20_000_000_000;

/// What was heard of one prompt.
#[derive(Debug, Clone, Default)]
pub struct Hearing {
    pub disputes: Vec<String>,
    pub notes: Vec<String>,
    /// Where the device itself stands alone: then no dispute helps it.
    pub device: Vec<String>,
}

/// Hears one prompt's layer outputs and logits.
///
/// Errors: those of the run and the capture; none where the prompt is too long for a hearing.
pub fn hear(bench: &Bench, prompt: &str) -> Result<Hearing> {
    let subject = bench.subject();
    let capture = subject.capture()?.prompt(prompt)?;
    let record = bench.record(prompt)?;
    let steps = record.logits.nrows();
    let ids: Vec<u32> = capture.ids.iter().chain(&capture.chosen[..steps.saturating_sub(1)]).copied().collect();
    let mut hearing = Hearing::default();
    if subject.config.parameters() * ids.len() as u64 > MOST {
        hearing.notes.push(format!("{prompt}: {} positions are too many for a hearing", ids.len()));
        return Ok(hearing);
    }
    let truth = forward(&subject.config, &*subject.checkpoint, &ids, capture.ids.len())?;
    if subject.capture()?.lens_prompts().iter().any(|id| id == prompt) {
        layers(bench, prompt, &truth, &mut hearing)?;
    }
    if let Some(own) = truth.tap("lm_head") {
        let at = |logits: &dyn Fn(usize, usize) -> f32| {
            Array2::from_shape_fn((steps, capture.f32.ids.ncols()), |(i, k)| {
                logits(i, capture.f32.ids[[i, k]] as usize)
            })
        };
        let device = at(&|i, id| record.logits[[i, id]].to_f32());
        let own = at(&|i, id| own[[i, id]]);
        let (bf16, f32) = (&capture.bf16_at_f32, &capture.f32.logits);
        for step in 0..steps {
            let row = step..step + 1;
            let cut = |x: &'_ Array2<f32>| x.slice(ndarray::s![row.clone(), ..]).to_owned();
            let (device, bf16, f32, own) = (cut(&device), cut(bf16), cut(f32), cut(&own));
            let witnesses = Witnesses { device: device.view(), bf16: bf16.view(), f32: f32.view(), own: own.view() };
            hearing.take(&witnesses.hear(allowed(bench))?, &format!("{prompt}, logits of step {step}"));
        }
    }
    Ok(hearing)
}

/// How many times as far from the truth as HF bf16 a sound device of this class may be.
fn allowed(bench: &Bench) -> f64 {
    match bench.arithmetic() {
        Arithmetic::Ieee => 2.0,
        Arithmetic::Npu2 => 40.0,
    }
}

fn layers(bench: &Bench, prompt: &str, truth: &Truth, hearing: &mut Hearing) -> Result<()> {
    let (lens, record) = (bench.subject().lens(prompt)?, bench.record(prompt)?);
    let positions: Vec<usize> = lens.positions.iter().map(|&p| p as usize).collect();
    for layer in 0..bench.subject().config.num_hidden_layers {
        let (Some(rows), Some(own)) =
            (record.taps.get(&format!("l{layer:02}.output")), truth.tap(&format!("l{layer:02}.mlp_add")))
        else {
            continue;
        };
        let device = tensor::to_f32(rows.view());
        if device.nrows() != positions.len() {
            continue;
        }
        let own = own.select(Axis(0), &positions);
        let (bf16, f32) = (lens.layers_bf16.index_axis(Axis(0), layer), lens.layers_f32.index_axis(Axis(0), layer));
        let ruling = Witnesses { device: device.view(), bf16, f32, own: own.view() }.hear(allowed(bench))?;
        hearing.take(&ruling, &format!("{prompt}, layer {layer}"));
    }
    Ok(())
}

impl Hearing {
    /// With what was heard of another prompt.
    pub fn extend(&mut self, other: Hearing) {
        self.disputes.extend(other.disputes);
        self.notes.extend(other.notes);
        self.device.extend(other.device);
    }

    fn take(&mut self, ruling: &Ruling, what: &str) {
        self.disputes.extend(ruling.dispute(what));
        self.notes.extend(ruling.note(what));
        if let Ruling::Device { device, bf16 } = ruling {
            self.device.push(format!("{what}: {device:.2e} from our f32 forward pass, HF bf16 {bf16:.2e}"));
        }
    }

    /// A failure becomes a dispute where a reference stands alone; otherwise a note at most is added.
    pub fn apply(&self, verdict: Verdict) -> Verdict {
        let verdict = match self.disputes.first() {
            Some(dispute) if self.device.is_empty() => verdict.dispute(dispute.clone()),
            _ => verdict,
        };
        self.notes.iter().take(1).fold(verdict, |verdict, note| verdict.warn(note.clone()))
    }
}

/// The verdict on a fixture's prompt once it has been heard; a hearing that cannot be held changes nothing.
pub fn of_failure(model: &str, device: &str, prompt: &str, verdict: Verdict) -> Verdict {
    let heard = Bench::shared(model, device).and_then(|bench: Arc<Bench>| {
        let known = bench.subject().capture()?.prompts().iter().any(|p| p.id == prompt);
        if known { hear(&bench, prompt).map(Some) } else { Ok(None) }
    });
    match heard {
        Ok(Some(hearing)) => hearing.apply(verdict),
        Ok(None) => verdict,
        Err(error) => verdict.warn(format!("the reference was not heard: {error}")),
    }
}
