//! `verify` and `verify-full`: every step of the chosen prompts against the HF capture.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;

use super::engine::{EngineArgs, Started};
use super::refused::Gate;
use super::{ModelArgs, Prompts, RecordArgs, TuningArgs};
use crate::check::{Summary, Verdict};
use crate::device::Counters;
use crate::error::{Error, Result};
use crate::phase::phase3::{self, PromptFinding};
use crate::phase::{Bench, Finding, Run, Subject, external, progress};
use crate::report::{Cell, Plot, Report, Table, provenance};
use crate::runner::StepTiming;
use crate::settings;

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate verify smollm2_135m --max-prompts 2
  phasegate verify-full smollm2_135m --prompts all --record      # writes the progress document of phase 3
  phasegate verify smollm2_135m --datapath npu2                  # the silicon's own arithmetic
  phasegate verify smollm2_135m --runner \"python fixtures/adapters/hf.py\"")]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    report: RecordArgs,
    /// Prompt sets (default: the variant's own)
    #[arg(long, value_enum)]
    prompts: Option<Prompts>,
    /// At most this many prompts (default: all of the sets)
    #[arg(long, value_name = "N")]
    max_prompts: Option<usize>,
    /// Run the prompts on this device, too, and show its figures beside [default with --datapath npu2: emu]
    #[arg(long, value_name = "LABEL")]
    beside: Option<String>,
}

impl VerifyArgs {
    /// The second device, if there is to be one.
    fn beside(&self) -> Option<String> {
        let usual = (self.model.label() == "emu_npu2").then(|| "emu".to_owned());
        self.beside.clone().or(usual).filter(|label| *label != self.model.label())
    }
}

pub(super) fn run(args: VerifyArgs, full: bool) -> anyhow::Result<ExitCode> {
    let command = if full { "verify-full" } else { "verify" };
    let gate = Gate::new(command, &args.model, args.engine.label(&args.model), &args.report.shown);
    gate.reported(verify(args, full))
}

fn verify(args: VerifyArgs, full: bool) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    args.report.plain(args.tuning.facts(&args.model))?;
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    let most = args.max_prompts.filter(|_| !full && !args.report.record).unwrap_or(usize::MAX);
    let prompts = choose(&subject, args.prompts, args.report.record, most)?;
    let command = if full { "verify-full" } else { "verify" };
    let (bench, identified) = match args.engine.start(command, &args.model, args.tuning, &subject, &prompts)? {
        Started::Ready(bench, identified) => (bench.for_records()?, identified),
        Started::Broken(report) => return Ok(args.report.publish(&report, people)?),
    };
    if args.report.record && identified.is_some() {
        let (what, expected) = ("record".into(), "a device of ours".into());
        return Err(Error::Usage { what, found: "an external engine".into(), expected }.into());
    }
    // An engine of another's is shown beside a device of ours only when that is asked for.
    let label = if identified.is_some() { args.beside.clone() } else { args.beside() };
    let other = label
        .map(|label| {
            let [prefill, decode] = args.tuning.halves();
            let bench = Bench::new(subject.clone(), &label, &prompts, args.model.plan())?;
            bench.tuned(prefill, decode).for_records()
        })
        .transpose()?;
    let seen = look(&bench, &prompts, "verify")?;
    // What follows judges and writes: the weights need not be in memory beside a parsed tokenizer and a second device's.
    bench.retire();
    let mut report = report(command, &bench, &seen, started)?;
    if let Some(identified) = identified {
        report.verdict = report.verdict.and(identified.verdict);
        identified.facts.into_iter().for_each(|(name, value)| report.fact(name, value));
    }
    if let Some(other) = &other {
        let others = look(other, &prompts, "beside")?.findings;
        report.tables.push(beside((bench.device(), &seen.findings), (other.device(), &others)));
        for (name, value) in phase3::kl(other, &prompts)?.numbers.iter().filter(|(name, _)| !name.contains("floor")) {
            report.fact(&format!("{name}_{}", other.device()), *value);
        }
    }
    for (option, value) in args.tuning.facts(&args.model) {
        report.fact(option, value);
    }
    if args.report.record {
        // The document asks every gate of phase 3; what it says of them is what this call came to.
        report.verdict = report.verdict.and(record(&args, &subject, &bench)?);
    }
    Ok(args.report.publish(&report, people)?)
}

