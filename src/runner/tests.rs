//! The production runner on the embedded checkpoints: prefill and decode tell one story, whatever the padding.

use std::path::Path;
use std::sync::{Arc, Mutex};

use half::bf16;
use rstest::rstest;

use super::{
    Alteration, Clock, Forced, Hook, NpuRunner, Runner, RunnerOptions, StepContext, TapRequest, argmax, free_run,
};
use crate::compute::{Isa, Pool};
use crate::device::emu::EmuDevice;
use crate::device::{Arithmetic, Role};
use crate::error::Result;
use crate::model::{Checkpoint, ModelConfig, Weights};
use crate::plan::{BiasLowering, BufferId, Op, Tuning};

fn runner(model: &str, options: &RunnerOptions) -> NpuRunner {
    runner_of(model, Arithmetic::Ieee, options)
}

fn runner_of(model: &str, arithmetic: Arithmetic, options: &RunnerOptions) -> NpuRunner {
    let (config, checkpoint, device, host) = parts(model, arithmetic);
    NpuRunner::new(config, checkpoint, device, host, options).unwrap()
}

type Parts = (ModelConfig, Arc<Checkpoint>, Box<EmuDevice>, (Arc<Pool>, Isa));

fn parts(model: &str, arithmetic: Arithmetic) -> Parts {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(model).join("checkpoint");
    let (config, _) = ModelConfig::from_file(&dir).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let pool = Arc::new(Pool::new(2));
    let isa = Isa::detect();
    let device = Box::new(EmuDevice::new(isa, pool.clone(), arithmetic));
    (config, checkpoint, device, (pool, isa))
}

/// With the first layer only.
fn shallow(model: &str, options: &RunnerOptions) -> NpuRunner {
    struct Shallow;
    impl Alteration for Shallow {
        fn config(&self, config: &mut ModelConfig) {
            config.num_hidden_layers = 1;
        }
    }
    let (config, checkpoint, device, host) = parts(model, Arithmetic::Ieee);
    NpuRunner::altered(config, checkpoint, device, host, options, &Shallow).unwrap()
}

fn options(buckets: &[usize]) -> RunnerOptions {
    RunnerOptions { buckets: buckets.into(), ..RunnerOptions::for_prompts([200], 0, 200) }
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

/// Looks at nothing, but might: every row is computed.
struct Onlooker;

impl Hook for Onlooker {
    fn after_step(&mut self, _: &mut StepContext<'_>) -> Result<()> {
        Ok(())
    }
}

/// Positions behind the prompt never influence it: neither real tokens' work, as an onlooker has it done, nor NaN.
#[rstest]
fn padding_changes_nothing(#[values("tiny_llama", "tiny_qwen3")] model: &str, #[values(false, true)] watched: bool) {
    let ids = ids(13);
    let logits = |bucket| {
        let mut runner = runner(model, &options(&[bucket]));
        if watched {
            runner.add_hook(Arc::new(Mutex::new(Onlooker)));
        }
        runner.prefill(&ids).unwrap()
    };
    assert_eq!(logits(16), logits(160));
}

/// What nobody reads is not computed, and nobody sees a difference: logits, cache, counters and the steps after it.
#[rstest]
fn a_run_that_nobody_looks_into_leaves_what_a_watched_one_leaves(
    #[values("tiny_llama", "tiny_mistral", "tiny_qwen2", "tiny_qwen3")] model: &str,
    #[values(Arithmetic::Ieee, Arithmetic::Npu2)] arithmetic: Arithmetic,
    #[values(BiasLowering::Device, BiasLowering::Host)] bias: BiasLowering,
    #[values(&[], &["attention"], &["silu_mul"], &["gemm_bf16"])] host: &[&str],
) {
    let off = Tuning::default();
    for tuning in [off, Tuning { merge: true, ..off }, Tuning { share: true, ..off }, Tuning::BASELINE] {
        let mut options = RunnerOptions { prefill: tuning, ..RunnerOptions::for_prompts([16, 64, 320], 1, 400) };
        options.plan.bias = bias;
        options.plan.host = host.iter().map(|what| (*what).to_owned()).collect();
        let mut run = runner_of(model, arithmetic, &options);
        // The longest first: what it leaves behind must not show. Beyond one block of keys, and of queries.
        let long = [320, 257, 200, 129].into_iter().filter(|_| arithmetic == Arithmetic::Ieee);
        for len in long.chain([64, 63, 17, 16, 1]) {
            let mut leave = |watched: bool| {
                let before = run.counters();
                let hook: super::SharedHook = match watched {
                    true => Arc::new(Mutex::new(Onlooker)),
                    false => Arc::new(Mutex::new(Clock::default())),
                };
                let logits = run.with_hook(hook, |run| run.prefill(&ids(len)).unwrap());
                let rows: Vec<_> = (0..run.kv().layers()).map(|layer| run.kv().rows(layer)).collect();
                let next = run.decode_step(5, len).unwrap();
                (logits, rows, next, run.counters().since(before))
            };
            let (cut, whole) = (leave(false), leave(true));
            assert!(whole.0.iter().all(|x| x.is_finite()));
            assert!(cut == whole, "{tuning:?}: {len} tokens");
        }
    }
}

/// Looks on without asking for rows, to see which are there.
#[derive(Default)]
struct Spy(Vec<(String, usize)>);

impl Hook for Spy {
    /// How many rows of each launch's output are no NaN.
    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        for launch in cx.step.launches() {
            let out = launch.output().expect("every launch has one");
            if cx.plan.buffer(out).spec.role == Role::Intermediate {
                let (content, cols) = (cx.read(out)?, cx.plan.buffer(out).spec.cols);
                let there = content.chunks(cols).filter(|row| row.iter().all(|x| !x.is_nan())).count();
                self.0.push((launch.name.clone(), there));
            }
        }
        Ok(())
    }

    fn reads_rows(&self) -> bool {
        false
    }
}

