//! Phase 6, every fixture on every chosen device, through the binary of this build and the Makefile.

use phasegate::harness::phases;
use phasegate::phase::phase6;

/// The binary that is deployed.
const BINARY: &str = env!("CARGO_BIN_EXE_phasegate");

fn main() -> std::process::ExitCode {
    let cases: phases::CasesOf = |outline| phase6::cases(outline, BINARY);
    phases::main_deployed("phase6", cases, |model, device| phase6::layer_figures(BINARY, model, device))
}
