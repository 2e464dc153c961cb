//! The device's state: buffer objects, the heap, contexts, and which address of the process or the device is whose.
//!
//! A device is a sparse memfd behind the file descriptor that XRT was given, so that mapping a buffer needs no help.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::abi::{NO_ADDRESS, bo_kind};
use crate::fault::{self, Fault};
use crate::worker::Job;

/// Where the heap begins as the device sees it.
const HEAP_BASE: u64 = 0x400_0000;

/// Units: bytes.
const PAGE: u64 = 4096;

/// Contexts that an NPU of this kind has.
const CONTEXTS: usize = 16;

/// Devices open at a time.
const DEVICES: usize = 8;

/// Their descriptors, so that what concerns no device takes no lock.
static DESCRIPTORS: [AtomicI32; DEVICES] = [const { AtomicI32::new(-1) }; DEVICES];

static STATE: Mutex<State> = Mutex::new(State { devices: vec![], jobs: VecDeque::new() });

/// Told when there is a job, and when one is done.
pub static WORK: Condvar = Condvar::new();
pub static DONE: Condvar = Condvar::new();

/// Everything behind the lock.
pub struct State {
    pub devices: Vec<Npu>,
    pub jobs: VecDeque<Job>,
}

/// One opened device.
pub struct Npu {
    pub fd: c_int,
    end: u64,
    bos: BTreeMap<u32, Bo>,
    last_bo: u32,
    pub contexts: BTreeMap<u32, Context>,
    last_context: u32,
    heap: u64,
    /// Start of each buffer that the device may touch, to its handle.
    by_address: BTreeMap<u64, u32>,
}

/// One buffer object.
#[derive(Debug, Clone, Copy)]
pub struct Bo {
    pub kind: u32,
    pub size: u64,
    /// Place in the memfd.
    pub offset: u64,
    /// Where the device sees it, or none: then where the process has mapped it.
    pub device_address: u64,
    /// Where the process brought it from, or 0.
    pub user_address: u64,
    mapped: u64,
    /// Where this library sees it, once it has looked.
    own: usize,
}

/// Sequence numbers of one context.
#[derive(Debug, Default)]
pub struct Context {
    pub next: u64,
    pub done: u64,
}

pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_device(fd: c_int) -> bool {
    fd >= 0 && DESCRIPTORS.iter().any(|known| known.load(Ordering::Relaxed) == fd)
}

