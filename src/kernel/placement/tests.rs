//! The rules against everything that is known of the hardware.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::kernel::{Dtype, Epsilon};

fn point(values: &[(&str, i64)]) -> Point {
    values.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
}

fn gemm(m: i64, k: i64, n: i64) -> Point {
    point(&[("M", m), ("K", k), ("N", n)])
}

fn rules(placement: Placement) -> Vec<String> {
    match placement {
        Placement::Fits(proposals) => panic!("{proposals:?}"),
        Placement::Unplaceable(killers) => killers.into_iter().map(|k| k.rule).collect(),
    }
}

fn proposals(placement: Placement) -> Vec<Proposal> {
    match placement {
        Placement::Fits(proposals) => proposals,
        Placement::Unplaceable(killers) => panic!("{killers:?}"),
    }
}

fn sum(of: impl Fn(&KernelCensus) -> usize) -> usize {
    census().unwrap().iter().map(of).sum()
}

#[test]
fn every_known_config_is_judged_as_the_hardware_did() {
    let wrong: Vec<String> = census().unwrap().into_iter().flat_map(|c| c.wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!((sum(|c| c.measured), sum(|c| c.measured_accepted)), (211, 211));
    assert_eq!((sum(|c| c.known_good), sum(|c| c.known_good_accepted)), (27, 27));
    let rejected =
        (sum(|c| c.rejected_by_stated_rule), sum(|c| c.rejected_by_inferred_rule), sum(|c| c.rejected_by_record));
    assert_eq!(sum(|c| c.known_bad), 36);
    assert_eq!(rejected, (9, 23, 4));
}

/// Each rejecting rule, hard or inferred, is held by every measured row on its own.
#[test]
fn every_measured_row_holds_every_rejecting_constraint() {
    for facts in facts::all().unwrap() {
        for row in &facts.measured {
            let judgement = judge_row(facts, row).unwrap();
            assert!(judgement.accepted.is_some(), "{}: {:?}: {:?}", facts.id, row.shape, judgement.killers);
            // What stays unchecked reads only what a caller must give.
            for id in &judgement.unchecked {
                let constraint = facts.constraints.iter().find(|c| c.id == *id).unwrap();
                let reads = constraint.expr.as_ref().unwrap().reads();
                assert!(reads.iter().any(|r| facts.variables.given.iter().any(|g| g.name == *r)), "{}: {id}", facts.id);
            }
        }
    }
}

/// What an inferred rule rejects is exactly what the facts say it explains.
#[test]
fn the_parity_rule_explains_the_eleven_wrong_gemms() {
    let facts = facts::of("gemm_bf16_bf16").unwrap();
    let wrong = facts.known_bad.iter().filter(|b| b.outcome == facts::Failure::WrongNumbers);
    let mut explained = 0;
    for bad in wrong {
        let query = known(&bad.shape, None, bad.config.clone(), false);
        let killers = killers(facts, &query).unwrap();
        assert_eq!(
            killers.iter().map(|k| (k.rule.as_str(), k.inferred)).collect::<Vec<_>>(),
            [("pingpong_parity", true)]
        );
        explained += 1;
    }
    assert_eq!(explained, 11);
}

#[test]
fn a_rule_is_checked_once_what_it_reads_is_given() {
    let facts = facts::of("gemm_bf16_bf16").unwrap();
    let row = &facts.measured[0];
    let with = |value: i64| {
        let mut config = exactly(&row.config);
        config.extend(
            [("DIM_M", row.config["tile_m"]), ("DIM_K", row.config["tile_k_l1"]), ("DIM_N", value)]
                .map(|(name, value)| (name.to_owned(), Wanted::Exactly(value))),
        );
        judge(facts, &known(&row.shape, row.method.as_deref(), config, true)).unwrap()
    };
    assert!(with(row.config["tile_n"]).accepted.is_some());
    let stale = with(row.config["tile_n"] * 2);
    assert_eq!(stale.killers.iter().map(|k| k.rule.as_str()).collect::<Vec<_>>(), ["link_contract"]);
}

#[rstest]
// In one piece, 151936 = 2^7 * 1187 rows repeat too often for a push queue.
#[case("gemv_bf16", point(&[("M", 151936), ("K", 896)]), &["outer_repeat"])]
#[case("gemv_bf16", point(&[("M", 576), ("K", 100)]), &["k_vec"])]
#[case("gemm_bf16_bf16", gemm(100, 64, 64), &["m_div"])]
#[case("rope", point(&[("rows", 64), ("head_dim", 40)]), &["vec"])]
#[case("rms_norm", point(&[("M", 8), ("N", 100)]), &["vec"])]
#[case("add", point(&[("N", 100)]), &["no_candidate"])]
#[case("matvec_swiglu_rms", point(&[("M", 8192), ("K", 3072)]), &["emb_limit"])]
fn what_kills_a_shape_is_named(#[case] id: &str, #[case] shape: Point, #[case] killers: &[&str]) {
    assert_eq!(rules(place(facts::of(id).unwrap(), &shape, None, 3).unwrap()), killers);
}

#[test]
fn attention_needs_heads_of_a_known_width() {
    let kernel = |seq, head_dim| Kernel::Attention { seq, heads: 4, kv_heads: 2, head_dim, causal: true };
    let assessed = assess(&kernel(2048, 32), None).unwrap();
    assert!(matches!(assessed.status, RegistryStatus::Unplaceable { .. }));
    assert!(matches!(assess(&kernel(512, 64), None).unwrap().status, RegistryStatus::Unmeasured { .. }));
}

#[rstest]
#[case("gemm_bf16_bf16", gemm(2048, 2048, 2048))]
#[case("gemm_bf16_bf16", gemm(64, 720, 960))]
#[case("gemm_bf16_f32", gemm(2048, 8192, 2048))]
#[case("gemv_bf16", point(&[("M", 2048), ("K", 11008)]))]
#[case("add", point(&[("N", 245760)]))]
#[case("rope", point(&[("rows", 65536), ("head_dim", 64)]))]
fn the_first_proposal_for_a_measured_shape_is_a_measured_config(#[case] id: &str, #[case] shape: Point) {
    let facts = facts::of(id).unwrap();
    let first = proposals(place(facts, &shape, None, 1).unwrap()).remove(0);
    let same = |row: &&Row| {
        row.shape == shape
            && row.method == first.method
            && row.config.iter().all(|(name, value)| first.config.get(name) == Some(value))
    };
    assert!(facts.measured.iter().any(|row| same(&row)), "{first:?}");
    assert_eq!(first.neighbour.as_deref(), Some(facts.name_shape(&shape).as_str()));
}

/// A measured config of the very shape comes first, however many tiles it leaves idle.
#[test]
fn measured_configs_come_first() {
    for facts in facts::all().unwrap() {
        for row in facts.measured.iter().filter(|r| r.best || r.tier.is_none()) {
            let first = proposals(place(facts, &row.shape, row.tier, 1).unwrap()).remove(0);
            assert_eq!(first.distance, 0.0, "{}: {:?}: {first:?}", facts.id, row.shape);
        }
    }
}

/// SmolLM2-135M's shapes, none of which is measured.
#[rstest]
#[case(gemm(128, 576, 1536))]
#[case(gemm(128, 1536, 576))]
#[case(gemm(512, 576, 192))]
fn an_unmeasured_shape_gets_configs_that_break_no_rule(#[case] shape: Point) {
    let facts = facts::of("gemm_bf16_bf16").unwrap();
    let found = proposals(place(facts, &shape, Some(Tier::High), 4).unwrap());
    assert!(!found.is_empty() && found[0].tiles == Some(32), "{found:?}");
    for p in found {
        let again = judge(facts, &known(&shape, p.method.as_deref(), exactly(&p.config), true)).unwrap();
        assert!(again.accepted.is_some() && p.method.as_deref() != Some("direct"), "{p:?}");
    }
}

#[test]
fn a_proposal_never_repeats_a_recorded_failure() {
    let facts = facts::of("gemm_bf16_bf16").unwrap();
    let found = proposals(place(facts, &gemm(2048, 1024, 1024), Some(Tier::High), 500).unwrap());
    assert!(found.iter().all(|p| p.method.as_deref() == Some("drain")));
}

#[test]
fn guidelines_warn_and_do_not_reject() {
    let facts = facts::of("gemm_bf16_bf16").unwrap();
    let first = proposals(place(facts, &gemm(2048, 2048, 8192), Some(Tier::High), 1).unwrap()).remove(0);
    assert_eq!(first.warnings, ["bd_stride"]);
}

#[rstest]
#[case(Kernel::Gemm { m: 2048, k: 2048, n: 2048, out: Dtype::Bf16 }, Some(32), None)]
#[case(Kernel::Gemm { m: 64, k: 720, n: 960, out: Dtype::Bf16 }, Some(16), Some("no config with 32 tiles fits: m_div"))]
#[case(Kernel::RmsNorm { rows: 1, cols: 64, eps: Epsilon::new(1e-5) }, Some(1), Some("batch 1: one row runs on one tile"))]
#[case(Kernel::Rope { rows: 9, head_dim: 64 }, Some(3), Some("no config with 8 tiles fits: rows"))]
#[case(Kernel::Attention { seq: 2048, heads: 32, kv_heads: 8, head_dim: 64, causal: true }, Some(32), None)]
fn tiles_and_why_there_are_not_more(#[case] kernel: Kernel, #[case] tiles: Option<i64>, #[case] why: Option<&str>) {
    let assessed = assess(&kernel, None).unwrap();
    assert_eq!((assessed.tiles, assessed.shortfall.as_deref()), (tiles, why));
}

#[rstest]
#[case(gemm(0, 64, 64))]
#[case(gemm(-5, 64, 64))]
#[case(gemm(i64::MAX, 64, 64))]
#[case(point(&[("M", 64)]))]
#[case(point(&[("M", 64), ("K", 64), ("N", 64), ("X", 1)]))]
fn no_shape_at_all_is_refused(#[case] shape: Point) {
    let error = place(facts::of("gemm_bf16_bf16").unwrap(), &shape, None, 1).unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_shape_is_placed_or_has_a_reason(m in 1i64..3000, k in 1i64..3000, n in 1i64..3000) {
        for (id, shape) in [("gemv_bf16", point(&[("M", m), ("K", k)])), ("add", point(&[("N", m * n)])), ("gemm_bf16_f32", gemm(m, k, n))] {
            match place(facts::of(id).unwrap(), &shape, None, 2).unwrap() {
                Placement::Fits(found) => prop_assert!(!found.is_empty()),
                Placement::Unplaceable(killers) => prop_assert!(!killers.is_empty(), "{id} {shape:?}"),
            }
        }
    }
}

#[test]
fn a_plan_is_refused_by_the_shapes_that_no_config_fits() {
    let fits = Kernel::Gemv { m: 2048, k: 2048 };
    let kernels = [fits.clone(), Kernel::Gemv { m: 151_936, k: 1024 }];
    assert_eq!(refuse([&fits]).unwrap(), None);
    let why = refuse(&kernels).unwrap().unwrap();
    assert!(why.starts_with("gemv_bf16 at M=151936 K=1024: outer_repeat") && !why.contains("M=2048"), "{why}");
}
