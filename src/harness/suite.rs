//! All cases of one phase, and the test binary they become.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, FormatSetting, Trial};

use super::baseline;
use super::case::{Case, Cx};
use super::device_label::DeviceLabel;
use super::ignored::{Ignored, summary};
use super::meta::{self, Extent, Owned};
use super::results::{IdentityOf, Results};
use super::selection::Selection;
use super::trial::{Fate, trial};
use crate::error::Error;
use crate::settings;

/// The exit code of a wrong environment variable or a wrong suite.
const USAGE: u8 = 64;
/// libtest's exit code of a failed run.
const FAILED: u8 = 101;

/// Whether something that cases need is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Availability {
    Available,
    /// What is not there and how to get it: `models/smollm2_135m is not there; make model`.
    Missing(String),
}

/// The cases of one phase with everything they may need. Built from metadata only: building it is listing it.
///
/// Declare *every* model, also one that is missing or not selected: its cases are listed as ignored, and its
/// snapshots are known not to be orphans.
pub struct Suite {
    phase: Arc<str>,
    models: Vec<(String, Availability)>,
    resources: Vec<(String, Availability)>,
    devices: Vec<(DeviceLabel, Availability)>,
    identities: BTreeMap<String, IdentityOf>,
    cases: Vec<Case>,
}

impl Suite {
    /// An empty suite of the test binary `phase`, with the emulated devices at hand and no other.
    pub fn new(phase: &str) -> Suite {
        let availability = |device| match device {
            DeviceLabel::Emu | DeviceLabel::EmuNpu2 => Availability::Available,
            DeviceLabel::Vnpu | DeviceLabel::Npu => {
                Availability::Missing(format!("device {device} is not part of this build"))
            }
        };
        Suite {
            phase: phase.into(),
            models: Vec::new(),
            resources: Vec::new(),
            devices: DeviceLabel::ALL.map(|device| (device, availability(device))).to_vec(),
            identities: BTreeMap::new(),
            cases: Vec::new(),
        }
    }

    /// Declares a model that cases may need; `PHASEGATE_MODELS` selects among these.
    pub fn model(&mut self, name: &str, availability: Availability) -> &mut Suite {
        self.models.push((name.into(), availability));
        self
    }

    /// Says what a model's cases are judged by, for result bundles.
    pub fn identity(&mut self, model: &str, identity: IdentityOf) -> &mut Suite {
        self.identities.insert(model.into(), identity);
        self
    }

    /// Declares something else that cases may need (`sealed` kernels); `PHASEGATE_REQUIRE` can name it.
    pub fn resource(&mut self, name: &str, availability: Availability) -> &mut Suite {
        self.resources.push((name.into(), availability));
        self
    }

    /// Says whether a device is there.
    pub fn device(&mut self, device: DeviceLabel, availability: Availability) -> &mut Suite {
        self.devices.retain(|(known, _)| *known != device);
        self.devices.push((device, availability));
        self
    }

    /// Adds a case.
    pub fn case(&mut self, case: Case) -> &mut Suite {
        self.cases.push(case);
        self
    }

    /// The `main` of a test binary. Exit codes: 0, 101 failed or nothing compared, 64 usage.
    pub fn run(self) -> ExitCode {
        self.run_with(&Arguments::from_args())
    }

    /// [`Suite::run`] with arguments of the caller's.
    pub fn run_with(self, args: &Arguments) -> ExitCode {
        let phase = self.phase.clone();
        match self.into_trials(args.exact && !args.list) {
            Ok(trials) => trials.run(args),
            Err(error) => {
                eprintln!("{phase}: {error}");
                ExitCode::from(USAGE)
            }
        }
    }

