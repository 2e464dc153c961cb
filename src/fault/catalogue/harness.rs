//! Faults of whoever asks and judges, and of the reference.

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::Harness;

const fn harness(
    id: &'static str,
    texts: [&'static str; 3],
    catches: &'static [Gate],
    word: &'static str,
    fault: Harness,
) -> Entry {
    everywhere(entry(id, Kind::Harness, texts, catches, Lens::Message(word), Injection::Harness(fault)))
}

pub(super) static ENTRIES: &[Entry] = &[
    harness(
        "no_prompts",
        ["the prompt file is empty", "a filter that matches nothing", "require a number of prompts"],
        &[Gate::Kl],
        "compared 0 of",
        Harness::NoPrompts,
    ),
    harness(
        "no_steps",
        ["no step was compared", "the runner stopped at once", "require 32 steps"],
        &[Gate::TokenSet, Gate::Kl],
        "compared 0 of",
        Harness::Steps(0),
    ),
    harness(
        "one_step",
        ["one of 32 steps was compared", "the run ended at an EOS", "require 32 steps"],
        &[Gate::TokenSet, Gate::Kl],
        "compared 1 of",
        Harness::Steps(1),
    ),
    harness(
        "no_layers",
        ["no layer was looked at", "the taps were not recorded", "require every layer"],
        &[Gate::Noise],
        "compared 0 of",
        Harness::NoLayers,
    ),
    harness(
        "capture_of_another_checkpoint",
        [
            "the reference was captured from another checkpoint",
            "a file copied between fixtures",
            "capture again from this checkpoint",
        ],
        &[Gate::Refused],
        "capture refused",
        Harness::OtherCapture,
    ),
    harness(
        "capture_stale",
        ["the reference was captured before the prompts changed", "prompts edited, not captured", "capture again"],
        &[Gate::Refused],
        "prompt file",
        Harness::StaleCapture,
    ),
    harness(
        "reference_nan",
        ["the reference holds a NaN", "a damaged capture", "capture again"],
        &[Gate::Phase0],
        "NaN",
        Harness::NanReference,
    ),
    harness(
        "corrupted_file",
        ["one byte of one tensor of the file has changed", "a damaged download", "compare the hash; download again"],
        &[Gate::Refused],
        "weights",
        Harness::CorruptedFile,
    ),
];
