//! Result bundles: what the cases of one test run came to, a file a case, so that a process per test and a machine per
//! shard can write side by side; and their merging, which refuses what does not belong together.
//!
//! A bundle is a folder: `bundle.json` (what was run), `models/<model>.json` (what it was judged by), `phases/<phase>.json`
//! (every case there is), `cases/<phase>/<case>.json` (what each came to).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Cell, Report, Table};
use crate::check::{Extent, Verdict};
use crate::error::{Error, Result};
use crate::model::hashes::write_atomically;

/// Version of the form.
pub const SCHEMA: &str = "phasegate.bundle/1";

/// What was run: bundles of one report agree in all of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub schema: String,
    pub commit: String,
    /// Device labels, datapath included.
    pub devices: Vec<String>,
    /// Fixtures that were selected; empty: every one.
    pub models: Vec<String>,
    pub instruction_set: String,
}

/// What a model's cases were judged by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    pub capture_sha256: String,
    pub weights_sha256: String,
}

/// Every case of a phase, and those that could not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    pub cases: BTreeSet<String>,
    /// Case to reason.
    pub ignored: BTreeMap<String, String>,
}

/// What one case came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    pub phase: String,
    pub case: String,
    pub passed: bool,
    /// Why not.
    pub message: String,
    /// Its baseline figures as the snapshot has them; empty without.
    pub figures: String,
    pub seconds: f64,
}

/// A bundle being written.
#[derive(Debug, Clone)]
pub struct Bundle {
    dir: PathBuf,
}

impl Bundle {
    /// The bundle in `dir`, begun by the first process that gets there.
    ///
    /// Errors: [`Error::Io`]; [`Error::Usage`] when another run's bundle lies there.
    pub fn open(dir: PathBuf, identity: &Identity) -> Result<Bundle> {
        let path = dir.join("bundle.json");
        if path.is_file() {
            let known: Identity = read(&path)?;
            if known != *identity {
                return Err(Error::Usage {
                    what: dir.display().to_string(),
                    found: format!("a bundle of another run ({})", disagreement(&known, identity)),
                    expected: "an empty folder, or this run's".into(),
                });
            }
        } else {
            write(&path, identity)?;
        }
        Ok(Bundle { dir })
    }

    /// The bundle in `dir` where another process has begun it.
    pub fn begun(dir: &Path) -> Option<Bundle> {
        dir.join("bundle.json").is_file().then(|| Bundle { dir: dir.into() })
    }

    /// Says what a model is judged by, unless that is said already.
    ///
    /// Errors: those of `identity`; [`Error::Io`].
    pub fn model(&self, name: &str, identity: impl FnOnce() -> Result<ModelIdentity>) -> Result<()> {
        let path = self.dir.join("models").join(format!("{name}.json"));
        if path.is_file() { Ok(()) } else { write(&path, &identity()?) }
    }

    /// Errors: [`Error::Io`].
    pub fn list(&self, phase: &str, listing: &Listing) -> Result<()> {
        write(&self.dir.join("phases").join(format!("{phase}.json")), listing)
    }

    /// Errors: [`Error::Io`].
    pub fn case(&self, result: &CaseResult) -> Result<()> {
        let name = format!("{}.json", result.case.replace("::", "."));
        write(&self.dir.join("cases").join(&result.phase).join(name), result)
    }
}

fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::malformed(path, e.to_string()))?;
    write_atomically(path, text.as_bytes())
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).map_err(Error::io(path))?;
    serde_json::from_slice(&text).map_err(|e| Error::malformed(path, format!("no part of a bundle: {e}")))
}

/// The first thing in which two identities differ.
fn disagreement(a: &Identity, b: &Identity) -> String {
    let pairs = [
        ("schema", &a.schema, &b.schema),
        ("commit", &a.commit, &b.commit),
        ("devices and datapaths", &a.devices.join(", "), &b.devices.join(", ")),
        ("models", &a.models.join(", "), &b.models.join(", ")),
        ("instruction set", &a.instruction_set, &b.instruction_set),
    ];
    let differ = pairs.into_iter().find(|(_, a, b)| a != b);
    differ.map_or_else(|| "nothing".into(), |(what, a, b)| format!("{what}: {a:?} and {b:?}"))
}

/// Bundles read back as one.
#[derive(Debug, Clone)]
pub struct Merged {
    pub identity: Identity,
    pub models: BTreeMap<String, ModelIdentity>,
    pub listings: BTreeMap<String, Listing>,
    /// By phase and case.
    pub cases: BTreeMap<(String, String), CaseResult>,
    pub bundles: usize,
}

