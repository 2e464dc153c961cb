//! `kernels --seal` and `kernels --cache`: folders of compiled ELFs, sealed and looked at without an NPU.

use std::path::Path;
use std::process::ExitCode;

use serde_json::json;

use super::{print, print_json};
use crate::kernel::cache::{self, KernelCache, SealEntry};
use crate::report::{Cell, Table};
use crate::settings;

/// Seals a kernel cache and says what is in it.
pub(super) fn seal(dir: &Path, as_json: bool) -> anyhow::Result<ExitCode> {
    let seal = cache::seal(dir)?;
    if as_json {
        print_json(&seal)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&table(&seal.entries));
    say!("{}: {} ELFs sealed", dir.join(cache::SEAL).display(), seal.entries.len());
    Ok(ExitCode::SUCCESS)
}

/// Opens a kernel cache as a device does, and holds every sealed ELF against its seal.
pub(super) fn show(dir: &Path, as_json: bool) -> anyhow::Result<ExitCode> {
    let opened = KernelCache::open(dir, settings::sealed_only())?;
    let entries = opened.verify()?;
    if as_json {
        print_json(&json!({"sealed": entries, "identity": opened.identity(), "warnings": opened.warnings()}))?;
        return Ok(ExitCode::SUCCESS);
    }
    print(&table(entries));
    opened.warnings().iter().for_each(|warning| say!("warning: {warning}"));
    say!("{}: {} ELFs as sealed", dir.display(), entries.len());
    Ok(ExitCode::SUCCESS)
}

fn table(entries: &[SealEntry]) -> Table {
    let mut table = Table::new("sealed ELFs", &["dispatch", "ELF", "sha256"]);
    for entry in entries {
        let hash = entry.sha256.get(..16).unwrap_or_default();
        table.row([Cell::from(entry.contract.describe().as_str()), entry.elf.as_str().into(), hash.into()]);
    }
    table
}
