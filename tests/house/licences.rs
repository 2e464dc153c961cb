//! Every package that ends up in the build can be used under a licence without copyleft.

use std::process::Command;

use serde_json::Value;

use super::files;

const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
];

/// Packages under something else, unavoidable, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[(
    "option-ext",
    "MPL-2.0",
    "hf-hub finds the cache through dirs, which needs it; copyleft of its own files only, and they are unchanged",
)];

/// Whether an SPDX expression can be satisfied with [`ALLOWED`] alone. The old `MIT/Apache-2.0` means OR.
fn satisfiable(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens = spaced.split_whitespace().collect::<Vec<_>>();
    let (value, rest) = either(&tokens);
    value && rest.is_empty()
}

fn either<'a>(tokens: &'a [&'a str]) -> (bool, &'a [&'a str]) {
    let (mut value, mut rest) = both(tokens);
    while let Some(("OR", after)) = rest.split_first().map(|(first, after)| (*first, after)) {
        let (other, after) = both(after);
        value |= other;
        rest = after;
    }
    (value, rest)
}

fn both<'a>(tokens: &'a [&'a str]) -> (bool, &'a [&'a str]) {
    let (mut value, mut rest) = single(tokens);
    while let Some(("AND", after)) = rest.split_first().map(|(first, after)| (*first, after)) {
        let (other, after) = single(after);
        value &= other;
        rest = after;
    }
    (value, rest)
}

fn single<'a>(tokens: &'a [&'a str]) -> (bool, &'a [&'a str]) {
    match tokens {
        ["(", rest @ ..] => {
            let (value, rest) = either(rest);
            match rest {
                [")", rest @ ..] => (value, rest),
                _ => (false, rest),
            }
        }
        [licence, "WITH", exception, rest @ ..] => {
            (ALLOWED.contains(&format!("{licence} WITH {exception}").as_str()), rest)
        }
        [licence, rest @ ..] => (ALLOWED.contains(licence), rest),
        [] => (false, tokens),
    }
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).current_dir(files::root()).output();
    let output = output.unwrap_or_else(|e| panic!("{program} {args:?}: {e}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn no_dependency_needs_copyleft() {
    // Only this platform's packages: cargo has not fetched the others, and the test must work offline.
    let version = output("rustc", &["-vV"]);
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host line");
    let args = ["metadata", "--offline", "--locked", "--format-version", "1", "--filter-platform", host];
    let metadata: Value = serde_json::from_str(&output(env!("CARGO"), &args)).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 50, "only {} packages", packages.len());
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let licence = package["license"].as_str().unwrap_or("none named");
        let excepted = EXCEPTIONS.iter().any(|(package, under, _)| *package == name && *under == licence);
        if !satisfiable(licence) && !excepted {
            wrong.push(format!("{name}: {licence}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for (name, ..) in EXCEPTIONS {
        assert!(packages.iter().any(|package| package["name"] == *name), "{name} is gone, its exception can go too");
    }
}

#[test]
fn expressions() {
    for good in [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR GPL-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception OR X",
    ] {
        assert!(satisfiable(good), "{good}");
    }
    for bad in ["", "GPL-3.0", "MPL-2.0", "MIT AND GPL-3.0", "(MIT", "MIT Apache-2.0", "none named"] {
        assert!(!satisfiable(bad), "{bad}");
    }
}
