//! The inputs of a case, seeded by its name: as the registry measured, and as real activations and worse look.

use half::bf16;

use crate::kernel::registry::Gate;
use crate::kernel::{Arg, Kernel};
use crate::random::Random;

/// The inputs of a kernel in its order, without the output.
pub(super) type Inputs = Vec<Vec<bf16>>;

/// Which inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    /// Normal, of the registry's standard deviation.
    Measured,
    /// Heavy tails, large offsets, and planted: zeros, subnormals, one huge row, a row as small as sqrt(eps).
    Wild,
}

/// Numbers made one by one; beyond, they come again from a place that the length does not divide.
const PERIOD: usize = 1_000_003;

/// Largest number of standard deviations of a heavy tail.
const TAIL: f64 = 24.0;

/// Normal with a normal exponent: most are small, some are [`TAIL`] standard deviations.
fn heavy(random: &mut Random) -> f64 {
    (random.normal() * random.normal().exp()).clamp(-TAIL, TAIL)
}

/// Makes the inputs of a case.
///
/// Shapes: as [`Kernel::args`], without the output.
pub(super) fn make(kernel: &Kernel, set: Set, gate: &Gate, name: &str) -> Inputs {
    let args = kernel.args();
    let inputs = &args[..args.len() - 1];
    inputs
        .iter()
        .zip(&gate.scales)
        .map(|(arg, &scale)| input(kernel, arg, set, scale, &mut Random::of(&format!("{name} {set:?} {}", arg.name))))
        .collect()
}

fn input(kernel: &Kernel, arg: &Arg, set: Set, scale: f64, random: &mut Random) -> Vec<bf16> {
    let len = arg.rows * arg.cols;
    if arg.name == "lut" {
        return angles(len, arg.cols, random);
    }
    let mut x = fill(len, || match set {
        Set::Measured => random.normal() * scale,
        Set::Wild => heavy(random) * scale,
    });
    if set == Set::Wild {
        // A few channels far from zero, as residual streams have.
        for col in (0..arg.cols).filter(|col| col % 37 == 5) {
            let channel = bf16::from_f64(if matches!(kernel, Kernel::Attention { .. }) { 1.0 } else { 12.0 * scale });
            x.chunks_mut(arg.cols).for_each(|row| row[col] += channel);
        }
        plant(kernel, arg, &mut x);
    }
    x
}

fn fill(len: usize, mut number: impl FnMut() -> f64) -> Vec<bf16> {
    let mut x: Vec<bf16> = (0..len.min(PERIOD)).map(|_| bf16::from_f64(number())).collect();
    while x.len() < len {
        let more = (len - x.len()).min(x.len());
        x.extend_from_within(..more);
    }
    x
}

/// cos (half), then sin (half) of angles in a circle.
fn angles(len: usize, head_dim: usize, random: &mut Random) -> Vec<bf16> {
    let half = head_dim / 2;
    let mut lut = vec![bf16::ZERO; len];
    for row in lut.chunks_mut(head_dim) {
        for i in 0..half {
            let angle = std::f64::consts::TAU * random.uniform();
            (row[i], row[i + half]) = (bf16::from_f64(angle.cos()), bf16::from_f64(angle.sin()));
        }
    }
    lut
}

/// Turns whole rows of the first argument (and of `v`) into extremes. Products stay finite.
fn plant(kernel: &Kernel, arg: &Arg, x: &mut [bf16]) {
    let (rows, cols) = (arg.rows, arg.cols);
    let huge = match kernel {
        Kernel::Gemm { .. } | Kernel::GemmLow { .. } | Kernel::Rope { .. } | Kernel::SiluMul { .. } => 2f64.powi(60),
        Kernel::Add { .. } | Kernel::BiasAdd { .. } => 2f64.powi(115),
        // The squares of a row are summed in f32.
        Kernel::RmsNorm { .. } | Kernel::QkNorm { .. } | Kernel::LayerNorm { .. } => 2f64.powi(20),
        Kernel::Gemv { .. } | Kernel::GemvAdd { .. } => 2f64.powi(60),
        // Gate times up, and then both rows of the weight are huge.
        Kernel::SwigluRms { .. } => 2f64.powi(40),
        // Its cube is a step of its own.
        Kernel::GeluTanh { .. } => 2f64.powi(40),
        Kernel::Attention { .. } => 4.0,
    };
    let mut row = |at: usize, change: &dyn Fn(bf16) -> bf16| {
        x[at * cols..][..cols].iter_mut().for_each(|x| *x = change(*x));
    };
    let times = |factor: f64| move |x: bf16| bf16::from_f64(x.to_f64() * factor);
    match (kernel, arg.name) {
        // eps decides a row whose mean square is eps.
        (Kernel::RmsNorm { eps, .. } | Kernel::QkNorm { eps, .. } | Kernel::LayerNorm { eps, .. }, "x") => {
            row(0, &times(f64::from(eps.value()).sqrt() / 4.0));
            if rows > 3 {
                row(1, &times(0.0));
                row(2, &times(1e-39));
                row(rows - 1, &times(huge));
            }
        }
        // The one row of decode's norm. The second row is its weight.
        (Kernel::SwigluRms { eps, .. }, "packed") => row(0, &times(f64::from(eps.value()).sqrt() / 4.0)),
        // Scores and sums over positions: extremes of a row stay in its own output for q only.
        (Kernel::Attention { .. }, "q" | "v") if rows > 3 => {
            row(1, &times(0.0));
            row(2, &times(1e-39));
            if arg.name == "v" {
                row(rows - 1, &times(huge));
            }
        }
        (
            Kernel::Gemm { .. }
            | Kernel::GemmLow { .. }
            | Kernel::Rope { .. }
            | Kernel::Add { .. }
            | Kernel::BiasAdd { .. }
            | Kernel::GeluTanh { .. },
            "a" | "x",
        )
        | (Kernel::Gemv { .. } | Kernel::GemvAdd { .. } | Kernel::SwigluRms { .. }, "w")
        | (Kernel::SiluMul { .. }, "up")
            if rows > 3 =>
        {
            row(1, &times(0.0));
            row(2, &times(1e-39));
            row(rows - 1, &times(huge));
        }
        _ => {}
    }
}
