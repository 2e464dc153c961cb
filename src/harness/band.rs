//! How far a number may move from its baseline, by the metric its name says it is. One table, [`METRICS`].
//!
//! A band is symmetric: an improvement beyond it asks for review like a regression. It describes, it does not judge;
//! the gates judge.

/// The factor every band is built on.
const FACTOR: f64 = 1.5;
/// What 1 - cosine may move by however small it is.
const COSINE_FLOOR: f64 = 1e-6;
/// From here up a signal-to-noise ratio says "equal", infinity included.
const DECIBEL_CEILING: f64 = 120.0;

/// The rule that two values of one metric are compared by. NaN is within no band.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Band {
    /// `larger <= 1.5 * smaller + floor`, for errors: zero is perfect, nothing is negative beyond the floor.
    Error { floor: f64 },
    /// As an error of `1 - cosine` with a floor of 1e-6.
    Cosine,
    /// Of either sign: apart by at most a third of the larger, which is the factor of 1.5, and a floor.
    Signed { floor: f64 },
    /// At most `20 log10(1.5)` = 3.52 dB apart; 120 dB and everything above it are the same.
    Decibel,
}

/// Metric words and their bands. A number's name holds exactly such a word between `_` or `.` (`cosine_min`,
/// `kl_median`, `q_proj.max_abs`); of several the longest counts. Counts and texts have no band: equal or not.
pub const METRICS: &[(&str, Band)] = &[
    ("cosine", Band::Cosine),
    ("sqnr_db", Band::Decibel),
    ("max_abs", Band::Error { floor: 1e-7 }),
    ("mean_abs", Band::Error { floor: 1e-7 }),
    ("max_rel", Band::Error { floor: 1e-7 }),
    ("mean_rel_l1", Band::Error { floor: 1e-7 }),
    ("rel_l2", Band::Error { floor: 1e-7 }),
    ("nmse", Band::Error { floor: 1e-9 }),
    ("rmse", Band::Error { floor: 1e-7 }),
    ("kl", Band::Error { floor: 1e-7 }),
    // A sixteenth of what one rounding costs in the mean: below it a bias is none.
    ("bias", Band::Signed { floor: 1.25e-4 }),
    ("regret", Band::Error { floor: 1.0 }),
    ("ulp", Band::Error { floor: 1.0 }),
];

/// The band of a number of that name, if its name holds a metric word.
pub fn band_of(name: &str) -> Option<Band> {
    let holds = |word: &str| {
        name.match_indices(word).any(|(at, _)| {
            let border = |c: Option<char>| c.is_none_or(|c| c == '_' || c == '.');
            border(name[..at].chars().next_back()) && border(name[at + word.len()..].chars().next())
        })
    };
    METRICS.iter().filter(|(word, _)| holds(word)).max_by_key(|(word, _)| word.len()).map(|&(_, band)| band)
}

impl Band {
    /// Whether two values of the metric count as the same; symmetric, and never true of a NaN.
    pub fn holds(self, a: f64, b: f64) -> bool {
        if a.is_nan() || b.is_nan() {
            return false;
        }
        match self {
            Band::Error { floor } => error_holds(a, b, floor),
            Band::Cosine => error_holds((1.0 - a).max(0.0), (1.0 - b).max(0.0), COSINE_FLOOR),
            Band::Signed { floor } => {
                (a - b).abs() <= (1.0 - 1.0 / FACTOR) * a.abs().max(b.abs()) + floor && a.is_finite() && b.is_finite()
            }
            Band::Decibel => {
                let (a, b) = (a.min(DECIBEL_CEILING), b.min(DECIBEL_CEILING));
                a == b || (a - b).abs() <= 20.0 * FACTOR.log10()
            }
        }
    }
}

impl std::fmt::Display for Band {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Band::Error { floor } => write!(f, "within {FACTOR}x + {floor:.0e}"),
            Band::Cosine => write!(f, "1 - cosine within {FACTOR}x + {COSINE_FLOOR:.0e}"),
            Band::Signed { floor } => write!(f, "within {FACTOR}x and of one sign, + {floor:.0e}"),
            Band::Decibel => write!(f, "within {:.2} dB", 20.0 * FACTOR.log10()),
        }
    }
}

