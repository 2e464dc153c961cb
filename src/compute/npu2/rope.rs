//! Rotary position embedding: f32 sums of unrounded products, one rounding toward minus infinity.
//!
//! Source: mlir-air's `rope_halfsplit.cc`, which never sets the rounding mode.

use half::bf16;

use crate::compute::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pool::{Kernel, Worker},
    rope::{load, store},
    view::{Dst, Src},
};

/// Elements of a task.
const TASK: usize = 8192;

/// [`compute::Rope`](crate::compute::Rope) rounded down. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// Rows, one per token and head.
    pub x: Src<bf16>,
    /// cos and sin of every row.
    pub lut: Src<bf16>,
    /// Rotated rows.
    pub y: Dst<bf16>,
    /// Length of a row, even.
    pub head_dim: usize,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for Rope {
    fn run(&self, worker: &Worker<'_>) {
        let (len, head_dim) = (self.y.len(), self.head_dim);
        assert!(self.x.len() == len && self.lut.len() == len, "rope: x, lut and y differ in length");
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "rope: head_dim {head_dim} is not even");
        assert!(len.is_multiple_of(head_dim), "rope: x is not [rows, {head_dim}]");
        self.isa.dispatch(Share { kernel: self, worker });
    }
}

struct Share<'a> {
    kernel: &'a Rope,
    worker: &'a Worker<'a>,
}

impl Lanewise for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Rope { x, lut, y, head_dim, .. } = *self.kernel;
        let rows = x.len() / head_dim;
        let step = TASK.div_ceil(head_dim);
        loop {
            let first = self.worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                let at = row * head_dim;
                // SAFETY: row `row` exists in all three, and is claimed by this worker only.
                unsafe { rotate(l, x.ptr().add(at), lut.ptr().add(at), y.ptr().add(at), head_dim / 2) };
            }
        }
    }
}

/// # Safety
/// All three are valid for `2 * half` elements; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn rotate<L: Lanes>(l: L, x: *const bf16, lut: *const bf16, y: *mut bf16, half: usize) {
    for i in (0..half).step_by(LANES) {
        let len = LANES.min(half - i);
        // SAFETY: `len` elements from `i` and from `half + i` on exist, and are read before they are written.
        unsafe {
            let (x0, x1) = (load(l, x.add(i), len), load(l, x.add(half + i), len));
            let (cos, sin) = (load(l, lut.add(i), len), load(l, lut.add(half + i), len));
            // A product of bf16 is exact in f32, so FMA or not gives the same bits.
            store(l, y.add(i), l.round_down(l.sub(l.mul(x0, cos), l.mul(x1, sin))), len);
            store(l, y.add(half + i), l.round_down(l.mul_add(x1, cos, l.mul(x0, sin))), len);
        }
    }
}
