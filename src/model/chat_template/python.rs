//! What HF adds to jinja2 for chat templates, and what jinja2 has from Python.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Marks the message of a template's own exception.
pub const RAISED: &str = "raised: ";

/// `raise_exception(message)`.
pub fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// `strftime_now(format)` on the fixed date, 26 July 2024 at noon, a Friday.
pub fn strftime_now(format: String) -> Result<String, Error> {
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let code = match chars.next() {
            Some('-') => chars.next().map(|c| (c, true)),
            other => other.map(|c| (c, false)),
        };
        out.push_str(match code {
            Some(('Y', _)) => "2024",
            Some(('y', _)) => "24",
            Some(('m', false)) => "07",
            Some(('m', true)) => "7",
            Some(('d' | 'e', _)) => "26",
            Some(('b' | 'h', _)) => "Jul",
            Some(('B', _)) => "July",
            Some(('a', _)) => "Fri",
            Some(('A', _)) => "Friday",
            Some(('H' | 'I', _)) => "12",
            Some(('M' | 'S', false)) => "00",
            Some(('M' | 'S', true)) => "0",
            Some(('p', _)) => "PM",
            Some(('j', _)) => "208",
            Some(('F', _)) => "2024-07-26",
            Some(('T', _)) => "12:00:00",
            Some(('%', _)) => "%",
            Some((other, _)) => return Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now: %{other}"))),
            None => return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: a lone %")),
        });
    }
    Ok(out)
}

/// `tojson` as HF overrides it: Python's `json.dumps` without HTML escapes, non-ASCII kept.
pub fn tojson(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = args.get("indent")?;
    let ascii: Option<bool> = args.get("ensure_ascii")?;
    let sort: Option<bool> = args.get("sort_keys")?;
    let separators: Option<Vec<String>> = args.get("separators")?;
    args.assert_all_used()?;
    let (item, colon) = match separators.as_deref() {
        Some([item, colon]) => (item.clone(), colon.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings")),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = Style { indent, ascii: ascii.unwrap_or(false), sort: sort.unwrap_or(false), item, colon };
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

struct Style {
    indent: Option<usize>,
    ascii: bool,
    sort: bool,
    item: String,
    colon: String,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => out.push_str("null"),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.block(('[', ']'), items.len(), depth, out, |i, out| self.write(&items[i], depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.block(('{', '}'), keys.len(), depth, out, |i, out| {
                    self.string(&keys[i].to_string(), out);
                    out.push_str(&self.colon);
                    self.write(&value.get_item(&keys[i])?, depth + 1, out)
                })?;
            }
            other => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: a value of kind {other}"))),
        }
        Ok(())
    }

    fn block(
        &self,
        (open, close): (char, char),
        n: usize,
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for i in 0..n {
            if i > 0 {
                out.push_str(&self.item);
            }
            self.line(depth + 1, out);
            item(i, out)?;
        }
        if n > 0 {
            self.line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !c.is_ascii()) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// HF's `{% generation %}` only marks a span; here it becomes a block that is always rendered.
pub fn generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + end];
        let bare = tag.trim_matches(['-', '+']).trim();
        out.push_str(&rest[..start + 2]);
        match bare {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[start + end + 2..];
    }
    out.push_str(rest);
    out
}
