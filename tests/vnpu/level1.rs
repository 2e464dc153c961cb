//! Level 1: the real XRT without a device, and ELFs, which need none. The texts are XRT's.

use libtest_mimic::Failed;
use phasegate::device::npu::handles::{self, ElfImage};

use super::{Named, child};

pub fn cases() -> Vec<Named> {
    vec![
        ("npu_is_not_available", npu_is_not_available),
        ("vnpu_is_not_preloaded", vnpu_is_not_preloaded),
        ("version", version),
        ("elves_that_are_none", elves_that_are_none),
    ]
}

fn npu_is_not_available() -> Result<(), Failed> {
    let left = child::without_device(&["verify", "tiny_llama", "--device", "npu"])?;
    left.expect(3, "error: device npu is not available: XRT 2.25 sees no NPU")
}

fn vnpu_is_not_preloaded() -> Result<(), Failed> {
    let left = child::without_device(&["verify", "tiny_llama", "--device", "vnpu"])?;
    left.expect(3, "error: device vnpu is not available: the virtual NPU is not preloaded; make test-vnpu")
}

fn version() -> Result<(), Failed> {
    let found = handles::version()?;
    if found >= (2, 25) { Ok(()) } else { Err(format!("found XRT {found:?}").into()) }
}

fn elves_that_are_none() -> Result<(), Failed> {
    let me = std::env::current_exe()?;
    let junk = ElfImage::from_bytes(&[b'x'; 64]).map(drop);
    let missing = ElfImage::open("/nothing.elf".as_ref()).map(drop);
    let of_the_host = ElfImage::open(&me).map(drop);
    for (found, expected) in [
        (junk, "not valid ELF data"),
        (missing, "/nothing.elf is not found or is not a valid ELF file"),
        (of_the_host, "ELF contains unsupported platform OS/ABI: "),
    ] {
        match found {
            Err(failure) if failure.to_string().starts_with(expected) => {}
            other => return Err(format!("expected {expected:?}, found {other:?}").into()),
        }
    }
    Ok(())
}
