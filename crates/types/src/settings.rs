//! The settings of a run, as the supervisor hands them to the agents.
//!
//! A value is constant while the run lasts, except the limit, which the supervisor changes, and the
//! folio sizes, which `foliomem ctl` changes.

use crate::codec::Codec;
use crate::size_policy::SizePolicy;
use crate::units::Order;
use std::num::NonZeroU32;

/// Minimum size of the arena in bytes, so that a small budget, too, leaves room to move folios.
pub const ARENA_MIN_BYTES: usize = 1 << 30;

/// The limit of a tree of processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// This many bytes.
    Bytes(u64),
    /// A share of the most memory that the tree has needed so far, as if none were compressed.
    /// The limit grows with the need and never shrinks.
    OfNeed {
        /// The share is 1/divisor.
        divisor: NonZeroU32,
        /// The limit at the start.
        least_bytes: u64,
        /// The limit never grows beyond this.
        most_bytes: u64,
    },
    /// The memory that the group around the run leaves for it. The supervisor follows the group.
    Container {
        /// The limit at the start.
        start_bytes: u64,
        /// The limit that the group has at the start, for which the agents reserve address space.
        most_bytes: u64,
    },
}

impl Limit {
    /// Returns the limit at the start.
    pub fn start_bytes(self) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::OfNeed { least_bytes, .. } => least_bytes,
            Limit::Container { start_bytes, .. } => start_bytes,
        }
    }

    /// Returns the largest value of the limit that is foreseen at the start.
    pub fn most_bytes(self) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::OfNeed { most_bytes, .. } | Limit::Container { most_bytes, .. } => most_bytes,
        }
    }
}

/// The settings that the supervisor writes before the program starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Configuration {
    /// The limit of the tree.
    pub limit: Limit,
    /// The folio sizes that programs may have. `foliomem ctl` changes them later.
    pub sizes: SizePolicy,
    /// The codec of the store.
    pub codec: Codec,
    /// The codec that recompresses idle pieces, if there is one.
    pub recompress: Option<Codec>,
    /// The largest piece compressed as one.
    pub granule: Order,
    /// Number of background reclaimers; 0 for a number that fits the CPUs.
    pub reclaimers: u32,
    /// Whether the agents swap out as much as possible all the time.
    pub torture: bool,
    /// Whether a tree that exceeds its limit is stopped.
    pub hard: bool,
    /// Whether the agents record trace events.
    pub records: bool,
}

impl Configuration {
    /// Returns the plainest configuration with a limit: single pages, each compressed alone with
    /// lz4, and all switches off.
    pub fn plain(limit: Limit) -> Configuration {
        Configuration {
            limit,
            sizes: SizePolicy::NONE,
            codec: Codec::Lz4,
            recompress: None,
            granule: Order::ZERO,
            reclaimers: 0,
            torture: false,
            hard: false,
            records: false,
        }
    }
}
