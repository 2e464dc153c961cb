//! What a kernel's work comes to, in full or cut to some of its rows.

use super::{ArgRole, Kernel};

/// Some of the positions that a kernel works on.
///
/// A buffer of `of` positions has that many rows, or a multiple of them where each position has several (heads).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// The first position.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// All positions.
    pub of: usize,
}

impl Rows {
    /// Where the last of them ends.
    pub fn end(self) -> usize {
        self.first + self.count
    }
}

/// What is done and moved, every argument once.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Units: operations, a multiply-add counted as two.
    pub flops: f64,
    /// Units: bytes.
    pub bytes_read: f64,
    /// Units: bytes.
    pub bytes_written: f64,
}

impl Kernel {
    /// The work of these rows, or of all; of all, too, where the kernel cannot be cut to these.
    pub fn work(&self, rows: Option<Rows>) -> Work {
        let rows = rows.filter(|rows| self.can_be_cut(*rows));
        let share = |count: usize, of: usize| count as f64 / of as f64;
        let part = rows.map_or(1.0, |rows| share(rows.count, rows.of));
        let seen = rows.map_or(1.0, |rows| share(rows.end(), rows.of));
        let attention = matches!(self, Kernel::Attention { .. });
        // Position i sees i + 1 positions: those of the triangle up to the end, without those up to the beginning.
        let triangle = |n: usize| n * (n + 1);
        let pairs = rows.map_or(1.0, |r| share(triangle(r.end()) - triangle(r.first), triangle(r.of)));
        let args = self.args();
        let of_output = args.last().map_or(0, |arg| arg.rows);
        let mut work = Work { flops: self.flops() as f64 * if attention { pairs } else { part }, ..Work::default() };
        for (at, arg) in args.iter().enumerate() {
            let bytes = (arg.rows * arg.cols * arg.dtype.bytes()) as f64;
            match arg.role {
                ArgRole::Output => work.bytes_written += bytes * part,
                ArgRole::Input if attention && at > 0 => work.bytes_read += bytes * seen,
                ArgRole::Input if arg.rows == of_output => work.bytes_read += bytes * part,
                _ => work.bytes_read += bytes,
            }
        }
        work
    }

    /// Whether the kernel can compute these rows of its output and no others.
    pub fn can_be_cut(&self, rows: Rows) -> bool {
        let fits = match *self {
            Kernel::Attention { seq, causal, .. } => causal && seq == rows.of,
            _ => self.is_row_wise() && self.args().last().is_some_and(|out| out.rows.is_multiple_of(rows.of)),
        };
        fits && rows.count > 0 && rows.end() <= rows.of
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::kernel::{Dtype, Epsilon};

    /// Work of pieces that make up the whole adds up to the whole's, but for what each piece reads anew.
    #[rstest]
    #[case(Kernel::Gemm { m: 6, k: 4, n: 8, out: Dtype::Bf16 }, 2.0 * 4.0 * 8.0)]
    #[case(Kernel::RmsNorm { rows: 6, cols: 8, eps: Epsilon::new(1e-5) }, 2.0 * 8.0)]
    #[case(Kernel::Rope { rows: 18, head_dim: 4 }, 0.0)]
    #[case(Kernel::Attention { seq: 6, heads: 4, kv_heads: 2, head_dim: 8, causal: true }, 2.0 * 2.0 * 2.0 * 2.0 * 8.0)]
    fn pieces_add_up(#[case] kernel: Kernel, #[case] read_again: f64) {
        let whole = kernel.work(None);
        assert_eq!(whole.flops, kernel.flops() as f64);
        assert_eq!(kernel.work(Some(Rows { first: 0, count: 6, of: 6 })), whole);
        let [front, back] = [(0, 2), (2, 4)].map(|(first, count)| kernel.work(Some(Rows { first, count, of: 6 })));
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b.max(1.0);
        assert!(close(front.flops + back.flops, whole.flops), "{front:?} {back:?} {whole:?}");
        assert!(close(front.bytes_written + back.bytes_written, whole.bytes_written));
        assert!(
            close(front.bytes_read + back.bytes_read, whole.bytes_read + read_again),
            "{front:?} {back:?} {whole:?}"
        );
    }

    #[rstest]
    #[case::one_vector(Kernel::Gemv { m: 6, k: 4 })]
    #[case::everything_sees_everything(Kernel::Attention { seq: 6, heads: 1, kv_heads: 1, head_dim: 8, causal: false })]
    #[case::other_positions(Kernel::Add { rows: 5, cols: 2 })]
    fn what_has_no_such_rows_is_not_cut(#[case] kernel: Kernel) {
        let rows = Rows { first: 0, count: 1, of: 6 };
        assert!(!kernel.can_be_cut(rows) && kernel.work(Some(rows)) == kernel.work(None));
    }
}