/// Reads bundles as one.
///
/// Errors: [`Error::Comparison`] for bundles of different commits, models, captures, datapaths or instruction sets, for
/// different lists of cases, and for a case that two of them hold; [`Error::Io`], [`Error::Malformed`].
pub fn merge(dirs: &[PathBuf]) -> Result<Merged> {
    let (first, others) = dirs.split_first().ok_or_else(|| Error::Usage {
        what: "bundles".into(),
        found: "none".into(),
        expected: "at least one folder".into(),
    })?;
    let mut merged = one(first)?;
    for dir in others {
        let other = one(dir)?;
        let refuse = |what: String| {
            Err(Error::comparison(dir.display().to_string(), what, format!("the same as in {}", first.display())))
        };
        if other.identity != merged.identity {
            return refuse(disagreement(&other.identity, &merged.identity));
        }
        for (name, model) in other.models {
            match merged.models.get(&name) {
                Some(known) if *known != model => {
                    let what = if known.weights_sha256 == model.weights_sha256 { "capture" } else { "weights" };
                    return refuse(format!("{name} with another {what}"));
                }
                _ => drop(merged.models.insert(name, model)),
            }
        }
        for (phase, listing) in other.listings {
            match merged.listings.get(&phase) {
                Some(known) if *known != listing => return refuse(format!("another list of cases of {phase}")),
                _ => drop(merged.listings.insert(phase, listing)),
            }
        }
        for (key, case) in other.cases {
            let (phase, name) = key.clone();
            if merged.cases.insert(key, case).is_some() {
                let found = format!("{phase} {name}, which another bundle holds too");
                return Err(Error::comparison(dir.display().to_string(), found, "every case once".to_owned()));
            }
        }
        merged.bundles += 1;
    }
    Ok(merged)
}

fn one(dir: &Path) -> Result<Merged> {
    let identity: Identity = read(&dir.join("bundle.json"))?;
    let mut merged = Merged {
        identity,
        models: named(&dir.join("models"))?,
        listings: named(&dir.join("phases"))?,
        cases: BTreeMap::new(),
        bundles: 1,
    };
    let cases = dir.join("cases");
    for phase in entries(&cases)? {
        for path in entries(&phase)? {
            let case: CaseResult = read(&path)?;
            merged.cases.insert((case.phase.clone(), case.case.clone()), case);
        }
    }
    Ok(merged)
}

/// Every `<name>.json` of a folder, by name.
fn named<T: DeserializeOwned>(dir: &Path) -> Result<BTreeMap<String, T>> {
    let name = |path: &Path| path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    entries(dir)?.iter().map(|path| Ok((name(path), read(path)?))).collect()
}

/// The paths in a folder; none when it is not there.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Ok(entries) => entries.map(|e| Ok(e.map_err(Error::io(dir))?.path())).collect(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
        Err(e) => Err(Error::io(dir)(e)),
    }
}

impl Merged {
    /// FAIL with the failed cases, VACUOUS when a listed case has no result, PASS otherwise.
    pub fn verdict(&self) -> Verdict {
        let failed = self.cases.values().filter(|c| !c.passed);
        let failures = failed.map(|c| format!("{}::{}: {}", c.phase, c.case, c.message)).collect();
        let listed = self.listings.values().map(|l| l.cases.len() as u64).sum();
        let known = |c: &&CaseResult| self.listings.get(&c.phase).is_some_and(|l| l.cases.contains(&c.case));
        let found = self.cases.values().filter(known).count() as u64;
        Verdict::judge(failures, Extent::new().require("cases", listed).compare("cases", found))
    }

    /// The report over all of it.
    pub fn report(&self) -> Report {
        let devices = self.identity.devices.join("_");
        let description = format!("{} bundles, {}", self.bundles, self.identity.instruction_set);
        let mut report = Report::new("merge", "all", (devices, description), self.verdict());
        report.tables.push(self.by_phase());
        let mut failed = Table::new("Failed cases", &["phase", "case", "message"]);
        for case in self.cases.values().filter(|c| !c.passed) {
            failed.row([Cell::from(case.phase.as_str()), case.case.as_str().into(), case.message.as_str().into()]);
        }
        let mut missing = Table::new("Cases without a result", &["phase", "case"]);
        for (phase, listing) in &self.listings {
            for case in listing.cases.iter().filter(|c| !self.cases.contains_key(&(phase.clone(), (*c).clone()))) {
                missing.row([Cell::from(phase.as_str()), case.as_str().into()]);
            }
        }
        report.tables.extend([failed, missing].into_iter().filter(|t| !t.rows.is_empty()));
        report.provenance.push(("commit".into(), self.identity.commit.clone()));
        for (name, model) in &self.models {
            report.provenance.push((format!("weights of {name}"), model.weights_sha256.clone()));
            report.provenance.push((format!("capture of {name}"), model.capture_sha256.clone()));
        }
        report
    }

