//! The kill matrix: fault by gate, as JSON and as Markdown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;

use super::{Clean, Row};
use crate::fault::{Gate, catalogue};

/// What the figures do not say by themselves.
const READING: &str = "\
How to read this. The limits behind the false-alarm figure were set from these same sound models and prompts (fixtures/limits.toml), \
so it shows that they fit together and does not estimate a rate on other models; each limit would also clear a model when set \
from the other three, but for those that `in_sample` names there. An escape is a fault that no gate named by its catalogue entry saw: \
the entries of a few (layers' weights, kv_stale_row, bos_doubled) were given more gates after a first run showed which ones see them. \
A decode step counts as located up to two steps after the first affected one. On npu2, a fault that the device's own gates or lenses \
miss counts by the re-run of the same plan, weights and host on ieee, which says nothing of a fault in the silicon itself.

";

/// What an escape run found.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Matrix {
    pub rows: Vec<Row>,
    /// Clean runs, by name.
    pub clean: BTreeMap<String, Clean>,
}

/// The figures of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// Faults injected at least once.
    pub faults: usize,
    /// Instances: fault, model and device.
    pub instances: usize,
    /// Faults that no gate named by the catalogue saw on any model.
    pub escaped: usize,
    /// Instances that none of them saw.
    pub unseen: usize,
    /// Instances with a place to point at, and those pointed at rightly.
    pub placed: usize,
    pub located: usize,
    /// Instances that only the re-run on `ieee` saw, and those that only its lenses located.
    pub by_rerun: usize,
    pub located_by_rerun: usize,
    pub clean: usize,
    pub false_alarms: usize,
}

impl Matrix {
    pub fn figures(&self) -> Figures {
        let faults: BTreeSet<&str> = self.rows.iter().map(|row| row.fault.as_str()).collect();
        let killed: BTreeSet<&str> = self.rows.iter().filter(|r| r.killed).map(|row| row.fault.as_str()).collect();
        let placed = self.rows.iter().filter(|r| r.killed).filter_map(|row| row.located);
        let (placed, located) = placed.fold((0, 0), |(all, right), yes| (all + 1, right + usize::from(yes)));
        Figures {
            faults: faults.len(),
            instances: self.rows.len(),
            escaped: faults.difference(&killed).count(),
            unseen: self.rows.iter().filter(|row| !row.killed).count(),
            placed,
            located,
            by_rerun: self.reruns().filter(|row| row.seen().all(|gate| gate == Gate::IeeeRerun)).count(),
            located_by_rerun: self.reruns().filter(|row| row.located == Some(true)).count(),
            clean: self.clean.len(),
            false_alarms: self.clean.values().filter(|clean| !clean.alarms.is_empty()).count(),
        }
    }

    /// Instances whose own device did not suffice.
    fn reruns(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.killed && row.gates.contains_key(&Gate::IeeeRerun))
    }

    /// Whether a written matrix has these figures: cells may differ between instruction sets, what is claimed may not.
    pub fn is_documented(&self, document: &str) -> bool {
        let claims = |text: &str| {
            let lines =
                text.lines().skip_while(|line| !line.starts_with("| figure")).take_while(|line| line.starts_with('|'));
            lines.map(str::to_owned).collect::<Vec<String>>()
        };
        let own = claims(&self.markdown());
        !own.is_empty() && own == claims(document)
    }

    /// Rows in the order of the catalogue, models and devices by name.
    pub fn sort(&mut self) {
        let place = |row: &Row| catalogue().iter().position(|entry| entry.id == row.fault);
        self.rows.sort_by_key(|row| (place(row), row.device.clone(), row.model.clone()));
    }

    /// The matrix for people: one line a fault, in each cell the models whose gate saw it.
    pub fn markdown(&self) -> String {
        let figures = self.figures();
        let mut out = String::new();
        let share = |part: usize, all: usize| 100.0 * part as f64 / all.max(1) as f64;
        let _ = writeln!(out, "# Kill matrix\n");
        let _ = writeln!(
            out,
            "Written by `cargo test --test escape`. Each fault of the catalogue (`src/fault/catalogue`) is injected into a run of each \
             embedded model that can have it; a cell holds the models whose gate did not pass.\n"
        );
        let _ = writeln!(out, "| figure | value |\n|---|---|");
        let _ = writeln!(out, "| faults | {} |", figures.faults);
        let _ = writeln!(out, "| instances (fault, model, device) | {} |", figures.instances);
        let _ = writeln!(out, "| faults that escaped | {} |", figures.escaped);
        let _ = writeln!(out, "| instances that no named gate saw | {} |", figures.unseen);
        let _ = writeln!(
            out,
            "| located | {} of {} ({:.1} %) |",
            figures.located,
            figures.placed,
            share(figures.located, figures.placed)
        );
        let own = figures.located - figures.located_by_rerun;
        let _ = writeln!(
            out,
            "| located by the lenses of the injected device itself | {own} of {} ({:.1} %) |",
            figures.placed,
            share(own, figures.placed)
        );
        let _ = writeln!(out, "| npu2 instances that only the re-run on ieee saw | {} |", figures.by_rerun);
        let _ = writeln!(out, "| false alarms | {} of {} clean runs |\n", figures.false_alarms, figures.clean);
        out.push_str(READING);
        for device in self.rows.iter().map(|row| row.device.as_str()).collect::<BTreeSet<_>>() {
            self.table(&mut out, device);
        }
        out
    }

    fn table(&self, out: &mut String, device: &str) {
        let models: Vec<&str> =
            self.rows.iter().map(|r| r.model.as_str()).collect::<BTreeSet<_>>().into_iter().collect();
        let letter = |model: &str| models.iter().position(|m| *m == model).map_or('?', |i| (b'a' + i as u8) as char);
        let legend = models.iter().map(|m| format!("{} {m}", letter(m))).collect::<Vec<_>>().join(", ");
        let _ = writeln!(out, "## {device}\n\n{legend}; · was asked and passed, empty was not asked.\n");
        let heads = Gate::ALL.map(Gate::name).join(" | ");
        let _ =
            writeln!(out, "| fault | {heads} | located | unseen |\n|---|{}---|---|", "---|".repeat(Gate::ALL.len()));
        for entry in catalogue() {
            let rows: Vec<&Row> = self.rows.iter().filter(|r| r.device == device && r.fault == entry.id).collect();
            if rows.is_empty() {
                continue;
            }
            let cells = Gate::ALL.map(|gate| {
                let asked = rows.iter().any(|row| row.gates.contains_key(&gate));
                let seen: String = rows
                    .iter()
                    .filter(|row| row.gates.get(&gate).is_some_and(super::Sighting::stops))
                    .map(|row| letter(&row.model))
                    .collect();
                if seen.is_empty() && asked { "·".to_owned() } else { seen }
            });
            let located: String = rows.iter().filter(|r| r.located == Some(true)).map(|r| letter(&r.model)).collect();
            let unseen: String = rows.iter().filter(|r| !r.killed).map(|r| letter(&r.model)).collect();
            let _ = writeln!(out, "| {} | {} | {located} | {unseen} |", entry.id, cells.join(" | "));
        }
        out.push('\n');
    }
}
