//! Every dispatch that the cases of phases 1 to 5 put on a device, as contracts: what a kernel cache must hold.

use std::collections::BTreeMap;

use super::rewrite::Rewrite;
use super::{Outline, phase1};
use crate::check::token_set::STEPS;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::kernel::contract::Contract;
use crate::model::ModelConfig;
use crate::plan::{self, BufferId, Op, Placement, Plan, PlanOptions, Tuning};
use crate::runner::RunnerOptions;

/// Contracts of phase 1's kernels, and of the plans of each model's captured prompts, plain, merged, sharing memory and
/// with workarounds; each once.
///
/// Errors: from the plans and the registry.
pub fn all(outlines: &[Outline]) -> Result<Vec<Contract>> {
    let mut contracts = BTreeMap::new();
    let mut add = |contract: Contract| drop(contracts.insert(contract.hash(), contract));
    for kernel in phase1::kernels(outlines)? {
        add(of_kernel(kernel)?);
    }
    for outline in outlines {
        let config = &outline.config;
        let lengths = outline.prompt_lengths.iter().copied();
        let buckets = RunnerOptions::for_prompts(lengths, STEPS, config.max_position_embeddings).buckets;
        let rewrites = Rewrite::ALL.into_iter().filter_map(|rewrite| rewrite.options(config));
        for options in std::iter::once(PlanOptions::default()).chain(rewrites) {
            for plan in plans(config, &buckets, &options)? {
                of_plan(&plan)?.into_iter().for_each(&mut add);
            }
        }
    }
    Ok(contracts.into_values().collect())
}

/// The contract of one kernel by itself, every argument a buffer of its own.
///
/// Errors: none that a kernel can cause.
pub fn of_kernel(kernel: Kernel) -> Result<Contract> {
    let args = (0..kernel.args().len()).collect();
    Ok(Contract::of(&[(kernel, args)])?.0)
}

/// The contracts of a plan's dispatches on the device, in order.
///
/// Errors: [`crate::error::Error::Plan`].
pub fn of_plan(plan: &Plan) -> Result<Vec<Contract>> {
    let mut contracts = vec![];
    for step in plan.steps.iter().filter(|step| step.placement == Placement::Device) {
        if let Op::Dispatch(launches) = &step.op {
            // A device knows a buffer by the memory that it lies in.
            let homes = |args: &[BufferId]| args.iter().map(|&id| plan.home(id)).collect();
            let bound: Vec<_> = launches.iter().map(|l| (l.kernel.clone(), homes(&l.args))).collect();
            contracts.push(Contract::of(&bound)?.0);
        }
    }
    Ok(contracts)
}

fn plans(config: &ModelConfig, buckets: &[usize], options: &PlanOptions) -> Result<Vec<Plan>> {
    let mut plans = vec![plan::decode(config, options)?];
    for &bucket in buckets {
        plans.push(plan::prefill(config, bucket, options)?);
    }
    let mut all = vec![];
    for (merge, share) in [(false, false), (true, false), (false, true), (true, true)] {
        let tuning = Tuning { merge, share, ..Tuning::default() };
        all.extend(plans.iter().map(|plan| tuning.apply(plan.clone())).collect::<Result<Vec<_>>>()?);
    }
    Ok(all)
}
