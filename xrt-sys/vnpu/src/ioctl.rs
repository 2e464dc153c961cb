//! The driver's requests, served in the process that makes them.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::abi::{self, core, driver, query};
use crate::device::{self, DONE, Npu, State};
use crate::fault::{self, Fault};
use crate::worker::{self, Job};

/// What is added to a context's handle to name its timeline.
const TIMELINE: u32 = 1000;

type Answer = Result<(), c_int>;

/// Serves a request to a device of ours; none for any other.
///
/// # Safety
/// The argument of a DRM request points to the structure that the request's number names.
pub unsafe fn serve(fd: c_int, request: c_ulong, argument: *mut c_void) -> Option<Answer> {
    let request = request as u32;
    if request >> 8 & 0xff != abi::DRM || argument.is_null() {
        return None;
    }
    let mut state = device::state();
    state.device(fd)?;
    let number = request & 0xff;
    // SAFETY: passed on.
    Some(unsafe {
        match number {
            core::SYNCOBJ_TIMELINE_WAIT => timeline_wait(state, fd, &*argument.cast()),
            driver::WAIT => wait(state, fd, &*argument.cast()),
            driver::EXECUTE => execute(&mut state, fd, &mut *argument.cast()),
            _ => of_device(state.device(fd).expect("looked up above"), number, argument),
        }
    })
}

unsafe fn of_device(device: &mut Npu, number: u32, argument: *mut c_void) -> Answer {
    // SAFETY: of the whole function: the number says what the argument points to.
    unsafe {
        match number {
            driver::CREATE_CONTEXT => create_context(device, &mut *argument.cast()),
            driver::DESTROY_CONTEXT => {
                let handle = (*argument.cast::<abi::Handle>()).handle;
                device.contexts.remove(&handle).map(drop).ok_or(libc::EINVAL)
            }
            driver::CREATE_BO => create_bo(device, &mut *argument.cast()),
            driver::BO_INFO => bo_info(device, &mut *argument.cast()),
            driver::SYNC_BO => {
                let sync = &*argument.cast::<abi::SyncBo>();
                let bo = device.bo(sync.handle).ok_or(libc::ENOENT)?;
                if sync.offset.saturating_add(sync.size) > bo.size { Err(libc::EINVAL) } else { Ok(()) }
            }
            driver::GET_INFO => get_info(&mut *argument.cast()),
            driver::GET_ARRAY => {
                let array = &mut *argument.cast::<abi::GetArray>();
                let known = matches!(array.what, query::ARRAY_CONTEXTS | query::ARRAY_LAST_ERROR);
                array.elements = 0;
                if known { Ok(()) } else { Err(libc::EINVAL) }
            }
            core::GEM_CLOSE => device.free((*argument.cast::<abi::Handle>()).handle).ok_or(libc::EINVAL),
            core::SYNCOBJ_DESTROY | driver::CONFIG_CONTEXT | driver::SET_STATE => Ok(()),
            other => {
                fault::log(|| format!("request {other:#x} is not served"));
                Err(libc::EOPNOTSUPP)
            }
        }
    }
}

fn create_context(device: &mut Npu, create: &mut abi::CreateContext) -> Answer {
    if fault::has(Fault::NoContext) {
        return Err(libc::ENOSPC);
    }
    create.handle = device.create_context().ok_or(libc::ENOSPC)?;
    create.syncobj = TIMELINE + create.handle;
    create.doorbell = u32::MAX;
    fault::log(|| format!("context {}", create.handle));
    Ok(())
}

fn create_bo(device: &mut Npu, create: &mut abi::CreateBo) -> Answer {
    if fault::has(Fault::NoMemory) && create.kind == abi::bo_kind::SHARED {
        return Err(libc::ENOMEM);
    }
    if create.table != 0 {
        // SAFETY: the driver's interface: a table stands at that address.
        let memory = unsafe { &*(create.table as *const abi::UserMemory) };
        if memory.entries != 1 {
            return Err(libc::EINVAL);
        }
        create.handle = device.adopt(create.kind, memory.address, memory.size);
    } else {
        create.handle = device.create(create.kind, create.size)?;
    }
    fault::log(|| format!("buffer {}: kind {}, {} bytes", create.handle, create.kind, create.size));
    Ok(())
}

fn bo_info(device: &Npu, info: &mut abi::BoInfo) -> Answer {
    let bo = device.bo(info.handle).ok_or(libc::ENOENT)?;
    info.map_offset = bo.offset;
    info.user_address = bo.user_address;
    info.device_address = bo.device_address;
    Ok(())
}

