//! The emulated device keeps its promises: NaN at birth, guards, argument checks, one call for many launches.

use std::sync::Arc;

use half::bf16;
use rstest::rstest;

use super::EmuDevice;
use crate::compute::{Isa, Pool};
use crate::device::{
    Arithmetic, BoundLaunch, BufferHandle, BufferSpec, Counters, Device, DispatchHandle, Layout, Role,
};
use crate::kernel::{ArgRole, Dtype, Epsilon, Kernel, Rows};
use crate::tensor;

fn device() -> EmuDevice {
    EmuDevice::new(Isa::detect(), Arc::new(Pool::new(2)), Arithmetic::Ieee)
}

fn spec(name: &str, rows: usize, cols: usize, layout: Layout) -> BufferSpec {
    BufferSpec { name: name.into(), dtype: Dtype::Bf16, rows, cols, role: Role::Intermediate, layout }
}

fn rows(device: &mut EmuDevice, name: &str, rows: usize, cols: usize, content: Option<&[f32]>) -> BufferHandle {
    let handle = device.create(spec(name, rows, cols, Layout::Rows)).unwrap();
    if let Some(content) = content {
        let content: Vec<bf16> = content.iter().map(|&x| bf16::from_f32(x)).collect();
        device.write(handle, 0, tensor::bytes_of(&content)).unwrap();
    }
    handle
}

fn read(device: &mut EmuDevice, handle: BufferHandle) -> Vec<f32> {
    let bytes = device.spec(handle).bytes();
    tensor::bf16_from_le_bytes(device.read(handle, 0, bytes).unwrap()).iter().map(|x| x.to_f32()).collect()
}

fn add(args: Vec<BufferHandle>) -> BoundLaunch {
    BoundLaunch { site: "test".into(), kernel: Kernel::Add { rows: 1, cols: 3 }, args }
}

#[test]
fn launches_of_one_dispatch_see_each_other_and_cost_one_call() {
    let mut d = device();
    let a = rows(&mut d, "a", 1, 3, Some(&[1.0, 2.0, 3.0]));
    let b = rows(&mut d, "b", 1, 3, None);
    let c = rows(&mut d, "c", 1, 3, None);
    let run = d.prepare("double twice", vec![add(vec![a, a, b]), add(vec![b, b, c])]).unwrap();
    d.run(run).unwrap();
    assert_eq!(read(&mut d, c), [4.0, 8.0, 12.0]);
    assert_eq!((d.counters().dispatches, d.counters().launches), (1, 2));
}

/// One product of two prompts, a sum each beside it, and a sum more of one only.
#[rstest]
fn dispatches_at_once_leave_the_bits_and_counters_of_one_after_the_other(#[values(1, 2, 3)] lanes: usize) {
    let run = |at_once: bool| {
        let mut d = device();
        let weight = d.create(spec("weight", 3, 3, Layout::LinearWeight)).unwrap();
        let content: Vec<bf16> = (1..=9).map(|x| bf16::from_f32(x as f32)).collect();
        d.write(weight, 0, tensor::bytes_of(&content)).unwrap();
        let (mut dispatches, mut outputs) = (vec![], vec![]);
        for lane in 0..lanes {
            let x = rows(&mut d, "x", 1, 3, Some(&[1.0, lane as f32, 0.5]));
            let (y, z) = (rows(&mut d, "y", 1, 3, None), rows(&mut d, "z", 1, 3, None));
            let gemv =
                BoundLaunch { site: "test".into(), kernel: Kernel::Gemv { m: 3, k: 3 }, args: vec![weight, x, y] };
            let sums = (0..=lane).map(|_| add(vec![x, y, z]));
            dispatches.push(d.prepare("product and sums", std::iter::once(gemv).chain(sums).collect()).unwrap());
            outputs.push(z);
        }
        if at_once {
            d.run_all(&dispatches).unwrap();
        } else {
            for dispatch in dispatches {
                d.run(dispatch).unwrap();
            }
        }
        (outputs.into_iter().map(|z| read(&mut d, z)).collect::<Vec<_>>(), d.counters())
    };
    assert_eq!(run(true), run(false));
}

