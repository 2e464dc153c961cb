//! What a case measured, as the ordered `name value` lines of its baseline, and how two such texts are compared.

use super::band::{Band, band_of};

/// An ordered list of named numbers, counts and texts.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    lines: Vec<(String, Value)>,
}

#[derive(Clone, Debug)]
enum Value {
    Number(f64),
    Count(u64),
    Text(String),
}

impl Numbers {
    pub fn new() -> Numbers {
        Numbers::default()
    }

    /// A measured number; its name holds a metric word of [`METRICS`](super::METRICS), which gives it its band.
    pub fn number(self, name: impl Into<String>, value: f64) -> Numbers {
        self.line(name, Value::Number(value))
    }

    /// A count or an index: equal to the baseline's or not.
    pub fn count(self, name: impl Into<String>, value: u64) -> Numbers {
        self.line(name, Value::Count(value))
    }

    /// A verdict or a name, one line: equal to the baseline's or not.
    pub fn text(self, name: impl Into<String>, value: impl Into<String>) -> Numbers {
        self.line(name, Value::Text(value.into()))
    }

    fn line(mut self, name: impl Into<String>, value: Value) -> Numbers {
        self.lines.push((name.into(), value));
        self
    }

    /// The baseline's text; the first flaw that makes it unfit to be one is the error.
    pub(super) fn render(&self) -> Result<String, String> {
        if self.lines.is_empty() {
            return Err("a baseline without a single number".into());
        }
        let mut text = String::new();
        for (at, (name, value)) in self.lines.iter().enumerate() {
            let fits = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_' || c == b'.';
            if name.is_empty() || !name.bytes().all(fits) {
                return Err(format!("baseline name {name:?} is not [a-z0-9_.]+"));
            }
            if self.lines[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(format!("baseline name {name:?} is there twice"));
            }
            text += &format!("{name} {}\n", value.render(name)?);
        }
        Ok(text)
    }
}

impl Value {
    fn render(&self, name: &str) -> Result<String, String> {
        match self {
            Value::Number(value) => render_number(name, *value),
            Value::Count(value) => Ok(value.to_string()),
            Value::Text(text) => {
                let one_line = !text.is_empty() && text.trim() == text && !text.contains(['\n', '\r']);
                if !one_line || text.parse::<f64>().is_ok() {
                    return Err(format!("baseline text {name}: {text:?} is not one line of text"));
                }
                Ok(text.clone())
            }
        }
    }
}

/// Six significant digits; a cosine gets three more, because what counts is its distance from 1.
fn render_number(name: &str, value: f64) -> Result<String, String> {
    let band = band_of(name).ok_or_else(|| format!("baseline number {name}: no metric word, hence no band"))?;
    let value = if value == 0.0 { 0.0 } else { value };
    match band {
        _ if value.is_nan() => Err(format!("{name} is NaN: not a baseline")),
        Band::Decibel if value == f64::INFINITY => Ok("inf".into()),
        _ if value.is_infinite() => Err(format!("{name} is {value}: not a baseline")),
        Band::Cosine => Ok(format!("{value:.8e}")),
        Band::Error { .. } | Band::Signed { .. } | Band::Decibel => Ok(format!("{value:.5e}")),
    }
}

/// Every way in which `found` is not what the baseline `stored` says, one line each; empty if all is within the bands.
pub(super) fn differences(stored: &str, found: &str) -> Vec<String> {
    let (stored, found) = (parse(stored), parse(found));
    let names = |lines: &[(String, String)]| lines.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    if names(&stored) != names(&found) {
        return vec![format!("found the numbers {}, expected {}", names(&found).join(" "), names(&stored).join(" "))];
    }
    let pairs = stored.iter().zip(&found);
    pairs.filter_map(|((name, stored), (_, found))| difference(name, stored, found)).collect()
}

fn parse(text: &str) -> Vec<(String, String)> {
    let split = |line: &str| {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        (name.to_owned(), value.trim().to_owned())
    };
    text.lines().filter(|line| !line.trim().is_empty()).map(split).collect()
}

