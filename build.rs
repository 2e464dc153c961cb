//! How programs of this package find XRT when they start: the folder that it was linked from, and, where `make xrt`
//! unpacked it beside the system, the dynamic loader and C library that belong to it.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // What xrt-sys found; cargo hands it over, and nothing when it is a stub.
    let found = |name: &str| env::var(name).ok();
    let Some(lib) = found("DEP_XRT_COREUTIL_LIB") else { return };
    // A path of the old kind counts for XRT's own libraries and plugins too.
    let mut arguments = vec![format!("-Wl,-rpath,{lib}"), "-Wl,--disable-new-dtags".to_owned()];
    if let Some(loader) = found("DEP_XRT_COREUTIL_LOADER") {
        // Its libraries want a newer C library than the one that is linked here.
        arguments.push("-Wl,--allow-shlib-undefined".into());
        arguments.push(format!("-Wl,--dynamic-linker,{loader}"));
    }
    for argument in arguments {
        println!("cargo::rustc-link-arg={argument}");
    }
}
