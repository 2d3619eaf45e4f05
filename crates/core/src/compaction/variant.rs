//! How what lies in the way is moved: a small type for each variant of "enable >0 order folio memory compaction" (2023-11),
//! behind one interface.

mod free_split;
mod migrate_whole;
mod sort_sources;
mod split_folios;

use super::Occupant;
use crate::homes::Homes;
use crate::units::{FrameRun, Order};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// How what lies in the way is moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Variant {
    /// First patch: folios are split, and moved page by page.
    SplitFolios,
    /// Second patch: folios are moved whole, to free runs of their very order.
    MigrateWhole,
    /// Third patch, merged in Linux 6.9: larger free runs are cut.
    FreeSplit,
    /// Fourth patch: the largest folios are moved first. And a folio for which no run is left is split then.
    #[default]
    SortSources,
}

impl Variant {
    /// All of them, oldest first.
    pub const ALL: [Variant; 4] =
        [Variant::SplitFolios, Variant::MigrateWhole, Variant::FreeSplit, Variant::SortSources];

    /// What it does.
    pub(super) fn policy(self) -> &'static dyn Policy {
        match self {
            Variant::SplitFolios => &split_folios::SplitFolios,
            Variant::MigrateWhole => &migrate_whole::MigrateWhole,
            Variant::FreeSplit => &free_split::FreeSplit,
            Variant::SortSources => &sort_sources::SortSources,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Variant::SplitFolios => "split-folios",
            Variant::MigrateWhole => "migrate-whole",
            Variant::FreeSplit => "+free-split",
            Variant::SortSources => "+sort-sources",
        })
    }
}

/// There is no variant of that name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("unknown variant of compaction {0:?}: use split-folios, migrate-whole, +free-split or +sort-sources")]
pub struct UnknownVariant(String);

impl FromStr for Variant {
    type Err = UnknownVariant;

    fn from_str(name: &str) -> Result<Variant, UnknownVariant> {
        let found = Variant::ALL.into_iter().find(|variant| variant.to_string() == name);
        found.ok_or_else(|| UnknownVariant(name.to_owned()))
    }
}

/// What variants differ in. What is not defined here is as since Linux 6.9.
pub(super) trait Policy: Sync {
    /// Whether something of `source` is to be moved for a run of `wanted`. Where as much is gained elsewhere as is freed here,
    /// it is not.
    fn isolates(&self, source: Order, wanted: Order) -> bool {
        source < wanted
    }

    /// Whether folios are split before they are moved.
    fn splits_first(&self) -> bool {
        false
    }

    /// Whether blocks with large free runs are looked at before those that come next.
    fn looks_where_most_is_free(&self) -> bool {
        false
    }

    /// Puts sources into the order they are moved in; they come by their frames.
    fn arrange(&self, _sources: &mut [Occupant]) {}

    /// Whether there is room for all of `sources`, if that can be known before any is moved. What they leave is no room: it is
    /// captured.
    fn has_targets(&self, _homes: &Homes, _sources: &[Occupant]) -> bool {
        true
    }

    /// Where a source of `order` goes, which is not to be part of a free run of more than `most`.
    fn target(&self, homes: &Homes, order: Order, most: Order) -> Option<FrameRun> {
        homes.alloc_target(order, most)
    }

    /// Whether a folio for which there is no run is split, rather than left where it is.
    fn splits_for_want(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variants_are_read_back() {
        for variant in Variant::ALL {
            assert_eq!(variant.to_string().parse(), Ok(variant));
        }
        assert!("sort-sources".parse::<Variant>().is_err());
    }
}
