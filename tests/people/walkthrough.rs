//! docs/walkthrough.md says what really happens: its commands are run, and print what stands there.
//!
//! A line `...` stands for any lines. Figures with a fraction or an exponent may differ, since they depend on the
//! instruction set; whole numbers, names and verdicts may not.

use std::fs;
use std::path::Path;

use assert_cmd::Command;

use crate::binary::root;

const PAGE: &str = "docs/walkthrough.md";

/// A command, and the lines that the page shows of it.
struct Step {
    command: String,
    shown: Vec<String>,
}

fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = vec![];
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("```") {
            inside = line == "```console";
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| inside) {
            steps.push(Step { command: command.into(), shown: vec![] });
        } else if inside {
            steps.last_mut().expect("a command before its output").shown.push(line.into());
        }
    }
    steps
}

/// A line without what may differ: widths, and figures with a fraction or an exponent.
fn plain(line: &str) -> String {
    let words =
        line.split(|c: char| c.is_whitespace() || "─┌┐└┘├┤┬┴┼│┆═╞╡╪".contains(c)).filter(|word| !word.is_empty());
    words.map(figures).collect::<Vec<_>>().join(" ")
}

/// A word with `#` for each such figure.
fn figures(word: &str) -> String {
    let mut out = String::new();
    let mut rest = word;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let end =
            rest[start..].find(|c: char| !(c.is_ascii_digit() || ".e-".contains(c))).map_or(rest.len(), |n| start + n);
        let found = rest[start..end].trim_end_matches(['.', '-', 'e']);
        let whole = found.bytes().all(|b| b.is_ascii_digit()) || found.parse::<f64>().is_err();
        out.push_str(&rest[..start]);
        out.push_str(if whole { found } else { "#" });
        rest = &rest[start + found.len()..];
    }
    out + rest
}

/// Where the page's lines are not the program's.
fn difference(shown: &[String], printed: &str) -> Option<String> {
    let printed: Vec<String> = printed.lines().map(plain).filter(|line| !line.is_empty()).collect();
    let blocks = shown.split(|line| line.trim() == "...");
    let mut at = 0;
    for (i, block) in blocks.enumerate() {
        let block: Vec<String> = block.iter().map(|line| plain(line)).filter(|line| !line.is_empty()).collect();
        if block.is_empty() {
            continue;
        }
        // Without `...` before it, the first block is the beginning.
        let last = if i == 0 { 0 } else { printed.len() };
        match (at..=last).find(|&start| printed[start.min(printed.len())..].starts_with(&block)) {
            Some(start) => at = start + block.len(),
            None => return Some(format!("not printed:\n{}\n\nprinted:\n{}", block.join("\n"), printed.join("\n"))),
        }
    }
    (at < printed.len() && shown.last().is_none_or(|line| line.trim() != "..."))
        .then(|| format!("printed, too: {}", printed[at..].join("\n")))
}

#[test]
fn the_walk_through_is_what_happens() {
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let steps = steps(&page);
    assert!(steps.len() >= 4, "{PAGE}: only {} commands", steps.len());
    let binaries = Path::new(env!("CARGO_BIN_EXE_phasegate")).parent().unwrap();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let reports = tempfile::tempdir().unwrap();
    for Step { command, shown } in steps {
        let (out, code) = {
            let mut shell = Command::new("sh");
            shell
                .current_dir(root())
                .env("PATH", &path)
                .args(["-c", &command.replace("REPORTS", &reports.path().to_string_lossy())]);
            let output = shell.output().unwrap();
            (String::from_utf8(output.stdout).unwrap(), output.status.code())
        };
        if let Some(difference) = difference(&shown, &out) {
            panic!("{PAGE}: $ {command}\n{difference}");
        }
        // What the page calls red ends red.
        let red = shown.iter().any(|line| line.starts_with("FAIL"));
        assert_eq!(code, Some(i32::from(red)), "{PAGE}: $ {command}");
    }
}

#[test]
fn a_page_that_says_something_else_is_found() {
    let shown = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let printed = "head\n| l02.add ┆ 207.46 | CULPRIT\nFAIL: layer 2: 9.44e-1 off (28/28)\n";
    assert_eq!(difference(&shown("...\n| l02.add ┆ 1.5 | CULPRIT\nFAIL: layer 2: 3.0e-1 off (28/28)"), printed), None);
    for wrong in [
        "...\n| l03.add ┆ 207.46 | CULPRIT\n...",
        "...\nFAIL: layer 2: 9.44e-1 off (28/27)",
        "...\nPASS: layer 2: 9.44e-1 off (28/28)",
        "FAIL: layer 2: 9.44e-1 off (28/28)",
        "...\n| l02.add ┆ 207.46 | CULPRIT",
    ] {
        assert!(difference(&shown(wrong), printed).is_some(), "{wrong}");
    }
}
