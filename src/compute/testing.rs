//! What the kernels' tests share: seeded data, the instruction sets of this CPU, comparison against f64.

use half::bf16;

use super::Isa;

/// `len` values, roughly normal, the same for the same seed.
pub(super) fn noise(len: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| bf16::from_f32((0..6).map(|_| uniform()).sum::<f32>() * 1.4)).collect()
}

/// The instruction sets this CPU has.
pub(super) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}

/// The thread counts whose results must be the same.
pub(super) const THREADS: [usize; 4] = [1, 2, 3, 5];

/// The bits, so that NaN equals itself.
pub(super) fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Asserts |value - expected| <= atol + rtol * |expected| and the same NaN.
pub(super) fn assert_close(name: &str, values: &[bf16], expected: &[f64], rtol: f64, atol: f64) {
    assert_eq!(values.len(), expected.len(), "{name}");
    for (i, (value, &expected)) in values.iter().zip(expected).enumerate() {
        let value = value.to_f64();
        let close = (value - expected).abs() <= atol + rtol * expected.abs() || (value.is_nan() && expected.is_nan());
        assert!(close, "{name}: element {i} is {value}, expected {expected}");
    }
}

/// One bf16 rounding, with a little room for f32 sums that fall on the other side of a tie.
pub(super) const BF16: f64 = 1.0 / 256.0 * 1.01;
