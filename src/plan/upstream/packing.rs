//! How upstream lays weights, RoPE rows and heads out before it hands them to a dispatch.
//!
//! Source: mlir-air's `programming_examples/llms/shared`: weight preparation, RoPE tables, attention's host transposes.

use half::bf16;

use crate::error::{Error, Result};

/// From HF's `[out, in]` to what a dispatch wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// As the checkpoint has it: vectors, and a GEMV's `[out, in]`.
    AsStored,
    /// A GEMM's `[in, out]`, padded with zero columns up to `cols`.
    Transposed { cols: usize },
    /// Row `2i` the first tensor's row `i`, row `2i + 1` the second's.
    Interleaved,
    /// The second of two rows; the first is the device's.
    SecondRow,
    /// Rows `first ..` of the vocabulary, with zero rows behind its end.
    Part { first: usize, rows: usize },
}

/// A tensor with its HF shape; a vector is one row.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub rows: usize,
    pub cols: usize,
    pub values: &'a [bf16],
}

impl Packing {
    /// The shape of what comes of tensors of these shapes.
    ///
    /// Errors: [`Error::Plan`] for tensors that cannot be packed like this.
    pub fn shape(self, tensors: &[(usize, usize)]) -> Result<(usize, usize)> {
        let refuse = || Err(Error::Plan { why: format!("tensors of {tensors:?} cannot be packed as {self:?}") });
        match (self, tensors) {
            (Packing::AsStored, &[shape]) => Ok(shape),
            (Packing::Transposed { cols }, &[(out, inputs)]) if cols >= out => Ok((inputs, cols)),
            (Packing::Interleaved, &[a, b]) if a == b => Ok((2 * a.0, a.1)),
            (Packing::SecondRow, &[(1, cols)]) => Ok((2, cols)),
            (Packing::Part { rows, .. }, &[(_, cols)]) => Ok((rows, cols)),
            _ => refuse(),
        }
    }

    /// The packed content.
    ///
    /// Errors: as [`Packing::shape`].
    pub fn apply(self, tensors: &[Tensor<'_>]) -> Result<Vec<bf16>> {
        let shapes: Vec<_> = tensors.iter().map(|t| (t.rows, t.cols)).collect();
        let (rows, cols) = self.shape(&shapes)?;
        let mut out = vec![bf16::ZERO; rows * cols];
        let first = &tensors[0];
        match self {
            Packing::AsStored => out.copy_from_slice(first.values),
            Packing::Transposed { .. } => {
                for (r, row) in first.values.chunks_exact(first.cols).enumerate() {
                    row.iter().enumerate().for_each(|(c, value)| out[c * cols + r] = *value);
                }
            }
            Packing::Interleaved => {
                let pairs = out.chunks_exact_mut(2 * cols);
                let sources = first.values.chunks_exact(cols).zip(tensors[1].values.chunks_exact(cols));
                for (pair, (gate, up)) in pairs.zip(sources) {
                    pair[..cols].copy_from_slice(gate);
                    pair[cols..].copy_from_slice(up);
                }
            }
            Packing::SecondRow => out[cols..].copy_from_slice(first.values),
            Packing::Part { first: from, .. } => {
                // The last partition of a vocabulary that does not fill it: the rest stays zero.
                let there = from.min(first.rows)..(from + rows).min(first.rows);
                let part = &first.values[there.start * cols..there.end * cols];
                out[..part.len()].copy_from_slice(part);
            }
        }
        Ok(out)
    }
}

/// One RoPE row (cos half, then sin half) per position and head.
///
/// Shapes: `rows [positions, head_dim] -> [positions, heads, head_dim]`, flat.
pub fn lut(rows: &[bf16], head_dim: usize, heads: usize) -> Vec<bf16> {
    rows.chunks_exact(head_dim).flat_map(|row| std::iter::repeat_n(row, heads)).flatten().copied().collect()
}

/// Heads in front of positions, each head cut into pieces of `piece` columns.
///
/// Shapes: `[seq, heads * head_dim] -> [heads * head_dim / piece, seq, piece]`; `piece = head_dim` keeps heads whole.
pub fn head_first(x: &[bf16], seq: usize, piece: usize) -> Vec<bf16> {
    let pieces = x.len() / (seq * piece);
    let block = |p: usize| (0..seq).map(move |s| (s * pieces + p) * piece);
    (0..pieces).flat_map(block).flat_map(|at| &x[at..at + piece]).copied().collect()
}

/// Undoes [`head_first`].
///
/// Shapes: `[pieces, seq, piece] -> [seq, pieces * piece]`.
pub fn seq_first(x: &[bf16], seq: usize, piece: usize) -> Vec<bf16> {
    let pieces = x.len() / (seq * piece);
    let row = |s: usize| (0..pieces).map(move |p| (p * seq + s) * piece);
    (0..seq).flat_map(row).flat_map(|at| &x[at..at + piece]).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize) -> Vec<bf16> {
        (1..=n).map(|i| bf16::from_f32(i as f32)).collect()
    }

