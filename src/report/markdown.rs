//! A report as Markdown.

use std::fmt::Write;

use super::{Report, Table};

pub(super) fn render(report: &Report) -> String {
    let mut out = String::new();
    let Report { command, model, device, device_description, verdict, facts, tables, .. } = report;
    // Writing to a String cannot fail.
    let _ =
        writeln!(out, "# {command}: {model} on {device}\n\n**{}** ({device_description})\n", verdict.outcome().word());
    for reason in verdict.reasons() {
        let _ = writeln!(out, "- {reason}");
    }
    for warning in verdict.warnings() {
        let _ = writeln!(out, "- warning: {warning}");
    }
    let _ = writeln!(out, "\nCompared: {}\n", verdict.extent());
    for (name, value) in facts {
        let _ = writeln!(out, "- {name}: {}", value.text());
    }
    for table in tables {
        out.push('\n');
        out.push_str(&table_markdown(table));
    }
    out
}

/// A pipe table with its title as heading.
pub fn table_markdown(table: &Table) -> String {
    let escape = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = format!("## {}\n\n", table.title);
    out.push_str(&line(table.columns.iter().map(|c| escape(c)).collect()));
    out.push_str(&line(table.columns.iter().map(|_| "---".into()).collect()));
    for row in &table.rows {
        out.push_str(&line(row.iter().map(|c| escape(&c.text())).collect()));
    }
    out
}
