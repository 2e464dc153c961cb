//! Computes a dispatch with `emu`'s kernels, on the memory that the control code named.
//!
//! One emulated device for the process; each program's buffers are made once. Weights are packed once and again when
//! their content has changed: a checksum over all of it is taken at every run, since writing a buffer tells nobody.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use phasegate::compute::Pool;
use phasegate::device::emu::EmuDevice;
use phasegate::device::{Arithmetic, BoundLaunch, BufferHandle, BufferSpec, Device, DispatchHandle, Layout, Role};
use phasegate::kernel::contract::{Argument, ArgumentLayout, ArgumentRole, Contract};
use phasegate::phase::devices;
use phasegate::tensor::transpose_bf16;

/// How much of its outputs a run leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Whole,
    /// A quarter, as a time-out does.
    InPart,
    /// Nothing after the program's first run.
    FirstTimeOnly,
}

type Memory = (*mut u8, usize);

/// What a weight was when it was packed.
struct Packed {
    buffer: BufferHandle,
    checksum: u64,
}

struct Program {
    contract: Contract,
    /// Of every argument that is no weight.
    buffers: Vec<Option<BufferHandle>>,
    /// By the weights that it is bound to.
    dispatches: HashMap<Vec<BufferHandle>, DispatchHandle>,
    runs: u64,
}

struct Engine {
    owner: u32,
    device: EmuDevice,
    programs: HashMap<Vec<u8>, Program>,
    /// By address, size and layout.
    weights: HashMap<(usize, usize, ArgumentLayout), Packed>,
}

static ENGINE: Mutex<Option<Engine>> = Mutex::new(None);

/// Runs the dispatch of this contract.
///
/// Errors: a contract that cannot be read or does not fit the arguments, or what the emulated device says.
pub fn run(contract: &[u8], arguments: &[Memory], written: Written) -> Result<(), String> {
    let mut engine = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    // Worker threads do not survive a fork: a child makes an engine of its own and leaves its parent's alone.
    if let Some(foreign) = engine.take_if(|engine| engine.owner != std::process::id()) {
        std::mem::forget(foreign);
    }
    let engine = match &mut *engine {
        Some(engine) => engine,
        none => none.insert(Engine::new().map_err(|e| e.to_string())?),
    };
    engine.run(contract, arguments, written).map_err(|e| e.to_string())
}

impl Engine {
    fn new() -> phasegate::error::Result<Engine> {
        let pool = Arc::new(Pool::new(phasegate::settings::threads()?));
        let device = EmuDevice::new(devices::isa()?, pool, Arithmetic::Ieee);
        Ok(Engine { owner: std::process::id(), device, programs: HashMap::new(), weights: HashMap::new() })
    }

    fn run(
        &mut self,
        contract: &[u8],
        arguments: &[Memory],
        written: Written,
    ) -> Result<(), Box<dyn std::error::Error>> {
        if !self.programs.contains_key(contract) {
            let program = Program::new(serde_json::from_slice(contract)?, &mut self.device)?;
            self.programs.insert(contract.to_vec(), program);
        }
        let program = self.programs.get_mut(contract).expect("inserted above");
        let wanted: Vec<usize> = program.contract.args.iter().map(Argument::bytes).collect();
        if wanted.len() != arguments.len() || wanted.iter().zip(arguments).any(|(want, have)| *want > have.1) {
            let found: Vec<usize> = arguments.iter().map(|argument| argument.1).collect();
            return Err(format!("found arguments of {found:?} bytes, expected {wanted:?}").into());
        }
        program.runs += 1;
        if written == Written::FirstTimeOnly && program.runs > 1 {
            return Ok(());
        }
        let mut bound = vec![];
        for (place, (argument, memory)) in program.contract.args.iter().zip(arguments).enumerate() {
            let buffer = match program.buffers[place] {
                Some(buffer) => buffer,
                None => weight(&mut self.device, &mut self.weights, argument, *memory)?,
            };
            if matches!(argument.role, ArgumentRole::Input | ArgumentRole::InOut) {
                self.device.write(buffer, 0, content(argument, *memory))?;
            }
            bound.push(buffer);
        }
        let dispatch = match program.dispatches.get(&bound) {
            Some(dispatch) => *dispatch,
            None => {
                let launches = program.contract.launches.iter().map(|launch| BoundLaunch {
                    site: launch.kernel.id().into(),
                    kernel: launch.kernel.clone(),
                    args: launch.args.iter().map(|&place| bound[place]).collect(),
                });
                let dispatch = self.device.prepare(&program.contract.id(), launches.collect())?;
                program.dispatches.insert(bound.clone(), dispatch);
                dispatch
            }
        };
        self.device.run(dispatch)?;
        for ((argument, memory), buffer) in program.contract.args.iter().zip(arguments).zip(bound) {
            if matches!(argument.role, ArgumentRole::Output | ArgumentRole::InOut) {
                let bytes = if written == Written::InPart { argument.bytes() / 4 } else { argument.bytes() };
                let result = self.device.read(buffer, 0, bytes)?;
                // SAFETY: within a live buffer that is at least this long, and no part of `result`.
                unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), memory.0, bytes) };
            }
        }
        Ok(())
    }
}

