//! `inspect`: what a checkpoint is, without running it. A refusal is one line with the reason, and exit code 1.

mod outlook;
mod people;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use crate::check::{Extent, Verdict};
use crate::error::Error;
use crate::model::checkpoint::Accounting;
use crate::model::{PromptSet, prompts};
use crate::phase::{Subject, observability, phase0, phase2, progress};
use crate::plan::{Memory, PlanOptions};
use crate::settings;
use outlook::Site;

/// Units: positions. The prefill that memory and placement are worked out for where no manifest says otherwise.
const SEQ_LEN: usize = 2048;

/// Phase 0 has no device; its entry stands beside those of the device everyone has.
const RECORDED_UNDER: &str = "emu";

#[derive(Args)]
pub(super) struct InspectArgs {
    /// A fixture's name, a checkpoint directory, or an HF id in the local HF cache
    #[arg(default_value = "tiny_llama")]
    model: String,
    /// The manifest's variant (instruct or base)
    #[arg(long, value_name = "NAME")]
    variant: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Enter phase 0's verdict into the model's progress.md
    #[arg(long)]
    record: bool,
}

/// A prompt as this checkpoint's tokenizer and template make it.
#[derive(Serialize)]
struct Tokenised {
    id: String,
    ids: Vec<u32>,
}

/// Everything there is to show.
struct Inspection {
    subject: Arc<Subject>,
    accounting: Accounting,
    memory: Memory,
    prompts: Vec<Tokenised>,
    sites: Vec<Site>,
    /// Blind spots, where there is a capture to judge them by.
    blind: Vec<&'static str>,
    composition: String,
    capture: String,
    verdict: Verdict,
}

pub(super) fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let inspection = Inspection::of(Subject::open_arc(&args.model, args.variant.as_deref())?)?;
    if args.record {
        let name = &inspection.subject.name;
        let command = format!("phasegate inspect {} --record", args.model);
        let root = settings::root();
        let path = progress::enter(&root, name, RECORDED_UNDER, 0, &inspection.verdict, &command)?;
        eprintln!("wrote {}", path.strip_prefix(&root).unwrap_or(&path).display());
    }
    if args.json {
        say!("{}", serde_json::to_string_pretty(&inspection.json()?)?);
    } else {
        people::print(&inspection)?;
    }
    Ok(ExitCode::from(inspection.verdict.exit_code()))
}

impl Inspection {
    fn of(subject: Arc<Subject>) -> anyhow::Result<Inspection> {
        let accounting = subject.checkpoint.account(&subject.config)?;
        let seq_len = subject.located.manifest.as_ref().map_or(SEQ_LEN, |m| m.seq_len);
        let seq_len = seq_len.min(subject.config.max_position_embeddings);
        let options = PlanOptions::default();
        let extent = Extent::new().require("tensors", 1).compare("tensors", accounting.tensors.len() as u64);
        let accounted = Verdict::judge(vec![], extent);
        let (capture, verdict, blind) = match subject.capture() {
            Ok(capture) => (
                format!("belongs to this checkpoint ({})", capture.provenance().line()),
                accounted.and(phase0::verdict(&subject)?),
                observability::blind_spots(&subject)?.into_iter().map(|property| property.name).collect(),
            ),
            Err(error @ Error::Unavailable { .. }) => {
                (error.to_string(), accounted.warn("no capture: nothing was compared with HF"), vec![])
            }
            Err(error) => {
                let failed = Verdict::judge(vec![error.to_string()], Extent::new().require("captures", 1));
                (error.to_string(), accounted.and(failed), vec![])
            }
        };
        Ok(Inspection {
            memory: Memory::of(&subject.config, seq_len, seq_len, &options)?,
            prompts: tokenised(&subject)?,
            sites: outlook::sites(&subject.config, seq_len)?,
            composition: phase2::composition(&subject)?.to_string(),
            subject,
            accounting,
            blind,
            capture,
            verdict,
        })
    }

    fn json(&self) -> anyhow::Result<Value> {
        let Inspection { subject, accounting, memory, verdict, .. } = self;
        let tensors = accounting.tensors.iter().map(|t| {
            json!({"name": t.spec.name, "stored": t.stored, "shape": t.spec.shape, "dtype": format!("{:?}", t.dtype)})
        });
        let extras = accounting.extras.iter().map(|e| json!({"stored": e.stored, "reason": e.reason}));
        let config = &subject.config;
        Ok(json!({
            "model": subject.name, "config": config, "coverage": subject.coverage,
            "sizes": {"q_dim": config.q_dim(), "kv_dim": config.kv_dim(), "group": config.group()},
            "parameters": accounting.parameters, "bytes": accounting.bytes,
            "memory": memory, "memory_bytes": memory.total(),
            "prefix": accounting.prefix, "tensors": tensors.collect::<Vec<_>>(), "extras": extras.collect::<Vec<_>>(),
            "prompts": self.prompts, "stop_ids": subject.stop_ids()?, "ids_without_a_token": subject.masked_ids()?,
            "composition": self.composition, "outlook": self.sites, "blind_spots": self.blind,
            "capture": self.capture, "verdict": verdict,
        }))
    }
}

/// The first prompt of each set that this checkpoint can be asked; chats only with a template.
fn tokenised(subject: &Subject) -> anyhow::Result<Vec<Tokenised>> {
    let mut found = vec![];
    for set in PromptSet::ALL {
        let file = set.file(&subject.root);
        let template = match subject.template() {
            _ if set != PromptSet::Chat => None,
            Err(Error::Unavailable { .. }) => None,
            template => Some(template?),
        };
        if !file.is_file() || (set == PromptSet::Chat && template.is_none()) {
            continue;
        }
        let all = prompts::load(&subject.root, set, subject.tokenizer()?, template)?;
        found.extend(all.into_iter().take(1).map(|p| Tokenised { id: p.id, ids: p.ids }));
    }
    Ok(found)
}
