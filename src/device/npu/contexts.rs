//! Hardware contexts, of which an NPU has few: the devices of this process give theirs to each other.

use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use xrt_sys::Failure;

use super::handles::{Context, Device, ElfImage, Kernel};
use super::memory::Place;
use super::run::Run;

/// Kept by one device at a time; an NPU2 has this many for all its processes.
///
/// Source: the amdxdna driver's limit on Strix.
const MOST: usize = 16;

/// How long to wait until a device that is running a dispatch can give one up.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait for one where no other device has any: a device that is being freed is no longer known, and gives its
/// contexts back one by one.
const GRACE: Duration = Duration::from_millis(500);

/// A dispatch's ELF in a hardware context of its own.
pub(super) struct Loaded {
    /// Of its contract.
    pub hash: String,
    /// None only while it is in flight.
    pub run: Option<Run>,
    /// What its arguments are set to.
    pub bound: Vec<Option<Place>>,
    pub _kernel: Kernel,
    pub _context: Context,
}

/// One device's contexts, least recently used first. Locked while the device runs a dispatch.
pub(super) type Contexts = Arc<Mutex<Vec<Loaded>>>;

/// Those of every device of this process.
static ALL: Mutex<Vec<Weak<Mutex<Vec<Loaded>>>>> = Mutex::new(Vec::new());

/// An empty list that other devices know of.
pub(super) fn register() -> Contexts {
    let contexts = Contexts::default();
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|other| other.strong_count() > 0);
    all.push(Arc::downgrade(&contexts));
    contexts
}

/// A context for an ELF. Where none is free, our own give way, then those of other devices.
///
/// Errors: what XRT says, when there is none to be had.
pub(super) fn create(device: &Device, image: &ElfImage, ours: &mut Vec<Loaded>) -> Result<Context, Failure> {
    if ours.len() >= MOST {
        ours.remove(0);
    }
    let began = Instant::now();
    loop {
        match Context::new(device, image) {
            Err(failure) if failure.code == libc::ENOSPC => {
                if !ours.is_empty() {
                    ours.remove(0);
                } else if let Given::Nothing { busy } = take_from_others() {
                    if began.elapsed() > if busy { PATIENCE } else { GRACE } {
                        return Err(failure);
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            other => return other,
        }
    }
}

enum Given {
    One,
    /// `busy`: a device that is running has some.
    Nothing {
        busy: bool,
    },
}

fn take_from_others() -> Given {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    // One of the locked lists is the caller's own, which is empty.
    let mut locked = 0;
    for contexts in all.iter().filter_map(Weak::upgrade) {
        match contexts.try_lock() {
            Ok(mut loaded) if !loaded.is_empty() => {
                loaded.remove(0);
                return Given::One;
            }
            Err(TryLockError::WouldBlock) => locked += 1,
            _ => {}
        }
    }
    Given::Nothing { busy: locked > 1 }
}