fn error_holds(a: f64, b: f64, floor: f64) -> bool {
    let (smaller, larger) = if a < b { (a, b) } else { (b, a) };
    smaller >= -floor && larger.is_finite() && larger <= FACTOR * smaller.max(0.0) + floor
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::same("max_abs", 1e-2, 1e-2, true)]
    #[case::edge_up("max_abs", 1e-2, 1.5e-2, true)]
    #[case::over("max_abs", 1e-2, 1.51e-2, false)]
    #[case::edge_down("max_abs", 1.5e-2, 1e-2, true)]
    #[case::improved("max_abs", 1.51e-2, 1e-2, false)]
    #[case::zero_is_tiny("max_abs", 0.0, 1e-9, true)]
    #[case::zero_is_not_small("max_abs", 0.0, 1e-3, false)]
    #[case::never_infinite("max_abs", f64::INFINITY, f64::INFINITY, false)]
    #[case::never_nan("max_abs", f64::NAN, f64::NAN, false)]
    #[case::negative("mean_abs", -1.0, -1.0, false)]
    #[case::rounding_of_kl("kl_median", -1e-9, 2e-9, true)]
    #[case::cosine_near_one("cosine", 1.0, 0.9999991, true)]
    #[case::cosine_above_one("cosine", 1.0000001, 1.0, true)]
    #[case::cosine_in("cosine_min", 0.98, 0.9701, true)]
    #[case::cosine_out("cosine_min", 0.98, 0.9699, false)]
    #[case::cosine_better("cosine_p5", 0.9699, 0.98, false)]
    #[case::cosine_nan("cosine", f64::NAN, f64::NAN, false)]
    #[case::db_in("sqnr_db", 40.0, 43.5, true)]
    #[case::db_out("sqnr_db", 40.0, 43.6, false)]
    #[case::db_infinite("sqnr_db", f64::INFINITY, f64::INFINITY, true)]
    #[case::db_ceiling("sqnr_db", f64::INFINITY, 150.0, true)]
    #[case::db_finite("sqnr_db", f64::INFINITY, 60.0, false)]
    #[case::nmse_floor("nmse", 0.0, 1e-10, true)]
    #[case::bias("bias", -2e-3, -2.9e-3, true)]
    #[case::bias_out("bias", -2e-3, -3.3e-3, false)]
    #[case::bias_turned("bias", -2e-3, 2e-3, false)]
    #[case::no_bias("bias", -1e-6, 5e-6, true)]
    #[case::one_ulp("max_ulp", 0.0, 1.0, true)]
    fn table(#[case] name: &str, #[case] a: f64, #[case] b: f64, #[case] same: bool) {
        assert_eq!(band_of(name).unwrap().holds(a, b), same);
    }

    #[rstest]
    #[case("cosine_median", Some(Band::Cosine))]
    #[case("q_proj.max_abs", Some(Band::Error { floor: 1e-7 }))]
    #[case("kl", Some(Band::Error { floor: 1e-7 }))]
    #[case("klass", None)]
    #[case("cosines", None)]
    #[case("positions", None)]
    fn names(#[case] name: &str, #[case] band: Option<Band>) {
        assert_eq!(band_of(name), band);
    }

    #[test]
    fn every_metric_word_finds_its_own_band() {
        for &(word, band) in METRICS {
            assert_eq!(band_of(word), Some(band), "{word}");
        }
    }

    fn band() -> impl Strategy<Value = Band> {
        (0..METRICS.len()).prop_map(|i| METRICS[i].1)
    }

    proptest! {
        #[test]
        fn symmetric(band in band(), a in -2.0..200.0f64, b in -2.0..200.0f64) {
            prop_assert_eq!(band.holds(a, b), band.holds(b, a));
        }

        #[test]
        fn reflexive(band in band(), a in 0.0..200.0f64) {
            prop_assert!(band.holds(a, a));
        }

        #[test]
        fn nan_is_in_no_band(band in band(), a in any::<f64>()) {
            prop_assert!(!band.holds(a, f64::NAN) && !band.holds(f64::NAN, a));
        }

        #[test]
        fn a_value_between_two_equal_ones_is_equal(band in band(), a in 0.0..1.0f64, b in 0.0..1.0f64, t in 0.0..1.0f64) {
            prop_assume!(band.holds(a, b));
            prop_assert!(band.holds(a, (a + t * (b - a)).clamp(a.min(b), a.max(b))));
        }
    }
}
