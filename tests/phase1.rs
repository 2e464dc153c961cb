//! Phase 1, every kernel and shape on every chosen device.

use phasegate::harness::phases;
use phasegate::phase;

fn main() -> std::process::ExitCode {
    phases::main_kernels("phase1", phase::phase1::cases, phase::phase1::on_demand)
}
