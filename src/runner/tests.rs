//! The production runner on the embedded checkpoints: prefill and decode tell one story, whatever the padding.

use std::path::Path;
use std::sync::{Arc, Mutex};

use half::bf16;
use rstest::rstest;

use super::{Hook, NpuRunner, Runner, RunnerOptions, StepContext, TapRequest, argmax, free_run};
use crate::compute::{Isa, Pool};
use crate::device::emu::EmuDevice;
use crate::error::Result;
use crate::model::{Checkpoint, ModelConfig};
use crate::plan::{Op, PlanOptions};

fn runner(model: &str, options: &RunnerOptions) -> NpuRunner {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(model).join("checkpoint");
    let (config, _) = ModelConfig::from_file(&dir).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let pool = Arc::new(Pool::new(2));
    let isa = Isa::detect();
    let device = Box::new(EmuDevice::new(isa, pool.clone()));
    NpuRunner::new(config, checkpoint, device, (pool, isa), options).unwrap()
}

fn options(buckets: &[usize]) -> RunnerOptions {
    let plan = PlanOptions::default();
    RunnerOptions { buckets: buckets.into(), max_positions: 200, plan, poison: true }
}

fn ids(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + 11) % 1000).collect()
}

/// One kernel arithmetic for both halves: the next position's logits do not depend on how they were reached.
#[rstest]
fn decode_equals_prefill_bit_for_bit(
    #[values("tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3")] model: &str,
    #[values(1, 15, 16, 17, 127)] len: usize,
) {
    let mut r = runner(model, &options(&[16, 32, 128, 200]));
    let ids = ids(len + 2);
    r.prefill(&ids[..len]).unwrap();
    r.decode_step(ids[len], len).unwrap();
    let decoded = r.decode_step(ids[len + 1], len + 1).unwrap();
    let prefilled = r.prefill(&ids).unwrap();
    assert!(prefilled.iter().all(|x| x.is_finite()));
    assert_eq!(decoded, prefilled);
}

/// Positions behind the prompt never influence it, although they hold real tokens' work.
#[rstest]
fn padding_changes_nothing(#[values("tiny_llama", "tiny_qwen3")] model: &str) {
    let ids = ids(13);
    let logits = |bucket| runner(model, &options(&[bucket])).prefill(&ids).unwrap();
    assert_eq!(logits(16), logits(160));
}

#[test]
fn an_earlier_prompt_leaves_no_trace() {
    let mut r = runner("tiny_llama", &options(&[64]));
    let fresh = r.prefill(&ids(5)).unwrap();
    r.prefill(&ids(50)).unwrap();
    r.decode_step(3, 50).unwrap();
    assert_eq!(r.prefill(&ids(5)).unwrap(), fresh);
}

/// The gates run teacher-forced; up to the first divergence that is the same run as a free one.
#[test]
fn a_free_run_equals_the_forced_argmax_up_to_the_first_divergence() {
    let mut r = runner("tiny_llama", &options(&[16]));
    let prompt = ids(9);
    let mut free = vec![];
    free_run(&mut r, &prompt, 12, |id| {
        free.push(id);
        true
    })
    .unwrap();
    let mut teacher = free.clone();
    teacher[6] = (teacher[6] + 1) % 1000;
    let forced = r.record(&prompt, &teacher, 12, &TapRequest::default()).unwrap();
    let chosen: Vec<u32> = forced.logits.rows().into_iter().map(|row| argmax(&row.to_vec()).unwrap()).collect();
    assert_eq!(chosen[..7], free[..7]);
    assert_ne!(forced.logits.row(7), {
        let own = r.record(&prompt, &free, 12, &TapRequest::default()).unwrap();
        own.logits.row(7).to_owned()
    });
}

/// CPU fallback changes the placement of work, never its result.
#[rstest]
#[case("attention")]
#[case("gemm_bf16")]
#[case("rope")]
fn a_kernel_on_the_host_gives_the_same_bits(#[case] kernel: &str) {
    let ids = ids(9);
    let device = runner("tiny_qwen2", &options(&[16])).prefill(&ids).unwrap();
    let mut moved = options(&[16]);
    moved.plan.host = vec![kernel.into()];
    let mut host = runner("tiny_qwen2", &moved);
    assert_eq!(host.prefill(&ids).unwrap(), device);
    let per_layer = host.prefill_plan(9).unwrap();
    assert!(per_layer.steps.iter().filter(|s| matches!(s.op, Op::Dispatch(_))).count() > per_layer.dispatches());
}

/// Setup happens once: prefill and decode allocate and upload nothing but inputs.
#[test]
fn runs_after_setup_create_and_upload_nothing() {
    let mut r = runner("tiny_llama", &options(&[16]));
    let before = r.counters();
    r.prefill(&ids(9)).unwrap();
    r.decode_step(1, 9).unwrap();
    let spent = r.counters().since(before);
    assert_eq!((spent.buffers_created, spent.static_uploads), (0, 0));
    let planned: u64 = r.plans().map(|p| p.dispatches() as u64).sum();
    assert_eq!(spent.dispatches, planned);
}

struct Corrupt;

impl Hook for Corrupt {
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        if let (Some(1), Some(tap)) = (cx.step.layer, cx.step.tap)
            && tap.name == "down"
        {
            let mut content = cx.read(tap.buffer)?;
            content.fill(bf16::NAN);
            cx.write(tap.buffer, &content)?;
        }
        Ok(())
    }
}

#[test]
fn a_hook_can_corrupt_a_buffer_and_the_taps_show_where() {
    let mut r = runner("tiny_llama", &options(&[16]));
    r.add_hook(Arc::new(Mutex::new(Corrupt)));
    let request = TapRequest { layer_positions: vec![0, 8], tap_positions: vec![3], kv_positions: vec![0, 9] };
    let record = r.record(&ids(9), &[1, 2], 3, &request).unwrap();
    let bad: Vec<bool> = (0..4).map(|l| record.taps[&format!("l{l:02}.output")].iter().any(|x| x.is_nan())).collect();
    assert_eq!(bad, [false, true, true, true]);
    assert_eq!(argmax(&record.logits.row(0).to_vec()), None);
    assert_eq!(record.taps["l00.k_cache"].dim(), (2, 128));
    assert_eq!(record.taps["l00.q"].dim(), (1, 512));
    assert_eq!(record.taps["final_norm"].dim(), (2, 128));
}

#[test]
fn bad_requests_are_errors() {
    let mut r = runner("tiny_llama", &options(&[16]));
    assert!(r.prefill(&[]).is_err());
    assert!(r.prefill(&ids(17)).is_err());
    assert!(r.prefill(&[1024]).is_err());
    r.prefill(&ids(3)).unwrap();
    assert!(r.decode_step(1, 5).is_err(), "a gap in the cache");
    assert!(r.record(&ids(3), &[], 2, &TapRequest::default()).is_err());
}
