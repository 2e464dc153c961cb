//! Sixteen lanes in one AVX-512 register, with and without `vdpbf16ps`.
//!
//! Only [`enter`] and [`enter_bf16`] make the proofs; only `Isa::dispatch` may call them.

use std::arch::x86_64::*;

use half::bf16;

use super::{EXPONENT, Lanes, Lanewise, TWICE_BIAS};

/// Proof that the CPU has AVX-512 F and DQ (and AVX2 and FMA).
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Proof that the CPU has AVX-512 F, DQ, BW and BF16.
#[derive(Clone, Copy)]
pub(super) struct Avx512Bf16(());

/// Does `work` with AVX-512 F and DQ.
///
/// # Safety
/// The CPU has AVX-512 F and DQ, AVX2 and FMA.
#[target_feature(enable = "avx2,fma,avx512f,avx512dq")]
pub(super) unsafe fn enter<W: Lanewise>(work: W) -> W::Output {
    work.with(Avx512(()))
}

/// Does `work` with AVX-512 F, DQ, BW and BF16.
///
/// # Safety
/// The CPU has AVX-512 F, DQ, BW and BF16, AVX2 and FMA.
#[target_feature(enable = "avx2,fma,avx512f,avx512dq,avx512bw,avx512bf16")]
pub(super) unsafe fn enter_bf16<W: Lanewise>(work: W) -> W::Output {
    work.with(Avx512Bf16(()))
}

/// From the even elements and then the odd ones to pairs.
static PAIRED: [u16; 32] = {
    let mut from = [0; 32];
    let mut i = 0;
    while i < 16 {
        from[2 * i] = i as u16;
        from[2 * i + 1] = 16 + i as u16;
        i += 1;
    }
    from
};

/// Calls an intrinsic that touches no memory.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: the proof at hand says that the CPU has the instruction.
        unsafe { $call }
    };
}