/// Opens a device: a file descriptor, or -1 with errno set.
pub fn open() -> c_int {
    let mut state = state();
    let Some(free) = DESCRIPTORS.iter().find(|known| known.load(Ordering::Relaxed) == -1) else {
        // SAFETY: errno is this thread's.
        unsafe { *libc::__errno_location() = libc::EBUSY };
        return -1;
    };
    // SAFETY: a C string and plain numbers.
    let fd = unsafe { libc::memfd_create(c"vnpu".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: a descriptor of our own, sparse whatever its length.
    if fd < 0 || unsafe { libc::ftruncate(fd, 1 << 40) } != 0 {
        return -1;
    }
    free.store(fd, Ordering::Relaxed);
    state.devices.push(Npu {
        fd,
        end: 1 << 20,
        bos: BTreeMap::new(),
        last_bo: 0,
        contexts: BTreeMap::new(),
        last_context: 0,
        heap: 0,
        by_address: BTreeMap::new(),
    });
    fault::log(|| format!("open: {fd}"));
    fd
}

/// Forgets a device whose descriptor is about to be closed.
pub fn close(fd: c_int) {
    if !is_device(fd) {
        return;
    }
    let mut state = state();
    state.devices.retain(|device| device.fd != fd);
    state.jobs.retain(|job| job.fd != fd);
    DESCRIPTORS.iter().filter(|known| known.load(Ordering::Relaxed) == fd).for_each(|known| {
        known.store(-1, Ordering::Relaxed);
    });
    fault::log(|| format!("close: {fd}"));
}

/// Maps by `real`, and remembers where the process sees a buffer: shared ones the device sees there too.
///
/// Buffers are mapped locked in memory, which an ordinary user's limit does not allow for many: so not here, unless the
/// limit itself is to be tried.
pub fn mapping(
    fd: c_int,
    flags: c_int,
    length: usize,
    real: impl FnOnce(c_int) -> *mut c_void,
    offset: u64,
) -> *mut c_void {
    if !is_device(fd) {
        return real(flags);
    }
    if fault::has(Fault::Memlock) && flags & libc::MAP_LOCKED != 0 && length >= 64 << 20 {
        // SAFETY: errno is this thread's.
        unsafe { *libc::__errno_location() = libc::EAGAIN };
        return libc::MAP_FAILED;
    }
    let at = real(flags & !libc::MAP_LOCKED);
    if at != libc::MAP_FAILED
        && let Some(device) = state().devices.iter_mut().find(|device| device.fd == fd)
    {
        let unmapped = device.bos.iter_mut().find(|(_, bo)| bo.offset == offset && bo.mapped == 0);
        if let Some((&handle, bo)) = unmapped {
            bo.mapped = at as u64;
            if bo.kind == bo_kind::SHARED {
                device.by_address.insert(bo.mapped, handle);
            }
        }
    }
    at
}

impl State {
    pub fn device(&mut self, fd: c_int) -> Option<&mut Npu> {
        self.devices.iter_mut().find(|device| device.fd == fd)
    }
}

impl Npu {
    pub fn bo(&self, handle: u32) -> Option<&Bo> {
        self.bos.get(&handle)
    }

    /// A buffer of the process's own memory.
    pub fn adopt(&mut self, kind: u32, address: u64, size: u64) -> u32 {
        let handle = self.insert(kind, size, NO_ADDRESS, NO_ADDRESS, address);
        self.by_address.insert(address, handle);
        handle
    }

    /// A new buffer.
    ///
    /// Errors: an errno when the heap is full.
    pub fn create(&mut self, kind: u32, size: u64) -> Result<u32, c_int> {
        match kind {
            bo_kind::DEVICE => {
                let address = self.room_in_heap(size).ok_or(libc::EAGAIN)?;
                let handle = self.insert(kind, size, NO_ADDRESS, address, 0);
                self.by_address.insert(address, handle);
                Ok(handle)
            }
            bo_kind::HEAP => {
                let (offset, address) = (self.room_in_file(size), HEAP_BASE + self.heap);
                self.heap += size;
                Ok(self.insert(kind, size, offset, address, 0))
            }
            _ => {
                let twin = self.bos.values().rev().find(|bo| bo.kind == kind && bo.size >= size).map(|bo| bo.offset);
                let offset = match twin.filter(|_| kind == bo_kind::SHARED && fault::has(Fault::Alias)) {
                    Some(offset) => offset,
                    None => self.room_in_file(size),
                };
                Ok(self.insert(kind, size, offset, NO_ADDRESS, 0))
            }
        }
    }

    fn insert(&mut self, kind: u32, size: u64, offset: u64, device_address: u64, user_address: u64) -> u32 {
        self.last_bo += 1;
        let bo = Bo { kind, size, offset, device_address, user_address, mapped: 0, own: 0 };
        self.bos.insert(self.last_bo, bo);
        self.last_bo
    }

    /// A stretch of the file, with a gap behind it.
    fn room_in_file(&mut self, size: u64) -> u64 {
        let offset = self.end;
        self.end += size.next_multiple_of(1 << 16) + (1 << 16);
        offset
    }

    /// The first gap in the heap that is long enough.
    fn room_in_heap(&self, size: u64) -> Option<u64> {
        let size = size.next_multiple_of(PAGE);
        let mut address = HEAP_BASE;
        for bo in self.by_address.range(..HEAP_BASE + self.heap).map(|(_, handle)| &self.bos[handle]) {
            if address + size <= bo.device_address {
                return Some(address);
            }
            address = bo.device_address + bo.size.next_multiple_of(PAGE);
        }
        (address + size <= HEAP_BASE + self.heap).then_some(address)
    }

    /// Frees a buffer and its memory.
    pub fn free(&mut self, handle: u32) -> Option<()> {
        let bo = self.bos.remove(&handle)?;
        self.by_address.retain(|_, there| *there != handle);
        if bo.own != 0 {
            // SAFETY: mapped by `view` with this length; nobody else knows the address.
            unsafe { libc::munmap(bo.own as *mut c_void, bo.size as usize) };
        }
        let shared = self.bos.values().any(|other| other.offset == bo.offset);
        if bo.offset != NO_ADDRESS && !shared {
            let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: a stretch of our own file that no buffer uses any more.
            unsafe { libc::fallocate(self.fd, how, bo.offset as i64, bo.size.next_multiple_of(PAGE) as i64) };
        }
        Some(())
    }

    /// A new context's handle; none when all are taken.
    pub fn create_context(&mut self) -> Option<u32> {
        if self.contexts.len() >= CONTEXTS {
            return None;
        }
        self.last_context += 1;
        self.contexts.insert(self.last_context, Context::default());
        Some(self.last_context)
    }

    /// This library's own view of a buffer in the file.
    pub fn view(&mut self, handle: u32) -> Option<*mut u8> {
        let fd = self.fd;
        let bo = self.bos.get_mut(&handle)?;
        if bo.user_address != 0 {
            return Some(bo.user_address as *mut u8);
        }
        if bo.own == 0 {
            let (read_write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let length = bo.size as usize;
            // SAFETY: a new mapping of our own file. By number: `mmap` is this library's, which would take the mapping
            // for the process's.
            let at = unsafe { libc::syscall(libc::SYS_mmap, 0usize, length, read_write, shared, fd, bo.offset) };
            if at == -1 {
                return None;
            }
            bo.own = at as usize;
        }
        Some(bo.own as *mut u8)
    }

    /// Memory that the device may touch: `bytes` from `address` on, within one live buffer.
    ///
    /// Errors: a text for an access that the IOMMU would stop.
    pub fn memory(&mut self, address: u64, bytes: u64) -> Result<*mut u8, String> {
        let outside = || format!("device access {address:#x} + {bytes} is outside of every buffer");
        let (&start, &handle) = self.by_address.range(..=address).next_back().ok_or_else(outside)?;
        let bo = self.bos[&handle];
        if bytes > bo.size || address - start > bo.size - bytes {
            return Err(outside());
        }
        if bo.kind != bo_kind::DEVICE {
            // The device sees the process's own addresses.
            return Ok(address as *mut u8);
        }
        let heap = self.bos.iter().find(|(_, heap)| {
            heap.kind == bo_kind::HEAP && (heap.device_address..heap.device_address + heap.size).contains(&address)
        });
        let (&heap, base) = heap.map(|(handle, bo)| (handle, bo.device_address)).ok_or_else(outside)?;
        let view = self.view(heap).ok_or_else(outside)?;
        // SAFETY: within the heap, as checked.
        Ok(unsafe { view.add((address - base) as usize) })
    }
}
