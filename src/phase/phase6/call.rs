//! Calls of the deployed binary and of the Makefile, as a user makes them.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::error::{Error, Result};
use crate::settings;

/// One model's deployment on one device, as one case uses it.
pub struct Deployment {
    binary: &'static str,
    pub model: String,
    device: String,
    /// Where its reports go: a folder of the case's own.
    reports: PathBuf,
}

/// What a call left.
pub struct Called {
    line: String,
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Deployment {
    pub fn new(binary: &'static str, model: &str, device: &str, case: &str) -> Deployment {
        let reports = settings::work_dir().join("phase6").join(format!("{case}-{model}-{device}"));
        Deployment { binary, model: model.into(), device: device.into(), reports }
    }

    pub fn binary(&self) -> &'static str {
        self.binary
    }

    /// The command `args[0]` for this model on this device.
    ///
    /// Errors: [`Error::Io`] when the binary cannot be started.
    pub fn call(&self, args: &[&str]) -> Result<Called> {
        self.call_elsewhere(&[args, &["--device", &self.device]].concat())
    }

    /// The same without naming the device.
    ///
    /// Errors: as [`Deployment::call`].
    pub fn call_elsewhere(&self, args: &[&str]) -> Result<Called> {
        let mut command = Command::new(self.binary);
        command.arg(args[0]).arg(&self.model).args(&args[1..]);
        if !matches!(args[0], "run" | "chat") {
            command.arg("--report-dir").arg(&self.reports);
        }
        // A deployment computes; what an earlier test left on the disk is no run of it.
        command.env("PHASEGATE_RUN_CACHE", "off").env("PHASEGATE_ROOT", settings::root());
        let output = command.output().map_err(Error::io(self.binary))?;
        Ok(Called::of(format!("{} {}", args.join(" "), self.model), &output))
    }

    /// `make <target>` with this build's binary.
    ///
    /// Errors: [`Error::Io`] when there is no make.
    pub fn make(&self, target: &str, model: &str) -> Result<Called> {
        let mut command = Command::new("make");
        command.current_dir(settings::root()).args(["--silent", target, "N_TOKENS=4"]);
        command.arg(format!("PHASEGATE={}", self.binary)).arg(format!("MODEL={model}"));
        command.arg(format!("DEVICE={}", self.device)).env("PHASEGATE_RUN_CACHE", "off");
        // Its own words are looked for.
        command.env("LC_ALL", "C");
        let output = command.output().map_err(Error::io("make"))?;
        Ok(Called::of(format!("make {target} MODEL={model}"), &output))
    }
}

impl Called {
    fn of(line: String, output: &Output) -> Called {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Called { line, code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// What is wrong with the exit code, if anything.
    pub fn expect(&self, code: i32) -> Vec<String> {
        let wrong = self.code != Some(code);
        let why = || format!("{}: exit code {:?}, expected {code}: {}", self.line, self.code, self.stderr.trim_end());
        wrong.then(why).into_iter().collect()
    }

    /// Its stdout as JSON.
    pub fn json(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.stdout).ok()
    }
}
