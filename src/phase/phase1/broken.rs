//! Implementations that are wrong in the ways kernels are: every one must turn its case red.

use half::bf16;
use ndarray::Array2;

use super::answer;
use super::inputs::Inputs;
use crate::kernel::oracle::{self, Sample};
use crate::kernel::{Epsilon, Kernel};

/// What an implementation gives for a kernel's inputs.
pub(super) type Implementation = fn(&Kernel, &Inputs) -> Array2<f32>;

/// The broken implementations that differ from the right one at this shape, by name. A new kernel does not compile without
/// its own.
pub(super) fn broken(kernel: &Kernel) -> Vec<(&'static str, Implementation)> {
    let mut all: Vec<(&'static str, Implementation)> =
        vec![("unwritten tail", unwritten_tail), ("stale tail", stale_tail)];
    all.extend::<Vec<(&'static str, Implementation)>>(match *kernel {
        Kernel::Gemm { k, .. } | Kernel::Gemv { k, .. } => {
            let blocks = (k > BLOCK).then_some(("dropped last K block", dropped_last_block as Implementation));
            let narrow = (k >= 512).then_some(("bf16 accumulation", bf16_accumulation as Implementation));
            blocks.into_iter().chain(narrow).chain([("weight off by one row", shifted_weight as _)]).collect()
        }
        Kernel::GemmLow { .. } => {
            vec![("dropped last K block", dropped_last_block), ("weight off by one row", shifted_weight)]
        }
        Kernel::GemvAdd { .. } => {
            vec![
                ("dropped last K block", dropped_last_block),
                ("no residual", without_residual),
                ("residual off by one", shifted_residual),
            ]
        }
        Kernel::SwigluRms { .. } => vec![
            ("wrong eps", other_eps),
            ("no norm weight", without_weight),
            ("gate and up swapped", rows_swapped),
            ("gate and up in halves", rows_in_halves),
        ],
        Kernel::RmsNorm { .. } | Kernel::QkNorm { .. } => {
            vec![("wrong eps", other_eps), ("no weight", without_weight)]
        }
        Kernel::LayerNorm { .. } => vec![
            ("wrong eps", other_eps),
            ("no mean", without_mean),
            ("no shift", without_shift),
            ("scale and shift swapped", params_swapped),
        ],
        Kernel::Rope { .. } => vec![("neighbours paired", interleaved), ("turned the other way", turned_back)],
        Kernel::Attention { seq, heads, kv_heads, causal, .. } => {
            let modulo = (1 < kv_heads && kv_heads < heads).then_some(("GQA by modulo", by_modulo as Implementation));
            let mask = (causal && seq > 1).then_some(("mask off by one", mask_off_by_one as Implementation));
            let other = (seq > 1).then_some(("mask of the other kind", other_mask as Implementation));
            let dropped = (seq > KV_BLOCK).then_some(("dropped last KV block", dropped_last_kv as Implementation));
            modulo.into_iter().chain(mask).chain(other).chain(dropped).collect()
        }
        Kernel::Add { .. } | Kernel::BiasAdd { .. } => vec![("second off by one", shifted_second)],
        Kernel::SiluMul { .. } => vec![("gate and up swapped", swapped)],
        Kernel::GeluTanh { .. } => vec![("ReLU", relu), ("SiLU", silu)],
    });
    all
}

/// K that is dropped.
const BLOCK: usize = 32;

/// Positions that are dropped.
const KV_BLOCK: usize = 64;

pub(super) fn right(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    answer(kernel, inputs, &Sample::all(kernel)).unwrap().values
}

fn tail(kernel: &Kernel, inputs: &Inputs, fill: f32) -> Array2<f32> {
    let mut output = right(kernel, inputs);
    let (rows, cols) = output.dim();
    output.row_mut(rows - 1).iter_mut().skip(cols / 2).for_each(|x| *x = fill);
    output
}

fn unwritten_tail(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    tail(kernel, inputs, f32::NAN)
}

fn stale_tail(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    tail(kernel, inputs, 0.0)
}

