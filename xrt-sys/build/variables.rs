//! Every environment variable that this build reads, each named once.

use std::env;
use std::path::PathBuf;

/// Folder of `xrt/xrt_device.h`, and of `libxrt_coreutil.so`; only both together count.
pub const XRT_INC_DIR: &str = "XRT_INC_DIR";
pub const XRT_LIB_DIR: &str = "XRT_LIB_DIR";
/// Root of an XRT installation, as its `setup.sh` sets it.
pub const XILINX_XRT: &str = "XILINX_XRT";

const ALL: [&str; 3] = [XRT_INC_DIR, XRT_LIB_DIR, XILINX_XRT];

/// Tells cargo to build anew when one of them changes.
pub fn announce() {
    for name in ALL {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// A path from the environment; unset and empty are the same.
pub fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