/// Of every kind of launch: those that keep something in the device's scratch memory, too, and products by different weights.
#[rstest]
fn launches_of_every_kind_at_once_leave_the_bits_they_leave_alone(
    #[values(Arithmetic::Ieee, Arithmetic::Npu2)] arithmetic: Arithmetic,
) {
    let eps = Epsilon::new(1e-5);
    let kernels = [
        Kernel::SwigluRms { m: 16, k: 32, eps },
        Kernel::GemvAdd { m: 32, k: 64 },
        Kernel::Gemm { m: 4, k: 32, n: 48, out: Dtype::Bf16 },
        Kernel::GemmLow { m: 4, k: 64, n: 48 },
        Kernel::Gemv { m: 32, k: 64 },
        Kernel::RmsNorm { rows: 1, cols: 64, eps },
        Kernel::Attention { seq: 16, heads: 2, kv_heads: 1, head_dim: 32, causal: true },
    ];
    let run = |at_once: bool| {
        let mut d = EmuDevice::new(Isa::detect(), Arc::new(Pool::new(2)), arithmetic);
        let (mut dispatches, mut outputs) = (vec![], vec![]);
        let mut seed = 0u32;
        for lane in 0..3 {
            let mut launches = vec![];
            // Each lane begins with another kind.
            for kernel in kernels.iter().cycle().skip(lane).take(kernels.len()) {
                let args: Vec<BufferHandle> = kernel
                    .args()
                    .iter()
                    .map(|arg| {
                        let layout =
                            if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
                        let handle = d.create(spec(arg.name, arg.rows, arg.cols, layout)).unwrap();
                        let content: Vec<bf16> = (0..arg.rows * arg.cols)
                            .map(|_| {
                                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                                bf16::from_f32((seed >> 16) as f32 / 32768.0 - 1.0)
                            })
                            .collect();
                        d.write(handle, 0, tensor::bytes_of(&content)).unwrap();
                        handle
                    })
                    .collect();
                outputs.push(*args.last().unwrap());
                launches.push(BoundLaunch { site: "test".into(), kernel: kernel.clone(), args });
            }
            dispatches.push(d.prepare("all kinds", launches).unwrap());
        }
        if at_once {
            d.run_all(&dispatches).unwrap();
        } else {
            for dispatch in dispatches {
                d.run(dispatch).unwrap();
            }
        }
        (outputs.into_iter().map(|out| read(&mut d, out)).collect::<Vec<_>>(), d.counters())
    };
    let (together, alone) = (run(true), run(false));
    assert!(alone.0.iter().flatten().all(|x| x.is_finite()));
    assert_eq!(together, alone);
}

/// Runs one kernel on seeded arguments, in full or for some rows, into memory that holds NaN.
fn output(kernel: &Kernel, arithmetic: Arithmetic, cut: Option<Rows>) -> (Vec<f32>, Counters) {
    let mut d = EmuDevice::new(Isa::detect(), Arc::new(Pool::new(2)), arithmetic);
    let mut seed = 7u32;
    let mut args = vec![];
    for arg in kernel.args() {
        let layout = if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
        let handle = d.create(spec(arg.name, arg.rows, arg.cols, layout)).unwrap();
        if arg.role != ArgRole::Output {
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                bf16::from_f32((seed >> 16) as f32 / 32768.0 - 1.0)
            };
            let content: Vec<bf16> = (0..arg.rows * arg.cols).map(|_| next()).collect();
            d.write(handle, 0, tensor::bytes_of(&content)).unwrap();
        }
        args.push(handle);
    }
    let out = *args.last().unwrap();
    let run = d.prepare("x", vec![BoundLaunch { site: "test".into(), kernel: kernel.clone(), args }]).unwrap();
    match cut {
        Some(rows) => d.run_rows(run, rows).unwrap(),
        None => d.run(run).unwrap(),
    };
    let counters = d.counters();
    (read(&mut d, out), counters)
}

