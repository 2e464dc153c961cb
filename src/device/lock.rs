//! Exclusive use of the NPU: upstream's own lock files, so that both stacks exclude each other.
//!
//! Upstream wraps a whole run in one lock (`flock -x`, by a caller of the run) and every call in another. Both are taken
//! here, in that order, for as long as a device is open. A run that was started under the outer lock has an ancestor that
//! holds it: waiting for that would be waiting for oneself, so then it counts as taken. The system lets go of both when
//! the process ends, however it ends.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Where the locks lie and how long to wait for them.
#[derive(Debug, Clone)]
pub struct LockOptions {
    /// Held for a whole run.
    pub outer: PathBuf,
    /// Held for a call by upstream, for a run by us.
    pub inner: PathBuf,
    pub wait: Duration,
}

impl Default for LockOptions {
    /// Source: mlir-air's CI wraps runs in `flock -x -w 1800 /tmp/mlir-air-npu.lock`; its KernelCache takes `/tmp/npu.lock`.
    fn default() -> Self {
        LockOptions {
            outer: "/tmp/mlir-air-npu.lock".into(),
            inner: "/tmp/npu.lock".into(),
            wait: Duration::from_secs(1800),
        }
    }
}

/// Between two attempts, and between two lines that say who is waited for.
const PAUSE: Duration = Duration::from_millis(100);
const REPORT: Duration = Duration::from_secs(15);

/// The NPU is this process's while this lives.
#[derive(Debug)]
pub struct DeviceLock {
    _files: Vec<File>,
}

impl DeviceLock {
    /// The lock of this process, taken when nothing in it holds it yet; waiting is reported on stderr.
    ///
    /// Errors: as [`DeviceLock::take`].
    pub fn shared(options: &LockOptions) -> Result<Arc<DeviceLock>> {
        static HELD: Mutex<Weak<DeviceLock>> = Mutex::new(Weak::new());
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = held.upgrade() {
            return Ok(lock);
        }
        let lock = Arc::new(DeviceLock::take(options, &mut |line| eprintln!("{line}"))?);
        *held = Arc::downgrade(&lock);
        Ok(lock)
    }

    /// Takes both locks, waiting for them in turn; `report` is told who holds one, at once and every 15 s.
    ///
    /// Errors: [`Error::Unavailable`] naming the file and its holder when the time is over; [`Error::Io`].
    pub fn take(options: &LockOptions, report: &mut dyn FnMut(&str)) -> Result<DeviceLock> {
        let deadline = Instant::now() + options.wait;
        let mut files = vec![];
        for (path, ancestors_count) in [(&options.outer, true), (&options.inner, false)] {
            let file = open(path)?;
            if wait(&file, path, ancestors_count, deadline, options.wait, report)? {
                files.push(file);
            }
        }
        Ok(DeviceLock { _files: files })
    }
}

/// Opens a lock file, made where it is not there. Another user's file can be locked without the right to write it.
fn open(path: &Path) -> Result<File> {
    match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        opened => return opened.map_err(Error::io(path)),
    }
    let made = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).open(path);
    made.map_err(Error::io(path))
}

/// Waits for one lock; false when an ancestor of this process holds it for us.
fn wait(
    file: &File,
    path: &Path,
    ancestors_count: bool,
    deadline: Instant,
    whole: Duration,
    report: &mut dyn FnMut(&str),
) -> Result<bool> {
    let mut reported: Option<Instant> = None;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(e)) => return Err(Error::io(path)(e)),
        }
        let holder = holder(file);
        if let Some(pid) = holder.filter(|pid| ancestors_count && ancestors().contains(pid)) {
            report(&format!("{} is held for this run by {}", path.display(), described(Some(pid))));
            return Ok(false);
        }
        let now = Instant::now();
        if now >= deadline {
            let why =
                format!("{} is held by {} for more than {} s", path.display(), described(holder), whole.as_secs());
            return Err(Error::Unavailable { what: "the NPU".into(), why });
        }
        if reported.is_none_or(|at| now - at >= REPORT) {
            let left = (deadline - now).as_secs();
            report(&format!("waiting for {}, held by {}; at most {left} s more", path.display(), described(holder)));
            reported = Some(now);
        }
        sleep(PAUSE.min(deadline - now));
    }
}