    /// A row a phase and model: the second segment of a case's name, where it names one.
    fn by_phase(&self) -> Table {
        let mut table =
            Table::new("Cases", &["cases of", "listed", "passed", "failed", "missing", "ignored", "seconds"]);
        let group = |phase: &str, case: &str| {
            let model = case.split("::").find(|s| self.models.contains_key(*s));
            format!("{phase} {}", model.unwrap_or("others")).trim_end().to_owned()
        };
        let mut rows: BTreeMap<String, [f64; 5]> = BTreeMap::new();
        for (phase, listing) in &self.listings {
            for case in &listing.cases {
                let row = rows.entry(group(phase, case)).or_default();
                row[0] += 1.0;
                match self.cases.get(&(phase.clone(), case.clone())) {
                    Some(result) if result.passed => row[1] += 1.0,
                    Some(_) => row[2] += 1.0,
                    None => {}
                }
                row[4] += self.cases.get(&(phase.clone(), case.clone())).map_or(0.0, |c| c.seconds);
            }
            for case in listing.ignored.keys() {
                rows.entry(group(phase, case)).or_default()[3] += 1.0;
            }
        }
        for (name, [listed, passed, failed, ignored, seconds]) in rows {
            let count = |x: f64| Cell::Count(x as u64);
            let missing = listed - passed - failed;
            let counts = [listed, passed, failed, missing, ignored].map(count);
            table.row([Cell::from(name)].into_iter().chain(counts).chain([seconds.into()]));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            schema: SCHEMA.into(),
            commit: "abc".into(),
            devices: vec!["emu".into()],
            models: vec![],
            instruction_set: "avx2".into(),
        }
    }

    fn model(capture: &str) -> ModelIdentity {
        ModelIdentity { capture_sha256: capture.into(), weights_sha256: "w".into() }
    }

    fn bundle(dir: &Path, identity: &Identity, capture: &str, cases: &[(&str, bool)]) -> PathBuf {
        let bundle = Bundle::open(dir.into(), identity).unwrap();
        bundle.model("m", || Ok(model(capture))).unwrap();
        let listing = Listing { cases: ["a::m".into(), "b::m".into()].into(), ignored: BTreeMap::new() };
        bundle.list("phase3", &listing).unwrap();
        for &(case, passed) in cases {
            let (phase, case, message, figures) = ("phase3".into(), case.into(), "far".into(), "kl: 1".into());
            bundle.case(&CaseResult { phase, case, passed, message, figures, seconds: 1.0 }).unwrap();
        }
        dir.into()
    }

    #[test]
    fn two_halves_are_the_whole() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let whole = bundle(&at("whole"), &identity(), "c", &[("a::m", true), ("b::m", true)]);
        let halves = [
            bundle(&at("1"), &identity(), "c", &[("a::m", true)]),
            bundle(&at("2"), &identity(), "c", &[("b::m", true)]),
        ];
        let (whole, both) = (merge(&[whole]).unwrap(), merge(&halves).unwrap());
        assert_eq!((&whole.cases, whole.verdict()), (&both.cases, both.verdict()));
        assert!(both.verdict().is_pass());
        let half = merge(&halves[..1]).unwrap();
        assert_eq!(half.verdict().to_string(), "VACUOUS: compared 1 of 2 cases (cases 1/2)");
        assert!(half.report().markdown().contains("| phase3 | b::m |"));
    }

    #[test]
    fn a_failed_case_fails_the_whole() {
        let root = tempfile::tempdir().unwrap();
        let dir = bundle(root.path(), &identity(), "c", &[("a::m", true), ("b::m", false)]);
        assert_eq!(merge(&[dir]).unwrap().verdict().reasons(), ["phase3::b::m: far"]);
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let first = bundle(&root.path().join("first"), &identity(), "c", &[("a::m", true)]);
        let refused = |name: &str, identity: Identity, capture: &str, case: &str| {
            let other = bundle(&root.path().join(name), &identity, capture, &[(case, true)]);
            merge(&[first.clone(), other]).unwrap_err().to_string()
        };
        let commit = Identity { commit: "def".into(), ..identity() };
        assert!(refused("commit", commit, "c", "b::m").contains("commit: \"def\" and \"abc\""));
        let datapath = Identity { devices: vec!["emu_npu2".into()], ..identity() };
        assert!(refused("datapath", datapath, "c", "b::m").contains("devices and datapaths"));
        let models = Identity { models: vec!["m".into()], ..identity() };
        assert!(refused("models", models, "c", "b::m").contains("models:"));
        assert!(refused("capture", identity(), "d", "b::m").contains("m with another capture"));
        assert!(refused("twice", identity(), "c", "a::m").contains("which another bundle holds too"));
        assert!(Bundle::open(first, &Identity { commit: "x".into(), ..identity() }).is_err());
    }
}