/// The rows asked for have the bits they have when all are computed; the others are not touched, where a kernel can be cut.
#[rstest]
fn rows_alone_are_those_of_all_and_the_others_stay_as_they_were(
    #[values(Arithmetic::Ieee, Arithmetic::Npu2)] arithmetic: Arithmetic,
    #[values((0, 24), (0, 1), (0, 17), (23, 1), (5, 12))] (first, count): (usize, usize),
) {
    let (of, eps) = (24, Epsilon::new(1e-5));
    let kernels = [
        Kernel::Gemm { m: of, k: 32, n: 40, out: Dtype::Bf16 },
        Kernel::GemmLow { m: of, k: 32, n: 40 },
        Kernel::RmsNorm { rows: of, cols: 32, eps },
        Kernel::QkNorm { rows: 3 * of, head_dim: 16, eps },
        Kernel::LayerNorm { rows: of, cols: 32, eps },
        Kernel::Rope { rows: 3 * of, head_dim: 16 },
        Kernel::Attention { seq: of, heads: 4, kv_heads: 2, head_dim: 16, causal: true },
        Kernel::Add { rows: of, cols: 32 },
        Kernel::BiasAdd { rows: of, cols: 32 },
        Kernel::SiluMul { rows: of, cols: 32 },
        Kernel::GeluTanh { rows: of, cols: 32 },
        // One vector, and queries that see the positions behind them: all or nothing.
        Kernel::Gemv { m: of, k: 32 },
        Kernel::Attention { seq: of, heads: 4, kv_heads: 2, head_dim: 16, causal: false },
    ];
    for kernel in kernels {
        let rows = Rows { first, count, of };
        let ((all, counted), (some, counted_of_some)) =
            (output(&kernel, arithmetic, None), output(&kernel, arithmetic, Some(rows)));
        assert!(all.iter().all(|x| x.is_finite()), "{kernel}");
        assert_eq!(counted, counted_of_some, "{kernel}");
        let cut = arithmetic == Arithmetic::Ieee && kernel.can_be_cut(rows);
        assert_eq!(
            cut,
            arithmetic == Arithmetic::Ieee
                && !matches!(kernel, Kernel::Gemv { .. } | Kernel::Attention { causal: false, .. })
        );
        let width = all.len() / of;
        for (row, (all, some)) in all.chunks(width).zip(some.chunks(width)).enumerate() {
            if !cut || (first..first + count).contains(&row) {
                assert_eq!(all, some, "{kernel}: row {row} of {rows:?}");
            } else {
                assert!(some.iter().all(|x| x.is_nan()), "{kernel}: row {row} of {rows:?}: {some:?}");
            }
        }
    }
}

#[test]
fn dispatches_that_meet_in_a_buffer_do_not_run_at_once() {
    let mut d = device();
    let [a, b, c] = ["a", "b", "c"].map(|name| rows(&mut d, name, 1, 3, Some(&[1.0; 3])));
    let first = d.prepare("first", vec![add(vec![a, a, b])]).unwrap();
    for (name, args) in [("reads", vec![a, b, c]), ("writes", vec![a, a, b])] {
        let second = d.prepare(name, vec![add(args)]).unwrap();
        for order in [[first, second], [second, first]] {
            let error = d.run_all(&order).unwrap_err().to_string();
            assert!(error.contains("b is written by") && error.contains("at the same time"), "{error}");
        }
    }
    assert!(d.run_all(&[first, first]).is_err());
    assert!(d.run_all(&[first, DispatchHandle(99)]).is_err());
    assert_eq!(d.counters().dispatches, 0);
    d.run_all(&[]).unwrap();
    d.run_all(&[first]).unwrap();
}

#[test]
fn what_nothing_wrote_is_nan_and_poison_brings_it_back() {
    let mut d = device();
    let a = rows(&mut d, "a", 1, 3, Some(&[1.0, 2.0, 3.0]));
    let stale = rows(&mut d, "stale", 1, 3, None);
    let c = rows(&mut d, "c", 1, 3, None);
    let run = d.prepare("add", vec![add(vec![a, stale, c])]).unwrap();
    d.run(run).unwrap();
    assert!(read(&mut d, c).iter().all(|x| x.is_nan()));
    d.poison(a).unwrap();
    assert!(read(&mut d, a).iter().all(|x| x.is_nan()));
}

#[test]
fn a_damaged_guard_fails_the_dispatch_by_name() {
    let mut d = device();
    let a = rows(&mut d, "a", 1, 3, Some(&[1.0; 3]));
    let c = rows(&mut d, "victim", 1, 3, None);
    let run = d.prepare("l03.mlp_add", vec![add(vec![a, a, c])]).unwrap();
    d.run(run).unwrap();
    // SAFETY: the byte behind the content is the buffer's own guard.
    unsafe { *d.memory(c).content().add(6) = 0 };
    let error = d.run(run).unwrap_err().to_string();
    assert_eq!(error, "device emu: l03.mlp_add: guard of victim overwritten at byte 6");
}

