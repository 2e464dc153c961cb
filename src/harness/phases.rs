//! The cases of a phase as a suite: every fixture's, whether its checkpoint is here or not.

use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed};

use super::band::band_of;
use super::numbers::differences;
use super::{Availability, Case, Cx, DeviceLabel, Numbers, Suite};
use crate::check::{Outcome, Verdict};
use crate::error::{Error, Result};
use crate::model;
use crate::phase::{self, Finding, Outline, Run, progress};
use crate::report::provenance;
use crate::settings;

/// A phase's cases for one model.
pub type CasesOf = fn(&Outline) -> Vec<phase::Case>;

/// A phase's cases of kernels, which need no model to be here.
pub type KernelCases = fn(&[Outline]) -> Result<Vec<phase::Case>>;

/// The case of a name that is none of a phase's cases, if it can be made.
pub type CaseOnDemand = fn(&str) -> Option<phase::Case>;

/// The `main` of a `tests/<phase>.rs` whose cases belong to no model. A filter that is the whole name of a case that is not
/// there makes it, if `on_demand` can.
pub fn main_kernels(phase: &'static str, cases: KernelCases, on_demand: CaseOnDemand) -> ExitCode {
    run(phase, kernels(phase, cases, on_demand))
}

/// The `main` of `tests/<phase>.rs`: `cases` of every fixture, and the `documented` cases of `document` if it has one.
pub fn main(phase: &'static str, cases: CasesOf, document: Option<&'static str>) -> ExitCode {
    run(phase, suite(phase, cases, document))
}

/// The `main` of phase 6: `cases` of every fixture, and the deployed binary's layer table against phase 3's baselines.
pub fn main_deployed(phase: &'static str, cases: CasesOf, table: LayerTable) -> ExitCode {
    let suite = suite(phase, cases, None).and_then(|mut suite| {
        for manifest in model::fixtures(&settings::root())? {
            suite.case(layer_table(manifest.name, table));
        }
        Ok(suite)
    });
    run(phase, suite)
}

/// Figures of phase 3's layer cases as the deployment gives them for a model on a device.
pub type LayerTable = fn(&str, &str) -> Result<phase::phase6::LayerFigures>;

/// Each figure of the deployment within its band of phase 3's baseline.
fn layer_table(model: String, table: LayerTable) -> Case {
    Case::new(format!("layer_table::{model}"), {
        let model = model.clone();
        move |cx| {
            let device = cx.device()?;
            let found = table(&model, device.label()).map_err(failed)?;
            let mut wrong = vec![];
            for (case, figures) in &found {
                let stored = super::baseline::stored("phase3", &format!("{case}::{device}"));
                let Some(stored) = stored else {
                    wrong.push(format!("{case}: phase 3 has no baseline"));
                    continue;
                };
                let named = |line: &&str| figures.iter().any(|(name, _)| line.split(' ').next() == Some(name));
                let stored: String = stored.lines().filter(named).map(|line| format!("{line}\n")).collect();
                let text = figures.iter().fold(Numbers::new(), |n, (name, value)| n.number(*name, *value)).render();
                match text {
                    Ok(text) => wrong.extend(differences(&stored, &text).into_iter().map(|l| format!("{case}: {l}"))),
                    Err(flaw) => wrong.push(format!("{case}: {flaw}")),
                }
            }
            if wrong.is_empty() && !found.is_empty() {
                return Ok(());
            }
            Err(format!("{} layers against phase 3's baselines:\n  {}", found.len(), wrong.join("\n  ")).into())
        }
    })
    .needs(model)
}

