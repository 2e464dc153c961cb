//! Paired times: their medians, and an interval of the difference that assumes nothing about its distribution.

use std::fmt;

use crate::check::Summary;

/// Two contenders' times, pair by pair in one run.
///
/// Units: milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pairs {
    pub before: Vec<f64>,
    pub after: Vec<f64>,
}

/// What the clock says of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timing {
    Faster,
    Slower,
    /// The interval does not exclude zero.
    Inconclusive,
}

/// How much was saved per call.
///
/// Units: milliseconds; positive means saved.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    pub before: f64,
    pub after: f64,
    /// Median of the paired differences.
    pub saved: f64,
    /// Interval of that median from the sign test.
    pub low: f64,
    pub high: f64,
    /// Its coverage, at least 0.95 where the number of pairs allows.
    pub coverage: f64,
    pub pairs: usize,
}

impl Delta {
    /// The difference of two contenders; none for fewer than six pairs, which no 95 % interval can be made of.
    ///
    /// Source: the order-statistics interval of a median: with `n` pairs and `B ~ Binomial(n, 1/2)`, the `k`-th smallest and
    /// `k`-th largest difference cover it with probability `1 - 2 P(B < k)`.
    pub fn of(pairs: &Pairs) -> Option<Delta> {
        let mut saved: Vec<f64> = pairs.before.iter().zip(&pairs.after).map(|(b, a)| b - a).collect();
        if saved.len() < 6 || pairs.before.len() != pairs.after.len() || saved.iter().any(|d| !d.is_finite()) {
            return None;
        }
        saved.sort_by(f64::total_cmp);
        let n = saved.len();
        let (mut below, mut probability) = (0.0, 0.5f64.powi(n as i32));
        let mut rank = 0;
        // `below` is P(B < rank + 1) once `probability` = P(B = rank) is added.
        while 2.0 * (below + probability) <= 0.05 {
            below += probability;
            probability *= (n - rank) as f64 / (rank + 1) as f64;
            rank += 1;
        }
        Some(Delta {
            before: Summary::of(&pairs.before).median,
            after: Summary::of(&pairs.after).median,
            saved: Summary::of(&saved).median,
            low: saved[rank - 1],
            high: saved[n - rank],
            coverage: 1.0 - 2.0 * below,
            pairs: n,
        })
    }

    pub fn timing(&self) -> Timing {
        match (self.low > 0.0, self.high < 0.0) {
            (true, _) => Timing::Faster,
            (_, true) => Timing::Slower,
            _ => Timing::Inconclusive,
        }
    }
}

impl fmt::Display for Delta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delta { before, after, saved, low, high, coverage, pairs } = self;
        write!(f, "{before:.3} -> {after:.3} ms ({:.2}x), saved {saved:.3} ms, ", before / after)?;
        write!(f, "{:.1} % interval [{low:.3}, {high:.3}] of {pairs} pairs", 100.0 * coverage)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn pairs(n: usize, saved: impl Fn(usize) -> f64) -> Pairs {
        let before: Vec<f64> = (0..n).map(|i| 10.0 + (i % 7) as f64).collect();
        let after = before.iter().enumerate().map(|(i, b)| b - saved(i)).collect();
        Pairs { before, after }
    }

    #[rstest]
    #[case::faster(|_| 1.0, Timing::Faster)]
    #[case::slower(|_| -0.001, Timing::Slower)]
    #[case::noise(|i| if i % 2 == 0 { 1.0 } else { -1.0 }, Timing::Inconclusive)]
    #[case::nothing(|_| 0.0, Timing::Inconclusive)]
    // Five of twenty the other way are allowed, six are not.
    #[case::five_outliers(|i| if i < 5 { -100.0 } else { 0.5 }, Timing::Faster)]
    #[case::six_outliers(|i| if i < 6 { -100.0 } else { 0.5 }, Timing::Inconclusive)]
    fn only_an_interval_without_zero_decides(#[case] saved: fn(usize) -> f64, #[case] expected: Timing) {
        let delta = Delta::of(&pairs(20, saved)).unwrap();
        assert_eq!(delta.timing(), expected, "{delta}");
        assert!((delta.coverage - 0.958_6).abs() < 1e-4, "{}", delta.coverage);
    }

    #[test]
    fn too_few_or_unusable_pairs_say_nothing() {
        assert_eq!(Delta::of(&pairs(5, |_| 1.0)), None);
        assert!(Delta::of(&pairs(6, |_| 1.0)).is_some());
        assert_eq!(Delta::of(&pairs(20, |_| f64::NAN)), None);
        assert_eq!(Delta::of(&Pairs { after: vec![1.0; 19], ..pairs(20, |_| 1.0) }), None);
    }
}