    fn ints(values: &[bf16]) -> Vec<i32> {
        values.iter().map(|v| v.to_f32() as i32).collect()
    }

    #[test]
    fn packings() {
        let (six, twelve) = (numbers(6), numbers(12));
        let matrix = Tensor { rows: 2, cols: 3, values: &six };
        let apply = |packing: Packing, tensors: &[Tensor<'_>]| ints(&packing.apply(tensors).unwrap());
        assert_eq!(apply(Packing::AsStored, &[matrix]), [1, 2, 3, 4, 5, 6]);
        assert_eq!(apply(Packing::Transposed { cols: 2 }, &[matrix]), [1, 4, 2, 5, 3, 6]);
        assert_eq!(apply(Packing::Transposed { cols: 4 }, &[matrix]), [1, 4, 0, 0, 2, 5, 0, 0, 3, 6, 0, 0]);
        let other = Tensor { rows: 2, cols: 3, values: &twelve[6..] };
        assert_eq!(apply(Packing::Interleaved, &[matrix, other]), [1, 2, 3, 7, 8, 9, 4, 5, 6, 10, 11, 12]);
        let row = Tensor { rows: 1, cols: 3, values: &six[..3] };
        assert_eq!(apply(Packing::SecondRow, &[row]), [0, 0, 0, 1, 2, 3]);
        let table = Tensor { rows: 4, cols: 3, values: &twelve };
        assert_eq!(apply(Packing::Part { first: 0, rows: 3 }, &[table]), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(apply(Packing::Part { first: 3, rows: 3 }, &[table]), [10, 11, 12, 0, 0, 0, 0, 0, 0]);
        assert_eq!(apply(Packing::Part { first: 6, rows: 1 }, &[table]), [0, 0, 0]);
        assert!(Packing::Transposed { cols: 1 }.apply(&[matrix]).is_err());
        assert!(Packing::Interleaved.apply(&[matrix, table]).is_err());
    }

    #[test]
    fn a_rope_row_is_repeated_for_each_head() {
        assert_eq!(ints(&lut(&numbers(4), 2, 3)), [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]);
    }

    #[test]
    fn heads_come_first_and_go_back() {
        // Two positions, two heads of four columns.
        let x = numbers(16);
        let whole = head_first(&x, 2, 4);
        assert_eq!(ints(&whole), [1, 2, 3, 4, 9, 10, 11, 12, 5, 6, 7, 8, 13, 14, 15, 16]);
        let cut = head_first(&x, 2, 2);
        assert_eq!(ints(&cut), [1, 2, 9, 10, 3, 4, 11, 12, 5, 6, 13, 14, 7, 8, 15, 16]);
        assert_eq!((seq_first(&whole, 2, 4), seq_first(&cut, 2, 2)), (x.clone(), x));
    }
}
