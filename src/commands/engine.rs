//! What the gates look at: a device of ours, or another engine (`--runner`, or `--device external` and the manifest's).

use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::{Datapath, ModelArgs, TuningArgs};
use crate::check::Verdict;
use crate::device::Arithmetic;
use crate::error::{Error, Result};
use crate::phase::{Bench, Subject, external};
use crate::report::Report;
use crate::runner::external::{External, LABEL, TIMEOUT};

/// Which engine, where it is not a device of ours.
#[derive(Args, Clone)]
pub(crate) struct EngineArgs {
    /// Gate this program instead of a device: it speaks JSON lines (docs/external_runner.md)
    #[arg(long, value_name = "COMMAND")]
    runner: Option<String>,
    /// Longest wait for one answer of the program
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT.as_secs())]
    runner_timeout: u64,
}

/// A bench that is ready, or why the engine never got that far.
pub(crate) enum Started {
    /// With what an external engine said of its identity.
    Ready(Box<Bench>, Option<Identified>),
    Broken(Report),
}

/// An external engine's hello, held against the checkpoint.
pub(crate) struct Identified {
    pub(crate) verdict: Verdict,
    pub(crate) facts: Vec<(&'static str, String)>,
}

impl EngineArgs {
    /// The label of what is gated.
    pub(crate) fn label(&self, model: &ModelArgs) -> String {
        if self.runner.is_some() { LABEL.into() } else { model.label() }
    }

    /// The external engine that is asked for, if one is.
    ///
    /// Errors: [`Error::Usage`] for a command that cannot be split, or none where one is needed.
    fn external(&self, model: &ModelArgs, subject: &Subject) -> Result<Option<External>> {
        let (command, dir) = match &self.runner {
            Some(text) => (split(text)?, ".".into()),
            None if model.device == LABEL => {
                let command = subject.located.manifest.as_ref().map(|m| m.runner.clone()).unwrap_or_default();
                (command, subject.root.clone())
            }
            None => return Ok(None),
        };
        if command.is_empty() {
            return Err(Error::Usage {
                what: "device".into(),
                found: LABEL.into(),
                expected: format!("--runner COMMAND, or runner = [...] in the manifest of {}", subject.name),
            });
        }
        let arithmetic = match model.datapath {
            Datapath::Ieee => Arithmetic::Ieee,
            Datapath::Npu2 => Arithmetic::Npu2,
        };
        Ok(Some(External { command, dir, timeout: Duration::from_secs(self.runner_timeout), arithmetic }))
    }

    /// Sets up what these arguments ask for. An engine that does not answer, or is another model, is a report.
    ///
    /// Errors: whatever else goes wrong.
    pub(crate) fn start(
        &self,
        command: &str,
        model: &ModelArgs,
        tuning: TuningArgs,
        subject: &Arc<Subject>,
        prompts: &[String],
    ) -> Result<Started> {
        let Some(external) = self.external(model, subject)? else {
            let [prefill, decode] = tuning.halves();
            let bench = Bench::new(subject.clone(), &model.label(), prompts, model.plan())?.tuned(prefill, decode);
            return Ok(Started::Ready(Box::new(bench), None));
        };
        let (bench, hello) = match Bench::external(subject.clone(), &external, prompts) {
            Ok(started) => started,
            Err(error) => {
                let device = (LABEL.into(), format!("through {:?}", external.command.join(" ")));
                return Ok(Started::Broken(Report::new(command, &subject.name, device, external::verdict(error)?)));
            }
        };
        let verdict = external::identity(subject, &hello)?;
        let mut facts = vec![("engine", hello.engine), ("engine_model", hello.model)];
        facts.extend(hello.weights_sha256.into_iter().map(|(file, hash)| ("engine_weights", format!("{file} {hash}"))));
        Ok(Started::Ready(Box::new(bench), Some(Identified { verdict, facts })))
    }
}

fn split(text: &str) -> Result<Vec<String>> {
    shlex::split(text).ok_or_else(|| Error::Usage {
        what: "runner".into(),
        found: text.into(),
        expected: "a command with every quote closed".into(),
    })
}
