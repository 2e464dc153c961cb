//! A device some of whose launches are in the hands of a fault. A dispatch that holds one is cut around it, so that what
//! comes after it reads what the fault left.

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;

use super::At;
use super::launch::{Launch, Memory, Tamper, Targets, is_packed};
use crate::device::{BoundLaunch, BufferHandle, BufferSpec, Completed, Counters, Device, DeviceInfo, DispatchHandle};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::random::Random;
use crate::tensor;

/// A part of a dispatch: launches as they are, or one that is tampered with.
enum Piece {
    Sound(DispatchHandle),
    Tampered(DispatchHandle, BoundLaunch, Arc<HashMap<String, BufferHandle>>),
}

pub(super) struct Tampered {
    sound: Box<dyn Device>,
    targets: Targets,
    tamper: Tamper,
    config: ModelConfig,
    at: At,
    dispatches: Vec<Vec<Piece>>,
    /// What the device packs and does not give back.
    weights: HashMap<BufferHandle, Vec<bf16>>,
    /// The plan's buffers, as far as they are made: those of one plan are made before its dispatches.
    names: Arc<HashMap<String, BufferHandle>>,
    memory: Memory,
}

impl Tampered {
    pub(super) fn new(
        sound: Box<dyn Device>,
        targets: Targets,
        tamper: Tamper,
        config: ModelConfig,
        at: At,
    ) -> Tampered {
        let memory = Memory { runs: HashMap::new(), kept: HashMap::new(), random: Random::new(at.seed) };
        let (dispatches, weights, names) = Default::default();
        Tampered { sound, targets, tamper, config, at, dispatches, weights, names, memory }
    }
}

impl Device for Tampered {
    fn info(&self) -> &DeviceInfo {
        self.sound.info()
    }

    fn create(&mut self, spec: BufferSpec) -> Result<BufferHandle> {
        let name = spec.name.clone();
        let handle = self.sound.create(spec)?;
        Arc::make_mut(&mut self.names).insert(name, handle);
        Ok(handle)
    }

    fn spec(&self, buffer: BufferHandle) -> &BufferSpec {
        self.sound.spec(buffer)
    }

    fn write(&mut self, buffer: BufferHandle, offset: usize, content: &[u8]) -> Result<()> {
        if is_packed(self.sound.spec(buffer).layout) {
            self.weights.insert(buffer, tensor::bf16_from_le_bytes(content));
        }
        self.sound.write(buffer, offset, content)
    }

    fn read(&mut self, buffer: BufferHandle, offset: usize, len: usize) -> Result<&[u8]> {
        self.sound.read(buffer, offset, len)
    }

    fn poison(&mut self, buffer: BufferHandle) -> Result<()> {
        self.sound.poison(buffer)
    }

    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle> {
        let mut pieces = vec![];
        let mut sound = vec![];
        for launch in launches {
            if !self.targets.has(&launch) {
                sound.push(launch);
                continue;
            }
            if !sound.is_empty() {
                pieces.push(Piece::Sound(self.sound.prepare(name, std::mem::take(&mut sound))?));
            }
            let handle = self.sound.prepare(name, vec![launch.clone()])?;
            pieces.push(Piece::Tampered(handle, launch, self.names.clone()));
        }
        if !sound.is_empty() {
            pieces.push(Piece::Sound(self.sound.prepare(name, sound)?));
        }
        self.dispatches.push(pieces);
        Ok(DispatchHandle(self.dispatches.len() - 1))
    }

    fn run(&mut self, dispatch: DispatchHandle) -> Result<Completed> {
        let Some(pieces) = self.dispatches.get(dispatch.0) else {
            let why = format!("dispatch {} does not exist", dispatch.0);
            return Err(Error::Device { device: self.sound.info().label.clone(), why });
        };
        let mut elapsed_ns = 0;
        for piece in pieces {
            elapsed_ns += match piece {
                Piece::Sound(handle) => self.sound.run(*handle)?.elapsed_ns,
                Piece::Tampered(handle, bound, names) => {
                    let mut launch = Launch {
                        device: &mut *self.sound,
                        handle: *handle,
                        bound,
                        weights: &self.weights,
                        names,
                        memory: &mut self.memory,
                        config: &self.config,
                        at: &self.at,
                    };
                    let completed = (self.tamper)(&mut launch)?;
                    *self.memory.runs.entry(bound.site.clone()).or_default() += 1;
                    completed.elapsed_ns
                }
            };
        }
        Ok(Completed { elapsed_ns })
    }

    fn counters(&self) -> Counters {
        self.sound.counters()
    }
}