impl Program {
    fn new(contract: Contract, device: &mut EmuDevice) -> phasegate::error::Result<Program> {
        let mut buffers = vec![];
        for argument in &contract.args {
            buffers.push(match argument.role {
                ArgumentRole::Weight => None,
                _ => Some(device.create(spec(argument, Layout::Rows))?),
            });
        }
        Ok(Program { contract, buffers, dispatches: HashMap::new(), runs: 0 })
    }
}

fn spec(argument: &Argument, layout: Layout) -> BufferSpec {
    let role = if layout == Layout::Rows { Role::Intermediate } else { Role::StaticWeight };
    let Argument { name, dtype, rows, cols, .. } = argument.clone();
    BufferSpec { name, dtype, rows, cols, role, layout }
}

fn content<'a>(argument: &Argument, memory: Memory) -> &'a [u8] {
    // SAFETY: within a live buffer, held against the contract by `run`; the process does not write to an argument of a
    // command in flight, and the slice does not outlive the run.
    unsafe { std::slice::from_raw_parts(memory.0, argument.bytes()) }
}

/// The packed weight of this memory, packed anew when the memory has changed.
fn weight(
    device: &mut EmuDevice,
    weights: &mut HashMap<(usize, usize, ArgumentLayout), Packed>,
    argument: &Argument,
    memory: Memory,
) -> phasegate::error::Result<BufferHandle> {
    let content = content(argument, memory);
    let checksum = checksum(content);
    let key = (memory.0 as usize, argument.rows, argument.layout);
    let shape = (argument.rows, argument.cols);
    let known = weights.get(&key).filter(|known| {
        let spec = device.spec(known.buffer);
        (spec.rows, spec.cols) == shape
    });
    let buffer = match known {
        Some(known) if known.checksum == checksum => return Ok(known.buffer),
        Some(known) => known.buffer,
        None => device.create(spec(argument, Layout::LinearWeight))?,
    };
    match argument.layout {
        ArgumentLayout::Rows => device.write(buffer, 0, content)?,
        ArgumentLayout::Transposed => {
            let mut rows = vec![0; content.len()];
            transpose_bf16(content, &mut rows, argument.cols, argument.rows);
            device.write(buffer, 0, &rows)?;
        }
    }
    weights.insert(key, Packed { buffer, checksum });
    Ok(buffer)
}

/// Of every byte, at memory's speed, in eight lanes of words: a sum, which no one changed word leaves as it was, and the
/// sum of its values on the way, which no two do that cancel out in the first.
fn checksum(content: &[u8]) -> u64 {
    const LANES: usize = 8;
    const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
    let (blocks, rest) = content.as_chunks::<{ 8 * LANES }>();
    let (mut sums, mut sums_of_sums) = ([0u64; LANES], [0u64; LANES]);
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for lane in 0..LANES {
            sums[lane] = sums[lane].wrapping_add(u64::from_le_bytes(words[lane]));
            sums_of_sums[lane] = sums_of_sums[lane].wrapping_add(sums[lane]);
        }
    }
    let rest = rest.iter().map(|&byte| u64::from(byte));
    let mixed = |all: u64, part: u64| (all ^ part).wrapping_mul(PRIME).rotate_left(31);
    sums.into_iter().chain(sums_of_sums).chain(rest).fold(content.len() as u64, mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_byte_changes_the_checksum() {
        let content = vec![0u8; 300];
        for at in 0..content.len() {
            let mut other = content.clone();
            other[at] = 1;
            assert_ne!(checksum(&other), checksum(&content), "byte {at}");
        }
    }

    #[test]
    fn two_bytes_that_change_places_change_the_checksum() {
        let content: Vec<u8> = (0..300u32).map(|i| (i * 7 % 251) as u8).collect();
        for (one, other) in
            (0..content.len()).flat_map(|i| [(i, (i + 64) % 300), (i, (i + 8) % 300), (i, (i + 1) % 300)])
        {
            let mut swapped = content.clone();
            swapped.swap(one, other);
            assert!(swapped == content || checksum(&swapped) != checksum(&content), "bytes {one} and {other}");
        }
    }
}
