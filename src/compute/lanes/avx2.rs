//! Sixteen lanes in two AVX2 registers, with FMA.
//!
//! Only [`enter`] makes the proof; only `Isa::dispatch` may call it.

use std::arch::x86_64::*;

use half::bf16;

use super::{EXPONENT, Lanes, Lanewise, TWICE_BIAS};

/// Proof that the CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Does `work` with AVX2 and FMA.
///
/// # Safety
/// The CPU has both.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn enter<W: Lanewise>(work: W) -> W::Output {
    work.with(Avx2(()))
}

#[derive(Clone, Copy)]
pub(super) struct F(__m256, __m256);

/// Calls an intrinsic that touches no memory.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: `self` proves that the CPU has the instruction.
        unsafe { $call }
    };
}

/// One 256-bit half of sixteen rounded bf16, one in each 32-bit lane.
#[inline(always)]
fn rounded(_: Avx2, v: __m256) -> __m256i {
    op!({
        let bits = _mm256_castps_si256(v);
        let upper = _mm256_srli_epi32::<16>(bits);
        let bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, _mm256_set1_epi32(1)));
        let nearest = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        _mm256_blendv_epi8(nearest, quiet, is_nan)
    })
}

/// [`Lanes::round_down`] of one half.
#[inline(always)]
fn rounded_down(_: Avx2, v: __m256) -> __m256 {
    op!({
        let bits = _mm256_castps_si256(v);
        // Cutting the lower half off rounds the magnitude down; a negative number must go up by it first.
        let up = _mm256_srli_epi32::<16>(_mm256_srai_epi32::<31>(bits));
        let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        let cut = _mm256_castsi256_ps(_mm256_and_si256(_mm256_add_epi32(bits, up), upper));
        _mm256_blendv_ps(cut, v, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v))
    })
}

/// [`Lanes::lookup`] of one half.
#[inline(always)]
fn looked_up(_: Avx2, table: &[f32; 16], index: __m256) -> __m256 {
    op!({
        let at = _mm256_cvtps_epi32(index);
        let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), at);
        let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), at);
        // Bit 3 of the index chooses, moved to where the blend looks.
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(at)))
    })
}

/// The largest of eight, in all lanes.
#[inline(always)]
fn largest_of_eight(_: Avx2, v: __m256) -> __m256 {
    op!({
        let two = _mm256_max_ps(v, _mm256_permute_ps::<0b10_11_00_01>(v));
        let four = _mm256_max_ps(two, _mm256_permute_ps::<0b01_00_11_10>(two));
        _mm256_max_ps(four, _mm256_permute2f128_ps::<1>(four, four))
    })
}

#[inline(always)]
fn fold(lanes: Avx2, v: F, f: impl Fn(__m128, __m128) -> __m128) -> f32 {
    let _ = lanes;
    op!({
        let low = f(_mm256_castps256_ps128(v.0), _mm256_castps256_ps128(v.1));
        let high = f(_mm256_extractf128_ps::<1>(v.0), _mm256_extractf128_ps::<1>(v.1));
        let four = f(low, high);
        let two = f(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(f(two, _mm_shuffle_ps::<1>(two, two)))
    })
}

/// Transposes eight rows of eight pairs, by 32-bit, 64-bit and 128-bit words.
#[inline(always)]
unsafe fn transpose_8(_: Avx2, from: *const bf16, from_stride: usize, to: *mut u32, to_stride: usize) {
    // SAFETY: the caller's, and the proof says that the CPU has the instructions.
    unsafe {
        let mut rows = [_mm256_setzero_si256(); 8];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = _mm256_loadu_si256(from.add(j * from_stride).cast());
        }
        let mut words = rows;
        for j in (0..8).step_by(2) {
            words[j] = _mm256_unpacklo_epi32(rows[j], rows[j + 1]);
            words[j + 1] = _mm256_unpackhi_epi32(rows[j], rows[j + 1]);
        }
        let mut quads = rows;
        for j in (0..8).step_by(4) {
            quads[j] = _mm256_unpacklo_epi64(words[j], words[j + 2]);
            quads[j + 1] = _mm256_unpackhi_epi64(words[j], words[j + 2]);
            quads[j + 2] = _mm256_unpacklo_epi64(words[j + 1], words[j + 3]);
            quads[j + 3] = _mm256_unpackhi_epi64(words[j + 1], words[j + 3]);
        }
        for c in 0..4 {
            let low = _mm256_permute2x128_si256::<0x20>(quads[c], quads[c + 4]);
            let high = _mm256_permute2x128_si256::<0x31>(quads[c], quads[c + 4]);
            _mm256_storeu_si256(to.add(c * to_stride).cast(), low);
            _mm256_storeu_si256(to.add((c + 4) * to_stride).cast(), high);
        }
    }
}

