//! The sort-sources variant: the largest sources move first, so that smaller ones do not split the
//! runs that they need (2023-11, fourth patch, not merged).
//!
//! It also does what Linux does besides: it tries blocks with much free room first
//! (`fast_find_migrateblock`), because less is left to move; and it halves a folio without a target
//! (`migrate_pages` splits a folio for which there is no memory). So a block can be freed wherever
//! enough frames are free elsewhere.

use super::Policy;
use crate::compaction::Occupant;

pub(in crate::compaction) struct SortSources;

impl Policy for SortSources {
    fn looks_where_most_is_free(&self) -> bool {
        true
    }

    fn arrange(&self, sources: &mut [Occupant]) {
        sources.sort_by_key(|source| std::cmp::Reverse(source.run().order));
    }

    fn splits_for_want(&self) -> bool {
        true
    }
}
