//! Elementwise kernels: SiLU times up, add, bias, GELU.
//!
//! f32 inside and one rounding at the end, or the NPU2's own steps ([`npu2`](super::npu2)). The output may be an input itself
//! (the same address and length), never a part of one.

use half::bf16;

use super::{
    Isa,
    exp::exp2,
    lanes::{LANES, Lanes, Lanewise},
    npu2,
    pool::{ALONE, Kernel, Worker, stretch},
    rounding::narrow,
    view::{Dst, Src},
};

/// `out = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`.
///
/// Shapes: all alike. `out` may be `gate` or `up`.
#[derive(Debug, Clone, Copy)]
pub struct SiluMul<const NPU2: bool> {
    /// Goes through SiLU.
    pub gate: Src<bf16>,
    /// The other factor.
    pub up: Src<bf16>,
    /// Product.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `out = a + b`.
///
/// Shapes: all alike. `out` may be `a` or `b`.
#[derive(Debug, Clone, Copy)]
pub struct Add<const NPU2: bool> {
    /// A summand.
    pub a: Src<bf16>,
    /// A summand.
    pub b: Src<bf16>,
    /// Sum.
    pub out: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `y[r] = x[r] + bias` for every row `r`.
///
/// Shapes: `x`, `y` [rows, cols], `bias` [cols]. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct BiasAdd<const NPU2: bool> {
    /// Rows.
    pub x: Src<bf16>,
    /// Added to every row.
    pub bias: Src<bf16>,
    /// Sums.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// `y = x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`, GELU's tanh form.
///
/// Shapes: all alike. `y` may be `x`.
#[derive(Debug, Clone, Copy)]
pub struct GeluTanh<const NPU2: bool> {
    /// Argument.
    pub x: Src<bf16>,
    /// Value.
    pub y: Dst<bf16>,
    /// Instruction set.
    pub isa: Isa,
}

/// A function of two vectors.
pub(super) trait Function {
    fn of<L: Lanes>(&self, l: L, a: L::F, b: L::F) -> L::F;
}

pub(super) struct SiluTimes<const NPU2: bool>;
struct Plus<const NPU2: bool>;
struct Gelu<const NPU2: bool>;

impl<const NPU2: bool> Function for SiluTimes<NPU2> {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, gate: L::F, up: L::F) -> L::F {
        if NPU2 { npu2::silu_times(l, gate, up) } else { l.mul(times_sigmoid(l, gate, gate), up) }
    }
}

impl<const NPU2: bool> Function for Plus<NPU2> {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, a: L::F, b: L::F) -> L::F {
        narrow::<L, NPU2>(l, l.add(a, b))
    }
}

impl<const NPU2: bool> Function for Gelu<NPU2> {
    #[inline(always)]
    fn of<L: Lanes>(&self, l: L, x: L::F, _: L::F) -> L::F {
        if NPU2 {
            return npu2::gelu(l, x);
        }
        // (1 + tanh u) / 2 is the sigmoid of 2u, which does not cancel for large negative u.
        const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
        let cubic = l.mul_add(l.mul(x, x), l.splat(0.044715), l.splat(1.0));
        times_sigmoid(l, x, l.mul(l.mul(x, cubic), l.splat(TWICE_SQRT_2_OVER_PI)))
    }
}

/// `x / (1 + e^-t)`.
#[inline(always)]
fn times_sigmoid<L: Lanes>(l: L, x: L::F, t: L::F) -> L::F {
    let e = exp2(l, l.mul(t, l.splat(-std::f32::consts::LOG2_E)));
    l.mul(x, l.reciprocal(l.add(l.splat(1.0), e)))
}

