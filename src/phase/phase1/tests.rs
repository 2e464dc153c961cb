//! There are enough cases, and the judge tells a broken kernel from a good one.

use super::*;

#[test]
fn over_three_hundred_cases_without_a_model_too() {
    let cases = cases(&Outline::all().unwrap()).unwrap();
    assert!(cases.len() > 300, "{}", cases.len());
}
