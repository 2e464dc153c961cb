//! Causal grouped-query attention, one query row at a time.

use half::bf16;

use super::{Answer, Sample, each};

/// `out[r, h] = softmax(scale q[r, h] K[0..=r, g]^T) V[0..=r, g]`, g = h / (heads / kv_heads).
///
/// Shapes: q `[seq, heads * head_dim]`, k and v `[seq, kv_heads * head_dim]`. Sampled columns come whole or not.
pub(super) fn attention(
    [q, k, v]: [&[bf16]; 3],
    (heads, kv_heads, head_dim): (usize, usize, usize),
    scale: f64,
    sample: &Sample,
) -> Answer {
    let narrow = kv_heads * head_dim;
    let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let (q, k, v) = (widen(q), widen(k), widen(v));
    let mut last = None;
    let mut context = vec![(0.0, 0.0); head_dim];
    each(sample, |row, col| {
        let head = col / head_dim;
        if last != Some((row, head)) {
            last = Some((row, head));
            let q = &q[(row * heads + head) * head_dim..][..head_dim];
            let start = head / (heads / kv_heads) * head_dim;
            let of = |table: &'_ [f32], p: usize| -> (usize, usize) {
                debug_assert!(p * narrow + start + head_dim <= table.len());
                (p * narrow + start, p * narrow + start + head_dim)
            };
            let dots: Vec<(f64, f32)> = (0..=row)
                .map(|p| {
                    let (from, to) = of(&k, p);
                    super::dot(q, &k[from..to])
                })
                .collect();
            let top = dots.iter().map(|d| d.0 * scale).fold(f64::NEG_INFINITY, f64::max);
            let largest = dots.iter().map(|d| f64::from(d.1) * scale).fold(0.0, f64::max);
            context.fill((0.0, 0.0));
            let mut total = 0.0;
            for (p, (score, _)) in dots.iter().enumerate() {
                let weight = (score * scale - top).exp();
                total += weight;
                let (from, to) = of(&v, p);
                for (context, v) in context.iter_mut().zip(&v[from..to]) {
                    context.0 += weight * f64::from(*v);
                    context.1 += weight * f64::from(v.abs());
                }
            }
            for context in &mut context {
                *context = (context.0 / total, context.1 / total * (1.0 + largest));
            }
        }
        let (value, magnitude) = context[col % head_dim];
        (value, magnitude as f32, 0.0)
    })
}
