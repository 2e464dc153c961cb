//! A [`Plot`] as inline SVG: no script, colours from the page's variables, values on hover through `<title>`.

use std::fmt::Write;

use super::{Cell, Plot};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;
/// Lines with a colour and a legend of their own; a plot of more draws all but the first alike.
const COLOURS: usize = 4;
/// Values named on hover.
const NAMED: usize = 6;

/// The drawing; empty when there is no finite value to draw.
pub(super) fn draw(plot: &Plot) -> String {
    let Some(axes) = Axes::of(plot) else { return String::new() };
    let mut out = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\" preserveAspectRatio=\"xMidYMid meet\">",
        escape(&plot.title)
    );
    axes.grid(&mut out, plot);
    if let Some(limit) = plot.limit {
        let y = axes.y(limit);
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "<line class=\"limit\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"limit\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">limit {}</text>",
            WIDTH - RIGHT,
            WIDTH - RIGHT - 2.0,
            y - 4.0,
            short(limit)
        );
    }
    let many = plot.series.len() > COLOURS;
    // The first line is drawn last: it is the one that the others are held against.
    for (index, series) in plot.series.iter().enumerate().rev() {
        let class = if many && index > 0 { "line many".into() } else { format!("line s{}", index % COLOURS) };
        let path = axes.path(&series.points);
        let _ = write!(out, "<path class=\"{class}\" d=\"{path}\"><title>{}</title></path>", escape(&series.name));
        if !many {
            for &(x, y) in series.points.iter().filter(|(_, y)| y.is_finite()) {
                let _ = write!(
                    out,
                    "<circle class=\"s{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>",
                    index,
                    axes.x(x),
                    axes.y(y)
                );
            }
        }
    }
    axes.hover(&mut out, plot);
    out.push_str("</svg>");
    out
}

/// Names and classes for the legend under a plot.
pub(super) fn legend(plot: &Plot) -> Vec<(String, String)> {
    let many = plot.series.len() > COLOURS;
    let shown = if many { 1 } else { plot.series.len() };
    let mut legend: Vec<(String, String)> =
        plot.series.iter().take(shown).enumerate().map(|(i, s)| (format!("s{i}"), s.name.clone())).collect();
    if many {
        legend.push(("many".into(), format!("{} others, a line each", plot.series.len() - 1)));
    }
    legend
}

struct Axes {
    x0: f64,
    x1: f64,
    y0: f64,
    y1: f64,
    log: bool,
}

impl Axes {
    fn of(plot: &Plot) -> Option<Axes> {
        let points = || plot.series.iter().flat_map(|s| s.points.iter().copied()).filter(|(_, y)| y.is_finite());
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        let (x0, x1) = range(&mut points().map(|(x, _)| x));
        let drawn = points().map(|(_, y)| y).chain(plot.limit);
        let (mut y0, mut y1) = range(&mut drawn.filter(|y| !plot.log || *y > 0.0));
        if !(x0.is_finite() && y0.is_finite()) {
            return None;
        }
        if plot.log {
            (y0, y1) = (y0.log10().floor(), y1.log10().ceil());
        } else if y0 > 0.0 && y0 < 0.5 * y1 {
            y0 = 0.0;
        }
        if y1 - y0 < 1e-12 {
            (y0, y1) = (y0 - 0.5, y1 + 0.5);
        }
        Some(Axes { x0, x1: if x1 > x0 { x1 } else { x0 + 1.0 }, y0, y1, log: plot.log })
    }

    fn x(&self, x: f64) -> f64 {
        LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
    }

    /// A value that a logarithmic axis cannot hold lies on its floor.
    fn y(&self, y: f64) -> f64 {
        let y = if self.log { if y > 0.0 { y.log10().max(self.y0) } else { self.y0 } } else { y };
        HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let mut path = String::new();
        let mut pen = 'M';
        for &(x, y) in points {
            if y.is_finite() {
                let _ = write!(path, "{pen}{:.1} {:.1}", self.x(x), self.y(y));
                pen = 'L';
            } else {
                pen = 'M';
            }
        }
        path
    }

