//! The layer lens: how far each layer's output is from HF's bf16 and f32, and whether more so than HF's own bf16.
//!
//! Position 0 carries a massive activation in many models and reads as perfect; the figures of a layer are taken over
//! positions >= 1, position 0 apart.

use ndarray::{ArrayView2, Axis, s};
use serde::Serialize;

use super::extent::Extent;
use super::metrics::{Metrics, ratio};
use super::position_cosine::PositionCosine;
use super::same_shape;
use super::verdict::Verdict;
use crate::error::{Error, Result};

/// A drop of the cosine between neighbouring layers beyond this is flagged.
///
/// Source: upstream's phase 3, step 2 (informational there too).
pub const CLIFF: f64 = 0.05;

/// A cosine below this is flagged.
///
/// Source: upstream's phase 3, step 2.
pub const FLOOR: f64 = 0.85;

/// The device against one reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    /// Whole-tensor cosine over all positions, as upstream prints it.
    pub cosine: f64,
    pub positions: PositionCosine,
    /// Over positions >= 1; NaN figures when there is none.
    pub body: Metrics,
    /// Relative L2 of position 0; NaN when it is not among the positions.
    pub first_rel_l2: f64,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Layer {
    pub layer: usize,
    pub vs_bf16: Side,
    pub vs_f32: Side,
    /// ‖device - f32‖ / ‖bf16 - f32‖ over positions >= 1: at most about 1 when the device is as close to the truth as
    /// HF's own bf16; 0 when the device equals the truth.
    pub noise_ratio: f64,
    /// Values that are NaN or infinite, in any of the three.
    pub nan_count: usize,
}

impl Layer {
    /// Looks at one layer's output.
    ///
    /// Shapes: `positions [n]`, ascending; `device`, `bf16`, `f32` `[n, hidden_size]`.
    ///
    /// Errors: [`Error::Comparison`] for other shapes and positions that do not ascend.
    pub fn look(
        layer: usize,
        positions: &[u32],
        device: ArrayView2<'_, f32>,
        bf16: ArrayView2<'_, f32>,
        f32: ArrayView2<'_, f32>,
    ) -> Result<Layer> {
        let what = format!("layer {layer}");
        same_shape(&what, device.shape(), bf16.shape())?;
        same_shape(&what, device.shape(), f32.shape())?;
        if positions.len() != device.nrows() || !positions.is_sorted_by(|a, b| a < b) {
            let expected = format!("{} ascending ones, one a row", device.nrows());
            return Err(Error::comparison(what, format!("positions {positions:?}"), expected));
        }
        let body = usize::from(positions.first() == Some(&0));
        let side = |reference| Side::look(device, reference, body);
        let (vs_bf16, vs_f32) = (side(bf16)?, side(f32)?);
        let own = Metrics::measure(bf16.slice(s![body.., ..]), f32.slice(s![body.., ..]))?;
        let bad = |x: ArrayView2<'_, f32>| x.iter().filter(|x| !x.is_finite()).count();
        Ok(Layer {
            layer,
            // Both relative L2 have the same denominator, ‖f32‖.
            noise_ratio: ratio(vs_f32.body.rel_l2, own.rel_l2),
            nan_count: bad(device) + bad(bf16) + bad(f32),
            vs_bf16,
            vs_f32,
        })
    }
}

impl Side {
    fn look(device: ArrayView2<'_, f32>, reference: ArrayView2<'_, f32>, body: usize) -> Result<Side> {
        let (first_device, device_body) = device.split_at(Axis(0), body);
        let (first_reference, reference_body) = reference.split_at(Axis(0), body);
        Ok(Side {
            cosine: Metrics::measure(device, reference)?.cosine,
            positions: PositionCosine::measure(device, reference)?,
            body: Metrics::measure(device_body, reference_body)?,
            first_rel_l2: Metrics::measure(first_device, first_reference)?.rel_l2,
        })
    }
}

