//! Why the lab could not do what was asked.

use std::path::PathBuf;
use thiserror::Error;

/// The lab's one error type.
#[derive(Debug, Error)]
pub enum LabError {
    /// The scenario file cannot be read.
    #[error("cannot read the scenario {0}: {1}. Name a file, or one of `foliomem lab list`")]
    Unreadable(PathBuf, std::io::Error),
    /// A file of costs cannot be read.
    #[error("cannot read the costs {0}: {1}. `foliomem lab calibrate -o FILE` writes such a file")]
    UnreadableCosts(PathBuf, std::io::Error),
    /// A file is not what a scenario, or a file of costs, must be.
    #[error("{name}:{line}: {why}")]
    File {
        /// The file.
        name: String,
        /// Where in it, from 1 on.
        line: usize,
        /// What is wrong there.
        why: String,
    },
    /// A setting that is to replace one of the scenario is none.
    #[error("--vary {setting}: {why}")]
    Setting {
        /// As on the command line.
        setting: String,
        /// What is wrong with it.
        why: String,
    },
    /// One of several runs has failed.
    #[error("{settings}: {why}")]
    Run {
        /// Which.
        settings: String,
        /// Why.
        why: Box<LabError>,
    },
    /// A trace cannot be read.
    #[error("cannot read the trace {0}: {1}")]
    UnreadableTrace(PathBuf, std::io::Error),
    /// It is not what a trace must be.
    #[error("{path}: at byte {offset}: {why}", path = .path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong there.
        why: String,
    },
    /// It would be overwritten by what is made of it.
    #[error("{0} is the trace itself: name another file")]
    OntoItself(PathBuf),
    /// A table cannot be written.
    #[error("cannot write {0}: {1}")]
    Unwritable(PathBuf, std::io::Error),
    /// It has more memory than can be simulated.
    #[error("the trace {0} has more than 4 TiB of memory")]
    TraceTooLarge(PathBuf),
    /// The published results, which are a part of this program.
    #[error("the published results cannot be read: {0}")]
    Published(csv::Error),
    /// What the program has fits neither into the limit nor into what swap takes.
    #[error(
        "out of memory after {faults} faults: {held_mib} MiB are in use where machine.limit_mib is {limit_mib}. Raise it or \
         swap.size_mib, keep swap.store outside, or let less run at a time"
    )]
    OutOfMemory {
        /// The program's, until then.
        faults: u64,
        /// What is charged.
        held_mib: u64,
        /// What may be.
        limit_mib: u64,
    },
    /// The cases of vm-scalability cannot be run on such a machine.
    #[error(
        "vm-scalability needs 1 to 16 CPUs and 4 MiB for each: machine.cpus is {cpus} and machine.limit_mib {memory_mib}. Set them so"
    )]
    NoSuchMachine {
        /// Its CPUs.
        cpus: u32,
        /// Its memory.
        memory_mib: u32,
    },
    /// A page cache has nothing left that it could drop.
    #[error(
        "out of memory: {used_mib} of {memory_mib} MiB are in use and nothing of them can be dropped. Raise machine.limit_mib"
    )]
    NoReclaimableMemory {
        /// What is in use.
        used_mib: u64,
        /// What there is.
        memory_mib: u64,
    },
}

impl LabError {
    /// What is wrong with the text of the file `name`.
    pub(crate) fn in_file(name: &str, text: &str, error: &toml::de::Error) -> LabError {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        LabError::File { name: name.to_owned(), line, why: one_line(error.message()) }
    }
}

/// As it is to stand in a message.
pub(crate) fn one_line(text: &str) -> String {
    text.trim().replace('\n', " ")
}
