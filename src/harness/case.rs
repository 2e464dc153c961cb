//! One case of a suite, and what it is given when it runs. A case never names a device.

use std::sync::{Arc, OnceLock};

use libtest_mimic::Failed;

use super::device_label::DeviceLabel;
use super::numbers::Numbers;

/// The code of a case; shared, because one case runs on several devices.
pub(super) type Run = Arc<dyn Fn(&Cx) -> Result<(), Failed> + Send + Sync>;

/// One generated test, named without its device: `layer::tiny_llama::base_00::l07`.
pub struct Case {
    pub(super) name: String,
    pub(super) needs: Vec<String>,
    pub(super) has_baseline: bool,
    pub(super) on_device: bool,
    pub(super) run: Run,
}

impl Case {
    /// A case that runs on every selected device, needs nothing else and has no baseline. Weights and devices are
    /// opened inside `run`, never before: the binary is started once per test by nextest, and twice to list.
    pub fn new(name: impl Into<String>, run: impl Fn(&Cx) -> Result<(), Failed> + Send + Sync + 'static) -> Case {
        Case { name: name.into(), needs: Vec::new(), has_baseline: false, on_device: true, run: Arc::new(run) }
    }

    /// Something declared with [`Suite::model`](super::Suite::model) or [`Suite::resource`](super::Suite::resource)
    /// that must be there.
    pub fn needs(mut self, what: impl Into<String>) -> Case {
        self.needs.push(what.into());
        self
    }

    /// The case owns `snapshots/<phase>/<name>.snap` and must measure something ([`Cx::baseline`]).
    pub fn with_baseline(mut self) -> Case {
        self.has_baseline = true;
        self
    }

    /// The case has no device: it runs once and its name is used as it is.
    pub fn without_device(mut self) -> Case {
        self.on_device = false;
        self
    }

    /// The trial's name on a device.
    pub(super) fn name_on(&self, device: Option<DeviceLabel>) -> String {
        match device {
            Some(device) => format!("{}::{device}", self.name),
            None => self.name.clone(),
        }
    }

    /// Why the name cannot be a case's, if it cannot.
    pub(super) fn name_flaw(&self) -> Option<&'static str> {
        let fits = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
        if !self.name.split("::").all(|s| !s.is_empty() && s.bytes().all(fits)) {
            return Some("[a-z0-9_]+(::[a-z0-9_]+)*");
        }
        if self.name.starts_with("meta::") {
            return Some("a name outside of meta::, which is the harness's own");
        }
        if self.name.rsplit("::").next().is_some_and(|last| DeviceLabel::of(last).is_some()) {
            return Some("a name without a device, which the harness appends");
        }
        None
    }
}

/// What a running case may ask, and where it leaves what it measured.
pub struct Cx {
    pub(super) phase: Arc<str>,
    pub(super) name: String,
    pub(super) device: Option<DeviceLabel>,
    pub(super) has_baseline: bool,
    pub(super) measured: OnceLock<Numbers>,
}

impl Cx {
    /// The device to run on; fails in a case that said [`Case::without_device`].
    pub fn device(&self) -> Result<DeviceLabel, Failed> {
        self.device.ok_or_else(|| Failed::from("this case has no device"))
    }

    /// The whole name, device included.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name that its baseline has.
    pub(super) fn baseline_name(&self) -> String {
        match self.device {
            Some(device) => {
                let case = self.name.strip_suffix(device.label()).unwrap_or(&self.name);
                format!("{case}{}", device.baseline().label())
            }
            None => self.name.clone(),
        }
    }

    /// The phase, which is the test binary's name.
    pub fn phase(&self) -> &str {
        &self.phase
    }

    /// Leaves the case's numbers. They are compared with the baseline after the case has returned `Ok`: one that
    /// fails a gate, before or after this call, never touches its snapshot.
    pub fn baseline(&self, numbers: Numbers) -> Result<(), Failed> {
        if !self.has_baseline {
            return Err("a baseline from a case that did not declare one (Case::with_baseline)".into());
        }
        self.measured.set(numbers).map_err(|_| "a second baseline from one case".into())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a", true)]
    #[case("layer::tiny_llama::base_00::l07", true)]
    #[case("emu::x", true)]
    #[case("", false)]
    #[case("a::", false)]
    #[case("::a", false)]
    #[case("a:b", false)]
    #[case("a::B", false)]
    #[case("a b", false)]
    #[case("a-b", false)]
    #[case("a.b", false)]
    #[case("meta::x", false)]
    #[case("layer::npu", false)]
    #[case("emu", false)]
    fn names(#[case] name: &str, #[case] good: bool) {
        assert_eq!(Case::new(name, |_| Ok(())).name_flaw().is_none(), good);
    }
}
