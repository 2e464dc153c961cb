//! The special function unit of an AIE2P core: tanh and exp2, piecewise linear.
//!
//! Both are far coarser than bf16, and that is most of the error of SiLU, GELU and attention. Neither has a published
//! table: what stands here is what has been measured on the silicon, and one reading of it that is marked as such.

use crate::compute::lanes::{LANES, Lanes};

/// tanh as the unit has it, rounded to nearest even.
///
/// Measured (mlir-aie, `iron/kernels/activation.py`, every finite bf16): the argument itself up to 1/2, pieces with breaks
/// every 1/4, on tanh again by 0.8, one from 3 on. Read into it: the breaks lie on tanh, and the pieces are its chords
/// (the measured ones stay within 1.9 units of bf16, chords within 1.6; but the piece from 1 on starts 4 units above).
#[inline(always)]
pub(super) fn tanh<L: Lanes>(l: L, x: L::F) -> L::F {
    // `v` is the second operand of the minimum, so NaN passes.
    let v = l.min(l.splat(4.0), l.with_sign(x, l.splat(0.0)));
    let piece = l.min(l.floor(l.mul(v, l.splat(4.0))), l.splat(12.0));
    let value = l.add(l.mul(l.lookup(&SLOPES, piece), v), l.lookup(&OFFSETS, piece));
    l.round_nearest(l.with_sign(value, x))
}

/// The unit's tanh at 0, 1/4, ... 3.
const BREAKS: [f64; 13] = [
    0.0,
    0.25,
    0.5,
    0.635_148_952_387_287_3,
    0.761_594_155_955_764_9,
    0.848_283_639_957_512_9,
    0.905_148_253_644_866_4,
    0.941_375_538_497_287_4,
    0.964_027_580_075_816_9,
    0.978_026_114_737_815,
    0.986_614_298_151_430_3,
    0.991_859_734_012_169_5,
    0.995_054_753_686_730_5,
];

const SLOPES: [f32; LANES] = {
    let mut slopes = [0.0; LANES];
    let mut i = 0;
    while i < 12 {
        slopes[i] = ((BREAKS[i + 1] - BREAKS[i]) * 4.0) as f32;
        i += 1;
    }
    slopes
};

const OFFSETS: [f32; LANES] = {
    let mut offsets = [1.0; LANES];
    let mut i = 0;
    while i < 12 {
        offsets[i] = (BREAKS[i] - (BREAKS[i + 1] - BREAKS[i]) * i as f64) as f32;
        i += 1;
    }
    offsets
};

