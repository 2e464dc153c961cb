//! Prompt files: lines, expectations, ids, and what is wrong with them.

use std::path::Path;

use rstest::rstest;

use super::*;

#[rstest]
#[case("a b", "a b", &[])]
#[case("  a b  ", "a b", &[])]
#[case("a => b", "a", &["b"])]
#[case("a => b | c d ", "a", &["b", "c d"])]
#[case("def add(a, b): return a + => b", "def add(a, b): return a +", &["b"])]
#[case("a => b => c", "a", &["b => c"])]
#[case("a=>b", "a=>b", &[])]
#[case("São Paulo é", "São Paulo é", &[])]
fn lines(#[case] line: &str, #[case] text: &str, #[case] expect: &[&str]) {
    let read = parse(Path::new("p.txt"), &format!("# head\n\n{line}\r\n")).expect("a prompt");
    assert_eq!(read, [Line { text: text.into(), expect: expect.iter().map(|s| s.to_string()).collect() }]);
}

#[rstest]
#[case("", "no prompt in it")]
#[case("# only a comment\n\n", "no prompt in it")]
#[case("=> b", "line 1: an expectation without a prompt")]
#[case("a\nb =>", "line 2: nothing after =>")]
#[case("a => b |  | c", "line 1: an empty alternative")]
fn damaged(#[case] text: &str, #[case] expected: &str) {
    let error = parse(Path::new("p.txt"), text).expect_err("no prompts").to_string();
    assert!(error.contains(expected), "found {error:?}, expected {expected:?} in it");
}

#[test]
fn ids_and_sets() {
    assert_eq!(id(PromptSet::Chat, 3), "chat_03");
    assert_eq!(PromptSet::of_id("long_00"), Some(PromptSet::Long));
    assert_eq!(PromptSet::of_id("long"), None);
    assert_eq!(PromptSet::of_id("poem_00"), None);
    assert!("poem".parse::<PromptSet>().expect_err("no set").to_string().contains("known: base, instruct, chat, long"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(list(root, PromptSet::Base).expect("readable").len(), 8);
    assert!(read(&root.join("prompts").join("none.txt")).is_err());
}

#[test]
fn expectations() {
    let expect = ["Paris".to_owned(), "the city".to_owned()];
    assert!(as_expected(" Paris.", &expect) && as_expected("\nthe city of", &expect) && as_expected("x", &[]));
    assert!(!as_expected(" paris", &expect) && !as_expected("", &expect));
}