/// What the prompts showed, and what ended the run before the last of them.
struct Seen {
    findings: Vec<(String, Arc<PromptFinding>)>,
    kl: Option<Finding>,
    agreement: Option<Verdict>,
    broken: Option<(String, Verdict)>,
}

/// Runs and compares every prompt until one does not complete.
fn look(bench: &Bench, prompts: &[String], what: &'static str) -> Result<Seen> {
    let bar = super::progress_bar::bar(prompts.len() as u64, what);
    let mut seen = Seen { findings: vec![], kl: None, agreement: None, broken: None };
    'groups: for group in prompts.chunks(bench.at_once()) {
        bar.set_message(group.join(" "));
        // Whose error it is shows one after the other.
        let prepared = bench.prepare(group);
        for id in group {
            let found = phase3::prompt(bench, id);
            // Logits of all prompts at once would be the largest thing in memory beside the weights.
            bench.release(id);
            match found {
                Ok(found) => seen.findings.push((id.clone(), found)),
                Err(error) => {
                    seen.broken = Some((id.clone(), external::verdict(error)?));
                    break 'groups;
                }
            }
            bar.inc(1);
        }
        if let Err(error) = prepared {
            eprintln!("warning: {} did not run side by side, only one after the other: {error}", group.join(" "));
        }
    }
    bar.finish_and_clear();
    if seen.broken.is_none() {
        seen.kl = Some(phase3::kl(bench, prompts)?);
        seen.agreement = Some(phase3::agreement(bench, prompts)?);
    }
    Ok(seen)
}

/// Two devices' figures for the same prompts, one beside the other.
fn beside(
    (one, ones): (&str, &[(String, Arc<PromptFinding>)]),
    (other, others): (&str, &[(String, Arc<PromptFinding>)]),
) -> Table {
    let each = |what: &str| [format!("{what} {one}"), format!("{what} {other}")];
    let columns: Vec<String> = std::iter::once("prompt".to_owned())
        .chain(["verdict", "same", "KL median", "regret ulp"].iter().flat_map(|what| each(what)))
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut table = Table::new(&format!("{one} beside {other}"), &columns);
    for ((id, a), (_, b)) in ones.iter().zip(others) {
        let pair = |of: &dyn Fn(&PromptFinding) -> Cell| [of(a), of(b)];
        let verdicts = pair(&|f| f.verdict.outcome().word().into());
        let same = pair(&|f| f.token_set.same().into());
        let kl = pair(&|f| f.kl.summary.median.into());
        let cells = [Cell::from(id.as_str())].into_iter().chain(verdicts).chain(same).chain(kl).chain(pair(&regret));
        table.row(cells);
    }
    table
}

fn regret(found: &PromptFinding) -> Cell {
    found.agreement.worst().map_or(f64::NAN, |(_, step)| step.regret_ulp).into()
}

/// The captured prompts of the chosen sets, in capture order.
///
/// Errors: [`Error::Usage`] when that is none.
fn choose(subject: &Subject, chosen: Option<Prompts>, all: bool, most: usize) -> Result<Vec<String>> {
    let sets = if all { Prompts::All } else { chosen.unwrap_or(subject.default_prompts.into()) };
    let captured = subject.capture()?.prompts().iter().filter(|p| p.set.parse().is_ok_and(|set| sets.includes(set)));
    let prompts: Vec<String> = captured.map(|p| p.id.clone()).take(most).collect();
    if prompts.is_empty() {
        return Err(Error::Usage {
            what: "prompts".into(),
            found: "none of the chosen sets (or a limit of 0)".into(),
            expected: "at least one prompt that the capture holds".into(),
        });
    }
    Ok(prompts)
}

