//! What the virtual NPU shall do wrong: `PHASEGATE_VNPU`, a comma-separated list of words.
//!
//! `hang`, `error`, `timeout` (a part of the output is written), `eio`, `stale` (only the first call of a dispatch
//! computes) begin with execution number `after=N` (default 0). `no_context`, `no_memory`, `memlock`, `alias` concern
//! contexts and buffers. `npu1` makes it a device of the first generation, `slow=MS` delays each execution, `log` tells
//! what happens on stderr.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A fault by its word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Hang,
    Error,
    Timeout,
    Eio,
    Stale,
    NoContext,
    NoMemory,
    Memlock,
    Alias,
}

#[derive(Debug, Default)]
struct Orders {
    faults: Vec<Fault>,
    after: u64,
    slow: Duration,
    npu1: bool,
    log: bool,
}

fn orders() -> &'static Orders {
    static ORDERS: OnceLock<Orders> = OnceLock::new();
    ORDERS.get_or_init(|| {
        let mut orders = Orders::default();
        for word in phasegate::settings::vnpu() {
            orders.read(&word);
        }
        orders
    })
}

impl Orders {
    fn read(&mut self, word: &str) {
        let fault = match word.split_once('=').unwrap_or((word, "")) {
            ("hang", "") => Fault::Hang,
            ("error", "") => Fault::Error,
            ("timeout", "") => Fault::Timeout,
            ("eio", "") => Fault::Eio,
            ("stale", "") => Fault::Stale,
            ("no_context", "") => Fault::NoContext,
            ("no_memory", "") => Fault::NoMemory,
            ("memlock", "") => Fault::Memlock,
            ("alias", "") => Fault::Alias,
            ("npu1", "") => return self.npu1 = true,
            ("log", "") => return self.log = true,
            ("after", n) if n.parse::<u64>().is_ok() => return self.after = n.parse().unwrap_or(0),
            ("slow", ms) if ms.parse::<u64>().is_ok() => {
                return self.slow = Duration::from_millis(ms.parse().unwrap_or(0));
            }
            // A test with a misspelt fault must not pass for one without.
            _ => {
                eprintln!("vnpu: PHASEGATE_VNPU: unknown word {word:?}");
                std::process::abort();
            }
        };
        self.faults.push(fault);
    }
}

/// Whether a fault of contexts or buffers is in force.
pub fn has(fault: Fault) -> bool {
    orders().faults.contains(&fault)
}

/// Numbers an execution.
pub fn next_execution() -> u64 {
    static EXECUTIONS: AtomicU64 = AtomicU64::new(0);
    EXECUTIONS.fetch_add(1, Ordering::Relaxed)
}

/// The fault that meets execution number `n`, if any.
pub fn of_execution(n: u64) -> Option<Fault> {
    let orders = orders();
    let executions = [Fault::Hang, Fault::Error, Fault::Timeout, Fault::Eio, Fault::Stale];
    orders.faults.iter().copied().find(|fault| n >= orders.after && executions.contains(fault))
}

/// How long each execution takes at least.
pub fn delay() -> Duration {
    orders().slow
}

/// Whether to be a device of the first generation.
pub fn first_generation() -> bool {
    orders().npu1
}

/// Tells what happens, where that is asked for.
pub fn log(text: impl FnOnce() -> String) {
    if orders().log {
        eprintln!("vnpu: {}", text());
    }
}
