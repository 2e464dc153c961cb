//! Walks the tile configs of a kernel, cutting a branch at the first rule that it breaks.
//!
//! Variables are bound one after another; a rule is checked as soon as all it reads is bound. What a query leaves open
//! (a shape with an unknown dimension, the sizes of a linked object) makes the rules that read it unchecked, not broken.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use crate::error::Result;
use crate::kernel::expr::{Bindings, Expr};
use crate::kernel::facts::{Candidates, Constraint, Derived, KernelFacts, Point, Tier, TileVariable, Wanted};

/// What is asked: a shape, perhaps in part, and what is fixed of the config.
#[derive(Debug, Clone, Default)]
pub struct Query {
    pub shape: Point,
    pub method: Option<String>,
    pub tier: Option<Tier>,
    pub config: BTreeMap<String, Wanted>,
    /// Tiles a config must use at least.
    pub min_tiles: Option<i64>,
    /// Whether the recorded failures reject, too.
    pub records: bool,
    /// Leaves out the inferred rules.
    pub stated_only: bool,
}

/// What can reject a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// By its place in [`KernelFacts::constraints`].
    Constraint(usize),
    /// A tile variable without a value worth trying, by its place in the walk.
    NoCandidate(usize),
    /// A recorded failure that the config repeats.
    Record,
    /// The query's least number of tiles.
    Tiles,
}

impl Rule {
    /// Whether it is a rule at all: a lack of candidates stays, and the least number of tiles is the question.
    pub fn can_be_skipped(self) -> bool {
        matches!(self, Rule::Constraint(_) | Rule::Record)
    }
}

/// A config that breaks no rule.
pub struct Leaf<'a> {
    pub method: Option<&'a str>,
    /// Values of the tile variables, in the order in which they are bound.
    pub values: &'a [(&'a str, i64)],
    pub bindings: &'a Bindings,
}

enum Choice<'a> {
    Method,
    Tile(&'a TileVariable),
}

/// A variable, and what can be computed and checked once it is bound.
struct Level<'a> {
    choice: Choice<'a>,
    derived: Vec<&'a Derived>,
    rules: Vec<(Rule, &'a Expr)>,
}

/// One walk.
pub struct Search<'a> {
    facts: &'a KernelFacts,
    query: &'a Query,
    skipped: &'a [Rule],
    levels: Vec<Level<'a>>,
    root: (Vec<&'a Derived>, Vec<(Rule, &'a Expr)>),
    /// Constraints that cannot be checked, for they read what is open.
    pub unchecked: Vec<&'a str>,
    /// How many branches each rule cut.
    pub rejected: BTreeMap<Rule, u64>,
    bindings: Bindings,
    method: Option<&'a str>,
    values: Vec<(&'a str, i64)>,
}

