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
#[case(Optimisation::BufferSharing, Tuning { share: true, ..Tuning::default() })]
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

/// A step that goes wrong only after its gated run (on its second call, say) is reverted too: its timing is void.
#[rstest]
fn a_step_that_goes_wrong_after_its_gate_is_reverted(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let sound = contender(half, Tuning::BASELINE);
    let bad = Contender::new(&setting(half), Tuning::default(), Some(exchange_gate_and_up)).unwrap().gated_as(&sound);
    let found = experiment(Optimisation::StaticWeights, &sound, &bad).unwrap();
    assert_eq!((found.decision, found.correct.outcome()), (Decision::Reverted, Outcome::Fail));
    assert!(
        found.reason.starts_with("breaks the output: ") && found.reason.contains("the timing is void"),
        "{}",
        found.reason
    );
    let found = total(&sound, &bad).unwrap();
    assert_eq!((found.correct.outcome(), found.timing.is_none()), (Outcome::Fail, true));
    // What is wrong with the state before is no reason to revert a step.
    assert!(bad.race(&sound).is_err());
}

/// Nor does a rewrite that cannot be set up end the run.
#[rstest]
fn a_step_that_cannot_be_carried_out_is_reverted(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let run =
        optimise(&setting(half), Some((Optimisation::BufferSharing, unbind_down as Seeded)), &mut |_| {}).unwrap();
    let sharing = run.experiments.iter().find(|e| e.name == "buffer_sharing").unwrap();
    assert_eq!((sharing.decision, sharing.correct.outcome()), (Decision::Reverted, Outcome::Fail));
    assert!(
        sharing.reason.starts_with("cannot be carried out: ") && sharing.reason.contains("down_proj"),
        "{}",
        sharing.reason
    );
    assert!(run.verdict.is_pass() && !run.tuning.share, "{}", run.verdict);
}

/// Where no bits are promised, another rounding passes and another model does not.
#[rstest]
fn near_is_not_equal(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let ieee = contender(half, Tuning::default());
    let npu2 = Setting::of("tiny_llama", "emu_npu2", half).unwrap();
    let npu2 = Contender::new(&npu2, Tuning::default(), None).unwrap();
    assert_eq!(npu2.same_bits(&ieee).unwrap().outcome(), Outcome::Fail);
    let near = npu2.near(&ieee).unwrap();
    assert!(near.is_pass(), "{near}");
    let bad = Contender::new(&setting(half), Tuning::default(), Some(exchange_gate_and_up)).unwrap();
    let near = bad.near(&ieee).unwrap();
    assert!(near.outcome() == Outcome::Fail && near.to_string().contains("cosine"), "{near}");
    for device in ["emu", "emu_npu2", "vnpu", "npu"] {
        for step in Optimisation::ALL {
            assert_eq!(step.keeps_bits(device), device != "npu" || step != Optimisation::LaunchMerging);
        }
    }
}

/// Upon a baseline that is wrong nothing is tried, and it says so.
#[rstest]
fn a_wrong_baseline_ends_the_run(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let baseline = Contender::new(&setting(half), Tuning::BASELINE, Some(exchange_gate_and_up)).unwrap();
    let run = climb(&setting(half), Arc::new(baseline), None, &mut |_| {}).unwrap();
    assert_eq!((run.verdict.outcome(), run.experiments.len(), run.total.is_none()), (Outcome::Fail, 0, true));
    assert!(run.verdict.reasons()[0].starts_with("the baseline, before any step: "), "{}", run.verdict);
}

/// When no step is kept there is nothing to race, and nothing is faster.
#[rstest]
fn nothing_kept_is_no_pass(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let run = climb(&setting(half), Arc::new(contender(half, Optimisation::all())), None, &mut |_| {}).unwrap();
    assert!(run.experiments.iter().all(|e| e.decision != Decision::Applied));
    assert_eq!((run.verdict.outcome(), run.total.is_none()), (Outcome::Fail, true));
    assert!(run.verdict.to_string().contains("no step was kept"), "{}", run.verdict);
}

/// The first call is that of a contender that has run nothing yet, also where no record comes from the run cache.
#[rstest]
fn the_cold_call_is_the_first(#[values(Half::Prefill, Half::Decode)] half: Half) {
    let uncached = |tuning| Contender::new(&setting(half), tuning, Some(|_| {})).unwrap();
    let (before, after) = (uncached(Tuning::BASELINE), uncached(Tuning::default()));
    let (_, cold) = experiment(Optimisation::StaticWeights, &before, &after).unwrap().timing.unwrap();
    assert!(cold[0] > 0.0 && cold[1] > 0.0, "{cold:?}");
    assert_eq!([before.cold().unwrap(), after.cold().unwrap()], cold);
    let late = uncached(Tuning::default());
    late.cost().unwrap();
    assert!(late.cold().unwrap().is_nan());
}

/// What is built upon is looked at first.
#[test]
fn a_step_upon_a_state_that_does_not_hold_is_not_judged() {
    let (bad, sound) = (Some(exchange_gate_and_up as Seeded), contender(Half::Decode, Tuning::default()));
    let bad = Contender::new(&setting(Half::Decode), Tuning::BASELINE, bad).unwrap();
    let found = experiment(Optimisation::StaticWeights, &bad, &sound).unwrap();
    assert!(found.reason.starts_with("the state before it does not hold: FAIL"), "{}", found.reason);
    assert_eq!((found.decision, found.timing.is_none()), (Decision::Reverted, true));
}

#[test]
fn each_step_stands_on_those_before_it() {
    assert_eq!(Optimisation::StaticWeights.ladder(), Tuning::BASELINE);
    // What `run` and `verify` do is a state of its own on the way.
    assert_eq!(Optimisation::BufferSharing.ladder(), Tuning::default());
    let all = Tuning { share: true, merge: true, ..Tuning::default() };
    assert_eq!((Optimisation::all(), Optimisation::LayoutAlignment.ladder()), (all, all));
}