/// Something to look at; never a failure by itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Flag {
    /// The cosine falls by more than [`CLIFF`] from the layer before.
    Cliff { layer: usize, figure: &'static str, from: f64, to: f64 },
    /// The cosine is below [`FLOOR`].
    Floor { layer: usize, figure: &'static str, value: f64 },
}

/// Cliffs and floors of the whole cosine and of the least per-position cosine, both against HF's bf16.
pub fn flags(layers: &[Layer]) -> Vec<Flag> {
    let mut flags = Vec::new();
    for (figure, values) in [
        ("cosine", layers.iter().map(|l| l.vs_bf16.cosine).collect::<Vec<f64>>()),
        ("min cosine", layers.iter().map(|l| l.vs_bf16.positions.min).collect()),
    ] {
        flags.extend(values.windows(2).zip(layers.iter().skip(1)).filter_map(|(pair, layer)| {
            let (layer, from, to) = (layer.layer, pair[0], pair[1]);
            (from - to > CLIFF).then_some(Flag::Cliff { layer, figure, from, to })
        }));
        flags.extend(values.iter().zip(layers).filter_map(|(&value, layer)| {
            (value < FLOOR).then_some(Flag::Floor { layer: layer.layer, figure, value })
        }));
    }
    flags
}

/// Fails on NaN; VACUOUS below `required_layers` layers or `required_positions` positions in any of them; flags warn.
pub fn judge(layers: &[Layer], required_layers: usize, required_positions: usize) -> Verdict {
    let bad = layers.iter().filter(|l| l.nan_count > 0);
    let failures = bad.map(|l| format!("layer {}: {} values are NaN or infinite", l.layer, l.nan_count)).collect();
    let positions =
        layers.iter().map(|l| l.vs_bf16.body.count.min(1) * l.vs_bf16.positions.values.len()).min().unwrap_or(0);
    let extent = Extent::new()
        .require("layers", required_layers as u64)
        .compare("layers", layers.len() as u64)
        .require("positions", required_positions as u64)
        .compare("positions", positions as u64);
    flags(layers).iter().fold(Verdict::judge(failures, extent), |verdict, flag| verdict.warn(flag.to_string()))
}

impl std::fmt::Display for Flag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Flag::Cliff { layer, figure, from, to } => {
                write!(f, "cliff at layer {layer}: {figure} {from:.4} -> {to:.4}")
            }
            Flag::Floor { layer, figure, value } => write!(f, "layer {layer}: {figure} {value:.4} < {FLOOR}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::check::Outcome;

    const POSITIONS: [u32; 4] = [0, 1, 5, 9];

    fn truth() -> Array2<f32> {
        let mut x = Array2::from_shape_fn((4, 8), |(i, j)| ((i * 7 + j * 5) % 13) as f32 - 5.0);
        x[[0, 3]] = 25_000.0;
        x
    }

    fn noisy(by: f32) -> Array2<f32> {
        let noise = Array2::from_shape_fn((4, 8), |(i, j)| if (i + j) % 2 == 0 { by } else { -by });
        truth() + noise
    }

    fn look(layer: usize, device: &Array2<f32>) -> Layer {
        Layer::look(layer, &POSITIONS, device.view(), noisy(0.01).view(), truth().view()).unwrap()
    }

    #[test]
    fn noise_ratio_compares_with_hf_bf16() {
        assert!((look(0, &noisy(0.01)).noise_ratio - 1.0).abs() < 1e-6);
        assert!((look(0, &noisy(0.03)).noise_ratio - 3.0).abs() < 1e-2);
        assert_eq!(look(0, &truth()).noise_ratio, 0.0);
    }

    #[test]
    fn position_0_does_not_hide_the_others() {
        let mut device = truth();
        device.slice_mut(s![1.., ..]).mapv_inplace(|x| -x);
        let layer = look(0, &device);
        assert!(layer.vs_f32.cosine > 0.999 && layer.vs_f32.positions.median == -1.0);
        assert_eq!((layer.vs_f32.body.rel_l2, layer.vs_f32.first_rel_l2), (2.0, 0.0));
    }

    #[test]
    fn cliff_and_floor_only_flag() {
        let mut device = truth();
        device.row_mut(2).mapv_inplace(|x| -x);
        let layers = [look(0, &truth()), look(1, &device)];
        let verdict = judge(&layers, 2, 4);
        assert_eq!((verdict.outcome(), verdict.warnings().len()), (Outcome::Pass, 2));
        assert!(verdict.warnings()[0].starts_with("cliff at layer 1: min cosine"), "{verdict}");
    }

    #[test]
    fn nan_fails_and_thin_extent_is_vacuous() {
        let mut device = truth();
        device[[3, 7]] = f32::NAN;
        assert_eq!(judge(&[look(0, &device)], 1, 4).outcome(), Outcome::Fail);
        assert_eq!(judge(&[look(0, &truth())], 2, 4).outcome(), Outcome::Vacuous);
        assert_eq!(judge(&[look(0, &truth())], 1, 5).outcome(), Outcome::Vacuous);
        assert_eq!(judge(&[], 0, 0).outcome(), Outcome::Vacuous);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let x = truth();
        assert!(Layer::look(0, &[0, 1, 2], x.view(), x.view(), x.view()).is_err());
        assert!(Layer::look(0, &[0, 1, 1, 2], x.view(), x.view(), x.view()).is_err());
        assert!(Layer::look(0, &POSITIONS, x.slice(s![.., ..4]), x.view(), x.view()).is_err());
    }
}
