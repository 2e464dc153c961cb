//! What the amdxdna driver and the DRM core are asked with: request numbers and the structures behind them, as far as XRT
//! uses them.
//!
//! Source: the kernel's user interface (drm.h, amdxdna_accel.h of Linux 6.14 and later) and XRT's command packets (ert.h).

/// The type byte of every DRM request.
pub const DRM: u32 = b'd' as u32;

/// Request numbers of the DRM core.
pub mod core {
    pub const GEM_CLOSE: u32 = 0x09;
    pub const SYNCOBJ_DESTROY: u32 = 0xc0;
    pub const SYNCOBJ_TIMELINE_WAIT: u32 = 0xca;
}

/// Request numbers of the driver.
pub mod driver {
    const BASE: u32 = 0x40;
    pub const CREATE_CONTEXT: u32 = BASE;
    pub const DESTROY_CONTEXT: u32 = BASE + 1;
    pub const CONFIG_CONTEXT: u32 = BASE + 2;
    pub const CREATE_BO: u32 = BASE + 3;
    pub const BO_INFO: u32 = BASE + 4;
    pub const SYNC_BO: u32 = BASE + 5;
    pub const EXECUTE: u32 = BASE + 6;
    pub const GET_INFO: u32 = BASE + 7;
    pub const SET_STATE: u32 = BASE + 8;
    pub const WAIT: u32 = BASE + 9;
    pub const GET_ARRAY: u32 = BASE + 10;
}

/// An address that means none.
pub const NO_ADDRESS: u64 = u64::MAX;

/// Kinds of buffer objects.
pub mod bo_kind {
    /// Host memory that the device sees at the process's own addresses.
    pub const SHARED: u32 = 1;
    /// The heap that device buffers are carved from.
    pub const HEAP: u32 = 2;
    /// Control code and configurations, in the heap.
    pub const DEVICE: u32 = 3;
}

#[repr(C)]
pub struct CreateContext {
    pub ext: [u64; 2],
    pub qos: u64,
    pub queue_bo: u32,
    pub log_bo: u32,
    pub max_operations: u32,
    pub tiles: u32,
    pub memory: u32,
    pub doorbell: u32,
    pub handle: u32,
    pub syncobj: u32,
}

/// Also of GEM_CLOSE and of a syncobj's end: a handle and padding.
#[repr(C)]
pub struct Handle {
    pub handle: u32,
    pub padding: u32,
}

#[repr(C)]
pub struct CreateBo {
    pub flags: u64,
    pub table: u64,
    pub size: u64,
    pub kind: u32,
    pub handle: u32,
}

/// Memory of the process that becomes a buffer, behind [`CreateBo::table`].
#[repr(C)]
pub struct UserMemory {
    pub dmabuf: i32,
    pub entries: u32,
    pub address: u64,
    pub size: u64,
}

#[repr(C)]
pub struct BoInfo {
    pub ext: [u64; 2],
    pub handle: u32,
    pub padding: u32,
    pub map_offset: u64,
    pub user_address: u64,
    pub device_address: u64,
}

#[repr(C)]
pub struct SyncBo {
    pub handle: u32,
    pub direction: u32,
    pub offset: u64,
    pub size: u64,
}

#[repr(C)]
pub struct Execute {
    pub ext: [u64; 2],
    pub context: u32,
    pub kind: u32,
    /// The one command's handle where `commands` is 1.
    pub command: u64,
    pub buffers: u64,
    pub commands: u32,
    pub buffer_count: u32,
    pub sequence: u64,
}

#[repr(C)]
pub struct Wait {
    pub context: u32,
    /// Units: milliseconds; 0 is for ever.
    pub timeout: u32,
    pub sequence: u64,
}

#[repr(C)]
pub struct TimelineWait {
    pub handles: u64,
    pub points: u64,
    /// Absolute, of the monotonic clock. Units: nanoseconds.
    pub deadline: i64,
    pub count: u32,
    pub flags: u32,
    pub first_signalled: u32,
    pub padding: u32,
}

#[repr(C)]
pub struct GetInfo {
    pub what: u32,
    pub size: u32,
    pub buffer: u64,
}

#[repr(C)]
pub struct GetArray {
    pub what: u32,
    pub element_size: u32,
    pub elements: u32,
    pub padding: u32,
    pub buffer: u64,
}

/// What [`GetInfo::what`] and [`GetArray::what`] ask for.
pub mod query {
    pub const AIE_METADATA: u32 = 1;
    pub const AIE_VERSION: u32 = 2;
    pub const CLOCKS: u32 = 3;
    pub const SENSORS: u32 = 4;
    pub const CONTEXTS: u32 = 5;
    pub const FIRMWARE: u32 = 8;
    pub const POWER_MODE: u32 = 9;
    pub const FORCE_PREEMPT: u32 = 11;
    pub const RESOURCES: u32 = 12;
    pub const FRAME_PREEMPT: u32 = 13;

    pub const ARRAY_CONTEXTS: u32 = 0;
    pub const ARRAY_LAST_ERROR: u32 = 2;
}

/// Rows, first row, DMA channels, locks and event registers of one kind of tile.
pub type TileKind = [u16; 8];

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AieMetadata {
    pub column_size: u32,
    pub columns: u16,
    pub rows: u16,
    pub version: [u32; 2],
    pub core: TileKind,
    pub memory: TileKind,
    pub shim: TileKind,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Clock {
    pub name: [u8; 16],
    pub megahertz: u32,
    pub padding: u32,
}

/// States of a command packet.
pub mod state {
    pub const COMPLETED: u32 = 4;
    pub const ERROR: u32 = 5;
    pub const TIMEOUT: u32 = 8;
}

/// Opcodes of a command packet.
pub mod opcode {
    pub const CHAIN: u32 = 19;
    pub const NPU: u32 = 20;
    pub const PREEMPTIBLE: u32 = 21;
    pub const PREEMPTIBLE_ELF: u32 = 22;
}
