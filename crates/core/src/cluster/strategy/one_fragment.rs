//! The one-fragment strategy: "mm, swap: only scan one cluster in fragment list" (2025-08, the
//! first patch of "improve cluster scan strategy"). It is [`super::cluster_lists`] with a scan of
//! only one fragmented cluster, which then goes to the end of its list, so that each gets its turn.

use super::Policy;
use crate::cluster::lists::Place;
use crate::cluster::search::{Search, Tries};
use foliomem_types::units::Slot;

pub(in crate::cluster) struct OneFragment;

impl Policy for OneFragment {
    fn find(&self, search: &mut Search<'_>) -> Option<Slot> {
        let order = search.order();
        search
            .free_cluster()
            .or_else(|| search.listed(Place::Nonfull(order), Tries::All))
            .or_else(|| search.listed(Place::Frag(order), Tries::One))
            .or_else(|| search.steal())
    }
}
