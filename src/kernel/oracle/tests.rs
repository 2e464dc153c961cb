//! The oracle against figures by hand.

use half::bf16;
use rstest::rstest;

use super::*;
use crate::kernel::{Dtype, Epsilon};

fn bf(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn values(kernel: &Kernel, inputs: &[&[f32]]) -> Vec<f32> {
    let inputs: Vec<Vec<bf16>> = inputs.iter().map(|x| bf(x)).collect();
    let inputs: Vec<&[bf16]> = inputs.iter().map(Vec::as_slice).collect();
    answer(kernel, &inputs, &Sample::all(kernel)).unwrap().values.into_raw_vec_and_offset().0
}

#[rstest]
#[case(Kernel::Gemm { m: 2, k: 2, n: 1, out: Dtype::F32 }, vec![vec![1.0, 2.0, 3.0, 4.0], vec![5.0, -1.0]], &[3.0, 11.0])]
#[case(Kernel::Gemv { m: 2, k: 2 }, vec![vec![1.0, 2.0, 3.0, 4.0], vec![5.0, -1.0]], &[3.0, 11.0])]
#[case(Kernel::RmsNorm { rows: 1, cols: 2, eps: Epsilon::new(0.0) }, vec![vec![3.0, 3.0], vec![1.0, 2.0]], &[1.0, 2.0])]
#[case(Kernel::RmsNorm { rows: 1, cols: 2, eps: Epsilon::new(7.0) }, vec![vec![3.0, 3.0], vec![4.0, 8.0]], &[3.0, 6.0])]
#[case(Kernel::Rope { rows: 1, head_dim: 4 }, vec![vec![1.0, 2.0, 3.0, 4.0], vec![0.0, 1.0, 1.0, 0.0]], &[-3.0, 2.0, 1.0, 4.0])]
#[case(Kernel::Add { rows: 1, cols: 2 }, vec![vec![1.0, 2.0], vec![0.5, -2.0]], &[1.5, 0.0])]
#[case(Kernel::BiasAdd { rows: 2, cols: 1 }, vec![vec![1.0, 2.0], vec![0.5]], &[1.5, 2.5])]
#[case(Kernel::SiluMul { rows: 1, cols: 2 }, vec![vec![0.0, 64.0], vec![3.0, 2.0]], &[0.0, 128.0])]
// Equal scores: the mean of what is seen. Heads 0 and 1 of the first group, 2 and 3 of the second.
#[case(
    Kernel::Attention { seq: 2, heads: 4, kv_heads: 2, head_dim: 1, causal: true },
    vec![vec![0.0; 8], vec![1.0; 4], vec![1.0, 10.0, 3.0, 30.0]],
    &[1.0, 1.0, 10.0, 10.0, 2.0, 2.0, 20.0, 20.0]
)]
#[case(
    Kernel::Attention { seq: 2, heads: 4, kv_heads: 2, head_dim: 1, causal: false },
    vec![vec![0.0; 8], vec![1.0; 4], vec![1.0, 10.0, 3.0, 30.0]],
    &[2.0, 2.0, 20.0, 20.0, 2.0, 2.0, 20.0, 20.0]
)]
#[case(Kernel::GemmLow { m: 2, k: 2, n: 1 }, vec![vec![1.0, 2.0, 3.0, 4.0], vec![5.0, -1.0]], &[3.0, 11.0])]
#[case(
    Kernel::GemvAdd { m: 2, k: 2 },
    vec![vec![1.0, 2.0, 3.0, 4.0], vec![5.0, -1.0], vec![0.5, -11.0]],
    &[3.5, 0.0]
)]
// h = (1, -1) * (2, 3); gates 64 and 0, ups 2 - 3 and 1.
#[case(
    Kernel::SwigluRms { m: 2, k: 2, eps: Epsilon::new(0.0) },
    vec![vec![5.0, -5.0, 2.0, 3.0], vec![32.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0]],
    &[-64.0, 0.0]
)]
// mean 3, variance 4.
#[case(
    Kernel::LayerNorm { rows: 1, cols: 2, eps: Epsilon::new(0.0) },
    vec![vec![1.0, 5.0], vec![2.0, 4.0, 10.0, 20.0]],
    &[8.0, 24.0]
)]
#[case(
    Kernel::LayerNorm { rows: 1, cols: 2, eps: Epsilon::new(12.0) },
    vec![vec![1.0, 5.0], vec![2.0, 4.0, 10.0, 20.0]],
    &[9.0, 22.0]
)]
#[case(Kernel::GeluTanh { rows: 1, cols: 3 }, vec![vec![0.0, 64.0, -64.0]], &[0.0, 64.0, 0.0])]
#[case(Kernel::GeluTanh { rows: 1, cols: 1 }, vec![vec![1.0]], &[0.841_192])]
fn by_hand(#[case] kernel: Kernel, #[case] inputs: Vec<Vec<f32>>, #[case] expected: &[f32]) {
    assert_eq!(values(&kernel, &inputs.iter().map(Vec::as_slice).collect::<Vec<_>>()), expected, "{kernel}");
}

#[test]
fn a_sample_is_a_part_of_the_whole() {
    let kernel = Kernel::Gemm { m: 5, k: 11, n: 7, out: Dtype::F32 };
    let a: Vec<f32> = (0..55).map(|i| (i * 37 % 23) as f32 - 11.0).collect();
    let w: Vec<f32> = (0..77).map(|i| (i * 29 % 19) as f32 - 9.0).collect();
    let whole = values(&kernel, &[&a, &w]);
    let sample = Sample { rows: vec![1, 4], cols: vec![0, 6] };
    let part = answer(&kernel, &[&bf(&a), &bf(&w)], &sample).unwrap();
    assert_eq!(part.values, ndarray::arr2(&[[whole[7], whole[13]], [whole[28], whole[34]]]));
    assert!(part.magnitude.iter().zip(&part.values).all(|(m, v)| *m >= v.abs()));
    assert!(part.shared.iter().all(|s| *s > 0.0));
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let kernel = Kernel::Add { rows: 1, cols: 2 };
    let error = answer(&kernel, &[&bf(&[1.0]), &bf(&[1.0, 2.0])], &Sample::all(&kernel)).unwrap_err().to_string();
    assert!(error.contains("oracle of add::r0001_c0002") && error.contains("[2, 2]"), "{error}");
}
