//! The other end: answers the protocol's requests from a runner of this process, for `phasegate serve` and tests.

use std::io::{BufRead, Write};

use half::bf16;
use serde_json::{Map, Value, json};

use super::protocol::{Answer, Ask, COMPLETED, Hello, Numbers, Request, Step, Taps, write_rows};
use crate::error::{Error, Result};
use crate::runner::Runner;

/// A runner that can also leave rows behind.
pub trait Served: Runner {
    /// [`Runner::prefill`], and every layer's output and the final norm at `positions`.
    ///
    /// Shapes: taps `[positions, hidden_size]`.
    fn prefill_with_layers(&mut self, ids: &[u32], positions: &[usize]) -> Result<(Vec<bf16>, Taps)>;

    /// The KV cache's rows at `positions`.
    ///
    /// Shapes: taps `[positions, kv_dim]`.
    fn kv_rows(&mut self, positions: &[usize]) -> Result<Taps>;
}

/// Answers requests of `input` on `output` until `bye` or the end. `start` sets the model up when hello names it.
///
/// Errors: [`Error::Io`] when the other side is gone; a request that fails is answered and ends nothing.
pub fn serve<R: Served>(
    input: impl BufRead,
    mut output: impl Write,
    start: impl Fn(&Ask) -> Result<(R, Hello)>,
) -> Result<()> {
    let mut runner: Option<R> = None;
    for line in input.lines() {
        let line = line.map_err(Error::io("stdin"))?;
        if line.trim().is_empty() {
            continue;
        }
        let (id, answer, last) = match serde_json::from_str::<Request>(&line) {
            Ok(request) => (request.id, answer(&mut runner, &request.ask, &start), request.ask == Ask::Bye),
            Err(e) => (0, Err(Error::malformed("stdin", format!("no request: {e}"))), false),
        };
        let answer = match answer {
            Ok(fields) => Answer { id, ok: true, error: None, fields },
            Err(error) => Answer { id, ok: false, error: Some(error.to_string()), fields: Map::new() },
        };
        let text = serde_json::to_string(&answer).map_err(|e| Error::malformed("stdout", e.to_string()))?;
        writeln!(output, "{text}").and_then(|()| output.flush()).map_err(Error::io("stdout"))?;
        if last {
            break;
        }
    }
    Ok(())
}

fn answer<R: Served>(
    runner: &mut Option<R>,
    ask: &Ask,
    start: &impl Fn(&Ask) -> Result<(R, Hello)>,
) -> Result<Map<String, Value>> {
    if let Ask::Hello { .. } = ask {
        let (started, hello) = start(ask)?;
        *runner = Some(started);
        return fields(&hello);
    }
    if *ask == Ask::Bye {
        return Ok(Map::new());
    }
    let runner = runner.as_mut().ok_or_else(|| Error::Usage {
        what: "request".into(),
        found: ask.op().into(),
        expected: "hello first".into(),
    })?;
    match ask {
        Ask::Prefill { ids, layers: None } => step(&runner.prefill(ids)?),
        Ask::Prefill { ids, layers: Some(rows) } => {
            let (logits, taps) = runner.prefill_with_layers(ids, &rows.positions)?;
            write_rows(&rows.file, &taps)?;
            step(&logits)
        }
        Ask::DecodeStep { token, position } => step(&runner.decode_step(*token, *position)?),
        Ask::Kv(rows) => {
            write_rows(&rows.file, &runner.kv_rows(&rows.positions)?)?;
            Ok(Map::new())
        }
        Ask::Status => fields(&json!({ "state": COMPLETED })),
        Ask::Hello { .. } | Ask::Bye => Ok(Map::new()),
    }
}

fn step(logits: &[bf16]) -> Result<Map<String, Value>> {
    fields(&Step { logits: Numbers::of(logits) })
}

fn fields(value: &impl serde::Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => Ok(map),
        _ => Err(Error::malformed("stdout", "an answer is an object")),
    }
}
