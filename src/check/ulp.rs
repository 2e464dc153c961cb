//! The spacing of bf16 numbers, the unit in which a choice between near-equal logits is judged.

/// Distance between neighbouring bf16 numbers at the magnitude of `x`: 2^(floor(log2 |x|) - 7), never below the
/// smallest subnormal 2^-133.
///
/// NaN and infinity have no spacing: NaN.
pub fn bf16_ulp(x: f64) -> f64 {
    if !x.is_finite() {
        return f64::NAN;
    }
    // The exponent field of the f64 is exact where log2 may round up across a power of two.
    let exponent = ((x.abs().to_bits() >> 52) as i32 - 1023).max(-126);
    2f64.powi(exponent - 7)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1.0, 2f64.powi(-7))]
    #[case(-1.99, 2f64.powi(-7))]
    #[case(2.0, 2f64.powi(-6))]
    #[case(19.3, 0.125)]
    #[case(0.0, 2f64.powi(-133))]
    fn spacing(#[case] x: f64, #[case] ulp: f64) {
        assert_eq!(bf16_ulp(x), ulp);
    }

    #[test]
    fn spacing_is_the_distance_to_the_next_number() {
        for bits in (1..0x7f7f).step_by(37) {
            let (x, next) = (bf16::from_bits(bits).to_f64(), bf16::from_bits(bits + 1).to_f64());
            assert_eq!(bf16_ulp(x), next - x, "{x}");
        }
    }

    #[test]
    fn nan_and_infinity_have_none() {
        assert!(bf16_ulp(f64::NAN).is_nan() && bf16_ulp(f64::INFINITY).is_nan());
    }
}
