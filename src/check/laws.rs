//! Laws that hold for every input, and the purity of this room.

use ndarray::{Array1, Array2, ArrayView2, Axis};
use proptest::prelude::*;

use super::agreement::{Agreement, HfTop};
use super::layers::{self, Layer};
use super::logits::{AtTruth, Kl, KlFactors, Truth};
use super::metrics::Metrics;
use super::position_cosine::PositionCosine;
use super::quantile::Summary;
use super::token_set::{STEPS, TOP_K, TokenSet, top_k};
use super::tolerance::{Tier, block};
use super::verdict::Outcome;

const VOCAB: usize = 24;

/// Values on a grid of 1/64, so that adding a whole number to them is exact.
fn grid() -> impl Strategy<Value = f32> {
    (-640i32..640).prop_map(|x| x as f32 / 64.0)
}

fn matrix(rows: usize, columns: usize) -> impl Strategy<Value = Array2<f32>> {
    prop::collection::vec(grid(), rows * columns)
        .prop_map(move |x| Array2::from_shape_vec((rows, columns), x).expect("rows x columns values"))
}

fn pair() -> impl Strategy<Value = (Array2<f32>, Array2<f32>)> {
    (1usize..9, 1usize..40).prop_flat_map(|(r, c)| (matrix(r, c), matrix(r, c)))
}

fn bad() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
}

/// A capture made from full logits: chosen, top ids, their logits, log-sum-exp.
struct Reference {
    chosen: Vec<u32>,
    ids: Array2<u32>,
    logits: Array2<f32>,
    lse: Array1<f32>,
}

impl Reference {
    fn of(logits: ArrayView2<'_, f32>, k: usize) -> Reference {
        let ids: Vec<u32> = logits.outer_iter().flat_map(|row| top_k(row, k).expect("finite")).collect();
        let ids = Array2::from_shape_vec((logits.nrows(), k), ids).expect("k ids a step");
        let at = AtTruth::gather(ids.view(), logits).expect("ids of these logits");
        Reference { chosen: ids.column(0).to_vec(), ids, logits: at.logits, lse: at.lse.mapv(|x| x as f32) }
    }

    fn kl(&self, device: ArrayView2<'_, f32>) -> Kl {
        let truth = Truth { ids: self.ids.view(), logits: self.logits.view(), lse: self.lse.view() };
        Kl::measure(&truth, &AtTruth::gather(self.ids.view(), device).expect("same vocabulary")).expect("same shape")
    }

    fn agreement(&self, device: ArrayView2<'_, f32>) -> Agreement {
        Agreement::compare(&HfTop { ids: self.ids.view(), logits: self.logits.view() }, device)
            .expect("same vocabulary")
    }

    fn token_set(&self, device: ArrayView2<'_, f32>) -> TokenSet {
        TokenSet::compare(&self.chosen, self.ids.view(), device).expect("same vocabulary")
    }

