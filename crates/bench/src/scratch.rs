//! Files of a measurement in the temporary directory, which vanish with it.
//!
//! They vanish however the benchmark ends ([`crate::undo`]): inputs of programs take hundreds of
//! MiB, and some temporary directories are memory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Error;
use crate::undo::{Undo, quote};

/// A directory for the files of one measurement. Dropping it removes them.
#[derive(Debug)]
pub(crate) struct Scratch {
    dir: PathBuf,
    /// Removes the directory when it is dropped, or when this process dies.
    _removal: Undo,
}

impl Scratch {
    /// Creates the directory for the measurement `name`.
    pub(crate) fn new(name: &str) -> Result<Self, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("foliomem-{name}-{}-{number}", std::process::id()));
        let mut removal = Undo::new()?;
        removal.push(&format!("rm -rf -- {}", quote(&dir.to_string_lossy())))?;
        std::fs::create_dir_all(&dir).map_err(Error::at(&dir))?;
        Ok(Self { dir, _removal: removal })
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }
}

/// A file in a directory of its own. Dropping it removes both.
#[derive(Debug)]
pub(crate) struct ScratchFile {
    path: PathBuf,
    _directory: Scratch,
}

impl ScratchFile {
    /// Lets `write` create the file for the measurement `name`.
    pub(crate) fn new(name: &str, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<Self, Error> {
        let directory = Scratch::new(name)?;
        let path = directory.path().join("file");
        write(&path).map_err(Error::at(&path))?;
        Ok(Self { path, _directory: directory })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_dropped_directory_is_gone_with_its_files() {
        let scratch = Scratch::new("scratch-dropped").unwrap();
        let dir = scratch.path().to_owned();
        std::fs::create_dir(dir.join("inner")).unwrap();
        std::fs::write(dir.join("inner/file"), "content").unwrap();
        drop(scratch);
        assert!(!dir.exists());
    }

    /// The test starts itself as the process that is killed.
    #[test]
    fn the_directory_of_a_killed_process_is_removed() {
        const CHILD: &str = "FOLIOMEM_TEST_SCRATCH";
        if std::env::var_os(CHILD).is_some() {
            let scratch = Scratch::new("scratch-killed").unwrap();
            std::fs::write(scratch.path().join("file"), "content").unwrap();
            println!("\nscratch {}", scratch.path().display());
            std::thread::sleep(Duration::from_secs(60));
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "scratch::tests::the_directory_of_a_killed_process_is_removed", "--nocapture"]);
        let mut child = command.env(CHILD, "1").stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let dir =
            lines.map_while(Result::ok).find_map(|line| line.strip_prefix("scratch ").map(PathBuf::from)).unwrap();
        assert!(dir.join("file").exists());
        child.kill().unwrap();
        child.wait().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while dir.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!dir.exists());
    }
}
