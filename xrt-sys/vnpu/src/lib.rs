//! A virtual NPU2 below the real XRT: preloaded (`LD_PRELOAD`) into a program that is linked against XRT, it answers for
//! the amdxdna kernel driver, so that XRT and its XDNA library run as they are, through to completed runs.
//!
//! It decodes the control code that XRT has patched, holds every address against the live buffers, and computes the
//! dispatch with `emu`'s kernels. What a dispatch computes stands in its ELF (the PDI, see `program`). It proves the
//! host's side and never a kernel's numbers on silicon; its name says that it is virtual. What it shall do wrong is read
//! from `PHASEGATE_VNPU` (see `fault`).

#![cfg_attr(
    test,
    expect(dead_code, reason = "its own tests keep the C library, which leaves `intercept`'s callees alone")
)]

mod abi;
mod device;
mod engine;
mod fault;
mod intercept;
mod ioctl;
mod packet;
#[cfg_attr(not(test), expect(dead_code, reason = "writing is the part of `vnpu-elves`"))]
mod program;
mod tree;
mod worker;

/// Marks a process that this library is preloaded into.
#[unsafe(no_mangle)]
pub extern "C" fn phasegate_vnpu() -> u32 {
    1
}
