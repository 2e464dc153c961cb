//! The functions of `shim/xrts.h`, word for word; stubs of the same signatures where there is no XRT.
//!
//! Safety, of all of them: pointers are NULL or valid for what the header says, objects are used before they are freed,
//! and only by one thread at a time.

use std::ffi::{c_char, c_int, c_void};

pub(crate) const NOT_BUILT: c_int = 9;

macro_rules! objects {
    ($($name:ident)*) => { $(
        /// An object of the shim.
        #[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        }
    )* };
}

objects! { XrtsDevice XrtsElf XrtsXclbin XrtsContext XrtsKernel XrtsBo XrtsRun XrtsRunlist }

macro_rules! functions {
    (
        fallible: $( fn $name:ident($($arg:ident: $ty:ty),* $(,)?); )*
        freeing: $( fn $free:ident($object:ident: $free_ty:ty); )*
    ) => {
        #[cfg(xrt)]
        unsafe extern "C" {
            $( pub fn $name($($arg: $ty),*) -> c_int; )*
            $( pub fn $free($object: $free_ty); )*
            pub fn xrts_last_code() -> c_int;
            pub fn xrts_last_text() -> *const c_char;
        }
        #[cfg(not(xrt))]
        mod stub {
            use super::*;
            $(
                /// # Safety
                /// None needed: a stub touches nothing.
                #[allow(clippy::too_many_arguments)]
                pub unsafe fn $name($(_: $ty),*) -> c_int { NOT_BUILT }
            )*
            $(
                /// # Safety
                /// None needed: a stub touches nothing.
                pub unsafe fn $free(_: $free_ty) {}
            )*
            /// # Safety
            /// None needed: a stub touches nothing.
            pub unsafe fn xrts_last_code() -> c_int { 0 }
            /// # Safety
            /// None needed: a stub touches nothing.
            pub unsafe fn xrts_last_text() -> *const c_char { c"".as_ptr() }
        }
        #[cfg(not(xrt))]
        pub use stub::*;
    };
}

functions! {
    fallible:
    fn xrts_version(code: *mut u32);

    fn xrts_device_count(count: *mut u32);
    fn xrts_device_open(index: u32, out: *mut *mut XrtsDevice);
    fn xrts_device_open_bdf(bdf: *const c_char, out: *mut *mut XrtsDevice);
    fn xrts_device_info(device: *const XrtsDevice, key: u32, text: *mut c_char, capacity: usize, length: *mut usize);
    fn xrts_device_register_xclbin(device: *mut XrtsDevice, xclbin: *const XrtsXclbin, uuid: *mut u8);

    fn xrts_elf_open(path: *const c_char, out: *mut *mut XrtsElf);
    fn xrts_elf_from_bytes(bytes: *const c_void, length: usize, out: *mut *mut XrtsElf);
    fn xrts_elf_is_full(elf: *const XrtsElf, full: *mut c_int);
    fn xrts_elf_platform(elf: *const XrtsElf, platform: *mut u32);
    fn xrts_elf_columns(elf: *const XrtsElf, columns: *mut u32);
    fn xrts_elf_kernel_count(elf: *const XrtsElf, count: *mut usize);
    fn xrts_elf_kernel_name(elf: *const XrtsElf, kernel: usize, text: *mut c_char, capacity: usize, length: *mut usize);
    fn xrts_elf_kernel_args(elf: *const XrtsElf, kernel: usize, count: *mut usize);
    fn xrts_elf_instance_count(elf: *const XrtsElf, kernel: usize, count: *mut usize);
    fn xrts_elf_instance_name(
        elf: *const XrtsElf, kernel: usize, instance: usize, text: *mut c_char, capacity: usize, length: *mut usize,
    );

    fn xrts_xclbin_open(path: *const c_char, out: *mut *mut XrtsXclbin);
    fn xrts_xclbin_uuid(xclbin: *const XrtsXclbin, uuid: *mut u8);
    fn xrts_xclbin_kernel_count(xclbin: *const XrtsXclbin, count: *mut usize);
    fn xrts_xclbin_kernel_name(
        xclbin: *const XrtsXclbin, kernel: usize, text: *mut c_char, capacity: usize, length: *mut usize,
    );
    fn xrts_xclbin_kernel_args(xclbin: *const XrtsXclbin, kernel: usize, count: *mut usize);

    fn xrts_context_from_elf(device: *const XrtsDevice, elf: *const XrtsElf, out: *mut *mut XrtsContext);
    fn xrts_context_from_xclbin(device: *const XrtsDevice, uuid: *const u8, out: *mut *mut XrtsContext);
    fn xrts_context_add(context: *mut XrtsContext, elf: *const XrtsElf);

    fn xrts_kernel_from_elf(context: *const XrtsContext, name: *const c_char, out: *mut *mut XrtsKernel);
    fn xrts_kernel_from_xclbin(context: *const XrtsContext, name: *const c_char, out: *mut *mut XrtsKernel);
    fn xrts_kernel_group_id(kernel: *const XrtsKernel, argument: c_int, group: *mut c_int);

    fn xrts_bo_new(device: *const XrtsDevice, bytes: usize, access: u64, out: *mut *mut XrtsBo);
    fn xrts_bo_with_flags(device: *const XrtsDevice, bytes: usize, flags: u32, group: u32, out: *mut *mut XrtsBo);
    fn xrts_bo_part(whole: *const XrtsBo, bytes: usize, offset: usize, out: *mut *mut XrtsBo);
    fn xrts_bo_size(bo: *const XrtsBo, bytes: *mut usize);
    fn xrts_bo_address(bo: *const XrtsBo, address: *mut u64);
    fn xrts_bo_map(bo: *mut XrtsBo, out: *mut *mut c_void);
    fn xrts_bo_sync(bo: *mut XrtsBo, direction: c_int, bytes: usize, offset: usize);

    fn xrts_run_new(kernel: *const XrtsKernel, out: *mut *mut XrtsRun);
    fn xrts_run_set_bo(run: *mut XrtsRun, argument: c_int, bo: *const XrtsBo);
    fn xrts_run_set_bytes(run: *mut XrtsRun, argument: c_int, value: *const c_void, length: usize);
    fn xrts_run_start(run: *mut XrtsRun);
    fn xrts_run_state(run: *const XrtsRun, state: *mut u32);
    fn xrts_run_wait2(run: *const XrtsRun, milliseconds: u32, expired: *mut c_int);

    fn xrts_runlist_new(context: *const XrtsContext, out: *mut *mut XrtsRunlist);
    fn xrts_runlist_add(list: *mut XrtsRunlist, run: *const XrtsRun);
    fn xrts_runlist_execute(list: *mut XrtsRunlist);
    fn xrts_runlist_state(list: *const XrtsRunlist, state: *mut u32);
    fn xrts_runlist_wait(list: *const XrtsRunlist, milliseconds: u32, expired: *mut c_int);
    fn xrts_runlist_reset(list: *mut XrtsRunlist);

    freeing:
    fn xrts_device_free(device: *mut XrtsDevice);
    fn xrts_elf_free(elf: *mut XrtsElf);
    fn xrts_xclbin_free(xclbin: *mut XrtsXclbin);
    fn xrts_context_free(context: *mut XrtsContext);
    fn xrts_kernel_free(kernel: *mut XrtsKernel);
    fn xrts_bo_free(bo: *mut XrtsBo);
    fn xrts_run_free(run: *mut XrtsRun);
    fn xrts_runlist_free(list: *mut XrtsRunlist);
}
