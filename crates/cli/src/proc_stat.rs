//! What `/proc/PID/stat` says about a process.

use crate::proc_file;
use std::str::FromStr;

/// The text of the file.
#[derive(Debug)]
pub struct ProcStat(String);

impl ProcStat {
    /// Reads the file of process `pid`; returns `None` if the process has ended.
    pub fn of(pid: u32) -> Option<ProcStat> {
        proc_file::read_text(format!("/proc/{pid}/stat")).ok().map(ProcStat)
    }

    /// Returns the name of the process.
    pub fn name(&self) -> Option<&str> {
        let (head, _) = self.around_name()?;
        head.split_once('(').map(|(_pid, name)| name)
    }

    /// Returns the pid of the parent.
    pub fn parent_pid(&self) -> Option<u32> {
        self.field(1)
    }

    /// Returns the number of page faults that read nothing from a disk.
    pub fn minor_faults(&self) -> Option<u64> {
        self.field(7)
    }

    /// Returns the field at `index`, counted from the first one after the name.
    fn field<T: FromStr>(&self, index: usize) -> Option<T> {
        self.around_name()?.1.split_ascii_whitespace().nth(index)?.parse().ok()
    }

    /// Returns the text before and after the end of the name, which may contain parentheses and
    /// spaces.
    fn around_name(&self) -> Option<(&str, &str)> {
        self.0.rsplit_once(')')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_may_have_parentheses() {
        let parsed = |text: &str| {
            let stat = ProcStat(text.to_owned());
            Some((stat.parent_pid()?, stat.name()?.to_owned()))
        };
        assert_eq!(parsed("7 (a) S 1 (b) R 42 9 9"), Some((42, "a) S 1 (b".to_owned())));
        for broken in ["", "7 (a", "7 a) S 1", "7 (a) S", "7 (a) S x"] {
            assert_eq!(parsed(broken), None, "{broken}");
        }
    }

    #[test]
    fn minor_faults_are_counted() {
        let faults = |pid| ProcStat::of(pid).and_then(|stat| stat.minor_faults());
        let before = faults(std::process::id()).unwrap();
        let filled = vec![1u8; 16 << 20];
        assert!(faults(std::process::id()).unwrap() >= before + 8, "{}", filled.len());
        assert_eq!(faults(0), None);
    }
}
