//! Does the explanation name the fault that was injected? Every fault of weights, config, RoPE, attention, KV cache and
//! arithmetic, on every embedded model and both datapaths, in an instance that the fitted library does not hold: another
//! strength, head, seed or position, several layers at once, or a checkpoint that was damaged on disk and loaded again.

#[path = "explain/court.rs"]
mod court;
#[path = "explain/held_out.rs"]
mod held_out;
#[path = "explain/rewrite.rs"]
mod rewrite;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use held_out::{How, Injected, injected};
use phasegate::error::{Error, Result};
use phasegate::explain::Script;
use phasegate::explain::bisect::bisect;
use phasegate::explain::fit::{self, Library, Suspect};
use phasegate::fault::{Entry, Injection, Kind, catalogue};
use phasegate::harness::{Availability, Case, Failed, Suite};
use phasegate::phase::{Outline, Subject, explain};
use phasegate::plan::PlanOptions;
use phasegate::settings;

const DEVICES: [&str; 2] = ["emu", "emu_npu2"];

const KINDS: [Kind; 6] = [Kind::Weights, Kind::Config, Kind::Rope, Kind::Attention, Kind::Kv, Kind::Arithmetic];

/// Least share of the faults that is named first, and among the first three.
const TOP1: f64 = 0.90;
const TOP3: f64 = 0.98;

/// Least share of the faults of one call site whose launch the bisect names.
const BISECT: f64 = 0.90;

/// One injected fault.
struct Row {
    fault: &'static str,
    kind: Kind,
    model: String,
    device: &'static str,
    how: How,
    /// None: no run showed it.
    seen: bool,
    /// Place of the injected fault among the hypotheses, from 0.
    place: Option<usize>,
    first: String,
    share: f64,
    /// Whether the bisect names a launch of the fault's own site, where it has one.
    bisect: Option<bool>,
    culprit: String,
}

type Rows = Arc<Mutex<Vec<Row>>>;

