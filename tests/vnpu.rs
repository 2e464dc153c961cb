//! The NPU path through the real XRT: without a device (level 1), and on the virtual NPU (level 2).
//!
//! Whatever may hang, crash or taint a process runs in a child of its own: the `phasegate` binary, or this binary again.
//! Without XRT or the virtual NPU the cases are ignored with the reason; `make test-vnpu` has both.

#[path = "vnpu/child.rs"]
mod child;
#[path = "vnpu/faults.rs"]
mod faults;
#[path = "vnpu/level1.rs"]
mod level1;
#[path = "vnpu/misuse.rs"]
mod misuse;
#[path = "vnpu/results.rs"]
mod results;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// A case by its name; what it needs is that of its list.
type Named = (&'static str, fn() -> Result<(), Failed>);

fn main() -> ExitCode {
    if let Some(code) = child::act() {
        return code;
    }
    let arguments = Arguments::from_args();
    let without_xrt = (!xrt_sys::BUILT_WITH_XRT).then(|| "this binary is built without XRT".to_owned());
    let without_vnpu = phasegate::phase::devices::unavailable("vnpu").map(|error| error.to_string());
    let mut trials = vec![];
    let mut add = |level: &str, cases: Vec<Named>, missing: &Option<String>| {
        for (name, case) in cases {
            trials.push(Trial::test(format!("{level}::{name}"), case).with_ignored_flag(missing.is_some()));
        }
        if let (Some(why), false) = (missing, arguments.list) {
            eprintln!("vnpu: {level}: ignored: {why}");
        }
    };
    add("no_device", level1::cases(), &without_xrt);
    add("fault", faults::cases(), &without_vnpu);
    add("misuse", misuse::cases(), &without_vnpu);
    add("result", results::cases(), &without_vnpu);
    let not_fetched = || phasegate::model::locate(results::FETCHED, None).err().map(|error| error.to_string());
    add("result", results::cases_of_fetched(), &without_vnpu.clone().or_else(not_fetched));
    let conclusion = libtest_mimic::run(&arguments, trials);
    let required = phasegate::settings::list(phasegate::settings::REQUIRE);
    if let Some(why) = without_vnpu.filter(|_| required.iter().any(|name| name == "vnpu")) {
        eprintln!("vnpu: required and missing: {why}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
