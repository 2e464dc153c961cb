//! Any engine as a [`Runner`]: a child process that speaks JSON lines (docs/external_runner.md).
//!
//! Believes nothing: sizes, ids, files and state of every answer are checked before a number is taken from it. Its runs
//! are never cached, since no key covers what another program does.

mod child;
pub mod protocol;
mod serve;

use std::path::{Path, PathBuf};
use std::time::Duration;

use half::bf16;

use self::child::Engine;
use self::protocol::{Ask, COMPLETED, Hello, PROTOCOL, Rows, Status, Step, Taps, read_rows};
use super::{Record, Runner, TapRequest, teacher_forced};
use crate::begun::Folder;
use crate::device::{Arithmetic, Counters, DeviceInfo};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
pub use serve::{Served, serve};

/// The device label of every external engine.
pub const LABEL: &str = "external";
/// How long an engine may take to answer, unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// What to start and what it must be.
#[derive(Debug, Clone)]
pub struct External {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where it starts.
    pub dir: PathBuf,
    /// The longest wait for one answer.
    pub timeout: Duration,
    /// The class whose limits it is judged by.
    pub arithmetic: Arithmetic,
}

/// An engine that has said hello.
pub struct ExternalRunner {
    engine: Engine,
    info: DeviceInfo,
    hello: Hello,
    config: ModelConfig,
    /// Positions whose layer outputs the next prefill shall leave.
    wanted: Option<Rows>,
    files: Folder,
    /// Positions fed since the last prefill began.
    fed: usize,
    steps: u64,
}

impl ExternalRunner {
    /// Starts the engine and exchanges hellos.
    ///
    /// Errors: [`Error::Unavailable`] for a command that cannot be started, [`Error::Incomplete`] for an engine that does
    /// not answer, [`Error::Engine`] for one that is another model or speaks another protocol.
    pub fn start(external: &External, model: &str, checkpoint: &Path, config: &ModelConfig) -> Result<ExternalRunner> {
        let files = Folder::new_in(&std::env::temp_dir(), "phasegate-")?;
        let mut engine = Engine::start(&external.command, &external.dir, external.timeout)?;
        let hello: Hello = engine.ask(Ask::Hello {
            protocol: PROTOCOL,
            model: model.into(),
            checkpoint: std::path::absolute(checkpoint).map_err(Error::io(checkpoint))?,
            vocab_size: config.vocab_size,
            max_positions: config.max_position_embeddings,
        })?;
        if hello.protocol != PROTOCOL {
            return Err(engine.garbage("hello", &format!("protocol {}, expected {PROTOCOL}", hello.protocol)));
        }
        if hello.model != model {
            return Err(engine.garbage("hello", &format!("another model: {:?}, expected {model:?}", hello.model)));
        }
        if hello.vocab_size != config.vocab_size {
            let why =
                format!("wrong vocabulary: {} logits, expected vocab_size {}", hello.vocab_size, config.vocab_size);
            return Err(engine.garbage("hello", &why));
        }
        let info = DeviceInfo {
            label: LABEL.into(),
            arithmetic: external.arithmetic,
            description: format!(
                "{}, through {:?}, limits of {}",
                hello.engine,
                external.command.join(" "),
                external.arithmetic.label()
            ),
        };
        Ok(ExternalRunner { engine, info, hello, config: config.clone(), wanted: None, files, fed: 0, steps: 0 })
    }

