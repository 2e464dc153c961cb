//! The schema of `kernels/<id>.json`. Plain data; [`super`] reads and checks it.

mod rows;
mod rules;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use rows::*;
pub use rules::*;

use crate::kernel::expr::Expr;

/// Named integers: a shape, or a tile config.
pub type Point = BTreeMap<String, i64>;

/// One leaf kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelFacts {
    pub id: String,
    pub title: String,
    pub math: String,
    /// Where upstream keeps it.
    pub source: String,
    /// Whether upstream's registry has a page for it.
    pub upstream_registry: bool,
    /// The kernel whose rows are also this one's, under the same names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_kernel_as: Option<String>,
    pub args: Vec<Argument>,
    pub arithmetic: Vec<ArithmeticStep>,
    pub rounding: Rounding,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_bias: Option<SignedBias>,
    pub inputs: Inputs,
    pub tolerances: Vec<Tolerance>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub near_zero: Option<NearZero>,
    pub tiles: Tiles,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<Method>,
    pub variables: Variables,
    pub constraints: Vec<Constraint>,
    pub measured: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_good: Vec<KnownGood>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_bad: Vec<KnownBad>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_slow: Vec<KnownGood>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One argument, in binding order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    pub name: String,
    pub dtype: FactDtype,
    /// Dimensions as expressions of the shape's variables.
    pub shape: Vec<Expr>,
    pub role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FactDtype {
    Bf16,
    F32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Input,
    Weight,
    Scratch,
    Output,
}

/// One step of the kernel's arithmetic and the precision it is done in.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArithmeticStep {
    pub step: String,
    pub how: String,
}

/// How the kernel's casts to bf16 round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// To nearest, ties to even.
    ConvEven,
    /// The hardware's default.
    TowardMinusInfinity,
}

/// Which way the mean error points, relative to the mean of `|y|`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignedBias {
    pub sign: Sign,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    Negative,
    Positive,
}

/// What the registry's figures were measured with: normal random numbers times `factor / sqrt(over_sqrt)`, those of an
/// argument named in `of` times its factor there.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    pub seed: u64,
    pub factor: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_sqrt: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub of: BTreeMap<String, f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Precision tier of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// f32 accumulation.
    High,
    /// bf16 accumulation.
    Low,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::High => "high",
            Tier::Low => "low",
        })
    }
}

/// `|y - reference| <= atol + rtol * |reference|` for every element, and a limit on the mean.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    pub rtol: f64,
    pub atol: f64,
    pub origin: Origin,
    pub why: String,
    pub mean_rel_l1: MeanRelL1,
    /// What is added to `rtol` and to the limit of `mean_rel_l1` for each of the shape's `N` columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_column: Option<PerColumn>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    Upstream,
    /// Ours: upstream has none.
    Own,
}

/// `mean |y - reference| / mean |reference|`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeanRelL1 {
    /// Smallest and largest figure measured on hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<[f64; 2]>,
    pub limit: f64,
    pub why: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerColumn {
    pub rtol: f64,
    pub mean_rel_l1: f64,
}

/// Where upstream's atol mis-fires on elements near zero.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NearZero {
    pub cause: String,
    pub shapes: Vec<String>,
    pub better: String,
}
