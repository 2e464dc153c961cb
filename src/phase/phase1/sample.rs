//! Which outputs of a large product are compared.

use std::collections::BTreeSet;

use crate::kernel::Kernel;
use crate::kernel::oracle::Sample;
use crate::random::Random;

/// Multiply-adds up to which every output is compared.
const FULL: u64 = 64 << 20;

/// Rows or columns at each border: no tile of a known config is narrower.
const BORDER: usize = 16;

/// Everything up to [`FULL`] multiply-adds. Beyond, whole rows for half of them: those at the borders and seeded ones; and of
/// the other rows the tiles at both edges, as many rows as the other half pays for. Of a single row, columns instead.
pub(super) fn samples(kernel: &Kernel, random: &mut Random) -> Vec<Sample> {
    let all = Sample::all(kernel);
    let work = kernel.flops() / 2;
    if work <= FULL {
        return vec![all];
    }
    let share = |part: u64, of: usize| ((of as u64 * part / work) as usize).max(2 * BORDER).min(of);
    if all.rows.len() == 1 {
        let cols = chosen(all.cols.len(), share(FULL, all.cols.len()), random);
        return vec![Sample { cols, ..all }];
    }
    let rows = chosen(all.rows.len(), share(FULL / 2, all.rows.len()), random);
    let whole = Sample { rows: rows.clone(), cols: all.cols.clone() };
    let rest: Vec<usize> = all.rows.iter().copied().filter(|row| rows.binary_search(row).is_err()).collect();
    if !edges_are_cheap(kernel) || all.cols.len() <= 2 * BORDER || rest.is_empty() {
        return vec![whole];
    }
    let edge: Vec<usize> = (0..BORDER).chain(all.cols.len() - BORDER..all.cols.len()).collect();
    let cost = work * edge.len() as u64 / all.cols.len() as u64;
    let rows = match rest.len() as u64 * (FULL / 2) / cost.max(1) {
        many if many >= rest.len() as u64 => rest,
        few => chosen(rest.len(), few as usize, random).into_iter().map(|i| rest[i]).collect(),
    };
    vec![whole, Sample { rows, cols: edge }]
}

/// Whether the oracle pays for single columns only; an attention head it computes as a whole.
fn edges_are_cheap(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Gemm { .. } | Kernel::GemmLow { .. })
}

/// `wanted` of `0..len` in order: the borders, and others by chance.
fn chosen(len: usize, wanted: usize, random: &mut Random) -> Vec<usize> {
    let border = BORDER.min(len);
    let mut chosen: BTreeSet<usize> = (0..border).chain(len - border..len).collect();
    while chosen.len() < wanted.min(len) {
        chosen.insert(random.below(len));
    }
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Dtype;

    #[test]
    fn a_small_product_is_compared_as_a_whole() {
        let kernel = Kernel::Gemm { m: 256, k: 512, n: 512, out: Dtype::Bf16 };
        assert_eq!(samples(&kernel, &mut Random::of("x")), [Sample::all(&kernel)]);
    }

    /// All borders and all four corners; no output twice; the work is what it may be.
    #[test]
    fn a_large_product_is_sampled_at_every_border() {
        let (m, k, n) = (2048, 2048, 512);
        let kernel = Kernel::Gemm { m, k, n, out: Dtype::F32 };
        let parts = samples(&kernel, &mut Random::of("x"));
        let mut seen = std::collections::HashSet::new();
        for part in &parts {
            for &row in &part.rows {
                assert!(part.cols.iter().all(|&col| row < m && col < n && seen.insert((row, col))));
            }
        }
        for i in 0..BORDER {
            assert!((0..n).all(|col| seen.contains(&(i, col)) && seen.contains(&(m - 1 - i, col))));
            let at_edges = (0..m).filter(|&row| seen.contains(&(row, i)) && seen.contains(&(row, n - 1 - i))).count();
            assert!(at_edges > m / 4, "{at_edges}");
        }
        let (work, most) = (seen.len() as u64 * k as u64, FULL + (2 * BORDER * n * k) as u64);
        assert!(work > FULL / 2 && work <= most, "{work}");
    }

    #[test]
    fn a_single_row_is_sampled_by_columns() {
        let kernel = Kernel::Gemv { m: 50_000, k: 2048 };
        let parts = samples(&kernel, &mut Random::of("x"));
        assert_eq!((parts.len(), parts[0].rows.len()), (1, 1));
        assert!(parts[0].cols.len() > 30_000 && parts[0].cols.contains(&49_999));
    }
}
