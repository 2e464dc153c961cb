//! The emulated arithmetic is hardware's, as far as hardware's published figures can tell.

use super::*;

#[test]
fn every_figure_is_hardwares_and_leans_its_way() {
    let rows = calibrate().unwrap();
    let wrong: Vec<_> = rows.iter().filter(|row| !(row.in_goal() && row.leans_right())).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A figure tells arithmetics apart: ieee misses every goal but GEMV's.
#[test]
fn another_arithmetic_is_found_out() {
    let mut ieee = Calibration { device: open_device("emu").unwrap() };
    let rows = [
        ieee.gemm("256x512x64", (256, 512, 64), Dtype::F32, 0.0093).unwrap(),
        ieee.rms_norm("64x512", (64, 512), 0.0042).unwrap(),
        ieee.rms_norm_decode("4x2048", (4, 2048), 0.069).unwrap(),
        ieee.layer_norm("64x512", (64, 512), 0.0044).unwrap(),
        ieee.gelu("65536", 1 << 16, 0.0084).unwrap(),
        ieee.low_tier("256x512x64", (256, 512, 64), 0.01).unwrap(),
        ieee.rope("512x64", (512, 64), 0.0028).unwrap(),
        ieee.add("64x512", (64, 512), 0.0019).unwrap(),
        ieee.silu_mul("64x512", (64, 512), 0.01).unwrap(),
        ieee.attention("256x64", (256, 2, 1, 64), true, 0.038).unwrap(),
    ];
    assert!(rows.iter().all(|row| !row.in_goal()), "{rows:#?}");
}

#[test]
fn goals_are_what_they_say() {
    let row = Row {
        kernel: "add",
        shape: "1",
        measured: 1.0,
        hardware: 2.0,
        bias: -0.5,
        gain: 0.0,
        max_abs: 0.0,
        compared: 1,
        goal: Goal::Ratio(0.5, 0.6),
        leaning: Leaning::Down,
    };
    assert!(row.in_goal() && row.leans_right());
    assert!(!Row { goal: Goal::Ratio(0.51, 2.0), ..row.clone() }.in_goal());
    assert!(!Row { goal: Goal::Below(1.0), ..row.clone() }.in_goal());
    assert!(!Row { measured: f64::NAN, ..row.clone() }.in_goal());
    assert!(!Row { leaning: Leaning::Larger, ..row.clone() }.leans_right());
    assert!(!Row { leaning: Leaning::None, ..row }.leans_right());
}
