//! Rotary position embedding, half-split as Hugging Face does it.
//!
//! Source of the NPU2's: mlir-air's `rope_halfsplit.cc`, which never sets the rounding mode.
//!
//! Knows no positions: the caller gives one row of cos and sin for every row of x.

use half::bf16;

use super::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pool::{ALONE, Kernel, Worker, stretch},
    rounding::narrow,
    view::{Dst, Src},
};

/// With h = head_dim / 2: `y[i] = x[i] cos[i] - x[i+h] sin[i]`, `y[i+h] = x[i+h] cos[i] + x[i] sin[i]`, i < h; f32
/// inside, one rounding, which is toward minus infinity on the NPU2.
///
/// Shapes: `x`, `lut`, `y` [rows, head_dim]; a row of `lut` is cos (h values), then sin (h values). `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct Rope<const NPU2: bool> {
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
unsafe impl<const NPU2: bool> Kernel for Rope<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let Rope { x, lut, y, head_dim, isa } = *self;
        Share::<NPU2> { x, lut, y, head_dim, worker }.run(isa);
    }

    fn alone(&self) -> bool {
        self.y.len() <= ALONE
    }
}

/// One worker's share of the rows.
struct Share<'a, const NPU2: bool> {
    x: Src<bf16>,
    lut: Src<bf16>,
    y: Dst<bf16>,
    head_dim: usize,
    worker: &'a Worker<'a>,
}

impl<const NPU2: bool> Share<'_, NPU2> {
    /// Panics if the views do not fit each other.
    fn run(self, isa: Isa) {
        let (len, head_dim) = (self.y.len(), self.head_dim);
        assert!(self.x.len() == len && self.lut.len() == len, "rope: x, lut and y differ in length");
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "rope: head_dim {head_dim} is not even");
        assert!(len.is_multiple_of(head_dim), "rope: x is not [rows, {head_dim}]");
        isa.dispatch(self);
    }
}

impl<const NPU2: bool> Lanewise for Share<'_, NPU2> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Share { x, lut, y, head_dim, worker } = self;
        let rows = x.len() / head_dim;
        let step = stretch(y.len()).div_ceil(head_dim);
        loop {
            let first = worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                let at = row * head_dim;
                // SAFETY: row `row` exists in all three, and is claimed by this worker only.
                unsafe { rotate::<L, NPU2>(l, x.ptr().add(at), lut.ptr().add(at), y.ptr().add(at), head_dim / 2) };
            }
        }
    }
}

/// # Safety
/// All three are valid for `2 * half` elements; `y` is `x` or overlaps neither.
#[inline(always)]
unsafe fn rotate<L: Lanes, const NPU2: bool>(l: L, x: *const bf16, lut: *const bf16, y: *mut bf16, half: usize) {
    let pairs = half - half % (2 * LANES);
    for i in (0..pairs).step_by(2 * LANES) {
        // SAFETY: sixteen pairs from `i` and from `half + i` on exist, and are read before they are written.
        unsafe {
            let (x0, x1) = (l.load_pairs(x.add(i).cast()), l.load_pairs(x.add(half + i).cast()));
            let (cos, sin) = (l.load_pairs(lut.add(i).cast()), l.load_pairs(lut.add(half + i).cast()));
            let even = turn::<L, NPU2>(l, (x0.0, x1.0), (cos.0, sin.0));
            let odd = turn::<L, NPU2>(l, (x0.1, x1.1), (cos.1, sin.1));
            l.store_bf16_pairs(y.add(i), even.0, odd.0);
            l.store_bf16_pairs(y.add(half + i), even.1, odd.1);
        }
    }
    for i in (pairs..half).step_by(LANES) {
        let len = LANES.min(half - i);
        // SAFETY: `len` elements from `i` and from `half + i` on exist, and are read before they are written.
        unsafe {
            let (x0, x1) = (load(l, x.add(i), len), load(l, x.add(half + i), len));
            let (cos, sin) = (load(l, lut.add(i), len), load(l, lut.add(half + i), len));
            let (y0, y1) = turn::<L, NPU2>(l, (x0, x1), (cos, sin));
            store(l, y.add(i), y0, len);
            store(l, y.add(half + i), y1, len);
        }
    }
}

/// Both halves of what [`Rope`] makes of both halves.
#[inline(always)]
fn turn<L: Lanes, const NPU2: bool>(l: L, (x0, x1): (L::F, L::F), (cos, sin): (L::F, L::F)) -> (L::F, L::F) {
    // A product of bf16 is exact in f32, so FMA or not gives the same bits.
    let y0 = l.sub(l.mul(x0, cos), l.mul(x1, sin));
    let y1 = l.mul_add(x1, cos, l.mul(x0, sin));
    (narrow::<L, NPU2>(l, y0), narrow::<L, NPU2>(l, y1))
}

/// # Safety
/// `p` is valid for reads of `len <= LANES` elements.
#[inline(always)]
unsafe fn load<L: Lanes>(l: L, p: *const bf16, len: usize) -> L::F {
    // SAFETY: the caller's.
    unsafe {
        if len == LANES {
            return l.load_bf16(p);
        }
        let mut whole = [bf16::ZERO; LANES];
        whole.as_mut_ptr().copy_from_nonoverlapping(p, len);
        l.load_bf16(whole.as_ptr())
    }
}

/// # Safety
/// `p` is valid for writes of `len <= LANES` elements.
#[inline(always)]
unsafe fn store<L: Lanes>(l: L, p: *mut bf16, v: L::F, len: usize) {
    // SAFETY: the caller's.
    unsafe {
        if len == LANES {
            return l.store_bf16(p, v);
        }
        let mut whole = [bf16::ZERO; LANES];
        l.store_bf16(whole.as_mut_ptr(), v);
        p.copy_from_nonoverlapping(whole.as_ptr(), len);
    }
}

#[cfg(test)]
mod tests;
