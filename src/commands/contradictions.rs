//! Options that cannot both be meant: refused before anything is read, so that none is silently ignored.

use clap::ArgMatches;
use clap::parser::ValueSource;

use crate::error::{Error, Result};
use crate::runner::external::LABEL;

/// Options that shape a plan of ours; another engine has none.
const OF_A_PLAN: [&str; 5] = ["host", "bias", "pad_gqa", "optimise_prefill", "optimise_decode"];

/// Holds the options of a command against each other.
///
/// Errors: [`Error::Usage`] naming two that contradict.
pub(super) fn find(matches: &ArgMatches) -> Result<()> {
    let Some((_, options)) = matches.subcommand() else { return Ok(()) };
    let device = value(options, "device").unwrap_or_default();
    let runner = given(options, "runner");
    if runner && given(options, "device") && device != LABEL {
        return Err(contradiction("--device", &device, "none beside --runner: the program is what is gated"));
    }
    let external = runner || device == LABEL;
    if let (true, Some(option)) = (external, OF_A_PLAN.into_iter().find(|option| given(options, option))) {
        let found = value(options, option).unwrap_or_default();
        let name = format!("--{}", option.replace('_', "-"));
        return Err(contradiction(
            &name,
            &found,
            "a device of ours: an external engine has no plan that it could change",
        ));
    }
    // An engine's arithmetic says which limits hold for it; a device has its own.
    let Some(datapath) = value(options, "datapath").filter(|_| given(options, "datapath") && !external) else {
        return Ok(());
    };
    match (device.as_str(), datapath.as_str()) {
        ("emu", _) | ("emu_npu2", "npu2") => Ok(()),
        _ => Err(contradiction("--datapath", &datapath, &format!("--device emu with it, not {device}"))),
    }
}

fn contradiction(what: &str, found: &str, expected: &str) -> Error {
    Error::Usage { what: what.into(), found: found.into(), expected: expected.into() }
}

fn known(options: &ArgMatches, option: &str) -> bool {
    options.ids().any(|id| id == option)
}

/// Whether it stands on the command line.
fn given(options: &ArgMatches, option: &str) -> bool {
    known(options, option) && options.value_source(option) == Some(ValueSource::CommandLine)
}

/// Its value as written, or the default.
fn value(options: &ArgMatches, option: &str) -> Option<String> {
    if !known(options, option) {
        return None;
    }
    let raw = options.get_raw(option)?;
    Some(raw.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(","))
}
