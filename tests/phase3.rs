//! Phase 3, every fixture on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main("phase3", phase::phase3::cases, Some(phase::phase3::DOCUMENT))
}
