//! What the registry and the placement rules say of a model's prefill before any of it is built for an NPU.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::placement::{self, Killer, RegistryStatus};
use crate::model::ModelConfig;
use crate::plan::{self, PlanOptions};

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
    let mut found: BTreeMap<String, (usize, &Kernel)> = BTreeMap::new();
    for (_, launch) in plan.launches() {
        found.entry(launch.kernel.to_string()).or_insert((0, &launch.kernel)).0 += 1;
    }
    let site = |(name, (launches, kernel)): (String, (usize, &Kernel))| {
        Ok(Site { kernel: name, launches, hint: hint(kernel)? })
    };
    found.into_iter().map(site).collect()
}

fn hint(kernel: &Kernel) -> Result<String> {
    let assessment = placement::assess(kernel, None)?;
    let tiles = |tiles: Option<i64>| tiles.map_or_else(String::new, |n| format!(", {n} tiles"));
    Ok(match (&assessment.status, kernel) {
        (RegistryStatus::Measured(_), _) => format!("measured{}", tiles(assessment.tiles)),
        (RegistryStatus::Unmeasured { .. }, _) => format!("places{}, not measured", tiles(assessment.tiles)),
        (RegistryStatus::Unplaceable { killers, .. }, kernel) => {
            let rules: Vec<String> = killers.iter().map(Killer::line).collect();
            let way_out = if matches!(kernel, Kernel::Attention { .. }) { " (--host attention)" } else { "" };
            format!("does not place{way_out}: {}", rules.join("; "))
        }
    })
}
