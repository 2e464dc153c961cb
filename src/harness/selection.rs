//! What `PHASEGATE_DEVICES`, `PHASEGATE_MODELS` and `PHASEGATE_REQUIRE` ask for, checked against what a suite knows.

use super::device_label::DeviceLabel;
use crate::error::{Error, Result};
use crate::settings;

/// The devices and models of this run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub devices: Vec<DeviceLabel>,
    /// Empty: every model.
    pub models: Vec<String>,
    /// Names of devices, models and resources whose absence is a failure.
    pub required: Vec<String>,
}

impl Selection {
    /// From the environment. `models` and `resources` are what the suite declared; a suite that declared no model
    /// cannot tell a wrong name from another suite's, and takes any.
    pub fn from_settings(models: &[String], resources: &[String]) -> Result<Selection> {
        settings::check()?;
        let list = |name| settings::list(name);
        Selection::new(list(settings::DEVICES), list(settings::MODELS), list(settings::REQUIRE), models, resources)
    }

    fn new(
        devices: Vec<String>,
        selected: Vec<String>,
        required: Vec<String>,
        models: &[String],
        resources: &[String],
    ) -> Result<Selection> {
        let mut chosen = Vec::new();
        let by_default = devices.is_empty();
        for label in devices {
            let device = DeviceLabel::of(&label)
                .ok_or_else(|| usage(settings::DEVICES, &label, format!("one of {}", DeviceLabel::known())))?;
            if !chosen.contains(&device) {
                chosen.push(device);
            }
        }
        if by_default {
            // A device that must be there is there to be used.
            chosen.push(DeviceLabel::Emu);
            let required = required.iter().filter_map(|name| DeviceLabel::of(name));
            chosen.extend(required.filter(|device| *device != DeviceLabel::Emu));
        }
        let is_model = |name: &str| models.is_empty() || models.iter().any(|model| model == name);
        let is_resource = |name: &str| resources.iter().any(|resource| resource == name);
        if let Some(name) = selected.iter().find(|name| !is_model(name)) {
            return Err(usage(settings::MODELS, name, format!("one of {}", models.join(", "))));
        }
        let is_known = |name: &str| is_model(name) || is_resource(name) || DeviceLabel::of(name).is_some();
        if let Some(name) = required.iter().find(|name| !is_known(name)) {
            let known = [&[DeviceLabel::known()], models, resources].concat().join(", ");
            return Err(usage(settings::REQUIRE, name, format!("one of {known}")));
        }
        Ok(Selection { devices: chosen, models: selected, required })
    }

    pub fn requires(&self, name: &str) -> bool {
        self.required.iter().any(|required| required == name)
    }

    pub fn takes_model(&self, name: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|model| model == name)
    }
}

fn usage(what: &str, found: &str, expected: String) -> Error {
    Error::Usage { what: what.into(), found: found.into(), expected }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn select(devices: &str, models: &str, required: &str) -> Result<Selection> {
        let list = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        Selection::new(list(devices), list(models), list(required), &list("tiny_llama smollm2_135m"), &list("sealed"))
    }

    #[test]
    fn the_default_is_emu_and_every_model() {
        let selection = select("", "", "").unwrap();
        assert_eq!(selection.devices, [DeviceLabel::Emu]);
        assert!(selection.takes_model("tiny_llama") && !selection.requires("npu"));
    }

    #[test]
    fn a_required_device_is_chosen_unless_others_are() {
        assert_eq!(select("", "", "npu").unwrap().devices, [DeviceLabel::Emu, DeviceLabel::Npu]);
        assert_eq!(select("emu", "", "npu").unwrap().devices, [DeviceLabel::Emu]);
    }

    #[test]
    fn devices_keep_their_order_and_count_once() {
        let selection = select("npu emu npu", "tiny_llama", "npu sealed smollm2_135m").unwrap();
        assert_eq!(selection.devices, [DeviceLabel::Npu, DeviceLabel::Emu]);
        assert!(!selection.takes_model("smollm2_135m") && selection.requires("sealed"));
    }

    #[rstest]
    #[case("gpu", "", "", "PHASEGATE_DEVICES: found \"gpu\"")]
    #[case("", "llama", "", "PHASEGATE_MODELS: found \"llama\"")]
    #[case("", "", "llama", "PHASEGATE_REQUIRE: found \"llama\"")]
    fn unknown_names_are_usage_errors(
        #[case] devices: &str,
        #[case] models: &str,
        #[case] required: &str,
        #[case] start: &str,
    ) {
        let message = select(devices, models, required).unwrap_err().to_string();
        assert!(message.starts_with(start), "{message}");
    }

    #[test]
    fn a_suite_without_models_takes_any_name() {
        assert!(Selection::new(vec![], vec!["x".into()], vec!["y".into()], &[], &[]).is_ok());
    }
}
