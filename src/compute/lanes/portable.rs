//! Sixteen lanes in plain Rust, written so that the compiler vectorises them for the target's baseline.
//!
//! May not use `f32::mul_add` (without FMA it is a library call) nor `f32::max` (it hides NaN).

use half::bf16;

use super::{EXPONENT, LANES, Lanes, TWICE_BIAS};

#[derive(Clone, Copy)]
pub(super) struct Portable;

type F = [f32; LANES];

#[inline(always)]
fn map(a: F, f: impl Fn(f32) -> f32) -> F {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip(a: F, b: F, f: impl Fn(f32, f32) -> f32) -> F {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn fold(v: F, f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| f(v[i], v[i + 8]));
    let four: [f32; 4] = std::array::from_fn(|i| f(eight[i], eight[i + 4]));
    f(f(four[0], four[2]), f(four[1], four[3]))
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Round to nearest even on the bits; NaN keeps its upper bits and becomes quiet.
#[inline(always)]
fn round_to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    let quiet = (bits >> 16) | 0x40;
    if x.is_nan() { quiet } else { rounded }
}

/// Cutting the lower half off rounds the magnitude down; a negative number must go up by it first.
#[inline(always)]
fn round_down(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = ((bits as i32 >> 31) as u32) >> 16;
    let cut = bits.wrapping_add(up) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits } else { cut })
}

#[inline(always)]
fn widen_low(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

#[inline(always)]
fn widen_high(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}

impl Lanes for Portable {
    type F = F;
    type Pair = (f32, f32);
    type Pairs = [u32; LANES];
    const TILE_ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: the caller's.
        unsafe { p.cast::<F>().read() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: the caller's.
        unsafe { p.cast::<F>().write(v) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> F {
        // SAFETY: the caller's.
        let bits = unsafe { p.cast::<[u16; LANES]>().read() };
        std::array::from_fn(|i| f32::from_bits(u32::from(bits[i]) << 16))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: F) {
        let rounded: [bf16; LANES] = std::array::from_fn(|i| bf16::from_bits(round_to_bf16(v[i]) as u16));
        // SAFETY: the caller's.
        unsafe { p.cast::<[bf16; LANES]>().write(rounded) }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        zip(a, b, larger)
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn round(self, v: F) -> F {
        // Adding 1.5 * 2^23 leaves no room for a fraction.
        const SHIFT: f32 = 12_582_912.0;
        map(v, |x| (x + SHIFT) - SHIFT)
    }

    #[inline(always)]
    fn floor(self, v: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        map(v, |x| {
            let nearest = (x + SHIFT) - SHIFT;
            if nearest > x { nearest - 1.0 } else { nearest }
        })
    }

    #[inline(always)]
    fn round_nearest(self, v: F) -> F {
        map(v, |x| f32::from_bits(round_to_bf16(x) << 16))
    }

    #[inline(always)]
    fn round_down(self, v: F) -> F {
        map(v, round_down)
    }

    #[inline(always)]
    fn with_sign(self, v: F, sign: F) -> F {
        zip(v, sign, |v, sign| f32::from_bits(v.to_bits() & 0x7fff_ffff | sign.to_bits() & 0x8000_0000))
    }

    #[inline(always)]
    fn power(self, v: F) -> F {
        map(v, |x| f32::from_bits(x.to_bits() & EXPONENT as u32))
    }

    #[inline(always)]
    fn inverse_power(self, p: F) -> F {
        map(p, |p| f32::from_bits((TWICE_BIAS as u32).wrapping_sub(p.to_bits())))
    }

    #[inline(always)]
    fn of_bf16_bits(self, n: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        map(n, |n| f32::from_bits((n + SHIFT).to_bits() << 16))
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; LANES], index: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        map(index, |i| table[((i + SHIFT).to_bits() & 15) as usize])
    }

    #[inline(always)]
    fn max_of_eight(self, v: F) -> F {
        let four: F = std::array::from_fn(|i| larger(v[i], v[i ^ 4]));
        let two: F = std::array::from_fn(|i| larger(four[i], four[i ^ 2]));
        std::array::from_fn(|i| larger(two[i], two[i ^ 1]))
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (F, F) {
        // SAFETY: the caller's.
        let pairs = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        (std::array::from_fn(|i| widen_low(pairs[i])), std::array::from_fn(|i| widen_high(pairs[i])))
    }

    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, even: F, odd: F) {
        let pairs: [u32; LANES] = std::array::from_fn(|i| even[i].to_bits() >> 16 | odd[i].to_bits());
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(pairs) }
    }

    #[inline(always)]
    fn scale(self, p: F, n: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        // The low bits of n + 1.5 * 2^23 are n; a cast to integer would saturate and vectorise badly.
        zip(p, n, |p, n| p * f32::from_bits((n + SHIFT).to_bits().wrapping_add(127) << 23))
    }

    #[inline(always)]
    fn keep_first(self, v: F, n: usize, fill: f32) -> F {
        std::array::from_fn(|i| if i < n { v[i] } else { fill })
    }

    #[inline(always)]
    fn sum(self, v: F) -> f32 {
        fold(v, |a, b| a + b)
    }

    #[inline(always)]
    fn largest(self, v: F) -> f32 {
        fold(v, larger)
    }

    #[inline(always)]
    unsafe fn pair(self, p: *const bf16) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe { ((*p).to_f32(), (*p.add(1)).to_f32()) }
    }

    #[inline(always)]
    fn half_pair(self, x: bf16) -> (f32, f32) {
        (x.to_f32(), 0.0)
    }

    #[inline(always)]
    unsafe fn pairs(self, p: *const u32) -> [u32; LANES] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    fn dot(self, acc: F, a: (f32, f32), w: [u32; LANES]) -> F {
        let even: F = std::array::from_fn(|i| acc[i] + a.0 * widen_low(w[i]));
        std::array::from_fn(|i| even[i] + a.1 * widen_high(w[i]))
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}
}