/// What launches keep between their steps lies between guards too.
#[test]
fn a_damaged_guard_of_the_scratch_memory_fails_the_dispatch() {
    let mut d = device();
    let kernel = Kernel::Attention { seq: 16, heads: 2, kv_heads: 1, head_dim: 32, causal: true };
    let args = kernel.args();
    let args = args.iter().map(|a| rows(&mut d, a.name, a.rows, a.cols, Some(&vec![1.0; a.rows * a.cols]))).collect();
    let run = d.prepare("l03.attention", vec![BoundLaunch { site: "test".into(), kernel, args }]).unwrap();
    d.run(run).unwrap();
    // SAFETY: the byte before the content is the memory's own guard.
    unsafe { *d.scratch.content().sub(1) = 0 };
    let error = d.run(run).unwrap_err().to_string();
    assert_eq!(error, "device emu: l03.attention: guard of the scratch memory overwritten at byte -1");
}

#[test]
fn a_weight_never_written_is_an_error_and_not_zeros() {
    let mut d = device();
    let w = d.create(spec("w", 2, 3, Layout::LinearWeight)).unwrap();
    let x = rows(&mut d, "x", 1, 3, Some(&[1.0, 2.0, 3.0]));
    let y = rows(&mut d, "y", 1, 2, None);
    let run = d
        .prepare(
            "q",
            vec![BoundLaunch { site: "test".into(), kernel: Kernel::Gemv { m: 2, k: 3 }, args: vec![w, x, y] }],
        )
        .unwrap();
    assert_eq!(d.run(run).unwrap_err().to_string(), "device emu: q: weight w was never written");
    let content: Vec<bf16> = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0].map(bf16::from_f32).into();
    d.write(w, 0, tensor::bytes_of(&content)).unwrap();
    d.run(run).unwrap();
    assert_eq!(read(&mut d, y), [1.0, 5.0]);
}

#[rstest]
#[case::too_few(Kernel::Add { rows: 1, cols: 3 }, 2, "found 2 arguments, expected 3")]
#[case::too_long(Kernel::Add { rows: 1, cols: 4 }, 3, "argument a")]
#[case::not_a_weight(Kernel::Gemv { m: 3, k: 1 }, 3, "argument w")]
#[case::own_input(Kernel::Attention { seq: 1, heads: 1, kv_heads: 1, head_dim: 3, causal: true }, 4, "writes its own input")]
fn arguments_that_do_not_fit_are_refused(#[case] kernel: Kernel, #[case] args: usize, #[case] message: &str) {
    let mut d = device();
    let a = rows(&mut d, "a", 1, 3, Some(&[1.0; 3]));
    let error =
        d.prepare("x", vec![BoundLaunch { site: "test".into(), kernel, args: vec![a; args] }]).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn reads_and_writes_beyond_a_buffer_are_errors() {
    let mut d = device();
    let a = rows(&mut d, "a", 1, 3, None);
    assert!(d.write(a, 4, &[0; 4]).is_err());
    assert!(d.write(a, usize::MAX, &[0; 4]).is_err());
    assert!(d.read(a, 0, 7).is_err());
    assert!(d.write(BufferHandle(99), 0, &[]).is_err());
}

/// Every instruction set this CPU has, any number of threads: the same bits from run to run.
#[rstest]
fn runs_repeat_bit_for_bit(#[values(1, 2, 3)] threads: usize) {
    let eps = Epsilon::new(1e-5);
    let content: Vec<f32> = (0..96 * 40).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0).collect();
    let weight: Vec<bf16> = (0..40 * 24).map(|i| bf16::from_f32(((i * 53 % 97) as f32 - 48.0) / 31.0)).collect();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        let run = |threads| {
            let mut d = EmuDevice::new(isa, Arc::new(Pool::new(threads)), Arithmetic::Ieee);
            let x = rows(&mut d, "x", 96, 40, Some(&content));
            let scale = rows(&mut d, "scale", 1, 40, Some(&content[..40]));
            let normed = rows(&mut d, "normed", 96, 40, None);
            let w = d.create(spec("w", 24, 40, Layout::LinearWeight)).unwrap();
            d.write(w, 0, tensor::bytes_of(&weight)).unwrap();
            let y = rows(&mut d, "y", 96, 24, None);
            let norm = BoundLaunch {
                site: "test".into(),
                kernel: Kernel::RmsNorm { rows: 96, cols: 40, eps },
                args: vec![x, scale, normed],
            };
            let kernel = Kernel::Gemm { m: 96, k: 40, n: 24, out: Dtype::Bf16 };
            let both = d
                .prepare("both", vec![norm, BoundLaunch { site: "test".into(), kernel, args: vec![normed, w, y] }])
                .unwrap();
            d.run(both).unwrap();
            read(&mut d, y)
        };
        let first = run(1);
        assert!(first.iter().all(|x| x.is_finite()));
        assert_eq!(first, run(threads), "{isa}");
    }
}
