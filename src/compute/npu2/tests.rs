//! Every kernel against its steps written out naively, on every instruction set and for any number of threads.

mod attention;
mod blocks;
mod call;
mod elementwise;
mod gemm;
mod norm;

use half::bf16;
use proptest::prelude::*;
use rstest::rstest;

use self::call::Call;
use super::unit::tests::{naive_exp2, naive_tanh};
use super::*;
use crate::compute::{
    self, Dst, Isa, PackedWeight, Pool, Src,
    testing::{THREADS, assert_close, bits, isas, noise},
};

fn call(pool: &Pool, isa: Isa) -> Call<'_> {
    Call(compute::Call { pool, isa })
}

/// Toward minus infinity, by search: the bf16 next below unless the nearest is already not above.
fn down(x: f64) -> f64 {
    let nearest = bf16::from_f64(x);
    if x.is_nan() || nearest.to_f64() <= x {
        return nearest.to_f64();
    }
    let bits = nearest.to_bits();
    let below = if nearest.to_f64() > 0.0 { bits - 1 } else { bits + 1 };
    bf16::from_bits(below).to_f64()
}

fn nearest(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

/// One block as its definition has it.
fn naive_block(block: &[f64]) -> Vec<f64> {
    let largest = block.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let step = (largest.max(2f64.powi(-114)).log2().floor() - 6.0).exp2();
    block.iter().map(|x| (x / step).round_ties_even().clamp(-128.0, 127.0) * step).collect()
}

fn naive_blocks(x: &[bf16], cols: usize) -> Vec<f64> {
    let rows = x.chunks(cols.max(1));
    rows.flat_map(|row| {
        let row: Vec<f64> = row.iter().map(|x| x.to_f64()).collect();
        row.chunks(BLOCK).flat_map(naive_block).collect::<Vec<_>>()
    })
    .collect()
}
