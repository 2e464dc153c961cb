//! A bench makes the records that production makes, whoever prepared them.

use super::*;
use crate::phase::devices::pool;

#[test]
fn what_is_prepared_is_what_production_records() {
    let subject = Arc::new(Subject::open("tiny_qwen2", None).unwrap());
    let prompts: Vec<String> = subject.capture().unwrap().prompts().iter().take(6).map(|p| p.id.clone()).collect();
    let bench = || Bench::new(subject.clone(), "emu", &prompts, PlanOptions::default()).unwrap();
    let prepared = Bench { cache: RunCache::off(), ..bench().for_records().unwrap() };
    prepared.record(&prompts[1]).unwrap();
    prepared.prepare(&prompts).unwrap();
    let alone = bench().altered(Arc::new(Sound));
    assert_eq!((prepared.at_once(), alone.at_once()), (AT_ONCE, 1));
    alone.prepare(&prompts).unwrap();
    assert!(alone.records.lock().unwrap().is_empty(), "altered parts run as production does, one by one");
    for (at, id) in prompts.iter().enumerate() {
        let made = prepared.records.lock().unwrap().remove(id);
        // Five were left: four side by side, and the last alone, when it is asked for.
        let (made, at_once) = match made {
            Some(made) => (made, if at == 1 { 1 } else { AT_ONCE }),
            None => (prepared.record(id).unwrap(), 1),
        };
        assert_eq!((made.timing.at_once, at == 5), (at_once, at_once == 1 && at != 1), "{id}");
        let own = alone.record(id).unwrap();
        let same =
            (&made.logits, &made.taps, &made.fed, made.counters) == (&own.logits, &own.taps, &own.fed, own.counters);
        assert!(same, "{id}");
    }
}

/// A group of which some are on disk, some here, and one is too long to have company.
#[test]
fn what_is_prepared_is_kept_and_found() {
    let root = tempfile::tempdir().unwrap();
    let subject = Arc::new(Subject::open("tiny_llama", None).unwrap());
    let all: Vec<String> = subject.capture().unwrap().prompts().iter().map(|p| p.id.clone()).collect();
    let long =
        all.iter().find(|id| subject.capture().unwrap().prompt(id).unwrap().ids.len() > BESIDE).cloned().unwrap();
    let prompts: Vec<String> = all.into_iter().take(5).chain([long.clone()]).collect();
    let bench = || {
        let bench = Bench::new(subject.clone(), "emu", &prompts, PlanOptions::default()).unwrap();
        Bench { cache: RunCache::at(root.path().into(), "binary"), ..bench.for_records().unwrap() }
    };
    let files = || std::fs::read_dir(root.path().join("binary")).map_or(0, |dir| dir.count());
    bench().prepare(&prompts[..2]).unwrap();
    assert_eq!(files(), 2);
    let second = bench();
    second.prepare(&prompts).unwrap();
    let made = second.records.lock().unwrap().clone();
    assert_eq!((made.len(), files()), (5, 5), "{:?}", made.keys());
    assert!(!made.contains_key(&long));
    assert_eq!(prompts[..5].iter().map(|id| made[id].timing.at_once).collect::<Vec<_>>(), [2, 2, 3, 3, 3]);
    let alone = bench().altered(Arc::new(Sound));
    for id in &prompts {
        let (made, own) = (second.record(id).unwrap(), alone.record(id).unwrap());
        assert!((&made.logits, &made.taps, made.counters) == (&own.logits, &own.taps, own.counters), "{id}");
    }
}

/// A sequence that is not finite does not reach those beside it.
#[test]
fn a_record_of_nan_leaves_those_beside_it_alone() {
    let subject = Subject::open("tiny_llama", None).unwrap();
    let prompts = subject.capture().unwrap().prompts();
    let ids: Vec<Vec<u32>> =
        prompts.iter().take(3).map(|p| subject.capture().unwrap().prompt(&p.id).unwrap().ids).collect();
    // A token that only the second prompt has.
    let others = [&ids[0], &ids[2]];
    let token = ids[1].iter().copied().find(|id| others.iter().all(|other| !other.contains(id))).unwrap();
    struct Broken(Arc<dyn crate::model::Weights>, usize);
    impl crate::model::Weights for Broken {
        fn bf16(&self, name: &str) -> Result<std::borrow::Cow<'_, [half::bf16]>> {
            let mut content = self.0.bf16(name)?;
            if name == "model.embed_tokens.weight" {
                content.to_mut()[self.1] = half::bf16::NAN;
            }
            Ok(content)
        }
    }
    let config = subject.config.clone();
    let broken = Arc::new(Broken(subject.checkpoint.clone(), token as usize * config.hidden_size));
    let options = RunnerOptions::for_prompts(ids.iter().map(Vec::len), 4, config.max_position_embeddings);
    let device = open_device("emu").unwrap();
    let mut runner = NpuRunner::new(config, broken, device, (pool().unwrap(), isa().unwrap()), &options).unwrap();
    // No teacher names the token, and the head is no copy of the table.
    assert!(!subject.config.tie_word_embeddings);
    let (teacher, taps) = ([1, 2, 3], TapRequest::default());
    let wanted: Vec<Forced<'_>> = ids.iter().map(|ids| Forced { ids, teacher: &teacher, taps: &taps }).collect();
    assert!(!teacher.contains(&token));
    let together = runner.record_together(&wanted, 4).unwrap();
    let nan = |record: &Record| record.logits.iter().any(|x| x.is_nan());
    assert_eq!(together.iter().map(nan).collect::<Vec<_>>(), [false, true, false]);
    for at in [0, 2] {
        let alone = runner.record(&ids[at], &teacher, 4, &taps).unwrap();
        assert!(alone.logits == together[at].logits, "{at}");
    }
}

#[test]
fn a_prompt_that_is_longer_than_the_model_goes_is_named() {
    let mut subject = Subject::open("tiny_llama", None).unwrap();
    let length = subject.capture().unwrap().prompt("long_00").unwrap().ids.len();
    let bench = |subject: Subject| {
        Bench::new(Arc::new(subject), "emu", &["long_00".to_owned()], PlanOptions::default()).map(|_| ())
    };
    subject.config.max_position_embeddings = 128;
    let error = bench(subject).unwrap_err().to_string();
    let said = ["config.json: max_position_embeddings: found 128", "prompt long_00", &format!("{length} tokens")];
    assert!(said.iter().all(|said| error.contains(said)), "{error}");
    let mut subject = Subject::open("tiny_llama", None).unwrap();
    subject.config.max_position_embeddings = length + STEPS - 1;
    bench(subject).unwrap();
}
