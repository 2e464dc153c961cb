//! Prompts that are not what was asked for, and outputs that owe nothing to the model.

use half::bf16;

use super::{Entry, Gate, Injection, Kind, Lens, entry, everywhere};
use crate::fault::Harness;
use crate::random::Random;

const LOGITS: &[Gate] = &[Gate::Kl, Gate::Agreement, Gate::TokenSet];

const fn input(id: &'static str, texts: [&'static str; 3], catches: &'static [Gate], injection: Injection) -> Entry {
    everywhere(entry(id, Kind::Input, texts, catches, Lens::None, injection))
}

pub(super) static ENTRIES: &[Entry] = &[
    input(
        "bos_doubled",
        [
            "the prompt begins with two of its first token",
            "the template writes a BOS and the tokenizer adds one",
            "tokenise a rendered template without special tokens",
        ],
        // Where the model has no BOS the logits may hardly move: RoPE is relative.
        &[Gate::Kl, Gate::Agreement, Gate::TokenSet, Gate::Kv, Gate::Positions],
        Injection::Prompt(|ids, _, _| ids[..1].iter().chain(ids).copied().collect()),
    ),
    input(
        "template_missing",
        [
            "a chat turn is sent without its template",
            "the raw text was tokenised",
            "render the chat template, with the generation prompt",
        ],
        LOGITS,
        Injection::Harness(Harness::TemplateMissing),
    ),
    input(
        "padding_counted",
        [
            "the prompt's length counts one token of padding",
            "the length is that of the padded ids",
            "count the ids before padding",
        ],
        LOGITS,
        Injection::Prompt(|ids, c, _| {
            ids.iter().copied().chain([c.eos_token_ids.first().copied().unwrap_or(0)]).collect()
        }),
    ),
    input(
        "last_token_dropped",
        ["the last token of the prompt is missing", "a length counted from zero", "prefill all ids"],
        LOGITS,
        Injection::Prompt(|ids, _, _| ids[..(ids.len() - 1).max(1)].to_vec()),
    ),
    input(
        "ids_of_another_tokenizer",
        ["token ids of another tokenizer", "the tokenizer of another checkpoint", "use the checkpoint's own"],
        LOGITS,
        Injection::Prompt(|ids, c, _| ids.iter().map(|id| (id * 7 + 13) % c.vocab_size as u32).collect()),
    ),
    input(
        "null_zeros",
        ["logits are zero", "the output buffer was never written", "poison outputs"],
        LOGITS,
        Injection::Record(|mut record, _, _| {
            record.logits.fill(bf16::ZERO);
            record
        }),
    ),
    input(
        "null_constant",
        [
            "every step has the first one's logits",
            "decode returns the prefill's output",
            "read the logits at every step",
        ],
        LOGITS,
        Injection::Record(|mut record, _, _| {
            let first = record.logits.row(0).to_owned();
            record.logits.rows_mut().into_iter().for_each(|mut row| row.assign(&first));
            record
        }),
    ),
    input(
        "null_noise",
        ["logits are noise of the right spread", "anything but a model", "look at the run itself"],
        LOGITS,
        Injection::Record(|mut record, _, at| {
            let mut random = Random::new(at.seed);
            record.logits.mapv_inplace(|_| bf16::from_f64(4.0 * random.normal()));
            record
        }),
    ),
    input(
        "null_shuffled_steps",
        ["the steps' logits in another order", "rows written at the wrong step", "count steps from the prompt's end"],
        LOGITS,
        Injection::Record(|mut record, _, _| {
            let rows = record.logits.clone();
            let steps = rows.nrows();
            for (i, mut row) in record.logits.rows_mut().into_iter().enumerate() {
                row.assign(&rows.row((i + 1) % steps));
            }
            record
        }),
    ),
    input(
        "null_previous_prompt",
        [
            "the logits of the prompt before",
            "a result array that is a view of a reused buffer",
            "copy results before the next run",
        ],
        LOGITS,
        Injection::Record(|record, last, _| match last {
            Some(last) => crate::runner::Record { logits: last.logits.clone(), ..record },
            None => record,
        }),
    ),
    input(
        "logits_nan",
        ["one logit of one step is NaN", "a stale or unwritten buffer", "poison buffers and look for survivors"],
        &[Gate::TokenSet],
        Injection::Record(|mut record, _, at| {
            let step = at.position.min(record.logits.nrows() - 1);
            record.logits[[step, 0]] = bf16::NAN;
            record
        }),
    ),
];