impl<'a> Search<'a> {
    /// Prepares a walk; the rules in `skipped` do not count.
    pub fn new(facts: &'a KernelFacts, query: &'a Query, skipped: &'a [Rule]) -> Search<'a> {
        let mut bindings = Bindings::default();
        query.shape.iter().for_each(|(name, &value)| bindings.set(name, value));
        for given in &facts.variables.given {
            if let Some(Wanted::Exactly(value)) = query.config.get(&given.name) {
                bindings.set(&given.name, *value);
            }
        }
        let mut search = Search {
            facts,
            query,
            skipped,
            levels: Vec::new(),
            root: (Vec::new(), Vec::new()),
            unchecked: Vec::new(),
            rejected: BTreeMap::new(),
            bindings,
            method: None,
            values: Vec::new(),
        };
        search.schedule();
        search
    }

    /// Orders the variables and hangs every derived value and rule where all it reads is bound.
    fn schedule(&mut self) {
        // 0: bound from the start; level + 1: bound there.
        let mut bound: BTreeMap<&str, usize> = BTreeMap::new();
        let variables = &self.facts.variables;
        let start = self.query.shape.keys().chain(variables.given.iter().map(|v| &v.name));
        for name in start.filter(|name| self.bindings.get(name).is_some()) {
            bound.insert(name, 0);
        }
        if !self.facts.methods.is_empty() {
            self.levels.push(Level { choice: Choice::Method, derived: vec![], rules: vec![] });
            self.facts.methods.iter().for_each(|m| {
                bound.insert(&m.name, 1);
            });
        }
        let (late, early): (Vec<_>, Vec<_>) = variables.tile.iter().partition(|v| v.first_fit);
        for variable in early.into_iter().chain(late) {
            let fixed = matches!(self.query.config.get(&variable.name), Some(Wanted::Exactly(_)));
            let open = match &variable.candidates {
                Candidates::Values(_) => false,
                Candidates::Divisors(d) => at(&d.divisors_of, &bound).is_none(),
            };
            if fixed || !open {
                self.levels.push(Level { choice: Choice::Tile(variable), derived: vec![], rules: vec![] });
                bound.insert(&variable.name, self.levels.len());
            }
        }
        for derived in &variables.derived {
            if let Some(level) = at(&derived.expr, &bound) {
                bound.insert(&derived.name, level);
                match level {
                    0 => self.root.0.push(derived),
                    _ => self.levels[level - 1].derived.push(derived),
                }
            }
        }
        for (index, constraint) in self.facts.constraints.iter().enumerate() {
            let counts = constraint.kind.rejects() && !(self.query.stated_only && constraint.inferred);
            let (Some(expr), true) = (&constraint.expr, counts) else { continue };
            let rule = (Rule::Constraint(index), expr);
            match at(expr, &bound) {
                None => self.unchecked.push(&constraint.id),
                Some(_) if self.skipped.contains(&rule.0) => {}
                Some(0) => self.root.1.push(rule),
                Some(level) => self.levels[level - 1].rules.push(rule),
            }
        }
    }

    /// Visits every config that breaks no rule, preferred ones first, until `visit` breaks off.
    ///
    /// Errors: from an expression that cannot be evaluated (overflow), and from `visit`.
    pub fn run(&mut self, visit: &mut dyn FnMut(&Leaf) -> Result<ControlFlow<()>>) -> Result<()> {
        let (derived, rules) = (std::mem::take(&mut self.root.0), std::mem::take(&mut self.root.1));
        if self.passes(&derived, &rules)? {
            let _ = self.descend(0, visit)?;
        }
        Ok(())
    }

    /// The first config that breaks no rule.
    ///
    /// Errors: as [`Search::run`].
    pub fn first(&mut self) -> Result<Option<(Option<String>, Point)>> {
        let mut first = None;
        self.run(&mut |leaf| {
            let config = leaf.values.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
            first = Some((leaf.method.map(str::to_owned), config));
            Ok(ControlFlow::Break(()))
        })?;
        Ok(first)
    }

    /// What a level's variable is chosen from, in words.
    pub fn choice(&self, level: usize) -> String {
        match self.levels.get(level).map(|l| &l.choice) {
            Some(Choice::Tile(variable)) => match &variable.candidates {
                Candidates::Divisors(d) => {
                    format!(
                        "{}: no multiple of {} up to {} divides {}",
                        variable.name, d.multiple_of, d.at_most, d.divisors_of
                    )
                }
                Candidates::Values(_) => format!("{}: no value is left", variable.name),
            },
            Some(Choice::Method) | None => "no method has this tier".into(),
        }
    }

    fn passes(&mut self, derived: &[&Derived], rules: &[(Rule, &Expr)]) -> Result<bool> {
        for d in derived {
            let value = d.expr.value(&self.bindings)?;
            self.bindings.set(&d.name, value);
        }
        for (rule, expr) in rules {
            if !expr.holds(&self.bindings)? {
                *self.rejected.entry(*rule).or_default() += 1;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a config was visited below, or the walk was broken off.
    fn descend(
        &mut self,
        level: usize,
        visit: &mut dyn FnMut(&Leaf) -> Result<ControlFlow<()>>,
    ) -> Result<ControlFlow<(), bool>> {
        if level == self.levels.len() {
            return self.leaf(visit);
        }
        let candidates = self.candidates(level)?;
        if candidates.is_empty() {
            *self.rejected.entry(Rule::NoCandidate(level)).or_default() += 1;
        }
        let first_fit = matches!(self.levels[level].choice, Choice::Tile(v) if v.first_fit);
        let (derived, rules) =
            (std::mem::take(&mut self.levels[level].derived), std::mem::take(&mut self.levels[level].rules));
        let mut visited = false;
        let mut flow = ControlFlow::Continue(());
        for candidate in candidates {
            self.bind(level, candidate);
            if self.passes(&derived, &rules)? {
                match self.descend(level + 1, visit)? {
                    ControlFlow::Break(()) => flow = ControlFlow::Break(()),
                    ControlFlow::Continue(below) => visited |= below,
                }
            }
            self.unbind(level);
            if flow.is_break() || (visited && first_fit) {
                break;
            }
        }
        (self.levels[level].derived, self.levels[level].rules) = (derived, rules);
        Ok(flow.map_continue(|()| visited))
    }

    /// Values of a level's variable; of the methods, their places.
    fn candidates(&self, level: usize) -> Result<Vec<i64>> {
        let variable = match &self.levels[level].choice {
            Choice::Method => {
                let fits = |(_, m): &(usize, &crate::kernel::facts::Method)| {
                    self.query.method.as_ref().is_none_or(|name| *name == m.name)
                        && self.query.tier.is_none_or(|tier| tier == m.tier)
                };
                return Ok(self.facts.methods.iter().enumerate().filter(fits).map(|(at, _)| at as i64).collect());
            }
            Choice::Tile(variable) => variable,
        };
        let wanted = self.query.config.get(&variable.name);
        if let Some(Wanted::Exactly(value)) = wanted {
            return Ok(vec![*value]);
        }
        let mut values = match &variable.candidates {
            Candidates::Values(list) => list.values.clone(),
            Candidates::Divisors(d) => {
                let of = d.divisors_of.value(&self.bindings)?;
                // A query may ask for more than is worth trying.
                let most = if wanted.is_some() { of } else { d.at_most.min(of) };
                divisors(of, d.multiple_of, most)
            }
        };
        values.retain(|&value| wanted.is_none_or(|w| w.admits(value)));
        Ok(values)
    }

    fn bind(&mut self, level: usize, value: i64) {
        match self.levels[level].choice {
            Choice::Method => {
                for (at, method) in self.facts.methods.iter().enumerate() {
                    let taken = at as i64 == value;
                    self.bindings.set(&method.name, i64::from(taken));
                    if taken {
                        self.method = Some(&method.name);
                    }
                }
            }
            Choice::Tile(variable) => {
                self.bindings.set(&variable.name, value);
                self.values.push((&variable.name, value));
            }
        }
    }

    fn unbind(&mut self, level: usize) {
        match self.levels[level].choice {
            Choice::Method => self.method = None,
            Choice::Tile(_) => {
                self.values.pop();
            }
        }
    }

    fn leaf(&mut self, visit: &mut dyn FnMut(&Leaf) -> Result<ControlFlow<()>>) -> Result<ControlFlow<(), bool>> {
        let counts = |rule| !self.skipped.contains(&rule);
        if self.query.records && counts(Rule::Record) && self.repeats_a_failure() {
            *self.rejected.entry(Rule::Record).or_default() += 1;
            return Ok(ControlFlow::Continue(false));
        }
        if let (Some(least), Some(used), true) = (self.query.min_tiles, &self.facts.tiles.used, counts(Rule::Tiles))
            && used.value(&self.bindings)? < least
        {
            *self.rejected.entry(Rule::Tiles).or_default() += 1;
            return Ok(ControlFlow::Continue(false));
        }
        let leaf = Leaf { method: self.method, values: &self.values, bindings: &self.bindings };
        Ok(visit(&leaf)?.map_continue(|()| true))
    }

    fn repeats_a_failure(&self) -> bool {
        self.facts.known_bad.iter().any(|bad| {
            bad.shape.iter().all(|(name, &value)| self.query.shape.get(name) == Some(&value))
                && bad.method.as_deref().is_none_or(|m| self.method == Some(m))
                && bad.config.iter().all(|(name, wanted)| self.bindings.get(name).is_some_and(|v| wanted.admits(v)))
        })
    }
}

/// Divisors of `n` that are multiples of `multiple` and at most `most`, largest first.
fn divisors(n: i64, multiple: i64, most: i64) -> Vec<i64> {
    let mut found = Vec::new();
    let mut value = most - most.rem_euclid(multiple.max(1));
    while value >= multiple.max(1) {
        if n % value == 0 {
            found.push(value);
        }
        value -= multiple.max(1);
    }
    found
}

/// The level at which an expression can be evaluated; none when it reads what stays open.
fn at(expr: &Expr, bound: &BTreeMap<&str, usize>) -> Option<usize> {
    expr.reads().iter().map(|name| bound.get(name.as_str()).copied()).try_fold(0, |level, at| Some(level.max(at?)))
}

/// Constraints that a config breaks without being rejected for it.
///
/// Errors: from an expression that cannot be evaluated.
pub fn warnings<'a>(facts: &'a KernelFacts, bindings: &Bindings) -> Result<Vec<&'a Constraint>> {
    let mut warnings = Vec::new();
    for constraint in facts.constraints.iter().filter(|c| !c.kind.rejects()) {
        if let Some(expr) = &constraint.expr
            && expr.reads().iter().all(|name| bindings.get(name).is_some())
            && !expr.holds(bindings)?
        {
            warnings.push(constraint);
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_what_they_say() {
        assert_eq!(divisors(720, 16, 512), [240, 144, 80, 48, 16]);
        assert_eq!(divisors(7, 16, 512), [0i64; 0]);
        assert_eq!(divisors(48, 16, 48), [48, 16]);
    }
}
