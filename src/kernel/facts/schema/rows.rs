//! What was measured or tried on hardware: rows, configs known to be good, and configs known to fail.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Point, Tier};

/// A figure or a range of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Figure {
    One(f64),
    Range([f64; 2]),
}

impl Figure {
    pub fn mean(self) -> f64 {
        match self {
            Figure::One(value) => value,
            Figure::Range([low, high]) => (low + high) / 2.0,
        }
    }
}

/// A config measured on hardware: right and timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub shape: Point,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    pub config: Point,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflops: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gbps: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_rel_l1: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rel: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs: Option<f64>,
    /// The fastest of its shape and tier.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub best: bool,
    /// The speed is a sibling's, not measured on this shape.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub speed_inherited: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_2d: Option<[i64; 2]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    pub status: Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Pass,
}

/// A config, perhaps a partial one, that is known to work without a row of its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownGood {
    pub shape: Point,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    pub config: Point,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflops: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A config, perhaps a partial one, that is known to fail. What it leaves open does not matter.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownBad {
    pub shape: Point,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    pub config: BTreeMap<String, Wanted>,
    pub outcome: Failure,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_rel_l1: Option<Figure>,
    /// Stated without a measurement that could be found.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub claimed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A value of a partial config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Wanted {
    Exactly(i64),
    AtLeast(AtLeast),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AtLeast {
    pub at_least: i64,
}

impl Wanted {
    pub fn admits(self, value: i64) -> bool {
        match self {
            Wanted::Exactly(wanted) => value == wanted,
            Wanted::AtLeast(AtLeast { at_least }) => value >= at_least,
        }
    }
}

/// How a known-bad config fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    WrongNumbers,
    Zeros,
    BuildFails,
    Hangs,
    Aborts,
}

impl Failure {
    pub fn name(self) -> &'static str {
        match self {
            Failure::WrongNumbers => "wrong numbers",
            Failure::Zeros => "zeros",
            Failure::BuildFails => "build fails",
            Failure::Hangs => "hangs",
            Failure::Aborts => "aborts",
        }
    }
}