fn other_eps(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let other = |eps: Epsilon| Epsilon::new(if eps == Epsilon::new(1e-6) { 1e-5 } else { 1e-6 });
    let kernel = match *kernel {
        Kernel::RmsNorm { rows, cols, eps } => Kernel::RmsNorm { rows, cols, eps: other(eps) },
        Kernel::QkNorm { rows, head_dim, eps } => Kernel::QkNorm { rows, head_dim, eps: other(eps) },
        Kernel::LayerNorm { rows, cols, eps } => Kernel::LayerNorm { rows, cols, eps: other(eps) },
        Kernel::SwigluRms { m, k, eps } => Kernel::SwigluRms { m, k, eps: other(eps) },
        _ => panic!("{kernel} has no eps"),
    };
    right(&kernel, inputs)
}

/// With one input changed.
fn with(kernel: &Kernel, inputs: &Inputs, index: usize, change: impl FnOnce(&mut Vec<bf16>)) -> Array2<f32> {
    let mut inputs = inputs.clone();
    change(&mut inputs[index]);
    right(kernel, &inputs)
}

/// The norm's weight is a row of its own, or the second of the packed ones.
fn without_weight(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    match kernel {
        Kernel::SwigluRms { k, .. } => with(kernel, inputs, 0, |packed| packed[*k..].fill(bf16::ONE)),
        _ => with(kernel, inputs, 1, |weight| weight.fill(bf16::ONE)),
    }
}

fn without_shift(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    with(kernel, inputs, 1, |params| {
        let cols = params.len() / 2;
        params[cols..].fill(bf16::ZERO);
    })
}

fn params_swapped(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    with(kernel, inputs, 1, |params| {
        let cols = params.len() / 2;
        params.rotate_left(cols);
    })
}

/// RMSNorm and a shift.
fn without_mean(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::LayerNorm { rows, cols, eps } = *kernel else { panic!("{kernel}") };
    let (scale, shift) = inputs[1].split_at(cols);
    let mut output = right(&Kernel::RmsNorm { rows, cols, eps }, &vec![inputs[0].clone(), scale.to_vec()]);
    output.outer_iter_mut().for_each(|row| row.into_iter().zip(shift).for_each(|(y, b)| *y += b.to_f32()));
    output
}

/// Pairs (2i, 2i + 1) instead of (i, i + half).
fn interleaved(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Rope { rows, head_dim } = *kernel else { panic!("{kernel}") };
    Array2::from_shape_fn((rows, head_dim), |(row, col)| {
        let x = &inputs[0][row * head_dim..][..head_dim];
        let lut = &inputs[1][row * head_dim..][..head_dim];
        let (i, (a, b)) = (col / 2, (x[col / 2 * 2].to_f32(), x[col / 2 * 2 + 1].to_f32()));
        let (cos, sin) = (lut[i].to_f32(), lut[i + head_dim / 2].to_f32());
        if col % 2 == 0 { a * cos - b * sin } else { a * sin + b * cos }
    })
}

fn turned_back(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Rope { head_dim, .. } = *kernel else { panic!("{kernel}") };
    with(kernel, inputs, 1, |lut| {
        lut.chunks_mut(head_dim).for_each(|row| row[head_dim / 2..].iter_mut().for_each(|sin| *sin = -*sin));
    })
}

/// Head h reads group h % kv_heads.
fn by_modulo(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Attention { seq, heads, kv_heads, head_dim, causal } = *kernel else { panic!("{kernel}") };
    let spread = |x: &Vec<bf16>| -> Vec<bf16> {
        let row = |row: &[bf16]| -> Vec<bf16> {
            (0..heads).flat_map(|h| row[h % kv_heads * head_dim..][..head_dim].to_vec()).collect()
        };
        x.chunks(kv_heads * head_dim).flat_map(row).collect()
    };
    let whole = Kernel::Attention { seq, heads, kv_heads: heads, head_dim, causal };
    right(&whole, &vec![inputs[0].clone(), spread(&inputs[1]), spread(&inputs[2])])
}