    /// What the engine said of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// A teacher-forced run with the layer outputs and KV rows that `request` names, where the engine can give them.
    ///
    /// Taps: as of [`super::NpuRunner::record`], without layer 0's inner ones.
    /// Errors: as [`teacher_forced`]; [`Error::Incomplete`] when the engine's status is not `completed`.
    pub fn record(&mut self, ids: &[u32], teacher: &[u32], steps: usize, request: &TapRequest) -> Result<Record> {
        let can = |what: &str| self.hello.capabilities.iter().any(|c| c == what);
        let (layers, kv) = (can("layers"), can("kv"));
        let positions: Vec<usize> = request.layer_positions.iter().copied().filter(|&p| p < ids.len()).collect();
        let file = self.files.path().join("layers.safetensors");
        self.wanted = (layers && !positions.is_empty()).then_some(Rows { positions, file });
        let wanted = self.wanted.clone();
        let mut record = teacher_forced(self, ids, teacher, steps)?;
        if let Some(rows) = wanted {
            let names: Vec<String> = (0..self.config.num_hidden_layers).map(|l| format!("l{l:02}.output")).collect();
            let names = names.into_iter().chain(["final_norm".into()]).map(|name| (name, self.config.hidden_size));
            record.taps.extend(self.take_rows("prefill", &rows, names)?);
        }
        let positions: Vec<usize> = request.kv_positions.iter().copied().filter(|&p| p < self.fed).collect();
        if kv && !positions.is_empty() {
            let rows = Rows { positions, file: self.files.path().join("kv.safetensors") };
            let _: serde_json::Value = self.engine.ask(Ask::Kv(rows.clone()))?;
            let width = self.config.kv_dim();
            let names = (0..self.config.num_hidden_layers)
                .flat_map(|l| ["k_cache", "v_cache"].map(|side| (format!("l{l:02}.{side}"), width)));
            record.taps.extend(self.take_rows("kv", &rows, names)?);
        }
        let status: Status = self.engine.ask(Ask::Status)?;
        if status.state != COMPLETED {
            let state = format!("{} {}", status.state, status.detail).trim_end().to_owned();
            let (device, dispatch) = (self.info.description.clone(), "status".into());
            return Err(Error::Incomplete { device, dispatch, state, elapsed_us: 0 });
        }
        Ok(record)
    }

    /// Exactly the named tensors of the named widths.
    fn take_rows(&self, op: &str, rows: &Rows, names: impl Iterator<Item = (String, usize)>) -> Result<Taps> {
        let mut found =
            read_rows(&rows.file, rows.positions.len()).map_err(|e| self.engine.garbage(op, &e.to_string()))?;
        let mut taps = Taps::new();
        for (name, width) in names {
            let Some(rows) = found.remove(&name) else {
                return Err(self.engine.garbage(op, &format!("{} lacks tensor {name}", rows.file.display())));
            };
            if rows.ncols() != width {
                return Err(self
                    .engine
                    .garbage(op, &format!("tensor {name}: width {}, expected {width}", rows.ncols())));
            }
            taps.insert(name, rows);
        }
        // A file of an earlier run must never be read as a later one's.
        let _ = std::fs::remove_file(&rows.file);
        Ok(taps)
    }

    fn logits(&mut self, ask: Ask) -> Result<Vec<bf16>> {
        let op = ask.op();
        let step: Step = self.engine.ask(ask)?;
        let logits = step.logits.values().map_err(|why| self.engine.garbage(op, &why))?;
        if logits.len() != self.config.vocab_size {
            let why =
                format!("wrong vocabulary: {} logits, expected vocab_size {}", logits.len(), self.config.vocab_size);
            return Err(self.engine.garbage(op, &why));
        }
        self.steps += 1;
        Ok(logits)
    }
}

impl Runner for ExternalRunner {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn prefill(&mut self, ids: &[u32]) -> Result<Vec<bf16>> {
        let layers = self.wanted.take();
        self.fed = ids.len();
        self.logits(Ask::Prefill { ids: ids.to_vec(), layers })
    }

    fn decode_step(&mut self, token: u32, position: usize) -> Result<Vec<bf16>> {
        self.fed = position + 1;
        self.logits(Ask::DecodeStep { token, position })
    }

    /// An engine's own dispatches are not known; answers are counted.
    fn counters(&self) -> Counters {
        Counters { dispatches: self.steps, ..Counters::default() }
    }
}
