//! The limits of a mean over few outputs, and of a mean over outputs of unlike size. Each term is an argument from rounding.
//!
//! What hardware was measured with are means over a million outputs of one distribution. A case has fewer, and the wild
//! inputs have no table at all; this file says what follows for them from how bf16 rounds, and nothing here was fitted to
//! what a device gave.

use crate::kernel::Kernel;
use crate::kernel::registry::Gate;

/// The registry's limits are this many times the worst figure measured, where one was.
const MARGIN: f64 = 1.5;

/// Standard deviations that a mean may be away from what it is expected to be.
const SIGMAS: f64 = 4.0;

/// Standard deviation of `|error| / mean |output|` of one output, over its mean. An output `r` whose error is one unit or
/// none: `2 q - 2 q + q` under the root with `q = mean(r^2) / mean(|r|)^2`, which is `pi / 2` of a normal output and its
/// square of a product of two. The latter, 1.57, is the largest that a kernel here has.
const SPREAD: f64 = 1.57;

/// A mean below it is that of the few outputs that round to the other neighbour: 2^-12, a sixteenth of a rounding's own.
const RARE: f64 = 1.0 / 4096.0;

/// Two values that round to other neighbours, each 2^-7 of a value up to twice the mean.
const ROUNDED_APART: f64 = 2.0 * 2.0 / 128.0;

/// A factor that all outputs of a row share is rounded to bf16 toward minus infinity: an error even within 2^-7, whose mean
/// of 2^-8 is in the measured figures. A mean over rows is beyond it by at most another 2^-8, and by `SIGMAS / sqrt(3)` of
/// that over the root of their number.
fn shared_by_rows(rows: usize) -> f64 {
    let half = 1.0 / 256.0;
    half * (SIGMAS / (3.0 * rows.max(1) as f64).sqrt()).min(1.0)
}

/// Outputs whose errors are independent: the state of attention is one for the outputs of a head and row.
fn draws(kernel: &Kernel, count: usize) -> f64 {
    let together = if let Kernel::Attention { head_dim, .. } = kernel { *head_dim } else { 1 };
    (count as f64 / together as f64).max(1.0)
}

/// Limit of `mean_rel_l1` over `count` outputs: the registry's, or what four standard deviations above the worst figure of
/// hardware allow, if those are more.
pub(super) fn mean_rel_l1(kernel: &Kernel, gate: &Gate, count: usize) -> f64 {
    let limit = gate.mean_rel_l1_limit;
    let worst = gate.mean_rel_l1_measured.map_or(limit / MARGIN, |[_, worst]| worst);
    if worst < RARE {
        return limit + ROUNDED_APART / count.max(1) as f64;
    }
    let spread = worst * (1.0 + SIGMAS * SPREAD / draws(kernel, count).sqrt());
    let shared = match *kernel {
        Kernel::RmsNorm { rows, .. } | Kernel::QkNorm { rows, .. } | Kernel::LayerNorm { rows, .. } => {
            shared_by_rows(rows)
        }
        Kernel::SwigluRms { .. } => shared_by_rows(1),
        _ => 0.0,
    };
    limit.max(spread + shared)
}

/// Limit of the mean of `|error|` over what is expected over `count` outputs of unlike size, each of which has the registry's margin in it.
pub(super) fn mean_scaled(kernel: &Kernel, count: usize) -> f64 {
    ((1.0 + SIGMAS * SPREAD / draws(kernel, count).sqrt()) / MARGIN).max(1.0)
}
