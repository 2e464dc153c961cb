//! An engine's process: one request out, one answer in, within a time. What comes back that is no answer is named.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::protocol::{Answer, Ask, Request};
use crate::error::{Error, Result};

/// Units: bytes. A line beyond this is no answer: the logits of the largest vocabularies take a hundredth of it.
const LONGEST_LINE: u64 = 256 << 20;
/// Lines of the engine's stderr kept for messages.
const STDERR_KEPT: usize = 12;
/// How long an engine may take to end after `bye`.
const FAREWELL: Duration = Duration::from_secs(5);

/// A line of the engine's, or why there is none.
enum Line {
    Text(String),
    NoText(String),
}

/// A running engine.
pub(super) struct Engine {
    /// The command, for messages.
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Line>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    asked: u64,
    timeout: Duration,
    /// Once an answer is missing or wrong, none of the later ones can be trusted.
    broken: bool,
}

impl Engine {
    /// Starts `command` in `dir`.
    ///
    /// Errors: [`Error::Unavailable`] when there is no such program.
    pub(super) fn start(command: &[String], dir: &Path, timeout: Duration) -> Result<Engine> {
        let name = command.join(" ");
        let absent = |why: String| Error::Unavailable { what: format!("external runner {name:?}"), why };
        let (program, args) = command.split_first().ok_or_else(|| absent("the command is empty".into()))?;
        let mut child = Command::new(program)
            .args(args)
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| absent(e.to_string()))?;
        let (send, lines) = sync_channel(4);
        let stdout = child.stdout.take().expect("stdout is piped");
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            while let Some(line) = next_line(&mut stdout) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let stderr: Arc<Mutex<VecDeque<String>>> = Arc::default();
        let (kept, pipe) = (stderr.clone(), child.stderr.take().expect("stderr is piped"));
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).split(b'\n').map_while(std::io::Result::ok) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.push_back(String::from_utf8_lossy(&line).trim_end().to_owned());
                if kept.len() > STDERR_KEPT {
                    kept.pop_front();
                }
            }
        });
        let stdin = child.stdin.take();
        Ok(Engine { name, child, stdin, lines, stderr, asked: 0, timeout, broken: false })
    }

    /// Asks and waits for the answer's own fields.
    ///
    /// Errors: [`Error::Incomplete`] for a time-out, a crash and a refusal; [`Error::Engine`] for garbage.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, ask: Ask) -> Result<T> {
        let op = ask.op();
        let answer = self.exchange(ask);
        self.broken |= answer.is_err();
        let fields = serde_json::Value::Object(answer?.fields);
        serde_json::from_value(fields).map_err(|e| {
            self.broken = true;
            self.garbage(op, &format!("the answer lacks what it must hold: {e}"))
        })
    }

    fn exchange(&mut self, ask: Ask) -> Result<Answer> {
        let op = ask.op();
        let began = Instant::now();
        if self.broken {
            return Err(self.incomplete(op, "not asked: an earlier request went wrong".into(), began));
        }
        self.asked += 1;
        let mut line = serde_json::to_string(&Request { id: self.asked, ask })
            .map_err(|e| self.garbage(op, &format!("cannot be asked: {e}")))?;
        line.push('\n');
        let sent = self.stdin.as_mut().map(|stdin| stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()));
        if !matches!(sent, Some(Ok(()))) {
            return Err(self.crash(op, began));
        }
        let text = match self.lines.recv_timeout(self.timeout) {
            Ok(Line::Text(text)) => text,
            Ok(Line::NoText(why)) => return Err(self.garbage(op, &why)),
            Err(RecvTimeoutError::Timeout) => {
                let state = format!("time-out: no answer within {} s", self.timeout.as_secs_f64());
                return Err(self.incomplete(op, state, began));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(self.crash(op, began)),
        };
        let answer: Answer = serde_json::from_str(&text)
            .map_err(|e| self.garbage(op, &format!("{:?} is no answer: {e}", beginning(&text))))?;
        if answer.id != self.asked {
            return Err(self.garbage(op, &format!("answer to request {}, expected {}", answer.id, self.asked)));
        }
        if !answer.ok {
            let why = answer.error.unwrap_or_else(|| "no reason given".into());
            return Err(self.incomplete(op, format!("refused by the engine: {why}"), began));
        }
        Ok(answer)
    }

    /// The process is gone: with what exit status, and what it last wrote to stderr.
    fn crash(&mut self, op: &str, began: Instant) -> Error {
        // It closed its pipes; its exit status is there in a moment, or it hangs on.
        let mut ended = None;
        for _ in 0..50 {
            ended = self.child.try_wait().ok().flatten();
            if ended.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let ended = ended.map_or("it closed its stdout and runs on".into(), |status| status.to_string());
        let said = self.said();
        self.incomplete(op, format!("crash: {ended}{said}"), began)
    }

    /// The last words on stderr.
    fn said(&self) -> String {
        let kept = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let last: Vec<&str> = kept.iter().rev().filter(|l| !l.is_empty()).take(2).map(String::as_str).collect();
        if last.is_empty() {
            String::new()
        } else {
            format!("; stderr: {}", last.into_iter().rev().collect::<Vec<_>>().join(" / "))
        }
    }

    fn incomplete(&self, op: &str, state: String, began: Instant) -> Error {
        let elapsed_us = began.elapsed().as_micros() as u64;
        Error::Incomplete { device: format!("external runner {:?}", self.name), dispatch: op.into(), state, elapsed_us }
    }

    /// The engine broke the protocol, or answered what cannot be.
    pub(super) fn garbage(&self, op: &str, why: &str) -> Error {
        Error::Engine { engine: self.name.clone(), op: op.into(), why: format!("{why}{}", self.said()) }
    }
}

impl Drop for Engine {
    /// Says bye, waits a little, then ends the process.
    fn drop(&mut self) {
        if !self.broken {
            let _ = self.exchange(Ask::Bye);
        }
        self.stdin = None;
        let began = Instant::now();
        while !self.broken && began.elapsed() < FAREWELL {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line that holds anything; none at the end.
fn next_line(stdout: &mut impl BufRead) -> Option<Line> {
    loop {
        let mut bytes = vec![];
        match stdout.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => return None,
            Ok(_) if bytes.last() != Some(&b'\n') && bytes.len() as u64 == LONGEST_LINE => {
                return Some(Line::NoText(format!("a line of more than {LONGEST_LINE} bytes")));
            }
            Ok(_) => {}
        }
        match String::from_utf8(bytes) {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => return Some(Line::Text(text)),
            Err(_) => return Some(Line::NoText("a line that is no UTF-8".into())),
        }
    }
}

fn beginning(text: &str) -> String {
    text.trim_end().chars().take(60).collect()
}
