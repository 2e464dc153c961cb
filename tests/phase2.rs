//! Phase 2, every fixture on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main("phase2", phase::phase2::cases, Some(phase::phase2::DOCUMENT))
}
