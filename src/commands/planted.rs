//! `--fault`: a fault of the catalogue put into a run on purpose, so that people see how it is found.

use clap::Args;

use crate::error::{Error, Result};
use crate::explain::fit;
use crate::fault::{At, Fault};
use crate::model::ModelConfig;
use crate::runner::{Alteration, Sound};

#[derive(Args, Clone)]
pub(super) struct PlantedArgs {
    /// Put a fault of the catalogue into the run first, to see it found
    #[arg(long, value_name = "ID")]
    fault: Option<String>,
    /// The layer of that fault
    #[arg(long, value_name = "N", requires = "fault")]
    layer: Option<usize>,
    /// The strength of that fault
    #[arg(long, value_name = "X", requires = "fault")]
    strength: Option<f64>,
}

impl PlantedArgs {
    /// The fault's id, if there is to be one.
    pub(super) fn id(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// What to alter; nothing without a fault.
    ///
    /// Errors: [`Error::Usage`] for an id that the catalogue has not, a place that the model has not, a strength that the
    /// fault has not, and for a fault of whoever asks and judges: a run has neither its prompts nor its records in its hands.
    pub(super) fn alteration(&self, config: &ModelConfig) -> Result<Box<dyn Alteration>> {
        let Some(id) = &self.fault else { return Ok(Box::new(Sound)) };
        let entry = Fault::entry(id)?;
        if !fit::is_of_run(entry) {
            return Err(Error::Usage {
                what: "fault".into(),
                found: format!("{id}, a fault of whoever asks and judges, before or behind the runner"),
                expected: "a fault of config, weights, launches or buffers".into(),
            });
        }
        if let (Some(strength), true) = (self.strength, entry.strengths.is_empty()) {
            let expected = format!("none: {id} has only one");
            return Err(Error::Usage { what: "strength".into(), found: strength.to_string(), expected });
        }
        let default = entry.default_at(config);
        let strength = self.strength.unwrap_or(default.strength);
        let at = At { layer: self.layer.or(default.layer), strength, ..default };
        Ok(Box::new(Fault::new(entry, config, at)?))
    }
}
