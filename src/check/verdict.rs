//! What a check may conclude. Only [`Verdict::judge`] makes a pass, and only from a full extent and no failure.

use std::fmt;

use serde::Serialize;

use super::extent::Extent;

/// The six outcomes, from best to worst: a combination takes the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Everything that had to be compared was compared and is within its limits.
    Pass,
    /// Not run here, for a reason that is no fault: never a pass.
    NotRun,
    /// The f32 oracle sides with the device against the bf16 reference.
    Disputed,
    /// The device did not complete, or an earlier time-out taints the numbers.
    Inconclusive,
    /// Too little was compared.
    Vacuous,
    /// A limit was broken.
    Fail,
}

impl Outcome {
    /// Process exit code: 0 pass, 1 fail or vacuous, 2 inconclusive, 3 not run, 4 disputed.
    pub fn exit_code(self) -> u8 {
        match self {
            Outcome::Pass => 0,
            Outcome::Fail | Outcome::Vacuous => 1,
            Outcome::Inconclusive => 2,
            Outcome::NotRun => 3,
            Outcome::Disputed => 4,
        }
    }

    /// The word for it in reports.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Pass => "PASS",
            Outcome::NotRun => "NOT RUN",
            Outcome::Disputed => "DISPUTED",
            Outcome::Inconclusive => "INCONCLUSIVE",
            Outcome::Vacuous => "VACUOUS",
            Outcome::Fail => "FAIL",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// An outcome with its reasons, its warnings and what was compared to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    outcome: Outcome,
    reasons: Vec<String>,
    warnings: Vec<String>,
    extent: Extent,
}

impl Verdict {
    /// FAIL if there is any failure, else VACUOUS if the extent is thin, else PASS. Thin counts are named in every case.
    pub fn judge(failures: Vec<String>, extent: Extent) -> Verdict {
        let short = extent.shortfalls();
        let outcome = match (failures.is_empty(), short.is_empty()) {
            (false, _) => Outcome::Fail,
            (true, false) => Outcome::Vacuous,
            (true, true) => Outcome::Pass,
        };
        let reasons = failures.into_iter().chain(short.iter().map(ToString::to_string)).collect();
        Verdict { outcome, reasons, warnings: Vec::new(), extent }
    }

    /// The device did not complete, or its numbers are tainted: nothing can be said.
    pub fn inconclusive(reason: impl Into<String>) -> Verdict {
        Verdict::because(Outcome::Inconclusive, reason)
    }

    /// Not run here.
    pub fn not_run(reason: impl Into<String>) -> Verdict {
        Verdict::because(Outcome::NotRun, reason)
    }

    fn because(outcome: Outcome, reason: impl Into<String>) -> Verdict {
        Verdict { outcome, reasons: vec![reason.into()], warnings: Vec::new(), extent: Extent::new() }
    }

    /// Turns a failure into a dispute, keeping its reasons; any other outcome stays, a vacuous one too.
    #[must_use]
    pub fn dispute(mut self, reason: impl Into<String>) -> Verdict {
        if self.outcome == Outcome::Fail && self.extent.shortfalls().is_empty() {
            self.outcome = Outcome::Disputed;
            self.reasons.insert(0, reason.into());
        }
        self
    }

    /// Adds a warning; the outcome stays.
    #[must_use]
    pub fn warn(mut self, warning: impl Into<String>) -> Verdict {
        self.warnings.push(warning.into());
        self
    }

    /// The same verdict with `name` before each reason and warning, for when it is told among others.
    #[must_use]
    pub fn about(mut self, name: &str) -> Verdict {
        self.reasons.iter_mut().chain(&mut self.warnings).for_each(|text| text.insert_str(0, &format!("{name}: ")));
        self
    }

    /// Both verdicts as one: the worse outcome, all reasons and warnings, the sum of the extents.
    #[must_use]
    pub fn and(mut self, other: Verdict) -> Verdict {
        self.outcome = self.outcome.max(other.outcome);
        self.reasons.extend(other.reasons);
        self.warnings.extend(other.warnings);
        self.extent = self.extent.merge(&other.extent);
        self
    }

    /// All verdicts as one; none at all is VACUOUS.
    pub fn all(verdicts: impl IntoIterator<Item = Verdict>) -> Verdict {
        let nothing = || Verdict::judge(Vec::new(), Extent::new());
        verdicts.into_iter().reduce(Verdict::and).unwrap_or_else(nothing)
    }

    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    pub fn is_pass(&self) -> bool {
        self.outcome == Outcome::Pass
    }