fn execute(state: &mut State, fd: c_int, execute: &mut abi::Execute) -> Answer {
    let device = state.device(fd).ok_or(libc::ENODEV)?;
    if execute.kind != 0 || execute.commands != 1 {
        return Err(libc::EINVAL);
    }
    let (command, count) = (execute.command as u32, execute.buffer_count as usize);
    // SAFETY: the driver's interface: that many handles stand at that address.
    let handles = match count {
        0 => &[],
        _ => unsafe { std::slice::from_raw_parts(execute.buffers as *const u32, count) },
    };
    if handles.iter().chain([&command]).any(|handle| device.bo(*handle).is_none()) {
        return Err(libc::ENOENT);
    }
    let context = device.contexts.get_mut(&execute.context).ok_or(libc::EINVAL)?;
    let fault = fault::of_execution(fault::next_execution());
    if fault == Some(Fault::Eio) {
        return Err(libc::EIO);
    }
    execute.sequence = context.next;
    context.next += 1;
    let job = Job { fd, context: execute.context, command, sequence: execute.sequence, fault };
    worker::submit(state, job);
    Ok(())
}

/// Waits until a context is past `sequence`, or until the deadline.
fn until_done(
    mut state: std::sync::MutexGuard<'static, State>,
    fd: c_int,
    context: u32,
    sequence: u64,
    deadline: Option<Instant>,
) -> Answer {
    loop {
        let device = state.device(fd).ok_or(libc::ENODEV)?;
        if device.contexts.get(&context).ok_or(libc::ENOENT)?.done > sequence {
            return Ok(());
        }
        state = match deadline {
            None => DONE.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(libc::ETIME);
                }
                DONE.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

fn wait(state: std::sync::MutexGuard<'static, State>, fd: c_int, wait: &abi::Wait) -> Answer {
    let limit = Duration::from_millis(u64::from(wait.timeout));
    let deadline = (wait.timeout != 0).then(|| Instant::now() + limit);
    until_done(state, fd, wait.context, wait.sequence, deadline)
}

/// What XRT waits with: a point on a context's timeline.
///
/// # Safety
/// `handles` and `points` are addresses of arrays of that many elements.
unsafe fn timeline_wait(state: std::sync::MutexGuard<'static, State>, fd: c_int, wait: &abi::TimelineWait) -> Answer {
    if wait.count != 1 {
        return Err(libc::EINVAL);
    }
    // SAFETY: of the caller.
    let (timeline, point) = unsafe { (*(wait.handles as *const u32), *(wait.points as *const u64)) };
    let context = timeline.checked_sub(TIMELINE).ok_or(libc::ENOENT)?;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let left = wait.deadline.saturating_sub(now.tv_sec * 1_000_000_000 + now.tv_nsec).max(0) as u64;
    let deadline = (wait.deadline != i64::MAX).then(|| Instant::now() + Duration::from_nanos(left));
    until_done(state, fd, context, point, deadline)
}

fn get_info(info: &mut abi::GetInfo) -> Answer {
    let tiles = |columns, first, channels, locks, events| [columns, first, channels, locks, events, 0, 0, 0];
    let (version, columns) = if fault::first_generation() { (1, 5) } else { (2, 8) };
    match info.what {
        query::AIE_METADATA => put(
            info,
            abi::AieMetadata {
                column_size: 0x200_0000,
                columns,
                rows: 6,
                version: [version, 0],
                core: tiles(4, 2, 2, 16, 128),
                memory: tiles(1, 1, 6, 64, 160),
                shim: tiles(1, 0, 2, 16, 128),
            },
        ),
        query::AIE_VERSION => put(info, [version, 0]),
        query::CLOCKS => put(info, [clock("MP-NPU Clock", 1267), clock("H Clock", 1800)]),
        query::FIRMWARE => put(info, [0u32; 4]),
        query::POWER_MODE | query::FORCE_PREEMPT | query::FRAME_PREEMPT => put(info, [0u8; 8]),
        query::RESOURCES => put(info, [1800u64, 50, 16, 0, 0]),
        query::CONTEXTS | query::SENSORS => {
            info.size = 0;
            Ok(())
        }
        other => {
            fault::log(|| format!("information {other} is not given"));
            Err(libc::EOPNOTSUPP)
        }
    }
}

fn clock(name: &str, megahertz: u32) -> abi::Clock {
    let mut clock = abi::Clock { name: [0; 16], megahertz, padding: 0 };
    clock.name[..name.len()].copy_from_slice(name.as_bytes());
    clock
}

/// Copies as much of the answer as there is room for.
fn put<T: Copy>(info: &abi::GetInfo, answer: T) -> Answer {
    let bytes = size_of::<T>().min(info.size as usize);
    // SAFETY: the driver's interface: `size` bytes can be written at `buffer`.
    unsafe { std::ptr::copy_nonoverlapping((&raw const answer).cast::<u8>(), info.buffer as *mut u8, bytes) };
    Ok(())
}
