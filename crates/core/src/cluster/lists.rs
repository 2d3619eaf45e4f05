//! The cluster lists, and the places of clusters that are on no list.
//!
//! The lists are doubly linked through an array with one element for each cluster ever used, so
//! that a move between lists takes constant time. Events under the list lock are counted here.

use super::SlotCounters;
use super::table::Cluster;
use foliomem_types::units::{ClusterNumber, ORDERS, Order};

/// The place of a cluster. `SwapClusters::check` checks what its slots must be like there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Wholly free: any allocation of any order may take it.
    Free,
    /// A slot was freed since the last try for the cluster's order.
    Nonfull(Order),
    /// Tried: partly used for its order, or an allocation failed in it. Current clusters of CPUs
    /// may be here, too.
    Frag(Order),
    /// On no list: every slot is in use, and no search needs such a cluster. (The kernel has one
    /// list of these and of [`Place::FullCacheOnly`], because it searches there.)
    Full,
    /// On no list: the cluster was full, now has room for its order, and is the spare of a CPU.
    Spare,
    /// Every slot is in use or cache-only, and some are cache-only.
    FullCacheOnly,
    /// Wholly free, but waiting for discard.
    AwaitsDiscard,
    /// On no list: a caller took the cluster off the discard queue and discards it.
    Discarding,
    /// On no list: in use by a strategy that has no lists.
    InUse,
}

const LISTS: usize = 3 + 2 * ORDERS;

impl Place {
    fn list(self) -> Option<usize> {
        match self {
            Place::Free => Some(0),
            Place::FullCacheOnly => Some(1),
            Place::AwaitsDiscard => Some(2),
            Place::Nonfull(order) => Some(3 + order.index()),
            Place::Frag(order) => Some(3 + ORDERS + order.index()),
            Place::Full | Place::Spare | Place::Discarding | Place::InUse => None,
        }
    }

    /// Returns whether a cluster at this place is on a list.
    pub fn is_listed(self) -> bool {
        self.list().is_some()
    }

    fn listed() -> impl Iterator<Item = Place> {
        let of_orders = Order::all().flat_map(|order| [Place::Nonfull(order), Place::Frag(order)]);
        [Place::Free, Place::FullCacheOnly, Place::AwaitsDiscard].into_iter().chain(of_orders)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Links {
    next: Option<ClusterNumber>,
    prev: Option<ClusterNumber>,
}

#[derive(Clone, Copy, Default)]
struct List {
    first: Option<ClusterNumber>,
    last: Option<ClusterNumber>,
    len: u32,
}

/// All lists of a device.
#[derive(Default)]
pub(super) struct Lists {
    links: Vec<Links>,
    lists: [List; LISTS],
    moves: u64,
    /// All counters except those that CPUs keep.
    pub counters: SlotCounters,
}

impl Lists {
    /// Returns the number of clusters that were ever used.
    pub fn clusters(&self) -> u32 {
        self.links.len() as u32
    }

    /// Adds a cluster that was never used to the free list and returns it.
    pub fn add_fresh(&mut self) -> ClusterNumber {
        let number = ClusterNumber(self.clusters());
        self.links.push(Links::default());
        self.append(number, Place::Free);
        number
    }

    /// Returns the number of cluster moves.
    pub fn moves(&self) -> u64 {
        self.moves
    }

    pub fn len(&self, place: Place) -> u32 {
        place.list().map_or(0, |list| self.lists[list].len)
    }

    /// Iterates over the clusters at `place`, first to last.
    pub fn iter(&self, place: Place) -> impl Iterator<Item = ClusterNumber> {
        let first = place.list().and_then(|list| self.lists[list].first);
        std::iter::successors(first, |at| self.links[at.0 as usize].next)
    }

    /// Moves a cluster to the end of the list of `to`, which may be its current list.
    #[inline]
    pub fn move_to_end(&mut self, number: ClusterNumber, cluster: &mut Cluster, to: Place) {
        self.unlink(number, cluster.place);
        self.append(number, to);
        cluster.place = to;
        self.moves += 1;
    }

    #[inline]
    fn unlink(&mut self, number: ClusterNumber, from: Place) {
        let Some(list) = from.list() else { return };
        let Links { next, prev } = std::mem::take(&mut self.links[number.0 as usize]);
        let list = &mut self.lists[list];
        list.len -= 1;
        match prev {
            Some(prev) => self.links[prev.0 as usize].next = next,
            None => list.first = next,
        }
        match next {
            Some(next) => self.links[next.0 as usize].prev = prev,
            None => list.last = prev,
        }
    }

    #[inline]
    fn append(&mut self, number: ClusterNumber, to: Place) {
        let Some(list) = to.list() else { return };
        let list = &mut self.lists[list];
        list.len += 1;
        let last = list.last.replace(number);
        match last {
            Some(last) => self.links[last.0 as usize].next = Some(number),
            None => list.first = Some(number),
        }
        self.links[number.0 as usize].prev = last;
    }

    /// Returns the list of each cluster, if any. Panics if links are inconsistent.
    pub fn check(&self) -> Vec<Option<Place>> {
        let mut places = vec![None; self.links.len()];
        for place in Place::listed() {
            let (mut prev, mut len) = (None, 0);
            for number in self.iter(place) {
                let before = places[number.0 as usize].replace(place);
                assert_eq!(before, None, "{number:?} is on {place:?}, too");
                assert_eq!(self.links[number.0 as usize].prev, prev, "{number:?} on {place:?}");
                (prev, len) = (Some(number), len + 1);
            }
            let list = place.list().map(|list| self.lists[list]).unwrap_or_default();
            assert_eq!((list.last, list.len), (prev, len), "{place:?}");
        }
        for (links, place) in self.links.iter().zip(&places) {
            assert!(place.is_some() || *links == Links::default(), "a cluster is linked and on no list");
        }
        places
    }
}
