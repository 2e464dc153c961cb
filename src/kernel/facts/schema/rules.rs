//! What decides where a kernel can be placed: its tiles, the variables of a config, and the constraints on them.

use serde::{Deserialize, Serialize};

use super::Tier;
use crate::kernel::expr::Expr;

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
