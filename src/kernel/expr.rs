//! Expressions of the kernel facts: integers and truth values over named variables.
//!
//! A language without loops, assignments and side effects: an expression ends because it is finite, and can reach
//! nothing but the variables it is given.

use std::collections::HashMap;
use std::fmt;

use evalexpr::{Context, EvalexprError, EvalexprResult, Node, Value};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What an expression may call: `splits(n, limit)`, `pow2(n)` and `if(condition, a, b)`, all of whose arguments are
/// evaluated.
const FUNCTIONS: [&str; 3] = ["splits", "pow2", "if"];

/// An expression is a line, not a program.
const MAX_LENGTH: usize = 400;

/// Values of variables.
#[derive(Debug, Clone, Default)]
pub struct Bindings {
    values: HashMap<String, Value>,
}

impl Bindings {
    /// Binds a variable, or binds it anew.
    pub fn set(&mut self, name: &str, value: i64) {
        match self.values.get_mut(name) {
            Some(bound) => *bound = Value::Int(value),
            None => {
                self.values.insert(name.to_owned(), Value::Int(value));
            }
        }
    }

    pub fn get(&self, name: &str) -> Option<i64> {
        match self.values.get(name) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }
}

impl<'a> FromIterator<(&'a str, i64)> for Bindings {
    fn from_iter<I: IntoIterator<Item = (&'a str, i64)>>(values: I) -> Bindings {
        let mut bindings = Bindings::default();
        for (name, value) in values {
            bindings.set(name, value);
        }
        bindings
    }
}

impl Context for Bindings {
    fn get_value(&self, identifier: &str) -> Option<&Value> {
        self.values.get(identifier)
    }

    fn call_function(&self, identifier: &str, argument: &Value) -> EvalexprResult<Value> {
        match identifier {
            "splits" => {
                let arguments = argument.as_fixed_len_tuple(2)?;
                Ok(Value::Boolean(splits(arguments[0].as_int()?, arguments[1].as_int()?)))
            }
            "pow2" => Ok(Value::Boolean(u64::try_from(argument.as_int()?).is_ok_and(u64::is_power_of_two))),
            _ => Err(EvalexprError::FunctionIdentifierNotFound(identifier.to_owned())),
        }
    }

    fn are_builtin_functions_disabled(&self) -> bool {
        false
    }

    fn set_builtin_functions_disabled(&mut self, _disabled: bool) -> EvalexprResult<()> {
        Err(EvalexprError::BuiltinFunctionsCannotBeDisabled)
    }
}

/// Whether `n = a * b` with `1 <= a, b <= limit`.
fn splits(n: i64, limit: i64) -> bool {
    n >= 1 && (1..=limit.min(n)).any(|a| n % a == 0 && n / a <= limit)
}

