//! Tensors at module borders: ndarray over `half::bf16` and `f32`, always row-major.
//!
//! Knows nothing of files, devices or models.

use std::borrow::Cow;

use half::bf16;
use ndarray::{Array2, ArrayView2};

/// A bf16 matrix, rows = positions (or output features), columns = channels.
pub type Bf16Matrix = Array2<bf16>;

/// An f32 matrix.
pub type F32Matrix = Array2<f32>;

/// Widens every element exactly.
///
/// Shapes: `[r, c] -> [r, c]`.
pub fn to_f32(x: ArrayView2<'_, bf16>) -> F32Matrix {
    x.mapv(bf16::to_f32)
}

/// Rounds every element to nearest, ties to even.
///
/// Shapes: `[r, c] -> [r, c]`.
pub fn to_bf16(x: ArrayView2<'_, f32>) -> Bf16Matrix {
    x.mapv(bf16::from_f32)
}

/// The bytes of a bf16 slice, little-endian as every format here stores them.
pub fn bytes_of(x: &[bf16]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// Little-endian bytes as bf16 values: those bytes themselves, where they are aligned.
///
/// Shapes: `[2n] bytes -> [n]`; an odd last byte is ignored.
pub fn bf16_of_le_bytes(bytes: &[u8]) -> Cow<'_, [bf16]> {
    let whole = &bytes[..bytes.len() / 2 * 2];
    match bytemuck::try_cast_slice(whole) {
        Ok(aligned) if cfg!(target_endian = "little") => Cow::Borrowed(aligned),
        _ => whole.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect(),
    }
}

/// As [`bf16_of_le_bytes`], in memory of their own.
pub fn bf16_from_le_bytes(bytes: &[u8]) -> Vec<bf16> {
    bf16_of_le_bytes(bytes).into_owned()
}

/// Transposes elements of two bytes.
///
/// Shapes: `from [rows, cols] -> to [cols, rows]`; both hold exactly that many elements.
pub fn transpose_bf16(from: &[u8], to: &mut [u8], rows: usize, cols: usize) {
    const BLOCK: usize = 32;
    assert!(from.len() == 2 * rows * cols && to.len() == from.len(), "a matrix of {rows} x {cols}");
    for (top, left) in (0..rows).step_by(BLOCK).flat_map(|r| (0..cols).step_by(BLOCK).map(move |c| (r, c))) {
        for r in top..rows.min(top + BLOCK) {
            for c in left..cols.min(left + BLOCK) {
                let (source, target) = (2 * (r * cols + c), 2 * (c * rows + r));
                to[target..target + 2].copy_from_slice(&from[source..source + 2]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        // 1 + 2^-8 lies half way between 1 and 1 + 2^-7: the even one is 1.
        let x = ndarray::arr2(&[[1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)]]);
        assert_eq!(to_f32(to_bf16(x.view()).view()), ndarray::arr2(&[[1.0, 1.0 + 2f32.powi(-6)]]));
    }

    #[test]
    fn transposing_twice_changes_nothing() {
        let from: Vec<u8> = (0..2 * 37 * 50u32).map(|i| (i * 7) as u8).collect();
        let (mut there, mut back) = (vec![0; from.len()], vec![0; from.len()]);
        transpose_bf16(&from, &mut there, 37, 50);
        assert_eq!(there[2..4], from[100..102]);
        transpose_bf16(&there, &mut back, 50, 37);
        assert_eq!(back, from);
    }

    #[test]
    fn bytes_round_trip() {
        let x = [bf16::from_f32(1.5), bf16::NAN, bf16::from_f32(-0.0)];
        let y = bf16_from_le_bytes(bytes_of(&x));
        assert!(x.iter().zip(&y).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
