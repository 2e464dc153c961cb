//! Nonsense that the judge must refuse: a gate that lets it through says nothing.

use ndarray::Array2;

use super::judge::{Limits, Target, judge};
use crate::error::Result;
use crate::random::Random;

/// The nulls of a reference, by name. One that is the reference itself (the transposed of a single row) is none.
pub(super) fn nulls(reference: &Array2<f32>, seed: &str) -> Vec<(&'static str, Array2<f32>)> {
    let (rows, cols) = reference.dim();
    let (shape, count) = ((rows, cols), reference.len().max(1) as f64);
    let mean = reference.iter().map(|x| f64::from(x.abs())).sum::<f64>() / count;
    let deviation = (reference.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / count).sqrt();
    let mut random = Random::of(&format!("{seed} null"));
    let noise = Array2::from_shape_simple_fn(shape, || (random.normal() * deviation) as f32);
    let columns_first: Vec<f32> = reference.t().iter().copied().collect();
    let transposed = Array2::from_shape_fn(shape, |(r, c)| columns_first[r * cols + c]);
    let shifted = if rows > 1 {
        Array2::from_shape_fn(shape, |(r, c)| reference[[(r + 1) % rows, c]])
    } else {
        Array2::from_shape_fn(shape, |(r, c)| reference[[r, (c + 1) % cols]])
    };
    let all = [
        ("zeros", Array2::zeros(shape)),
        ("noise", noise),
        ("a constant", Array2::from_elem(shape, mean as f32)),
        ("the transposed reference", transposed),
        ("the row-shifted reference", shifted),
    ];
    all.into_iter().filter(|(_, null)| null != reference).collect()
}

/// A reason for every null that passes.
///
/// Errors: as [`judge`].
pub(super) fn survivors(target: &Target, limits: &Limits, seed: &str) -> Result<Vec<String>> {
    let mut survivors = vec![];
    for (name, null) in nulls(&target.values, seed) {
        if judge(null.view(), target, limits)?.is_empty() {
            survivors.push(format!("the gate lets {name} pass"));
        }
    }
    Ok(survivors)
}
