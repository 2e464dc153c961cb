//! Results of cases into the bundle that `PHASEGATE_BUNDLE` names: one file a case, whichever process runs it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::case::Cx;
use super::ignored::Ignored;
use super::selection::Selection;
use crate::error::Error;
use crate::phase::devices;
use crate::report::bundle::{Bundle, CaseResult, Identity, Listing, ModelIdentity, SCHEMA};
use crate::report::provenance;
use crate::settings;

/// What a model is judged by; asked only when a bundle needs it.
pub type IdentityOf = Arc<dyn Fn() -> Result<ModelIdentity, Error> + Send + Sync>;

/// The bundle of this run, if there is one.
#[derive(Clone)]
pub(super) struct Results {
    bundle: Bundle,
    models: Arc<BTreeMap<String, IdentityOf>>,
}

impl Results {
    /// The bundle that the settings name. A process of `one_case` was started by one that has listed them all and begun
    /// the bundle: asking git again would take longer than most cases run.
    ///
    /// Errors: as [`Bundle::open`].
    pub(super) fn open(
        selection: &Selection,
        models: BTreeMap<String, IdentityOf>,
        one_case: bool,
    ) -> Result<Option<Results>, Error> {
        let Some(dir) = settings::bundle() else { return Ok(None) };
        if let Some(bundle) = Bundle::begun(&dir).filter(|_| one_case) {
            return Ok(Some(Results { bundle, models: models.into() }));
        }
        let identity = Identity {
            schema: SCHEMA.into(),
            commit: provenance::commit(&settings::root()),
            devices: selection.devices.iter().map(|d| d.label().to_owned()).collect(),
            models: selection.models.clone(),
            instruction_set: devices::isa()?.to_string(),
        };
        Ok(Some(Results { bundle: Bundle::open(dir, &identity)?, models: models.into() }))
    }

    /// Every case of the phase.
    pub(super) fn list<'a>(
        &self,
        phase: &str,
        names: impl Iterator<Item = &'a str>,
        ignored: &[Ignored],
    ) -> Result<(), Error> {
        let ignored: BTreeMap<String, String> = ignored.iter().map(|i| (i.name.clone(), i.why.clone())).collect();
        let cases = names.filter(|name| !ignored.contains_key(*name)).map(str::to_owned).collect();
        self.bundle.list(phase, &Listing { cases, ignored })
    }

    /// What a case on a device came to.
    pub(super) fn case(
        &self,
        cx: &Cx,
        needs: &[String],
        outcome: &Result<(), String>,
        took: Duration,
    ) -> Result<(), Error> {
        for need in needs {
            if let Some(identity) = self.models.get(need) {
                self.bundle.model(need, || identity())?;
            }
        }
        let figures = cx.measured.get().and_then(|numbers| numbers.render().ok()).unwrap_or_default();
        self.put(&cx.phase, &cx.name, figures, outcome, took)
    }

    /// What a check of the harness itself came to.
    pub(super) fn put(
        &self,
        phase: &str,
        name: &str,
        figures: String,
        outcome: &Result<(), String>,
        took: Duration,
    ) -> Result<(), Error> {
        self.bundle.case(&CaseResult {
            phase: phase.into(),
            case: name.into(),
            passed: outcome.is_ok(),
            message: outcome.as_ref().err().cloned().unwrap_or_default(),
            figures,
            seconds: took.as_secs_f64(),
        })
    }
}
