//! Sixteen f32 lanes: the vector machine every kernel is written for once, and its four implementations.
//!
//! A value of a [`Lanes`] type is proof that the CPU has its instruction set; [`Isa::dispatch`] makes one after asking
//! the CPU and enters a function compiled with those features, into which the kernel is inlined. Everything on the
//! way must therefore be `#[inline(always)]`: a function that is not would be compiled without the features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use half::bf16;

use super::isa::Isa;

/// Lanes of [`Lanes::F`].
pub(super) const LANES: usize = 16;

/// The exponent bits of an f32.
const EXPONENT: i32 = 0x7f80_0000;

/// The bits of a power of two and of its inverse add up to this.
const TWICE_BIAS: i32 = 0x7f00_0000;

/// One instruction set seen as sixteen lanes.
///
/// Operations are elementwise with IEEE results unless said otherwise; NaN goes in and comes out.
pub(super) trait Lanes: Copy + Send + Sync {
    /// Sixteen f32.
    type F: Copy;
    /// One bf16 pair in all lanes, as [`Lanes::dot`] wants it.
    type Pair: Copy;
    /// Sixteen bf16 pairs, as [`Lanes::dot`] wants them.
    type Pairs: Copy;
    /// Rows of the largest [`tile`](super::tile) that stays in registers.
    const TILE_ROWS: usize;

    fn splat(self, x: f32) -> Self::F;

    /// # Safety
    /// `p` is valid for reads of sixteen f32.
    unsafe fn load(self, p: *const f32) -> Self::F;

    /// # Safety
    /// `p` is valid for writes of sixteen f32.
    unsafe fn store(self, p: *mut f32, v: Self::F);

    /// # Safety
    /// `p` is valid for reads of sixteen bf16.
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F;

