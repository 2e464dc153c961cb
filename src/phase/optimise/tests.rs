//! The experiments see what they are for: a broken rewrite, a merge that merges nothing, a step that makes it slower.

use rstest::rstest;

use super::*;
use crate::check::Outcome;

fn setting(half: Half) -> Setting {
    Setting::of("tiny_llama", "emu", half).unwrap()
}

fn contender(half: Half, tuning: Tuning) -> Contender {
    Contender::new(&setting(half), tuning, None).unwrap()
}

/// A seeded fault in a rewrite is reverted with its reason, and the run still ends green.
#[rstest]
fn a_seeded_fault_is_reverted_and_the_run_ends_green(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let seeded = Some((Optimisation::LaunchMerging, exchange_gate_and_up as Seeded));
    let run = optimise(&setting(half), seeded, &mut |_| {}).unwrap();
    let merging = run.experiments.iter().find(|e| e.name == "launch_merging").unwrap();
    assert_eq!(merging.decision, Decision::Reverted);
    assert!(merging.reason.starts_with("breaks the output: FAIL"), "{}", merging.reason);
    assert!(merging.timing.is_none() && !run.tuning.merge);
    assert!(run.verdict.is_pass(), "{}", run.verdict);
    let layout = run.experiments.last().unwrap();
    assert_eq!((layout.decision, layout.timing.is_none()), (Decision::Skipped, true));
}

/// A merge whose calls did not become fewer is caught by the counters, whatever the clock says.
#[rstest]
#[case(Optimisation::LaunchMerging, Tuning::default())]
#[case(Optimisation::StaticWeights, Tuning::default())]
#[case(Optimisation::IntermediateReuse, Tuning { merge: true, ..Tuning::default() })]
fn a_step_that_saves_nothing_is_caught(#[case] step: Optimisation, #[case] tuning: Tuning) {
    let (before, after) = (contender(Half::Decode, tuning), contender(Half::Decode, tuning));
    let found = experiment(step, &before, &after).unwrap();
    assert_eq!(found.decision, Decision::Reverted);
    assert!(found.correct.is_pass() && found.timing.is_none());
    assert!(found.reason.contains("the counters say that nothing was saved"), "{}", found.reason);
}

/// A state that uploads its weights again is slower, and the speed gate says so.
#[test]
fn slower_fails_the_speed_gate() {
    let found =
        total(&contender(Half::Prefill, Tuning::default()), &contender(Half::Prefill, Tuning::BASELINE)).unwrap();
    assert_eq!(found.timing.as_ref().unwrap().0.timing(), Timing::Slower);
    assert_eq!(speed(&found).outcome(), Outcome::Fail);
}

/// A call whose logits are not the gated run's voids the timing.
#[test]
fn a_timing_of_other_logits_is_void() {
    let good = contender(Half::Decode, Tuning::default());
    let bad = Contender::new(&setting(Half::Decode), Tuning::default(), Some(exchange_gate_and_up)).unwrap();
    // Gated sound, then broken: what a race must not let pass.
    let error = good.race(&bad.gated_as(&good)).unwrap_err().to_string();
    assert!(error.contains("the timing is void"), "{error}");
}

#[test]
fn each_step_stands_on_those_before_it() {
    assert_eq!(Optimisation::StaticWeights.ladder(), Tuning::BASELINE);
    let all = Tuning { share: true, merge: true, ..Tuning::default() };
    assert_eq!((Optimisation::all(), Optimisation::LayoutAlignment.ladder()), (all, all));
}
