//! The lists that clusters are on, and the places where a cluster is on none.
//!
//! Doubly linked through an array with an element for each cluster that was ever used, so that a cluster
//! is moved from one list to another in constant time. What happens while the lists are locked is counted here.

use super::SlotCounters;
use super::table::Cluster;
use crate::units::{ClusterNumber, ORDERS, Order};

/// Where a cluster is. What its slots must be like there is checked by `SwapClusters::check`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Wholly free: anybody may take it, for any order.
    Free,
    /// A slot was freed since it was last tried for its order.
    Nonfull(Order),
    /// Tried: partly used for its order, or an allocation failed in it. CPUs' current clusters are here, too.
    Frag(Order),
    /// Off list, because nobody looks for one: every slot is in use. (The kernel has a list of these and those of
    /// [`Place::FullCacheOnly`], for which it looks there.)
    Full,
    /// Off list: it was full, and now has room for its order. It is the spare of a CPU.
    Spare,
    /// Every slot is in use or cache-only, and some are cache-only.
    FullCacheOnly,
    /// Wholly free, but to be discarded first.
    AwaitsDiscard,
    /// Off list: whoever took it off the discard queue discards it.
    Discarding,
    /// Off list: in use by a strategy that has no lists.
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

    /// Whether a cluster there is on a list.
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
    /// Everything but what CPUs count for themselves.
    pub counters: SlotCounters,
}

impl Lists {
    /// How many clusters were ever used.
    pub fn clusters(&self) -> u32 {
        self.links.len() as u32
    }

    /// A cluster that was never used, now on the free list.
    pub fn add_fresh(&mut self) -> ClusterNumber {
        let number = ClusterNumber(self.clusters());
        self.links.push(Links::default());
        self.append(number, Place::Free);
        number
    }

    /// How often a cluster was moved.
    pub fn moves(&self) -> u64 {
        self.moves
    }

    pub fn len(&self, place: Place) -> u32 {
        place.list().map_or(0, |list| self.lists[list].len)
    }

    /// The clusters at `place`, from the first on.
    pub fn iter(&self, place: Place) -> impl Iterator<Item = ClusterNumber> {
        let first = place.list().and_then(|list| self.lists[list].first);
        std::iter::successors(first, |at| self.links[at.0 as usize].next)
    }

    /// Moves a cluster to the end of the list of `to`, which may be where it is.
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

    /// Which list each cluster is on, if any; panics where the links do not fit together.
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