    /// The outcome of each gate over logits, with limits that only a missing figure or a thin extent can break.
    fn outcomes(&self, device: ArrayView2<'_, f32>) -> [Outcome; 2] {
        let floor = Summary::of(&[f64::MAX; STEPS]);
        let all = KlFactors { median: 1.0, p95: Some(1.0), max: Some(1.0) };
        [self.token_set(device).judge().outcome(), self.kl(device).judge(&floor, all, STEPS).outcome()]
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn cosine_does_not_see_a_scale((d, r) in pair(), scale in 1e-3f32..1e3) {
        let (plain, scaled) = (Metrics::measure(d.view(), r.view())?, Metrics::measure((&d * scale).view(), r.view())?);
        prop_assert!((plain.cosine - scaled.cosine).abs() < 1e-6);
        let flipped = Metrics::measure((-&d).view(), r.view())?.cosine;
        prop_assert!((plain.cosine + flipped).abs() < 1e-12 || d.iter().chain(&r).all(|&x| x == 0.0));
    }

    #[test]
    fn order_of_rows_does_not_matter((d, r) in pair(), by in 0usize..9) {
        let order: Vec<usize> = (0..d.nrows()).map(|i| (i + by) % d.nrows()).rev().collect();
        let (d2, r2) = (d.select(Axis(0), &order), r.select(Axis(0), &order));
        let (one, two) = (Metrics::measure(d.view(), r.view())?, Metrics::measure(d2.view(), r2.view())?);
        prop_assert!((one.cosine - two.cosine).abs() < 1e-12 && (one.mean_abs - two.mean_abs).abs() < 1e-9);
        prop_assert_eq!((one.max_abs, one.max_rel), (two.max_abs, two.max_rel));
        let rows = PositionCosine::measure(d.view(), r.view())?.values;
        let moved = PositionCosine::measure(d2.view(), r2.view())?.values;
        prop_assert_eq!(order.iter().map(|&i| rows[i]).collect::<Vec<_>>(), moved);
    }

    #[test]
    fn a_tensor_is_perfect_against_itself((x, _) in pair()) {
        let m = Metrics::measure(x.view(), x.view())?;
        prop_assert!((m.cosine - 1.0).abs() < 1e-12 && m.sqnr_db == f64::INFINITY);
        prop_assert_eq!([m.max_abs, m.mean_abs, m.max_rel, m.mean_rel_l1, m.nmse, m.rel_l2, m.bias], [0.0; 7]);
        prop_assert!(Tier::EXACT.check(x.view(), x.view())?.judge(x.len()).is_pass());
        prop_assert!(block(x.view(), x.view(), 64, x.nrows())?.2.is_pass());
    }

    #[test]
    fn cosines_are_bounded_and_ordered((d, r) in pair()) {
        let c = PositionCosine::measure(d.view(), r.view())?;
        prop_assert!(-1.0 <= c.min && c.min <= c.p5 && c.p5 <= c.median && c.median <= 1.0);
        prop_assert_eq!(c.values[c.min_position], c.min);
    }

    #[test]
    fn a_bad_value_anywhere_fails_every_tensor_gate((d, r) in pair(), at in any::<prop::sample::Index>(), x in bad(), side: bool) {
        let (mut d, mut r) = (d, r);
        let (i, rows) = (at.index(d.len()), d.nrows());
        let place = (i / d.ncols(), i % d.ncols());
        if side { d[place] = x } else { r[place] = x }
        let m = Metrics::measure(d.view(), r.view())?;
        prop_assert_eq!((m.nan_count, m.first_bad), (1, Some(place)));
        prop_assert!(m.cosine.is_nan() && m.max_abs.is_nan() && m.rel_l2.is_nan());
        prop_assert_eq!(block(d.view(), r.view(), 512, rows)?.2.outcome(), Outcome::Fail);
        prop_assert_eq!(Tier::kernel(1e30).check(d.view(), r.view())?.judge(d.len()).outcome(), Outcome::Fail);
        let positions: Vec<u32> = (0..rows as u32).collect();
        let layer = Layer::look(0, &positions, d.view(), r.view(), r.view())?;
        prop_assert_eq!(layers::judge(&[layer], 1, rows).outcome(), Outcome::Fail);
    }

    #[test]
    fn a_bad_logit_anywhere_fails_every_logit_gate(x in matrix(STEPS, VOCAB), step in 0..STEPS, id in 0..VOCAB, value in bad()) {
        let reference = Reference::of(x.view(), 8);
        prop_assert_eq!(reference.outcomes(x.view()), [Outcome::Pass; 2]);
        prop_assert!(reference.agreement(x.view()).judge(STEPS).is_pass());
        let mut device = x;
        device[[step, id]] = value;
        prop_assert_eq!(reference.outcomes(device.view()), [Outcome::Fail; 2]);
        prop_assert_eq!(reference.agreement(device.view()).judge(STEPS).outcome(), Outcome::Fail);
    }

    #[test]
    fn a_truncated_run_is_vacuous(x in matrix(STEPS, VOCAB), steps in 0..STEPS) {
        let reference = Reference::of(x.view(), 8);
        let part = x.slice(ndarray::s![..steps, ..]);
        prop_assert_eq!(reference.outcomes(part), [Outcome::Vacuous; 2]);
        prop_assert_eq!(reference.agreement(part).judge(STEPS).outcome(), Outcome::Vacuous);
    }

    #[test]
    fn mutual_inclusion_is_symmetric(x in matrix(STEPS, VOCAB), y in matrix(STEPS, VOCAB)) {
        let (there, back) = (Reference::of(x.view(), TOP_K).token_set(y.view()), Reference::of(y.view(), TOP_K).token_set(x.view()));
        prop_assert_eq!(there.judge().outcome(), back.judge().outcome());
        let sides = |d: &super::token_set::Divergence| (d.step, d.mutual, d.device_token, d.hf_token);
        let swapped = |d: &super::token_set::Divergence| (d.step, d.mutual, d.hf_token, d.device_token);
        prop_assert_eq!(there.first_divergence.as_ref().map(sides), back.first_divergence.as_ref().map(swapped));
    }

    #[test]
    fn kl_is_never_negative_and_zero_for_the_same(x in matrix(4, VOCAB), y in matrix(4, VOCAB), k in 1usize..=VOCAB) {
        let reference = Reference::of(x.view(), k);
        prop_assert!(reference.kl(y.view()).steps.iter().all(|&kl| kl >= 0.0));
        // The capture's log-sum-exp is rounded to f32.
        prop_assert!(reference.kl(x.view()).steps.iter().all(|&kl| (0.0..2e-6).contains(&kl)));
        let truth = Truth { ids: reference.ids.view(), logits: reference.logits.view(), lse: reference.lse.view() };
        let same = AtTruth { logits: reference.logits.clone(), lse: reference.lse.mapv(f64::from) };
        prop_assert_eq!(Kl::measure(&truth, &same)?.steps, vec![0.0; 4]);
    }

    #[test]
    fn a_constant_changes_nothing(x in matrix(STEPS, VOCAB), y in matrix(STEPS, VOCAB), by in -16i32..16) {
        let reference = Reference::of(x.view(), 8);
        let shifted = &y + by as f32;
        let (one, two) = (reference.kl(y.view()), reference.kl(shifted.view()));
        prop_assert!(one.steps.iter().zip(&two.steps).all(|(a, b)| (a - b).abs() < 1e-9 * (1.0 + a)));
        prop_assert_eq!(reference.token_set(y.view()), reference.token_set(shifted.view()));
    }

    #[test]
    fn top_k_is_a_sort(x in prop::collection::vec((-6i32..6).prop_map(|x| x as f32 / 2.0), 0..60), k in 0usize..12) {
        let mut ids: Vec<u32> = (0..x.len() as u32).collect();
        ids.sort_by(|&a, &b| x[b as usize].total_cmp(&x[a as usize]).then(a.cmp(&b)));
        ids.truncate(k);
        let x: Vec<f32> = x.into_iter().map(|x| if x == 0.0 { 0.0 } else { x }).collect();
        prop_assert_eq!(top_k(Array1::from(x).view(), k)?, ids);
    }

    #[test]
    fn tied_five_hold_the_strict_five(x in matrix(STEPS, VOCAB), y in matrix(STEPS, VOCAB)) {
        let reference = Reference::of(x.view(), 8);
        let (strict, tied) = (reference.token_set(y.view()), reference.agreement(y.view()));
        for (s, t) in strict.steps.iter().zip(&tied.steps) {
            prop_assert!(t.device_in_hf >= s.device_in_hf && t.hf_in_device >= s.hf_in_device && t.shared >= s.shared);
            prop_assert!((t.regret_ulp == 0.0) >= (s.device_token == s.hf_token));
        }
    }
}

/// Null outputs: upstream's comparators pass an empty one; nothing here does.
#[test]
fn empty_input_never_passes() {
    let x = Array2::from_shape_fn((STEPS, VOCAB), |(i, j)| ((i * 5 + j * 7) % VOCAB) as f32);
    let reference = Reference::of(x.view(), 8);
    let none = Array2::<f32>::zeros((0, VOCAB));
    assert_eq!(reference.outcomes(none.view()), [Outcome::Vacuous; 2]);
    assert_eq!(reference.agreement(none.view()).judge(0).outcome(), Outcome::Vacuous);
    assert_eq!(layers::judge(&[], 0, 0).outcome(), Outcome::Vacuous);
    assert_eq!(block(none.view(), none.view(), 64, 0).unwrap().2.outcome(), Outcome::Vacuous);
    for constant in [0.0, 1.0] {
        let device = Array2::from_elem((STEPS, VOCAB), constant);
        let floor = Summary::of(&[8e-4; STEPS]);
        let verdict = reference.kl(device.view()).judge(&floor, KlFactors::median(3.0), STEPS);
        assert_eq!(verdict.outcome(), Outcome::Fail, "constant logits {constant}");
    }
}

/// The judge shares no code with the judged.
#[test]
fn this_room_imports_only_the_error_type() {
    let room = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/check");
    for entry in std::fs::read_dir(room).unwrap() {
        let path = entry.unwrap().path();
        for (number, line) in std::fs::read_to_string(&path).unwrap().lines().enumerate() {
            let foreign = line
                .split("crate::")
                .skip(1)
                .find(|rest| !(rest.starts_with("error::") || rest.starts_with("check::")));
            assert!(foreign.is_none() || line.contains("split("), "{}:{}: {line}", path.display(), number + 1);
        }
    }
}
