//! What a device is to the runner: buffers, dispatches that either complete or fail, and counters.
//!
//! Knows nothing of models, plans or prompts. `emu` is the emulated NPU; `npu` (XRT) joins it behind the same trait.

pub mod emu;
mod launch;
pub mod lock;
#[cfg(feature = "xrt")]
pub mod npu;

use std::ops::AddAssign;

use crate::error::Result;
use crate::kernel::{Dtype, Kernel, Rows};

/// How a device rounds: limits and baselines are kept per class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// bf16 operands, f32 accumulation, one round to nearest even at the kernel's border.
    Ieee,
    /// The NPU2's own arithmetic (block floating point, rounding toward minus infinity).
    Npu2,
}

impl Arithmetic {
    pub fn label(self) -> &'static str {
        match self {
            Arithmetic::Ieee => "ieee",
            Arithmetic::Npu2 => "npu2",
        }
    }
}

/// What a device says of itself.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Label in test names and reports: `emu`, `emu_npu2`, `vnpu`, `npu`.
    pub label: String,
    pub arithmetic: Arithmetic,
    /// For people: instruction set and threads, or the NPU's name and driver.
    pub description: String,
}

/// What a buffer is for; decides who may write it and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Written by the host before every run.
    Input,
    /// Written once at setup.
    StaticWeight,
    /// A table written once at setup.
    StaticLut,
    /// Written by the device only.
    Intermediate,
    /// Written by the device, read by the host.
    Output,
}

impl Role {
    pub fn is_static(self) -> bool {
        matches!(self, Role::StaticWeight | Role::StaticLut)
    }
}

/// How the host hands the content over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row-major, as it is.
    Rows,
    /// An HF linear weight `[out, in]`; the device packs or transposes it as its kernels want.
    LinearWeight,
}

/// A buffer to be created.
///
/// Shapes: `rows x cols`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BufferSpec {
    pub name: String,
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    pub role: Role,
    pub layout: Layout,
}

impl BufferSpec {
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Units: bytes of the content as the host sees it.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }
}

/// Names a buffer of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferHandle(pub usize);

/// Names a prepared dispatch of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DispatchHandle(pub usize);

/// One leaf kernel with its arguments bound, in the kernel's order.
#[derive(Debug, Clone)]
pub struct BoundLaunch {
    /// What it is for, as its caller names it (`prefill.l07.q_proj`). No device computes by it.
    pub site: String,
    pub kernel: Kernel,
    pub args: Vec<BufferHandle>,
}

impl BoundLaunch {
    /// The buffer it writes: every kernel's last argument.
    pub fn output(&self) -> BufferHandle {
        *self.args.last().expect("every kernel has an output")
    }
}

/// The only good answer of a run: it completed, in this time.
#[derive(Debug, Clone, Copy)]
pub struct Completed {
    pub elapsed_ns: u64,
}

/// What a device has done since it was opened. Audits and phases 4 to 7 compare these with the plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    pub dispatches: u64,
    pub launches: u64,
    pub bytes_written: u64,
    pub bytes_read: u64,
    pub buffers_created: u64,
    pub static_uploads: u64,
}

impl Counters {
    /// What happened between `before` and `self`.
    pub fn since(self, before: Counters) -> Counters {
        Counters {
            dispatches: self.dispatches - before.dispatches,
            launches: self.launches - before.launches,
            bytes_written: self.bytes_written - before.bytes_written,
            bytes_read: self.bytes_read - before.bytes_read,
            buffers_created: self.buffers_created - before.buffers_created,
            static_uploads: self.static_uploads - before.static_uploads,
        }
    }

    /// The part of one of `n` that all did the same; none where that cannot be.
    pub fn share_of(self, n: u64) -> Option<Counters> {
        let share = Counters {
            dispatches: self.dispatches / n,
            launches: self.launches / n,
            bytes_written: self.bytes_written / n,
            bytes_read: self.bytes_read / n,
            buffers_created: self.buffers_created / n,
            static_uploads: self.static_uploads / n,
        };
        let mut all = Counters::default();
        (0..n).for_each(|_| all += share);
        (all == self).then_some(share)
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, o: Counters) {
        self.dispatches += o.dispatches;
        self.launches += o.launches;
        self.bytes_written += o.bytes_written;
        self.bytes_read += o.bytes_read;
        self.buffers_created += o.buffers_created;
        self.static_uploads += o.static_uploads;
    }
}

/// The bytes of a buffer that nobody has written since it was poisoned, over and over: NaN as bf16 and as f32.
pub const POISON: [u8; 2] = [0xff, 0x7f];

/// A device that runs dispatches over its own buffers.
///
/// Errors: every method names the buffer or dispatch; `run` gives [`crate::error::Error::Incomplete`] for a dispatch
/// that did not complete, and then nothing it wrote may be used.
pub trait Device: Send {
    fn info(&self) -> &DeviceInfo;

    /// Makes a buffer. On an emulated device it is born filled with NaN between guard bytes.
    fn create(&mut self, spec: BufferSpec) -> Result<BufferHandle>;

    fn spec(&self, buffer: BufferHandle) -> &BufferSpec;

    /// Copies `content` to `offset` (both in bytes). A [`Layout::LinearWeight`] takes its whole content at once.
    fn write(&mut self, buffer: BufferHandle, offset: usize, content: &[u8]) -> Result<()>;

    /// The bytes `[offset, offset + len)` as the device left them.
    fn read(&mut self, buffer: BufferHandle, offset: usize, len: usize) -> Result<&[u8]>;

    /// Fills a buffer with [`POISON`], so that whatever is not written afterwards shows.
    fn poison(&mut self, buffer: BufferHandle) -> Result<()>;

    /// Binds a dispatch (one or more launches that run as one call) and checks every argument against its kernel.
    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle>;

    /// Runs a prepared dispatch to completion.
    fn run(&mut self, dispatch: DispatchHandle) -> Result<Completed>;

    /// Whether [`run_rows`](Device::run_rows) computes these rows only.
    fn cuts_rows(&self) -> bool {
        false
    }

    /// [`run`](Device::run) for a caller that will look at these rows of the outputs only: what the others hold afterwards is
    /// undefined, so that a device may leave them as they are. All inputs of these rows must be there, and for attention the keys and
    /// values of all positions up to theirs. Bits and counters are those of `run`, which is what happens where a launch of the
    /// dispatch cannot be cut to these rows ([`Kernel::can_be_cut`]).
    ///
    /// Errors: as `run`.
    fn run_rows(&mut self, dispatch: DispatchHandle, rows: Rows) -> Result<Completed> {
        let _ = rows;
        self.run(dispatch)
    }

    /// Runs dispatches that share nothing but static buffers, in any order or at once: whatever a device does, the bits and
    /// the counters are those of one [`run`](Device::run) after the other.
    ///
    /// Errors: as `run`, of the first that fails; then nothing that any of them wrote may be used.
    fn run_all(&mut self, dispatches: &[DispatchHandle]) -> Result<()> {
        dispatches.iter().try_for_each(|&dispatch| self.run(dispatch).map(drop))
    }

    fn counters(&self) -> Counters;
}