    fn grid(&self, out: &mut String, plot: &Plot) {
        for value in self.y_ticks() {
            let y = self.y(if self.log { 10f64.powf(value) } else { value });
            let text = if self.log { format!("1e{value:.0}") } else { short(value) };
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0
            );
        }
        for value in ticks(self.x0, self.x1, 8) {
            let _ = write!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                self.x(value),
                HEIGHT - BOTTOM + 15.0,
                short(value)
            );
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 4.0,
            escape(&plot.x)
        );
        let (x, y) = (13.0, (TOP + HEIGHT - BOTTOM) / 2.0);
        let _ = write!(
            out,
            "<text transform=\"translate({x} {y:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(&plot.y)
        );
    }

    fn y_ticks(&self) -> Vec<f64> {
        if !self.log {
            return ticks(self.y0, self.y1, 5);
        }
        let decades = (self.y1 - self.y0).round().max(1.0) as usize;
        (0..=decades).step_by(decades.div_ceil(5)).map(|i| self.y0 + i as f64).collect()
    }

    /// A band per x that names the values there, the first line's and then the largest.
    fn hover(&self, out: &mut String, plot: &Plot) {
        let mut xs: Vec<f64> = plot.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let width = (WIDTH - LEFT - RIGHT) / xs.len().max(1) as f64;
        for &x in &xs {
            let at = |s: &super::Series| s.points.iter().find(|p| p.0 == x).map(|p| (s.name.clone(), p.1));
            let mut values: Vec<(String, f64)> = plot.series.iter().filter_map(at).collect();
            if values.len() > NAMED {
                values[1..].sort_by(|a, b| b.1.total_cmp(&a.1));
                values.truncate(NAMED);
            }
            let lines: String =
                values.iter().map(|(name, y)| format!("\n{}: {}", escape(name), Cell::Number(*y).text())).collect();
            let _ = write!(
                out,
                "<rect class=\"hover\" x=\"{:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{:.1}\"><title>{} {}{lines}</title></rect>",
                self.x(x) - width / 2.0,
                HEIGHT - TOP - BOTTOM,
                escape(&plot.x),
                short(x)
            );
        }
    }
}

/// Round values within `[low, high]`, about `n` of them.
fn ticks(low: f64, high: f64, n: usize) -> Vec<f64> {
    let rough = (high - low) / n as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

fn short(value: f64) -> String {
    let text =
        if value == 0.0 || (1e-3..1e5).contains(&value.abs()) { format!("{value:.3}") } else { format!("{value:.1e}") };
    if text.contains('.') && !text.contains('e') {
        text.trim_end_matches('0').trim_end_matches('.').into()
    } else {
        text
    }
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_zeros_are_drawn_as_such() {
        let mut plot = Plot::new("a < b", "step", "nats");
        plot.log = true;
        plot.line("one", [(0.0, 1e-3), (1.0, f64::NAN), (2.0, 0.0), (3.0, 1e-1)]);
        let svg = draw(&plot);
        assert_eq!(svg.matches("<path").count(), 1);
        assert_eq!(svg.split("d=\"").nth(1).unwrap().split('"').next().unwrap().matches('M').count(), 2);
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN\""), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 4);
    }

    #[test]
    fn nothing_to_draw_is_no_drawing() {
        let mut plot = Plot::new("t", "x", "y");
        assert_eq!(draw(&plot), "");
        plot.line("nan", [(0.0, f64::NAN)]);
        assert_eq!(draw(&plot), "");
        plot.line("one", [(0.0, 2.0)]);
        assert!(draw(&plot).contains("<path"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 31.0, 8), [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]);
        assert_eq!(short(0.25), "0.25");
        assert_eq!(short(20.0), "20");
    }
}
