//! Ctrl-C at any moment: nothing half-written is left, and the same command goes on.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How often a command is interrupted, at moments spread over the time that it takes.
const MOMENTS: u32 = 8;
const SIGINT: i32 = 2;
/// The longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(120);

/// A project of its own, with a temporary folder in it.
struct Project(tempfile::TempDir);

impl Project {
    fn new() -> Project {
        let dir = super::project();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        Project(dir)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phasegate"));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env("PHASEGATE_ROOT", self.0.path()).env("TMPDIR", self.0.path().join("tmp"));
        command
    }

    /// Interrupts the command after `delay`. Whether it was still at work.
    fn interrupt(&self, args: &[&str], delay: Duration) -> bool {
        let mut child = self.command(args).spawn().unwrap();
        std::thread::sleep(delay);
        interrupt(&mut child)
    }

    /// Every file in its place is whole, and there is none out of place.
    fn is_clean(&self) {
        let mut folders = vec![self.0.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                assert!(!name.starts_with('.'), "left behind: {}", path.display());
                if path.is_dir() {
                    folders.push(path);
                } else if name.ends_with(".json") {
                    let text = fs::read_to_string(&path).unwrap();
                    serde_json::from_str::<serde_json::Value>(&text)
                        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                } else if name.ends_with(".safetensors") {
                    is_whole(&path);
                }
            }
        }
        assert_eq!(fs::read_dir(self.0.path().join("tmp")).unwrap().count(), 0, "left in the temporary folder");
    }
}

/// What Ctrl-C does. Whether the program was still at work.
fn interrupt(child: &mut Child) -> bool {
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).stderr(Stdio::null()).status();
    let status = child.wait().unwrap();
    assert!(sent.is_ok());
    match (status.code(), status.signal()) {
        (Some(0), None) => false,
        // Before the handler is there, the signal itself ends the process.
        (Some(130), None) | (None, Some(SIGINT)) => true,
        _ => panic!("{status}"),
    }
}

/// As long as its header says.
fn is_whole(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header_text = std::str::from_utf8(&bytes[8..8 + header]).unwrap();
    let tensors: serde_json::Value = serde_json::from_str(header_text).unwrap();
    let ends = tensors.as_object().unwrap().values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    assert_eq!(8 + header + ends.max().unwrap() as usize, bytes.len(), "{}", path.display());
}

/// Interrupts `args` again and again, then lets it end well.
fn survives(args: &[&str]) {
    let undisturbed = Project::new();
    let began = Instant::now();
    assert!(undisturbed.command(args).status().unwrap().success(), "{args:?}");
    let took = began.elapsed();

    let project = Project::new();
    let at_work = (0..MOMENTS).filter(|&moment| {
        let was = project.interrupt(args, took * moment / MOMENTS);
        project.is_clean();
        was
    });
    // What earlier runs have left done makes later ones shorter: not every moment lies within the run.
    assert!(at_work.count() >= 2, "{args:?}: took {took:?}, hardly ever interrupted");
    assert!(project.command(args).status().unwrap().success(), "{args:?} after interruptions");
    project.is_clean();
}

#[test]
fn verify_is_interrupted() {
    survives(&["verify", "tiny_llama"]);
}

#[test]
fn verify_of_an_engine_is_interrupted() {
    let engine = format!("{} serve tiny_llama", env!("CARGO_BIN_EXE_phasegate"));
    survives(&["verify", "tiny_llama", "--runner", &engine]);
    survives(&["diagnosis", "tiny_llama", "--runner", &engine]);
}

#[test]
fn a_deployment_is_interrupted() {
    survives(&["deploy", "tiny_llama", "--until", "0"]);
}

#[test]
fn what_a_deployment_has_passed_outlives_an_interruption() {
    let project = Project::new();
    let mut child = project.command(&["deploy", "tiny_llama", "--until", "1"]).spawn().unwrap();
    let state = project.0.path().join("fixtures/tiny_llama/progress/emu/deploy.json");
    let began = Instant::now();
    while !state.is_file() {
        assert!(child.try_wait().unwrap().is_none() && began.elapsed() < PATIENCE, "phase 0 left no state");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Phase 1 has begun.
    interrupt(&mut child);
    project.is_clean();
    let again = project.command(&["deploy", "tiny_llama", "--until", "0"]).stdout(Stdio::piped()).output().unwrap();
    assert!(String::from_utf8(again.stdout).unwrap().contains("(before)"));
}