/// `y[i] = f(a[i], b[i])` for `len` elements.
///
/// # Safety
/// All three are valid for `len` elements; `y` is `a` or `b` or overlaps neither.
#[inline(always)]
unsafe fn apply<L: Lanes>(l: L, f: &impl Function, a: *const bf16, b: *const bf16, y: *mut bf16, len: usize) {
    let (pairs, whole) = (len - len % (2 * LANES), len - len % LANES);
    for i in (0..pairs).step_by(2 * LANES) {
        // SAFETY: sixteen pairs from `i` on exist, and are read before they are written.
        unsafe {
            let ((a0, a1), (b0, b1)) = (l.load_pairs(a.add(i).cast()), l.load_pairs(b.add(i).cast()));
            l.store_bf16_pairs(y.add(i), f.of(l, a0, b0), f.of(l, a1, b1));
        }
    }
    for i in (pairs..whole).step_by(LANES) {
        // SAFETY: sixteen elements from `i` on exist, and are read before they are written.
        unsafe { l.store_bf16(y.add(i), f.of(l, l.load_bf16(a.add(i)), l.load_bf16(b.add(i)))) };
    }
    if whole < len {
        let (mut tail_a, mut tail_b) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES]);
        // SAFETY: `len - whole < LANES` elements from `whole` on exist.
        unsafe {
            tail_a.as_mut_ptr().copy_from_nonoverlapping(a.add(whole), len - whole);
            tail_b.as_mut_ptr().copy_from_nonoverlapping(b.add(whole), len - whole);
            let value = f.of(l, l.load_bf16(tail_a.as_ptr()), l.load_bf16(tail_b.as_ptr()));
            l.store_bf16(tail_a.as_mut_ptr(), value);
            y.add(whole).copy_from_nonoverlapping(tail_a.as_ptr(), len - whole);
        }
    }
}

/// One worker's share of `y = f(a, b)`, where `b` starts over after each of its `period` elements.
struct Share<'a, F> {
    f: F,
    a: Src<bf16>,
    b: Src<bf16>,
    y: Dst<bf16>,
    worker: &'a Worker<'a>,
}

impl<F: Function> Share<'_, F> {
    /// Panics unless all three are of one length.
    fn alike(self, isa: Isa, name: &str) {
        let len = self.y.len();
        assert!(self.a.len() == len && self.b.len() == len, "{name}: an operand and the result differ in length");
        isa.dispatch(self);
    }

    /// Panics unless `b` is a row of the others.
    fn by_row(self, isa: Isa, name: &str) {
        let (len, cols) = (self.y.len(), self.b.len());
        assert!(self.a.len() == len, "{name}: x and y differ in length");
        assert!(len.is_multiple_of(cols), "{name}: y is not [rows, {cols}]");
        isa.dispatch(self);
    }
}

impl<F: Function> Lanewise for Share<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with<L: Lanes>(self, l: L) {
        let (len, period) = (self.y.len(), self.b.len());
        // A task is whole rows, or a piece of the one row there is.
        let task = stretch(len);
        let task = if len == period { task } else { task.div_ceil(period.max(1)) * period };
        loop {
            let first = self.worker.claim() * task;
            if first >= len {
                break;
            }
            let last = (first + task).min(len);
            for i in (first..last).step_by(period.min(task)) {
                // SAFETY: a piece within `len`, and within `b` where that starts over; claimed by this worker only.
                unsafe {
                    let b = self.b.ptr().add(if len == period { i } else { 0 });
                    apply(l, &self.f, self.a.ptr().add(i), b, self.y.ptr().add(i), period.min(last - i));
                }
            }
        }
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for SiluMul<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let (gate, up, out) = (self.gate, self.up, self.out);
        Share { f: SiluTimes::<NPU2>, a: gate, b: up, y: out, worker }.alike(self.isa, "silu_mul");
    }

    fn alone(&self) -> bool {
        self.out.len() <= ALONE
    }
}

// SAFETY: tasks are disjoint pieces of `out`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for Add<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let (a, b, out) = (self.a, self.b, self.out);
        Share { f: Plus::<NPU2>, a, b, y: out, worker }.alike(self.isa, "add");
    }

    fn alone(&self) -> bool {
        self.out.len() <= ALONE
    }
}

// SAFETY: tasks are disjoint rows of `y`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for BiasAdd<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        let (x, bias, y) = (self.x, self.bias, self.y);
        Share { f: Plus::<NPU2>, a: x, b: bias, y, worker }.by_row(self.isa, "bias_add");
    }

    fn alone(&self) -> bool {
        self.y.len() <= ALONE
    }
}

// SAFETY: tasks are disjoint pieces of `y`, each claimed once.
unsafe impl<const NPU2: bool> Kernel for GeluTanh<NPU2> {
    fn run(&self, worker: &Worker<'_>) {
        Share { f: Gelu::<NPU2>, a: self.x, b: self.x, y: self.y, worker }.alike(self.isa, "gelu_tanh");
    }

    fn alone(&self) -> bool {
        self.y.len() <= ALONE
    }
}

#[cfg(test)]
mod tests;