#[inline(always)]
fn fold(v: __m512, _: Avx512, f: impl Fn(__m128, __m128) -> __m128) -> f32 {
    op!({
        let low = f(_mm512_castps512_ps128(v), _mm512_extractf32x4_ps::<2>(v));
        let high = f(_mm512_extractf32x4_ps::<1>(v), _mm512_extractf32x4_ps::<3>(v));
        let four = f(low, high);
        let two = f(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(f(two, _mm_shuffle_ps::<1>(two, two)))
    })
}

/// Lane i: [`fold`] of row i, in the same order. A macro: a closure that is not inlined lacks the instruction set.
macro_rules! fold_each {
    ($rows:expr, $f:ident) => {{
        let rows: *const f32 = $rows;
        // Of rows e, 4 + e, 8 + e and 12 + e each has a 128-bit lane of four[e].
        let mut four = [_mm512_setzero_pd(); 4];
        let mut e = 0;
        while e < 4 {
            let (r0, r1) = (_mm512_loadu_ps(rows.add(16 * e)), _mm512_loadu_ps(rows.add(16 * (4 + e))));
            let (r2, r3) = (_mm512_loadu_ps(rows.add(16 * (8 + e))), _mm512_loadu_ps(rows.add(16 * (12 + e))));
            let a = $f(_mm512_shuffle_f32x4::<0x44>(r0, r1), _mm512_shuffle_f32x4::<0xee>(r0, r1));
            let b = $f(_mm512_shuffle_f32x4::<0x44>(r2, r3), _mm512_shuffle_f32x4::<0xee>(r2, r3));
            let quarters = $f(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            four[e] = _mm512_castps_pd(quarters);
            e += 1;
        }
        let [w0, w1, w2, w3] = four;
        let a = $f(_mm512_castpd_ps(_mm512_unpacklo_pd(w0, w1)), _mm512_castpd_ps(_mm512_unpackhi_pd(w0, w1)));
        let b = $f(_mm512_castpd_ps(_mm512_unpacklo_pd(w2, w3)), _mm512_castpd_ps(_mm512_unpackhi_pd(w2, w3)));
        $f(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
    }};
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

/// Sixteen rounded bf16, one in each 32-bit lane.
#[inline(always)]
fn nearest(_: Avx512, v: __m512) -> __m512i {
    op!({
        let bits = _mm512_castps_si512(v);
        let upper = _mm512_srli_epi32::<16>(bits);
        let bias = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(upper, _mm512_set1_epi32(1)));
        let nearest = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_mask_or_epi32(nearest, is_nan, upper, _mm512_set1_epi32(0x40))
    })
}

/// [`Lanes::transpose`] by halves: 32-bit words, 64-bit words, 128-bit words twice.
#[inline(always)]
unsafe fn transpose(_: Avx512, from: *const bf16, from_stride: usize, to: *mut u32, to_stride: usize) {
    // SAFETY: the caller's, and the proof says that the CPU has the instructions.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = _mm512_loadu_si512(from.add(j * from_stride).cast());
        }
        let mut words = rows;
        for j in (0..16).step_by(2) {
            words[j] = _mm512_unpacklo_epi32(rows[j], rows[j + 1]);
            words[j + 1] = _mm512_unpackhi_epi32(rows[j], rows[j + 1]);
        }
        let mut quads = rows;
        for j in (0..16).step_by(4) {
            // Column c of each 128-bit lane, rows j..j + 4.
            quads[j] = _mm512_unpacklo_epi64(words[j], words[j + 2]);
            quads[j + 1] = _mm512_unpackhi_epi64(words[j], words[j + 2]);
            quads[j + 2] = _mm512_unpacklo_epi64(words[j + 1], words[j + 3]);
            quads[j + 3] = _mm512_unpackhi_epi64(words[j + 1], words[j + 3]);
        }
        for c in 0..4 {
            let low = (
                _mm512_shuffle_i32x4::<0x88>(quads[c], quads[c + 4]),
                _mm512_shuffle_i32x4::<0x88>(quads[c + 8], quads[c + 12]),
            );
            let high = (
                _mm512_shuffle_i32x4::<0xdd>(quads[c], quads[c + 4]),
                _mm512_shuffle_i32x4::<0xdd>(quads[c + 8], quads[c + 12]),
            );
            let store = |i: usize, v| _mm512_storeu_si512(to.add(i * to_stride).cast(), v);
            store(c, _mm512_shuffle_i32x4::<0x88>(low.0, low.1));
            store(c + 8, _mm512_shuffle_i32x4::<0xdd>(low.0, low.1));
            store(c + 4, _mm512_shuffle_i32x4::<0x88>(high.0, high.1));
            store(c + 12, _mm512_shuffle_i32x4::<0xdd>(high.0, high.1));
        }
    }
}

/// What the two implementations share: all but the rounding to bf16 and the dot product.
macro_rules! shared {
    () => {
        type F = __m512;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            op!(_mm512_set1_ps(x))
        }

        #[inline(always)]
        unsafe fn load(self, p: *const f32) -> __m512 {
            // SAFETY: the caller's, and `self` proves the instruction.
            unsafe { _mm512_loadu_ps(p) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32, v: __m512) {
            // SAFETY: the caller's, and `self` proves the instruction.
            unsafe { _mm512_storeu_ps(p, v) }
        }

        #[inline(always)]
        unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
            // SAFETY: the caller's, and `self` proves the instruction.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_mul_ps(a, b))
        }

        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_div_ps(a, b))
        }

        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            op!(_mm512_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_max_ps(a, b))
        }

        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            op!(_mm512_min_ps(a, b))
        }

        #[inline(always)]
        fn round(self, v: __m512) -> __m512 {
            op!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
        }

        #[inline(always)]
        fn floor(self, v: __m512) -> __m512 {
            op!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(v))
        }

        #[inline(always)]
        fn round_down(self, v: __m512) -> __m512 {
            op!({
                let bits = _mm512_castps_si512(v);
                // Cutting the lower half off rounds the magnitude down; a negative number must go up by it first.
                let up = _mm512_srli_epi32::<16>(_mm512_srai_epi32::<31>(bits));
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                let cut = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, up), upper));
                _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), cut, v)
            })
        }

        #[inline(always)]
        fn with_sign(self, v: __m512, sign: __m512) -> __m512 {
            op!({
                let mask = _mm512_set1_epi32(i32::MIN);
                // Bit by bit: from `sign` where the mask is set, from `v` elsewhere.
                let bits = _mm512_ternarylogic_epi32::<0xca>(mask, _mm512_castps_si512(sign), _mm512_castps_si512(v));
                _mm512_castsi512_ps(bits)
            })
        }

        #[inline(always)]
        fn power(self, v: __m512) -> __m512 {
            op!(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(EXPONENT))))
        }

        #[inline(always)]
        fn inverse_power(self, p: __m512) -> __m512 {
            op!(_mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(TWICE_BIAS), _mm512_castps_si512(p))))
        }

        #[inline(always)]
        fn of_bf16_bits(self, n: __m512) -> __m512 {
            op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtps_epi32(n))))
        }

        #[inline(always)]
        fn lookup(self, table: &[f32; 16], index: __m512) -> __m512 {
            op!(_mm512_permutexvar_ps(_mm512_cvtps_epi32(index), _mm512_loadu_ps(table.as_ptr())))
        }

        #[inline(always)]
        fn max_of_eight(self, v: __m512) -> __m512 {
            op!({
                let two = _mm512_max_ps(v, _mm512_permute_ps::<0b10_11_00_01>(v));
                let four = _mm512_max_ps(two, _mm512_permute_ps::<0b01_00_11_10>(two));
                _mm512_max_ps(four, _mm512_shuffle_f32x4::<0b10_11_00_01>(four, four))
            })
        }

        #[inline(always)]
        unsafe fn load_pairs(self, p: *const u32) -> (__m512, __m512) {
            // SAFETY: the caller's, and `self` proves the instructions.
            unsafe {
                let bits = _mm512_loadu_si512(p.cast());
                let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd))
            }
        }

        #[inline(always)]
        unsafe fn store_pairs(self, p: *mut u32, even: __m512, odd: __m512) {
            // SAFETY: the caller's, and `self` proves the instructions.
            unsafe {
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
                _mm512_storeu_si512(p.cast(), _mm512_or_si512(low, _mm512_castps_si512(odd)));
            }
        }

        #[inline(always)]
        fn whole_and_fraction(self, x: __m512) -> (__m512, __m512) {
            // What is left of x by rounding down to integers, 0 for infinities; `scale` rounds x itself down, and takes any.
            (x, op!(_mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x)))
        }

        #[inline(always)]
        fn reciprocal(self, v: __m512) -> __m512 {
            op!({
                // Fourteen bits, and one step of Newton's; its operand is kept finite, for 0 * infinity would be NaN.
                let near = _mm512_rcp14_ps(v);
                let finite = _mm512_min_ps(v, _mm512_set1_ps(f32::MAX));
                _mm512_fmadd_ps(near, _mm512_fnmadd_ps(finite, near, _mm512_set1_ps(1.0)), near)
            })
        }

        #[inline(always)]
        fn scale(self, p: __m512, n: __m512) -> __m512 {
            op!(_mm512_scalef_ps(p, n))
        }

        #[inline(always)]
        fn keep_first(self, v: __m512, n: usize, fill: f32) -> __m512 {
            op!(_mm512_mask_blend_ps(first(n), _mm512_set1_ps(fill), v))
        }

        #[inline(always)]
        fn sum(self, v: __m512) -> f32 {
            fold(v, Avx512(()), |a, b| op!(_mm_add_ps(a, b)))
        }

        #[inline(always)]
        unsafe fn sum_of_each(self, rows: *const f32) -> __m512 {
            // SAFETY: the caller's, and `self` proves the instructions.
            unsafe { fold_each!(rows, _mm512_add_ps) }
        }

        #[inline(always)]
        unsafe fn largest_of_each(self, rows: *const f32) -> __m512 {
            // SAFETY: the caller's, and `self` proves the instructions.
            unsafe { fold_each!(rows, _mm512_max_ps) }
        }

        #[inline(always)]
        fn largest(self, v: __m512) -> f32 {
            fold(v, Avx512(()), |a, b| op!(_mm_max_ps(a, b)))
        }

        #[inline(always)]
        unsafe fn transpose(self, from: *const bf16, from_stride: usize, to: *mut u32, to_stride: usize) {
            // SAFETY: the caller's.
            unsafe { transpose(Avx512(()), from, from_stride, to, to_stride) }
        }

        #[inline(always)]
        fn prefetch(self, p: *const u32) {
            op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
        }

        #[inline(always)]
        fn prefetch_stream(self, p: *const u32) {
            op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
        }
    };
}

