//! The `phasegate` command.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    phasegate::commands::main()
}
