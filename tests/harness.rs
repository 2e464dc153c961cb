//! The harness tested from outside: this binary starts itself as small sample suites (`--sample NAME`) in a folder of
//! their own and looks at exit codes, output and the files left behind.

use std::process::ExitCode;

#[path = "harness/behaviour.rs"]
mod behaviour;
#[path = "harness/samples.rs"]
mod samples;

use phasegate::harness::{Arguments, Case, Suite};

fn main() -> ExitCode {
    let args = std::env::args().collect::<Vec<_>>();
    if let [program, flag, sample, rest @ ..] = args.as_slice()
        && flag == "--sample"
    {
        let arguments = Arguments::from_iter([program].into_iter().chain(rest));
        return samples::suite(sample).run_with(&arguments);
    }
    let mut suite = Suite::new("harness");
    for &(name, test) in behaviour::TESTS {
        suite.case(Case::new(name, move |_| test()).without_device());
    }
    suite.run()
}
