//! What may be done wrong with a device, a run or an ELF, each in a child: a typed error or no way to write it down.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Failed;
use phasegate::device::lock::LockOptions;
use phasegate::device::npu::handles::{Bo, Context, Device as XrtDevice, ElfImage, Kernel as XrtKernel};
use phasegate::device::npu::run::{Ended, Run};
use phasegate::device::npu::{Label, NpuDevice};
use phasegate::device::{BoundLaunch, BufferSpec, Device, Layout, Role};
use phasegate::kernel::cache::{self, KernelCache, ShapeTable};
use phasegate::kernel::contract::Contract;
use phasegate::kernel::{Dtype, Kernel};
use phasegate::phase::contracts;

use super::{Named, child};

type Act = Result<String, Box<dyn std::error::Error>>;

pub fn cases() -> Vec<Named> {
    vec![
        ("a_run_dropped_in_flight_does_not_abort", || {
            child::of_this("drop", &[], "hang")?.expect(0, "dropped and alive")
        }),
        ("a_run_with_an_unset_argument_is_not_started", || {
            child::of_this("unset", &[], "")?.expect(0, "argument 2 is not set")
        }),
        ("an_argument_too_many_is_an_error", || child::of_this("range", &[], "")?.expect(0, "range")),
        ("a_kernel_of_an_elf_has_no_group", || child::of_this("group", &[], "")?.expect(0, "has no memory groups")),
        ("a_slow_run_is_waited_for", || child::of_this("wait", &["5000"], "slow=300")?.expect(0, "completed")),
        ("an_expired_wait_is_no_result", || child::of_this("wait", &["100"], "slow=1500")?.expect(0, "hung")),
        ("nothing_after_a_time_out_counts", || {
            child::of_this("taint", &[], "timeout")?.expect(0, "nothing after a time-out counts; start a new process")
        }),
        ("nothing_after_a_hang_counts", || {
            child::of_this("taint", &[], "hang")?.expect(0, "nothing after a time-out counts; start a new process")
        }),
        ("an_error_costs_one_run_only", || child::of_this("recover", &[], "error")?.expect(0, "ERT_CMD_STATE_ERROR")),
        ("npu_is_never_virtual", || {
            child::of_phasegate(&["verify", "tiny_llama", "--device", "npu"], "")?.expect(3, "whose label is vnpu")
        }),
        ("elf_with_other_arguments", || elf(other_arguments, "has 2 arguments, the contract of add::r0003_c0016 3")),
        ("elf_of_another_kernel", || elf(other_kernel, "no kernel add in it, only")),
        ("elf_for_another_platform", || elf(other_platform, "platform")),
        ("elf_that_is_none", || elf(no_elf, "not valid ELF data")),
        ("elf_cut_short", || elf(cut_short, "")),
        ("changed_elf", changed_elf),
        ("unsealed_elf", unsealed_elf),
        ("kernel_without_elf", || child::of_this("missing", &[], "")?.expect(1, "ELF of add::r0003_c0017")),
    ]
}

/// What a child does.
pub fn act(name: &str, words: &[String]) -> Act {
    match name {
        "drop" => drop_in_flight(),
        "unset" => match run_of_add(2)?.run.start() {
            Err((_, why)) => Ok(why),
            Ok(_) => Err("started".into()),
        },
        "range" => {
            let mut rig = run_of_add(3)?;
            let failure = rig.run.set(99, &rig.buffers[0]).err().ok_or("set argument 99")?;
            Ok(failure.to_string())
        }
        "group" => {
            let failure = run_of_add(0)?.kernel.group_id(0).err().ok_or("a group")?;
            Ok(failure.to_string())
        }
        "wait" => waited(words.first().ok_or("no limit")?.parse()?),
        "taint" => taint(),
        "recover" => recover(),
        "missing" => add_on(&child::kernels().map_err(text)?, 17).map(|_| "added".into()),
        "add" => add_on(Path::new(words.first().ok_or("no folder")?), 16).map(|_| "added".into()),
        other => Err(format!("no act {other}").into()),
    }
}

