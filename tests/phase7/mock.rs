//! Runners that are not the production path, which the audit must catch.

use std::sync::Arc;

use half::bf16;
use libtest_mimic::Failed;
use phasegate::check::Outcome;
use phasegate::device::{Arithmetic, Counters, DeviceInfo};
use phasegate::error::Result;
use phasegate::phase::Subject;
use phasegate::phase::phase7::{Audit, audit_of};
use phasegate::plan::{Placement, Plan};
use phasegate::runner::{Runner, RunnerOptions, npu};

const MODEL: &str = "tiny_llama";

/// Answers with the reference's own tokens and computes nothing.
struct Mock {
    subject: Arc<Subject>,
    info: DeviceInfo,
    /// HF's ids of the prompt in hand, one row a step.
    answers: Vec<Vec<(u32, f32)>>,
    prompt: usize,
    counters: Counters,
    /// What it adds to its counters at a prefill and at a decode step: those of the plan, if it is sly.
    forged: Option<RunnerOptions>,
}

impl Mock {
    fn new(subject: &Arc<Subject>, forged: Option<RunnerOptions>) -> Mock {
        let info = DeviceInfo { label: "emu".into(), arithmetic: Arithmetic::Ieee, description: "mock".into() };
        let (answers, counters) = Default::default();
        Mock { subject: subject.clone(), info, answers, prompt: 0, counters, forged }
    }

    fn answer(&self, step: usize) -> Vec<bf16> {
        let mut logits = vec![bf16::from_f32(-20.0); self.subject.config.vocab_size];
        for &(id, logit) in self.answers.get(step).into_iter().flatten() {
            logits[id as usize] = bf16::from_f32(logit);
        }
        logits
    }

    fn forge(&mut self, plan: &Plan) {
        self.counters.dispatches += plan.dispatches() as u64;
        self.counters.launches +=
            plan.launches().filter(|(step, _)| step.placement == Placement::Device).count() as u64;
    }
}

impl Runner for Mock {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn prefill(&mut self, ids: &[u32]) -> Result<Vec<bf16>> {
        let capture = self.subject.capture()?;
        self.answers = vec![];
        for prompt in capture.prompts() {
            let captured = capture.prompt(&prompt.id)?;
            if captured.ids == ids {
                let row = |step: usize| {
                    captured
                        .bf16
                        .ids
                        .row(step)
                        .iter()
                        .copied()
                        .zip(captured.bf16.logits.row(step).iter().copied())
                        .collect()
                };
                self.answers = (0..captured.chosen.len()).map(row).collect();
            }
        }
        self.prompt = ids.len();
        if let Some(options) = self.forged.clone() {
            let seq_len = npu::bucket(ids.len(), self.subject.config.max_position_embeddings);
            self.forge(&options.prefill_plan(&self.subject.config, seq_len)?);
        }
        Ok(self.answer(0))
    }

    fn decode_step(&mut self, _token: u32, position: usize) -> Result<Vec<bf16>> {
        if let Some(options) = self.forged.clone() {
            self.forge(&options.decode_plan(&self.subject.config)?);
        }
        Ok(self.answer(position + 1 - self.prompt))
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// The exhibits that did not pass; `sly`: the counters are forged to be the plan's.
pub fn caught(sly: bool) -> std::result::Result<(), Failed> {
    let failed = |error: phasegate::error::Error| Failed::from(error.to_string());
    let subject = Subject::shared(MODEL).map_err(failed)?;
    let drive = |options: &RunnerOptions| -> Result<Box<dyn Runner>> {
        Ok(Box::new(Mock::new(&subject, sly.then(|| options.clone()))))
    };
    let audit = audit_of(&subject, "emu", &drive, 7).map_err(failed)?;
    let mut wrong: Vec<&str> = ["one path", "unseen prompt"].into_iter().filter(|name| !fails(&audit, name)).collect();
    if fails(&audit, "dispatch counters") == sly {
        wrong.push("dispatch counters");
    }
    if audit.verdict.outcome() != Outcome::Fail || !audit.markdown().contains("**FAIL**") {
        wrong.push("the verdict");
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(format!("not as they should be: {wrong:?}\n{}", audit.markdown()).into())
    }
}

fn fails(audit: &Audit, name: &str) -> bool {
    audit.exhibits.iter().any(|e| e.name == name && e.verdict.outcome() == Outcome::Fail)
}
