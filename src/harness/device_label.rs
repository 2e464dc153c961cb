//! The devices a case can be multiplied by, as they are written at the end of a test's name.

/// A device as test names and `PHASEGATE_DEVICES` spell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceLabel {
    /// The emulated device, `ieee` datapath.
    Emu,
    /// The emulated device, `npu2` datapath.
    EmuNpu2,
    /// The virtual NPU under the real XRT.
    Vnpu,
    /// The NPU.
    Npu,
}

impl DeviceLabel {
    pub const ALL: [DeviceLabel; 4] = [DeviceLabel::Emu, DeviceLabel::EmuNpu2, DeviceLabel::Vnpu, DeviceLabel::Npu];

    pub const fn label(self) -> &'static str {
        match self {
            DeviceLabel::Emu => "emu",
            DeviceLabel::EmuNpu2 => "emu_npu2",
            DeviceLabel::Vnpu => "vnpu",
            DeviceLabel::Npu => "npu",
        }
    }

    /// The device whose baselines and progress documents it is held against: the virtual NPU computes with emu's
    /// kernels, bit for bit.
    pub(super) const fn baseline(self) -> DeviceLabel {
        match self {
            DeviceLabel::Vnpu => DeviceLabel::Emu,
            other => other,
        }
    }

    /// The device of that label, if there is one.
    pub fn of(label: &str) -> Option<DeviceLabel> {
        DeviceLabel::ALL.into_iter().find(|device| device.label() == label)
    }

    /// Every label, for messages.
    pub(super) fn known() -> String {
        DeviceLabel::ALL.map(DeviceLabel::label).join(", ")
    }
}

impl std::fmt::Display for DeviceLabel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.label())
    }
}
