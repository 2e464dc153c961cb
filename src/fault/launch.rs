//! One launch in the hands of a fault: its inputs and output can be read and written, and it can be run, or not.

use std::collections::HashMap;

use half::bf16;

use super::{At, Stages};
use crate::device::{BoundLaunch, BufferHandle, Completed, Device, DispatchHandle, Layout};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::model::ModelConfig;
use crate::random::Random;
use crate::tensor;

/// What a fault does in place of a launch.
pub type Tamper = fn(&mut Launch<'_>) -> Result<Completed>;

/// Where in a plan a launch stands, read from its name: `prefill.l07.q_proj`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site<'a> {
    pub stage: &'a str,
    pub layer: Option<usize>,
    pub name: &'a str,
}

impl<'a> Site<'a> {
    /// None for a launch that is in no plan.
    pub fn parse(site: &'a str) -> Option<Site<'a>> {
        let (stage, rest) = site.split_once('.')?;
        let layered = rest.strip_prefix('l').and_then(|rest| rest.split_once('.'));
        Some(match layered.and_then(|(layer, name)| Some((layer.parse().ok()?, name))) {
            Some((layer, name)) => Site { stage, layer: Some(layer), name },
            None => Site { stage, layer: None, name: rest },
        })
    }
}

/// Which launches a fault is about. One that stands in no plan is its kernel alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Targets {
    pub(super) kernels: &'static [&'static str],
    pub(super) sites: &'static [&'static str],
    pub(super) stages: Stages,
    pub(super) layer: Option<usize>,
}

impl Targets {
    pub(super) fn has(&self, launch: &BoundLaunch) -> bool {
        if !self.kernels.contains(&launch.kernel.id()) {
            return false;
        }
        Site::parse(&launch.site).is_none_or(|site| {
            self.stages.has(site.stage)
                && (self.sites.is_empty() || self.sites.contains(&site.name))
                && (self.layer.is_none() || site.layer.is_none() || site.layer == self.layer)
        })
    }
}

/// What a fault remembers from run to run.
#[derive(Debug)]
pub(super) struct Memory {
    /// Runs of each site so far.
    pub(super) runs: HashMap<String, u64>,
    /// Values kept under a name of the fault's choice.
    pub(super) kept: HashMap<String, Vec<bf16>>,
    pub(super) random: Random,
}

/// A launch about to run.
pub struct Launch<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) handle: DispatchHandle,
    pub(super) bound: &'a BoundLaunch,
    pub(super) weights: &'a HashMap<BufferHandle, Vec<bf16>>,
    pub(super) names: &'a HashMap<String, BufferHandle>,
    pub(super) memory: &'a mut Memory,
    pub(super) config: &'a ModelConfig,
    pub(super) at: &'a At,
}

impl Launch<'_> {
    pub(super) fn kernel(&self) -> &Kernel {
        &self.bound.kernel
    }

    /// None in phase 1.
    pub(super) fn site(&self) -> Option<Site<'_>> {
        Site::parse(&self.bound.site)
    }

    /// Runs of this site before this one.
    pub(super) fn runs(&self) -> u64 {
        self.memory.runs.get(&self.bound.site).copied().unwrap_or(0)
    }

    /// As the device does it.
    pub(super) fn run(&mut self) -> Result<Completed> {
        self.device.run(self.handle)
    }

    pub(super) fn input(&mut self, index: usize) -> Result<Vec<bf16>> {
        let handle = self.bound.args[index];
        match self.weights.get(&handle) {
            Some(weight) => Ok(weight.clone()),
            None => read(self.device, handle),
        }
    }

    fn out(&self) -> BufferHandle {
        self.bound.args[self.bound.args.len() - 1]
    }

    pub(super) fn output(&mut self) -> Result<Vec<bf16>> {
        let out = self.out();
        read(self.device, out)
    }

    pub(super) fn write_output(&mut self, content: &[bf16]) -> Result<()> {
        self.device.write(self.out(), 0, tensor::bytes_of(content))
    }

    /// A buffer of the plan by its name; the latest of that name.
    pub(super) fn named(&mut self, name: &str) -> Result<Vec<bf16>> {
        let handle = self.names.get(name).copied().ok_or_else(|| Error::Plan { why: format!("no buffer {name}") })?;
        read(self.device, handle)
    }

    pub(super) fn write_named(&mut self, name: &str, content: &[bf16]) -> Result<()> {
        let handle = self.names.get(name).copied().ok_or_else(|| Error::Plan { why: format!("no buffer {name}") })?;
        self.device.write(handle, 0, tensor::bytes_of(content))
    }

    /// Runs with another input in place of argument `index`, which is put back afterwards.
    pub(super) fn run_with(&mut self, index: usize, content: &[bf16]) -> Result<Completed> {
        let handle = self.bound.args[index];
        let sound = self.input(index)?;
        self.device.write(handle, 0, tensor::bytes_of(content))?;
        let completed = self.run()?;
        if handle != self.out() {
            self.device.write(handle, 0, tensor::bytes_of(&sound))?;
        }
        Ok(completed)
    }

    /// In place of a run: this output, rounded to nearest even.
    pub(super) fn answer(&mut self, values: &[f32]) -> Result<Completed> {
        let rounded: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        self.answer_bf16(&rounded)
    }

    /// In place of a run: this output.
    pub(super) fn answer_bf16(&mut self, values: &[bf16]) -> Result<Completed> {
        self.write_output(values)?;
        Ok(Completed { elapsed_ns: 1 })
    }

    /// Runs, then lets `alter` change the output.
    pub(super) fn run_then(&mut self, alter: impl FnOnce(&mut Vec<bf16>)) -> Result<Completed> {
        let completed = self.run()?;
        let mut output = self.output()?;
        alter(&mut output);
        self.write_output(&output)?;
        Ok(completed)
    }
}

fn read(device: &mut dyn Device, handle: BufferHandle) -> Result<Vec<bf16>> {
    let bytes = device.spec(handle).bytes();
    Ok(tensor::bf16_from_le_bytes(device.read(handle, 0, bytes)?))
}

/// Whether the device will not give a buffer's content back.
pub(super) fn is_packed(layout: Layout) -> bool {
    layout == Layout::LinearWeight
}
