//! Prefill and decode of a whole model through `NpuRunner`, beside the limits of the machine measured in the same run.
//!
//! `cargo bench --bench model` prints a table: medians of five rounds, all measurements of a round taken in turn, so that
//! what else the machine does falls on all of them alike. `cargo bench --bench model -- --serve` answers one request a
//! line on stdin (`prefill 512`, `decode 128 16`, `products`, `stream`, `weights`, `cache 128`) with its figure and the CPU time it took: that is how
//! `fixtures/hf/bench.py` interleaves it with Hugging Face. `MODEL=name` chooses the fixture.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use half::bf16;
use phasegate::{
    check::Summary,
    compute::{Call, Ceiling, Isa, PackedWeight, Pool},
    device::Layout,
    error::Result,
    kernel::{Kernel, Rows},
    phase::{Subject, devices},
    plan::{Op, PlanOptions, Stage, Step, Tuning},
    runner::{Hook, NpuRunner, Runner, RunnerOptions, StepContext},
};

const PREFILLS: [usize; 3] = [128, 512, 2048];
/// Padded lengths to prepare: those, and what the caches of [`DECODES`] are filled by.
const BUCKETS: [usize; 5] = [16, 128, 512, 1024, 2048];
/// Positions in the cache before the timed steps; one for the first, since an empty cache has no decode step.
const DECODES: [usize; 3] = [1, 128, 1024];
const STEPS: usize = 16;
const ROUNDS: usize = 5;
/// Many times what caches hold.
const STREAM_BYTES: usize = 256 << 20;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let model = args.iter().find(|a| !a.starts_with("--")).map_or("smollm2_135m", String::as_str);
    let subject = Subject::open(model, None)?;
    let longest = subject.config.max_position_embeddings;
    let options = RunnerOptions {
        buckets: BUCKETS.into_iter().filter(|&n| n <= longest).collect(),
        max_positions: longest.min(PREFILLS[2] + STEPS),
        plan: PlanOptions::default(),
        prefill: Tuning::default(),
        decode: Tuning::default(),
        poison: true,
    };
    let mut machine =
        Machine { runner: subject.runner("emu", &options)?, pool: devices::pool()?, isa: devices::isa()? };
    if args.iter().any(|a| a == "--serve") { machine.serve() } else { machine.table(&subject) }
}

struct Machine {
    runner: NpuRunner,
    pool: Arc<Pool>,
    isa: Isa,
}

/// Ids spread over the vocabulary, the same for every peer.
fn ids(len: usize, vocab: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + 13) % vocab) as u32).collect()
}

