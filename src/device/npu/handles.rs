//! XRT's objects as owned values: made or failed, freed once, never NULL. No policy.
//!
//! An object may move to another thread and is used by one at a time, as XRT's own are.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;

use xrt_sys::{self as sys, Failure, check};

type Result<T> = std::result::Result<T, Failure>;

/// Keys of what a device says of itself.
///
/// Source: xrt::info::device.
#[derive(Debug, Clone, Copy)]
pub enum Info {
    Bdf = 0,
    Name = 5,
    Platform = 12,
}

macro_rules! owned {
    ($( $(#[$doc:meta])* $name:ident($raw:ident) freed by $free:ident; )*) => { $(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(NonNull<sys::$raw>);

        // SAFETY: the object is owned by this value alone, and XRT binds none of its objects to a thread.
        unsafe impl Send for $name {}

        impl $name {
            fn made(make: impl FnOnce(*mut *mut sys::$raw) -> c_int) -> Result<$name> {
                let mut out = std::ptr::null_mut();
                check(make(&mut out))?;
                Ok($name(NonNull::new(out).expect("the shim gives an object or a failure")))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the shim, freed once.
                unsafe { sys::$free(self.0.as_ptr()) };
            }
        }
    )* };
}

owned! {
    /// An opened device.
    Device(XrtsDevice) freed by xrts_device_free;
    /// A loaded ELF; needs no device.
    ElfImage(XrtsElf) freed by xrts_elf_free;
    /// A hardware context: a part of the array, configured.
    Context(XrtsContext) freed by xrts_context_free;
    /// A kernel of a context.
    Kernel(XrtsKernel) freed by xrts_kernel_free;
    /// A run that is not in flight: see `run`.
    RawRun(XrtsRun) freed by xrts_run_free;
}

/// A text that the shim copies out.
fn text(read: impl Fn(*mut c_char, usize, *mut usize) -> c_int) -> Result<String> {
    let mut length = 0;
    check(read(std::ptr::null_mut(), 0, &mut length))?;
    let mut bytes = vec![0u8; length + 1];
    check(read(bytes.as_mut_ptr().cast(), bytes.len(), &mut length))?;
    bytes.truncate(length);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A number that the shim writes.
fn number<T: Default>(read: impl FnOnce(*mut T) -> c_int) -> Result<T> {
    let mut out = T::default();
    check(read(&mut out))?;
    Ok(out)
}

/// Major and minor version of the XRT in this process.
pub fn version() -> Result<(u32, u32)> {
    // SAFETY: writes one number.
    let code = number(|out| unsafe { sys::xrts_version(out) })?;
    Ok((code >> 16, code & 0xffff))
}

/// Devices that XRT sees.
pub fn device_count() -> Result<u32> {
    // SAFETY: writes one number.
    number(|out| unsafe { sys::xrts_device_count(out) })
}

impl Device {
    pub fn open(index: u32) -> Result<Device> {
        // SAFETY: writes one pointer.
        Device::made(|out| unsafe { sys::xrts_device_open(index, out) })
    }

    pub fn info(&self, key: Info) -> Result<String> {
        // SAFETY: a live device, and a buffer of the stated length.
        text(|at, capacity, length| unsafe { sys::xrts_device_info(self.0.as_ptr(), key as u32, at, capacity, length) })
    }
}

impl ElfImage {
    pub fn from_bytes(bytes: &[u8]) -> Result<ElfImage> {
        // SAFETY: the shim reads exactly that many bytes, and keeps none.
        ElfImage::made(|out| unsafe { sys::xrts_elf_from_bytes(bytes.as_ptr().cast(), bytes.len(), out) })
    }

    pub fn open(path: &Path) -> Result<ElfImage> {
        let path = c_string(&path.to_string_lossy());
        // SAFETY: a C string that outlives the call.
        ElfImage::made(|out| unsafe { sys::xrts_elf_open(path.as_ptr(), out) })
    }

    pub fn is_full(&self) -> Result<bool> {
        // SAFETY: a live ELF; writes one number.
        Ok(number(|out| unsafe { sys::xrts_elf_is_full(self.0.as_ptr(), out) })? != 0)
    }

    /// The OS/ABI of its header.
    pub fn platform(&self) -> Result<u32> {
        // SAFETY: as above.
        number(|out| unsafe { sys::xrts_elf_platform(self.0.as_ptr(), out) })
    }

    /// Name and number of arguments of each kernel.
    pub fn kernels(&self) -> Result<Vec<(String, usize)>> {
        let elf = self.0.as_ptr();
        // SAFETY: as above.
        let count: usize = number(|out| unsafe { sys::xrts_elf_kernel_count(elf, out) })?;
        (0..count)
            .map(|i| {
                // SAFETY: as above; `i` is in range.
                let name = text(|at, room, length| unsafe { sys::xrts_elf_kernel_name(elf, i, at, room, length) })?;
                // SAFETY: as above.
                Ok((name, number(|out| unsafe { sys::xrts_elf_kernel_args(elf, i, out) })?))
            })
            .collect()
    }
}

impl Context {
    pub fn new(device: &Device, elf: &ElfImage) -> Result<Context> {
        // SAFETY: live objects; XRT keeps what it needs of them.
        Context::made(|out| unsafe { sys::xrts_context_from_elf(device.0.as_ptr(), elf.0.as_ptr(), out) })
    }
}

impl Kernel {
    pub fn of_elf(context: &Context, name: &str) -> Result<Kernel> {
        let name = c_string(name);
        // SAFETY: a live context and a C string.
        Kernel::made(|out| unsafe { sys::xrts_kernel_from_elf(context.0.as_ptr(), name.as_ptr(), out) })
    }

    /// The memory group of an argument. A kernel of an ELF has none: a failure, where XRT itself would crash.
    pub fn group_id(&self, argument: usize) -> Result<i32> {
        // SAFETY: a live kernel; writes one number.
        number(|out| unsafe { sys::xrts_kernel_group_id(self.0.as_ptr(), argument as c_int, out) })
    }
}

impl RawRun {
    pub(super) fn new(kernel: &Kernel) -> Result<RawRun> {
        // SAFETY: a live kernel.
        RawRun::made(|out| unsafe { sys::xrts_run_new(kernel.0.as_ptr(), out) })
    }

    pub(super) fn set(&mut self, argument: usize, bo: &Bo) -> Result<()> {
        // SAFETY: live objects; the run is not in flight (`run` sees to that).
        check(unsafe { sys::xrts_run_set_bo(self.0.as_ptr(), argument as c_int, bo.raw.as_ptr()) })
    }

    pub(super) fn start(&mut self) -> Result<()> {
        // SAFETY: a live run with every argument set (`run` sees to that).
        check(unsafe { sys::xrts_run_start(self.0.as_ptr()) })
    }

    pub(super) fn state(&self) -> Result<u32> {
        // SAFETY: a live run; writes one number.
        number(|out| unsafe { sys::xrts_run_state(self.0.as_ptr(), out) })
    }

    /// Waits for a run that was started; 0 is for ever. True when the time was over.
    pub(super) fn wait2(&self, milliseconds: u32) -> Result<bool> {
        // SAFETY: a live run that was started (`run` sees to that).
        Ok(number(|out| unsafe { sys::xrts_run_wait2(self.0.as_ptr(), milliseconds, out) })? != 0)
    }
}

/// A buffer of host memory that the device sees, mapped into this process.
#[derive(Debug)]
pub struct Bo {
    raw: NonNull<sys::XrtsBo>,
    map: NonNull<u8>,
    bytes: usize,
}

// SAFETY: as the other objects; the mapping belongs to the buffer.
unsafe impl Send for Bo {}

impl Bo {
    /// Units: bytes, at least one.
    pub fn new(device: &Device, bytes: usize) -> Result<Bo> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live device; writes one pointer.
        check(unsafe { sys::xrts_bo_new(device.0.as_ptr(), bytes, 0, &mut raw) })?;
        let raw = NonNull::new(raw).expect("the shim gives an object or a failure");
        let mut map: *mut c_void = std::ptr::null_mut();
        // SAFETY: a live buffer; writes one pointer.
        let mapped = check(unsafe { sys::xrts_bo_map(raw.as_ptr(), &mut map) });
        let bo = Bo { raw, map: NonNull::new(map.cast()).unwrap_or(NonNull::dangling()), bytes };
        mapped.map(|()| bo)
    }

    /// Where the device sees it.
    pub fn address(&self) -> Result<u64> {
        // SAFETY: a live buffer; writes one number.
        number(|out| unsafe { sys::xrts_bo_address(self.raw.as_ptr(), out) })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for that many bytes; the device writes only while a run is in flight, which lasts no longer than
        // a `&mut` of the device that owns this buffer.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and this is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_ptr(), self.bytes) }
    }

    /// Lets the device see what the host wrote there.
    pub fn to_device(&mut self, offset: usize, bytes: usize) -> Result<()> {
        // SAFETY: a live buffer; XRT refuses a range that is not in it.
        check(unsafe { sys::xrts_bo_sync(self.raw.as_ptr(), 0, bytes, offset) })
    }

    /// Lets the host see what the device wrote there.
    pub fn from_device(&mut self, offset: usize, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        check(unsafe { sys::xrts_bo_sync(self.raw.as_ptr(), 1, bytes, offset) })
    }
}

impl Drop for Bo {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once; no slice of it is left.
        unsafe { sys::xrts_bo_free(self.raw.as_ptr()) };
    }
}

/// A C string of a text; what follows a NUL is lost, and what is left is not found.
fn c_string(text: &str) -> CString {
    let until = text.split('\0').next().unwrap_or_default();
    CString::new(until).expect("no NUL in it")
}
