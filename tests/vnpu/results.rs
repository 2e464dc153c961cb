//! Right results through the real XRT: bit for bit emu's, from many threads, with no more uploaded than inputs, and what
//! our layer costs a dispatch.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use phasegate::device::lock::LockOptions;
use phasegate::device::npu::handles::{Bo, Context, Device as XrtDevice, ElfImage, Kernel as XrtKernel};
use phasegate::device::npu::run::{Ended, Run};
use phasegate::device::npu::{Label, NpuDevice};
use phasegate::device::{BoundLaunch, BufferHandle, BufferSpec, Device, DispatchHandle, Layout, Role};
use phasegate::kernel::cache::KernelCache;
use phasegate::kernel::{ArgRole, Dtype, Kernel};
use phasegate::phase::devices::open_device;
use phasegate::phase::optimise::{Contender, Half, Optimisation, Setting};
use phasegate::phase::{Outline, Subject, contracts, phase1};
use phasegate::plan::{Op, PlanOptions};
use phasegate::runner::{Record, Runner, RunnerOptions, TapRequest};

use super::{Named, child};

/// The cases share this process's virtual NPU, its 16 contexts and the clock: one at a time.
fn alone(case: impl FnOnce() -> Result<(), Failed>) -> Result<(), Failed> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    case()
}

pub fn cases() -> Vec<Named> {
    vec![
        ("tiny_llama_is_emu_bit_for_bit", || alone(|| same_as_emu("tiny_llama", &["base_00", "instruct_00"]))),
        ("tiny_qwen2_is_emu_bit_for_bit", || alone(|| same_as_emu("tiny_qwen2", &["base_00"]))),
        ("tiny_qwen3_is_emu_bit_for_bit", || alone(|| same_as_emu("tiny_qwen3", &["base_00"]))),
        ("kernels_are_emu_bit_for_bit", || alone(kernels_are_emu_bit_for_bit)),
        ("each_optimisation_saves_what_it_is_for", || alone(each_optimisation_saves_what_it_is_for)),
        ("decode_uploads_its_inputs_only", || alone(decode_uploads_its_inputs_only)),
        ("eight_threads_of_500_runs", || alone(eight_threads_of_500_runs)),
        ("devices_come_and_go", || alone(devices_come_and_go)),
        ("what_our_layer_costs", || alone(what_our_layer_costs)),
    ]
}

/// The model that is fetched, for a list of its own: it may not be here.
pub const FETCHED: &str = "smollm2_135m";

pub fn cases_of_fetched() -> Vec<Named> {
    vec![("smollm2_135m_is_emu_bit_for_bit", || alone(|| same_as_emu(FETCHED, &["base_00", "instruct_00"])))]
}

/// Every kernel and shape of phase 1, on one set of its inputs.
fn kernels_are_emu_bit_for_bit() -> Result<(), Failed> {
    let mut compared = 0;
    for kernel in phase1::kernels(&Outline::all()?)? {
        let [emu, vnpu] = ["emu", "vnpu"].map(|device| phase1::output_on(&kernel, open_device(device)?));
        let (emu, vnpu) = (emu?, vnpu?);
        if emu.len() != vnpu.len() || emu.iter().zip(&vnpu).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err(format!("{kernel}: another output than emu's").into());
        }
        compared += emu.len();
    }
    eprintln!("kernels_are_emu_bit_for_bit: {compared} outputs");
    if compared > 1000 { Ok(()) } else { Err(format!("{compared} values compared").into()) }
}

/// The counters of phases 4 and 5 on a device that really sends: the unoptimised plan sends everything at every call.
fn each_optimisation_saves_what_it_is_for() -> Result<(), Failed> {
    for half in [Half::Prefill, Half::Decode] {
        let setting = Setting::of("tiny_llama", "vnpu", half)?;
        let cost = |tuning| Contender::new(&setting, tuning, None)?.cost();
        for step in Optimisation::ALL.into_iter().filter(|step| *step != Optimisation::LayoutAlignment) {
            let (before, after) = (cost(step.ladder())?, cost(step.apply(step.ladder()))?);
            eprintln!("{half:?} {}: {before} before, {after} after", step.name());
            if let Some(broken) = step.broken_promise(&before, &after) {
                return Err(format!("{half:?}: {broken}").into());
            }
        }
    }
    Ok(())
}

