//! What a run may be given in place of a sound part. The seam of fault injection: production code knows this trait and
//! no fault.

use std::sync::{Arc, Mutex};

use super::{Hook, Record};
use crate::device::Device;
use crate::error::Result;
use crate::model::{ModelConfig, Weights};
use crate::plan::Plan;

/// A hook as a runner keeps it.
pub type SharedHook = Arc<Mutex<dyn Hook>>;

/// Changes to single parts of a run, from the config to what is left of it. Each default changes nothing.
pub trait Alteration: Send + Sync {
    /// The config that the plans, the RoPE tables and the KV cache are made from.
    fn config(&self, _config: &mut ModelConfig) {}

    /// Where the weights come from.
    ///
    /// Errors: those of reading the sound ones.
    fn weights(&self, sound: Arc<dyn Weights>) -> Result<Arc<dyn Weights>> {
        Ok(sound)
    }

    /// A plan that has passed its own check, before it is bound to the device: a rewrite gone wrong.
    fn plan(&self, _plan: &mut Plan) {}

    /// The device under everything.
    fn device(&self, sound: Box<dyn Device>) -> Box<dyn Device> {
        sound
    }

    /// Hooks that see every step before any other hook does.
    fn hooks(&self) -> Vec<SharedHook> {
        vec![]
    }

    /// The prompt's token ids, between whoever asks for a run and the runner.
    fn prompt(&self, ids: &[u32]) -> Vec<u32> {
        ids.to_vec()
    }

    /// The record, between the runner and whoever judges it.
    fn record(&self, record: Record) -> Record {
        record
    }
}

/// The alteration that alters nothing.
pub struct Sound;

impl Alteration for Sound {}
