//! A profile accounts for all of a run, once.

use rstest::rstest;

use super::*;

#[rstest]
fn every_launch_is_in_one_line_and_the_lines_add_up(#[values("tiny_llama", "tiny_qwen3")] model: &str) {
    let subject = Subject::shared(model).unwrap();
    let (_, ids) = subject.raw_ids("The capital of France is").unwrap();
    let found = profile(&subject, "emu", &PlanOptions::default(), [Tuning::default(); 2], &ids, 6).unwrap();
    assert!(found.verdict.is_pass(), "{}", found.verdict);
    assert_eq!((found.prefill.wall_ms.len(), found.decode.wall_ms.len()), (RUNS, 5 * RUNS));
    let layers = subject.config.num_hidden_layers as f64;
    for half in [&found.prefill, &found.decode] {
        for lines in [&half.sites, &half.kernels, &half.dispatches] {
            let ms: f64 = lines.iter().map(|line| line.ms).sum();
            assert!((ms - half.device_ms).abs() < 1e-6 * half.device_ms, "{ms} of {}", half.device_ms);
            let flops = |lines: &[Line]| lines.iter().map(|line| line.flops).sum::<f64>();
            assert!((flops(lines) / flops(&half.sites) - 1.0).abs() < 1e-9);
        }
        for site in ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] {
            let line = half.sites.iter().find(|line| line.name == site).unwrap();
            assert!((line.calls - layers).abs() < 1e-9 && line.ms > 0.0, "{line:?}");
        }
        assert!((half.sites.iter().find(|line| line.name == "lm_head").unwrap().calls - 1.0).abs() < 1e-9);
        let host: f64 = half.host.iter().map(|line| line.ms).sum();
        assert!((host - half.host_ms).abs() < 1e-6 * half.host_ms.max(1.0));
        // Within the same runs, so that nothing is left out or counted twice; the clock itself ticks in microseconds.
        assert!(half.between_ms > -0.002, "{}", half.between_ms);
    }
    assert!(found.prefill.sites.iter().any(|line| line.name == "attention"));
    let attention = found.decode.host.iter().find(|line| line.name == "attention").unwrap();
    assert!((attention.calls - layers).abs() < 1e-9);
    // Five steps behind the prompt: the third finds two more positions than the first, and its own.
    let config = &subject.config;
    let seen = (ids.len() + 3) as f64;
    let (q, kv) = ((config.num_attention_heads * config.head_dim) as f64, config.kv_dim() as f64);
    let work = attention.work.unwrap();
    let same =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9, "{found}, expected {expected}");
    same(work.flops, 4.0 * layers * seen * q);
    same(work.bytes_read, 2.0 * layers * (2.0 * seen * kv + q));
    let append = |half: &HalfProfile| half.host.iter().find(|line| line.name == "kv_append").unwrap().work.unwrap();
    same(append(&found.prefill).bytes_written, 4.0 * layers * kv * ids.len() as f64);
    same(append(&found.decode).bytes_written, 4.0 * layers * kv);
    let ceilings = found.ceilings.unwrap();
    assert!(ceilings.gflops > 0.0 && ceilings.gbytes > 0.0);
}

/// Launches of a merged dispatch are timed apart, and the dispatches are those that are deployed.
#[test]
fn call_sites_of_merged_dispatches_are_timed_apart() {
    let subject = Subject::shared("tiny_llama").unwrap();
    let (_, ids) = subject.raw_ids("The capital of France is").unwrap();
    let merged = Tuning { merge: true, ..Tuning::default() };
    let found = profile(&subject, "emu", &PlanOptions::default(), [merged; 2], &ids, 3).unwrap();
    assert!(found.verdict.is_pass(), "{}", found.verdict);
    // Two steps: their mean lies between two positions.
    let flops = found.decode.host.iter().find(|line| line.name == "attention").unwrap().work.unwrap().flops;
    let of_a_position = 4.0 * (subject.config.num_hidden_layers * subject.config.q_dim()) as f64;
    assert!((flops / of_a_position - (ids.len() as f64 + 1.5)).abs() < 1e-6, "{flops}");
    for half in [&found.prefill, &found.decode] {
        assert!(half.sites.iter().all(|line| !line.name.contains('+')), "{:?}", half.sites);
        assert!(half.dispatches.iter().any(|line| line.kernel.contains('+')), "{:?}", half.dispatches);
    }
}