/// Logits of every step and every tap, compared by their bits.
fn same_as_emu(model: &str, prompts: &[&str]) -> Result<(), Failed> {
    let subject = Subject::shared(model)?;
    let mut compared = 0;
    for prompt in prompts {
        let [emu, vnpu] = ["emu", "vnpu"].map(|device| record(&subject, device, prompt));
        let (emu, vnpu) = (emu?, vnpu?);
        if vnpu.device != "vnpu" {
            return Err(format!("the record says it is of {}", vnpu.device).into());
        }
        let bits = |record: &Record| record.logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        if bits(&emu) != bits(&vnpu) {
            return Err(format!("{prompt}: other logits than emu's").into());
        }
        for (name, rows) in &emu.taps {
            let other = vnpu.taps.get(name).ok_or_else(|| format!("{prompt}: no tap {name}"))?;
            if rows.iter().zip(other).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(format!("{prompt}: tap {name} is not emu's").into());
            }
            compared += rows.len();
        }
        compared += emu.logits.len();
    }
    if compared > 1000 { Ok(()) } else { Err(format!("{compared} values compared").into()) }
}

fn record(subject: &Subject, device: &str, prompt: &str) -> phasegate::error::Result<Record> {
    let captured = subject.capture()?.prompt(prompt)?;
    let max = subject.config.max_position_embeddings;
    let options = RunnerOptions::for_prompts([captured.ids.len()], Subject::STEPS, max);
    let last = captured.ids.len() - 1;
    let taps = TapRequest {
        layer_positions: vec![0, last],
        tap_positions: vec![0, last],
        kv_positions: vec![0, last, last + 1],
    };
    subject.runner(device, &options)?.record(&captured.ids, &captured.chosen, Subject::STEPS, &taps)
}

/// One decode step sends the buffers that host ops write, and nothing else; no weight goes up again.
fn decode_uploads_its_inputs_only() -> Result<(), Failed> {
    let subject = Subject::shared("tiny_llama")?;
    let options = RunnerOptions::for_prompts([4], 8, subject.config.max_position_embeddings);
    let plan = phasegate::plan::decode(&subject.config, &PlanOptions::default())?;
    let written =
        plan.steps.iter().filter_map(|step| if let Op::Host(op) = &step.op { Some(op.writes()) } else { None });
    let expected: usize = written.flatten().map(|id| plan.buffer(id).spec.bytes()).sum();
    let mut runner = subject.runner("vnpu", &options)?;
    runner.prefill(&[1, 2, 3, 4])?;
    for position in 4..8 {
        let before = runner.counters();
        runner.decode_step(5, position)?;
        let step = runner.counters().since(before);
        let found = (step.bytes_written, step.static_uploads, step.buffers_created);
        if found != (expected as u64, 0, 0) {
            return Err(format!("position {position}: found {found:?}, expected {expected} bytes and no more").into());
        }
    }
    eprintln!("decode_uploads_its_inputs_only: {expected} bytes a token");
    Ok(())
}

const ROWS: usize = 3;
const COLS: usize = 16;

/// `add` on a device of its own.
struct Adder {
    device: NpuDevice,
    args: Vec<BufferHandle>,
    dispatch: DispatchHandle,
}

impl Adder {
    fn new(cache: Arc<KernelCache>) -> phasegate::error::Result<Adder> {
        let mut device = NpuDevice::open(Label::Vnpu, cache, Duration::from_secs(30), &LockOptions::default())?;
        let mut args = vec![];
        for (name, role) in [("a", Role::Input), ("b", Role::Input), ("y", Role::Output)] {
            let (name, dtype, layout) = (name.to_owned(), Dtype::Bf16, Layout::Rows);
            args.push(device.create(BufferSpec { name, dtype, rows: ROWS, cols: COLS, role, layout })?);
        }
        let kernel = Kernel::Add { rows: ROWS, cols: COLS };
        let dispatch = device.prepare("sum", vec![BoundLaunch { site: "sum".into(), kernel, args: args.clone() }])?;
        Ok(Adder { device, args, dispatch })
    }

    fn add(&mut self, a: f32, b: f32) -> phasegate::error::Result<bool> {
        let all = |x: f32| [half::bf16::from_f32(x).to_le_bytes(); ROWS * COLS].concat();
        self.device.write(self.args[0], 0, &all(a))?;
        self.device.write(self.args[1], 0, &all(b))?;
        self.device.poison(self.args[2])?;
        self.device.run(self.dispatch)?;
        Ok(self.device.read(self.args[2], 0, 2 * ROWS * COLS)? == all(a + b))
    }
}

fn cache() -> Result<Arc<KernelCache>, Failed> {
    Ok(Arc::new(KernelCache::open(&child::kernels()?, false)?))
}

