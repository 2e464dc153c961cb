//! Just enough reading of Rust source for the house rules: code without comments and texts, words, import paths.

/// The code alone: comments gone, the inside of texts and characters blanked, line breaks kept.
pub fn code(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let token = token_length(rest, code.chars().next_back());
        match token {
            Some(length) => {
                code.push(' ');
                code.extend(rest[..length].chars().filter(|&c| c == '\n'));
                rest = &rest[length..];
            }
            None => {
                code.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    code
}

/// The length of the comment, text or character literal that `rest` starts with, if it starts with one.
fn token_length(rest: &str, before: Option<char>) -> Option<usize> {
    let in_word = before.is_some_and(is_word);
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return Some(block_comment(rest));
    }
    if rest.starts_with('"') {
        return Some(quoted(rest, '"'));
    }
    if rest.starts_with("'\\") || (rest.starts_with('\'') && rest.chars().nth(2) == Some('\'')) {
        return Some(quoted(rest, '\''));
    }
    let raw = rest.strip_prefix('b').unwrap_or(rest).strip_prefix('r')?;
    let hashes = raw.len() - raw.trim_start_matches('#').len();
    if in_word || !raw[hashes..].starts_with('"') {
        return None;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let open = rest.len() - raw.len() + hashes + 1;
    Some(rest[open..].find(&close).map_or(rest.len(), |at| open + at + close.len()))
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        let here = &rest[at..];
        let step = if here.starts_with("/*") {
            depth += 1;
            2
        } else if here.starts_with("*/") {
            depth -= 1;
            2
        } else {
            here.chars().next().map_or(1, char::len_utf8)
        };
        at += step;
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a whole word stands in the code.
pub fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let border = |c: Option<char>| c.is_none_or(|c| !is_word(c));
        border(code[..at].chars().next_back()) && border(code[at + word.len()..].chars().next())
    })
}

/// Whether the code takes something from an external crate of that name: `name::`, `use name;`, `use name as`.
pub fn uses_crate(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let before = code[..at].trim_end();
        let alone = code[..at].chars().next_back().is_none_or(|c| !is_word(c));
        let from_elsewhere =
            before.ends_with("::") && before[..before.len() - 2].chars().next_back().is_some_and(is_word);
        let after = code[at + name.len()..].trim_start();
        let taken = after.starts_with("::") || (before.ends_with("use") && after.starts_with([';', ' ', 'a']));
        alone && !from_elsewhere && taken
    })
}

/// The rooms a file imports: what follows `crate::`, groups included.
pub fn rooms_of(code: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].chars().next_back().is_some_and(|c| is_word(c) || c == '$') {
            continue;
        }
        let path = code[at + "crate::".len()..].trim_start();
        match path.strip_prefix('{') {
            Some(group) => rooms.extend(group_heads(group)),
            None => rooms.push(head(path)),
        }
    }
    rooms.retain(|room| !room.is_empty());
    rooms.sort();
    rooms.dedup();
    rooms
}

fn head(path: &str) -> String {
    path.chars().take_while(|&c| is_word(c)).collect()
}

/// The first segment of each member of `a, b::{c, d}}`.
fn group_heads(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut heads) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '}' if depth == 0 => {
                heads.push(head(group[start..at].trim_start()));
                return heads;
            }
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                heads.push(head(group[start..at].trim_start()));
                start = at + 1;
            }
            _ => {}
        }
    }
    heads
}

#[test]
fn comments_and_texts_are_no_code() {
    let text = "a // b\n/* c /* d */ */ e \"f // \\\" g\" h r#\"i\" j\"# k 'l' '\\'' &'m n";
    let code = code(text);
    for word in ["a", "e", "h", "k", "m", "n"] {
        assert!(has_word(&code, word), "{word} in {code:?}");
    }
    for word in ["b", "c", "d", "f", "g", "i", "j", "l"] {
        assert!(!has_word(&code, word), "{word} in {code:?}");
    }
}

#[test]
fn imports_are_found() {
    let code = "use crate::error::Error;\nuse crate::{\n    tensor, model::{config, self},\n    plan as p };\nfn f() { crate::check::g(); $crate::x::y() }";
    assert_eq!(rooms_of(code), ["check", "error", "model", "plan", "tensor"]);
}

#[test]
fn crates_are_found() {
    assert!(uses_crate("use half::bf16;", "half"));
    assert!(uses_crate("let x = ::half::bf16::ONE;", "half"));
    assert!(uses_crate("use half;", "half"));
    for code in ["crate::half::x()", "let half = 2;", "behalf::x()", "use crate::model::half;", "safetensors_file::x"] {
        assert!(!uses_crate(code, "half") && !uses_crate(code, "safetensors"), "{code}");
    }
}
