//! There are enough cases, and the judge tells a broken kernel from a good one.

use half::bf16;
use rstest::rstest;

use super::*;
use crate::kernel::Epsilon;

type Broken = fn(&Kernel, &Inputs) -> Array2<f32>;

#[test]
fn over_three_hundred_cases() {
    let cases = cases(&Outline::all().unwrap()).unwrap();
    assert!(cases.len() > 300, "{}", cases.len());
}

/// What the judge has against an implementation, over both sets of inputs.
fn failures(kernel: &Kernel, implementation: Broken) -> Vec<String> {
    let gate = registry::gate(kernel).unwrap();
    let (sample, name) = (Sample::all(kernel), kernel.to_string());
    let mut failures = vec![];
    let mut unit = None;
    for set in [Set::Measured, Set::Wild] {
        let inputs = inputs::make(kernel, set, &gate, &name);
        let answer = answer(kernel, &inputs, &sample).unwrap();
        let unit =
            *unit.get_or_insert(answer.magnitude.iter().map(|&m| f64::from(m)).sum::<f64>() / sample.len() as f64);
        let measured = set == Set::Measured;
        let limits = if measured {
            Limits::measured(&gate, sample.len())
        } else {
            Limits { rtol: gate.rtol, mean_rel_l1: None, cosine: judge::WILD_COSINE_MIN }
        };
        // The laxer of the two where there are two.
        let target = if measured && !judge::near_zero(kernel, &gate).unwrap() {
            Target::fixed(kernel, &gate, &answer)
        } else {
            Target::scaled(kernel, &gate, &answer, unit)
        };
        let mut output = implementation(kernel, &inputs);
        if output_dtype(kernel) == Dtype::Bf16 {
            output.mapv_inplace(|x| bf16::from_f32(x).to_f32());
        }
        failures.extend(judge::unwritten(&output));
        failures.extend(judge::judge(output.view(), &target, &limits).unwrap());
        failures.extend(nulls::survivors(&target, &limits, &name).unwrap());
    }
    failures
}

fn right(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    answer(kernel, inputs, &Sample::all(kernel)).unwrap().values
}

fn unwritten_tail(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let mut output = right(kernel, inputs);
    let (rows, cols) = output.dim();
    output.row_mut(rows - 1).iter_mut().skip(cols / 2).for_each(|x| *x = f32::NAN);
    output
}

fn stale_tail(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let mut output = right(kernel, inputs);
    let (rows, cols) = output.dim();
    output.row_mut(rows - 1).iter_mut().skip(cols / 2).for_each(|x| *x = 0.0);
    output
}

fn other_eps(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let eps = Epsilon::new(1e-6);
    let other = match *kernel {
        Kernel::RmsNorm { rows, cols, .. } => Kernel::RmsNorm { rows, cols, eps },
        Kernel::QkNorm { rows, head_dim, .. } => Kernel::QkNorm { rows, head_dim, eps },
        ref other => other.clone(),
    };
    right(&other, inputs)
}