impl Lanes for Avx512 {
    shared!();
    type Pair = (__m512, __m512);
    type Pairs = (__m512, __m512);
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m512) {
        // SAFETY: the caller's, and `self` proves the instructions.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(nearest(self, v))) }
    }

    #[inline(always)]
    fn round_nearest(self, v: __m512) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(nearest(self, v))))
    }

    #[inline(always)]
    unsafe fn pair(self, p: *const bf16) -> (__m512, __m512) {
        // SAFETY: the caller's; two bf16 are one u32.
        let bits = unsafe { p.cast::<u32>().read_unaligned() };
        op!((_mm512_set1_ps(f32::from_bits(bits << 16)), _mm512_set1_ps(f32::from_bits(bits & 0xffff_0000))))
    }

    #[inline(always)]
    fn half_pair(self, x: bf16) -> (__m512, __m512) {
        op!((_mm512_set1_ps(x.to_f32()), _mm512_setzero_ps()))
    }

    #[inline(always)]
    unsafe fn pairs(self, p: *const u32) -> (__m512, __m512) {
        // SAFETY: the caller's, and `self` proves the instructions.
        unsafe {
            let bits = _mm512_loadu_si512(p.cast());
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd))
        }
    }

    #[inline(always)]
    fn dot(self, acc: __m512, a: (__m512, __m512), w: (__m512, __m512)) -> __m512 {
        op!(_mm512_fmadd_ps(a.1, w.1, _mm512_fmadd_ps(a.0, w.0, acc)))
    }
}

