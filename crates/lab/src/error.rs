//! Errors of the lab.

use foliomem_trace::TraceError;
use std::path::PathBuf;
use thiserror::Error;

/// The error type of the lab.
#[derive(Debug, Error)]
pub enum LabError {
    /// The scenario file cannot be read.
    #[error("cannot read the scenario {0}: {1}. Name a file, or one of `foliomem lab list`")]
    Unreadable(PathBuf, std::io::Error),
    /// A file of costs cannot be read.
    #[error("cannot read the costs {0}: {1}. `foliomem lab calibrate -o FILE` writes such a file")]
    UnreadableCosts(PathBuf, std::io::Error),
    /// A file is no valid scenario or cost file.
    #[error("{name}:{line}: {why}")]
    File {
        /// The name of the file.
        name: String,
        /// The line, from 1.
        line: usize,
        /// The reason.
        why: String,
    },
    /// A value of --vary is invalid.
    #[error("--vary {setting}: {why}")]
    Setting {
        /// The setting as on the command line.
        setting: String,
        /// The reason.
        why: String,
    },
    /// One of several runs failed.
    #[error("{settings}: {why}")]
    Run {
        /// The settings of the run.
        settings: String,
        /// The error of the run.
        why: Box<LabError>,
    },
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The output file is the trace itself.
    #[error("{0} is the trace itself: name another file")]
    OntoItself(PathBuf),
    /// A table cannot be written.
    #[error("cannot write {0}: {1}")]
    Unwritable(PathBuf, std::io::Error),
    /// A trace has more memory than the lab can simulate.
    #[error("the trace {0} has more than 4 TiB of memory")]
    TraceTooLarge(PathBuf),
    /// The built-in published results cannot be parsed.
    #[error("the published results cannot be read: {0}")]
    Published(csv::Error),
    /// The program's memory fits neither into the limit nor into swap.
    #[error(
        "out of memory after {faults} faults: {held_mib} MiB are in use where machine.limit_mib is {limit_mib}. Raise it or \
         swap.size_mib, keep swap.store outside, or run fewer processes at a time"
    )]
    OutOfMemory {
        /// Number of faults until then.
        faults: u64,
        /// The charged memory in MiB.
        held_mib: u64,
        /// The limit in MiB.
        limit_mib: u64,
    },
    /// The cases of vm-scalability cannot run on such a machine.
    #[error(
        "vm-scalability needs 1 to 16 CPUs and 4 MiB for each: machine.cpus is {cpus} and machine.limit_mib {memory_mib}. Set them so"
    )]
    NoSuchMachine {
        /// Number of CPUs.
        cpus: u32,
        /// Memory in MiB.
        memory_mib: u32,
    },
    /// The page cache has nothing left to drop.
    #[error(
        "out of memory: {used_mib} of {memory_mib} MiB are in use and nothing of them can be dropped. Raise machine.limit_mib"
    )]
    NoReclaimableMemory {
        /// Used memory in MiB.
        used_mib: u64,
        /// Total memory in MiB.
        memory_mib: u64,
    },
}

impl LabError {
    /// Returns the error for the text of the file `name`.
    pub(crate) fn in_file(name: &str, text: &str, error: &toml::de::Error) -> LabError {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        LabError::File { name: name.to_owned(), line, why: one_line(error.message()) }
    }
}

/// Returns `text` as one line, for a message.
pub(crate) fn one_line(text: &str) -> String {
    text.trim().replace('\n', " ")
}
