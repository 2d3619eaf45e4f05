use std::path::{Path, PathBuf};

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, a pipe or a device did not do as asked.
    #[error("{what}: {source}")]
    Io {
        /// The path or the step that failed.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A command ended badly.
    #[error("{command}: {said}")]
    Command {
        /// The command with its arguments.
        command: String,
        /// Its exit status and the end of its stderr.
        said: String,
    },
    /// A file or a child's answer does not look as expected.
    #[error("{what}: cannot read {text:?}")]
    Parse {
        /// Where the text came from.
        what: String,
        /// The text, shortened.
        text: String,
    },
    /// The kernel did not swap whole folios of this size, so its figures would be those of another size.
    #[error("the kernel swapped only {percent}% of the memory out in whole folios of {size_kib}K")]
    NotWhole {
        /// The folio size asked for.
        size_kib: u64,
        /// The best share seen in a round.
        percent: u64,
    },
    /// The machine could not be put back as it was found.
    #[error("not everything could be restored; left to do by hand:\n{0}")]
    NotRestored(String),
    /// What came back from swap is not what went out.
    #[error("{0}")]
    WrongResult(String),
}

impl Error {
    /// An [`Error::Io`] about a path, for `map_err`.
    pub(crate) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let what = PathBuf::from(path).display().to_string();
        move |source| Self::Io { what, source }
    }

    /// An [`Error::Io`] about a step, for `map_err`.
    pub(crate) fn doing(what: &str) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.to_owned();
        move |source| Self::Io { what, source }
    }

    /// An [`Error::Parse`] that quotes the beginning of `text`.
    pub(crate) fn parse(what: impl Into<String>, text: &str) -> Self {
        Self::Parse { what: what.into(), text: text.chars().take(120).collect() }
    }
}