/// The process that holds a file's lock, as the system lists it.
fn holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let wanted = format!("{:02x}:{:02x}:{inode}", libc::major(device), libc::minor(device));
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`; `->` marks one that waits.
        let words: Vec<&str> = line.split_whitespace().collect();
        let held = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&wanted.as_str());
        words.get(4).filter(|_| held)?.parse().ok()
    })
}

/// This process and those that it was started by, nearest first.
fn ancestors() -> Vec<u32> {
    let mut chain = vec![std::process::id()];
    while let Some(parent) = chain.last().and_then(|pid| parent(*pid)).filter(|pid| *pid > 0 && !chain.contains(pid)) {
        chain.push(parent);
    }
    chain
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

fn described(pid: Option<u32>) -> String {
    let Some(pid) = pid else { return "a process that the system does not name".into() };
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> =
        command.split(|&b| b == 0).filter(|w| !w.is_empty()).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
    let mut command = words.join(" ");
    if let Some((at, _)) = command.char_indices().nth(120) {
        command.truncate(at);
        command.push_str(" ...");
    }
    if command.is_empty() { format!("pid {pid}") } else { format!("pid {pid} ({command})") }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn options(dir: &tempfile::TempDir, milliseconds: u64) -> LockOptions {
        let (outer, inner) = (dir.path().join("outer.lock"), dir.path().join("inner.lock"));
        LockOptions { outer, inner, wait: Duration::from_millis(milliseconds) }
    }

    /// Another process that holds a lock until it is killed.
    fn hold(path: &Path) -> Child {
        let mut child = Command::new("flock")
            .arg("-x")
            .arg(path)
            .args(["sh", "-c", "echo held; exec sleep 60"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("flock of util-linux");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        child
    }

    /// `flock` and what it runs.
    fn end(mut child: Child) {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        for pid in children.split_whitespace() {
            Command::new("kill").args(["-9", pid]).status().unwrap();
        }
        child.wait().unwrap();
    }

    #[test]
    fn both_are_taken_and_released() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(&dir, 0);
        let lock = DeviceLock::take(&options, &mut |_| panic!("nobody to wait for")).unwrap();
        for path in [&options.outer, &options.inner] {
            assert!(matches!(open(path).unwrap().try_lock(), Err(TryLockError::WouldBlock)));
        }
        drop(lock);
        for path in [&options.outer, &options.inner] {
            assert!(open(path).unwrap().try_lock().is_ok());
        }
    }

    #[rstest::rstest]
    fn whoever_holds_one_is_named(#[values(true, false)] outer: bool) {
        let dir = tempfile::tempdir().unwrap();
        let options = options(&dir, 300);
        let path = if outer { &options.outer } else { &options.inner };
        let child = hold(path);
        let mut lines = vec![];
        let began = Instant::now();
        let error = DeviceLock::take(&options, &mut |line| lines.push(line.to_owned())).unwrap_err();
        assert!(began.elapsed() >= options.wait);
        let named = format!("{} is held by pid {} (flock -x", path.display(), child.id());
        assert!(error.to_string().contains(&named), "{error}");
        assert!(lines[0].contains(&format!("held by pid {} (flock -x", child.id())), "{lines:?}");
        // What was already taken is let go of again.
        assert!(!outer || open(&options.inner).unwrap().try_lock().is_ok());
        end(child);
        assert!(DeviceLock::take(&options, &mut |_| {}).is_ok());
    }

    #[test]
    fn a_holder_that_dies_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(&dir, 20_000);
        let child = hold(&options.outer);
        let mut child = Some(child);
        let lock = DeviceLock::take(&options, &mut |_| {
            if let Some(child) = child.take() {
                end(child);
            }
        });
        assert!(lock.is_ok() && child.is_none());
    }

    /// An ancestor under whose lock this process runs is not waited for. The child is this test again.
    #[test]
    fn a_run_under_the_outer_lock_does_not_wait_for_itself() {
        let name = "device::lock::tests::a_run_under_the_outer_lock_does_not_wait_for_itself";
        if Path::new("outer.lock").exists() {
            let options = LockOptions { outer: "outer.lock".into(), inner: "inner.lock".into(), wait: Duration::ZERO };
            let mut lines = vec![];
            DeviceLock::take(&options, &mut |line| lines.push(line.to_owned())).unwrap();
            assert!(lines[0].contains("is held for this run by pid"), "{lines:?}");
            return;
        }
        let (dir, me) = (tempfile::tempdir().unwrap(), std::env::current_exe().unwrap());
        let mut child = Command::new("flock");
        child.args(["-x", "outer.lock"]).arg(me).args(["--exact", name]).current_dir(dir.path());
        let output = child.output().expect("flock of util-linux");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    }
}