fn main() -> ExitCode {
    let rows = Rows::default();
    let (suite, cases) = match suite(&rows) {
        Ok(suite) => suite,
        Err(error) => {
            eprintln!("explain: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = suite.run();
    let rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
    let done = rows.iter().map(|row| (row.model.as_str(), row.device)).collect::<std::collections::BTreeSet<_>>().len();
    if rows.is_empty() || done < cases {
        return code;
    }
    match conclude(&rows) {
        Ok(true) => code,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("explain: {error}");
            ExitCode::FAILURE
        }
    }
}

fn suite(rows: &Rows) -> Result<(Suite, usize)> {
    let mut suite = Suite::new("explain");
    let mut cases = 0;
    for outline in Outline::all()?.into_iter().filter(|outline| outline.name.starts_with("tiny_")) {
        suite.model(&outline.name, outline.missing.clone().map_or(Availability::Available, Availability::Missing));
        for device in DEVICES {
            let (model, rows) = (outline.name.clone(), rows.clone());
            let name = if device == "emu" { format!("ieee::{model}") } else { format!("npu2::{model}") };
            let case = Case::new(name, move |_| {
                let found = all(&model, device).map_err(|e| Failed::from(e.to_string()))?;
                rows.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
                Ok(())
            });
            suite.case(case.needs(outline.name.clone()).without_device());
            cases += 1;
        }
    }
    let disputes = Case::new("court::tiny_llama", |_| match court::disputes() {
        Ok(None) => Ok(()),
        Ok(Some(wrong)) => Err(wrong.into()),
        Err(error) => Err(error.to_string().into()),
    });
    suite.case(disputes.needs("tiny_llama").without_device());
    Ok((suite, cases))
}

/// Every fault on one model and device.
fn all(model: &str, device: &'static str) -> Result<Vec<Row>> {
    let subject = Subject::shared(model)?;
    let lab = explain::lab(&subject, PlanOptions::default())?;
    let (short, long) = (explain::script(&subject)?, explain::long_script(&subject)?);
    let library = Library::new(&lab, device, &short, None, &Suspect::default(), None)?;
    let hidden = Library::of(&lab, device, &long, library.sound_candidates(), None)?;
    let mut rows = vec![];
    for entry in catalogue().iter().copied().filter(|e| KINDS.contains(&e.kind) && fit::is_of_run(e)) {
        if (entry.absent)(&lab.config).is_some() {
            continue;
        }
        let injected = injected(entry, &lab, &subject)?;
        let mut row = name(entry, &injected, device, [(&short, &library), (&long, &hidden)])?;
        row.model = model.to_owned();
        if let (Injection::Launch { sites: [_, ..], .. }, "emu", true) = (&entry.injection, device, row.seen) {
            let found = bisect(&lab, device, device, &short, &*injected.alteration)?;
            row.culprit = found.culprit.unwrap_or_default();
            row.bisect = Some(has_site(entry, &row.culprit));
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Whether a launch is one of the fault's call sites.
fn has_site(entry: &Entry, launch: &str) -> bool {
    let Injection::Launch { sites, .. } = entry.injection else { return false };
    let site = launch.split_once('.').map_or(launch, |(_, site)| site);
    sites.contains(&site)
}

fn name(
    entry: &'static Entry,
    injected: &Injected,
    device: &'static str,
    libraries: [(&Script, &Library); 2],
) -> Result<Row> {
    let mut row = Row {
        fault: entry.id,
        kind: entry.kind,
        model: String::new(),
        device,
        how: injected.how,
        seen: false,
        place: None,
        first: String::new(),
        share: f64::NAN,
        bisect: None,
        culprit: String::new(),
    };
    for (script, library) in libraries {
        let run = fit::outcome(injected.lab.trace(device, script, &*injected.alteration));
        if library.is_sound(&run, 0.0) {
            continue;
        }
        let ranked = library.explain(&run, 0.0);
        row.seen = true;
        row.place = ranked.iter().position(|h| h.fault == entry.id);
        if let Some(first) = ranked.first() {
            (row.first, row.share) = (first.fault.into(), first.matched.share);
        }
        break;
    }
    Ok(row)
}

/// Prints and writes the rates, and says whether they are enough.
fn conclude(rows: &[Row]) -> Result<bool> {
    let mut out = String::from("# Explanation\n\nWritten by `cargo test --test explain`.\n\n");
    let _ = writeln!(
        out,
        "| kind | device | injected | seen | named first | among three | library holds it |\n|---|---|---|---|---|---|---|"
    );
    let mut groups: BTreeMap<(String, &str), Vec<&Row>> = BTreeMap::new();
    for row in rows {
        groups.entry((format!("{:?}", row.kind), row.device)).or_default().push(row);
        groups.entry(("all".into(), row.device)).or_default().push(row);
        groups.entry(("all".into(), "both")).or_default().push(row);
        if !row.how.is_known() {
            groups.entry(("not in the library".into(), row.device)).or_default().push(row);
            groups.entry(("not in the library".into(), "both")).or_default().push(row);
        }
    }
    for ((kind, device), rows) in &groups {
        let rates = Rates::of(rows.iter().copied());
        let Rates { injected, seen, first, three, known } = rates;
        let _ = writeln!(out, "| {kind} | {device} | {injected} | {seen} | {first} | {three} | {known} |");
    }
    let _ = writeln!(
        out,
        "\n## Not named first\n\n| fault | model | device | instance | place | first instead |\n|---|---|---|---|---|---|"
    );
    for row in rows.iter().filter(|row| row.place != Some(0)) {
        let place = match (row.seen, row.place) {
            (false, _) => "not seen".into(),
            (true, None) => "none".into(),
            (true, Some(place)) => (place + 1).to_string(),
        };
        let Row { fault, model, device, how, first, .. } = row;
        let _ = writeln!(out, "| {fault} | {model} | {device} | {how:?} | {place} | {first} |");
    }
    let asked: Vec<&Row> = rows.iter().filter(|row| row.bisect.is_some()).collect();
    let right = asked.iter().filter(|row| row.bisect == Some(true)).count();
    let _ = writeln!(out, "\nThe bisect names the launch of {right} of {} faults of a call site.", asked.len());
    for row in asked.iter().filter(|row| row.bisect == Some(false)) {
        let _ = writeln!(out, "- {} on {}: {}", row.fault, row.model, row.culprit);
    }
    println!("{out}");
    let dir = settings::work_dir().join("explain");
    std::fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    let path = dir.join("explanation.md");
    std::fs::write(&path, &out).map_err(Error::io(&path))?;
    // The two rates, over all and over what the library does not hold.
    let enough = |rates: &Rates| rates.first_share() >= TOP1 && rates.three_share() >= TOP3;
    let every = Rates::of(rows);
    let unknown = Rates::of(rows.iter().filter(|row| !row.how.is_known()));
    for device in DEVICES {
        if !enough(&Rates::of(rows.iter().filter(|row| row.device == device))) {
            eprintln!("explain: on {device} too few faults are named");
            return Ok(false);
        }
    }
    let bisected = right as f64 >= BISECT * asked.len() as f64 && !asked.is_empty();
    if !(enough(&every) && enough(&unknown) && bisected) {
        eprintln!(
            "explain: named first {:.3} and among three {:.3} of all, {:.3} and {:.3} of those not in the library (at least {TOP1}, {TOP3}); bisect {right} of {}",
            every.first_share(),
            every.three_share(),
            unknown.first_share(),
            unknown.three_share(),
            asked.len()
        );
        return Ok(false);
    }
    Ok(true)
}

/// Counts of a group of rows. What no run shows cannot be named and is counted apart.
struct Rates {
    injected: usize,
    seen: usize,
    first: usize,
    three: usize,
    known: usize,
}

impl Rates {
    fn of<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Rates {
        let mut rates = Rates { injected: 0, seen: 0, first: 0, three: 0, known: 0 };
        for row in rows {
            rates.injected += 1;
            rates.seen += usize::from(row.seen);
            rates.first += usize::from(row.place == Some(0));
            rates.three += usize::from(row.place.is_some_and(|place| place < 3));
            rates.known += usize::from(row.how.is_known());
        }
        rates
    }

    fn first_share(&self) -> f64 {
        self.first as f64 / self.seen.max(1) as f64
    }

    fn three_share(&self) -> f64 {
        self.three as f64 / self.seen.max(1) as f64
    }
}