    /// Rounds to nearest even, NaN stays NaN.
    ///
    /// # Safety
    /// `p` is valid for writes of sixteen bf16.
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::F);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;

    /// `a * b + c`, in one rounding where the instruction set has it.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// The larger of `a` and `b`; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;

    /// The smaller of `a` and `b`; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;

    /// To the nearest integer; |v| is far below 2^22.
    fn round(self, v: Self::F) -> Self::F;

    /// The whole part of `x` as [`Lanes::scale`] takes it, and the fraction, from 0 to 1 (1 only by rounding). Below -126 both
    /// may be those of -126, and from 128 on those of 128.
    #[inline(always)]
    fn whole_and_fraction(self, x: Self::F) -> (Self::F, Self::F) {
        // `x` is the second operand, so NaN passes.
        let x = self.min(self.splat(128.0), self.max(self.splat(-126.0), x));
        let n = self.floor(x);
        (n, self.sub(x, n))
    }

    /// `p * 2^n` for `p` in 1..=2 and a whole part that [`Lanes::whole_and_fraction`] gave; below 2^-126 it may flush to zero, at
    /// n = 128 it is infinity.
    fn scale(self, p: Self::F, n: Self::F) -> Self::F;

    /// `1 / v` for `v` of at least 1, within an ulp up to 2^125 and within 2^-148 above; 0 for infinity.
    #[inline(always)]
    fn reciprocal(self, v: Self::F) -> Self::F {
        self.div(self.splat(1.0), v)
    }

    /// To the integer below or equal; |v| is far below 2^22.
    fn floor(self, v: Self::F) -> Self::F;

    /// Rounded to bf16 toward nearest even, as f32; a subnormal may become zero.
    fn round_nearest(self, v: Self::F) -> Self::F;

    /// Rounded to bf16 toward minus infinity, as f32.
    fn round_down(self, v: Self::F) -> Self::F;

    /// The sign bit of `sign` on the magnitude of `v`.
    fn with_sign(self, v: Self::F, sign: Self::F) -> Self::F;

    /// The largest power of two that is not above |v|: 0 for 0 and subnormals, infinity for infinity and NaN.
    fn power(self, v: Self::F) -> Self::F;

    /// `1 / p` for a power of two `p` from 2^-126 to 2^126, and 0 or a subnormal for 2^127.
    fn inverse_power(self, p: Self::F) -> Self::F;

    /// The number whose upper 16 bits are the integer `n` in 0..=0x7fff, and whose others are 0.
    fn of_bf16_bits(self, n: Self::F) -> Self::F;

    /// `table[index]` for integral `index` in 0..16; any entry for NaN.
    fn lookup(self, table: &[f32; LANES], index: Self::F) -> Self::F;

    /// The largest of lanes 0..8 in all of them, and of lanes 8..16 likewise; any number if one of them is NaN.
    fn max_of_eight(self, v: Self::F) -> Self::F;

    /// The even and the odd elements of sixteen pairs.
    ///
    /// # Safety
    /// `p` is valid for reads of sixteen u32; it need not be aligned.
    unsafe fn load_pairs(self, p: *const u32) -> (Self::F, Self::F);

    /// Writes sixteen pairs of numbers that are bf16 already.
    ///
    /// # Safety
    /// `p` is valid for writes of sixteen u32; it need not be aligned.
    unsafe fn store_pairs(self, p: *mut u32, even: Self::F, odd: Self::F);

    /// Rounds sixteen pairs as [`Lanes::store_bf16`] does. With [`Lanes::load_pairs`] it is the fast way through many numbers
    /// whose lane does not matter.
    ///
    /// # Safety
    /// `p` is valid for writes of 32 bf16.
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, p: *mut bf16, even: Self::F, odd: Self::F) {
        // SAFETY: the caller's; a pair of bf16 is one u32.
        unsafe { self.store_pairs(p.cast(), self.round_nearest(even), self.round_nearest(odd)) }
    }

    /// Rounds 32 numbers as [`Lanes::store_bf16`] does, `high` behind `low`.
    ///
    /// # Safety
    /// `p` is valid for writes of 32 bf16.
    #[inline(always)]
    unsafe fn store_bf16_wide(self, p: *mut bf16, low: Self::F, high: Self::F) {
        // SAFETY: the caller's.
        unsafe {
            self.store_bf16(p, low);
            self.store_bf16(p.add(LANES), high);
        }
    }

    /// Lane i: [`Lanes::sum`] of the sixteen f32 from `rows + 16 * i` on.
    ///
    /// # Safety
    /// `rows` is valid for reads of sixteen times sixteen f32.
    #[inline(always)]
    unsafe fn sum_of_each(self, rows: *const f32) -> Self::F {
        let mut sums = [0.0; LANES];
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *sum = self.sum(unsafe { self.load(rows.add(i * LANES)) });
        }
        // SAFETY: sixteen f32.
        unsafe { self.load(sums.as_ptr()) }
    }

    /// Lane i: [`Lanes::largest`] of the sixteen f32 from `rows + 16 * i` on.
    ///
    /// # Safety
    /// As [`Lanes::sum_of_each`].
    #[inline(always)]
    unsafe fn largest_of_each(self, rows: *const f32) -> Self::F {
        let mut tops = [0.0; LANES];
        for (i, top) in tops.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *top = self.largest(unsafe { self.load(rows.add(i * LANES)) });
        }
        // SAFETY: sixteen f32.
        unsafe { self.load(tops.as_ptr()) }
    }

    /// Lanes from `n` on replaced by `fill`.
    fn keep_first(self, v: Self::F, n: usize, fill: f32) -> Self::F;

    /// The sum, by halves: `i + (i+8)`, then 4, 2, 1. The same order on every instruction set.
    fn sum(self, v: Self::F) -> f32;

    /// The largest lane; any number if a lane is NaN.
    fn largest(self, v: Self::F) -> f32;

    /// # Safety
    /// `p` is valid for reads of two bf16.
    unsafe fn pair(self, p: *const bf16) -> Self::Pair;

    /// The pair (x, 0).
    fn half_pair(self, x: bf16) -> Self::Pair;

    /// # Safety
    /// `p` is valid for reads of sixteen u32, each a pair with its even element in the low half.
    unsafe fn pairs(self, p: *const u32) -> Self::Pairs;

    /// Transposes sixteen rows of sixteen pairs: `to[i * to_stride + j]` becomes pair i of row j.
    ///
    /// # Safety
    /// `from` is valid for reads of sixteen rows of 32 bf16, `from_stride` apart, `to` for writes of sixteen rows of
    /// sixteen u32, `to_stride` apart.
    #[inline(always)]
    unsafe fn transpose(self, from: *const bf16, from_stride: usize, to: *mut u32, to_stride: usize) {
        for j in 0..LANES {
            for i in 0..LANES {
                // SAFETY: the caller's.
                unsafe {
                    let source = from.add(j * from_stride + 2 * i);
                    let bits = u32::from((*source).to_bits()) | u32::from((*source.add(1)).to_bits()) << 16;
                    to.add(i * to_stride + j).write(bits);
                }
            }
        }
    }

    /// `acc[i] + a.0 * w[i].0 + a.1 * w[i].1` in f32.
    fn dot(self, acc: Self::F, a: Self::Pair, w: Self::Pairs) -> Self::F;

    /// Asks for the cache line at `p`, as near as can be; any address is allowed.
    fn prefetch(self, p: *const u32);

    /// Asks for the cache line at `p` no nearer than the second cache: of a stream out of memory, more lines can be on their way to it
    /// than to the first.
    fn prefetch_stream(self, p: *const u32);
}

/// Work that can be done with any [`Lanes`].
pub(super) trait Lanewise {
    type Output;

    /// Must be `#[inline(always)]`, with everything it calls.
    fn with<L: Lanes>(self, lanes: L) -> Self::Output;
}

impl Isa {
    /// Does `work` with this instruction set.
    ///
    /// Panics if the CPU does not support it.
    #[inline]
    pub(super) fn dispatch<W: Lanewise>(self, work: W) -> W::Output {
        assert!(self.supported(), "this CPU has no {self}");
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: supported, checked above.
            Isa::Avx2 => unsafe { avx2::enter(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: supported, checked above.
            Isa::Avx512f => unsafe { avx512::enter(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: supported, checked above.
            Isa::Avx512bf16 => unsafe { avx512::enter_bf16(work) },
            _ => work.with(portable::Portable),
        }
    }
}

#[cfg(test)]
mod tests;
