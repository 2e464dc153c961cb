//! BFP16, the block floating point of the matrix unit: eight values along K share an exponent.
//!
//! The exponent is that of the largest magnitude, `e = floor(log2(max))`; each value is an 8-bit signed multiple of
//! `2^(e - 6)`, -128 to 127, rounded to nearest even. So the largest keeps seven of bf16's eight bits and the others fewer,
//! and a product of quantised operands is the ordinary bf16 product. Quantising twice is quantising once, but for a block
//! with -128 in it: that is a power of two, and moves the exponent.
//!
//! A block with infinity or NaN is NaN: the format has neither. Exponents end at -114, below what f32 products can use.
//! Source: mlir-aie's `bfp16ebs8` and its matrix kernels; the error it makes is the one measured on hardware, 9.3e-3.

use half::bf16;

use crate::compute::{
    Isa,
    lanes::{LANES, Lanes, Lanewise},
    pack::PANEL,
    pool::{Kernel, Worker},
    view::{Dst, Src},
};

/// Values that share an exponent.
pub const BLOCK: usize = 8;

/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// Elements of a task.
const TASK: usize = 8192;

/// `y = x`, every row of `cols` quantised in blocks from its start; the last block may be short.
///
/// Shapes: `x`, `y` [rows, cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    /// Rows.
    pub x: Src<bf16>,
    /// Quantised rows.
    pub y: Dst<bf16>,
    /// Length of a row.
    pub cols: usize,
    /// Instruction set.
    pub isa: Isa,
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl Kernel for Blocks {
    fn run(&self, worker: &Worker<'_>) {
        assert_eq!(self.x.len(), self.y.len(), "bfp16: x and y differ in length");
        assert!(self.x.len().is_multiple_of(self.cols.max(1)), "bfp16: x is not [rows, {}]", self.cols);
        self.isa.dispatch(Share { kernel: self, worker });
    }
}

struct Share<'a> {
    kernel: &'a Blocks,
    worker: &'a Worker<'a>,
}

impl Lanewise for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let Blocks { x, y, cols, .. } = *self.kernel;
        let rows = x.len() / cols.max(1);
        let step = TASK.div_ceil(cols.max(1));
        loop {
            let first = self.worker.claim() * step;
            if first >= rows {
                break;
            }
            for row in first..(first + step).min(rows) {
                // SAFETY: row `row` exists in `x` and `y`, and is claimed by this worker only.
                unsafe { quantise_row(l, x.ptr().add(row * cols), y.ptr().add(row * cols), cols) };
            }
        }
    }
}

/// bf16's largest number.
const LARGEST: f32 = f32::from_bits(0x7f7f_0000);

/// What turns a value into a multiple of its block's step, and back.
#[inline(always)]
fn scales<L: Lanes>(l: L, power: L::F) -> (L::F, L::F) {
    const SMALLEST: f32 = f32::from_bits((127 - 114) << 23);
    const HIGHEST: f32 = f32::from_bits((127 + 127) << 23);
    let step = l.mul(l.min(l.max(power, l.splat(SMALLEST)), l.splat(HIGHEST)), l.splat(1.0 / 64.0));
    // Infinite for a block with infinity or NaN, whose difference to itself is NaN.
    (l.inverse_power(step), l.add(step, l.sub(power, power)))
}

/// `v` as a multiple of the block's step.
#[inline(always)]
fn quantised<L: Lanes>(l: L, v: L::F, (to, from): (L::F, L::F)) -> L::F {
    let value = l.mul(l.min(l.round(l.mul(v, to)), l.splat(127.0)), from);
    // -128 of the largest step is -2^128, which bf16 has not; the value is the second operand, so NaN passes.
    l.max(l.splat(-LARGEST), value)
}

/// Sixteen neighbours, which are two blocks.
#[inline(always)]
pub(super) fn quantise<L: Lanes>(l: L, v: L::F) -> L::F {
    quantised(l, v, scales(l, l.max_of_eight(l.power(v))))
}

/// Quantises `len` values from `x` to `y`, which may be the same.
///
/// # Safety
/// `x` is valid for reads of `len` elements, `y` for writes.
#[inline(always)]
pub(super) unsafe fn quantise_row<L: Lanes>(l: L, x: *const bf16, y: *mut bf16, len: usize) {
    let whole = len - len % LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: sixteen elements from `i` on exist.
        unsafe {
            l.store_bf16(y.add(i), quantise(l, l.load_bf16(x.add(i))));
        }
    }
    if whole < len {
        let mut tail = [bf16::ZERO; LANES];
        // SAFETY: `len - whole < LANES` elements from `whole` on exist.
        unsafe {
            tail.as_mut_ptr().copy_from_nonoverlapping(x.add(whole), len - whole);
            let v = l.load_bf16(tail.as_ptr());
            l.store_bf16(tail.as_mut_ptr(), quantise(l, v));
            y.add(whole).copy_from_nonoverlapping(tail.as_ptr(), len - whole);
        }
    }
}

/// Quantises the columns of a packed panel of `pairs` pairs from `from` to `to`, which may be the same.
///
/// # Safety
/// `from` is valid for reads of `pairs * PANEL` u32, `to` for writes.
#[inline(always)]
pub(super) unsafe fn quantise_panel<L: Lanes>(l: L, from: *const u32, to: *mut u32, pairs: usize) {
    for first in (0..pairs - pairs % PAIRS).step_by(PAIRS) {
        for column in (0..PANEL).step_by(LANES) {
            // SAFETY: PAIRS pairs from `first` on exist.
            unsafe {
                let at = first * PANEL + column;
                quantise_columns::<L, PAIRS>(l, from.add(at), to.add(at));
            }
        }
    }
    for column in (0..PANEL).step_by(LANES) {
        let at = (pairs - pairs % PAIRS) * PANEL + column;
        // SAFETY: as many pairs as the last block has.
        unsafe {
            match pairs % PAIRS {
                1 => quantise_columns::<L, 1>(l, from.add(at), to.add(at)),
                2 => quantise_columns::<L, 2>(l, from.add(at), to.add(at)),
                3 => quantise_columns::<L, 3>(l, from.add(at), to.add(at)),
                _ => {}
            }
        }
    }
}

/// One block of `N` pairs in each of sixteen columns.
///
/// # Safety
/// Sixteen u32 at `n * PANEL` from `from` and `to` on, for every n below `N`.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "adapters that are not inlined cost a factor of nine")]
unsafe fn quantise_columns<L: Lanes, const N: usize>(l: L, from: *const u32, to: *mut u32) {
    // SAFETY: the caller's.
    unsafe {
        let mut values = [l.load_pairs(from); N];
        let mut power = l.max(l.power(values[0].0), l.power(values[0].1));
        for n in 1..N {
            values[n] = l.load_pairs(from.add(n * PANEL));
            power = l.max(power, l.max(l.power(values[n].0), l.power(values[n].1)));
        }
        let scales = scales(l, power);
        for n in 0..N {
            let (even, odd) = values[n];
            l.store_pairs(to.add(n * PANEL), quantised(l, even, scales), quantised(l, odd, scales));
        }
    }
}