#[inline(always)]
fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { std::mem::transmute(bits) }
}

impl Lanes for Avx512Bf16 {
    shared!();
    type Pair = __m512i;
    type Pairs = __m512i;
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m512) {
        // SAFETY: the caller's, and `self` proves the instruction; `__m256bh` is 32 bytes of bf16.
        unsafe { p.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(v)) }
    }

    #[inline(always)]
    unsafe fn store_bf16_wide(self, p: *mut bf16, low: __m512, high: __m512) {
        // SAFETY: the caller's, and `self` proves the instruction; `__m512bh` is 64 bytes of bf16.
        unsafe { p.cast::<__m512bh>().write_unaligned(_mm512_cvtne2ps_pbh(high, low)) }
    }

    #[inline(always)]
    unsafe fn store_bf16_pairs(self, p: *mut bf16, even: __m512, odd: __m512) {
        // SAFETY: the caller's, and `self` proves the instructions; `__m512bh` and `__m512i` are 64 bytes without invalid values.
        unsafe {
            let apart = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
            let paired = _mm512_loadu_si512(PAIRED.as_ptr().cast());
            _mm512_storeu_si512(p.cast(), _mm512_permutexvar_epi16(paired, apart));
        }
    }

    #[inline(always)]
    fn round_nearest(self, v: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions; `__m256bh` and `__m256i` are 32 bytes without invalid values.
        unsafe {
            let half = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
    }

    #[inline(always)]
    unsafe fn pair(self, p: *const bf16) -> __m512i {
        // SAFETY: the caller's, two bf16 are one u32, and `self` proves the instruction.
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    fn half_pair(self, x: bf16) -> __m512i {
        op!(_mm512_set1_epi32(i32::from(x.to_bits())))
    }

    #[inline(always)]
    unsafe fn pairs(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    fn dot(self, acc: __m512, a: __m512i, w: __m512i) -> __m512 {
        op!(_mm512_dpbf16_ps(acc, as_bf16(a), as_bf16(w)))
    }
}
