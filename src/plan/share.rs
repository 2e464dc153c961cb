//! Intermediate reuse: buffers whose contents are never needed at the same time lie in one memory.
//!
//! Only buffers of one shape share, so that every bound, guard and row stays where it was.

use super::{BufferId, Op, Plan};
use crate::device::Role;
use crate::kernel::ArgRole;

/// From the moment a content is written to the last at which it is read; both belong to it. Units: launches and host ops.
type Life = (usize, usize);

/// Lets intermediates share memory where their lives allow it.
pub fn share(mut plan: Plan) -> Plan {
    let lives = lives(&plan);
    let mut order: Vec<BufferId> = (0..plan.buffers.len()).map(BufferId).collect();
    order.retain(|id| plan.buffer(*id).spec.role == Role::Intermediate && !lives[id.0].is_empty());
    order.sort_by_key(|id| lives[id.0][0]);
    let mut homes: Vec<(BufferId, Vec<Life>)> = vec![];
    for id in order {
        let spec = &plan.buffer(id).spec;
        let fits = |(home, taken): &(BufferId, Vec<Life>)| {
            let other = &plan.buffer(*home).spec;
            let same =
                (spec.dtype, spec.layout, spec.rows, spec.cols) == (other.dtype, other.layout, other.rows, other.cols);
            same && !taken.iter().any(|a| lives[id.0].iter().any(|b| a.0 <= b.1 && b.0 <= a.1))
        };
        match homes.iter().position(fits) {
            Some(at) => {
                homes[at].1.extend(&lives[id.0]);
                plan.buffers[id.0].lies_in = Some(homes[at].0);
            }
            None => homes.push((id, lives[id.0].clone())),
        }
    }
    plan
}

/// The lives of every buffer, in order. A launch that writes what it reads prolongs a life and begins none; a tap is read
/// when its whole step is done.
fn lives(plan: &Plan) -> Vec<Vec<Life>> {
    let mut lives: Vec<Vec<Life>> = vec![vec![]; plan.buffers.len()];
    let mut now = 0;
    let mut at = |now: usize, reads: &[BufferId], writes: &[BufferId]| {
        for id in reads {
            if let Some(life) = lives[id.0].last_mut() {
                life.1 = now;
            }
        }
        for id in writes.iter().filter(|id| !reads.contains(id)) {
            lives[id.0].push((now, now));
        }
    };
    for step in &plan.steps {
        match &step.op {
            Op::Host(op) => at(now, &op.reads(), &op.writes()),
            Op::Dispatch(launches) => {
                for launch in launches {
                    let (mut reads, mut writes) = (vec![], vec![]);
                    for (arg, &id) in launch.kernel.args().iter().zip(&launch.args) {
                        if arg.role == ArgRole::Output { writes.push(id) } else { reads.push(id) }
                    }
                    now += 1;
                    at(now, &reads, &writes);
                }
            }
        }
        let shown: Vec<BufferId> = step.taps.iter().map(|tap| tap.buffer).collect();
        at(now, &shown, &[]);
        now += 1;
    }
    lives
}
