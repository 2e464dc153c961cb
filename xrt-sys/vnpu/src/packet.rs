//! Command packets: from a buffer to the control code in it, and its state when it is done.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use crate::abi::{opcode, state as ert};
use crate::device::state;
use crate::engine::{self, Written};
use crate::fault::{self, Fault};
use crate::program::{self, Decoded};

/// Units: words. Of what stands in front of a packet's payload: its header and the mask of compute units.
const PREFIX: usize = 2;

/// The longest chain that is followed.
const CHAIN_MAX: u64 = 4096;

/// How long a command of a time-out takes before it is given up.
const TIMEOUT: Duration = Duration::from_millis(50);

/// A packet in a buffer that lives as long as its command is in flight.
struct Packet(*mut u32);

impl Packet {
    fn of(fd: c_int, handle: u32) -> Option<Packet> {
        let view = state().device(fd)?.view(handle)?;
        Some(Packet(view.cast()))
    }

    fn word(&self, at: usize) -> u32 {
        // SAFETY: packets are at least a page long; the process does not write one that is in flight.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn double(&self, at: usize) -> u64 {
        u64::from(self.word(at)) | u64::from(self.word(at + 1)) << 32
    }

    fn set(&self, at: usize, value: u32) {
        // SAFETY: as `word`.
        unsafe { self.0.add(at).write_volatile(value) };
    }

    /// The state is the last thing that is written, and seen only with everything before it.
    fn finish(&self, state: u32) -> u32 {
        fence(Ordering::Release);
        // SAFETY: aligned, and read by XRT as a word of memory that somebody else writes.
        let header = unsafe { AtomicU32::from_ptr(self.0) };
        header.store(header.load(Ordering::Relaxed) & !0xf | state, Ordering::Release);
        state
    }
}

/// Runs a packet and gives its state.
pub fn run(fd: c_int, handle: u32, fault: Option<Fault>) -> u32 {
    let Some(packet) = Packet::of(fd, handle) else { return ert::ERROR };
    let header = packet.word(0);
    let (opcode, extra_masks) = (header >> 23 & 0x1f, (header >> 10 & 3) as usize);
    fault::log(|| format!("packet {handle}: opcode {opcode}, {} words", header >> 12 & 0x7ff));
    if fault == Some(Fault::Error) {
        return packet.finish(ert::ERROR);
    }
    let payload = PREFIX + extra_masks;
    let outcome = match opcode {
        opcode::CHAIN => return chain(fd, &packet, fault),
        opcode::NPU => code(fd, packet.double(payload), packet.word(payload + 2), fault),
        opcode::PREEMPTIBLE | opcode::PREEMPTIBLE_ELF => {
            code(fd, packet.double(payload), packet.word(payload + 6), fault)
        }
        other => Err(format!("opcode {other} is not known")),
    };
    match outcome {
        Ok(()) if fault == Some(Fault::Timeout) => {
            std::thread::sleep(TIMEOUT);
            packet.finish(ert::TIMEOUT)
        }
        Ok(()) => packet.finish(ert::COMPLETED),
        Err(why) => {
            eprintln!("vnpu: {why}");
            packet.finish(ert::ERROR)
        }
    }
}

/// Runs the packets of a chain in order, up to the first that does not complete.
fn chain(fd: c_int, packet: &Packet, fault: Option<Fault>) -> u32 {
    let count = u64::from(packet.word(1)).min(CHAIN_MAX) as usize;
    for i in 0..count {
        packet.set(2, i as u32);
        let state = run(fd, packet.double(7 + 2 * i) as u32, fault);
        if state != ert::COMPLETED {
            packet.set(3, i as u32);
            return packet.finish(state);
        }
    }
    packet.finish(ert::COMPLETED)
}

/// Runs control code.
///
/// Errors: an address outside of every buffer, code or a program that cannot be read, or one that does not fit it.
fn code(fd: c_int, address: u64, bytes: u32, fault: Option<Fault>) -> Result<(), String> {
    let (contract, arguments) = {
        let mut state = state();
        let device = state.device(fd).ok_or("the device was closed")?;
        let code = device.memory(address, u64::from(bytes))?;
        // SAFETY: within a live buffer, and XRT writes no control code that is in flight.
        let Decoded { pdi, arguments } = program::decode(unsafe { std::slice::from_raw_parts(code, bytes as usize) })?;
        let pdi = pdi.ok_or("the control code loads no PDI")?;
        // SAFETY: as above; the length is checked with the second look.
        let head = unsafe { device.memory(pdi, 12)?.cast::<[u8; 12]>().read() };
        let length = program::contract_length(head).ok_or("the PDI is not one of the virtual NPU's")?;
        let contract = device.memory(pdi + 12, length as u64)?;
        // SAFETY: as above.
        let contract = unsafe { std::slice::from_raw_parts(contract, length) }.to_vec();
        let mut memory = vec![];
        for argument in arguments {
            let at = device.memory(argument.address, argument.bytes);
            memory.push((at.map_err(|why| format!("argument {}: {why}", argument.index))?, argument.bytes as usize));
        }
        (contract, memory)
    };
    let written = match fault {
        Some(Fault::Timeout) => Written::InPart,
        Some(Fault::Stale) => Written::FirstTimeOnly,
        _ => Written::Whole,
    };
    engine::run(&contract, &arguments, written)
}
