//! Whose fault is a disagreement, the device's or the reference's?
//!
//! Four witnesses: the device, HF bf16, HF f32, and our own f32 forward pass. A reference is doubted only when the other
//! three stand together against it. Our own forward pass is no witness against both sides of HF: what it shares with the
//! device (config, weights, tokens) may be read wrongly in both.

use ndarray::ArrayView2;

use crate::check::Metrics;
use crate::check::tolerance::at_most;
use crate::error::Result;

/// How many times further one must be than the others are apart, before it stands alone.
///
/// A sound ieee device is at times twice as near to the truth as HF bf16 is; four times, and HF bf16 is the odd one.
pub const ALONE: f64 = 4.0;

/// The same rows from four sources.
///
/// Shapes: `[rows, channels]` each.
#[derive(Debug, Clone, Copy)]
pub struct Witnesses<'a> {
    pub device: ArrayView2<'a, f32>,
    pub bf16: ArrayView2<'a, f32>,
    pub f32: ArrayView2<'a, f32>,
    /// Our own f32 forward pass.
    pub own: ArrayView2<'a, f32>,
}

/// Who stands alone.
#[derive(Debug, Clone, PartialEq)]
pub enum Ruling {
    /// HF bf16: device, HF f32 and our own forward pass agree.
    Bf16 { device: f64, bf16: f64 },
    /// HF f32: device, HF bf16 and our own forward pass agree.
    F32 { device: f64, f32: f64 },
    /// Both sides of HF against the device and our own forward pass: no dispute, but worth a look.
    Hf { hf: f64, device: f64 },
    /// The device: further than its arithmetic explains.
    Device { device: f64, bf16: f64 },
    /// Nobody.
    Nobody,
}

impl Witnesses<'_> {
    /// Hears all four. `allowed` is how many times as far as HF bf16 the device's arithmetic may be.
    ///
    /// Errors: [`crate::error::Error::Comparison`] for other shapes.
    pub fn hear(&self, allowed: f64) -> Result<Ruling> {
        let apart = |a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>| Ok(Metrics::measure(a, b)?.rel_l2);
        let (device, bf16, f32) =
            (apart(self.device, self.own)?, apart(self.bf16, self.own)?, apart(self.f32, self.own)?);
        // A NaN anywhere leaves the case with the device.
        Ok(if alone(bf16, device, f32) {
            Ruling::Bf16 { device, bf16 }
        } else if alone(f32, device, bf16) {
            Ruling::F32 { device, f32 }
        } else if f32 > ALONE * device && bf16 > ALONE * device && device.is_finite() {
            Ruling::Hf { hf: bf16.min(f32), device }
        } else if !at_most(device, allowed * bf16.max(f32)) {
            Ruling::Device { device, bf16 }
        } else {
            Ruling::Nobody
        })
    }
}

/// Whether one distance is far beyond two others.
fn alone(one: f64, other: f64, third: f64) -> bool {
    // A reference that holds no number stands alone too.
    let beyond = |limit: f64| one.is_nan() || one > limit;
    other.is_finite() && third.is_finite() && beyond(ALONE * other) && beyond(ALONE * third)
}

impl Ruling {
    /// The words of a dispute, if it is one.
    pub fn dispute(&self, what: &str) -> Option<String> {
        match *self {
            Ruling::Bf16 { device, bf16 } => Some(format!(
                "the reference's HF bf16 stands alone in {what}: {bf16:.2e} from our f32 forward pass, the device {device:.2e}, and HF f32 sides with the device"
            )),
            Ruling::F32 { device, f32 } => Some(format!(
                "the reference's HF f32 stands alone in {what}: {f32:.2e} from our f32 forward pass, the device {device:.2e}, and HF bf16 sides with the device"
            )),
            _ => None,
        }
    }

    /// What is worth a look and no dispute.
    pub fn note(&self, what: &str) -> Option<String> {
        match *self {
            Ruling::Hf { hf, device } => Some(format!(
                "{what}: our f32 forward pass sides with the device ({device:.2e}) against both sides of HF ({hf:.2e}): what both share (config, weights, tokens) is read otherwise than HF reads it, or the whole capture is wrong"
            )),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;
    use rstest::rstest;

    use super::*;

    /// The truth with a wave of relative size `by` on it.
    fn off(by: f32) -> Array2<f32> {
        Array2::from_shape_fn((4, 8), |(i, j)| {
            let (x, wave) = (((i * 5 + j * 3) % 7) as f32 - 3.0, if (i * j) % 2 == 0 { by } else { -by });
            x + 2.0 * wave
        })
    }

    fn ruling(device: f32, bf16: f32, f32: f32) -> Ruling {
        let (d, b, f, o) = (off(device), off(bf16), off(f32), off(0.0));
        Witnesses { device: d.view(), bf16: b.view(), f32: f.view(), own: o.view() }.hear(2.0).unwrap()
    }

    #[rstest]
    #[case(0.003, 0.3, 1e-6, true)]
    #[case(0.003, 0.004, 0.3, true)]
    #[case(0.3, 0.004, 1e-6, false)]
    #[case(0.003, 0.004, 1e-6, false)]
    #[case(0.003, f32::NAN, 1e-6, true)]
    #[case(f32::NAN, 0.004, 1e-6, false)]
    #[case(0.003, 0.3, 0.3, false)]
    fn only_a_reference_that_stands_alone_is_disputed(
        #[case] device: f32,
        #[case] bf16: f32,
        #[case] f32: f32,
        #[case] disputed: bool,
    ) {
        let ruling = ruling(device, bf16, f32);
        assert_eq!(ruling.dispute("layer 0").is_some(), disputed, "{ruling:?}");
    }

    #[test]
    fn a_device_that_is_far_is_named() {
        assert!(matches!(ruling(0.3, 0.004, 1e-6), Ruling::Device { .. }));
        assert!(matches!(ruling(f32::NAN, 0.004, 1e-6), Ruling::Device { .. }));
        assert_eq!(ruling(0.003, 0.004, 1e-6), Ruling::Nobody);
    }

    #[test]
    fn both_sides_of_hf_against_us_is_a_note() {
        assert!(ruling(0.003, 0.3, 0.3).note("layer 0").is_some());
        assert!(ruling(0.3, 0.004, 1e-6).note("layer 0").is_none());
    }
}
