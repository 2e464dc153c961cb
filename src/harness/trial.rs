//! From a case on a device to one libtest-mimic trial: run, be ignored with a reason, or fail with one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use libtest_mimic::{Failed, Trial};

use super::baseline;
use super::case::{Case, Cx, Run};
use super::results::Results;

/// What becomes of a case on a device in this run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Run,
    /// Something is not there; the reason.
    Ignore(String),
    /// Something is not there and `PHASEGATE_REQUIRE` names it.
    Fail(String),
}

/// The trial of a case; `started` counts the cases whose code ran.
pub(super) fn trial(cx: Cx, case: &Case, fate: Fate, started: Arc<AtomicUsize>, results: Option<Results>) -> Trial {
    let name = cx.name.clone();
    let ignored = matches!(fate, Fate::Ignore(_));
    let (run, needs) = (case.run.clone(), case.needs.clone());
    let body = move || {
        let began = Instant::now();
        let outcome = match fate {
            Fate::Run => {
                started.fetch_add(1, Ordering::Relaxed);
                execute(&cx, &run)
            }
            // An ignored case is only started by --ignored or --include-ignored; then it must not look like a pass.
            Fate::Ignore(why) | Fate::Fail(why) => Err(format!("cannot run: {why}")),
        };
        let kept = results.map_or(Ok(()), |results| results.case(&cx, &needs, &outcome, began.elapsed()));
        let kept = kept.map_err(|e| format!("its result cannot be kept: {e}"));
        outcome.and(kept).map_err(|why| Failed::from(format!("{}::{}: {why}", cx.phase, cx.name)))
    };
    Trial::test(name, body).with_ignored_flag(ignored)
}

/// Gates first, then the baseline.
fn execute(cx: &Cx, run: &Run) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(|| run(cx))) {
        Ok(Ok(())) => {}
        Ok(Err(failed)) => return Err(failed.message().unwrap_or("failed without a message").to_owned()),
        Err(panic) => return Err(format!("panicked: {}", panic_text(panic.as_ref()))),
    }
    match (cx.measured.get(), cx.has_baseline) {
        (Some(numbers), _) => baseline::compare(cx, numbers),
        (None, true) => Err("declared a baseline and measured nothing (Cx::baseline)".into()),
        (None, false) => Ok(()),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
