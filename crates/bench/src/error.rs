use std::path::{Path, PathBuf};

/// The reason why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on a file, a pipe or a device failed.
    #[error("{what}: {source}")]
    Io {
        /// The path or the step that failed.
        what: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A command failed.
    #[error("{command}: {said}")]
    Command {
        /// The command with its arguments.
        command: String,
        /// Its exit status and the end of its stderr.
        said: String,
    },
    /// A file or the answer of a child has an unexpected form.
    #[error("{what}: cannot read {text:?}")]
    Parse {
        /// The source of the text.
        what: String,
        /// The text, shortened.
        text: String,
    },
    /// The kernel did not swap whole folios of this size, so its figures would belong to another
    /// size.
    #[error("the kernel swapped only {percent}% of the memory out in whole folios of {size_kib}K")]
    NotWhole {
        /// The folio size asked for.
        size_kib: u64,
        /// The best share seen in a round.
        percent: u64,
    },
    /// The machine's settings could not be restored.
    #[error("not everything could be restored; left to do by hand:\n{0}")]
    NotRestored(String),
    /// The content that came back from swap differs from the content that was swapped out.
    #[error("{0}")]
    WrongResult(String),
}

impl Error {
    /// Returns a function for `map_err` that makes an [`Error::Io`] about a path.
    pub(crate) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let what = PathBuf::from(path).display().to_string();
        move |source| Self::Io { what, source }
    }

    /// Returns a function for `map_err` that makes an [`Error::Io`] about a step.
    pub(crate) fn doing(what: &str) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.to_owned();
        move |source| Self::Io { what, source }
    }

    /// Returns an [`Error::Parse`] that quotes the beginning of `text`.
    pub(crate) fn parse(what: impl Into<String>, text: &str) -> Self {
        Self::Parse { what: what.into(), text: text.chars().take(120).collect() }
    }
}