fn without_weight(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    right(kernel, &vec![inputs[0].clone(), vec![bf16::ONE; inputs[1].len()]])
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

/// Head h reads group h % kv_heads.
fn by_modulo(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let Kernel::Attention { seq, heads, kv_heads, head_dim } = *kernel else { panic!("{kernel}") };
    let spread = |x: &Vec<bf16>| -> Vec<bf16> {
        let row = |row: &[bf16]| -> Vec<bf16> {
            (0..heads).flat_map(|h| row[h % kv_heads * head_dim..][..head_dim].to_vec()).collect()
        };
        x.chunks(kv_heads * head_dim).flat_map(row).collect()
    };
    let whole = Kernel::Attention { seq, heads, kv_heads: heads, head_dim };
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

/// Which argument holds the other operand of W, and the depth.
fn depth(kernel: &Kernel) -> (usize, usize, usize) {
    match *kernel {
        Kernel::Gemm { k, .. } => (0, 1, k),
        Kernel::Gemv { k, .. } => (1, 0, k),
        _ => panic!("{kernel}"),
    }
}

fn dropped_last_block(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let (a, _, k) = depth(kernel);
    let mut inputs = inputs.clone();
    inputs[a].chunks_mut(k).for_each(|row| row[k - 32..].fill(bf16::ZERO));
    right(kernel, &inputs)
}

fn bf16_accumulation(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let (a, w, k) = depth(kernel);
    let (rows, cols) = oracle::output_shape(kernel);
    Array2::from_shape_fn((rows, cols), |(row, col)| {
        let terms = inputs[a][row * k..][..k].iter().zip(&inputs[w][col * k..][..k]);
        terms.fold(bf16::ZERO, |sum, (a, w)| bf16::from_f32(sum.to_f32() + a.to_f32() * w.to_f32())).to_f32()
    })
}

fn shifted_second(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    let mut inputs = inputs.clone();
    inputs[1].rotate_left(1);
    right(kernel, &inputs)
}

fn swapped(kernel: &Kernel, inputs: &Inputs) -> Array2<f32> {
    right(kernel, &vec![inputs[1].clone(), inputs[0].clone()])
}

fn gemm(out: Dtype) -> Kernel {
    Kernel::Gemm { m: 48, k: 512, n: 64, out }
}

const GEMV: Kernel = Kernel::Gemv { m: 257, k: 576 };
const ROPE: Kernel = Kernel::Rope { rows: 33, head_dim: 64 };
const ATTENTION: Kernel = Kernel::Attention { seq: 33, heads: 6, kv_heads: 2, head_dim: 64 };
const ADD: Kernel = Kernel::Add { rows: 17, cols: 100 };
const BIAS_ADD: Kernel = Kernel::BiasAdd { rows: 17, cols: 100 };
const SILU_MUL: Kernel = Kernel::SiluMul { rows: 17, cols: 100 };

fn rms_norm(rows: usize) -> Kernel {
    Kernel::RmsNorm { rows, cols: 576, eps: Epsilon::new(1e-5) }
}

fn qk_norm() -> Kernel {
    Kernel::QkNorm { rows: 18, head_dim: 64, eps: Epsilon::new(1e-5) }
}

#[rstest]
fn right_is_green_and_a_tail_not_written_red(
    #[values(
        gemm(Dtype::Bf16),
        gemm(Dtype::F32),
        GEMV,
        rms_norm(17),
        rms_norm(1),
        qk_norm(),
        ROPE,
        ATTENTION,
        ADD,
        BIAS_ADD,
        SILU_MUL
    )]
    kernel: Kernel,
) {
    assert_eq!(failures(&kernel, right), [""; 0], "{kernel}");
    assert!(failures(&kernel, unwritten_tail)[0].contains("not finite"), "{kernel}");
    assert!(!failures(&kernel, stale_tail).is_empty(), "{kernel}");
}

#[rstest]
#[case::dropped_last_k_block(gemm(Dtype::Bf16), dropped_last_block)]
#[case::dropped_last_k_block_f32(gemm(Dtype::F32), dropped_last_block)]
#[case::dropped_last_k_block_gemv(GEMV, dropped_last_block)]
#[case::bf16_accumulation(gemm(Dtype::Bf16), bf16_accumulation)]
#[case::bf16_accumulation_f32(gemm(Dtype::F32), bf16_accumulation)]
#[case::bf16_accumulation_gemv(GEMV, bf16_accumulation)]
#[case::wrong_eps(rms_norm(17), other_eps)]
#[case::wrong_eps_of_one_row(rms_norm(1), other_eps)]
#[case::wrong_eps_of_heads(qk_norm(), other_eps)]
#[case::no_weight(rms_norm(17), without_weight)]
#[case::no_weight_of_heads(qk_norm(), without_weight)]
#[case::interleaved(ROPE, interleaved)]
#[case::gqa_by_modulo(ATTENTION, by_modulo)]
#[case::mask_off_by_one(ATTENTION, mask_off_by_one)]
#[case::add_off_by_one(ADD, shifted_second)]
#[case::bias_off_by_one(BIAS_ADD, shifted_second)]
#[case::gate_and_up_swapped(SILU_MUL, swapped)]
fn broken_is_red(#[case] kernel: Kernel, #[case] broken: Broken) {
    assert!(!failures(&kernel, broken).is_empty(), "{kernel}");
}