/// Finds what the parser lets pass: a missing operand, a truth value where a number must be. Arithmetic may fail, for
/// the values are arbitrary.
fn dry_run(node: &Node, reads: &[String]) -> EvalexprResult<()> {
    use EvalexprError::*;
    let bindings = reads.iter().map(|name| (name.as_str(), 48)).collect::<Bindings>();
    match node.eval_with_context(&bindings) {
        Ok(Value::Int(_) | Value::Boolean(_)) => Ok(()),
        Ok(value) => Err(CustomMessage(format!("it evaluates to {value:?}"))),
        Err(
            AdditionError { .. }
            | SubtractionError { .. }
            | NegationError { .. }
            | MultiplicationError { .. }
            | DivisionError { .. }
            | ModulationError { .. },
        ) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A parsed expression.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Expr {
    text: String,
    node: Node,
    reads: Vec<String>,
}

impl Expr {
    /// Parses an expression.
    ///
    /// Errors: [`Error::Usage`] for bad syntax, an assignment, a sequence, or a function that is not one of ours.
    pub fn parse(text: &str) -> Result<Expr> {
        let refuse = |expected: String| Error::Usage { what: "expression".into(), found: text.into(), expected };
        if text.len() > MAX_LENGTH {
            return Err(refuse(format!("at most {MAX_LENGTH} characters")));
        }
        if text.contains(';') {
            return Err(refuse("one expression".into()));
        }
        let node = evalexpr::build_operator_tree(text).map_err(|e| refuse(format!("an expression: {e}")))?;
        if let Some(written) = node.iter_write_variable_identifiers().next() {
            return Err(refuse(format!("no assignment to {written}")));
        }
        if let Some(function) = node.iter_function_identifiers().find(|name| !FUNCTIONS.contains(name)) {
            return Err(refuse(format!("no function but {}, not {function}", FUNCTIONS.join(", "))));
        }
        let mut reads: Vec<String> = node.iter_read_variable_identifiers().map(str::to_owned).collect();
        reads.sort();
        reads.dedup();
        dry_run(&node, &reads).map_err(|e| refuse(format!("an expression: {e}")))?;
        Ok(Expr { text: text.to_owned(), node, reads })
    }

    /// The variables it reads, sorted.
    pub fn reads(&self) -> &[String] {
        &self.reads
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its truth.
    ///
    /// Errors: [`Error::Usage`] when a variable is not bound, on overflow, division by zero, or when it is a number.
    pub fn holds(&self, bindings: &Bindings) -> Result<bool> {
        self.node.eval_boolean_with_context(bindings).map_err(|e| self.failed(&e))
    }

    /// Its value.
    ///
    /// Errors: as [`Expr::holds`], or when it is a truth value.
    pub fn value(&self, bindings: &Bindings) -> Result<i64> {
        self.node.eval_int_with_context(bindings).map_err(|e| self.failed(&e))
    }

    fn failed(&self, error: &EvalexprError) -> Error {
        let expected = format!("values it can be evaluated with ({error})");
        Error::Usage { what: "expression".into(), found: self.text.clone(), expected }
    }
}

impl TryFrom<String> for Expr {
    type Error = Error;

    fn try_from(text: String) -> Result<Expr> {
        Expr::parse(&text)
    }
}

impl From<Expr> for String {
    fn from(expr: Expr) -> String {
        expr.text
    }
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn bindings() -> Bindings {
        [("M", 2048), ("tile_m", 64), ("herd_m", 8), ("direct", 1)].into_iter().collect()
    }

    #[rstest]
    #[case("M % (tile_m * herd_m) == 0", true)]
    #[case("M % (tile_m * herd_m + 1) == 0", false)]
    #[case("direct == 1 || M < 64", true)]
    #[case("if(direct == 1, 2, 4) == 2", true)]
    #[case("pow2(M) && !pow2(M + 1)", true)]
    #[case("splits(768, 255)", true)]
    #[case("splits(2374, 255)", false)]
    fn truths(#[case] text: &str, #[case] truth: bool) {
        assert_eq!(Expr::parse(text).unwrap().holds(&bindings()).unwrap(), truth, "{text}");
    }

    #[rstest]
    #[case("M = 3")]
    #[case("M == 3; M")]
    #[case("exists a: a > 1")]
    #[case("str::to_lowercase(\"A\") == \"a\"")]
    #[case("random() < 1")]
    #[case("(M")]
    #[case("M ==")]
    #[case("M + (M == 1)")]
    #[case("")]
    #[case("M, 1")]
    #[case("1.5 < M * 1.0 + 0.5, M")]
    fn what_is_no_expression_is_refused(#[case] text: &str) {
        assert!(Expr::parse(text).is_err(), "{text}");
    }

    #[rstest]
    #[case("M / (tile_m - 64) == 1")]
    #[case("N == 1")]
    #[case("M * 9223372036854775807 > 0")]
    #[case("M + 1")]
    fn what_has_no_truth_is_an_error(#[case] text: &str) {
        assert!(Expr::parse(text).unwrap().holds(&bindings()).is_err(), "{text}");
    }

    #[test]
    fn it_knows_what_it_reads() {
        assert_eq!(Expr::parse("if(b > a, b, c) + a").unwrap().reads(), ["a", "b", "c"]);
    }

    proptest! {
        #[test]
        fn splits_is_what_it_says(a in 1i64..300, b in 1i64..300) {
            prop_assert_eq!(splits(a * b, a.max(b)), true);
            prop_assert!(!splits(a * b, 0));
        }

        #[test]
        fn any_text_parses_or_is_refused(text in ".{0,60}") {
            let _ = Expr::parse(&text);
        }
    }
}
