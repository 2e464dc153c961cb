//! Text to ids and back: prompts, chat template, vocabulary and stop ids against what HF made of the same files.

use std::collections::BTreeSet;

use super::one;
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::model::chat_template::Message;
use crate::model::{PromptSet, prompts};
use crate::phase::Subject;

/// Rendered text and ids of one prompt equal the capture's; exactly one BOS where HF has one.
pub(super) fn tokens(subject: &Subject, id: &str) -> Result<Verdict> {
    let capture = subject.capture()?;
    let captured = capture.prompts().iter().find(|p| p.id == id).ok_or_else(|| Error::Unknown {
        kind: "prompt",
        name: id.into(),
        known: capture.prompts().iter().map(|p| p.id.as_str()).collect::<Vec<_>>().join(", "),
    })?;
    let (set, ours) = line(subject, id)?;
    let (rendered, ids) = match set {
        PromptSet::Chat => subject.chat_ids(&[Message::user(ours.text.as_str())])?,
        _ => subject.raw_ids(&ours.text)?,
    };
    let mut failures = vec![];
    if ours.text != captured.text {
        failures.push(format!("the prompt file has {:?}, the capture {:?}", ours.text, captured.text));
    }
    if rendered != captured.rendered {
        failures.push(format!("rendered text {rendered:?}, HF's {:?}", captured.rendered));
    }
    let hf = capture.prompt(id)?.ids;
    failures.extend(difference(&ids, &hf));
    let bos = subject.tokenizer()?.leading_bos(&ids, &subject.config);
    if bos > 1 {
        failures.push(format!("the prompt starts with {bos} BOS tokens"));
    }
    let extent = Extent::new().require("ids", hf.len() as u64).compare("ids", ids.len().min(hf.len()) as u64);
    Ok(Verdict::judge(failures, extent))
}

/// The ids of the text that perplexity is measured on.
pub(super) fn held_out(subject: &Subject, _: &str) -> Result<Verdict> {
    let path = subject.root.join("fixtures").join("hf").join("held_out.txt");
    let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
    let hf = subject.capture()?.nll()?.ids;
    let (_, mut ids) = subject.raw_ids(&text)?;
    ids.truncate(hf.len());
    let extent = Extent::new().require("ids", hf.len() as u64).compare("ids", ids.len() as u64);
    Ok(Verdict::judge(difference(&ids, &hf).into_iter().collect(), extent))
}

fn difference(ours: &[u32], hf: &[u32]) -> Option<String> {
    let at = || ours.iter().zip(hf).position(|(a, b)| a != b).unwrap_or(ours.len().min(hf.len()));
    (ours != hf).then(|| format!("{} ids, HF has {}; the first difference is at {}", ours.len(), hf.len(), at()))
}

/// The line of a prompt file that a captured prompt was made from.
///
/// Errors: [`Error::Unknown`] when the files hold no such prompt.
pub(super) fn line(subject: &Subject, id: &str) -> Result<(PromptSet, prompts::Line)> {
    let unknown = |known: String| Error::Unknown { kind: "prompt", name: id.into(), known };
    let set = PromptSet::of_id(id).ok_or_else(|| unknown("base_00, instruct_00, chat_00, long_00 ...".into()))?;
    let mut lines = prompts::read(&set.file(&subject.root))?;
    let ids: Vec<String> = (0..lines.len()).map(|i| prompts::id(set, i)).collect();
    match ids.iter().position(|known| known == id) {
        Some(at) => Ok((set, lines.swap_remove(at))),
        None => Err(unknown(ids.join(", "))),
    }
}

/// A conversation of three turns: each turn once and in order, the same number of BOS as HF's own chats, and a
/// generation prompt behind the last turn.
pub(super) fn template(subject: &Subject, _: &str) -> Result<Verdict> {
    const TURNS: [&str; 3] = ["first question", "only answer", "second question"];
    let turns = [Message::user(TURNS[0]), Message::assistant(TURNS[1]), Message::user(TURNS[2])];
    let (text, ids) = subject.chat_ids(&turns)?;
    let mut failures = vec![];
    let places: Vec<Vec<usize>> = TURNS.iter().map(|t| text.match_indices(t).map(|(at, _)| at).collect()).collect();
    let in_order = places.iter().all(|p| p.len() == 1) && places.is_sorted_by_key(|p| p[0]);
    if !in_order {
        failures.push(format!("not every turn once and in order: {text:?}"));
    }
    let closed = subject.template()?.render(subject.tokenizer()?, &turns, false)?;
    if closed.len() >= text.len() {
        failures.push("add_generation_prompt adds nothing: the model would continue the user's turn".into());
    }
    let capture = subject.capture()?;
    let bos = subject.tokenizer()?.leading_bos(&ids, &subject.config);
    let chats: Vec<_> = capture.prompts().iter().filter(|p| p.set == PromptSet::Chat.name()).collect();
    for chat in &chats {
        let hf = subject.tokenizer()?.leading_bos(&capture.prompt(&chat.id)?.ids, &subject.config);
        if hf != bos {
            failures.push(format!("a conversation starts with {bos} BOS tokens, HF's {} with {hf}", chat.id));
        }
    }
    let extent = Extent::new().require("chats", 1).compare("chats", chats.len() as u64).require("turns", 3);
    Ok(Verdict::judge(failures, extent.compare("turns", places.iter().filter(|p| !p.is_empty()).count() as u64)))
}

/// Head rows against the tokenizer: ids that matter have a row and a token; rows without a token are reported (no
/// greedy choice may fall on them), and so are tokens without a row.
pub(super) fn vocabulary(subject: &Subject, _: &str) -> Result<Verdict> {
    let (rows, masked) = (subject.config.vocab_size, subject.masked_ids()?);
    let special =
        subject.stop_ids()?.iter().map(|&id| (id, "stop")).chain(subject.config.bos_token_id.map(|id| (id, "BOS")));
    let failures = special.filter_map(|(id, what)| {
        if id as usize >= rows {
            Some(format!("{what} id {id} has no row among {rows}"))
        } else {
            masked.binary_search(&id).is_ok().then(|| format!("{what} id {id} has no token"))
        }
    });
    let extent = Extent::new().require("ids", rows as u64).compare("ids", rows as u64);
    let mut verdict = Verdict::judge(failures.collect(), extent);
    if let (Some(first), Some(last)) = (masked.first(), masked.last()) {
        let n = masked.len();
        verdict = verdict.warn(format!("{n} ids from {first} to {last} have no token and are masked in greedy choice"));
    }
    let named = subject.tokenizer()?.vocab_size();
    if named > rows {
        verdict =
            verdict.warn(format!("tokens with ids {rows} to {} have no row: text with them cannot run", named - 1));
    }
    Ok(verdict)
}

/// The union of config, generation_config and tokenizer, as HF has it.
pub(super) fn stop_set(subject: &Subject, _: &str) -> Result<Verdict> {
    let ours: BTreeSet<u32> = subject.stop_ids()?.iter().copied().collect();
    let hf: BTreeSet<u32> = subject.capture()?.stop_ids().iter().copied().collect();
    let verdict = one("stop set", (ours != hf).then(|| format!("{ours:?}, HF's {hf:?}")));
    Ok(if ours.is_empty() { verdict.warn("no id ends a generation") } else { verdict })
}