    fn into_trials(self, one_case: bool) -> Result<Trials, Error> {
        self.check_names()?;
        let names = |list: &[(String, Availability)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let selection = Selection::from_settings(&names(&self.models), &names(&self.resources))?;
        let results = Results::open(&selection, self.identities.clone(), one_case)?;
        Ok(self.select(selection, results))
    }

    /// Multiplies the selected cases by the selected devices.
    fn select(self, selection: Selection, results: Option<Results>) -> Trials {
        let mut trials = Trials::new(self.phase.clone(), results);
        let (mut extent, mut owned) = (Extent::default(), Owned::default());
        for case in &self.cases {
            if case.has_baseline {
                let stems = if case.on_device { &mut owned.on_device } else { &mut owned.bare };
                stems.insert(baseline::stem(&case.name));
            }
            extent.could_use.extend(case.needs.iter().cloned());
            if case.on_device {
                extent.could_use.extend(DeviceLabel::ALL.map(|device| device.label().to_owned()));
            }
            let is_model = |name: &str| self.models.iter().any(|(model, _)| model == name);
            if case.needs.iter().any(|name| is_model(name) && !selection.takes_model(name)) {
                continue;
            }
            let on_none = [None];
            let on_some = selection.devices.iter().copied().map(Some).collect::<Vec<_>>();
            for &device in if case.on_device { on_some.as_slice() } else { &on_none } {
                let fate = self.fate(case, device, &selection);
                if fate == Fate::Run {
                    extent.runnable += 1;
                    extent.uses.extend(case.needs.iter().cloned());
                    extent.uses.extend(device.map(|device| device.label().to_owned()));
                }
                trials.add(case, device, fate);
            }
        }
        trials.add_meta(extent, owned, selection);
        trials
    }

    fn fate(&self, case: &Case, device: Option<DeviceLabel>, selection: &Selection) -> Fate {
        let declared = self.models.iter().chain(&self.resources);
        let needed = declared.filter(|(name, _)| case.needs.contains(name)).map(|(name, there)| (name.as_str(), there));
        let device = self.devices.iter().filter(|(known, _)| Some(*known) == device);
        let device = device.map(|(device, there)| (device.label(), there));
        let mut fate = Fate::Run;
        for (name, there) in needed.chain(device) {
            match there {
                Availability::Missing(why) if selection.requires(name) => {
                    return Fate::Fail(format!("{why} ({} names {name})", settings::REQUIRE));
                }
                Availability::Missing(why) if fate == Fate::Run => fate = Fate::Ignore(why.clone()),
                Availability::Missing(_) | Availability::Available => {}
            }
        }
        fate
    }

    fn check_names(&self) -> Result<(), Error> {
        let wrong = |what: &str, found: &str, expected: &str| {
            Err(Error::Usage { what: what.into(), found: found.into(), expected: expected.into() })
        };
        let mut names = BTreeSet::new();
        for (name, _) in self.models.iter().chain(&self.resources) {
            if !names.insert(name.as_str()) || DeviceLabel::of(name).is_some() {
                return wrong("model or resource", name, "a name declared once, and no device's");
            }
        }
        let declared = names;
        let mut names = BTreeSet::new();
        for case in &self.cases {
            if let Some(expected) = case.name_flaw() {
                return wrong("case name", &case.name, expected);
            }
            if !names.insert(case.name.as_str()) {
                return wrong("case name", &case.name, "a name used once");
            }
            if let Some(need) = case.needs.iter().find(|need| !declared.contains(need.as_str())) {
                return wrong(&format!("need of {}", case.name), need, "a declared model or resource");
            }
        }
        Ok(())
    }
}

/// The trials of a suite and what is known about them beforehand.
struct Trials {
    phase: Arc<str>,
    trials: Vec<Trial>,
    ignored: Vec<Ignored>,
    meta: BTreeSet<&'static str>,
    started: Arc<AtomicUsize>,
    results: Option<Results>,
}

impl Trials {
    fn new(phase: Arc<str>, results: Option<Results>) -> Trials {
        let (trials, ignored, meta, started) = Default::default();
        Trials { phase, trials, ignored, meta, started, results }
    }

    fn add(&mut self, case: &Case, device: Option<DeviceLabel>, fate: Fate) {
        let name = case.name_on(device);
        if let Fate::Ignore(why) = &fate {
            self.ignored.push(Ignored { name: name.clone(), why: why.clone() });
        }
        let has_baseline = case.has_baseline;
        let cx = Cx { phase: self.phase.clone(), name, device, has_baseline, measured: OnceLock::new() };
        self.trials.push(trial(cx, case, fate, self.started.clone(), self.results.clone()));
    }

    fn add_meta(&mut self, extent: Extent, owned: Owned, selection: Selection) {
        let folder = baseline::folder(&self.phase);
        let phase = self.phase.clone();
        let ignored = self.ignored.clone();
        self.add_check("meta::extent", move || {
            // Under nextest no ignored case is started: this is where its reason can be read.
            summary(&ignored).iter().for_each(|line| eprintln!("{phase}: {line}"));
            meta::extent(&extent, &selection)
        });
        self.add_check("meta::snapshots_match_cases", move || meta::snapshots_match_cases(&folder, &owned));
    }

    fn add_check(&mut self, name: &'static str, check: impl FnOnce() -> Result<(), String> + Send + 'static) {
        let phase = self.phase.clone();
        let results = self.results.clone();
        let body = move || {
            let began = Instant::now();
            let outcome = check();
            let kept = results.map_or(Ok(()), |r| r.put(&phase, name, String::new(), &outcome, began.elapsed()));
            let kept = kept.map_err(|e| format!("its result cannot be kept: {e}"));
            outcome.and(kept).map_err(|why| Failed::from(format!("{phase}::{name}: {why}")))
        };
        self.meta.insert(name);
        self.trials.push(Trial::test(name, body));
    }

    fn run(self, args: &Arguments) -> ExitCode {
        let chosen = self.trials.iter().filter(|trial| !args.is_filtered_out(trial));
        let chosen: BTreeSet<String> = chosen.map(|trial| trial.name().to_owned()).collect();
        let cases = chosen.iter().filter(|name| !self.meta.contains(name.as_str())).count();
        let reasons = summary(self.ignored.iter().filter(|ignored| chosen.contains(&ignored.name)));
        // A process that runs one test only knows the cases of one model.
        if let Some(results) = self.results.as_ref().filter(|_| !args.exact)
            && let Err(error) = results.list(&self.phase, self.trials.iter().map(Trial::name), &self.ignored)
        {
            eprintln!("{}: {error}", self.phase);
            return ExitCode::from(FAILED);
        }
        let conclusion = libtest_mimic::run(args, self.trials);
        // The terse list is nextest's, which asks for it before every test.
        if !(args.list && args.format == Some(FormatSetting::Terse)) {
            reasons.iter().for_each(|line| eprintln!("{}: {line}", self.phase));
        }
        if args.list {
            return ExitCode::SUCCESS;
        }
        if cases > 0 && self.started.load(Ordering::Relaxed) == 0 && !conclusion.has_failed() {
            eprintln!("{}: {cases} cases chosen, not one could run: nothing was compared", self.phase);
            return ExitCode::from(FAILED);
        }
        conclusion.exit_code()
    }
}
