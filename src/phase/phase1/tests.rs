//! There are enough cases, and the judge tells a broken kernel and a broken device from a good one.

use std::collections::{BTreeMap, BTreeSet};

use half::bf16;
use rstest::rstest;

use super::broken::{Implementation, broken, right};
use super::*;
use crate::check::Outcome;
use crate::device::{BoundLaunch, BufferHandle, BufferSpec, Completed, Counters, DeviceInfo, DispatchHandle, POISON};
use crate::error::Error;
use crate::kernel::{Epsilon, facts};

/// Multiply-adds of a case that is broken in every way; larger ones are of the same kernels.
const SMALL: u64 = 1 << 18;

fn kernels() -> Vec<Kernel> {
    shapes::all(&Outline::all().unwrap()).unwrap()
}

#[test]
fn over_three_hundred_cases_and_every_kernel_of_the_registry() {
    let kernels = kernels();
    assert!(kernels.len() > 300, "{}", kernels.len());
    let found: BTreeSet<&str> = kernels.iter().map(registry::id_of).collect();
    let known: BTreeSet<&str> = facts::all().unwrap().iter().map(|f| f.id.as_str()).collect();
    assert_eq!(found, known);
    let names: BTreeSet<String> = kernels.iter().map(Kernel::to_string).collect();
    assert_eq!(names.len(), kernels.len());
}

#[test]
fn two_eps_of_one_shape_are_two_cases() {
    let kernels = kernels();
    for eps in [1e-5, 1e-6].map(Epsilon::new) {
        assert!(kernels.contains(&Kernel::RmsNorm { rows: 17, cols: 576, eps }), "{eps}");
        assert!(kernels.contains(&Kernel::QkNorm { rows: 9, head_dim: 64, eps }), "{eps}");
    }
}

#[test]
fn attention_has_its_lengths_head_maps_and_masks() {
    let kernels = kernels();
    for (heads, kv_heads) in [(6, 2), (14, 2), (28, 4), (8, 8)] {
        for causal in [true, false] {
            for seq in [1, 2, 15, 16, 17, 127, 128, 129, 257] {
                let kernel = Kernel::Attention { seq, heads, kv_heads, head_dim: 64, causal };
                assert!(kernels.contains(&kernel), "{kernel}");
            }
        }
    }
}

/// What the judge has against an implementation, over both sets of inputs.
fn failures(kernel: &Kernel, implementation: Implementation) -> Vec<String> {
    let gate = registry::gate(kernel).unwrap();
    let name = kernel.to_string();
    let mut failures = vec![];
    let mut unit = None;
    for set in [Set::Measured, Set::Wild] {
        let inputs = inputs::make(kernel, set, &gate, &name);
        let answer = answer(kernel, &inputs, &Sample::all(kernel)).unwrap();
        let unit = *unit.get_or_insert_with(|| Unit::of(&answer));
        let mut output = implementation(kernel, &inputs);
        if output_dtype(kernel) == Dtype::Bf16 {
            output.mapv_inplace(|x| bf16::from_f32(x).to_f32());
        }
        let mut judged = Judged { failures: judge::not_numbers(kernel, &output), ..Judged::default() };
        match set {
            Set::Measured => judged.measured(kernel, &gate, &output, &answer).unwrap(),
            Set::Wild => judged.wild(kernel, &gate, &output, &answer, unit).unwrap(),
        }
        failures.extend(judged.failures);
    }
    failures
}