impl Lanes for Avx2 {
    type F = F;
    type Pair = (__m256, __m256);
    type Pairs = (__m256i, __m256i);
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        op!(F(_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe { F(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> F {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe {
            let widen = |p: *const bf16| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
            };
            F(widen(p), widen(p.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: F) {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe {
            let packed = _mm256_packus_epi32(rounded(self, v.0), rounded(self, v.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        op!(F(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        op!(F(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        op!(F(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        op!(F(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        op!(F(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        op!(F(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        op!(F(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn round(self, v: F) -> F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        op!(F(_mm256_round_ps::<NEAREST>(v.0), _mm256_round_ps::<NEAREST>(v.1)))
    }

    #[inline(always)]
    fn floor(self, v: F) -> F {
        op!(F(_mm256_floor_ps(v.0), _mm256_floor_ps(v.1)))
    }

    #[inline(always)]
    fn round_nearest(self, v: F) -> F {
        op!({
            let low = _mm256_slli_epi32::<16>(rounded(self, v.0));
            let high = _mm256_slli_epi32::<16>(rounded(self, v.1));
            F(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        })
    }

    #[inline(always)]
    fn round_down(self, v: F) -> F {
        F(rounded_down(self, v.0), rounded_down(self, v.1))
    }

    #[inline(always)]
    fn with_sign(self, v: F, sign: F) -> F {
        op!({
            let mask = _mm256_set1_ps(-0.0);
            F(
                _mm256_or_ps(_mm256_andnot_ps(mask, v.0), _mm256_and_ps(mask, sign.0)),
                _mm256_or_ps(_mm256_andnot_ps(mask, v.1), _mm256_and_ps(mask, sign.1)),
            )
        })
    }

    #[inline(always)]
    fn power(self, v: F) -> F {
        op!({
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(EXPONENT));
            F(_mm256_and_ps(v.0, mask), _mm256_and_ps(v.1, mask))
        })
    }

    #[inline(always)]
    fn inverse_power(self, p: F) -> F {
        op!({
            let twice = _mm256_set1_epi32(TWICE_BIAS);
            F(
                _mm256_castsi256_ps(_mm256_sub_epi32(twice, _mm256_castps_si256(p.0))),
                _mm256_castsi256_ps(_mm256_sub_epi32(twice, _mm256_castps_si256(p.1))),
            )
        })
    }

    #[inline(always)]
    fn of_bf16_bits(self, n: F) -> F {
        op!(F(
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtps_epi32(n.0))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtps_epi32(n.1))),
        ))
    }

    #[inline(always)]
    fn lookup(self, table: &[f32; 16], index: F) -> F {
        F(looked_up(self, table, index.0), looked_up(self, table, index.1))
    }

    #[inline(always)]
    fn max_of_eight(self, v: F) -> F {
        F(largest_of_eight(self, v.0), largest_of_eight(self, v.1))
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> (F, F) {
        // SAFETY: the caller's, and `self` proves the instructions.
        unsafe {
            let low = _mm256_loadu_si256(p.cast());
            let high = _mm256_loadu_si256(p.add(8).cast());
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            (
                F(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ),
                F(
                    _mm256_castsi256_ps(_mm256_and_si256(low, upper)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, upper)),
                ),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, even: F, odd: F) {
        // SAFETY: the caller's, and `self` proves the instructions.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(even.0));
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(even.1));
            _mm256_storeu_si256(p.cast(), _mm256_or_si256(low, _mm256_castps_si256(odd.0)));
            _mm256_storeu_si256(p.add(8).cast(), _mm256_or_si256(high, _mm256_castps_si256(odd.1)));
        }
    }

    #[inline(always)]
    fn scale(self, p: F, n: F) -> F {
        op!({
            let power = |n: __m256| {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            };
            F(_mm256_mul_ps(p.0, power(n.0)), _mm256_mul_ps(p.1, power(n.1)))
        })
    }

    #[inline(always)]
    fn keep_first(self, v: F, n: usize, fill: f32) -> F {
        op!({
            let n = _mm256_set1_epi32(n.min(16) as i32);
            let fill = _mm256_set1_ps(fill);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
            let keep = |lane| _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane));
            F(_mm256_blendv_ps(fill, v.0, keep(low)), _mm256_blendv_ps(fill, v.1, keep(high)))
        })
    }

    #[inline(always)]
    fn sum(self, v: F) -> f32 {
        fold(self, v, |a, b| op!(_mm_add_ps(a, b)))
    }

    #[inline(always)]
    fn largest(self, v: F) -> f32 {
        fold(self, v, |a, b| op!(_mm_max_ps(a, b)))
    }

    #[inline(always)]
    unsafe fn pair(self, p: *const bf16) -> (__m256, __m256) {
        // SAFETY: the caller's; two bf16 are one u32.
        let bits = unsafe { p.cast::<u32>().read_unaligned() };
        op!((_mm256_set1_ps(f32::from_bits(bits << 16)), _mm256_set1_ps(f32::from_bits(bits & 0xffff_0000))))
    }

    #[inline(always)]
    fn half_pair(self, x: bf16) -> (__m256, __m256) {
        op!((_mm256_set1_ps(x.to_f32()), _mm256_setzero_ps()))
    }

    #[inline(always)]
    unsafe fn pairs(self, p: *const u32) -> (__m256i, __m256i) {
        // SAFETY: the caller's, and `self` proves the instruction.
        unsafe { (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())) }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const bf16, from_stride: usize, to: *mut u32, to_stride: usize) {
        for j in [0, 8] {
            for i in [0, 8] {
                // SAFETY: the caller's: an eighth row and pair of the sixteen.
                unsafe {
                    let from = from.add(j * from_stride + 2 * i);
                    transpose_8(self, from, from_stride, to.add(i * to_stride + j), to_stride);
                }
            }
        }
    }

    #[inline(always)]
    fn dot(self, acc: F, a: (__m256, __m256), w: (__m256i, __m256i)) -> F {
        op!({
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let half = |acc: __m256, w: __m256i| {
                let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
                let odd = _mm256_castsi256_ps(_mm256_and_si256(w, upper));
                _mm256_fmadd_ps(a.1, odd, _mm256_fmadd_ps(a.0, even, acc))
            };
            F(half(acc.0, w.0), half(acc.1, w.1))
        })
    }

    #[inline(always)]
    fn prefetch(self, p: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }

    #[inline(always)]
    fn prefetch_stream(self, p: *const u32) {
        op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
    }
}