fn text(failed: Failed) -> String {
    failed.message().unwrap_or("failed").to_owned()
}

fn add(cols: usize) -> Kernel {
    Kernel::Add { rows: 3, cols }
}

/// A run of `add` on objects of its own.
struct Rig {
    run: Run,
    kernel: XrtKernel,
    buffers: Vec<Bo>,
    _context: Context,
    _device: XrtDevice,
}

/// With the first `set` of its three arguments set.
fn run_of_add(set: usize) -> Result<Rig, Box<dyn std::error::Error>> {
    let cache = KernelCache::open(&child::kernels().map_err(text)?, false)?;
    let elf = cache.elf(&contracts::of_kernel(add(16))?)?;
    let device = XrtDevice::open(0)?;
    let context = Context::new(&device, &ElfImage::from_bytes(&elf.bytes)?)?;
    let kernel = XrtKernel::of_elf(&context, &elf.kernel)?;
    let mut run = Run::new(&kernel, 3)?;
    let buffers = (0..3).map(|_| Bo::new(&device, 96)).collect::<Result<Vec<_>, _>>()?;
    for (argument, buffer) in buffers.iter().enumerate().take(set) {
        run.set(argument, buffer)?;
    }
    Ok(Rig { run, kernel, buffers, _context: context, _device: device })
}

fn drop_in_flight() -> Act {
    let Rig { run, kernel, buffers, _context, _device } = run_of_add(3)?;
    let in_flight = run.start().map_err(|(_, why)| why)?;
    drop(in_flight);
    // As the device does: what a run that never ends uses is kept.
    std::mem::forget((kernel, buffers, _context, _device));
    Ok("dropped and alive".into())
}

fn waited(milliseconds: u64) -> Act {
    let Rig { run, kernel, buffers, _context, _device } = run_of_add(3)?;
    match run.start().map_err(|(_, why)| why)?.wait(Duration::from_millis(milliseconds)) {
        Ended::Completed(..) => Ok("completed".into()),
        Ended::Failed { state, .. } => Ok(format!("failed: {state}")),
        Ended::Hung { state, .. } => {
            std::mem::forget((kernel, buffers, _context, _device));
            Ok(format!("hung: {state}"))
        }
    }
}

fn device(dir: &Path) -> phasegate::error::Result<NpuDevice> {
    let cache = Arc::new(KernelCache::open(dir, phasegate::settings::sealed_only())?);
    NpuDevice::open(Label::Vnpu, cache, Duration::from_millis(500), &LockOptions::default())
}

/// Runs `add` once on a device that uses this folder of ELFs.
fn add_on(dir: &Path, cols: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut device = device(dir)?;
    let mut args = vec![];
    for (name, role) in [("a", Role::Input), ("b", Role::Input), ("y", Role::Output)] {
        let (name, dtype, layout) = (name.to_owned(), Dtype::Bf16, Layout::Rows);
        args.push(device.create(BufferSpec { name, dtype, rows: 3, cols, role, layout })?);
    }
    let dispatch = device.prepare("sum", vec![BoundLaunch { site: "sum".into(), kernel: add(cols), args }])?;
    device.run(dispatch)?;
    Ok(())
}

/// The first run fails by the fault in force; whatever comes then must not be believed.
fn taint() -> Act {
    let dir = child::kernels().map_err(text)?;
    let first = add_on(&dir, 16).err().ok_or("the first run completed")?;
    let second = add_on(&dir, 16).err().ok_or("a later run completed")?;
    Ok(format!("{first}\n{second}"))
}

/// An error without a time-out leaves the next run alone.
fn recover() -> Act {
    let dir = child::kernels().map_err(text)?;
    let first = add_on(&dir, 16).err().ok_or("the first run completed")?;
    let second = add_on(&dir, 16).err().ok_or("the second run completed under the same fault")?;
    if first.to_string().contains("start a new process") || second.to_string().contains("start a new process") {
        return Err(format!("tainted: {first}, {second}").into());
    }
    Ok(second.to_string())
}