/// Of every kernel, at every small shape: the right answer passes, and every broken implementation does not.
#[test]
fn broken_is_red_and_right_is_green() {
    // Attention beyond a KV block is never small.
    let long = |kernel: &Kernel| matches!(kernel, Kernel::Attention { seq: 129, heads: 6, head_dim: 64, .. });
    let small: Vec<Kernel> = kernels().into_iter().filter(|k| k.flops() / 2 <= SMALL || long(k)).collect();
    let mut tried: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut wrong = vec![];
    for kernel in &small {
        let found = failures(kernel, right);
        if !found.is_empty() {
            wrong.push(format!("{kernel}: the right answer: {found:?}"));
        }
        for (name, implementation) in broken(kernel) {
            tried.entry(kernel.id()).or_default().insert(name);
            if failures(kernel, implementation).is_empty() {
                wrong.push(format!("{kernel}: {name} passes"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // Every kernel is broken in some way of its own.
    let all: BTreeSet<&str> = kernels().iter().map(Kernel::id).collect();
    assert!(all.iter().all(|id| tried.get(id).is_some_and(|ways| ways.len() > 2)), "{tried:?}");
    assert!(tried["gemm_bf16"].contains("bf16 accumulation") && tried["attention"].contains("dropped last KV block"));
}

/// The command that an unmeasured shape's error names measures it.
#[test]
fn a_shape_that_is_no_case_is_one_on_demand() {
    let kernel = Kernel::Gemm { m: 6, k: 40, n: 24, out: Dtype::Bf16 };
    assert!(!kernels().contains(&kernel));
    let error = registry::lookup(&kernel, None).unwrap_err().to_string();
    let name = error.split("--test phase1 -- ").nth(1).unwrap().split('`').next().unwrap();
    let case = on_demand(name).unwrap();
    assert_eq!((case.name.as_str(), case.baseline), (kernel.to_string().as_str(), false));
    let crate::phase::Run::OnDevice(run) = &case.run else { panic!("{name} has no device") };
    let found = run("emu").unwrap();
    assert!(found.verdict.is_pass() && found.numbers.is_empty(), "{}", found.verdict);
    assert!(found.verdict.warnings()[0].starts_with("measured: mean_rel_l1 "), "{:?}", found.verdict.warnings());
    assert!(on_demand("gemm").is_none());
}

/// How a device misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The n-th read gives one other bit.
    Bit(usize),
    /// Runs nothing.
    Idle,
    /// The last output is a computed NaN.
    Nan,
    TimesOut,
    Guard,
}

/// The emulated device, and a fault.
struct Faulty {
    inner: Box<dyn Device>,
    fault: Fault,
    reads: usize,
    changed: Vec<u8>,
}

impl Device for Faulty {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn create(&mut self, spec: BufferSpec) -> Result<BufferHandle> {
        self.inner.create(spec)
    }

    fn spec(&self, buffer: BufferHandle) -> &BufferSpec {
        self.inner.spec(buffer)
    }

    fn write(&mut self, buffer: BufferHandle, offset: usize, content: &[u8]) -> Result<()> {
        self.inner.write(buffer, offset, content)
    }

    fn read(&mut self, buffer: BufferHandle, offset: usize, len: usize) -> Result<&[u8]> {
        self.reads += 1;
        self.changed = self.inner.read(buffer, offset, len)?.to_vec();
        match self.fault {
            Fault::Bit(at) if at == self.reads => self.changed[0] ^= 1,
            Fault::Nan => self.changed[len - 2..].copy_from_slice(&[0xc0, 0x7f]),
            _ => {}
        }
        Ok(&self.changed)
    }

    fn poison(&mut self, buffer: BufferHandle) -> Result<()> {
        self.inner.poison(buffer)
    }

    fn prepare(&mut self, name: &str, launches: Vec<BoundLaunch>) -> Result<DispatchHandle> {
        self.inner.prepare(name, launches)
    }

    fn run(&mut self, dispatch: DispatchHandle) -> Result<Completed> {
        let device = self.info().label.clone();
        match self.fault {
            Fault::Idle => Ok(Completed { elapsed_ns: 1 }),
            Fault::TimesOut => {
                Err(Error::Incomplete { device, dispatch: "add".into(), state: "timeout".into(), elapsed_us: 1 })
            }
            Fault::Guard => Err(Error::Device { device, why: "guard of y overwritten at byte 64".into() }),
            _ => self.inner.run(dispatch),
        }
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

const ADD: Kernel = Kernel::Add { rows: 3, cols: 16 };

fn on(fault: Fault) -> Result<Finding> {
    let inner = open_device("emu").unwrap();
    judge_on(&ADD, Box::new(Faulty { inner, fault, reads: 0, changed: vec![] }))
}

#[rstest]
#[case(Fault::Bit(1), "NONDETERMINISTIC: warm [0, 0]")]
#[case(Fault::Bit(2), "NONDETERMINISTIC: warm [0, 0]")]
#[case(Fault::Bit(3), "NONDETERMINISTIC: after another kernel [0, 0]")]
#[case(Fault::Idle, "48 of 48 outputs were never written, the first at [0, 0]")]
#[case(Fault::Nan, "1 of 48 outputs are NaN or infinite, the first at [2, 15]")]
fn a_faulty_device_fails(#[case] fault: Fault, #[case] why: &str) {
    let verdict = on(fault).unwrap().verdict;
    assert_eq!(verdict.outcome(), Outcome::Fail, "{verdict}");
    assert!(verdict.to_string().contains(why), "{verdict}");
}

#[test]
fn what_did_not_complete_has_no_finding() {
    assert!(matches!(on(Fault::TimesOut), Err(Error::Incomplete { .. })));
    assert!(on(Fault::Guard).unwrap_err().to_string().contains("guard of y"));
    assert!(on(Fault::None).unwrap().verdict.is_pass());
}

/// NaN comes before what was not written, and that before the elements.
#[test]
fn checks_come_in_their_order() {
    let poison = bf16::from_le_bytes(POISON).to_f32();
    let output = Array2::from_shape_fn((3, 16), |(row, col)| match (row, col) {
        (0, 0) => poison,
        (2, 1) => f32::INFINITY,
        _ => 1.0,
    });
    let found = judge::not_numbers(&ADD, &output);
    assert!(found[0].contains("1 of 48 outputs are NaN or infinite, the first at [2, 1]: inf"), "{found:?}");
    assert!(found[1].contains("1 of 48 outputs were never written, the first at [0, 0]"), "{found:?}");
    let values = Array2::<f32>::ones((3, 16));
    let target = Target { atol: values.mapv(|_| 0.01), values: values.clone(), expected: Some(values.mapv(|_| 0.01)) };
    let limits = Limits { rtol: 0.01, mean_rel_l1: Some(0.01), mean_scaled: 1.0 };
    let mut output = values.mapv(|_| 1.5);
    output[[0, 0]] = 1.0;
    let found = judge::judge(output.view(), &target, &limits).unwrap();
    let starts = ["elements: 47 of 48", "mean_rel_l1 4.896e-1 > 1.000e-2", "mean error 48.958 of the expected > 1.000"];
    assert_eq!(found.len(), starts.len());
    assert!(found.iter().zip(starts).all(|(why, start)| why.starts_with(start)), "{found:?}");
    assert!(found[0].contains("the first at [0, 1]: 1.5, reference 1, limit 2.000e-2"), "{found:?}");
    assert!(found[2].ends_with("(max_abs 5.000e-1, bias 4.896e-1)"), "{found:?}");
}

/// Where upstream's atol is known to mis-fire, a handful of elements beyond it is a warning that names the facts' list, and
/// a wrong kernel still fails.
#[test]
fn gate_false_failures_are_named() {
    let kernel = Kernel::Gemm { m: 17, k: 512, n: 96, out: Dtype::Bf16 };
    let gate = registry::gate(&kernel).unwrap();
    let inputs = inputs::make(&kernel, Set::Measured, &gate, "x");
    let answer = answer(&kernel, &inputs, &Sample::all(&kernel)).unwrap();
    let mut output = answer.values.mapv(|x| bf16::from_f32(x).to_f32());
    let near_zero = output.iter_mut().min_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
    *near_zero += 0.0018;
    let mut judged = Judged::default();
    judged.measured(&kernel, &gate, &output, &answer).unwrap();
    assert_eq!(judged.failures, [""; 0]);
    assert!(judged.warnings[0].starts_with("gate_false_failures: elements: 1 of 1632"), "{:?}", judged.warnings);
    let mut judged = Judged::default();
    judged.measured(&kernel, &gate, &(output * 1.02), &answer).unwrap();
    assert!(judged.failures[0].contains("mean_rel_l1"), "{:?}", judged.failures);
}

/// What the wider limits of few outputs still refuse: twice the worst error of hardware, at the smallest shape there is.
#[rstest]
#[case(Kernel::Rope { rows: 1, head_dim: 32 })]
#[case(Kernel::Add { rows: 3, cols: 16 })]
#[case(Kernel::SiluMul { rows: 3, cols: 16 })]
#[case(Kernel::Gemm { m: 3, k: 33, n: 65, out: Dtype::F32 })]
#[case(Kernel::Gemv { m: 17, k: 8 })]
fn limits_of_few_outputs(#[case] kernel: Kernel) {
    let gate = registry::gate(&kernel).unwrap();
    let count = Sample::all(&kernel).len();
    let few = limits::mean_rel_l1(&kernel, &gate, count);
    assert!(
        few >= gate.mean_rel_l1_limit && limits::mean_rel_l1(&kernel, &gate, 1 << 20) <= gate.mean_rel_l1_limit * 1.01
    );
    // A twentieth off is off, wherever.
    let inputs = inputs::make(&kernel, Set::Measured, &gate, "x");
    let answer = answer(&kernel, &inputs, &Sample::all(&kernel)).unwrap();
    let mut judged = Judged::default();
    judged.measured(&kernel, &gate, &(&answer.values * 1.05), &answer).unwrap();
    assert!(!judged.failures.is_empty(), "{kernel}: {few}");
}

#[test]
fn the_share_of_a_sampled_case_is_in_its_extent() {
    let kernel = Kernel::Gemm { m: 512, k: 512, n: 512, out: Dtype::F32 };
    let samples = sample::samples(&kernel, &mut Random::of("x"));
    let extent = extent(&kernel, &samples);
    let share = extent.compared("percent of all outputs");
    assert!((10..60).contains(&share), "{extent}");
    assert_eq!(extent.compared("outputs in all"), 2 * 512 * 512);
    assert!(extent.shortfalls().is_empty());
}
