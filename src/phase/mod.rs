//! The phases: which cases exist for a model, and what each must show.
//!
//! A case says what it compares and never on which device; `harness` multiplies cases by devices, `commands` call the
//! same functions. Nothing here prints.

pub mod added;
pub mod bench;
pub mod calibrate;
pub mod contracts;
pub mod court;
pub mod decode;
pub mod devices;
pub mod escape;
pub mod explain;
pub mod external;
pub mod kv_rows;
pub mod limits;
pub mod needs;
pub mod observability;
pub mod optimise;
pub mod perplexity;
pub mod phase0;
pub mod phase1;
pub mod phase2;
pub mod phase3;
pub mod phase4;
pub mod phase5;
pub mod phase6;
pub mod phase7;
pub mod positions;
pub mod profile;
pub mod progress;
pub mod rewrite;
pub mod subject;

use std::sync::Arc;

pub use bench::Bench;
pub use subject::{Outline, Subject};

use crate::check::Verdict;
use crate::error::Result;

/// What one case measured and how it was judged.
#[derive(Debug, Clone)]
pub struct Finding {
    pub verdict: Verdict,
    /// Baseline figures in a fixed order: name, value.
    pub numbers: Vec<(&'static str, f64)>,
}

impl Finding {
    /// A judged finding without figures of its own.
    pub fn of(verdict: Verdict) -> Finding {
        Finding { verdict, numbers: vec![] }
    }
}

/// A case without a device.
pub type RunStatic = dyn Fn() -> Result<Finding> + Send + Sync;

/// A case on the device of the given label.
pub type RunOnDevice = dyn Fn(&str) -> Result<Finding> + Send + Sync;

/// How a case is carried out.
#[derive(Clone)]
pub enum Run {
    /// Without a device.
    Static(Arc<RunStatic>),
    /// On the device of this label.
    OnDevice(Arc<RunOnDevice>),
}

/// One generated test case.
#[derive(Clone)]
pub struct Case {
    /// `layer::tiny_llama::base_00::l02`, without the device.
    pub name: String,
    /// The fixture it is about; empty for a kernel, which belongs to none.
    pub model: String,
    /// Whether its figures are kept as a baseline.
    pub baseline: bool,
    pub run: Run,
}

impl Case {
    fn fixed(name: impl Into<String>, model: &str, run: impl Fn() -> Result<Finding> + Send + Sync + 'static) -> Case {
        Case { name: name.into(), model: model.into(), baseline: false, run: Run::Static(Arc::new(run)) }
    }

    fn on_device(
        name: impl Into<String>,
        model: &str,
        run: impl Fn(&str) -> Result<Finding> + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), model: model.into(), baseline: true, run: Run::OnDevice(Arc::new(run)) }
    }
}