impl Machine {
    /// Units: seconds.
    fn prefill(&mut self, len: usize) -> Result<f64> {
        let ids = ids(len, self.runner.config().vocab_size);
        let started = Instant::now();
        self.runner.prefill(&ids)?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// One decode step behind `cached` positions, the mean of `steps`.
    ///
    /// Units: seconds.
    fn decode(&mut self, cached: usize, steps: usize) -> Result<f64> {
        let ids = ids(cached + steps, self.runner.config().vocab_size);
        self.runner.prefill(&ids[..cached])?;
        let started = Instant::now();
        for (position, &id) in ids.iter().enumerate().skip(cached) {
            self.runner.decode_step(id, position)?;
        }
        Ok(started.elapsed().as_secs_f64() / steps as f64)
    }

    fn serve(&mut self) -> Result<()> {
        let pool = self.pool.clone();
        let ceiling = Ceiling::new(&pool, self.isa, STREAM_BYTES);
        println!("ready {} threads, {}", pool.threads(), self.isa);
        for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).unwrap_or(1);
            let before = cpu_seconds();
            let answer = match words.first().copied() {
                Some("prefill") => self.prefill(number(1))?,
                Some("decode") => self.decode(number(1), number(2))?,
                Some("products") => ceiling.products(),
                // One pass takes milliseconds: whatever else the machine does in them would pass for a limit.
                Some("stream") => (0..3).map(|_| ceiling.stream()).fold(0.0, f64::max),
                Some("weights") => weights(&self.runner),
                Some("cache") => cache(&self.runner, number(1)),
                _ => break,
            };
            println!("{answer} {}", cpu_seconds() - before);
            std::io::stdout().flush().expect("stdout");
        }
        Ok(())
    }

    fn table(&mut self, subject: &Subject) -> Result<()> {
        let pool = self.pool.clone();
        let ceiling = Ceiling::new(&pool, self.isa, STREAM_BYTES);
        let stream = GemvStream::new(&self.runner, &pool);
        let config = self.runner.config().clone();
        let prefills: Vec<usize> = PREFILLS.into_iter().filter(|&n| n <= config.max_position_embeddings).collect();
        let decodes: Vec<usize> =
            DECODES.into_iter().filter(|&n| n + STEPS <= config.max_position_embeddings).collect();
        let mut rates: BTreeMap<(&str, usize), Vec<f64>> = BTreeMap::new();
        // The first round warms up.
        for round in 0..=ROUNDS {
            let mut seen = vec![(("products", 0), ceiling.products())];
            for &len in &prefills {
                seen.push((("prefill", len), len as f64 / self.prefill(len)?));
            }
            for &cached in &decodes {
                // Beside each, since other guests of the host share its memory.
                seen.push((("decode", cached), 1.0 / self.decode(cached, STEPS)?));
                seen.push((("stream", 0), ceiling.stream()));
                seen.push((("gemv", 0), stream.rate(&pool, self.isa)));
            }
            for (what, rate) in seen.into_iter().filter(|_| round > 0) {
                rates.entry(what).or_default().push(rate);
            }
        }
        let mut median = |what| Summary::of(&rates.remove(&what).unwrap_or_default()).median;
        let (products, stream, gemv) = (median(("products", 0)), median(("stream", 0)), median(("gemv", 0)));
        println!("{} on {} threads, {}", subject.name, pool.threads(), self.isa);
        println!(
            "ceilings: {:.0} GFLOP/s of pair products, {:.1} GB/s of stream, {:.1} GB/s of the decode's GEMVs alone",
            products / 1e9,
            stream / 1e9,
            gemv / 1e9
        );
        for len in prefills {
            let (rate, flops) = (median(("prefill", len)), work(&self.runner, len));
            let share = 100.0 * flops * rate / len as f64 / products;
            println!("prefill {len:5}: {rate:8.1} tok/s, {share:4.1} % of the pair products' ceiling");
        }
        for cached in decodes {
            let (rate, weights) = (median(("decode", cached)), weights(&self.runner));
            let share = |bytes: f64, ceiling: f64| 100.0 * bytes * rate / ceiling;
            println!(
                "decode at {cached:4}: {rate:8.1} tok/s, {:4.1} % of the stream ({:4.1} % with the cache it reads), {:4.1} % of its \
                 GEMVs alone",
                share(weights, stream),
                share(weights + cache(&self.runner, cached), stream),
                share(weights, gemv)
            );
        }
        for len in [512, 2048].into_iter().filter(|&n| n <= config.max_position_embeddings) {
            self.profile(&format!("prefill {len}"), len, |m| m.prefill(len).map(drop))?;
        }
        let cached = 1024.min(config.max_position_embeddings / 2);
        self.profile(&format!("decode at {cached} (with its prefill)"), cached, |m| m.decode(cached, STEPS).map(drop))
    }

    /// Prints where the time of one run with a prompt of `len` goes, by kernel and host op.
    fn profile(&mut self, title: &str, len: usize, run: impl FnOnce(&mut Machine) -> Result<()>) -> Result<()> {
        let names = self.runner.prefill_plan(len)?.steps.iter().map(|step| step.name.clone());
        let rows = names.zip(self.runner.rows_computed(len)?).collect();
        let clock = Clock { since: (Instant::now(), cpu_seconds()), rows, spent: BTreeMap::new() };
        let clock = Arc::new(Mutex::new(clock));
        self.runner.add_hook(clock.clone());
        let started = (Instant::now(), cpu_seconds());
        run(self)?;
        let (total, cpu) = (started.0.elapsed().as_secs_f64(), cpu_seconds() - started.1);
        self.runner.clear_hooks();
        println!("\n{title}: {:.2} ms, of all threads' CPU time {:.2} ms", total * 1e3, cpu * 1e3);
        for (name, spent) in &clock.lock().unwrap_or_else(|e| e.into_inner()).spent {
            let Spent { calls, seconds, cpu, flops } = spent;
            let rate = flops / seconds / 1e9;
            println!(
                "  {name:34} {calls:5} calls {:9.3} ms, CPU {:9.3} ms {rate:8.1} GFLOP/s",
                seconds * 1e3,
                cpu * 1e3
            );
        }
        Ok(())
    }
}

