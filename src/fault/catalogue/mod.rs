//! The catalogue: data, one file a kind.

mod arithmetic;
mod attention;
mod buffer;
mod config;
mod harness;
mod input;
mod kv;
mod rope;
mod weights;

use std::sync::LazyLock;

use super::{Entry, Gate, Injection, Kind, Lens, Reach};
use crate::model::ModelConfig;

/// Every fault, in the order of the kill matrix.
pub fn catalogue() -> &'static [&'static Entry] {
    static ALL: LazyLock<Vec<&'static Entry>> = LazyLock::new(|| {
        let groups: [&'static [Entry]; 9] = [
            config::ENTRIES,
            weights::ENTRIES,
            rope::ENTRIES,
            attention::ENTRIES,
            kv::ENTRIES,
            arithmetic::ENTRIES,
            buffer::ENTRIES,
            input::ENTRIES,
            harness::ENTRIES,
        ];
        groups.into_iter().flatten().collect()
    });
    &ALL
}

fn never(_: &ModelConfig) -> Option<&'static str> {
    None
}

/// What goes into an entry beside its place, strengths and absence.
const fn entry(
    id: &'static str,
    kind: Kind,
    texts: [&'static str; 3],
    catches: &'static [Gate],
    lens: Lens,
    injection: Injection,
) -> Entry {
    let [title, cause, remedy] = texts;
    let (reach, strengths, absent, unseen) = (Reach::OneLayer, &[], never, never);
    Entry { id, kind, title, cause, remedy, catches, lens, reach, strengths, absent, unseen, injection }
}

/// An entry whose fault is wherever its kernel or table is used.
const fn everywhere(entry: Entry) -> Entry {
    Entry { reach: Reach::Everywhere, ..entry }
}
