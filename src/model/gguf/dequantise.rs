//! Blocks of quantised numbers to f32, value for value as the `gguf` package computes them.

use half::f16;

use super::GgufType;

/// Whole blocks of `kind` to f32.
///
/// Shapes: `[blocks * block bytes] -> [blocks * block elements]`; an incomplete last block is ignored.
pub fn to_f32(kind: GgufType, bytes: &[u8]) -> Vec<f32> {
    match kind {
        GgufType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        GgufType::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        GgufType::Q4_1 => bytes.as_chunks::<20>().0.iter().flat_map(q4_1).collect(),
        GgufType::Q8_0 => bytes.as_chunks::<34>().0.iter().flat_map(q8_0).collect(),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low nibbles are elements 0 to 15, the high ones 16 to 31.
fn q4_1(block: &[u8; 20]) -> [f32; 32] {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    std::array::from_fn(|i| {
        let pair = block[4 + i % 16];
        let q = if i < 16 { pair & 15 } else { pair >> 4 };
        d * f32::from(q) + m
    })
}

fn q8_0(block: &[u8; 34]) -> [f32; 32] {
    let d = half_at(block, 0);
    std::array::from_fn(|i| d * f32::from(block[2 + i] as i8))
}
