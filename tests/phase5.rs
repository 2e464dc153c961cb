//! Phase 5, every fixture on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main("phase5", phase::phase5::cases, Some(phase::phase5::DOCUMENT))
}
