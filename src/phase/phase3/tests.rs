//! The gates of phase 3 see what they are for: RoPE scaling left out, a decode that is not the prefill's, a bias in the
//! wrong place; and they pass what is the same model in another shape.

use std::sync::{Arc, Mutex};

use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rstest::rstest;

use super::*;
use crate::check::Outcome;
use crate::model::RopeKind;
use crate::phase::Subject;
use crate::plan::{PlanOptions, Stage};
use crate::runner::{Hook, StepContext};

fn ids(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// A bench of its own with `change` made to the config that HF's weights are run under.
fn bench(model: &str, prompts: &[String], change: impl FnOnce(&mut crate::model::ModelConfig)) -> Bench {
    let mut subject = Subject::open(model, None).unwrap();
    change(&mut subject.config);
    Bench::new(Arc::new(subject), "emu", prompts, PlanOptions::default()).unwrap()
}

/// Llama 3's scaling parsed and never applied: over a short prompt's 32 steps upstream's gate sees nothing at all, over
/// the long prompt's it does, at once. KL sees it everywhere; that is why it is a gate here.
#[test]
fn scaling_switched_off_fails_the_long_prompt_and_no_short_one() {
    let short = ids(&["base_02", "instruct_00", "instruct_02"]);
    let long = ids(&["long_00"]);
    let all = [short.clone(), long.clone()].concat();
    let off = bench("tiny_llama", &all, |config| config.rope.kind = RopeKind::Default);
    let on = bench("tiny_llama", &all, |_| {});
    let token_sets = |bench: &Bench, prompts: &[String]| {
        Verdict::all(prompts.iter().map(|id| prompt(bench, id).unwrap().verdict.clone())).outcome()
    };
    let kl = |bench: &Bench, prompts: &[String]| kl(bench, prompts).unwrap().verdict.outcome();
    assert_eq!((token_sets(&on, &all), kl(&on, &all)), (Outcome::Pass, Outcome::Pass));
    assert_eq!((token_sets(&off, &short), token_sets(&off, &long)), (Outcome::Pass, Outcome::Fail));
    assert_eq!((kl(&off, &short), kl(&off, &long)), (Outcome::Fail, Outcome::Fail));
    assert_eq!(noise(&off, "long_00").unwrap().verdict.outcome(), Outcome::Fail);
}

/// One prompt that is wrong from end to end among all that are right: neither the pool's median nor its p95 moves beyond
/// its limit, so the prompt is judged alone.
#[test]
fn one_wrong_prompt_among_many_fails() {
    let prompts = Subject::shared("tiny_llama").unwrap().outline().unwrap().prompts;
    let sound = bench("tiny_llama", &prompts, |_| {});
    let off = bench("tiny_llama", &ids(&["long_00"]), |config| config.rope.kind = RopeKind::Default);
    assert_eq!(kl(&sound, &prompts).unwrap().verdict.outcome(), Outcome::Pass);
    sound.keep("long_00", off.record("long_00").unwrap());
    let (pool, floor) = kl_and_floor(&sound, &prompts).unwrap();
    assert!(pool.judge(&floor.summary, kl_factors(&sound).unwrap(), prompts.len() * STEPS).is_pass());
    let verdict = kl(&sound, &prompts).unwrap().verdict;
    assert_eq!(verdict.outcome(), Outcome::Fail);
    assert!(verdict.to_string().contains("long_00: KL median"), "{verdict}");
}

/// Any prompt alone passes on a sound device: `verify` takes any.
#[rstest]
fn every_prompt_passes_alone(
    #[values("tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3")] model: &str,
    #[values("emu", "emu_npu2")] device: &str,
) {
    let bench = Bench::shared(model, device).unwrap();
    for id in bench.prompts().to_vec() {
        let alone = std::slice::from_ref(&id);
        let verdict = kl(&bench, alone).unwrap().verdict.and(agreement(&bench, alone).unwrap());
        assert!(verdict.is_pass(), "{id}: {verdict}");
    }
}

/// Both lowerings of a QKV bias pass phases 2 and 3; without the bias nothing does.
#[rstest]
#[case::device(PlanOptions::default())]
#[case::host(rewrite::Rewrite::BiasHost.options(&Subject::shared("tiny_qwen2").unwrap().config).unwrap())]
fn either_lowering_of_a_bias_passes(#[case] options: PlanOptions) {
    let subject = Subject::shared("tiny_qwen2").unwrap();
    let outline = subject.outline().unwrap();
    let bench = Bench::new(subject, "emu", &outline.prompts, options).unwrap();
    let verdict = rewrite::gates(&bench, &outline.prompts, &outline.lens).unwrap();
    assert!(verdict.is_pass(), "{verdict}");
}

#[test]
fn a_forgotten_bias_fails() {
    let prompts = ids(&["base_00", "chat_00"]);
    let bench = bench("tiny_qwen2", &prompts, |config| config.qkv_bias = false);
    assert_eq!(rewrite::gates(&bench, &prompts, &prompts).unwrap().outcome(), Outcome::Fail);
}

#[test]
fn every_workaround_has_its_case() {
    let names = |model: &str| {
        let outline = Subject::shared(model).unwrap().outline().unwrap();
        rewrite::cases(&outline).into_iter().map(|case| case.name).collect::<Vec<_>>()
    };
    assert_eq!(names("tiny_llama"), ["rewrite::tiny_llama::pad_gqa", "rewrite::tiny_llama::host_attention"]);
    assert_eq!(names("tiny_qwen2").last().unwrap(), "rewrite::tiny_qwen2::bias_host");
}

/// Decode equals prefill at any prompt length, within 1.5 times what HF itself differs by.
#[rstest]
fn decode_equals_prefill(#[values("tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3")] model: &str) {
    let bench = Bench::shared(model, "emu").unwrap();
    let limit = decode::limits(&bench).unwrap().0;
    assert!(limit > 0.0 && limit < 0.1, "{limit}");
    let text = decode::text(&bench, 700).unwrap();
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let lengths = prop_oneof![3 => 1usize..40, 1 => 40usize..640];
    let result = TestRunner::new(config).run(&(lengths, 1usize..4), |(len, steps)| {
        let distances = bench.with_runner(|r| decode::distances(r, &text, (len, len + steps)));
        for (step, distance) in distances.unwrap().into_iter().enumerate() {
            prop_assert!(distance <= limit, "{len} tokens, step {step}: {distance} > {limit}");
        }
        Ok(())
    });
    result.unwrap();
}

/// What a device does that forgets the row of the cache it has just computed.
struct Drift;

impl Hook for Drift {
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        if cx.plan.stage == Stage::Decode && cx.step.name == "l00.v_proj" {
            let buffer = cx.step.tap("v").expect("v is tapped");
            let mut row = cx.read(buffer)?;
            row.fill(bf16::ZERO);
            cx.write(buffer, &row)?;
        }
        Ok(())
    }
}

#[test]
fn a_decode_that_is_not_the_prefill_fails() {
    let bench = bench("tiny_mistral", &ids(&["base_00", "long_00"]), |_| {});
    assert!(decode::case(&bench).unwrap().verdict.is_pass());
    let add = |runner: &mut crate::runner::NpuRunner| {
        runner.add_hook(Arc::new(Mutex::new(Drift)));
        Ok(())
    };
    bench.with_runner(add).unwrap();
    let verdict = decode::case(&bench).unwrap().verdict;
    assert_eq!(verdict.outcome(), Outcome::Fail, "{verdict}");
}
