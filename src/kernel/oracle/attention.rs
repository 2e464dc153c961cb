//! Grouped-query attention, causal or not, one query row at a time.

use half::bf16;

use super::{Answer, BLOCK, Sample, Term, dot, each};

/// `out[r, h] = softmax(scale q[r, h] K[0..=r, g]^T) V[0..=r, g]`, g = h / (heads / kv_heads); all rows of K and V if not
/// causal.
///
/// Shapes: q `[seq, heads * head_dim]`, k and v `[seq, kv_heads * head_dim]`.
pub(super) fn attention(
    [q, k, v]: [&[bf16]; 3],
    (heads, kv_heads, head_dim): (usize, usize, usize),
    scale: f64,
    causal: bool,
    sample: &Sample,
) -> Answer {
    let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (q, k, v) = (widen(q), widen(k), widen(v));
    let narrow = kv_heads * head_dim;
    let positions = k.len() / narrow;
    // Exponents of V are shared along the positions, masked ones too.
    let v_max: Vec<f32> = v.chunks(BLOCK * narrow).flat_map(|block| column_maxima(block, narrow)).collect();
    let mut last = None;
    let mut terms = vec![];
    each(sample, |row, col| {
        let head = col / head_dim;
        if last != Some((row, head)) {
            last = Some((row, head));
            let start = head / (heads / kv_heads) * head_dim;
            let q = &q[(row * heads + head) * head_dim..][..head_dim];
            let seen = if causal { row + 1 } else { positions };
            terms = head_row(q, &k[start..], &v[start..], &v_max[start..], (seen, narrow), scale);
        }
        terms[col % head_dim]
    })
}

/// One head of one row over the positions it sees.
fn head_row(q: &[f32], k: &[f32], v: &[f32], v_max: &[f32], (seen, stride): (usize, usize), scale: f64) -> Vec<Term> {
    let head_dim = q.len();
    let of = |table: &'_ [f32], p: usize| -> std::ops::Range<usize> {
        debug_assert!(p * stride + head_dim <= table.len());
        p * stride..p * stride + head_dim
    };
    let (mut largest, mut largest_shared) = (0f64, 0f64);
    let scores: Vec<f64> = (0..seen)
        .map(|p| {
            let k = &k[of(k, p)];
            let (score, size) = dot(q, k);
            largest = largest.max(f64::from(size) * scale);
            largest_shared = largest_shared.max(shared(q, k) * scale);
            score * scale
        })
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    // Value, sum of absolutes, and what shared exponents of P and V cost.
    let mut sums = vec![(0.0, 0.0, 0.0); head_dim];
    for (block, block_weights) in weights.chunks(BLOCK).enumerate() {
        let weight_max = block_weights.iter().copied().fold(0.0, f64::max);
        let v_max = &v_max[of(v_max, block)];
        for (i, &weight) in block_weights.iter().enumerate() {
            let v = &v[of(v, block * BLOCK + i)];
            for ((sum, &v), &v_max) in sums.iter_mut().zip(v).zip(v_max) {
                sum.0 += weight * f64::from(v);
                sum.1 += weight * f64::from(v.abs());
                sum.2 += weight * f64::from(v_max) + weight_max * f64::from(v.abs());
            }
        }
    }
    // An error d of a score moves the output by `p d (v - output)`.
    let mut spread = vec![0.0; head_dim];
    for (p, &weight) in weights.iter().enumerate() {
        for ((spread, sum), &v) in spread.iter_mut().zip(&sums).zip(&v[of(v, p)]) {
            *spread += weight * (f64::from(v) - sum.0 / total).abs();
        }
    }
    let finish = |((value, size, shared), spread): ((f64, f64, f64), f64)| {
        let magnitude = (size + spread * largest) / total;
        (value / total, magnitude as f32, ((shared + spread * largest_shared) / total) as f32)
    };
    sums.into_iter().zip(spread).map(finish).collect()
}

/// `sqrt(sum over blocks of 8 (max|a| max|b|)^2)` of the blocks' 8 products.
fn shared(a: &[f32], b: &[f32]) -> f64 {
    let max = |x: &[f32]| f64::from(x.iter().fold(0f32, |max, x| max.max(x.abs())));
    let squares: f64 = a.chunks(BLOCK).zip(b.chunks(BLOCK)).map(|(a, b)| (max(a) * max(b)).powi(2)).sum();
    (BLOCK as f64 * squares).sqrt()
}

fn column_maxima(rows: &[f32], cols: usize) -> Vec<f32> {
    let mut maxima = vec![0f32; cols];
    for row in rows.chunks(cols) {
        maxima.iter_mut().zip(row).for_each(|(max, x)| *max = max.max(x.abs()));
    }
    maxima
}
