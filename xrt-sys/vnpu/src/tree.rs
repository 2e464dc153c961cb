//! The files that a driver and its device show in `/sys` and `/dev`, in a private folder, and which paths lead there.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::fault;

/// Where the device sits on its bus.
const BDF: &str = "0000:f0:00.1";

/// The device's node.
pub const NODE: &[u8] = b"/dev/accel/accel0";

static TREE: OnceLock<Tree> = OnceLock::new();

struct Tree {
    root: PathBuf,
    redirected: Vec<Vec<u8>>,
    /// A child after `fork` must not take its parent's files away.
    owner: u32,
}

/// Builds the tree. Before this every path leads where it says.
pub fn build() {
    match make() {
        Ok(tree) => drop(TREE.set(tree)),
        Err(e) => eprintln!("vnpu: no device: {e}"),
    }
}

/// Takes it down again.
pub fn remove() {
    if let Some(tree) = TREE.get().filter(|tree| tree.owner == std::process::id()) {
        let _ = fs::remove_dir_all(&tree.root);
    }
}

fn make() -> std::io::Result<Tree> {
    let root = tempfile::Builder::new().prefix("phasegate-vnpu.").tempdir()?.keep();
    let device = format!("/sys/devices/pci0000:f0/{BDF}");
    let (id, name) = match fault::first_generation() {
        true => ("0x1502", "phasegate virtual NPU1"),
        false => ("0x17f0", "phasegate virtual NPU2"),
    };
    let put = |path: &str, text: &str| -> std::io::Result<()> {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("below the root"))?;
        fs::write(path, format!("{text}\n"))
    };
    let files = [
        ("vendor", "0x1022"),
        ("device", id),
        ("revision", if fault::first_generation() { "0x00" } else { "0x11" }),
        ("subsystem_vendor", "0x1022"),
        ("subsystem_device", id),
        ("class", "0x118000"),
        ("device_type", "0"),
        ("vbnv", name),
        ("fw_version", "0.0.0.0"),
        ("ready", "1"),
        ("link_width", "0"),
        ("link_width_max", "0"),
        ("link_speed", "0"),
        ("link_speed_max", "0"),
        ("resource", "0x0 0x0 0x0"),
        ("accel/accel0/dev", "261:0"),
    ];
    for (file, text) in files {
        put(&format!("{device}/{file}"), text)?;
    }
    put("/sys/module/amdxdna/version", "virtual")?;
    put("/dev/accel/accel0", "")?;
    let links = [
        (format!("/sys/bus/pci/devices/{BDF}"), format!("../../../devices/pci0000:f0/{BDF}")),
        (format!("/sys/bus/pci/drivers/amdxdna/{BDF}"), format!("../../../../devices/pci0000:f0/{BDF}")),
    ];
    for (at, target) in links {
        let at = root.join(at.trim_start_matches('/'));
        fs::create_dir_all(at.parent().expect("below the root"))?;
        symlink(target, at)?;
    }
    let redirected = [
        format!("/sys/bus/pci/devices/{BDF}"),
        device,
        "/sys/bus/pci/drivers/amdxdna".into(),
        "/sys/module/amdxdna".into(),
        "/dev/accel".into(),
    ];
    Ok(Tree { root, redirected: redirected.map(String::into_bytes).into(), owner: std::process::id() })
}

/// Where a path leads instead, if it is one of the device's.
pub fn redirect(path: &CStr) -> Option<CString> {
    let (tree, path) = (TREE.get()?, path.to_bytes());
    let is_below = |folder: &Vec<u8>| {
        path.strip_prefix(folder.as_slice()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    if !tree.redirected.iter().any(is_below) {
        return None;
    }
    CString::new([tree.root.as_os_str().as_bytes(), path].concat()).ok()
}

/// A resolved path without the private folder in front, if it lies there.
pub fn restore(resolved: &[u8]) -> Option<&[u8]> {
    resolved.strip_prefix(TREE.get()?.root.as_os_str().as_bytes())
}
