//! The errors of the lab's commands.

use foliomem_command::BesideError;
use foliomem_lab::error::LabError;
use foliomem_types::size::SizeError;
use std::path::PathBuf;
use thiserror::Error;

/// The one error type of the lab's commands.
#[derive(Debug, Error)]
pub enum CommandError {
    /// A simulation failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// An option has an invalid value.
    #[error("{0} (from command line): {1}")]
    Setting(&'static str, SizeError),
    /// The program that measures is missing.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// The results could not be written.
    #[error("cannot write the runs to {0}: {1}")]
    Runs(PathBuf, std::io::Error),
    /// The advice could not be written.
    #[error("cannot write the advice to {0}: {1}")]
    Advice(PathBuf, std::io::Error),
    /// Python, which runs the lab on a cluster, cannot be started.
    #[error(
        "cannot start {python} for Ray: {error}. Set FOLIOMEM_PYTHON to a Python with the packages foliomem_lab \
         (python/foliomem_lab of the sources) and ray"
    )]
    NoPython {
        /// The command that was started.
        python: String,
        /// Message of the system.
        error: std::io::Error,
    },
    /// A cluster returned no runs.
    #[error("no runs by the Ray cluster {address}: {why}")]
    Ray {
        /// The cluster's address, as on the command line.
        address: String,
        /// The reason, as far as it is known.
        why: String,
    },
}