/// Row r sees position r + 1, too.
fn mask_off_by_one(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Attention { heads, head_dim, .. } = *kernel else { panic!("{kernel}") };
    let wide = heads * head_dim;
    let mut q = inputs[0].clone();
    q.copy_within(..inputs[0].len() - wide, wide);
    let later = right(kernel, &vec![q, inputs[1].clone(), inputs[2].clone()]);
    let mut output = right(kernel, inputs);
    for row in 0..output.nrows() - 1 {
        output.row_mut(row).assign(&later.row(row + 1));
    }
    output
}

/// Causal where it is not, and the other way round.
fn other_mask(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Attention { seq, heads, kv_heads, head_dim, causal } = *kernel else { panic!("{kernel}") };
    right(&Kernel::Attention { seq, heads, kv_heads, head_dim, causal: !causal }, inputs)
}

/// The values of the last block of positions are lost.
fn dropped_last_kv(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Attention { seq, kv_heads, head_dim, .. } = *kernel else { panic!("{kernel}") };
    let kept = seq - KV_BLOCK;
    with(kernel, inputs, 2, |v| v[kept * kv_heads * head_dim..].fill(bf16::ZERO))
}

/// Which argument holds the other operand of W, which W, and the depth.
fn depth(kernel: &Kernel) -> (usize, usize, usize) {
    match *kernel {
        Kernel::Gemm { k, .. } | Kernel::GemmLow { k, .. } => (0, 1, k),
        Kernel::Gemv { k, .. } | Kernel::GemvAdd { k, .. } => (1, 0, k),
        _ => panic!("{kernel}"),
    }
}

fn dropped_last_block(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let (a, _, k) = depth(kernel);
    with(kernel, inputs, a, |a| a.chunks_mut(k).for_each(|row| row[k - BLOCK..].fill(bf16::ZERO)))
}

fn shifted_weight(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let (_, w, k) = depth(kernel);
    with(kernel, inputs, w, |w| w.rotate_left(k))
}

fn bf16_accumulation(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let (a, w, k) = depth(kernel);
    let (rows, cols) = oracle::output_shape(kernel);
    Array2::from_shape_fn((rows, cols), |(row, col)| {
        let terms = inputs[a][row * k..][..k].iter().zip(&inputs[w][col * k..][..k]);
        terms.fold(bf16::ZERO, |sum, (a, w)| bf16::from_f32(sum.to_f32() + a.to_f32() * w.to_f32())).to_f32()
    })
}

fn without_residual(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    with(kernel, inputs, 2, |r| r.fill(bf16::ZERO))
}

fn shifted_residual(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    with(kernel, inputs, 2, |r| r.rotate_left(1))
}

fn rows_swapped(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::SwigluRms { k, .. } = *kernel else { panic!("{kernel}") };
    with(kernel, inputs, 1, |w| w.chunks_mut(2 * k).for_each(|pair| pair.rotate_left(k)))
}

/// The first half of the rows taken for gate, the second for up.
fn rows_in_halves(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::SwigluRms { m, k, .. } = *kernel else { panic!("{kernel}") };
    with(kernel, inputs, 1, |w| {
        *w = (0..m).flat_map(|i| [i, m + i]).flat_map(|row| w[row * k..][..k].to_vec()).collect();
    })
}

fn shifted_second(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    with(kernel, inputs, 1, |second| second.rotate_left(1))
}

fn swapped(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    right(kernel, &vec![inputs[1].clone(), inputs[0].clone()])
}

fn each(kernel: &Kernel, inputs: &Inputs, f: fn(f32) -> f32) -> Array2<f32> {
    let values = inputs[0].iter().map(|x| f(x.to_f32())).collect();
    Array2::from_shape_vec(oracle::output_shape(kernel), values).unwrap()
}

fn relu(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    each(kernel, inputs, |x| x.max(0.0))
}

fn silu(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    each(kernel, inputs, |x| x / (1.0 + (-x).exp()))
}