fn report(command: &str, bench: &Bench, seen: &Seen, started: Instant) -> Result<Report> {
    let findings = &seen.findings;
    let columns =
        ["prompt", "verdict", "steps", "same", "first divergence", "top-5 overlap", "regret ulp", "KL median", "floor"];
    let mut table = Table::new("Prompts", &columns);
    for (id, found) in findings {
        let divergence = found.token_set.first_divergence.as_ref().map_or("none".into(), |d| {
            let side = if d.mutual { "in each other's top 5" } else { "NOT in each other's top 5" };
            format!("step {} ({} / HF {}, {side})", d.step, d.device_token, d.hf_token)
        });
        table.row([
            Cell::from(id.as_str()),
            found.verdict.outcome().word().into(),
            found.token_set.steps.len().into(),
            found.token_set.same().into(),
            divergence.into(),
            found.agreement.overlap().into(),
            regret(found),
            found.kl.summary.median.into(),
            found.floor.summary.median.into(),
        ]);
    }
    let mut verdicts: Vec<Verdict> = findings.iter().map(|(id, f)| f.verdict.clone().about(id)).collect();
    verdicts.extend(seen.kl.as_ref().map(|kl| kl.verdict.clone()));
    verdicts.extend(seen.agreement.clone());
    if let Some((id, verdict)) = &seen.broken {
        let blank = std::iter::repeat_n(Cell::from(""), columns.len() - 2);
        table.row([Cell::from(id.as_str()), verdict.outcome().word().into()].into_iter().chain(blank));
        verdicts.push(verdict.clone());
    }
    let verdict = Verdict::all(verdicts);
    // The failing prompts first: they are the ones to be heard.
    let mut prompts: Vec<(bool, String)> = findings.iter().map(|(id, f)| (f.verdict.is_pass(), id.clone())).collect();
    prompts.sort_by_key(|(passes, _)| *passes);
    let prompts: Vec<String> = prompts.into_iter().map(|(_, id)| id).collect();
    let (verdict, explained) = crate::phase::explain::after(bench, &prompts, verdict);
    let timings = || findings.iter().map(|(_, found)| &found.timing);
    let prefill: Vec<f64> = timings().map(|t| t.prefill_us as f64 / 1e3).collect();
    let at_once = timings().map(|t| t.at_once).max().unwrap_or(1);
    let per_token =
        |t: &StepTiming| t.decode_us.iter().map(|&us| us as f64 / 1e3 / t.at_once as f64).collect::<Vec<_>>();
    let decode: Vec<f64> = timings().flat_map(per_token).collect();
    let mut report = Report::new(command, &bench.subject().name, bench.describe()?, verdict);
    report.tables.push(table);
    report.tables.extend(divergences(bench.subject(), findings)?);
    report.plots = plots(findings);
    report.provenance = provenance::of(bench.subject())?;
    if let Some(kl) = &seen.kl {
        for (name, value) in &kl.numbers {
            report.fact(name, *value);
        }
        let figure =
            |name: &str| kl.numbers.iter().find(|(known, _)| *known == name).map_or(f64::NAN, |(_, value)| *value);
        report.fact("kl_times_floor", figure("kl_median") / figure("kl_floor_median"));
    }
    report.fact("prefill_ms_median", Summary::of(&prefill).median);
    // Side by side a token's share of a step is another figure than a step of its own.
    let name = if at_once == 1 { "decode_ms_median" } else { "decode_ms_per_token_side_by_side" };
    report.fact(name, Summary::of(&decode).median);
    let mut counters = Counters::default();
    let mut decode_steps = 0;
    for (_, found) in findings {
        counters += found.counters;
        decode_steps += found.decode_steps;
    }
    super::device_facts(&mut report, counters, findings.len(), decode_steps);
    for line in explained {
        report.fact("explanation", line);
    }
    report.fact("composition", crate::phase::phase2::composition(bench.subject())?.to_string());
    if let Some(bytes) = provenance::peak_memory() {
        report.fact("peak_memory_bytes", bytes);
    }
    report.fact("seconds", started.elapsed().as_secs_f64());
    Ok(report)
}

