//! Two runs of the same command: what got better, worse, changed, is new, or is no longer there.
//!
//! Which way is better is taken from a figure's name; a name that says nothing is a change and no more.

use super::stored::Stored;
use super::{Cell, Table};

/// How a figure moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Worse,
    /// It was compared before and is not now.
    Skipped,
    Better,
    Changed,
    New,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Worse => "worse",
            Kind::Skipped => "newly skipped",
            Kind::Better => "better",
            Kind::Changed => "changed",
            Kind::New => "new",
        }
    }
}

/// One figure that is not what it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    pub kind: Kind,
    pub what: String,
    pub before: String,
    pub after: String,
}

/// Changes of numbers smaller than this share are noise of the last digits.
const SAME: f64 = 1e-6;
/// Times differ from run to run: below this share nothing is said. A verdict on time is for phases 4 and 5.
const SAME_TIME: f64 = 0.5;

/// Everything that differs between two reports, worst first.
pub fn differences(before: &Stored, after: &Stored) -> Vec<Change> {
    let mut all = vec![];
    push(&mut all, "verdict".into(), Some(&Cell::from(before.outcome.as_str())), Some(&after.outcome.as_str().into()));
    named(&mut all, "", &before.facts, &after.facts);
    for count in &after.extent {
        let old = before.extent.iter().find(|c| c.what == count.what).map(|c| Cell::Count(c.compared));
        push(&mut all, format!("compared {}", count.what), old.as_ref(), Some(&Cell::Count(count.compared)));
    }
    for count in before.extent.iter().filter(|c| !after.extent.iter().any(|d| d.what == c.what)) {
        push(&mut all, format!("compared {}", count.what), Some(&Cell::Count(count.compared)), None);
    }
    for table in &before.tables {
        match after.tables.iter().find(|t| t.title == table.title && t.columns == table.columns) {
            Some(new) => rows(&mut all, table, new),
            None => push(&mut all, table.title.clone(), Some(&format!("{} rows", table.rows.len()).into()), None),
        }
    }
    all.sort_by_key(|change| change.kind);
    all
}

fn named(all: &mut Vec<Change>, prefix: &str, before: &[(String, Cell)], after: &[(String, Cell)]) {
    for (name, new) in after {
        let old = before.iter().find(|(known, _)| known == name).map(|(_, old)| old);
        push(all, format!("{prefix}{name}"), old, Some(new));
    }
    for (name, old) in before.iter().filter(|(name, _)| !after.iter().any(|(known, _)| known == name)) {
        push(all, format!("{prefix}{name}"), Some(old), None);
    }
}

/// Rows of a table are told apart by their first cell.
fn rows(all: &mut Vec<Change>, before: &Table, after: &Table) {
    let cells = |row: &[Cell]| -> Vec<(String, Cell)> {
        before.columns.iter().cloned().zip(row.iter().cloned()).skip(1).collect()
    };
    let key = |row: &[Cell]| row.first().map(Cell::text).unwrap_or_default();
    for row in &after.rows {
        match before.rows.iter().find(|old| key(old) == key(row)) {
            Some(old) => named(all, &format!("{}: ", key(row)), &cells(old), &cells(row)),
            None => push(all, format!("{}: {}", before.title, key(row)), None, Some(&"there".into())),
        }
    }
    for row in before.rows.iter().filter(|row| !after.rows.iter().any(|new| key(new) == key(row))) {
        push(all, format!("{}: {}", before.title, key(row)), Some(&"there".into()), None);
    }
}

fn push(all: &mut Vec<Change>, what: String, before: Option<&Cell>, after: Option<&Cell>) {
    let kind = match (before, after) {
        (Some(old), Some(new)) => match kind(&what, old, new) {
            Some(kind) => kind,
            None => return,
        },
        (Some(_), None) => Kind::Skipped,
        (None, Some(_)) => Kind::New,
        (None, None) => return,
    };
    let text = |cell: Option<&Cell>| cell.map_or_else(|| "-".into(), Cell::text);
    all.push(Change { kind, what, before: text(before), after: text(after) });
}

