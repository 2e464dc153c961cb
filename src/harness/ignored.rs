//! Why cases are ignored, said once per reason: libtest-mimic has no place for it, and nextest starts no ignored case.

use std::collections::BTreeMap;

/// One ignored trial: its name and why.
#[derive(Clone, Debug)]
pub(super) struct Ignored {
    pub name: String,
    pub why: String,
}

/// One line per reason, in order of first appearance:
/// `ignored 75 cases: models/x is not there; make model (layer::x 72, token_set::x 3)`.
pub(super) fn summary<'a>(ignored: impl IntoIterator<Item = &'a Ignored>) -> Vec<String> {
    let mut order: Vec<&str> = Vec::new();
    let mut groups: BTreeMap<&str, Vec<(String, usize)>> = BTreeMap::new();
    for Ignored { name, why } in ignored {
        if !groups.contains_key(why.as_str()) {
            order.push(why);
        }
        let kinds = groups.entry(why).or_default();
        let kind = kind_of(name);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let line = |why: &str| {
        let kinds = &groups[why];
        let count: usize = kinds.iter().map(|(_, count)| count).sum();
        let listed = kinds.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>();
        format!("ignored {count} case{}: {why} ({})", if count == 1 { "" } else { "s" }, listed.join(", "))
    };
    order.into_iter().map(line).collect()
}

/// The first two segments, and of a short name the first: enough to filter by.
fn kind_of(name: &str) -> String {
    let segments = name.split("::").collect::<Vec<_>>();
    segments[..if segments.len() > 2 { 2 } else { 1 }].join("::")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_reason() {
        let ignored = |name: &str, why: &str| Ignored { name: name.into(), why: why.into() };
        let all = [
            ignored("layer::x::l00::emu", "no x"),
            ignored("layer::x::l01::emu", "no x"),
            ignored("add::npu", "no npu"),
            ignored("token_set::x::base_00::emu", "no x"),
        ];
        let lines = ["ignored 3 cases: no x (layer::x 2, token_set::x 1)", "ignored 1 case: no npu (add 1)"];
        assert_eq!(summary(&all), lines);
        assert!(summary(&[]).is_empty());
    }
}
