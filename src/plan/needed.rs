//! Which rows of a prefill anybody needs: not those of the padding, and behind the last layer's keys and values only that of the
//! prompt's last token.
//!
//! Knows what a plan's steps read, and nothing of hooks: whoever looks into a run may want every row.

use super::{BufferId, HostOp, Op, Placement, Plan, Step};
use crate::kernel::{ArgRole, Kernel};

/// Rows of a step's outputs that later steps read; the later variant includes the earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needed {
    /// That of the prompt's last token.
    Last,
    /// Those of the prompt.
    Prompt,
    /// Those of the padding, too.
    All,
}

impl Plan {
    /// For each step, the rows of its outputs that later steps read. A step that cannot be cut to rows needs all.
    pub fn rows_needed(&self) -> Vec<Needed> {
        let mut readers: Vec<Option<Needed>> = vec![None; self.buffers.len()];
        let mut steps: Vec<Needed> = self.steps.iter().rev().map(|step| self.walk(step, &mut readers)).collect();
        steps.reverse();
        steps
    }

    /// Goes back over one step: from what is read of its outputs to what it reads.
    fn walk(&self, step: &Step, readers: &mut [Option<Needed>]) -> Needed {
        match &step.op {
            Op::Host(op) => {
                let (reads, writes) = (op.reads(), op.writes());
                // What is changed in place, row by row, is needed as far as the result is.
                writes.iter().filter(|id| !reads.contains(id)).for_each(|id| readers[id.0] = None);
                for id in reads.iter().filter(|id| !writes.contains(id)) {
                    let rows = if matches!(op, HostOp::FinalNorm { .. }) { Needed::Last } else { Needed::Prompt };
                    read(readers, *id, rows);
                }
                Needed::All
            }
            Op::Dispatch(launches) => {
                let read_of = |readers: &[Option<Needed>], kernel: &Kernel, args: &[BufferId]| {
                    let rows = args.last().and_then(|id| readers[id.0]);
                    // What nobody reads, somebody may want who is not in the plan.
                    rows.filter(|_| kernel.is_row_wise() || is_causal(kernel)).unwrap_or(Needed::All)
                };
                // One window for the whole dispatch: the widest that any of its launches needs.
                let mut widest = if step.placement == Placement::Device { Needed::Last } else { Needed::All };
                loop {
                    let mut trial = readers.to_vec();
                    let mut needed = widest;
                    for launch in launches.iter().rev() {
                        needed = needed.max(read_of(&trial, &launch.kernel, &launch.args));
                        self.back_over(&launch.kernel, &launch.args, widest, &mut trial);
                    }
                    if needed == widest {
                        readers.copy_from_slice(&trial);
                        return widest;
                    }
                    widest = needed;
                }
            }
        }
    }

    /// Notes what a launch reads for these rows of its output.
    fn back_over(&self, kernel: &Kernel, args: &[BufferId], rows: Needed, readers: &mut [Option<Needed>]) {
        args.last().into_iter().for_each(|id| readers[id.0] = None);
        for (at, (arg, &id)) in kernel.args().iter().zip(args).enumerate() {
            if arg.role == ArgRole::Input {
                // A query sees the keys and values of its own position and of all before.
                let before = matches!(kernel, Kernel::Attention { .. }) && at > 0;
                read(readers, id, if before { rows.max(Needed::Prompt) } else { rows });
            }
        }
    }
}

fn is_causal(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Attention { causal: true, .. })
}

fn read(readers: &mut [Option<Needed>], id: BufferId, rows: Needed) {
    readers[id.0] = readers[id.0].max(Some(rows));
}
