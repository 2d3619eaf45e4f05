//! The whole-engine check: every page, frame and slot is accounted for exactly once.

use super::Engine;
use crate::cluster::SlotState;
use crate::page_table::{Entries, PageState};
use crate::ports::Ports;
use crate::queue::FolioName;
use crate::rmap::Holder;
use foliomem_types::units::{BLOCK_PAGES, Frame, ORDERS, Order, PageNumber, Slot};
use std::collections::{HashMap, HashSet};

/// The valid claims on each queued folio: its order, and the queue that has it.
type Claims = HashMap<PageNumber, HashSet<(Order, Queued)>>;

/// The queue of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Queued {
    /// A queue of resident folios.
    Resident,
    /// The queue of staged folios.
    Staged,
}

/// What the walk over all blocks has found so far.
#[derive(Default)]
struct Found {
    /// The claims on folios that the walk has not reached yet.
    claims: Claims,
    /// The frames of all folios.
    frames: HashSet<Frame>,
    /// The folios without holes, by their head frames: those that may have a swap-cache entry.
    heads: HashMap<Frame, Order>,
    /// The slots of all folios and swap-cache entries.
    slots: HashSet<Slot>,
    resident_pages: u64,
    hole_pages: u64,
    staged_pages: u64,
    /// Number of folios with resident pages by order, and of those with holes.
    nr_anon: [u64; ORDERS],
    partially_mapped: [u64; ORDERS],
}

impl Found {
    /// Takes the claims on the folio at `head`. Returns whether it is in a queue of this kind.
    fn take_claim(&mut self, head: PageNumber, order: Order, queue: Queued) -> bool {
        self.claims.remove(&head).is_some_and(|claims| claims.contains(&(order, queue)))
    }
}

impl<P: Ports> Engine<P> {
    /// Walks everything and panics at the first inconsistency. No other call may be in progress.
    pub fn check(&self) {
        self.homes.check();
        self.slots.check();
        self.store.check();
        let mut found = Found { claims: self.find_claims(), ..Found::default() };
        for block in self.table.blocks() {
            let entries = block.lock();
            for (head, state) in entries.folios() {
                check_pages(&entries, head, state);
                self.check_folio(&entries, head, state, &mut found);
            }
            check_cover(&entries);
        }
        assert!(found.claims.is_empty(), "queued folios are neither resident nor staged: {:?}", found.claims);
        self.check_swap_cache(&mut found);
        self.check_totals(&found);
    }

    /// Returns the valid claims on all folios. More than one remains on a folio only if claims of
    /// 64 or more queueings ago are left.
    fn find_claims(&self) -> Claims {
        let mut claims = Claims::new();
        for queue in self.reclaim_queues() {
            queue.check();
            let kind = if std::ptr::eq(queue, &self.staged) { Queued::Staged } else { Queued::Resident };
            for claim in queue.all() {
                let FolioName { head, order } = claim.folio;
                if self.holds(claim) {
                    claims.entry(head).or_default().insert((order, kind));
                }
            }
        }
        claims
    }

    /// Checks that the frames or slots of a folio are its own, and that it is in its queue.
    fn check_folio(&self, entries: &Entries, head: PageNumber, state: PageState, found: &mut Found) {
        match state {
            PageState::None => {}
            PageState::Resident { frame, order } | PageState::Hole { frame, order } => {
                let hole_pages = entries.holes(head, order);
                found.resident_pages += u64::from(order.pages() - hole_pages);
                found.hole_pages += u64::from(hole_pages);
                found.nr_anon[order.index()] += 1;
                if hole_pages == 0 {
                    found.heads.insert(frame, order);
                } else {
                    found.partially_mapped[order.index()] += 1;
                    assert!(order.pages() > 2 && hole_pages < order.pages(), "{head:?} has {hole_pages} holes");
                    assert!(entries.is_deferred(), "partially mapped {head:?} is in a block that is not queued");
                }
                self.check_frames(head, frame, order, &mut found.frames);
                assert!(found.take_claim(head, order, Queued::Resident), "resident {head:?} is in no queue");
            }
            PageState::Home { frame, order, writeback } => {
                assert!(!writeback, "{head:?} is busy");
                found.staged_pages += u64::from(order.pages());
                found.heads.insert(frame, order);
                self.check_frames(head, frame, order, &mut found.frames);
                assert!(found.take_claim(head, order, Queued::Staged), "staged {head:?} is in no queue");
            }
            PageState::Swapped { slot, order, fetching } => {
                assert!(!fetching, "{head:?} is busy");
                self.check_slots(slot, order, SlotState::InUse, &mut found.slots);
            }
        }
    }

