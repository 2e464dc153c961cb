//! Compiles the shim against XRT where there is one; without it the crate is a stub, and the build goes on.
//!
//! Tells dependents (`DEP_XRT_COREUTIL_*`): `LIB`, the folder of the libraries, and `LOADER`, the dynamic loader that
//! belongs to them when XRT was unpacked beside the system.

mod search;
mod variables;

use std::path::{Path, PathBuf};

/// The workspace that this package is part of.
fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a package lies in a folder").to_owned()
}

fn main() {
    variables::announce();
    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rustc-check-cfg=cfg(xrt)");
    let found = match search::search() {
        Ok(found) => found,
        Err(why) => {
            // The stub is the normal case on a machine without an NPU: no warning but where XRT was asked for.
            if variables::path(variables::XILINX_XRT).is_some() || cfg!(feature = "unpacked") {
                println!("cargo::warning={why}: xrt-sys is built as a stub");
            }
            return;
        }
    };
    println!("cargo::rustc-cfg=xrt");
    println!("cargo::rustc-env=XRT_SYS_BUILT_WITH={}.{}", found.version.0, found.version.1);
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .flag("-isystem")
        .flag(&found.include)
        .file("shim/xrts.cpp")
        .warnings(true)
        .extra_warnings(true)
        .compile("xrts");
    println!("cargo::rustc-link-search=native={}", found.lib.display());
    println!("cargo::rustc-link-lib=dylib=xrt_coreutil");
    println!("cargo::rustc-link-lib=dylib=uuid");
    println!("cargo::metadata=lib={}", found.lib.display());
    let loader = found.lib.join("ld-linux-x86-64.so.2");
    if loader.exists() && !found.lib.starts_with("/usr") {
        println!("cargo::metadata=loader={}", loader.display());
    }
}
