//! `diagnosis`: every layer's output of one lens prompt against HF, as a table.

use std::process::ExitCode;

use clap::Args;

use super::engine::{EngineArgs, Started};
use super::refused::Gate;
use super::{ModelArgs, RecordArgs, TuningArgs};
use crate::check::Verdict;
use crate::check::layers::{self, Layer};
use crate::error::Error;
use crate::phase::{Bench, Run, Subject, added, explain, external, phase2, phase3, progress};
use crate::report::{Cell, Plot, Report, Table, provenance};
use crate::settings;

#[derive(Args)]
#[command(after_help = "Examples:
  phasegate diagnosis smollm2_135m
  phasegate diagnosis smollm2_135m --prompt-id long_00 --datapath npu2
  phasegate diagnosis smollm2_135m --record                      # writes the progress document of phase 2")]
pub(super) struct DiagnosisArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    report: RecordArgs,
    /// Prompt with layer captures (default: the first)
    #[arg(long, value_name = "ID")]
    prompt_id: Option<String>,
}

pub(super) fn run(args: DiagnosisArgs) -> anyhow::Result<ExitCode> {
    let gate = Gate::new("diagnosis", &args.model, args.engine.label(&args.model), &args.report.shown);
    gate.reported(diagnose(args))
}

fn diagnose(args: DiagnosisArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open_arc(&args.model.model, args.model.variant.as_deref())?;
    args.report.plain(args.tuning.facts(&args.model))?;
    let outline = subject.outline()?;
    if let Some(name) = args.prompt_id.clone().filter(|id| !outline.lens.contains(id)) {
        return Err(Error::Unknown { kind: "prompt with layer outputs", name, known: outline.lens.join(", ") }.into());
    }
    let prompt = match args.prompt_id.clone().or_else(|| outline.lens.first().cloned()) {
        Some(prompt) => prompt,
        None => anyhow::bail!("the capture of {} holds no layer outputs", subject.name),
    };
    let (bench, identified) =
        match args.engine.start("diagnosis", &args.model, args.tuning, &subject, std::slice::from_ref(&prompt))? {
            Started::Ready(bench, identified) => (bench, identified),
            Started::Broken(report) => return Ok(args.report.publish(&report, |_| ())?),
        };
    if let Err(error) = bench.record(&prompt) {
        let report = Report::new("diagnosis", &subject.name, bench.describe()?, external::verdict(error)?);
        return Ok(args.report.publish(&report, |_| ())?);
    }
    let found = phase3::lens(&bench, &prompt)?;
    let positions = subject.lens(&prompt)?.positions.len();
    // What a layer adds of its own needs a runner of ours and HF's input at every position.
    let added = match !bench.is_external() && added::prompts(&bench)?.contains(&prompt) {
        true => Some((prompt.as_str(), added::layers(&bench, &prompt)?)),
        false => None,
    };
    let mut columns = vec![
        "layer",
        "cosine",
        "cos min",
        "cos p5",
        "cos median",
        "max_abs",
        "max_rel",
        "sqnr_db",
        "rel_l2",
        "noise ratio",
    ];
    columns.extend(added.is_some().then_some("added"));
    let mut table = Table::new(&format!("Layers against HF bf16, {prompt}, {positions} positions"), &columns);
    for layer in &found {
        let side = &layer.vs_bf16;
        let last = if layer.layer + 1 == found.len() { " (after final norm)" } else { "" };
        let mut row = vec![
            Cell::from(format!("{:02}{last}", layer.layer)),
            side.cosine.into(),
            side.positions.min.into(),
            side.positions.p5.into(),
            side.positions.median.into(),
            side.body.max_abs.into(),
            side.body.max_rel.into(),
            side.body.sqnr_db.into(),
            side.body.rel_l2.into(),
            layer.noise_ratio.into(),
        ];
        let own = added.as_ref().map(|(_, added)| added.get(layer.layer).map_or(f64::NAN, |own| own.over_first));
        row.extend(own.map(Cell::from));
        table.row(row);
    }
    let verdict = layers::judge(&found, subject.config.num_hidden_layers, positions);
    let block = phase2::block(&bench, &prompt)?;
    // Every layer is judged as phase 3 judges it, not the first alone.
    let mut verdict = verdict.and(block.verdict).and(phase3::noise_of(&bench, &found)?.verdict);
    if let Some(added) = &added {
        verdict = verdict.and(added::judge_layers(&bench, std::slice::from_ref(added))?.verdict);
    }
    let (verdict, explained) = explain::after(&bench, std::slice::from_ref(&prompt), verdict);
    let mut report = Report::new("diagnosis", &subject.name, bench.describe()?, verdict);
    for line in explained {
        report.fact("explanation", line);
    }
    report.tables.push(table);
    report.plots = plots(&found, phase3::noise_limit(&bench)?);
    if let Some((_, added)) = &added {
        let mut plot = Plot::new("Added by each layer from HF's own input", "layer", "over HF bf16's first layer");
        plot.limit = Some(added::limit(&bench)?);
        plot.line("device", added.iter().map(|own| (own.layer as f64, own.over_first)));
        report.plots.push(plot);
    }
    report.provenance = provenance::of(&subject)?;
    report.fact("composition", phase2::composition(&subject)?.to_string());
    for (option, value) in args.tuning.facts(&args.model) {
        report.fact(option, value);
    }
    if let Some(identified) = identified {
        report.verdict = report.verdict.and(identified.verdict);
        identified.facts.into_iter().for_each(|(name, value)| report.fact(name, value));
    }
    if args.report.record {
        report.verdict = report.verdict.and(record(&args, &subject, &bench)?);
    }
    Ok(args.report.publish(&report, |report| {
        say!("{} on {}\n", report.model, report.device_description);
        say!("{}", report.tables[0].render());
        say!(
            "noise ratio: distance to HF f32 over HF bf16's own, positions >= 1; max_abs .. rel_l2 leave position 0 out\nadded: what the layer adds when it starts from HF bf16's own input, over what HF bf16's first layer adds"
        );
        for (name, value) in &report.facts {
            say!("{name}: {}", value.text());
        }
    })?)
}