    pub fn reasons(&self) -> &[String] {
        &self.reasons
    }

    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// See [`Outcome::exit_code`].
    pub fn exit_code(&self) -> u8 {
        self.outcome.exit_code()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.outcome.word())?;
        if self.outcome == Outcome::Pass && !self.warnings.is_empty() {
            f.write_str(" WITH WARNINGS")?;
        }
        if !self.reasons.is_empty() {
            write!(f, ": {}", self.reasons.join("; "))?;
        }
        write!(f, " ({})", self.extent)?;
        self.warnings.iter().try_for_each(|w| write!(f, "; warning: {w}"))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn full() -> Extent {
        Extent::new().require("steps", 32).compare("steps", 32)
    }

    fn of(outcome: Outcome) -> Verdict {
        match outcome {
            Outcome::Pass => Verdict::judge(vec![], full()),
            Outcome::NotRun => Verdict::not_run("no device"),
            Outcome::Disputed => Verdict::judge(vec!["far".into()], full()).dispute("the f32 oracle agrees"),
            Outcome::Inconclusive => Verdict::inconclusive("time-out"),
            Outcome::Vacuous => Verdict::judge(vec![], Extent::new().require("steps", 32)),
            Outcome::Fail => Verdict::judge(vec!["far".into()], full()),
        }
    }

    #[rstest]
    #[case(Outcome::Pass, 0)]
    #[case(Outcome::Fail, 1)]
    #[case(Outcome::Vacuous, 1)]
    #[case(Outcome::Inconclusive, 2)]
    #[case(Outcome::NotRun, 3)]
    #[case(Outcome::Disputed, 4)]
    fn exit_codes(#[case] outcome: Outcome, #[case] code: u8) {
        assert_eq!((of(outcome).outcome(), of(outcome).exit_code()), (outcome, code));
    }

    #[rstest]
    #[case(&[], Outcome::Vacuous)]
    #[case(&[Outcome::Pass, Outcome::Pass], Outcome::Pass)]
    #[case(&[Outcome::Pass, Outcome::NotRun], Outcome::NotRun)]
    #[case(&[Outcome::NotRun, Outcome::Disputed], Outcome::Disputed)]
    #[case(&[Outcome::Disputed, Outcome::Inconclusive], Outcome::Inconclusive)]
    #[case(&[Outcome::Inconclusive, Outcome::Vacuous], Outcome::Vacuous)]
    #[case(&[Outcome::Fail, Outcome::Vacuous, Outcome::Pass], Outcome::Fail)]
    fn the_worst_wins(#[case] outcomes: &[Outcome], #[case] expected: Outcome) {
        assert_eq!(Verdict::all(outcomes.iter().map(|&o| of(o))).outcome(), expected);
        assert_eq!(Verdict::all(outcomes.iter().rev().map(|&o| of(o))).outcome(), expected);
    }

    #[test]
    fn a_thin_extent_is_named_and_a_failure_outranks_it() {
        let thin = || Extent::new().require("steps", 32).compare("steps", 1);
        assert_eq!(Verdict::judge(vec![], thin()).to_string(), "VACUOUS: compared 1 of 32 steps (steps 1/32)");
        let both = Verdict::judge(vec!["far".into()], thin());
        assert_eq!(both.to_string(), "FAIL: far; compared 1 of 32 steps (steps 1/32)");
        assert_eq!(both.dispute("the f32 oracle agrees").outcome(), Outcome::Fail);
    }

    #[test]
    fn a_verdict_told_among_others_names_its_case() {
        let verdict = of(Outcome::Fail).warn("thin ice").about("layer::l03");
        assert_eq!(verdict.reasons(), ["layer::l03: far"]);
        assert_eq!(verdict.warnings(), ["layer::l03: thin ice"]);
    }

    #[test]
    fn a_warning_does_not_change_the_outcome() {
        let verdict = of(Outcome::Pass).warn("cliff at layer 3");
        assert_eq!(verdict.to_string(), "PASS WITH WARNINGS (steps 32/32); warning: cliff at layer 3");
    }

    #[test]
    fn a_verdict_serialises_with_its_extent() {
        let json = serde_json::to_value(of(Outcome::NotRun)).unwrap();
        assert_eq!(json["outcome"], "not_run");
        assert!(json["extent"]["required"].is_object());
    }
}