/// Rows that nobody needs are not computed: whatever read one would read NaN.
#[test]
fn rows_that_nobody_needs_are_not_there() {
    // One layer, so that nothing is left of the layer before.
    let mut runner = shallow("tiny_llama", &options(&[16]));
    let spy = Arc::new(Mutex::new(Spy::default()));
    runner.with_hook(spy.clone(), |runner| runner.prefill(&ids(11)).unwrap());
    let found = std::mem::take(&mut spy.lock().unwrap().0);
    assert_eq!(found.len(), 14);
    // The second norm is written where the first one was.
    let of_kv = ["l00.input_layernorm", "l00.post_attention_layernorm", "l00.k_proj", "l00.v_proj", "l00.k_rope"];
    for (launch, there) in &found {
        assert_eq!(*there, if of_kv.contains(&launch.as_str()) { 11 } else { 1 }, "{launch}: {found:?}");
    }
    // An onlooker has them all.
    runner.add_hook(Arc::new(Mutex::new(Onlooker)));
    runner.with_hook(spy.clone(), |runner| runner.prefill(&ids(11)).unwrap());
    assert!(spy.lock().unwrap().0.iter().all(|(_, there)| *there == 16));
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
    free_run(&mut r, &prompt, 12, &[], |id| {
        free.push(id);
        true
    })
    .unwrap();
    let mut teacher = free.clone();
    teacher[6] = (teacher[6] + 1) % 1000;
    let forced = r.record(&prompt, &teacher, 12, &TapRequest::default()).unwrap();
    let chosen: Vec<u32> = forced.logits.rows().into_iter().map(|row| argmax(&row.to_vec(), &[]).unwrap()).collect();
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
        if let (Some(1), Some(down)) = (cx.step.layer, cx.step.tap("down")) {
            let mut content = cx.read(down)?;
            content.fill(bf16::NAN);
            cx.write(down, &content)?;
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
    assert_eq!(argmax(&record.logits.row(0).to_vec(), &[]), None);
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

/// A checkpoint of random weights with these heads, written to disk.
fn synthetic(architecture: &str, (hidden, heads, kv_heads): (usize, usize, usize)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let json = serde_json::json!({
        "architectures": [format!("{architecture}ForCausalLM")], "model_type": architecture.to_lowercase(),
        "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 1000, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    });
    let config_path = dir.path().join("config.json");
    std::fs::write(&config_path, json.to_string()).unwrap();
    let (config, _) = ModelConfig::from_file(&config_path).unwrap();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = config
        .tensors()
        .into_iter()
        .map(|t| {
            let norm = t.part.contains("norm");
            let values: Vec<bf16> = (0..t.shape.iter().product())
                .map(|_| bf16::from_f32(if norm { 1.0 + 0.1 * random() } else { 0.1 * random() }))
                .collect();
            (t.name, t.shape, crate::tensor::bytes_of(&values).to_vec())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data).unwrap();
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

fn runner_in(dir: &Path, options: &RunnerOptions) -> NpuRunner {
    let (config, _) = ModelConfig::from_file(dir).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(dir).unwrap());
    let (pool, isa) = (Arc::new(Pool::new(2)), Isa::detect());
    let device = Box::new(EmuDevice::new(isa, pool.clone(), Arithmetic::Ieee));
    NpuRunner::new(config, checkpoint, device, (pool, isa), options).unwrap()
}

/// Phantom heads inside each KV group change no bit, in prefill and in decode.
#[rstest]
#[case::smollm2_135m("Llama", (576, 9, 3), 4)]
#[case::qwen25_0_5b("Qwen2", (896, 14, 2), 8)]
fn gqa_aware_padding_is_bit_identical(
    #[case] architecture: &str,
    #[case] sizes: (usize, usize, usize),
    #[case] group: usize,
) {
    let dir = synthetic(architecture, sizes);
    let run = |pad_gqa| {
        let mut options = options(&[16]);
        options.plan.pad_gqa = pad_gqa;
        let mut r = runner_in(dir.path(), &options);
        let prefill = r.prefill(&ids(11)).unwrap();
        (prefill, r.decode_step(7, 11).unwrap())
    };
    assert_eq!(run(None), run(Some(group)));
}

/// The same phantom heads behind all real ones shift heads into other KV groups, and the logits show it.
#[test]
fn naive_padding_at_the_end_is_not_the_same_model() {
    let dir = synthetic("Llama", (576, 9, 3));
    let plain = runner_in(dir.path(), &options(&[16])).prefill(&ids(11)).unwrap();
    let naive = synthetic("Llama", (576, 9, 3));
    // 12 heads over 3 KV heads; the three phantom ones at the end.
    let config_path = naive.path().join("config.json");
    let text = std::fs::read_to_string(&config_path).unwrap();
    let text = text.replace("\"num_attention_heads\":9", "\"num_attention_heads\":12,\"head_dim\":64");
    std::fs::write(&config_path, text).unwrap();
    pad_at_the_end(naive.path());
    let shifted = runner_in(naive.path(), &options(&[16])).prefill(&ids(11)).unwrap();
    let difference = |a: &[bf16], b: &[bf16]| {
        let (mut error, mut norm) = (0.0, 0.0);
        for (a, b) in a.iter().zip(b) {
            error += (a.to_f32() - b.to_f32()).powi(2);
            norm += b.to_f32().powi(2);
        }
        (error / norm).sqrt()
    };
    assert!(difference(&shifted, &plain) > 0.01, "{}", difference(&shifted, &plain));
}

/// Appends 3 * 64 zero rows to each q_proj and zero columns to each o_proj.
fn pad_at_the_end(dir: &Path) {
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = stored
        .iter()
        .map(|(name, view)| {
            let (rows, cols) = (view.shape()[0], view.shape().get(1).copied().unwrap_or(1));
            let mut data = view.data().to_vec();
            let mut shape = view.shape().to_vec();
            if name.ends_with("q_proj.weight") {
                data.resize((rows + 192) * cols * 2, 0);
                shape[0] += 192;
            } else if name.ends_with("o_proj.weight") {
                data = view.data().chunks(cols * 2).flat_map(|r| [r, &[0; 384]].concat()).collect();
                shape[1] += 192;
            }
            (name.to_owned(), shape, data)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), data).unwrap();
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
}

/// Both lowerings of a bias compute one function: they differ by rounding, not by more.
#[test]
fn a_bias_on_the_host_behind_rope_is_the_same_function() {
    let mut host = options(&[16]);
    host.plan.bias = BiasLowering::Host;
    let run = |options: &RunnerOptions| {
        let mut r = runner("tiny_qwen2", options);
        r.prefill(&ids(11)).unwrap();
        r.decode_step(7, 11).unwrap()
    };
    let (device, host) = (run(&options(&[16])), run(&host));
    let norm: f32 = device.iter().map(|x| x.to_f32().powi(2)).sum();
    let error: f32 = device.iter().zip(&host).map(|(a, b)| (a.to_f32() - b.to_f32()).powi(2)).sum();
    let distance = (error / norm).sqrt();
    assert!(distance > 0.0 && distance < 0.02, "{distance}");
}

/// Every way to carry a plan out: the same bits in logits and taps, and exactly the dispatches and bytes that it is for.
#[rstest]
fn no_tuning_changes_a_bit(
    #[values("tiny_llama", "tiny_qwen2", "tiny_qwen3")] model: &str,
    #[values(BiasLowering::Device, BiasLowering::Host)] bias: BiasLowering,
) {
    let request = TapRequest { layer_positions: vec![0, 8], tap_positions: vec![3, 8], kv_positions: vec![0, 10] };
    let run = |tuning: Tuning| {
        let mut options = RunnerOptions { prefill: tuning, decode: tuning, ..options(&[16]) };
        options.plan.bias = bias;
        let mut r = runner(model, &options);
        r.record(&ids(3), &[5], 2, &TapRequest::default()).unwrap();
        let record = r.record(&ids(9), &[1, 2], 3, &request).unwrap();
        let planned: Vec<u64> = r.plans().map(|p| p.dispatches() as u64).collect();
        assert_eq!(record.counters.dispatches, planned[1] + 2 * planned[0], "{tuning:?}");
        assert_eq!(record.counters.buffers_created, 0, "{tuning:?}");
        record
    };
    let plain = run(Tuning::default());
    let off = Tuning::default();
    for tuning in [
        Tuning::BASELINE,
        Tuning { write_statics: true, ..off },
        Tuning { write_intermediates: true, ..off },
        Tuning { share: true, ..off },
        Tuning { merge: true, ..off },
        Tuning { share: true, merge: true, ..off },
        Tuning { share: true, merge: true, ..Tuning::BASELINE },
    ] {
        let record = run(tuning);
        assert_eq!(record.logits, plain.logits, "{tuning:?}");
        assert!(record.taps.len() > 10 && record.taps == plain.taps, "{tuning:?}");
        let (ours, theirs) = (record.counters, plain.counters);
        assert_eq!(ours.dispatches < theirs.dispatches, tuning.merge, "{tuning:?}");
        assert_eq!(ours.launches, theirs.launches, "{tuning:?}");
        assert_eq!(ours.static_uploads > 0, tuning.write_statics, "{tuning:?}");
        let writes = tuning.write_statics || tuning.write_intermediates;
        assert_eq!(ours.bytes_written > theirs.bytes_written, writes, "{tuning:?}");
    }
}

/// Prompts side by side leave the records they leave alone, counters included, also when lanes are used again, and on either
/// datapath whatever the tuning.
#[rstest]
fn prompts_side_by_side_leave_the_records_they_leave_alone(
    #[values("tiny_llama", "tiny_qwen2", "tiny_qwen3")] model: &str,
    #[values(Arithmetic::Ieee, Arithmetic::Npu2)] arithmetic: Arithmetic,
) {
    let request = TapRequest { layer_positions: vec![0, 8], tap_positions: vec![3], kv_positions: vec![0, 10, 99] };
    let none = TapRequest::default();
    let prompts: Vec<(Vec<u32>, Vec<u32>, &TapRequest)> =
        [(9, &request), (3, &none), (16, &none), (15, &request), (2, &none)]
            .into_iter()
            .enumerate()
            .map(|(i, (len, taps))| (ids(len), ids(20 + i)[16..].to_vec(), taps))
            .collect();
    let off = Tuning::default();
    for tuning in [off, Tuning { share: true, merge: true, ..off }, Tuning::BASELINE] {
        let options = RunnerOptions { prefill: tuning, decode: tuning, ..options(&[16]) };
        let mut runner = runner_of(model, arithmetic, &options);
        let alone: Vec<_> =
            prompts.iter().map(|(ids, teacher, taps)| runner.record(ids, teacher, 4, taps).unwrap()).collect();
        for order in [vec![0, 1, 2, 3, 4], vec![4, 0], vec![2], vec![3, 2, 1]] {
            let wanted: Vec<Forced<'_>> = order
                .iter()
                .map(|&i| Forced { ids: &prompts[i].0, teacher: &prompts[i].1, taps: prompts[i].2 })
                .collect();
            let lanes = runner.lanes_made();
            let together = runner.record_together(&wanted, 4).unwrap();
            for (mut record, &i) in together.into_iter().zip(&order) {
                assert_eq!(record.timing.at_once, order.len(), "{tuning:?}");
                assert_eq!(record.timing.decode_us.len(), 3, "{tuning:?}");
                record.timing = alone[i].timing.clone();
                assert!(record == alone[i], "{tuning:?} {order:?}: prompt {i}");
            }
            assert_eq!(runner.lanes_made(), lanes.max(order.len()), "{tuning:?}");
        }
    }
}

/// A hook sees every step of every prompt: they run one after the other.
#[test]
fn under_a_hook_prompts_do_not_run_side_by_side() {
    let mut runner = runner("tiny_llama", &options(&[16]));
    runner.add_hook(Arc::new(Mutex::new(Clock::default())));
    let (one, taps) = (ids(5), TapRequest::default());
    let forced = Forced { ids: &one, teacher: &[1, 2], taps: &taps };
    let records = runner.record_together(&[forced, forced], 3).unwrap();
    assert!(records.iter().all(|record| record.timing.at_once == 1));
}

#[test]
fn side_by_side_a_bad_request_is_an_error() {
    let mut runner = runner("tiny_llama", &options(&[16]));
    let (one, taps) = (ids(5), TapRequest::default());
    let good = Forced { ids: &one, teacher: &[1, 2], taps: &taps };
    let long = ids(17);
    let beyond = [1, 1 << 20];
    let bad = [
        Forced { teacher: &[1], ..good },
        Forced { teacher: &beyond, ..good },
        Forced { ids: &[], ..good },
        Forced { ids: &long, ..good },
    ];
    for bad in bad {
        assert!(runner.record_together(&[good, bad], 3).is_err(), "{bad:?}");
    }
    assert!(runner.record_together(&[good, good], 0).is_err());
    runner.record_together(&[good, good], 3).unwrap();
}

/// What a dispatch should have written and did not is NaN, also where buffers share memory.
#[test]
fn poison_reaches_shared_memory() {
    struct Look(usize);
    impl Hook for Look {
        fn before_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
            if cx.step.is("l00.q_proj") {
                let plan = cx.plan;
                let written = plan.launches().take_while(|(step, _)| step.name != cx.step.name);
                let homes: Vec<_> = written.filter_map(|(_, l)| l.output()).map(|id| plan.home(id)).collect();
                for (at, _) in plan.buffers.iter().enumerate().filter(|(_, b)| b.lies_in.is_some()) {
                    let id = BufferId(at);
                    if !homes.contains(&plan.home(id)) {
                        self.0 += 1;
                        assert!(cx.read(id)?.iter().all(|x| x.is_nan()), "{}", plan.buffer(id).spec.name);
                    }
                }
            }
            Ok(())
        }
        fn after_step(&mut self, _: &mut StepContext<'_>) -> Result<()> {
            Ok(())
        }
    }
    let tuning = Tuning { share: true, ..Tuning::default() };
    let mut r = runner("tiny_llama", &RunnerOptions { prefill: tuning, decode: tuning, ..options(&[16]) });
    r.prefill(&ids(9)).unwrap();
    let look = Arc::new(Mutex::new(Look(0)));
    r.add_hook(look.clone());
    r.prefill(&ids(9)).unwrap();
    assert!(look.lock().unwrap().0 > 0);
}

/// Notes in which order tensors are taken over.
struct Noted(Checkpoint, Mutex<Vec<(usize, String)>>);

impl Weights for Noted {
    fn bf16(&self, name: &str) -> Result<std::borrow::Cow<'_, [bf16]>> {
        self.0.bf16(name)
    }

    fn release(&self, name: &str) {
        let bytes = self.0.bytes(name).map_or(0, <[u8]>::len);
        self.1.lock().unwrap().push((bytes, name.into()));
    }
}

/// While a tensor is packed it is in memory twice; the largest is so when little else is there yet.
#[test]
fn weights_are_taken_over_once_the_largest_first_and_released() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny_llama/checkpoint");
    let (config, _) = ModelConfig::from_file(&dir).unwrap();
    let weights = Arc::new(Noted(Checkpoint::open(&dir).unwrap(), Mutex::default()));
    let (pool, isa) = (Arc::new(Pool::new(1)), Isa::detect());
    let device = Box::new(EmuDevice::new(isa, pool.clone(), Arithmetic::Ieee));
    NpuRunner::new(config, weights.clone(), device, (pool, isa), &options(&[16, 32])).unwrap();
    let released = weights.1.lock().unwrap().clone();
    assert!(released.is_sorted_by(|a, b| a.0 >= b.0), "{released:?}");
    let names: std::collections::BTreeSet<&str> = released.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names.len(), released.len(), "{released:?}");
    assert!(names.contains("model.layers.1.mlp.down_proj.weight"), "{released:?}");
}
