use std::sync::Arc;
use std::time::Instant;

use phasegate::explain::fit::{Library, outcome, is_of_run};
use phasegate::explain::{Lab, bisect};
use phasegate::fault::{At, Entry, Fault, Kind, Reach, catalogue};
use phasegate::phase::{Subject, explain};
use phasegate::plan::PlanOptions;
use phasegate::runner::Alteration;

fn main() {
    for model in ["tiny_llama", "tiny_qwen3"] {
        let subject = Subject::shared(model).unwrap();
        let lab = explain::lab(&subject, PlanOptions::default()).unwrap();
        for device in ["emu", "emu_npu2"] {
            for script in [explain::script(&subject).unwrap()] {
                let t = Instant::now();
                let lib = Library::new(&lab, device, &script, None, None).unwrap();
                println!("{model} {device} prompt {} library {:?}", script.ids.len(), t.elapsed());
                let t = Instant::now();
                let mut n = 0;
                let (mut top1, mut top3) = (0, 0);
                for entry in catalogue().iter().filter(|e| is_of_run(e) && (e.absent)(&lab.config).is_none()) {
                    if matches!(entry.kind, Kind::Buffer | Kind::Device) { continue; }
                    let at = held_out(entry, &lab);
                    let fault = Fault::new(entry, &lab.config, at.clone()).unwrap();
                    let run = outcome(lab.trace(device, &script, &fault));
                    n += 1;
                    if lib.is_sound(&run, 0.0) { println!("  {} not seen", entry.id); continue; }
                    let ranked = lib.explain(&run, 0.0);
                    let place = ranked.iter().position(|h| h.fault == entry.id);
                    top1 += usize::from(place == Some(0));
                    top3 += usize::from(place.is_some_and(|p| p < 3));
                    if place != Some(0) {
                        let show: Vec<String> = ranked.iter().take(3).map(|h| format!("{} {:.2}/{:.2}", h.fault, h.matched.likeness, h.matched.share)).collect();
                        let own = ranked.iter().find(|h| h.fault == entry.id).map(|h| (h.matched.likeness, h.at.clone()));
                        println!("  {} {:?}: place {place:?} {own:?}; {}", entry.id, at, show.join(", "));
                    }
                }
                println!("{n} top1 {top1} top3 {top3} {:?}", t.elapsed());
            }
        }
    }
}

fn held_out(entry: &Entry, lab: &Lab) -> At {
    let default = entry.default_at(&lab.config);
    let layer = default.layer.map(|_| 2.min(lab.config.num_hidden_layers - 1));
    let strength = match entry.strengths {
        [] => 1.0,
        [one] => one * 1.5,
        [a, b, ..] => (a * b).sqrt(),
    };
    At { layer, head: 0, position: 4, strength, seed: 77 }
}
