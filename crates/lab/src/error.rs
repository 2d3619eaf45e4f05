//! Why the lab could not do what was asked.

use std::path::PathBuf;
use thiserror::Error;

/// The lab's one error type.
#[derive(Debug, Error)]
pub enum LabError {
    /// The scenario file cannot be read.
    #[error("cannot read the scenario {0}: {1}. Name a file, or one of `foliomem lab list`")]
    Unreadable(PathBuf, std::io::Error),
    /// It is not what a scenario must be.
    #[error("{name}:{line}: {why}")]
    Scenario {
        /// The file.
        name: String,
        /// Where in it, from 1 on.
        line: usize,
        /// What is wrong there.
        why: String,
    },
    /// A setting that is to replace one of the scenario is none.
    #[error("--set {setting}: {why}")]
    Setting {
        /// As on the command line.
        setting: String,
        /// What is wrong with it.
        why: String,
    },
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
}
