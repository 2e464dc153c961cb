//! `kernels --calibrate`: the emulated NPU2 arithmetic beside the figures measured on hardware.

use std::process::ExitCode;

use crate::check::{Extent, Verdict};
use crate::commands::ReportArgs;
use crate::phase::{calibrate, devices};
use crate::report::{Cell, Report, Table};

pub(super) fn run(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let rows = calibrate::calibrate()?;
    let columns = ["kernel", "shape", "measured", "hardware", "ratio", "goal", "bias", "gain", "max abs", "met"];
    let mut table = Table::new("mean_rel_l1", &columns);
    let mut failures = vec![];
    for row in &rows {
        let met = row.in_goal() && row.leans_right();
        if !met {
            failures.push(format!("{} {}: {:.3e}, hardware {:.3e}", row.kernel, row.shape, row.measured, row.hardware));
        }
        let goal = match row.goal {
            calibrate::Goal::Ratio(low, high) => format!("{low} to {high}"),
            calibrate::Goal::Below(limit) => format!("below {limit:.1e}"),
        };
        table.row([
            Cell::from(row.kernel),
            row.shape.into(),
            row.measured.into(),
            row.hardware.into(),
            row.ratio().into(),
            goal.into(),
            row.bias.into(),
            row.gain.into(),
            row.max_abs.into(),
            if met { "yes" } else { "NO" }.into(),
        ]);
    }
    let extent = Extent::new().require("kernels", rows.len() as u64).compare("kernels", rows.len() as u64);
    let device = devices::open_device(calibrate::DEVICE)?;
    let described = (device.info().label.clone(), device.info().description.clone());
    let mut report = Report::new("calibrate", "kernels", described, Verdict::judge(failures, extent));
    report.tables.push(table);
    Ok(args.publish(&report, |report| report.tables.iter().for_each(|table| say!("{}", table.render())))?)
}
