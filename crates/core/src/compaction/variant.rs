//! The compaction variants: how occupants are moved, one small type for each patch of "enable >0
//! order folio memory compaction" (2023-11), behind one interface.

mod free_split;
mod migrate_whole;
mod sort_sources;
mod split_folios;

use super::Occupant;
use crate::homes::Homes;
use foliomem_types::units::{FrameRun, Order};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The variant by which occupants are moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Variant {
    /// First patch: folios are split and moved page by page.
    SplitFolios,
    /// Second patch: folios are moved whole, to free runs of exactly their order.
    MigrateWhole,
    /// Third patch, merged in Linux 6.9: larger free runs are split for a target.
    FreeSplit,
    /// Fourth patch: the largest folios move first. A folio without a target is split then.
    #[default]
    SortSources,
}

impl Variant {
    /// All variants, oldest first.
    pub const ALL: [Variant; 4] =
        [Variant::SplitFolios, Variant::MigrateWhole, Variant::FreeSplit, Variant::SortSources];

    /// Returns the implementation of the variant.
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

/// The error for an unknown variant name.
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

/// The steps in which variants differ. The defaults are those of Linux since 6.9.
pub(super) trait Policy: Sync {
    /// Returns whether a folio of order `source` is moved to make a run of order `wanted`. A folio
    /// is not moved if it needs as much room elsewhere as it leaves here.
    fn isolates(&self, source: Order, wanted: Order) -> bool {
        source < wanted
    }

    /// Returns whether folios are split before they are moved.
    fn splits_first(&self) -> bool {
        false
    }

    /// Returns whether blocks with large free runs are tried first.
    fn looks_where_most_is_free(&self) -> bool {
        false
    }

    /// Sorts the sources into the order in which they move; they arrive by frame.
    fn arrange(&self, _sources: &mut [Occupant]) {}

    /// Returns whether there are targets for all of `sources`, if that is known before the first
    /// moves. Frames that they leave do not count: they are captured.
    fn has_targets(&self, _homes: &Homes, _sources: &[Occupant]) -> bool {
        true
    }

    /// Returns the target of a source of `order`; it must not be part of a free run above order
    /// `most`.
    fn target(&self, homes: &Homes, order: Order, most: Order) -> Option<FrameRun> {
        homes.alloc_target(order, most)
    }

    /// Returns whether a folio without a target is split, instead of staying where it is.
    fn splits_for_want(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variant_names_parse() {
        for variant in Variant::ALL {
            assert_eq!(variant.to_string().parse(), Ok(variant));
        }
        assert!("sort-sources".parse::<Variant>().is_err());
    }
}
