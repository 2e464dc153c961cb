//! A profile accounts for all of a run, once.

use rstest::rstest;

use super::*;

#[rstest]
fn every_launch_is_in_one_line_and_the_lines_add_up(#[values("tiny_llama", "tiny_qwen3")] model: &str) {
    let subject = Subject::shared(model).unwrap();
    let (_, ids) = subject.raw_ids("The capital of France is").unwrap();
    let found = profile(&subject, "emu", &PlanOptions::default(), &ids, 6).unwrap();
    assert!(found.verdict.is_pass(), "{}", found.verdict);
    assert_eq!((found.prefill.wall_ms.len(), found.decode.wall_ms.len()), (RUNS, 5 * RUNS));
    let layers = subject.config.num_hidden_layers as f64;
    for half in [&found.prefill, &found.decode] {
        for lines in [&half.sites, &half.kernels, &half.dispatches] {
            let ms: f64 = lines.iter().map(|line| line.ms).sum();
            assert!((ms - half.device_ms).abs() < 0.5 * half.device_ms, "{ms} of {}", half.device_ms);
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
    }
    assert!(found.prefill.sites.iter().any(|line| line.name == "attention"));
    let attention = found.decode.host.iter().find(|line| line.name == "attention").unwrap();
    assert!((attention.calls - layers).abs() < 1e-9);
    let ceilings = found.ceilings.unwrap();
    assert!(ceilings.gflops > 0.0 && ceilings.gbytes > 0.0);
}