/// The lens as lines over the layers.
fn plots(found: &[Layer], noise_limit: Option<f64>) -> Vec<Plot> {
    let over = |of: fn(&Layer) -> f64| found.iter().map(move |l| (l.layer as f64, of(l)));
    let mut cosine = Plot::new("Cosine against HF bf16", "layer", "1 - cosine");
    cosine.log = true;
    cosine.line("whole", over(|l| 1.0 - l.vs_bf16.cosine));
    cosine.line("worst position", over(|l| 1.0 - l.vs_bf16.positions.min));
    let mut sqnr = Plot::new("Signal to noise", "layer", "SQNR, dB");
    sqnr.line("against HF bf16", over(|l| l.vs_bf16.body.sqnr_db));
    sqnr.line("against HF f32", over(|l| l.vs_f32.body.sqnr_db));
    let mut noise = Plot::new("Noise ratio", "layer", "distance to HF f32 / HF bf16's own");
    noise.limit = noise_limit;
    noise.line("device", over(|l| l.noise_ratio));
    vec![cosine, sqnr, noise]
}

/// Writes phase 2's progress document from the very cases the tests run, and gives what they came to.
fn record(args: &DiagnosisArgs, subject: &Subject, bench: &Bench) -> anyhow::Result<Verdict> {
    let mut findings = vec![];
    for case in phase2::cases(&subject.outline()?) {
        if let Run::OnDevice(run) = &case.run {
            findings.push((case.name.clone(), run(bench.device())?));
        }
    }
    let verdict = Verdict::all(findings.iter().map(|(_, f)| f.verdict.clone()));
    let document = progress::Document {
        name: phase2::DOCUMENT,
        phase: 2,
        model: subject.name.clone(),
        device: bench.device().into(),
        command: format!("phasegate diagnosis {} --record", args.model.options()),
        notes: vec![
            format!("path: {}", phase2::composition(subject)?),
            format!("capture: {}", subject.capture()?.provenance().line()),
        ],
        tables: vec![],
        findings,
    };
    let path = document.write(&settings::root())?;
    eprintln!("wrote {}", path.strip_prefix(settings::root()).unwrap_or(&path).display());
    Ok(verdict)
}
