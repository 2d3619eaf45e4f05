//! The errors of the benchmarks' commands.

use foliomem_command::BesideError;
use foliomem_core::cluster::UnknownStrategy;
use foliomem_core::compaction::UnknownVariant;
use foliomem_types::codec::UnknownCodec;
use foliomem_types::size::SizeError;
use std::path::PathBuf;
use thiserror::Error;

/// The one error type of the benchmarks' commands.
#[derive(Debug, Error)]
pub enum CommandError {
    /// A measurement failed.
    #[error(transparent)]
    Bench(#[from] foliomem_bench::Error),
    /// A program that the benchmark needs is missing.
    #[error(transparent)]
    Beside(#[from] BesideError),
    /// An option has an invalid value.
    #[error("{0} (from command line): {1}")]
    Setting(&'static str, BadValue),
    /// The named program or pattern does not exist.
    #[error("{0:?} is none of what is measured: {1}")]
    NoSuchBenchmark(String, &'static str),
    /// A file of costs could not be written.
    #[error("cannot write the costs to {0}: {1}")]
    Costs(PathBuf, std::io::Error),
}

/// The reason why the value of an option is invalid.
#[derive(Debug, Error)]
pub enum BadValue {
    /// The value is not a size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The value is not a codec.
    #[error(transparent)]
    Codec(#[from] UnknownCodec),
    /// The value is not a cluster strategy.
    #[error(transparent)]
    Strategy(#[from] UnknownStrategy),
    /// The value is not a compaction variant.
    #[error(transparent)]
    Variant(#[from] UnknownVariant),
}
