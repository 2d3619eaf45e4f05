//! Programs that a measurement starts: they run in a directory of their own, and end with it.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

/// A running program. Dropping it ends the program.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
}

impl Running {
    /// Starts `command` in `dir`, with its output in the files `stdout` and `stderr` there.
    pub(crate) fn start(mut command: Command, dir: &Path) -> Result<Self, Error> {
        let file = |name: &str| {
            let path = dir.join(name);
            File::create(&path).map_err(Error::at(&path))
        };
        command.current_dir(dir).stdin(Stdio::null()).stdout(file("stdout")?).stderr(file("stderr")?);
        let child = command.spawn().map_err(Error::doing(&format!("{command:?}")))?;
        Ok(Self { child })
    }

    /// Returns the process's id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the program has ended.
    pub(crate) fn ended(&mut self) -> Result<bool, Error> {
        Ok(self.child.try_wait().map_err(Error::doing("waiting for a program"))?.is_some())
    }

    /// Waits for the end of the program and returns whether it succeeded.
    pub(crate) fn wait(&mut self, patience: Duration) -> Result<bool, Error> {
        let clock = Instant::now();
        while clock.elapsed() < patience {
            if let Some(status) = self.child.try_wait().map_err(Error::doing("waiting for a program"))? {
                return Ok(status.success());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(false)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // SIGTERM comes first so that foliomem can forward it; SIGKILL follows if the program does
        // not end.
        if self.ended().unwrap_or(true) {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if !self.wait(Duration::from_secs(10)).is_ok_and(|_| self.ended().unwrap_or(false)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::path::PathBuf;

    #[test]
    fn a_dropped_program_is_ended() {
        let dir = Scratch::new("running").unwrap();
        let mut command = Command::new("sleep");
        command.arg("600");
        let mut running = Running::start(command, dir.path()).unwrap();
        assert!(!running.wait(Duration::from_millis(20)).unwrap());
        let proc = PathBuf::from(format!("/proc/{}", running.child.id()));
        drop(running);
        assert!(!proc.exists());
    }
}
