//! Launch merging: the launches between two hard stops run as one dispatch.
//!
//! Upstream's boundaries: a layer's RMSNorm, QKV, bias, QK-norm and RoPE | attention | O, add, RMSNorm, gate, up, SwiGLU,
//! down, add. A host op and a launch placed on the host are hard stops too, and so are the ends of a layer. Launches,
//! their order and their names stay, and with them every bit of the result.

use super::{HostOp, Op, Placement, Plan, Step, Tap};
use crate::kernel::Kernel;

/// The names of the two groups of a layer, before and behind attention.
///
/// Source: upstream's dispatches `rms_qkv_bias_rope` and `o_ffn` (`kernels/dispatch/`).
const GROUPS: [&str; 2] = ["rms_qkv_rope", "o_ffn"];

/// Merges what may be merged.
pub fn merge(mut plan: Plan) -> Plan {
    let mut merged: Vec<Step> = vec![];
    for step in plan.steps {
        match merged.last_mut() {
            Some(group) if fits(group, &step) => append(group, step),
            _ => merged.push(step),
        }
    }
    let (mut layer, mut behind, mut parts) = (None, 0, 0);
    for step in &mut merged {
        if step.layer != layer {
            (layer, behind, parts) = (step.layer, 0, 0);
        }
        if is_attention(step) {
            (behind, parts) = (1, 0);
        } else if let (Some(layer), true) = (layer, step.launches().len() > 1) {
            parts += 1;
            let part = if parts > 1 { format!("_{parts}") } else { String::new() };
            step.name = format!("l{layer:02}.{}{part}", GROUPS[behind]);
        }
    }
    plan.steps = merged;
    plan
}

/// Takes every dispatch apart again: one launch each.
pub fn split(mut plan: Plan) -> Plan {
    plan.steps = plan.steps.into_iter().flat_map(apart).collect();
    plan
}

/// Steps of one launch each; a tap goes with the launch that wrote its buffer last.
pub(super) fn apart(step: Step) -> Vec<Step> {
    let Step { name, layer, op, placement, mut taps } = step;
    let Op::Dispatch(launches) = op else { return vec![Step { name, layer, op, placement, taps }] };
    let mut steps: Vec<Step> = vec![];
    for launch in launches.into_iter().rev() {
        let (own, others): (Vec<Tap>, _) = taps.into_iter().partition(|tap| launch.output() == Some(tap.buffer));
        taps = others;
        steps.push(Step { name: launch.name.clone(), layer, op: Op::Dispatch(vec![launch]), placement, taps: own });
    }
    steps.reverse();
    steps
}

/// The steps that keep a group of a layer from being one dispatch, each with why.
pub fn stands_between(merged: &Plan) -> Vec<String> {
    let mut found = vec![];
    // The last device dispatch of the group at hand, and what has come since.
    let (mut layer, mut open, mut since): (_, bool, Vec<String>) = (None, false, vec![]);
    for step in &merged.steps {
        if step.layer != layer || is_attention(step) {
            (layer, open, since) = (step.layer, false, vec![]);
        }
        if is_attention(step) || step.layer.is_none() {
            continue;
        }
        match (&step.op, step.placement) {
            (Op::Dispatch(_), Placement::Device) => {
                if open && since.is_empty() {
                    since.push(format!("{}: overwrites what the dispatch before it shows", step.name));
                }
                found.append(&mut since);
                open = true;
            }
            (Op::Dispatch(_), Placement::Host) if open => since.push(format!("{}: placed on the host", step.name)),
            (Op::Host(_), _) if open => since.push(format!("{}: a host op", step.name)),
            _ => {}
        }
    }
    found
}

fn is_attention(step: &Step) -> bool {
    let kernel = step.launches().iter().any(|launch| matches!(launch.kernel, Kernel::Attention { .. }));
    kernel || matches!(step.op, Op::Host(HostOp::DecodeAttention { .. }))
}

fn fits(group: &Step, step: &Step) -> bool {
    let on_device = |step: &Step| step.placement == Placement::Device && !step.launches().is_empty();
    // What the group shows has to stand when all of it is done.
    let shown = |id| group.taps.iter().any(|tap| tap.buffer == id);
    on_device(group)
        && on_device(step)
        && group.layer.is_some()
        && group.layer == step.layer
        && !is_attention(group)
        && !is_attention(step)
        && !step.launches().iter().filter_map(|launch| launch.output()).any(shown)
}

fn append(group: &mut Step, step: Step) {
    if let (Op::Dispatch(launches), Op::Dispatch(more)) = (&mut group.op, step.op) {
        launches.extend(more);
        group.taps.extend(step.taps);
    }
}
