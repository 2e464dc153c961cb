//! RMSNorm and LayerNorm, one row at a time, every sum in f64.

use half::bf16;

use super::{Answer, Sample, each};

/// `y = x / sqrt(mean(x^2) + eps) * w` per row.
pub(super) fn rms_norm(x: &[bf16], w: &[bf16], cols: usize, eps: f64, sample: &Sample) -> Answer {
    let rstd: Vec<f64> = x
        .chunks(cols)
        .map(|row| 1.0 / (row.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / cols as f64 + eps).sqrt())
        .collect();
    each(sample, |row, col| {
        let y = x[row * cols + col].to_f64() * rstd[row] * w[col].to_f64();
        (y, y.abs() as f32, 0.0)
    })
}

/// `y = (x - mean) / sqrt(var + eps) * w + b` per row, var the mean of `(x - mean)^2`. Magnitude: an error of the mean
/// counts like one of x.
///
/// Shapes: `x [rows, cols]`, `params [2, cols]`, w over b.
pub(super) fn layer_norm(x: &[bf16], params: &[bf16], cols: usize, eps: f64, sample: &Sample) -> Answer {
    let (w, b) = params.split_at(cols);
    let statistics: Vec<(f64, f64)> = x
        .chunks(cols)
        .map(|row| {
            let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / cols as f64;
            let var = row.iter().map(|x| (x.to_f64() - mean).powi(2)).sum::<f64>() / cols as f64;
            (mean, 1.0 / (var + eps).sqrt())
        })
        .collect();
    each(sample, |row, col| {
        let ((mean, rstd), x) = (statistics[row], x[row * cols + col].to_f64());
        let (w, b) = (w[col].to_f64(), b[col].to_f64());
        let size = ((x - mean).abs() + mean.abs()) * rstd * w.abs() + b.abs();
        ((x - mean) * rstd * w + b, size as f32, 0.0)
    })
}