/// How a value moved; none when it did not.
fn kind(what: &str, old: &Cell, new: &Cell) -> Option<Kind> {
    let (Some(a), Some(b)) = (old.number(), new.number()) else {
        if old.text() == new.text() {
            return None;
        }
        return Some(match (severity(&old.text()), severity(&new.text())) {
            (Some(0), Some(1)) => Kind::Skipped,
            (Some(old), Some(new)) if new > old => Kind::Worse,
            (Some(_), Some(_)) => Kind::Better,
            _ => Kind::Changed,
        });
    };
    let name = what.rsplit(": ").next().unwrap_or(what);
    let same = if is_time(name) { SAME_TIME } else { SAME };
    if a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= same * a.abs().max(b.abs()) {
        return None;
    }
    Some(match larger_is_better(name) {
        None => Kind::Changed,
        Some(better) if (b > a) == better => Kind::Better,
        Some(_) => Kind::Worse,
    })
}

/// Rank of an outcome, in either spelling; none for other words.
fn severity(word: &str) -> Option<usize> {
    const OUTCOMES: [&str; 6] = ["pass", "not_run", "disputed", "inconclusive", "vacuous", "fail"];
    let word = word.to_lowercase().replace(' ', "_");
    OUTCOMES.iter().position(|known| *known == word)
}

fn is_time(name: &str) -> bool {
    ["_ms", "_us", "seconds", "ms", "us", "tok_s", "tps"].iter().any(|unit| name.to_lowercase().contains(unit))
}

/// By name: cosines, ratios of signal and counts of what agrees are better when larger, errors and times when smaller.
fn larger_is_better(name: &str) -> Option<bool> {
    const LARGER: &[&str] = &["cos", "sqnr", "same", "overlap", "compared", "steps", "tok_s", "tps", "killed", "gflop"];
    const SMALLER: &[&str] = &[
        "kl", "max_abs", "max_rel", "rel_l2", "rel_l1", "noise", "regret", "nmse", "escaped", "missed", "_ms", "_us",
        "seconds", "ms", "error",
    ];
    let name = name.to_lowercase();
    // Not what is judged, or a sum over everything that a command did.
    if name.contains("floor") || name == "seconds" {
        return None;
    }
    if LARGER.iter().any(|word| name.contains(word)) {
        return Some(true);
    }
    SMALLER.iter().any(|word| name.contains(word)).then_some(false)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("verdict", "pass".into(), "fail".into(), Some(Kind::Worse))]
    #[case("verdict", "fail".into(), "pass".into(), Some(Kind::Better))]
    #[case("verdict", "pass".into(), "not_run".into(), Some(Kind::Skipped))]
    #[case("verdict", "not_run".into(), "pass".into(), Some(Kind::Better))]
    #[case("base_00: verdict", "PASS".into(), "INCONCLUSIVE".into(), Some(Kind::Worse))]
    #[case("kl_median", 1e-3.into(), 2e-3.into(), Some(Kind::Worse))]
    #[case("kl_median", 1e-3.into(), 1e-3.into(), None)]
    #[case("kl_floor_median", 1e-3.into(), 2e-3.into(), Some(Kind::Changed))]
    #[case("00: cosine", 0.5.into(), 0.6.into(), Some(Kind::Better))]
    #[case("compared steps", Cell::Count(800), Cell::Count(64), Some(Kind::Worse))]
    #[case("decode_ms_median", 10.0.into(), 14.0.into(), None)]
    #[case("decode_ms_median", 10.0.into(), 25.0.into(), Some(Kind::Worse))]
    #[case("seconds", 1.0.into(), 25.0.into(), Some(Kind::Changed))]
    #[case("engine", "a".into(), "b".into(), Some(Kind::Changed))]
    #[case("x", f64::NAN.into(), f64::NAN.into(), None)]
    fn moves(#[case] what: &str, #[case] old: Cell, #[case] new: Cell, #[case] expected: Option<Kind>) {
        assert_eq!(kind(what, &old, &new), expected);
    }
}
