//! Phase 0, every fixture on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main("phase0", phase::phase0::cases, None)
}
