//! The errors of the command: each says what failed, on what, and what to do.

use crate::checks::NotAllowed;
use crate::live_limit::LimitError;
use crate::setup::SetupError;
use foliomem_command::BesideError;
use foliomem_session::find_run::FindError;
use foliomem_session::segment::ControlError;
use foliomem_session::swap_file::CreateError;
use foliomem_types::codec::UnknownCodec;
use foliomem_types::size::SizeError;
use std::path::PathBuf;
use thiserror::Error;

/// The one error type of the command.
#[derive(Debug, Error)]
pub enum CliError {
    /// The command line names no program.
    #[error("no program given: foliomem run --limit 1G -- PROGRAM [ARGUMENTS]")]
    NoProgram,
    /// No limit is set.
    #[error(
        "no limit given: use --limit SIZE (512M, 2G, 25%, need/2), FOLIOMEM_LIMIT or `limit` in the configuration file"
    )]
    NoLimit,
    /// A setting has an invalid value.
    #[error("{name} (from {origin}): {source}")]
    Setting {
        /// Name of the setting.
        name: &'static str,
        /// Origin of the value.
        origin: String,
        /// The reason why the value is invalid.
        source: Box<BadValue>,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {0}: {1}")]
    UnreadableConfig(PathBuf, String),
    /// The configuration file has something that is no setting.
    #[error("the configuration file is wrong: {path}:{line}: {why}")]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The reason.
        why: String,
    },
    /// The program does not exist.
    #[error("{0}: no such program")]
    NotFound(String),
    /// The program cannot be executed.
    #[error("{0}: cannot be executed: {1}")]
    NotExecutable(String, String),
    /// The program cannot be managed.
    #[error("{0}: {1}")]
    Unfit(PathBuf, Unfit),
    /// The agent's library does not exist.
    #[error("the agent is missing: it must be {0} (beside foliomem) or {1}: install foliomem again")]
    NoAgent(PathBuf, PathBuf),
    /// The agent has not reported before the program's start.
    #[error(
        "the agent {0} did not report before the program's start, so the program was not started: the file is damaged or \
         of another version, or the loader refuses it (see its line above): install foliomem again"
    )]
    AgentSilent(PathBuf),
    /// The path of the agent's library cannot be passed to the loader.
    #[error("the agent's path {0} contains a space or a colon, which LD_PRELOAD cannot hold: move foliomem elsewhere")]
    AgentPath(PathBuf),
    /// This machine does not allow what a run needs.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// Setting up failed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The control segment cannot be set up.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The process belongs to no run.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The limit of a run could not be changed, or does not hold.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The swap file cannot be created.
    #[error(transparent)]
    SwapFile(#[from] CreateError),
    /// A system call of the supervisor failed.
    #[error("cannot {0}: {1}")]
    System(&'static str, std::io::Error),
    /// A program of foliomem cannot be started.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// Python cannot be started.
    #[error("cannot start {0}: {1}: foliomem jupyter needs Python and its module foliomem (pip install foliomem)")]
    NoPython(PathBuf, std::io::Error),
    /// Python lacks the module.
    #[error("{0} has no module foliomem: {0} -m pip install foliomem")]
    NoModule(PathBuf),
    /// The trace could not be written.
    #[error("cannot write the trace {0}: {1}")]
    Trace(PathBuf, std::io::Error),
    /// The advice could not be written.
    #[error("cannot write the advice to {0}: {1}")]
    Advice(PathBuf, std::io::Error),
    /// The metrics cannot be published.
    #[error("cannot publish the metrics at {0}: {1}")]
    Metrics(String, std::io::Error),
    /// The page about the run could not be written.
    #[error("cannot write the report to {0}: {1}")]
    Report(String, std::io::Error),
    /// The statistics could not be written.
    #[error("cannot write the statistics to {0}: {1}")]
    Stats(String, std::io::Error),
}

/// The reason why the value of a setting is invalid.
#[derive(Debug, Error)]
pub enum BadValue {
    /// The value is not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The value is not a codec.
    #[error(transparent)]
    Codec(#[from] UnknownCodec),
    /// The limit is too small.
    #[error("{given} is {bytes} bytes, too small for a limit: at least {least_mib} MiB are needed{meant}")]
    LimitTooSmall {
        /// The limit as given.
        given: String,
        /// The limit in bytes.
        bytes: u64,
        /// The smallest limit in MiB.
        least_mib: u64,
        /// A suggestion, if there is one.
        meant: String,
    },
    /// No cgroup has a limit.
    #[error("no cgroup around this process has a limit: use a size, such as 512M")]
    NoContainer,
    /// A run follows its cgroups only from its start.
    #[error("container is a limit for the start of a run: use a size, such as 512M, or need/2")]
    ContainerByHand,
    /// The value is not a share of the need.
    #[error("{0:?} is no share of what the program needs: use need/2, or another number up to 16")]
    OfNeed(String),
    /// The value does not say whether processes take turns.
    #[error("{0:?} is not on or off")]
    Turns(String),
    /// The value is not a codec for recompression.
    #[error("{0:?} is no codec to recompress with: use zstd, zstd:LEVEL with a level from 1 to 19, or off")]
    Recompress(String),
    /// The value is not a file with an optional size.
    #[error("{0:?} names no file: use FILE or FILE:SIZE, such as /var/tmp/swap:4G")]
    SwapFile(String),
    /// The value is no place for metrics.
    #[error("{0:?} is no place for metrics: use a file, a socket (x.sock), or a port of this machine (127.0.0.1:9400)")]
    Metrics(String),
    /// The value is not a time, or too short.
    #[error("{0:?} is no time after which a process counts as idle: use 30s, 5m or 1h, at least 1s")]
    Idle(String),
    /// The value is neither yes nor no.
    #[error("{0:?} is neither yes nor no: use 1 or 0")]
    Flag(String),
}

/// The reason why a program cannot be managed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Unfit {
    /// The program has no dynamic loader that would load the agent.
    #[error("is statically linked: foliomem can only run dynamically linked programs")]
    Static,
    /// The program is a Go program without cgo, which is static.
    #[error("is a Go program built without cgo, hence statically linked: build it with CGO_ENABLED=1")]
    GoWithoutCgo,
    /// The loader ignores LD_PRELOAD.
    #[error("is setuid, setgid or has file capabilities: the loader refuses to load the agent into it")]
    Privileged,
    /// The program is for another architecture.
    #[error("is not a program for 64-bit x86 Linux")]
    Architecture,
}

impl CliError {
    /// Returns the exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::NoProgram | CliError::NoLimit => 2,
            CliError::NotExecutable(..) => 126,
            CliError::NotFound(_) => 127,
            _ => 125,
        }
    }
}
