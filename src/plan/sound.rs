//! What makes a plan sound: arguments that fit, nothing read before it is written, no two contents in one memory.

use super::{BufferId, Launch, Op, Plan, Step};
use crate::error::{Error, Result};
use crate::kernel::ArgRole;

impl Plan {
    /// Checks that every launch's buffers have the dtypes and sizes its kernel wants, that no launch reads a buffer
    /// before something has written it or after something else was written to its memory, that a step's taps still
    /// stand when it is done, and that no static buffer is written.
    ///
    /// Errors: [`Error::Plan`] naming the step and the argument.
    pub fn check(&self) -> Result<()> {
        let mut contents = Contents { plan: self, of: vec![None; self.buffers.len()] };
        for (at, buffer) in self.buffers.iter().enumerate().filter(|(_, b)| b.spec.role.is_static()) {
            contents.of[at] = Some(BufferId(at));
            if buffer.lies_in.is_some() {
                return Err(Error::Plan { why: format!("the static {} lies in another's memory", buffer.spec.name) });
            }
        }
        for step in &self.steps {
            let fail = |why: String| Error::Plan { why: format!("{}: {why}", step.name) };
            match &step.op {
                Op::Host(op) => {
                    op.reads().into_iter().try_for_each(|id| contents.read(id)).map_err(fail)?;
                    op.writes().into_iter().for_each(|id| contents.write(id));
                }
                Op::Dispatch(launches) => {
                    launches.iter().try_for_each(|launch| self.check_launch(step, launch, &mut contents))?;
                }
            }
            step.taps.iter().try_for_each(|tap| contents.read(tap.buffer)).map_err(fail)?;
        }
        contents.read(self.logits).map_err(|_| Error::Plan { why: "no step writes the logits".into() })
    }

    fn check_launch(&self, step: &Step, launch: &Launch, contents: &mut Contents<'_>) -> Result<()> {
        let args = launch.kernel.args();
        let place = if launch.name == step.name { String::new() } else { format!("{}: ", launch.name) };
        let fail = |why: String| Error::Plan { why: format!("{}: {place}{}: {why}", step.name, launch.kernel) };
        if args.len() != launch.args.len() {
            return Err(fail(format!("found {} arguments, expected {}", launch.args.len(), args.len())));
        }
        for (arg, &id) in args.iter().zip(&launch.args) {
            let spec = &self.buffer(id).spec;
            if (spec.dtype, spec.len()) != (arg.dtype, arg.rows * arg.cols) {
                return Err(fail(format!(
                    "argument {}: found {} {:?} [{}, {}], expected {:?} [{}, {}]",
                    arg.name, spec.name, spec.dtype, spec.rows, spec.cols, arg.dtype, arg.rows, arg.cols
                )));
            }
            match arg.role {
                ArgRole::Output if spec.role.is_static() => {
                    return Err(fail(format!("writes the static {}", spec.name)));
                }
                ArgRole::Output => contents.write(id),
                _ => contents.read(id).map_err(fail)?,
            }
        }
        Ok(())
    }
}

/// Which buffer's content each memory holds, as the plan runs.
struct Contents<'a> {
    plan: &'a Plan,
    of: Vec<Option<BufferId>>,
}

impl Contents<'_> {
    fn write(&mut self, id: BufferId) {
        self.of[self.plan.home(id).0] = Some(id);
    }

    fn read(&self, id: BufferId) -> std::result::Result<(), String> {
        let name = |id: BufferId| &self.plan.buffer(id).spec.name;
        match self.of[self.plan.home(id).0] {
            Some(found) if found == id => Ok(()),
            Some(other) => Err(format!("reads {}, whose memory holds {} by then", name(id), name(other))),
            None => Err(format!("reads {} before it is written", name(id))),
        }
    }
}
