//! What the sizes say of an NPU placement before any is tried: divisibility, and whether there is a kernel.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::Result;
use crate::kernel::Kernel;
use crate::model::ModelConfig;
use crate::plan::{self, PlanOptions};

/// Columns and rows of one matrix tile; the NPU's GEMM tiles are multiples of it.
const TILE: usize = 64;
/// What 8 columns of such tiles cover: below it some columns idle.
const WHOLE_ARRAY: usize = 512;
/// Head widths that attention has been built for.
const HEAD_DIMS: [usize; 2] = [64, 128];

/// One kernel and shape of the prefill, and how many launches it has.
#[derive(Debug, Serialize)]
pub(super) struct Site {
    pub kernel: String,
    pub launches: usize,
    pub hint: String,
}

/// The distinct kernels of a prefill of `seq_len`, in name order.
pub(super) fn sites(config: &ModelConfig, seq_len: usize) -> Result<Vec<Site>> {
    let plan = plan::prefill(config, seq_len, &PlanOptions::default())?;
    let mut found: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for (_, launch) in plan.launches() {
        found.entry(launch.kernel.to_string()).or_insert_with(|| (0, hint(&launch.kernel))).0 += 1;
    }
    Ok(found.into_iter().map(|(kernel, (launches, hint))| Site { kernel, launches, hint }).collect())
}

fn hint(kernel: &Kernel) -> String {
    match *kernel {
        Kernel::Gemm { k, n, .. } => width(&[("k", k), ("n", n)]),
        Kernel::Gemv { m, k } => width(&[("m", m), ("k", k)]),
        Kernel::Attention { head_dim, .. } if !HEAD_DIMS.contains(&head_dim) => {
            format!("no kernel for head_dim {head_dim}: --host attention")
        }
        Kernel::Attention { heads, .. } if heads % 8 != 0 => {
            format!("{heads} heads do not fill 8 columns: --pad-gqa may help")
        }
        Kernel::RmsNorm { cols, .. } | Kernel::Add { cols, .. } | Kernel::SiluMul { cols, .. } => {
            width(&[("cols", cols)])
        }
        _ => "no obstacle".into(),
    }
}

fn width(sizes: &[(&str, usize)]) -> String {
    let broken: Vec<String> = sizes
        .iter()
        .filter(|(_, size)| size % TILE != 0)
        .map(|(name, size)| format!("{name} {size} is no multiple of {TILE}: needs padding"))
        .collect();
    if !broken.is_empty() {
        return broken.join("; ");
    }
    match sizes.iter().find(|(_, size)| size % WHOLE_ARRAY != 0) {
        Some((name, size)) => {
            format!("places; {name} {size} is no multiple of {WHOLE_ARRAY}, so not on the whole array")
        }
        None => "no obstacle".into(),
    }
}
