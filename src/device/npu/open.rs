//! Finding the NPU and saying what stands in the way: no XRT, another version, no device, another generation, too little
//! lockable memory, a virtual device where a real one was asked for.

use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use xrt_sys::{BUILT_WITH_XRT, Failure, XRT_VERSION};

use super::handles::{self, Device as XrtDevice, Info};
use super::{Inner, NpuDevice, contexts};
use crate::device::lock::{DeviceLock, LockOptions};
use crate::device::{Arithmetic, Counters, DeviceInfo};
use crate::error::{Error, Result};
use crate::kernel::cache::KernelCache;
use crate::settings;

/// How a virtual device's name begins.
const VIRTUAL: &str = "phasegate virtual";

/// The generation whose kernels there are.
const GENERATION: &str = "NPU2";

/// What is opened: the same code for both, and never one for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Label {
    Npu,
    Vnpu,
}

impl Label {
    pub fn of(label: &str) -> Option<Label> {
        match label {
            "npu" => Some(Label::Npu),
            "vnpu" => Some(Label::Vnpu),
            _ => None,
        }
    }

    pub fn label(self) -> &'static str {
        match self {
            Label::Npu => "npu",
            Label::Vnpu => "vnpu",
        }
    }

    fn absent(self, why: impl Into<String>) -> Error {
        Error::Unavailable { what: format!("device {}", self.label()), why: why.into() }
    }
}

/// Why the device of this label cannot be opened here, if it cannot. Opens nothing.
pub fn unavailable(label: Label) -> Option<Error> {
    if !BUILT_WITH_XRT {
        return Some(label.absent("this binary is built without XRT"));
    }
    match (label, is_preloaded()) {
        (Label::Vnpu, false) => return Some(label.absent("the virtual NPU is not preloaded; make test-vnpu")),
        (Label::Npu, true) => return Some(label.absent("the virtual NPU is preloaded, whose label is vnpu")),
        _ => {}
    }
    if let Err(error) = check_version(label) {
        return Some(error);
    }
    match handles::device_count() {
        Err(failure) => Some(label.absent(meaning(&failure))),
        Ok(0) => Some(label.absent(format!("XRT {XRT_VERSION} sees no NPU"))),
        Ok(_) if settings::kernels().is_none() => {
            Some(label.absent(format!("{} names no folder of compiled ELFs", settings::KERNELS)))
        }
        Ok(_) => None,
    }
}

/// The shared object's name is the same for years of releases, so the version is asked for.
fn check_version(label: Label) -> Result<()> {
    let (major, minor) = handles::version().map_err(|failure| label.absent(meaning(&failure)))?;
    let found = format!("{major}.{minor}");
    let parse = |text: &str| text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let needed: (u32, u32) = parse(XRT_VERSION).unwrap_or_default();
    if (major, minor) >= needed {
        return Ok(());
    }
    Err(label.absent(format!("XRT {found} runs here, this binary needs {XRT_VERSION} or later")))
}

/// Whether the virtual NPU's library is part of this process.
fn is_preloaded() -> bool {
    // SAFETY: looks a name up in what is loaded.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"phasegate_vnpu".as_ptr()) }.is_null()
}

/// What XRT says, and what it means where its words do not tell.
pub(super) fn meaning(failure: &Failure) -> String {
    let said = failure.to_string();
    let because = |why: &str| format!("{why} (XRT: {said})");
    if said.contains("mmap") && (said.contains("err=-11") || said.contains("err=-1)")) {
        let limit = memlock_limit().map_or_else(|| "?".into(), |bytes| (bytes >> 10).to_string());
        return because(&format!(
            "too little memory may be locked ({limit} KiB; the device's heap alone is 65536): raise `ulimit -l`"
        ));
    }
    if said.contains("CREATE_HWCTX") && failure.code == libc::ENOSPC {
        return because("no hardware context is free: other processes hold them all");
    }
    if said.contains("CREATE_BO") && failure.code == libc::ENOMEM {
        return because("no memory for a buffer");
    }
    said
}

/// Units: bytes; none when there is no limit.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one structure.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

static TAINT: OnceLock<String> = OnceLock::new();

/// Why no result of this process may be used any more, if that is so.
pub(super) fn taint() -> Option<String> {
    TAINT.get().map(|why| format!("nothing after a time-out counts; start a new process ({why})"))
}

/// From now on no result of this process may be used.
pub(super) fn set_taint(why: &str) {
    let _ = TAINT.set(why.to_owned());
}