/// What is done to the one ELF of a folder, which its shape table still calls `add`.
type Damage = fn(elf: &Path) -> Result<(), Failed>;

/// A folder with the ELF of `add`, without a seal.
fn folder(damage: Damage) -> Result<tempfile::TempDir, Failed> {
    let (dir, kernels) = (child::folder()?, child::kernels()?);
    let stem = contracts::of_kernel(add(16))?.stem();
    for kind in ["elf", "json"] {
        let file = format!("{stem}.{kind}");
        child::copy(&kernels.join(&file), &dir.path().join(&file))?;
    }
    damage(&dir.path().join(format!("{stem}.elf")))?;
    Ok(dir)
}

/// A damaged ELF in a folder that nobody sealed, so that only XRT and the device stand before it.
fn elf(damage: Damage, expected: &str) -> Result<(), Failed> {
    let dir = folder(damage)?;
    child::of_this("add", &[&dir.path().to_string_lossy()], "")?.expect(1, expected)
}

/// Another sealed ELF's content.
fn instead(elf: &Path, kernel: Kernel, args: Vec<u8>) -> Result<(), Failed> {
    let other = Contract::of(&[(kernel, args)])?.0.stem();
    child::copy(&child::kernels()?.join(format!("{other}.elf")), elf)
}

/// A bias that is added in place: two buffers.
fn other_arguments(elf: &Path) -> Result<(), Failed> {
    let in_place = fs::read_dir(child::kernels()?)?.filter_map(|entry| {
        let path = entry.ok()?.path();
        let table: ShapeTable = serde_json::from_slice(&fs::read(path.with_extension("json")).ok()?).ok()?;
        (path.extension()? == "elf" && table.contract.args.len() == 2).then_some((path, table))
    });
    let (path, table) = in_place.min_by_key(|(path, _)| path.clone()).ok_or("no ELF with two arguments")?;
    child::copy(&path, elf)?;
    // Its kernel is the one to open, but its contract that of `add`.
    let beside = elf.with_extension("json");
    let mut ours: ShapeTable = serde_json::from_slice(&fs::read(&beside)?)?;
    ours.kernel = table.kernel;
    fs::write(&beside, serde_json::to_vec(&ours)?)?;
    Ok(())
}

fn other_kernel(elf: &Path) -> Result<(), Failed> {
    instead(elf, Kernel::SiluMul { rows: 3, cols: 16 }, vec![0, 1, 2])
}

/// The byte of the header that names the platform.
fn other_platform(elf: &Path) -> Result<(), Failed> {
    let mut bytes = fs::read(elf)?;
    bytes[7] = 70;
    Ok(fs::write(elf, bytes)?)
}

fn no_elf(elf: &Path) -> Result<(), Failed> {
    Ok(fs::write(elf, [b'x'; 4096])?)
}

fn cut_short(elf: &Path) -> Result<(), Failed> {
    let bytes = fs::read(elf)?;
    Ok(fs::write(elf, &bytes[..bytes.len() / 2])?)
}

fn changed_elf() -> Result<(), Failed> {
    let dir = folder(|_| Ok(()))?;
    cache::seal(dir.path())?;
    let words = [dir.path().to_string_lossy().into_owned()];
    child::of_this("add", &[&words[0]], "")?.expect(0, "added")?;
    let elf = fs::read_dir(dir.path())?
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "elf"));
    other_kernel(&elf.ok_or("no ELF")?)?;
    child::of_this("add", &[&words[0]], "")?.expect(1, "refused: changed ELF")
}

fn unsealed_elf() -> Result<(), Failed> {
    let dir = folder(|_| Ok(()))?;
    let kernels = dir.path().to_string_lossy().into_owned();
    let mut command = child::phasegate(&["verify", "tiny_llama", "--device", "vnpu"]);
    command.env("PHASEGATE_KERNELS", kernels).env("PHASEGATE_REQUIRE", "sealed");
    child::run(command)?.expect(1, "refused: unsealed ELF")
}