fn difference(name: &str, stored: &str, found: &str) -> Option<String> {
    let rule = match (band_of(name), measured(stored), measured(found)) {
        (Some(band), Some(a), Some(b)) if band.holds(a, b) => return None,
        (Some(band), Some(_), Some(_)) => band.to_string(),
        _ if stored == found && stored != "NaN" => return None,
        _ => "equal".to_owned(),
    };
    Some(format!("{name}: found {found}, baseline {stored} ({rule})"))
}

/// A number as [`render_number`] writes it; a count or a text is none.
fn measured(value: &str) -> Option<f64> {
    let written = value.contains('e') || value == "inf" || value == "NaN";
    if written { value.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn lines_keep_their_order_and_digits() {
        let numbers = Numbers::new()
            .number("cosine", 0.999_912_345_678)
            .number("max_abs", 0.015625)
            .number("mean_abs", -0.0)
            .number("sqnr_db", f64::INFINITY)
            .count("positions", 12)
            .text("integration", "kernel-first");
        let text = "cosine 9.99912346e-1\nmax_abs 1.56250e-2\nmean_abs 0.00000e0\nsqnr_db inf\npositions 12\nintegration kernel-first\n";
        assert_eq!(numbers.render().unwrap(), text);
    }

    #[rstest]
    #[case::empty(Numbers::new(), "without")]
    #[case::nan(Numbers::new().number("cosine", f64::NAN), "NaN")]
    #[case::infinite(Numbers::new().number("max_abs", f64::INFINITY), "inf")]
    #[case::no_metric(Numbers::new().number("speed", 1.0), "no metric word")]
    #[case::twice(Numbers::new().count("a", 1).count("a", 1), "twice")]
    #[case::bad_name(Numbers::new().count("A b", 1), "[a-z0-9_.]+")]
    #[case::two_lines(Numbers::new().text("a", "b\nc"), "one line")]
    #[case::number_as_text(Numbers::new().text("cosine", "1e0"), "one line")]
    fn unfit(#[case] numbers: Numbers, #[case] why: &str) {
        let found = numbers.render().unwrap_err();
        assert!(found.contains(why), "{found}");
    }

    #[rstest]
    #[case::same("max_abs 1.0e-2\nsteps 32\n", "max_abs 1.0e-2\nsteps 32\n", 0)]
    #[case::within("max_abs 1.0e-2\nsteps 32\n", "max_abs 1.4e-2\nsteps 32\n", 0)]
    #[case::both_off("max_abs 1.0e-2\nsteps 32\n", "max_abs 1.6e-2\nsteps 31\n", 2)]
    #[case::count_named_like_a_metric("max_abs_at 17", "max_abs_at 18", 1)]
    #[case::text("verdict a b", "verdict a c", 1)]
    #[case::nan("cosine NaN", "cosine NaN", 1)]
    #[case::nan_without_band("what NaN", "what NaN", 1)]
    #[case::line_gone("a 1\nb 2", "a 1", 1)]
    #[case::line_new("a 1", "a 1\nb 2", 1)]
    #[case::order("a 1\nb 2", "b 2\na 1", 1)]
    fn compared(#[case] stored: &str, #[case] found: &str, #[case] count: usize) {
        assert_eq!(differences(stored, found).len(), count, "{:?}", differences(stored, found));
    }

    proptest! {
        #[test]
        fn a_rendered_text_equals_itself(cosine in -1.0..1.0f64, max_abs in 0.0..1e6f64, steps in any::<u64>()) {
            let numbers = Numbers::new().number("cosine", cosine).number("max_abs", max_abs).count("steps", steps);
            let text = numbers.render().unwrap();
            prop_assert!(differences(&text, &text).is_empty());
        }

        #[test]
        fn comparison_is_symmetric(a in 1e-9..1.0f64, b in 1e-9..1.0f64) {
            let text = |v| Numbers::new().number("max_abs", v).number("cosine", v).render().unwrap();
            let (a, b) = (text(a), text(b));
            prop_assert_eq!(differences(&a, &b).len(), differences(&b, &a).len());
        }
    }
}
