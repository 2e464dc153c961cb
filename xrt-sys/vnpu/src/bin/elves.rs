//! Makes the virtual NPU's ELFs with XRT's own assembler: one per dispatch that the cases of phases 1 to 3 run, with its
//! shape table beside it, and seals them. usage: `vnpu-elves XRT OUT`, XRT being what `make xrt` unpacked.
//!
//! To XRT they are full ELFs like any other; on silicon they would do nothing.

// Linked against the library, this program would have its `open` and `ioctl` taken over as well; reading is the
// library's part of it.
#[path = "../program.rs"]
#[cfg_attr(not(test), expect(dead_code, reason = "reading is the virtual NPU's part"))]
mod program;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

use phasegate::kernel::cache::{self, ShapeTable};
use phasegate::kernel::contract::{Argument, Contract};
use phasegate::phase::{Outline, contracts};
use serde_json::json;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Names the PDI in control code and configuration.
const PDI: u32 = 1;

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let [xrt, out] = arguments.as_slice() else {
        eprintln!("usage: vnpu-elves XRT OUT");
        return ExitCode::from(64);
    };
    match make(xrt, out) {
        Ok((made, all)) => {
            eprintln!("{all} ELFs in {}, {made} of them new", out.display());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("vnpu-elves: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Makes what is missing, takes away what is no longer wanted, seals the rest.
fn make(xrt: &Path, out: &Path) -> Result<(usize, usize)> {
    fs::create_dir_all(out)?;
    let assembler = Assembler::of(&xrt.canonicalize()?)?;
    let contracts = contracts::all(&Outline::all()?)?;
    let wanted: BTreeSet<String> = contracts.iter().map(Contract::stem).collect();
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if !wanted.contains(&stem) {
            fs::remove_file(&path)?;
        }
    }
    let missing: Vec<&Contract> =
        contracts.iter().filter(|c| !out.join(format!("{}.elf", c.stem())).exists()).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        while let Some(contract) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(e) = assembler.assemble(contract, out) {
                *failed.lock().expect("no panic holds it") = Some(e);
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(work);
        }
    });
    if let Some(e) = failed.into_inner().expect("no panic held it") {
        return Err(e);
    }
    cache::seal(out)?;
    Ok((missing.len(), contracts.len()))
}

/// XRT's assembler, run on the C library that was unpacked with it.
struct Assembler {
    loader: PathBuf,
    libraries: PathBuf,
    program: PathBuf,
}

impl Assembler {
    fn of(xrt: &Path) -> Result<Assembler> {
        let assembler = Assembler {
            loader: xrt.join("lib64/ld-linux-x86-64.so.2"),
            libraries: xrt.join("usr/lib/x86_64-linux-gnu"),
            program: xrt.join("usr/bin/aiebu-asm"),
        };
        if assembler.program.exists() {
            Ok(assembler)
        } else {
            Err(format!("{} is not there: make xrt", assembler.program.display()).into())
        }
    }

    /// Writes the ELF and its shape table; the ELF last, so that one that is there is whole.
    fn assemble(&self, contract: &Contract, out: &Path) -> Result<()> {
        let work = tempfile::tempdir_in(out)?;
        let put = |name: &str, content: &[u8]| fs::write(work.path().join(name), content);
        let sizes: Vec<usize> = contract.args.iter().map(Argument::bytes).collect();
        put("control.bin", &program::control_code(&sizes, PDI))?;
        put("program.pdi", &program::pdi(&serde_json::to_string(contract)?))?;
        let argument = |(i, argument): (usize, &Argument)| json!({"name": argument.name, "type": "char *", "offset": format!("{:#x}", 8 * i)});
        let kernel = json!({
            "name": contract.id(),
            "arguments": contract.args.iter().enumerate().map(argument).collect::<Vec<_>>(),
            "PDIs": [{"id": PDI, "PDI_file": "program.pdi"}],
            "instance": [{"id": "sequence", "TXN_ctrl_code_file": "control.bin"}],
        });
        put("config.json", json!({"xrt-kernels": [kernel]}).to_string().as_bytes())?;
        let output = Command::new(&self.loader)
            .arg("--library-path")
            .arg(&self.libraries)
            .arg(&self.program)
            .args(["-t", "aie2_config", "-j", "config.json", "-o", "full.elf"])
            .current_dir(work.path())
            .output()?;
        if !output.status.success() {
            let said = [output.stdout, output.stderr].concat();
            return Err(format!("{}: aiebu-asm: {}", contract.describe(), String::from_utf8_lossy(&said)).into());
        }
        let table = ShapeTable {
            kernel: contract.id(),
            contract: contract.clone(),
            toolchain: BTreeMap::from([("aiebu-asm".into(), "XRT 2.25".into())]),
            flags: ["-t", "aie2_config"].map(str::to_owned).into(),
        };
        let elf = out.join(format!("{}.elf", contract.stem()));
        fs::write(elf.with_extension("json"), serde_json::to_vec_pretty(&table)?)?;
        fs::rename(work.path().join("full.elf"), elf)?;
        Ok(())
    }
}
