//! The whole-engine check: every page, frame and slot is accounted for exactly once.

use super::Engine;
use crate::cluster::SlotState;
use crate::page_table::PageState;
use crate::ports::Ports;
use crate::queue::FolioName;
use crate::rmap::Holder;
use foliomem_types::units::{Frame, ORDERS, Order, PageNumber};
use std::collections::{HashMap, HashSet};

impl<P: Ports> Engine<P> {
    /// Walks everything and panics at the first inconsistency. No other call may be in progress.
    pub fn check(&self) {
        self.homes.check();
        self.slots.check();
        self.store.check();
        let mut claims = self.check_claims();
        let mut claimed = |head, as_what| claims.remove(&head).is_some_and(|claims| claims.contains(&as_what));
        let mut frames: HashSet<Frame> = HashSet::new();
        let mut heads: HashMap<Frame, Order> = HashMap::new();
        let mut slots = HashSet::new();
        let (mut resident, mut holes, mut staged) = (0u64, 0u64, 0u64);
        let (mut nr_anon, mut partially_mapped) = ([0u64; ORDERS], [0u64; ORDERS]);
        for block in self.table.blocks() {
            let entries = block.lock();
            for (head, state) in entries.folios() {
                let Some(order) = state.order() else { continue };
                let hole_pages = entries.holes(head, order);
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
                match state {
                    PageState::None => {}
                    PageState::Resident { frame, .. } | PageState::Hole { frame, .. } => {
                        resident += u64::from(order.pages() - hole_pages);
                        holes += u64::from(hole_pages);
                        nr_anon[order.index()] += 1;
                        if hole_pages == 0 {
                            heads.insert(frame, order);
                        } else {
                            partially_mapped[order.index()] += 1;
                            assert!(order.pages() > 2 && hole_pages < order.pages(), "{head:?} has {hole_pages} holes");
                            assert!(
                                entries.is_deferred(),
                                "partially mapped {head:?} is in a block that is not queued"
                            );
                        }
                        self.check_frames(head, frame, order, &mut frames);
                        assert!(claimed(head, (order, false)), "resident {head:?} is in no queue");
                    }
                    PageState::Home { frame, writeback, .. } => {
                        assert!(!writeback, "{head:?} is busy");
                        staged += u64::from(order.pages());
                        heads.insert(frame, order);
                        self.check_frames(head, frame, order, &mut frames);
                        assert!(claimed(head, (order, true)), "staged {head:?} is in no queue");
                    }
                    PageState::Swapped { slot, fetching, .. } => {
                        assert!(!fetching, "{head:?} is busy");
                        for index in 0..order.pages() {
                            assert!(slots.insert(slot.offset(index)), "{slot:?}+{index} is used twice");
                            self.slot_map.get(slot.offset(index));
                            assert_eq!(self.slots.slot_state(slot.offset(index)), SlotState::InUse, "{slot:?}+{index}");
                        }
                    }
                }
            }
            let covered: u32 = entries.folios().filter_map(|(_, state)| state.order()).map(Order::pages).sum();
            let with_content = (0..foliomem_types::units::BLOCK_PAGES as u32)
                .filter(|&index| entries.get(entries.first().offset(index)) != PageState::None);
            assert_eq!(covered as usize, with_content.count(), "a page of no folio in {:?}", entries.first());
        }
        assert!(claims.is_empty(), "queued folios are neither resident nor staged: {claims:?}");
        for (frame, entry) in self.swap_cache.entries() {
            assert!(
                heads.get(&frame) == Some(&entry.order),
                "{entry:?} of {frame:?}, which is {:?}",
                heads.get(&frame)
            );
            for index in 0..entry.order.pages() {
                assert!(slots.insert(entry.slot.offset(index)), "{entry:?} is used twice");
                self.slot_map.get(entry.slot.offset(index));
                assert_eq!(self.slots.slot_state(entry.slot.offset(index)), SlotState::CacheOnly, "{entry:?}");
            }
        }
        assert_eq!(resident, self.resident_pages(), "resident pages");
        assert_eq!(staged, self.staged_pages(), "staged pages");
        assert_eq!(slots.len() as u64, self.swapped_pages() + self.swap_cache.pages(), "slots in use");
        for order in Order::all() {
            let (index, size) = (order.index(), self.counters().of(order));
            assert_eq!(nr_anon[index], size.nr_anon.get(), "nr_anon of {order:?}");
            assert_eq!(partially_mapped[index], size.nr_anon_partially_mapped.get(), "partially mapped of {order:?}");
        }
        let held = u64::from(self.store.held_frames());
        let free = u64::from(self.homes.full_frames() + self.homes.empty_frames());
        let taken = resident + holes + staged + held;
        assert_eq!(free + taken, u64::from(self.homes.frames()), "every frame has one use");
    }

    /// Returns the valid claims on each queued folio: its order, and whether it is claimed as
    /// staged. More than one remains only if claims of 64 or more queueings ago are left.
    fn check_claims(&self) -> HashMap<PageNumber, HashSet<(Order, bool)>> {
        let mut claims: HashMap<_, HashSet<_>> = HashMap::new();
        for queue in self.reclaim_queues() {
            queue.check();
            for claim in queue.all() {
                let FolioName { head, order } = claim.folio;
                if self.holds(claim) {
                    claims.entry(head).or_default().insert((order, std::ptr::eq(queue, &self.staged)));
                }
            }
        }
        claims
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
}
