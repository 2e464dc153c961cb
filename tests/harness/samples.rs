//! Suites that do on purpose what a suite may do, or may not.

use phasegate::harness::{Availability, Case, Cx, DeviceLabel, Failed, Numbers, Suite};

/// The sample of that name; its phase is `sample`.
pub fn suite(name: &str) -> Suite {
    let mut suite = Suite::new("sample");
    match name {
        "good" => good(&mut suite),
        "other_number" => {
            suite.case(Case::new("measure", |cx| cx.baseline(measured(0.02, 32))).with_baseline());
        }
        "within" => {
            suite.case(Case::new("measure", |cx| cx.baseline(measured(0.013, 32))).with_baseline());
        }
        "other_count" => {
            suite.case(Case::new("measure", |cx| cx.baseline(measured(0.01, 31))).with_baseline());
        }
        "gate_after_baseline" => {
            suite.case(Case::new("measure", gate_after_baseline).with_baseline());
        }
        "broken" => broken(&mut suite),
        "models" => models(&mut suite),
        "duplicate" => {
            suite.case(Case::new("twice", |_| Ok(()))).case(Case::new("twice", |_| Ok(())));
        }
        "bad_name" => {
            suite.case(Case::new("Layer 7", |_| Ok(())));
        }
        "undeclared" => {
            suite.case(Case::new("layer", |_| Ok(())).needs("nothing_of_that_name"));
        }
        "large" => large(&mut suite),
        other => panic!("no sample {other}"),
    }
    suite
}

fn measured(max_abs: f64, steps: u64) -> Numbers {
    Numbers::new().number("cosine", 0.9991).number("max_abs", max_abs).count("steps", steps)
}

fn good(suite: &mut Suite) {
    suite.case(Case::new("measure", |cx| cx.baseline(measured(0.01, 32))).with_baseline());
    suite.case(Case::new("where", |cx| match cx.name() == format!("where::{}", cx.device()?) {
        true => Ok(()),
        false => Err(cx.name().into()),
    }));
    suite.case(
        Case::new("config", |cx| if cx.device().is_err() { Ok(()) } else { Err("device".into()) }).without_device(),
    );
}

fn gate_after_baseline(cx: &Cx) -> Result<(), Failed> {
    cx.baseline(measured(0.01, 32))?;
    Err("gate: cosine 0.4, at least 0.99".into())
}

fn broken(suite: &mut Suite) {
    suite.case(Case::new("fails", |_| Err("gate says no".into())));
    suite.case(Case::new("panics", |_| panic!("out of cheese")));
    suite.case(Case::new("measures_nothing", |_| Ok(())).with_baseline());
    suite.case(Case::new("undeclared_baseline", |cx| cx.baseline(measured(0.01, 32))));
    suite.case(Case::new("nan", |cx| cx.baseline(measured(f64::NAN, 32))).with_baseline());
    suite.case(Case::new("passes", |_| Ok(())));
}

fn models(suite: &mut Suite) {
    let missing = Availability::Missing("models/big is not there; make model".into());
    suite.model("tiny", Availability::Available).model("big", missing);
    suite.resource("sealed", Availability::Missing("no sealed kernels".into()));
    suite.device(DeviceLabel::Vnpu, Availability::Missing("no virtual NPU here".into()));
    for model in ["tiny", "big"] {
        for layer in 0..3 {
            let case = Case::new(format!("layer::{model}::l{layer:02}"), |cx| cx.baseline(measured(0.01, 32)));
            suite.case(case.needs(model).with_baseline());
        }
    }
}

fn large(suite: &mut Suite) {
    suite.model("tiny", Availability::Available);
    for at in 0..10_000 {
        suite.case(Case::new(format!("layer::tiny::base_00::l{at:05}"), |_| Ok(())).needs("tiny").with_baseline());
    }
}
