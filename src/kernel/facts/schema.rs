//! The schema of `kernels/<id>.json`. Plain data; [`super`] reads and checks it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

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

/// What the registry's figures were measured with: normal random numbers times `factor / sqrt(over_sqrt)`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    pub seed: u64,
    pub factor: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_sqrt: Option<String>,
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

/// Compute tiles.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiles {
    /// Tiles that a config uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Expr>,
    pub target: i64,
    pub bound: Bound,
    /// Why the target does not apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiver: Option<String>,
}

/// What limits the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Compute,
    Memory,
    /// Rows are spread over tiles; the shim's streams bound their number.
    RowParallel,
}

impl Bound {
    pub fn name(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
            Bound::RowParallel => "row-parallel",
        }
    }
}

/// A way to build the kernel. Its name is a variable too: 1 for the method taken, 0 for the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    pub name: String,
    pub tier: Tier,
    pub note: String,
}

/// The variables that constraints may read, besides the methods' names.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variables {
    pub shape: Vec<Variable>,
    pub tile: Vec<TileVariable>,
    pub derived: Vec<Derived>,
    /// Known to some callers only; a constraint that reads one is not checked without it.
    pub given: Vec<Variable>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variable {
    pub name: String,
    pub what: String,
}

/// A choice of the config.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TileVariable {
    pub name: String,
    pub what: String,
    pub candidates: Candidates,
    /// A build option that is decided by what fits first; it makes no candidates of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub first_fit: bool,
}

/// Values worth trying, preferred ones first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Candidates {
    Values(ValueList),
    Divisors(Divisors),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueList {
    pub values: Vec<i64>,
}

/// Divisors of an expression, largest first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Divisors {
    pub divisors_of: Expr,
    pub multiple_of: i64,
    pub at_most: i64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Derived {
    pub name: String,
    pub expr: Expr,
    pub what: String,
}

/// One placement rule: checked by machine where it has an `expr`, prose where it has a `note` only.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constraint {
    pub id: String,
    pub kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expr: Option<Expr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symptom: Option<String>,
    /// Own analysis, stated by no upstream text.
    pub inferred: bool,
    pub source: String,
}

/// What a breach of a constraint leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The build or the placement fails.
    HardCompile,
    /// A hang or an abort.
    HardRuntime,
    /// Runs, wrong numbers.
    SilentCorruption,
    /// Runs, zeros.
    SilentZero,
    /// Beyond what was ever measured to work.
    Measured,
    /// A documented rule that measured configs contradict.
    GuidelineUnreliable,
    /// Claimed and contradicted: needs a test of its own.
    TestRequired,
    /// Works by luck.
    LatentOverrun,
    /// How the kernel must be used, nothing a config can break.
    Workflow,
}

impl Kind {
    /// Whether a breach rejects a config. The other kinds only order configs or inform.
    pub fn rejects(self) -> bool {
        use Kind::*;
        matches!(self, HardCompile | HardRuntime | SilentCorruption | SilentZero | Measured)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::HardCompile => "hard-compile",
            Kind::HardRuntime => "hard-runtime",
            Kind::SilentCorruption => "silent-corruption",
            Kind::SilentZero => "silent-zero",
            Kind::Measured => "measured",
            Kind::GuidelineUnreliable => "guideline-unreliable",
            Kind::TestRequired => "test-required",
            Kind::LatentOverrun => "latent-overrun",
            Kind::Workflow => "workflow",
        }
    }
}

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
