//! Why foliomem could not do what was asked: what failed, on what, and what to do.

use crate::size::SizeError;
use foliomem_core::cluster::UnknownStrategy;
use foliomem_core::compaction::UnknownVariant;
use foliomem_linux::codec::UnknownCodec;
use foliomem_linux::control::ControlError;
use foliomem_linux::find::FindError;
use foliomem_linux::swap_file::CreateError;
use foliomem_linux::uffd::UffdError;
use std::path::PathBuf;
use thiserror::Error;

/// The command's one error type.
#[derive(Debug, Error)]
pub enum CliError {
    /// A program is needed.
    #[error("no program given: foliomem run --limit 1G -- PROGRAM [ARGUMENTS]")]
    NoProgram,
    /// A limit is needed.
    #[error(
        "no limit given: use --limit SIZE (512M, 2G, 25%, need/2), FOLIOMEM_LIMIT or `limit` in the configuration file"
    )]
    NoLimit,
    /// The limit is too small.
    #[error("the limit of {given_kib}K is too small: at least {least_mib}M are needed")]
    LimitTooSmall {
        /// What was asked for.
        given_kib: u64,
        /// What works.
        least_mib: u64,
    },
    /// A setting has a value that is not one.
    #[error("{name} (from {origin}): {source}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Where the value comes from.
        origin: String,
        /// What is wrong with it.
        source: BadValue,
    },
    /// The configuration file.
    #[error("cannot read the configuration file {path}: {why}")]
    Config {
        /// Which file.
        path: PathBuf,
        /// What the system or the parser says.
        why: String,
    },
    /// The program is not there.
    #[error("{0}: no such program")]
    NotFound(String),
    /// The program cannot be executed.
    #[error("{0}: cannot be executed: {1}")]
    NotExecutable(String, String),
    /// The program cannot be managed.
    #[error("{0}: {1}")]
    Unfit(PathBuf, Unfit),
    /// The agent is not where it should be.
    #[error("the agent is missing: {0} must lie beside foliomem")]
    NoAgent(PathBuf),
    /// The agent lies where the loader cannot be told to find it.
    #[error("the agent's path {0} contains a space or a colon, which LD_PRELOAD cannot hold: move foliomem elsewhere")]
    AgentPath(PathBuf),
    /// No userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// The control segment.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// No run to speak to.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The swap file.
    #[error(transparent)]
    SwapFile(#[from] CreateError),
    /// A system call of the supervisor.
    #[error("cannot {0}: {1}")]
    System(&'static str, std::io::Error),
    /// A measurement.
    #[error(transparent)]
    Bench(#[from] foliomem_bench::Error),
    /// A simulation.
    #[error(transparent)]
    Lab(#[from] foliomem_lab::error::LabError),
    /// The runs of the lab could not be written.
    #[error("cannot write the runs to {0}: {1}")]
    Runs(PathBuf, std::io::Error),
    /// A file of costs could not be written.
    #[error("cannot write the costs to {0}: {1}")]
    Costs(PathBuf, std::io::Error),
    /// What runs the lab on a cluster cannot be started.
    #[error(
        "cannot start {python} for Ray: {error}. Set FOLIOMEM_PYTHON to a Python with the packages foliomem_lab \
         (python/foliomem_lab of the sources) and ray"
    )]
    NoPython {
        /// What was started.
        python: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// There are no runs of a cluster.
    #[error("no runs by the Ray cluster {address}: {why}")]
    Ray {
        /// As on the command line.
        address: String,
        /// What is known of it.
        why: String,
    },
    /// The trace could not be written.
    #[error("cannot write the trace {0}: {1}")]
    Trace(PathBuf, std::io::Error),
    /// There is no such program or pattern to measure.
    #[error("{0:?} is none of what is measured: {1}")]
    NoSuchBenchmark(String, &'static str),
    /// The statistics could not be written.
    #[error("cannot write the statistics to {0}: {1}")]
    Stats(String, std::io::Error),
}

/// What is wrong with the value of a setting.
#[derive(Debug, Error)]
pub enum BadValue {
    /// Not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Not a codec.
    #[error(transparent)]
    Codec(#[from] UnknownCodec),
    /// Not a share of what is needed.
    #[error("{0:?} is no share of what the program needs: use need/2, or another number up to 16")]
    OfNeed(String),
    /// Not a codec for recompression.
    #[error("{0:?} is no codec to recompress with: use zstd or zstd:LEVEL with a level from 1 to 19")]
    Recompress(String),
    /// Not a strategy.
    #[error(transparent)]
    Strategy(#[from] UnknownStrategy),
    /// A variant of compaction.
    #[error(transparent)]
    Variant(#[from] UnknownVariant),
    /// Not a file with or without a size.
    #[error("{0:?} names no file: use FILE or FILE:SIZE, such as /var/tmp/swap:4G")]
    SwapFile(String),
    /// Not yes or no.
    #[error("{0:?} is neither yes nor no: use 1 or 0")]
    Flag(String),
}

/// Why a program cannot be managed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Unfit {
    /// No dynamic loader that would load the agent.
    #[error("is statically linked: foliomem can only run dynamically linked programs")]
    Static,
    /// A Go program of the usual kind.
    #[error("is a Go program built without cgo, hence statically linked: build it with CGO_ENABLED=1")]
    GoWithoutCgo,
    /// The loader ignores LD_PRELOAD.
    #[error("is setuid, setgid or has file capabilities: the loader refuses to load the agent into it")]
    Privileged,
    /// Another C library.
    #[error("is linked with musl: foliomem needs a program for glibc")]
    Musl,
    /// Another architecture.
    #[error("is not a program for 64-bit x86 Linux")]
    Architecture,
}

impl CliError {
    /// The exit code it comes to.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::NoProgram | CliError::NoLimit => 2,
            CliError::NotExecutable(..) => 126,
            CliError::NotFound(_) => 127,
            _ => 125,
        }
    }
}
