//! Sources are moved by their order, the largest first, so that the smaller ones do not cut the runs that those need (2023-11,
//! fourth patch, which was not merged). And what Linux does besides: blocks where much is free already are looked at first
//! (`fast_find_migrateblock`), because there is less to move; a folio for which no run is left is halved (`migrate_pages` splits one
//! for which there is no memory). So a block can be freed wherever as many frames are free elsewhere.

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