/// KL per step, one line a prompt, beside what HF bf16's own are at the median.
fn plots(findings: &[(String, Arc<PromptFinding>)]) -> Vec<Plot> {
    let mut kl = Plot::new("KL divergence from HF f32", "step", "KL, nats");
    kl.log = true;
    let steps = findings.iter().map(|(_, f)| f.floor.steps.len()).max().unwrap_or(0);
    let floor = (0..steps).map(|step| {
        let at: Vec<f64> = findings.iter().filter_map(|(_, f)| f.floor.steps.get(step).copied()).collect();
        (step as f64, Summary::of(&at).median)
    });
    kl.line("HF bf16, median", floor);
    for (id, found) in findings {
        kl.line(id, found.kl.steps.iter().enumerate().map(|(step, &kl)| (step as f64, kl)));
    }
    vec![kl]
}

/// Where the two sides part: both top-5 sets as text.
fn divergences(subject: &Subject, findings: &[(String, Arc<PromptFinding>)]) -> Result<Option<Table>> {
    let columns =
        ["prompt", "step", "device", "HF", "in each other's top 5", "device's top 5", "HF's top 5", "text before"];
    let mut table = Table::new("First divergences", &columns);
    for (id, found) in findings {
        let Some(d) = &found.token_set.first_divergence else { continue };
        let captured = subject.capture()?.prompt(id)?;
        let tokenizer = subject.tokenizer()?;
        let text = |ids: &[u32]| -> Result<String> { Ok(format!("{:?}", tokenizer.decode(ids, false)?)) };
        let all = |ids: &[u32]| -> Result<String> {
            Ok(ids.iter().map(|&id| text(&[id])).collect::<Result<Vec<_>>>()?.join(" "))
        };
        let before = [&captured.ids[..], &captured.chosen[..d.step]].concat();
        table.row([
            Cell::from(id.as_str()),
            d.step.into(),
            format!("{} {}", d.device_token, text(&[d.device_token])?).into(),
            format!("{} {}", d.hf_token, text(&[d.hf_token])?).into(),
            if d.mutual { "yes" } else { "NO" }.into(),
            all(&d.device_top5)?.into(),
            all(&d.hf_top5)?.into(),
            text(&before[before.len().saturating_sub(12)..])?.into(),
        ]);
    }
    Ok((!table.rows.is_empty()).then_some(table))
}

fn people(report: &Report) {
    say!("{} on {}\n", report.model, report.device_description);
    for table in &report.tables {
        say!("{}", table.render());
    }
    for (name, value) in &report.facts {
        say!("{name}: {}", value.text());
    }
}

/// Writes phase 3's progress document from the very cases the tests run, and gives what they came to.
fn record(args: &VerifyArgs, subject: &Subject, bench: &Bench) -> Result<Verdict> {
    let outline = subject.outline()?;
    let mut findings = vec![];
    for case in phase3::cases(&outline) {
        if let Run::OnDevice(run) = &case.run {
            findings.push((case.name.clone(), run(bench.device())?));
        }
    }
    let verdict = Verdict::all(findings.iter().map(|(_, f)| f.verdict.clone()));
    let document = progress::Document {
        name: phase3::DOCUMENT,
        phase: 3,
        model: subject.name.clone(),
        device: bench.device().into(),
        command: format!("phasegate verify-full {} --record", args.model.options()),
        notes: vec![format!("verdict: {verdict}"), format!("capture: {}", subject.capture()?.provenance().line())],
        tables: vec![],
        findings,
    };
    let path = document.write(&settings::root())?;
    eprintln!("wrote {}", path.strip_prefix(settings::root()).unwrap_or(&path).display());
    Ok(verdict)
}