impl NpuDevice {
    /// Opens the first device, and keeps other users of a real one out.
    ///
    /// Errors: [`Error::Unavailable`] and [`Error::Device`] with what stands in the way; [`Error::Incomplete`] after a
    /// time-out in this process.
    pub fn open(label: Label, cache: Arc<KernelCache>, timeout: Duration, lock: &LockOptions) -> Result<NpuDevice> {
        if let Some(error) = unavailable(label) {
            return Err(error);
        }
        let (device_label, dispatch) = (label.label().to_owned(), "open".to_owned());
        if let Some(state) = taint() {
            return Err(Error::Incomplete { device: device_label, dispatch, state, elapsed_us: 0 });
        }
        let lock = match label {
            Label::Npu => Some(DeviceLock::shared(lock)?),
            Label::Vnpu => None,
        };
        let device = XrtDevice::open(0).map_err(|failure| Error::Device {
            device: device_label.clone(),
            why: format!("cannot be opened: {}", meaning(&failure)),
        })?;
        let ask = |key| device.info(key).map_err(|failure| label.absent(meaning(&failure)));
        let (name, platform) = (ask(Info::Name)?, ask(Info::Platform)?);
        check_identity(label, &name, &platform)?;
        let (major, minor) = handles::version().map_err(|failure| label.absent(meaning(&failure)))?;
        let sealed = cache.identity().map_or_else(|| "not sealed".into(), |hash| format!("seal {}", &hash[..12]));
        let kernels = cache.dir().display();
        let description = format!("{name}, {GENERATION}, XRT {major}.{minor}, kernels of {kernels} ({sealed})");
        let arithmetic = match label {
            Label::Npu => Arithmetic::Npu2,
            Label::Vnpu => Arithmetic::Ieee,
        };
        let info = DeviceInfo { label: device_label, arithmetic, description };
        let inner = Inner { contexts: contexts::register(), memory: Default::default(), device, _lock: lock };
        Ok(NpuDevice {
            info,
            cache,
            timeout,
            inner: ManuallyDrop::new(inner),
            hung: false,
            prepared: vec![],
            counters: Counters::default(),
        })
    }
}

/// A virtual device is no `npu`, nothing else is a `vnpu`, and kernels for one generation run on no other.
fn check_identity(label: Label, name: &str, platform: &str) -> Result<()> {
    let is_virtual = name.starts_with(VIRTUAL);
    if is_virtual != (label == Label::Vnpu) {
        return Err(label.absent(format!("found {name:?}, which is {}", if is_virtual { "virtual" } else { "real" })));
    }
    let found = generation(platform);
    if found != GENERATION {
        return Err(Error::Device {
            device: label.label().into(),
            why: format!("{name}: found {found}, expected {GENERATION} (Strix, Strix Halo, Krackan)"),
        });
    }
    Ok(())
}

/// The generation of an array by its columns, as XRT's platform report gives them: XRT names no architecture.
///
/// Source: 5 columns on Phoenix and Hawk Point, 8 on Strix and Krackan.
fn generation(platform: &str) -> String {
    let report: serde_json::Value = serde_json::from_str(platform).unwrap_or_default();
    let columns = &report["platforms"][0]["static_region"]["total_columns"];
    let columns = columns.as_u64().or_else(|| columns.as_str()?.parse().ok());
    match columns {
        Some(5) => "NPU1".into(),
        Some(8) => GENERATION.into(),
        Some(columns) => format!("an array of {columns} columns"),
        None => "an array of unknown size".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xrt_sys::Kind;

    #[rstest::rstest]
    #[case(
        "mmap(addr=(nil), len=67108864) failed (err=-11): Resource temporarily unavailable",
        11,
        "raise `ulimit -l`"
    )]
    #[case("DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-28): No space left", 28, "no hardware context is free")]
    #[case("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-12): Cannot allocate memory", 12, "no memory for a buffer")]
    #[case("something else", 0, "something else")]
    fn what_xrt_means(#[case] text: &str, #[case] code: i32, #[case] start: &str) {
        let failure = Failure { kind: Kind::System, code, text: text.into() };
        assert!(meaning(&failure).contains(start) && meaning(&failure).contains(text));
    }

    #[test]
    fn neither_device_passes_for_the_other() {
        let platform = |columns: u32| {
            format!("{{\"platforms\": [{{\"static_region\": {{\"name\": \"x\", \"total_columns\": \"{columns}\"}}}}]}}")
        };
        assert!(check_identity(Label::Npu, "NPU Strix", &platform(8)).is_ok());
        assert!(check_identity(Label::Vnpu, "phasegate virtual NPU2", &platform(8)).is_ok());
        for (label, name) in [(Label::Npu, "phasegate virtual NPU2"), (Label::Vnpu, "NPU Strix")] {
            assert!(matches!(check_identity(label, name, &platform(8)), Err(Error::Unavailable { .. })));
        }
        let other = check_identity(Label::Npu, "NPU Phoenix", &platform(5)).unwrap_err();
        assert!(other.to_string().contains("found NPU1, expected NPU2"), "{other}");
        assert!(check_identity(Label::Npu, "NPU", "no JSON").unwrap_err().to_string().contains("unknown size"));
    }
}