/// `2^x` for `x <= 0` as the unit has it: `2^n (1 + f)` with n the integer below x and f its fraction, which is exact at
/// integers and 6 % too large between them. A bf16 without rounding; 0 from 2^-127 on.
///
/// f has seven bits: x is cut to a multiple of 1/128 below it. From |x| = 2 on only bf16's eight bits of x count, and the
/// bits missing in f are ones.
///
/// Source: OpenFlowLM-Next, `utilities/dit-ref/fa_emul.py`, bit-exact with a dump of the instruction on [-40, 10].
#[inline(always)]
pub(super) fn exp2<L: Lanes>(l: L, x: L::F) -> L::F {
    // `x` is the second operand, so NaN passes; what it becomes below does not matter.
    let v = l.max(l.splat(-200.0), x);
    // In units of 1/128 from here on: the step of x.
    let step = l.max(l.power(v), l.splat(1.0));
    let units = l.floor(l.mul(l.mul(v, l.splat(128.0)), l.inverse_power(step)));
    let cut = l.add(l.mul(units, step), l.sub(step, l.splat(1.0)));
    // n and f side by side are exponent and mantissa of the result.
    let bits = l.max(l.add(cut, l.splat(127.0 * 128.0)), l.splat(0.0));
    l.add(l.of_bf16_bits(bits), l.sub(v, v))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::compute::{lanes::Lanewise, testing::isas};
    use half::bf16;

    /// [`tanh`] or [`exp2`] of every number.
    struct Unit<'a>(&'a [f32], bool);

    impl Lanewise for Unit<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with<L: Lanes>(self, l: L) -> Vec<f32> {
            let mut out = vec![0.0; self.0.len()];
            for i in (0..self.0.len()).step_by(LANES) {
                // SAFETY: the tests pass whole vectors.
                unsafe {
                    let x = l.load(self.0.as_ptr().add(i));
                    l.store(out.as_mut_ptr().add(i), if self.1 { exp2(l, x) } else { tanh(l, x) });
                }
            }
            out
        }
    }

    /// The unit's exp2 as its source writes it, in f64.
    pub(in crate::compute::npu2) fn naive_exp2(x: f64) -> f64 {
        let x = x.max(-200.0);
        let ulp = if x == 0.0 { 0.0 } else { (x.abs().log2().floor() - 7.0).exp2() };
        let cut =
            if ulp > 1.0 / 128.0 { (x / ulp).floor() * ulp + ulp - 1.0 / 128.0 } else { (x * 128.0).floor() / 128.0 };
        // Below the normal numbers the mantissa goes on being linear, down to 0.
        let n = cut.floor().max(-127.0);
        if n < -126.0 { (cut + 127.0).max(0.0) * 2f64.powi(-126) } else { n.exp2() * (1.0 + cut - n) }
    }

    /// The unit's tanh, piece by piece, in f64, rounded to nearest even.
    pub(in crate::compute::npu2) fn naive_tanh(x: f64) -> f64 {
        let (a, at) = (x.abs(), |i: usize| if i <= 2 { i as f64 / 4.0 } else { (i as f64 / 4.0).tanh() });
        let value = if a >= 3.0 {
            1.0
        } else {
            let piece = (a * 4.0) as usize;
            at(piece) + (at(piece + 1) - at(piece)) * (a * 4.0 - piece as f64)
        };
        bf16::from_f64(value.copysign(x)).to_f64()
    }

    fn every_bf16() -> Vec<f32> {
        (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()).collect()
    }

    #[test]
    fn tanh_is_the_measured_one_for_every_bf16() {
        let x = every_bf16();
        for isa in isas() {
            for (&x, y) in x.iter().zip(isa.dispatch(Unit(&x, false))) {
                if x.is_nan() {
                    assert!(y.is_nan(), "{isa}: tanh({x}) = {y}");
                    continue;
                }
                let expected = naive_tanh(f64::from(x)) as f32;
                let close = (y - expected).abs() <= expected.abs() / 128.0 && bf16::from_f32(y).to_f32() == y;
                assert!(close || x.abs() < 1e-37, "{isa}: tanh({x}) = {y}, expected {expected}");
                if (1e-37..=0.5).contains(&x.abs()) {
                    assert_eq!(y, x, "{isa}");
                }
                assert!((y - x.tanh()).abs() < 0.0388, "{isa}: tanh({x}) = {y}");
                assert!(x.abs() < 3.0 || y.abs() == 1.0, "{isa}: tanh({x}) = {y}");
            }
        }
    }

    #[test]
    fn exp2_has_a_linear_mantissa() {
        let x: Vec<f32> = every_bf16().into_iter().filter(|x| x.is_nan() || *x <= 0.0).chain([-0.0; 15]).collect();
        let fine: Vec<f32> = (0..1 << 16).map(|i| -(i as f32) * 0.002_137).collect();
        for x in [&x[..x.len() - x.len() % 16], &fine] {
            for isa in isas() {
                for (&x, y) in x.iter().zip(isa.dispatch(Unit(x, true))) {
                    let expected = if x.is_nan() { f64::NAN } else { naive_exp2(f64::from(x)) };
                    let same = f64::from(y) == expected || (y.is_nan() && x.is_nan());
                    assert!(same, "{isa}: 2^{x} = {y}, expected {expected}");
                }
            }
        }
    }

    #[test]
    fn exp2_is_exact_at_integers_and_six_percent_off_between() {
        let x: Vec<f32> = (0..16).map(|i| -(i as f32) / 2.0).collect();
        for isa in isas() {
            let y = isa.dispatch(Unit(&x, true));
            assert_eq!(y[..4], [1.0, 0.75, 0.5, 0.375], "{isa}");
            // From 2 on f has bits that x has not, and they are ones.
            assert_eq!(y[4], 0.25 * (1.0 + 1.0 / 128.0), "{isa}");
        }
    }
}
