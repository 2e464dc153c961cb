//! Sixteen lanes in plain Rust, written so that the compiler vectorises them for the target's baseline.
//!
//! May not use `f32::mul_add` (without FMA it is a library call) nor `f32::max` (it hides NaN).

use half::bf16;

use super::{EXPONENT, LANES, Lanes, TWICE_BIAS};

#[derive(Clone, Copy)]
pub(super) struct Portable;

type F = [f32; LANES];

/// An array of what an expression of the lane's number is.
///
/// Not `array::from_fn`, and no closures: what is not inlined across code generation units costs a factor of fifty.
macro_rules! each {
    ($i:ident => $value:expr) => {
        each!(LANES, 0.0; $i => $value)
    };
    ($len:expr, $zero:expr; $i:ident => $value:expr) => {{
        let mut lanes = [$zero; $len];
        let mut $i = 0;
        while $i < $len {
            lanes[$i] = $value;
            $i += 1;
        }
        lanes
    }};
}

/// Folds by halves with `$f`.
macro_rules! fold {
    ($v:ident, $f:expr) => {{
        let eight = each!(8, 0.0; i => $f($v[i], $v[i + 8]));
        let four = each!(4, 0.0; i => $f(eight[i], eight[i + 4]));
        $f($f(four[0], four[2]), $f(four[1], four[3]))
    }};
}

#[inline(always)]
fn plus(a: f32, b: f32) -> f32 {
    a + b
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
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
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
        each!(i => f32::from_bits(u32::from(bits[i]) << 16))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: F) {
        let rounded = each!(LANES, 0; i => round_to_bf16(v[i]) as u16);
        // SAFETY: the caller's; a bf16 is its bits.
        unsafe { p.cast::<[u16; LANES]>().write(rounded) }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        each!(i => a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        each!(i => a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        each!(i => a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        each!(i => a[i] / b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        each!(i => a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        each!(i => larger(a[i], b[i]))
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        each!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, v: F) -> F {
        // Adding 1.5 * 2^23 leaves no room for a fraction.
        const SHIFT: f32 = 12_582_912.0;
        each!(i => (v[i] + SHIFT) - SHIFT)
    }

    #[inline(always)]
    fn floor(self, v: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        each!(i => {
            let nearest = (v[i] + SHIFT) - SHIFT;
            if nearest > v[i] { nearest - 1.0 } else { nearest }
        })
    }

    #[inline(always)]
    fn round_nearest(self, v: F) -> F {
        each!(i => f32::from_bits(round_to_bf16(v[i]) << 16))
    }

    #[inline(always)]
    fn round_down(self, v: F) -> F {
        each!(i => round_down(v[i]))
    }

    #[inline(always)]
    fn with_sign(self, v: F, sign: F) -> F {
        each!(i => f32::from_bits(v[i].to_bits() & 0x7fff_ffff | sign[i].to_bits() & 0x8000_0000))
    }

    #[inline(always)]
    fn power(self, v: F) -> F {
        each!(i => f32::from_bits(v[i].to_bits() & EXPONENT as u32))
    }

    #[inline(always)]
    fn inverse_power(self, p: F) -> F {
        each!(i => f32::from_bits((TWICE_BIAS as u32).wrapping_sub(p[i].to_bits())))
    }

    #[inline(always)]
    fn of_bf16_bits(self, n: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        each!(i => f32::from_bits((n[i] + SHIFT).to_bits() << 16))
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; LANES], index: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        each!(i => table[((index[i] + SHIFT).to_bits() & 15) as usize])
    }

    #[inline(always)]
    fn max_of_eight(self, v: F) -> F {
        let four = each!(i => larger(v[i], v[i ^ 4]));
        let two = each!(i => larger(four[i], four[i ^ 2]));
        each!(i => larger(two[i], two[i ^ 1]))
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (F, F) {
        // SAFETY: the caller's.
        let pairs = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        (each!(i => widen_low(pairs[i])), each!(i => widen_high(pairs[i])))
    }

    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, even: F, odd: F) {
        let pairs = each!(LANES, 0; i => even[i].to_bits() >> 16 | odd[i].to_bits());
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(pairs) }
    }

    #[inline(always)]
    fn scale(self, p: F, n: F) -> F {
        const SHIFT: f32 = 12_582_912.0;
        // The low bits of n + 1.5 * 2^23 are n; a cast to integer would saturate and vectorise badly.
        each!(i => p[i] * f32::from_bits((n[i] + SHIFT).to_bits().wrapping_add(127) << 23))
    }

    #[inline(always)]
    fn keep_first(self, v: F, n: usize, fill: f32) -> F {
        each!(i => if i < n { v[i] } else { fill })
    }

    #[inline(always)]
    fn sum(self, v: F) -> f32 {
        fold!(v, plus)
    }

    #[inline(always)]
    fn largest(self, v: F) -> f32 {
        fold!(v, larger)
    }

    #[inline(always)]
    unsafe fn pair(self, p: *const bf16) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe { (widen((*p).to_bits()), widen((*p.add(1)).to_bits())) }
    }

    #[inline(always)]
    fn half_pair(self, x: bf16) -> (f32, f32) {
        (widen(x.to_bits()), 0.0)
    }

    #[inline(always)]
    unsafe fn pairs(self, p: *const u32) -> [u32; LANES] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    fn dot(self, acc: F, a: (f32, f32), w: [u32; LANES]) -> F {
        let even = each!(i => acc[i] + a.0 * widen_low(w[i]));
        each!(i => even[i] + a.1 * widen_high(w[i]))
    }

    #[inline(always)]
    fn prefetch(self, _: *const u32) {}

    #[inline(always)]
    fn prefetch_stream(self, _: *const u32) {}
}
