//! Finds XRT: `XRT_INC_DIR` with `XRT_LIB_DIR`, `XILINX_XRT`, `/opt/xilinx/xrt`, `/usr`. Reads no file but headers.

use std::fs;
use std::path::{Path, PathBuf};

use crate::variables;

/// The release whose API the shim is written against.
const NEEDED: (u32, u32) = (2, 25);

/// Where an XRT lies.
pub struct Found {
    pub include: PathBuf,
    pub lib: PathBuf,
    pub version: (u32, u32),
}

/// The first XRT that is new enough; else what was found instead, for the warning.
pub fn search() -> Result<Found, String> {
    let mut too_old = Vec::new();
    for (include, lib) in places() {
        // Cargo takes a watched path that is missing for a change, and would build everything anew at every call. The
        // folder of `make xrt` is asked for only where it is wanted, so it is watched in any case.
        let headers = include.join("xrt");
        if headers.exists() || include.starts_with(crate::workspace()) {
            println!("cargo::rerun-if-changed={}", headers.display());
        }
        let Some(version) = version(&include).filter(|_| lib.join("libxrt_coreutil.so").exists()) else { continue };
        if version >= NEEDED {
            return Ok(Found { include, lib, version });
        }
        too_old.push(format!("XRT {}.{} in {}", version.0, version.1, include.display()));
    }
    match too_old.as_slice() {
        [] => Err("XRT was not found".into()),
        found => Err(format!("found {}, needed is {}.{}", found.join(", "), NEEDED.0, NEEDED.1)),
    }
}

fn places() -> Vec<(PathBuf, PathBuf)> {
    let mut places = Vec::new();
    if let (Some(include), Some(lib)) =
        (variables::path(variables::XRT_INC_DIR), variables::path(variables::XRT_LIB_DIR))
    {
        places.push((include, lib));
    }
    let unpacked = cfg!(feature = "unpacked").then(|| crate::workspace().join("target/xrt/usr"));
    let roots = unpacked.into_iter().chain(variables::path(variables::XILINX_XRT));
    for root in roots.chain(["/opt/xilinx/xrt".into(), "/usr".into()]) {
        let include = root.join("include");
        places.extend(["lib", "lib64", "lib/x86_64-linux-gnu"].map(|lib| (include.clone(), root.join(lib))));
    }
    places
}

/// What `XRT_VERSION_CODE` says.
fn version(include: &Path) -> Option<(u32, u32)> {
    let headers = ["xrt/detail/version-slim.h", "version.h"];
    let text = headers.iter().find_map(|header| fs::read_to_string(include.join(header)).ok())?;
    let (_, rest) = text.split_once("XRT_VERSION_CODE XRT_VERSION(")?;
    let (major, minor) = rest.split_once(')')?.0.split_once(',')?;
    Some((major.trim().parse().ok()?, minor.trim().parse().ok()?))
}
