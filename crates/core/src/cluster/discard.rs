//! The discard queue: freed clusters on a device that wants discard, before they are free again.

use super::SwapClusters;
use super::lists::Place;
use super::search::Look;
use foliomem_types::units::ClusterNumber;

/// A wholly free cluster that nobody may use until [`SwapClusters::discarded`] returns it.
#[must_use = "the cluster is lost until it is discarded"]
#[derive(PartialEq, Eq, Debug)]
pub struct PendingDiscard(ClusterNumber);

impl PendingDiscard {
    /// Returns the cluster to discard.
    pub fn cluster(&self) -> ClusterNumber {
        self.0
    }
}

impl SwapClusters {
    /// Returns the number of clusters on the discard queue.
    pub fn awaiting_discard(&self) -> u32 {
        self.lists.lock().len(Place::AwaitsDiscard)
    }

    /// Removes the oldest cluster from the discard queue. The caller discards its slots and calls
    /// [`SwapClusters::discarded`]. (A step of the kernel's `swap_do_scheduled_discard`.)
    pub fn take_discard(&self) -> Option<PendingDiscard> {
        loop {
            let Look { mut lists, first, contended } = self.look_at(Place::AwaitsDiscard);
            match (first, contended) {
                (Some((number, mut cluster)), _) => {
                    lists.move_to_end(number, &mut cluster, Place::Discarding);
                    return Some(PendingDiscard(number));
                }
                (None, Some(number)) => {
                    drop(lists);
                    drop(self.table.get(number).lock());
                }
                (None, None) => return None,
            }
        }
    }

    /// Frees a cluster whose slots were discarded.
    pub fn discarded(&self, pending: PendingDiscard) {
        let mut cluster = self.table.get(pending.0).lock();
        assert_eq!(cluster.place, Place::Discarding, "{pending:?} is of another device");
        self.relocate(pending.0, &mut cluster, Place::Free);
    }
}
