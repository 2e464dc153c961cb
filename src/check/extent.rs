//! How much was compared against how much had to be. Knows nothing of what the counts mean.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Counts of what was compared (steps, positions, layers, kernels, bytes ...) and the minimum of each.
///
/// A requirement of zero counts as one, and an extent that requires nothing falls short: a check that compared
/// nothing cannot pass, however it was set up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Extent {
    compared: BTreeMap<String, u64>,
    required: BTreeMap<String, u64>,
}

/// One count that is too small.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shortfall {
    pub what: String,
    pub compared: u64,
    pub required: u64,
}

impl Extent {
    /// An extent in which nothing was compared and nothing is required; it falls short.
    pub fn new() -> Extent {
        Extent::default()
    }

    /// Requires at least `count` (and at least one) of `what`; the larger of two requirements holds.
    #[must_use]
    pub fn require(mut self, what: &str, count: u64) -> Extent {
        let minimum = self.required.entry(what.to_owned()).or_default();
        *minimum = (*minimum).max(count).max(1);
        self
    }

    /// Adds `count` compared of `what`.
    #[must_use]
    pub fn compare(mut self, what: &str, count: u64) -> Extent {
        self.add(what, count);
        self
    }

    /// Adds `count` compared of `what`.
    pub fn add(&mut self, what: &str, count: u64) {
        let sum = self.compared.entry(what.to_owned()).or_default();
        *sum = sum.saturating_add(count);
    }

    /// How many of `what` were compared.
    pub fn compared(&self, what: &str) -> u64 {
        self.compared.get(what).copied().unwrap_or(0)
    }

    /// How many of `what` had to be compared.
    pub fn required(&self, what: &str) -> u64 {
        self.required.get(what).copied().unwrap_or(0)
    }

    /// Every count below its minimum; empty only when something was required and all of it was compared.
    pub fn shortfalls(&self) -> Vec<Shortfall> {
        if self.required.is_empty() {
            return vec![Shortfall { what: "anything".into(), compared: 0, required: 1 }];
        }
        let short = |(what, &required): (&String, &u64)| {
            let compared = self.compared(what);
            (compared < required).then(|| Shortfall { what: what.clone(), compared, required })
        };
        self.required.iter().filter_map(short).collect()
    }

    /// The sum of two extents, for totals over cases that were judged one by one.
    #[must_use]
    pub fn merge(mut self, other: &Extent) -> Extent {
        for (what, &count) in &other.compared {
            self.add(what, count);
        }
        for (what, &count) in &other.required {
            let sum = self.required.entry(what.clone()).or_default();
            *sum = sum.saturating_add(count);
        }
        self
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compared {} of {} {}", self.compared, self.required, self.what)
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: std::collections::BTreeSet<&String> = self.compared.keys().chain(self.required.keys()).collect();
        if names.is_empty() {
            return f.write_str("nothing compared");
        }
        for (i, what) in names.into_iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{what} {}", amount(self.compared(what), self.required.get(what).copied()))?;
        }
        Ok(())
    }
}

/// One count for people: `32/32`, `1/32`, `39 (at least 1)`; a fraction above one would read like a mistake.
pub fn amount(compared: u64, required: Option<u64>) -> String {
    match required {
        None => compared.to_string(),
        Some(required) if compared > required => format!("{compared} (at least {required})"),
        Some(required) => format!("{compared}/{required}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_that_requires_nothing_falls_short() {
        assert_eq!(Extent::new().shortfalls().len(), 1);
        assert_eq!(Extent::new().compare("steps", 32).shortfalls().len(), 1);
    }

    #[test]
    fn zero_required_means_one() {
        assert_eq!(Extent::new().require("steps", 0).shortfalls()[0].to_string(), "compared 0 of 1 steps");
    }

    #[test]
    fn every_thin_count_is_named() {
        let extent = Extent::new().require("steps", 32).require("layers", 4).compare("steps", 1).compare("layers", 4);
        let names: Vec<String> = extent.shortfalls().into_iter().map(|s| s.what).collect();
        assert_eq!(names, ["steps"]);
        assert_eq!(extent.to_string(), "layers 4/4, steps 1/32");
    }

    #[test]
    fn more_than_is_required_is_no_fraction() {
        let tensors = Extent::new().require("tensors", 1).compare("tensors", 39);
        let extent = tensors.require("prompts", 8).compare("prompts", 8).compare("files", 2);
        assert_eq!(extent.to_string(), "files 2, prompts 8/8, tensors 39 (at least 1)");
    }

    #[test]
    fn merged_extents_add_up() {
        let one = Extent::new().require("steps", 32).compare("steps", 32);
        let both = one.clone().merge(&one);
        assert_eq!((both.compared("steps"), both.required("steps")), (64, 64));
    }
}
