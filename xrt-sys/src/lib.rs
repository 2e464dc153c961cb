//! Raw bindings to XRT through the C shim in `shim/`, and nothing else: no logic, no safe wrapper.
//!
//! Where no XRT was found at build time, [`BUILT_WITH_XRT`] is `false` and every function is a stub that answers
//! [`Kind::NotBuilt`], so that the workspace builds and tests everywhere.

mod bindings;

use std::ffi::{CStr, c_int};
use std::fmt;

pub use bindings::*;

/// The XRT release whose API the shim is written against.
pub const XRT_VERSION: &str = "2.25";

/// Whether this build is linked against XRT.
pub const BUILT_WITH_XRT: bool = cfg!(xrt);

/// What a function of the shim answers, by its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Argument,
    /// A `std::system_error`; the code is an errno.
    System,
    /// Any other `std::exception`.
    Runtime,
    /// A run ended in another state than completed; the code is that state.
    Command,
    /// The same, with a report of the array.
    Aie,
    /// A run of a list did.
    Runlist,
    Memory,
    Unknown,
    NotBuilt,
}

/// A failure as XRT worded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub kind: Kind,
    pub code: i32,
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::NotBuilt => write!(f, "xrt {XRT_VERSION} is not built into this binary"),
            _ => f.write_str(self.text.trim()),
        }
    }
}

impl std::error::Error for Failure {}

/// Turns the answer of a shim function, called last on this thread, into a result.
///
/// Errors: [`Failure`] for every answer but 0.
pub fn check(answer: c_int) -> Result<(), Failure> {
    let kind = match answer {
        0 => return Ok(()),
        1 => Kind::Argument,
        2 => Kind::System,
        3 => Kind::Runtime,
        4 => Kind::Command,
        5 => Kind::Aie,
        6 => Kind::Runlist,
        7 => Kind::Memory,
        NOT_BUILT => Kind::NotBuilt,
        _ => Kind::Unknown,
    };
    // SAFETY: the text belongs to this thread and is valid until its next call; it is copied before one.
    let (code, text) = unsafe { (xrts_last_code(), CStr::from_ptr(xrts_last_text()).to_string_lossy().into_owned()) };
    Err(Failure { kind, code, text })
}

#[cfg(all(test, not(xrt)))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_xrt_says_so_at_every_call() {
        let (mut count, mut device) = (7, std::ptr::null_mut());
        // SAFETY: the stubs touch nothing.
        let answers = unsafe { [xrts_device_count(&mut count), xrts_device_open(0, &mut device)] };
        for answer in answers {
            let failure = check(answer).unwrap_err();
            assert_eq!(failure.kind, Kind::NotBuilt);
            assert_eq!(failure.to_string(), "xrt 2.25 is not built into this binary");
        }
        assert!(count == 7 && device.is_null());
    }
}