fn run(phase: &str, suite: Result<Suite>) -> ExitCode {
    match suite {
        Ok(suite) => suite.run(),
        Err(error) => {
            eprintln!("{phase}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn kernels(phase: &'static str, cases: KernelCases, on_demand: CaseOnDemand) -> Result<Suite> {
    let mut suite = with_devices(phase);
    let mut cases = cases(&Outline::all()?)?;
    if let Some(filter) = Arguments::from_args().filter {
        let name =
            DeviceLabel::ALL.iter().find_map(|d| filter.strip_suffix(&format!("::{}", d.label()))).unwrap_or(&filter);
        cases.extend(on_demand(name).filter(|new| cases.iter().all(|case| case.name != new.name)));
    }
    for case in cases {
        suite.case(adapt(case));
    }
    Ok(suite)
}

fn with_devices(phase: &'static str) -> Suite {
    let mut suite = Suite::new(phase);
    // Kept by the kernel cache itself, which refuses what is not sealed when the name is required.
    suite.resource(settings::SEALED, Availability::Available);
    for device in DeviceLabel::ALL {
        let there = match phase::devices::unavailable(device.label()) {
            Some(error) => Availability::Missing(error.to_string()),
            None => Availability::Available,
        };
        suite.device(device, there);
    }
    suite
}

fn suite(phase: &'static str, cases: CasesOf, document: Option<&'static str>) -> Result<Suite> {
    let mut suite = with_devices(phase);
    let wanted = wanted(&Arguments::from_args());
    let root = settings::root();
    for manifest in model::fixtures(&root)? {
        let there = match phase::subject::missing(&root, &manifest)? {
            Some(why) => Availability::Missing(why),
            None => Availability::Available,
        };
        suite.model(&manifest.name, there);
        let reference = manifest.reference();
        suite.identity(&manifest.name, Arc::new(move || provenance::capture(&reference)));
        if wanted.as_ref().is_some_and(|model| *model != manifest.name) {
            continue;
        }
        let outline = Outline::of(&root, &manifest)?;
        let cases = cases(&outline);
        if let Some(document) = document {
            let baselines = cases.iter().filter(|c| c.baseline).map(|c| c.name.clone()).collect();
            suite.case(documented(phase, document, &outline.name, baselines));
        }
        for case in cases {
            suite.case(adapt(case));
        }
    }
    Ok(suite)
}

/// The only fixture whose cases are wanted, if it is known: nextest starts one process per test and names it exactly, and
/// a capture's header takes longer to read than most cases run.
fn wanted(args: &Arguments) -> Option<String> {
    let name = args.filter.as_deref().filter(|name| args.exact && !args.list && !name.starts_with("meta::"))?;
    name.split("::").nth(1).map(str::to_owned)
}

fn adapt(case: phase::Case) -> Case {
    let phase::Case { name, model, baseline, run } = case;
    let adapted = match run {
        Run::Static(run) => Case::new(name, move |cx| judge(cx, run().map_err(failed)?)).without_device(),
        Run::OnDevice(run) => {
            let (model, prompt) = (model.clone(), name.split("::").nth(2).unwrap_or_default().to_owned());
            Case::new(name, move |cx| {
                let device = cx.device()?.label();
                let finding = run(device).map_err(failed)?;
                let explained = cx.phase() == "phase2" || cx.phase() == "phase3";
                if explained && finding.verdict.outcome() == Outcome::Fail {
                    return Err(explain(finding.verdict, &model, device, &prompt).into());
                }
                judge(cx, finding)
            })
        }
    };
    let adapted = if model.is_empty() { adapted } else { adapted.needs(model) };
    if baseline { adapted.with_baseline() } else { adapted }
}

/// A failure's verdict once the reference has been heard, and what is known of why.
fn explain(verdict: Verdict, model: &str, device: &str, prompt: &str) -> String {
    let verdict = phase::court::of_failure(model, device, prompt, verdict);
    let mut text = verdict.to_string();
    for line in phase::explain::of_failure(model, device).iter().flat_map(|lines| lines.iter()) {
        text.push_str("\n  ");
        text.push_str(line);
    }
    text
}

/// The verdict first; the figures only of a pass.
fn judge(cx: &Cx, finding: Finding) -> std::result::Result<(), Failed> {
    for warning in finding.verdict.warnings() {
        eprintln!("{}: warning: {warning}", cx.name());
    }
    if !finding.verdict.is_pass() {
        return Err(finding.verdict.to_string().into());
    }
    if finding.numbers.is_empty() { Ok(()) } else { cx.baseline(numbers(&finding)) }
}

fn numbers(finding: &Finding) -> Numbers {
    finding.numbers.iter().fold(Numbers::new(), |numbers, (name, value)| figure(numbers, name, *value))
}

/// A figure whose name holds no metric word is a count: equal to its baseline or not.
fn figure(numbers: Numbers, name: &str, value: f64) -> Numbers {
    let count = band_of(name).is_none() && value.fract() == 0.0 && value >= 0.0;
    if count { numbers.count(name, value as u64) } else { numbers.number(name, value) }
}

fn failed(error: Error) -> Failed {
    match error {
        Error::Incomplete { .. } => format!("INCONCLUSIVE: {error}").into(),
        error => error.to_string().into(),
    }
}

/// The progress document is there, and every baseline's figures stand in it within their bands.
fn documented(phase: &'static str, document: &'static str, model: &str, cases: Vec<String>) -> Case {
    let (model, cases) = (model.to_owned(), Arc::new(cases));
    Case::new(format!("documented::{model}"), {
        let model = model.clone();
        move |cx| {
            let device = cx.device()?.baseline();
            let path = progress::path(&settings::root(), &model, device.label(), document);
            let figures = progress::figures(&path).map_err(failed)?;
            let mut wrong = vec![];
            for case in cases.iter() {
                let Some(stored) = super::baseline::stored(phase, &format!("{case}::{device}")) else {
                    wrong.push(format!("{case}: no baseline"));
                    continue;
                };
                let documented = figures.get(case).into_iter().flatten();
                let text = documented.fold(Numbers::new(), |n, (name, value)| figure(n, name, *value));
                let text = text.render().unwrap_or_default();
                wrong.extend(differences(&stored, &text).into_iter().map(|line| format!("{case}: {line}")));
            }
            if wrong.is_empty() && !cases.is_empty() {
                return Ok(());
            }
            let shown = wrong.iter().take(5).cloned().collect::<Vec<_>>().join("\n  ");
            Err(format!("{}: {} figures contradict the baselines:\n  {shown}", path.display(), wrong.len()).into())
        }
    })
    .needs(model)
}