    fn check_frames(&self, head: PageNumber, first: Frame, order: Order, seen: &mut HashSet<Frame>) {
        for index in 0..order.pages() {
            let frame = first.offset(index);
            let Holder::Page(low) = self.rmap.get(frame) else { panic!("{frame:?} is not the store's") };
            assert!(Holder::pages(low).any(|page| page == head.offset(index)), "{frame:?} is that of {head:?}+{index}");
            assert!(seen.insert(frame), "{frame:?} is used twice");
            assert!(!self.homes.is_free(frame), "{frame:?} is used and free");
        }
    }

    fn check_slots(&self, first: Slot, order: Order, state: SlotState, seen: &mut HashSet<Slot>) {
        for slot in (0..order.pages()).map(|index| first.offset(index)) {
            assert!(seen.insert(slot), "{slot:?} is used twice");
            self.slot_map.get(slot);
            assert_eq!(self.slots.slot_state(slot), state, "{slot:?}");
        }
    }

    /// Checks that each swap-cache entry is that of a folio and has slots of its own.
    fn check_swap_cache(&self, found: &mut Found) {
        for (frame, entry) in self.swap_cache.entries() {
            let folio = found.heads.get(&frame);
            assert!(folio == Some(&entry.order), "{entry:?} of {frame:?}, which is {folio:?}");
            self.check_slots(entry.slot, entry.order, SlotState::CacheOnly, &mut found.slots);
        }
    }

    /// Checks that counters and totals agree with what was found.
    fn check_totals(&self, found: &Found) {
        assert_eq!(found.resident_pages, self.resident_pages(), "resident pages");
        assert_eq!(found.staged_pages, self.staged_pages(), "staged pages");
        assert_eq!(found.slots.len() as u64, self.swapped_pages() + self.swap_cache.pages(), "slots in use");
        for order in Order::all() {
            let (index, size) = (order.index(), self.counters().of(order));
            assert_eq!(found.nr_anon[index], size.nr_anon.get(), "nr_anon of {order:?}");
            let partially_mapped = size.nr_anon_partially_mapped.get();
            assert_eq!(found.partially_mapped[index], partially_mapped, "partially mapped of {order:?}");
        }
        let stored = u64::from(self.store.held_frames());
        let free = u64::from(self.homes.full_frames() + self.homes.empty_frames());
        let taken = found.resident_pages + found.hole_pages + found.staged_pages + stored;
        assert_eq!(free + taken, u64::from(self.homes.frames()), "every frame has one use");
    }
}

/// Checks that all pages of the folio at `head`, whose first page is in `state`, continue it.
fn check_pages(entries: &Entries, head: PageNumber, state: PageState) {
    let Some(order) = state.order() else { return };
    for index in 0..order.pages() {
        let (page, wanted) = (head.offset(index), state.offset(index));
        match (entries.get(page), wanted) {
            (
                PageState::Resident { frame: now, order: of } | PageState::Hole { frame: now, order: of },
                PageState::Resident { frame, .. } | PageState::Hole { frame, .. },
            ) => assert_eq!((now, of), (frame, order), "{page:?} of the folio at {head:?}"),
            (now, _) => assert_eq!(now, wanted, "{page:?} of the folio at {head:?}"),
        }
    }
}

/// Checks that every page of a block that has content is of a folio.
fn check_cover(entries: &Entries) {
    let covered: u32 = entries.folios().filter_map(|(_, state)| state.order()).map(Order::pages).sum();
    let with_content =
        (0..BLOCK_PAGES as u32).filter(|&index| entries.get(entries.first().offset(index)) != PageState::None);
    assert_eq!(covered as usize, with_content.count(), "a page of no folio in {:?}", entries.first());
}