/// Weights of the shapes that one decode step reads, each once: what GEMV gives when nothing is between.
struct GemvStream {
    weights: Vec<PackedWeight>,
    x: Vec<bf16>,
    longest: usize,
}

impl GemvStream {
    fn new(runner: &NpuRunner, pool: &Pool) -> GemvStream {
        let plan = runner.decode_plan();
        let shapes: Vec<(usize, usize)> = plan
            .launches()
            .filter_map(|(_, launch)| match launch.kernel {
                Kernel::Gemv { m, k, .. } => Some((m, k)),
                _ => None,
            })
            .collect();
        let weights = shapes.iter().map(|&(n, k)| PackedWeight::pack(pool, &vec![bf16::ONE; n * k], n, k)).collect();
        let most = |of: fn(&(usize, usize)) -> usize| shapes.iter().map(of).max().unwrap_or(0);
        GemvStream { weights, x: vec![bf16::ONE; most(|s| s.1)], longest: most(|s| s.0) }
    }

    /// Units: bytes/s.
    fn rate(&self, pool: &Pool, isa: Isa) -> f64 {
        let (call, mut y) = (Call { pool, isa }, vec![bf16::ZERO; self.longest]);
        let started = Instant::now();
        for w in &self.weights {
            call.gemv(&self.x[..w.k()], w, &mut y[..w.n()]);
        }
        let bytes: usize = self.weights.iter().map(PackedWeight::bytes).sum();
        bytes as f64 / started.elapsed().as_secs_f64()
    }
}

/// Multiply-adds of a prefill, twice: of the rows that the device computes.
fn work(runner: &NpuRunner, len: usize) -> f64 {
    let (plan, rows) = (runner.prefill_plan(len).expect("prepared"), runner.rows_computed(len).expect("prepared"));
    let of_step = |(step, rows): (&Step, &Option<Rows>)| flops(step, *rows);
    plan.steps.iter().zip(&rows).map(of_step).sum()
}

fn flops(step: &Step, rows: Option<Rows>) -> f64 {
    step.launches().iter().map(|launch| launch.kernel.work(rows).flops).sum()
}

/// Bytes of the cache that one decode step reads.
fn cache(runner: &NpuRunner, cached: usize) -> f64 {
    let config = runner.config();
    (2 * 2 * config.num_hidden_layers * config.kv_dim() * cached) as f64
}

/// Bytes of the weights one decode step reads.
fn weights(runner: &NpuRunner) -> f64 {
    let plan = runner.plans().next().expect("the decode plan comes first");
    plan.buffers.iter().filter(|b| b.spec.layout == Layout::LinearWeight).map(|b| b.spec.bytes() as f64).sum()
}

/// CPU time of all threads of this process: what a busy machine does not falsify much.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[derive(Default)]
struct Spent {
    calls: usize,
    seconds: f64,
    cpu: f64,
    flops: f64,
}

/// Time by kernel and host op.
struct Clock {
    since: (Instant, f64),
    /// Of each step of the prefill, the rows that are computed.
    rows: BTreeMap<String, Option<Rows>>,
    spent: BTreeMap<String, Spent>,
}

impl Hook for Clock {
    fn before_step(&mut self, _: &mut StepContext<'_>) -> Result<()> {
        self.since = (Instant::now(), cpu_seconds());
        Ok(())
    }

    fn after_step(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        let (seconds, cpu) = (self.since.0.elapsed().as_secs_f64(), cpu_seconds() - self.since.1);
        let (name, flops) = match &cx.step.op {
            Op::Dispatch(launches) => {
                let names: Vec<String> = launches.iter().map(|l| l.kernel.to_string()).collect();
                let prefill = matches!(cx.plan.stage, Stage::Prefill { .. });
                let rows = self.rows.get(&cx.step.name).filter(|_| prefill).copied().flatten();
                (names.join(" + "), flops(cx.step, rows))
            }
            Op::Host(op) => (format!("host {}", format!("{op:?}").split(' ').next().unwrap_or_default()), 0.0),
        };
        let spent = self.spent.entry(name).or_default();
        spent.calls += 1;
        spent.seconds += seconds;
        spent.cpu += cpu;
        spent.flops += flops;
        Ok(())
    }

    fn reads_rows(&self) -> bool {
        false
    }
}
