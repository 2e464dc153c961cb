//! Raw bindings to XRT, and nothing else: no logic, no safe wrapper.
//!
//! This build has no XRT in it: [`BUILT_WITH_XRT`] is `false` and every call returns [`NotBuilt`], so that the
//! workspace builds and tests everywhere. The shim over XRT's C++ API is bound when XRT is found at build time.
#![forbid(unsafe_code)]

/// The XRT release whose API the shim is written against.
pub const XRT_VERSION: &str = "2.25";

/// Whether this build is linked against XRT.
pub const BUILT_WITH_XRT: bool = false;

/// The typed answer of every call in a build without XRT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotBuilt;

impl std::fmt::Display for NotBuilt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "xrt {XRT_VERSION} is not built into this binary")
    }
}

impl std::error::Error for NotBuilt {}

/// Counts the NPU devices that XRT sees.
///
/// Errors: [`NotBuilt`] when this build has no XRT.
pub fn device_count() -> Result<u32, NotBuilt> {
    Err(NotBuilt)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_build_without_xrt_says_so() {
        assert_eq!(super::device_count().unwrap_err().to_string(), "xrt 2.25 is not built into this binary");
    }
}
