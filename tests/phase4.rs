//! Phase 4, every fixture on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main("phase4", phase::phase4::cases, Some(phase::phase4::DOCUMENT))
}
