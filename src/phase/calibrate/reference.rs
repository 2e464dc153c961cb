//! What the calibrated kernels should give: plain loops in f64, nothing shared with what they judge.

use half::bf16;

/// Some of the rows of a matrix, spread evenly, the first and the last among them.
pub(super) struct Sample(Vec<usize>);

impl Sample {
    pub(super) fn of(rows: usize, most: usize) -> Sample {
        let count = rows.min(most);
        Sample((0..count).map(|i| if count > 1 { i * (rows - 1) / (count - 1) } else { 0 }).collect())
    }

    /// The sampled rows, one after the other.
    pub(super) fn rows<T: Copy>(&self, x: &[T], cols: usize) -> Vec<T> {
        self.0.iter().flat_map(|&row| x[row * cols..(row + 1) * cols].iter().copied()).collect()
    }
}

/// Rounds to bf16, to nearest even.
pub(super) fn round(x: &mut [f32]) {
    for x in x {
        *x = bf16::from_f32(*x).to_f32();
    }
}

/// `a · wᵀ`; shapes `a` [M, k], `w` [N, k].
pub(super) fn product(a: &[bf16], w: &[bf16], k: usize) -> Vec<f32> {
    let w: Vec<f64> = w.iter().map(|w| w.to_f64()).collect();
    let mut c = vec![];
    for a in a.chunks(k) {
        let a: Vec<f64> = a.iter().map(|a| a.to_f64()).collect();
        for w in w.chunks(k) {
            // Four sums, for the compiler's vector unit.
            let mut sums = [0.0; 4];
            for (a, w) in a.chunks(4).zip(w.chunks(4)) {
                for ((sum, a), w) in sums.iter_mut().zip(a).zip(w) {
                    *sum += a * w;
                }
            }
            c.push(sums.iter().sum::<f64>() as f32);
        }
    }
    c
}

/// `f` of every pair of elements, rounded to bf16.
pub(super) fn each(a: &[bf16], b: &[bf16], f: impl Fn(f64, f64) -> f64) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| bf16::from_f64(f(a.to_f64(), b.to_f64())).to_f32()).collect()
}

/// `x / sqrt(mean(x^2) + eps) * w` per row, rounded to bf16.
pub(super) fn rms_norm(x: &[bf16], w: &[bf16], eps: f64) -> Vec<f32> {
    let mut y = vec![];
    for row in x.chunks(w.len()) {
        let mean = row.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>() / row.len() as f64;
        let rstd = 1.0 / (mean + eps).sqrt();
        y.extend(row.iter().zip(w).map(|(x, w)| bf16::from_f64(x.to_f64() * rstd * w.to_f64()).to_f32()));
    }
    y
}

/// `(x - mean) / sqrt(var + eps) * w + b` per row, rounded to bf16; `params` is w, then b.
pub(super) fn layer_norm(x: &[bf16], params: &[bf16], eps: f64) -> Vec<f32> {
    let (w, b) = params.split_at(params.len() / 2);
    let mut y = vec![];
    for row in x.chunks(w.len()) {
        let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / row.len() as f64;
        let variance = row.iter().map(|x| (x.to_f64() - mean).powi(2)).sum::<f64>() / row.len() as f64;
        let rstd = 1.0 / (variance + eps).sqrt();
        let value = |((x, w), b): ((&bf16, &bf16), &bf16)| (x.to_f64() - mean) * rstd * w.to_f64() + b.to_f64();
        y.extend(row.iter().zip(w).zip(b).map(|each| bf16::from_f64(value(each)).to_f32()));
    }
    y
}

/// cos and sin of positions 0, 1, ... at RoPE's usual frequencies, in bf16: per row cos (half), then sin (half).
pub(super) fn rope_rows(rows: usize, head_dim: usize) -> Vec<bf16> {
    let half = head_dim / 2;
    let mut lut = vec![];
    for row in 0..rows {
        let angle = |i: usize| row as f64 * 10_000f64.powf(-(i as f64) / half as f64);
        lut.extend((0..half).map(|i| bf16::from_f64(angle(i).cos())));
        lut.extend((0..half).map(|i| bf16::from_f64(angle(i).sin())));
    }
    lut
}

/// Half-split rotation, rounded to bf16.
pub(super) fn rope(x: &[bf16], lut: &[bf16], head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let mut y = vec![];
    for (x, lut) in x.chunks(head_dim).zip(lut.chunks(head_dim)) {
        let at = |i: usize| (x[i].to_f64(), x[i + half].to_f64(), lut[i].to_f64(), lut[i + half].to_f64());
        let first = (0..half).map(&at).map(|(a, b, c, s)| a * c - b * s);
        let second = (0..half).map(&at).map(|(a, b, c, s)| a * s + b * c);
        y.extend(first.chain(second).map(|y| bf16::from_f64(y).to_f32()));
    }
    y
}

/// Attention of the sampled rows over all keys they see, rounded to bf16.
pub(super) fn attention(
    q: &[bf16],
    k: &[bf16],
    v: &[bf16],
    (heads, kv_heads, head_dim): (usize, usize, usize),
    causal: bool,
    sample: &Sample,
) -> Vec<f32> {
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    let positions = k.len() / narrow;
    let mut out = vec![];
    for &row in &sample.0 {
        for head in 0..heads {
            let q = &q[row * wide + head * head_dim..][..head_dim];
            let at = |p: usize| p * narrow + head / (heads / kv_heads) * head_dim;
            let seen = if causal { row + 1 } else { positions };
            let scores: Vec<f64> = (0..seen)
                .map(|p| {
                    let dot: f64 = q.iter().zip(&k[at(p)..]).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
                    dot / (head_dim as f64).sqrt()
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut context = vec![0.0; head_dim];
            let mut total = 0.0;
            for (p, score) in scores.iter().enumerate() {
                let weight = (score - top).exp();
                total += weight;
                for (context, v) in context.iter_mut().zip(&v[at(p)..]) {
                    *context += weight * v.to_f64();
                }
            }
            out.extend(context.iter().map(|c| bf16::from_f64(c / total).to_f32()));
        }
    }
    out
}