fn eight_threads_of_500_runs() -> Result<(), Failed> {
    let cache = cache()?;
    let runs = |thread: usize| -> phasegate::error::Result<usize> {
        let mut adder = Adder::new(cache.clone())?;
        let mut right = 0;
        for i in 0..500 {
            // Small whole numbers: their sums are exact.
            right += usize::from(adder.add(thread as f32, (i % 100) as f32)?);
        }
        Ok(right)
    };
    let right: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || runs(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for (thread, right) in right.into_iter().enumerate() {
        let right = right?;
        if right != 500 {
            return Err(format!("thread {thread}: {right} of 500 results are right").into());
        }
    }
    Ok(())
}

/// Devices of several threads are opened, fill up with contexts and are dropped, of which there are too few for all.
fn devices_come_and_go() -> Result<(), Failed> {
    let kernels = phase1::kernels(&Outline::all()?)?;
    let bytes = |kernel: &Kernel| kernel.args().iter().map(|arg| arg.rows * arg.cols * 4).sum::<usize>();
    let small: Vec<&Kernel> = kernels.iter().filter(|kernel| bytes(kernel) < 1 << 16).take(12).collect();
    let cache = cache()?;
    let fill = || -> phasegate::error::Result<u64> {
        let mut device = NpuDevice::open(Label::Vnpu, cache.clone(), Duration::from_secs(30), &LockOptions::default())?;
        for kernel in &small {
            let mut args = vec![];
            for arg in kernel.args() {
                let layout = if arg.role == ArgRole::LinearWeight { Layout::LinearWeight } else { Layout::Rows };
                let (name, role) = (arg.name.to_owned(), Role::Input);
                let spec = BufferSpec { name, dtype: arg.dtype, rows: arg.rows, cols: arg.cols, role, layout };
                let zeros = vec![0; spec.bytes()];
                let buffer = device.create(spec)?;
                device.write(buffer, 0, &zeros)?;
                args.push(buffer);
            }
            let kernel = (*kernel).clone();
            let launch = BoundLaunch { site: kernel.to_string(), kernel, args };
            let dispatch = device.prepare("alone", vec![launch])?;
            device.run(dispatch)?;
        }
        Ok(device.counters().dispatches)
    };
    let rounds = || (0..25).map(|_| fill()).sum::<phasegate::error::Result<u64>>();
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(rounds)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let done = done.into_iter().sum::<phasegate::error::Result<u64>>()?;
    if done == 4 * 25 * 12 { Ok(()) } else { Err(format!("{done} dispatches").into()) }
}

/// Median microseconds of one dispatch, through [`Device::run`] and through the bare handles, in turn.
fn what_our_layer_costs() -> Result<(), Failed> {
    let cache = cache()?;
    let mut adder = Adder::new(cache.clone())?;
    let elf = cache.elf(&contracts::of_kernel(Kernel::Add { rows: ROWS, cols: COLS })?)?;
    let device = XrtDevice::open(0)?;
    let context = Context::new(&device, &ElfImage::from_bytes(&elf.bytes)?)?;
    let kernel = XrtKernel::of_elf(&context, &elf.kernel)?;
    let buffers = (0..3).map(|_| Bo::new(&device, 96)).collect::<Result<Vec<_>, _>>()?;
    let mut bare = Run::new(&kernel, 3)?;
    for (argument, buffer) in buffers.iter().enumerate() {
        bare.set(argument, buffer)?;
    }
    let (mut ours, mut theirs) = (vec![], vec![]);
    for _ in 0..2000 {
        let began = Instant::now();
        adder.device.run(adder.dispatch)?;
        ours.push(began.elapsed());
        let began = Instant::now();
        bare = match bare.start().map_err(|(_, why)| why)?.wait(Duration::from_secs(30)) {
            Ended::Completed(run, _) => run,
            other => return Err(format!("{other:?}").into()),
        };
        theirs.push(began.elapsed());
    }
    ours.sort();
    theirs.sort();
    let median = |times: &[Duration]| times[times.len() / 2].as_secs_f64() * 1e6;
    let (ours, theirs) = (median(&ours), median(&theirs));
    eprintln!("what_our_layer_costs: {ours:.1} us a dispatch, {theirs:.1} us on bare handles: {:.1} us", ours - theirs);
    // Far above what it takes, far below what a dispatch on silicon does.
    if ours - theirs < 100.0 { Ok(()) } else { Err(format!("{:.1} us a dispatch", ours - theirs).into()) }
}
