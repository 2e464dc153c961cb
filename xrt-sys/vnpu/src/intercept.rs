//! The C library's functions that XRT meets the driver through: each leads on to the library's own, but for the device's
//! paths, its node and its file descriptors.
//!
//! Compiled out of this package's own tests, which must keep theirs. C's variadic functions are declared with the
//! arguments they are called with here: in the calling conventions of Linux those are passed alike.
#![cfg(not(test))]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use crate::{device, ioctl, tree};

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    tree::build();
}

extern "C" fn end() {
    tree::remove();
}

/// The next library's function of that name.
fn next(name: &CStr, known: &AtomicUsize) -> *mut c_void {
    let mut address = known.load(Ordering::Relaxed);
    if address == 0 {
        // SAFETY: the name is a C string; looking up has no other precondition.
        address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
        if address == 0 {
            std::process::abort();
        }
        known.store(address, Ordering::Relaxed);
    }
    address as *mut c_void
}

/// The next library's `name`, as a function of this type.
macro_rules! real {
    ($name:literal as fn($($arg:ty),*) -> $out:ty) => {{
        static KNOWN: AtomicUsize = AtomicUsize::new(0);
        // SAFETY: the C library's function of this name has this signature.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $out>(next($name, &KNOWN)) }
    }};
}

/// A path as the caller gave it, or where it leads instead.
struct Led {
    given: *const c_char,
    instead: Option<CString>,
}

impl Led {
    fn of(given: *const c_char) -> Led {
        // SAFETY: callers pass NULL or a C string, as the functions they call demand.
        let instead = (!given.is_null()).then(|| unsafe { CStr::from_ptr(given) }).and_then(tree::redirect);
        Led { given, instead }
    }

    fn path(&self) -> *const c_char {
        self.instead.as_ref().map_or(self.given, |path| path.as_ptr())
    }

    fn is_node(&self) -> bool {
        // SAFETY: as in `of`.
        !self.given.is_null() && unsafe { CStr::from_ptr(self.given) }.to_bytes() == tree::NODE
    }
}

/// Functions whose path is an argument and that need nothing else.
macro_rules! led {
    ($( $name:ident([$($before:ident: $before_ty:ty)?] path $(, $after:ident: $after_ty:ty)*) -> $out:ty = $symbol:literal; )*) => { $(
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($before: $before_ty,)? path: *const c_char $(, $after: $after_ty)*) -> $out {
            let led = Led::of(path);
            let real = real!($symbol as fn($($before_ty,)? *const c_char $(, $after_ty)*) -> $out);
            // SAFETY: the caller's own call, with a path of the same kind.
            unsafe { real($($before,)? led.path() $(, $after)*) }
        }
    )* };
}

led! {
    stat([] path, out: *mut c_void) -> c_int = c"stat";
    lstat([] path, out: *mut c_void) -> c_int = c"lstat";
    stat64([] path, out: *mut c_void) -> c_int = c"stat64";
    lstat64([] path, out: *mut c_void) -> c_int = c"lstat64";
    fstatat([at: c_int] path, out: *mut c_void, flags: c_int) -> c_int = c"fstatat";
    fstatat64([at: c_int] path, out: *mut c_void, flags: c_int) -> c_int = c"fstatat64";
    access([] path, mode: c_int) -> c_int = c"access";
    fopen([] path, mode: *const c_char) -> *mut FILE = c"fopen";
    fopen64([] path, mode: *const c_char) -> *mut FILE = c"fopen64";
    opendir([] path) -> *mut DIR = c"opendir";
    readlink([] path, out: *mut c_char, size: size_t) -> ssize_t = c"readlink";
    openat([at: c_int] path, flags: c_int, mode: mode_t) -> c_int = c"openat";
    openat64([at: c_int] path, flags: c_int, mode: mode_t) -> c_int = c"openat64";
}

/// Functions that open a path, which may be the device's.
macro_rules! opens {
    ($( $name:ident = $symbol:literal; )*) => { $(
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            let led = Led::of(path);
            if led.is_node() {
                return device::open();
            }
            let real = real!($symbol as fn(*const c_char, c_int, mode_t) -> c_int);
            // SAFETY: the caller's own call.
            unsafe { real(led.path(), flags, mode) }
        }
    )* };
}

opens! {
    open = c"open";
    open64 = c"open64";
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realpath(path: *const c_char, out: *mut c_char) -> *mut c_char {
    let led = Led::of(path);
    let real = real!(c"realpath" as fn(*const c_char, *mut c_char) -> *mut c_char);
    // SAFETY: the caller's own call.
    let resolved = unsafe { real(led.path(), out) };
    if resolved.is_null() || led.instead.is_none() {
        return resolved;
    }
    // SAFETY: `realpath` gave a C string in memory of its own or of the caller; what is kept is a tail of it.
    unsafe {
        let length = libc::strlen(resolved);
        if let Some(kept) = tree::restore(std::slice::from_raw_parts(resolved.cast::<u8>(), length)) {
            let kept = kept.len();
            std::ptr::copy(resolved.add(length - kept), resolved, kept + 1);
        }
    }
    resolved
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    device::close(fd);
    let real = real!(c"close" as fn(c_int) -> c_int);
    // SAFETY: the caller's own call.
    unsafe { real(fd) }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
) -> *mut c_void {
    type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, c_long) -> *mut c_void;
    let real: Mmap = real!(c"mmap" as fn(*mut c_void, size_t, c_int, c_int, c_int, c_long) -> *mut c_void);
    device::mapping(
        fd,
        flags,
        length,
        |flags| {
            // SAFETY: the caller's own call.
            unsafe { real(at, length, protection, flags, fd, offset) }
        },
        offset as u64,
    )
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the same function where addresses have 64 bits.
    unsafe { mmap(at, length, protection, flags, fd, offset) }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: a DRM request's argument points to the structure that its number names.
    if let Some(answer) = unsafe { ioctl::serve(fd, request, argument) } {
        return match answer {
            Ok(()) => 0,
            Err(code) => {
                // SAFETY: errno is this thread's.
                unsafe { *libc::__errno_location() = code };
                -1
            }
        };
    }
    let real = real!(c"ioctl" as fn(c_int, c_ulong, *mut c_void) -> c_int);
    // SAFETY: the caller's own call.
    unsafe { real(fd, request, argument) }
}
