//! Files and folders that are renamed to what they are to be once they are whole, so that a reader sees all or nothing.
//! A process that is interrupted removes what it has begun. May not know what is in them.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::error::{Error, Result};

/// What this process has begun and not ended.
static BEGUN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn begun() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    BEGUN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One thing begun. Nothing comes into being or gets its name while [`sweep`] is at work.
struct Entry(PathBuf);

impl Entry {
    fn of<T>(make: impl FnOnce() -> std::io::Result<T>, path: impl FnOnce(&T) -> &Path) -> std::io::Result<(Entry, T)> {
        let mut begun = begun();
        let made = make()?;
        let path = path(&made).to_owned();
        begun.insert(path.clone());
        Ok((Entry(path), made))
    }

    fn end<T>(&self, rename: impl FnOnce() -> T) -> T {
        let _others_wait = begun();
        rename()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        begun().remove(&self.0);
    }
}

/// Writes beside `path` and renames.
///
/// Errors: [`Error::Io`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_together(&[(path, bytes)])
}

/// [`write_atomically`] of files that belong together: none is renamed before all are written.
///
/// Errors: [`Error::Io`].
pub fn write_together(files: &[(&Path, &[u8])]) -> Result<()> {
    let mut written = vec![];
    for &(path, bytes) in files {
        let dir = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let (entry, mut file) = Entry::of(|| temporary(dir), |file| file.path()).map_err(Error::io(dir))?;
        file.write_all(bytes).map_err(Error::io(path))?;
        // An error removes the files before their entries.
        written.push((file, entry, path));
    }
    for (file, entry, path) in written {
        entry.end(|| file.persist(path)).map_err(|e| Error::io(path)(e.error))?;
    }
    Ok(())
}

/// Keeps what could be made again. Where that cannot be written, the next process makes it again, and the first time
/// this one says so.
pub fn keep(path: &Path, bytes: &[u8]) {
    if let Err(error) = write_atomically(path, bytes) {
        not_kept(&error);
    }
}

/// Says on stderr, once in a process, that what could be kept is not.
pub fn not_kept(error: &Error) {
    static SAID: Once = Once::new();
    SAID.call_once(|| eprintln!("warning: {error}: nothing is cached, so the next run takes as long as this one"));
}

/// A file as others make them: who may read it is what the umask says.
fn temporary(dir: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(dir)
}

/// A folder that is gone when this is dropped, unless it was renamed.
pub struct Folder {
    // Dropped in this order: the folder is gone before it is forgotten.
    folder: tempfile::TempDir,
    entry: Entry,
}

impl Folder {
    /// An empty folder in `dir`.
    ///
    /// Errors: [`Error::Io`].
    pub fn new_in(dir: &Path, prefix: &str) -> Result<Folder> {
        let make = || tempfile::Builder::new().prefix(prefix).tempdir_in(dir);
        let (entry, folder) = Entry::of(make, |folder| folder.path()).map_err(Error::io(dir))?;
        Ok(Folder { folder, entry })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Gives the folder its name.
    ///
    /// Errors: those of renaming; the folder is gone then.
    pub fn rename(self, to: &Path) -> std::io::Result<()> {
        let Folder { entry, folder } = self;
        entry.end(|| std::fs::rename(folder.path(), to))?;
        // It has another name now: nothing is left to clean up.
        let _ = folder.keep();
        Ok(())
    }
}

/// Removes whatever this process has begun and not ended. The process must end now: who begins or ends another waits
/// for ever.
pub fn sweep() {
    let begun = begun();
    remove(&begun);
    std::mem::forget(begun);
}

fn remove(begun: &BTreeSet<PathBuf>) {
    for path in begun {
        // What is gone already needs no removing; what cannot be removed is named by no one.
        if std::fs::remove_file(path).is_err() {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_begun_is_known_and_what_is_ended_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let mine = || begun().iter().filter(|path| path.starts_with(dir.path())).cloned().collect::<BTreeSet<_>>();
        let folder = Folder::new_in(dir.path(), ".begun-").unwrap();
        std::fs::write(folder.path().join("half"), "half").unwrap();
        let (_entry, file) = Entry::of(|| temporary(dir.path()), |file| file.path()).unwrap();
        assert_eq!(mine(), BTreeSet::from([folder.path().to_owned(), file.path().to_owned()]));
        remove(&mine());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        let folder = Folder::new_in(dir.path(), ".begun-").unwrap();
        folder.rename(&dir.path().join("whole")).unwrap();
        write_atomically(&dir.path().join("file"), b"whole").unwrap();
        remove(&mine());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
