//! What the engine knows of every page of the managed address space, as a radix tree of blocks.
//!
//! A [`Block`] is 2 MiB of address space: 512 entries of 8 bytes (0.2% of what they describe) under one
//! lock. A folio is naturally aligned and at most 2 MiB, so it never leaves its block and one lock
//! suffices for it. Every page of a folio of order `k` carries `k` and its own frame or slot; these are
//! consecutive over the folio, so the head's follows from any page's.
//!
//! States of a page, and who may change them (always under the block's lock):
//!
//! | state | content is | left by |
//! |---|---|---|
//! | `None` | nowhere: reads as zeros | first touch, adoption |
//! | `Resident` | in the program; the home is empty and reserved | staging, unmap |
//! | `Hole` | nowhere, but reserves a home as a page of a resident folio | first touch, adoption, split |
//! | `Home` | at home; the program cannot touch it | a fault (second chance), writeback, unmap |
//! | `Home` + writeback | the same, and a worker reads it: **only that worker frees the frame** | the worker; a fault copies; unmap |
//! | `Swapped` | in the store, under its slot | a fault, unmap |
//! | `Swapped` + fetching | the same, and a worker reads it: **only that worker frees the slot** | the worker; unmap |
//!
//! Lock rank 2 (block). Lookup takes no lock. Blocks are never freed.

use crate::queue::{Claim, Ticket};
use crate::run_tokens::{RunMut, RunRef, SharedRun, UniqueRun};
use crate::sync::{Mutex, MutexGuard, OnceLock, ranks};
use crate::units::{BLOCK_PAGES, Frame, FrameRun, Order, PageNumber, Slot};
use crate::workingset::Eviction;

/// What is known of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PageState {
    /// No content.
    #[default]
    None,
    /// In the program.
    Resident {
        /// Its reserved, empty home.
        frame: Frame,
        /// Of its folio.
        order: Order,
    },
    /// No content, but still a page of a resident folio, which is partially mapped.
    Hole {
        /// Its reserved, empty home.
        frame: Frame,
        /// Of its folio.
        order: Order,
    },
    /// At home.
    Home {
        /// Where.
        frame: Frame,
        /// Of its folio.
        order: Order,
        /// A worker is compressing it.
        writeback: bool,
    },
    /// In the store.
    Swapped {
        /// Under which slot.
        slot: Slot,
        /// Of its folio.
        order: Order,
        /// A worker is fetching it.
        fetching: bool,
    },
}

impl PageState {
    /// The order of the folio the page belongs to, if it belongs to one.
    pub fn order(self) -> Option<Order> {
        match self {
            PageState::None => None,
            PageState::Resident { order, .. }
            | PageState::Hole { order, .. }
            | PageState::Home { order, .. }
            | PageState::Swapped { order, .. } => Some(order),
        }
    }

    /// The same state in a folio of another order.
    #[must_use]
    pub fn with_order(self, new: Order) -> PageState {
        match self {
            PageState::None => PageState::None,
            PageState::Resident { frame, .. } => PageState::Resident { frame, order: new },
            PageState::Hole { frame, .. } => PageState::Hole { frame, order: new },
            PageState::Home { frame, writeback, .. } => PageState::Home { frame, order: new, writeback },
            PageState::Swapped { slot, fetching, .. } => PageState::Swapped { slot, order: new, fetching },
        }
    }

    /// The same state with another frame.
    #[must_use]
    pub fn with_frame(self, new: Frame) -> PageState {
        match self {
            PageState::Resident { order, .. } => PageState::Resident { frame: new, order },
            PageState::Hole { order, .. } => PageState::Hole { frame: new, order },
            PageState::Home { order, writeback, .. } => PageState::Home { frame: new, order, writeback },
            PageState::None | PageState::Swapped { .. } => self,
        }
    }

    /// The state of the page `pages` further on in the same folio.
    #[must_use]
    pub fn offset(self, pages: u32) -> PageState {
        match self {
            PageState::None => PageState::None,
            PageState::Resident { frame, order } => PageState::Resident { frame: frame.offset(pages), order },
            PageState::Hole { frame, order } => PageState::Hole { frame: frame.offset(pages), order },
            PageState::Home { frame, order, writeback } => {
                PageState::Home { frame: frame.offset(pages), order, writeback }
            }
            PageState::Swapped { slot, order, fetching } => {
                PageState::Swapped { slot: slot.offset(pages), order, fetching }
            }
        }
    }
}

/// A [`PageState`] in one word. Bits 0..3 kind (0 `None`, 1 `Resident`, 2 `Home`, 3 `Swapped`, 4 `Hole`),
/// bit 3 busy (writeback or fetching), bit 4 queued, bit 5 active, bits 6..10 order, bits 10..16 the ticket with which
/// it was queued last, bits 16..32 when it was evicted last, bits 32..64 frame or slot. The all-zero word is `None`, not
/// queued.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Entry(u64);

impl Entry {
    const KIND: u64 = 7;
    const HOLE: u64 = 4;
    const BUSY: u64 = 1 << 3;
    const QUEUED: u64 = 1 << 4;
    const ACTIVE: u64 = 1 << 5;
    const ORDER_SHIFT: u32 = 6;
    const TICKET_SHIFT: u32 = 10;
    const TICKET: u64 = ((1 << Ticket::BITS) - 1) << Self::TICKET_SHIFT;
    const EVICTED_SHIFT: u32 = 16;
    const EVICTED: u64 = 0xffff << Self::EVICTED_SHIFT;
    /// From one frame or slot to the next.
    const NEXT_NUMBER: u64 = 1 << 32;
    /// What is no part of the state, and stays as long as there is content. (The ticket stays in any case: claims of
    /// content that is gone may still be in a queue.)
    const KEPT: u64 = Self::QUEUED | Self::ACTIVE | Self::EVICTED;

    fn encode(state: PageState) -> Entry {
        let pack = |kind: u64, busy: bool, order: Order, number: u32| {
            let busy = if busy { Entry::BUSY } else { 0 };
            Entry(kind | busy | u64::from(order.get()) << Entry::ORDER_SHIFT | u64::from(number) << 32)
        };
        match state {
            PageState::None => Entry(0),
            PageState::Resident { frame, order } => pack(1, false, order, frame.0),
            PageState::Home { frame, order, writeback } => pack(2, writeback, order, frame.0),
            PageState::Swapped { slot, order, fetching } => pack(3, fetching, order, slot.0),
            PageState::Hole { frame, order } => pack(Entry::HOLE, false, order, frame.0),
        }
    }

    /// What stays of an entry whose state is `state` from now on.
    fn kept_by(state: PageState) -> u64 {
        if state == PageState::None { Entry::TICKET } else { Entry::TICKET | Entry::KEPT }
    }

    fn decode(self) -> PageState {
        let number = (self.0 >> 32) as u32;
        let busy = self.0 & Entry::BUSY != 0;
        debug_assert!(self.0 & Entry::KIND <= Entry::HOLE, "entry {:x}", self.0);
        let Some(order) = Order::new((self.0 >> Entry::ORDER_SHIFT) as u8 & 0xf) else {
            unreachable!("entry {:x}", self.0)
        };
        match self.0 & Entry::KIND {
            0 => PageState::None,
            1 => PageState::Resident { frame: Frame(number), order },
            2 => PageState::Home { frame: Frame(number), order, writeback: busy },
            3 => PageState::Swapped { slot: Slot(number), order, fetching: busy },
            // There is no other kind.
            _ => PageState::Hole { frame: Frame(number), order },
        }
    }
}

/// The entries of one block, in the hands of whoever holds its lock.
pub struct Entries {
    first: PageNumber,
    /// See [`set_deferred`](Entries::set_deferred).
    deferred: bool,
    pages: [Entry; BLOCK_PAGES],
}

impl Entries {
    /// The first page of the block.
    pub fn first(&self) -> PageNumber {
        self.first
    }

    /// The page after its last.
    pub fn end(&self) -> PageNumber {
        self.first.offset(BLOCK_PAGES as u32)
    }

    fn index(&self, page: PageNumber) -> usize {
        debug_assert_eq!(page.head(crate::units::MAX_ORDER), self.first, "page of another block");
        page.index_in_block()
    }

    /// The state of `page`.
    pub fn get(&self, page: PageNumber) -> PageState {
        self.pages[self.index(page)].decode()
    }

    /// Changes the state of `page`. Whether it is queued or active and when it was evicted stays, unless its content is
    /// gone.
    #[inline]
    pub fn set(&mut self, page: PageNumber, state: PageState) {
        let index = self.index(page);
        self.pages[index] = Entry(Entry::encode(state).0 | self.pages[index].0 & Entry::kept_by(state));
    }

    /// Gives the 2^order pages at `head` the consecutive states that start with `state`.
    #[inline]
    pub fn set_folio(&mut self, head: PageNumber, order: Order, state: PageState) {
        debug_assert_eq!(head.head(order), head);
        match order {
            Order::ZERO => self.set(head, state),
            _ => self.set_large_folio(head, order, state),
        }
    }

    /// The same, of an order above 0: by a call, which is little beside the loop, but would be much beside one entry.
    fn set_large_folio(&mut self, head: PageNumber, order: Order, state: PageState) {
        let start = self.index(head);
        let (mut word, kept) = (Entry::encode(state).0, Entry::kept_by(state));
        let step = if state == PageState::None { 0 } else { Entry::NEXT_NUMBER };
        for entry in &mut self.pages[start..start + order.pages() as usize] {
            *entry = Entry(word | entry.0 & kept);
            word = word.wrapping_add(step);
        }
    }

    /// The right to read the folio at `head` while the block is locked, if it is at home.
    pub fn home(&self, head: PageNumber) -> Option<RunRef<'_>> {
        let PageState::Home { frame, order, .. } = self.get(head) else { return None };
        Some(RunRef::mint(FrameRun::new(frame, order), self))
    }

    /// The right to write the folio at `head` while the block is locked, if it is at home and
    /// nobody writes it back.
    pub fn home_mut(&mut self, head: PageNumber) -> Option<RunMut<'_>> {
        let PageState::Home { frame, order, writeback: false } = self.get(head) else { return None };
        Some(RunMut::mint(FrameRun::new(frame, order), self))
    }

    /// Forgets the folio at `head`, if it is at home and nobody writes it back; its frames are the
    /// caller's.
    pub fn take_home(&mut self, head: PageNumber) -> Option<UniqueRun> {
        let PageState::Home { frame, order, writeback: false } = self.get(head) else { return None };
        self.set_folio(head, order, PageState::None);
        Some(UniqueRun::mint(FrameRun::new(frame, order)))
    }

    /// Marks the folio of `order` at `head` as being written back, if it is at home and nobody does
    /// so; the right to read it is the caller's.
    pub fn begin_writeback(&mut self, head: PageNumber, order: Order) -> Option<SharedRun> {
        match self.get(head) {
            PageState::Home { frame, order: now, writeback: false } if now == order => {
                self.set_folio(head, order, PageState::Home { frame, order, writeback: true });
                self.set_unqueued(head);
                Some(SharedRun::mint(FrameRun::new(frame, order)))
            }
            _ => None,
        }
    }

    /// Whether the content of `page` is in `frame`, which a worker writes back.
    pub fn is_written_back(&self, page: PageNumber, frame: Frame) -> bool {
        matches!(self.get(page), PageState::Home { frame: now, writeback: true, .. } if now == frame)
    }

    /// A worker does not write `page` back after all. If that is still in `part`, it stays there:
    /// at home, nobody writes it back. If it is not, the frame is the caller's.
    pub fn cancel_writeback(&mut self, page: PageNumber, part: SharedRun) -> Option<UniqueRun> {
        let run = part.into_run();
        match self.get(page) {
            PageState::Home { frame, order, writeback: true } if frame == run.head => {
                self.set(page, PageState::Home { frame, order, writeback: false });
                None
            }
            _ => Some(UniqueRun::mint(run)),
        }
    }

    /// A worker has written back what was at `head`: the frames are the caller's. No page has its
    /// content there any more, and whoever has read one of them had the block locked.
    pub fn finish_writeback(&mut self, head: PageNumber, run: SharedRun) -> UniqueRun {
        let run = run.into_run();
        debug_assert!(
            (0..run.frames()).all(|index| !self.is_written_back(head.offset(index), run.head.offset(index))),
            "{run:?} is still in use"
        );
        UniqueRun::mint(run)
    }

    /// Whether the folio at `head` is in a reclaim queue.
    pub fn is_queued(&self, head: PageNumber) -> bool {
        self.pages[self.index(head)].0 & Entry::QUEUED != 0
    }

    fn ticket(&self, head: PageNumber) -> Ticket {
        Ticket::from_bits(self.pages[self.index(head)].0 >> Entry::TICKET_SHIFT)
    }

    /// Says that the folio at `head` is in a reclaim queue from now on, with which ticket; `None` if it is in one.
    pub fn set_queued(&mut self, head: PageNumber) -> Option<Ticket> {
        if self.is_queued(head) {
            return None;
        }
        let ticket = self.ticket(head).next();
        let index = self.index(head);
        let entry = &mut self.pages[index];
        entry.0 = entry.0 & !Entry::TICKET | Entry::QUEUED | ticket.bits() << Entry::TICKET_SHIFT;
        Some(ticket)
    }

    /// Says that the folio at `head` is in no reclaim queue: no claim on it holds.
    pub fn set_unqueued(&mut self, head: PageNumber) {
        let index = self.index(head);
        self.pages[index].0 &= !Entry::QUEUED;
    }

    /// Whether `claim`, to a folio of this block, is that with which it is queued.
    pub fn holds(&self, claim: Claim) -> bool {
        self.is_queued(claim.folio.head) && self.ticket(claim.folio.head) == claim.ticket
    }

    /// Whether the folio at `head` is known to be in use.
    pub fn is_active(&self, head: PageNumber) -> bool {
        self.pages[self.index(head)].0 & Entry::ACTIVE != 0
    }

    /// Says whether the 2^order pages at `head` are known to be in use.
    pub fn set_active(&mut self, head: PageNumber, order: Order, active: bool) {
        let start = self.index(head);
        for entry in &mut self.pages[start..start + order.pages() as usize] {
            entry.0 = entry.0 & !Entry::ACTIVE | if active { Entry::ACTIVE } else { 0 };
        }
    }

    /// When `page` was evicted last, if it ever was.
    pub fn evicted(&self, page: PageNumber) -> Eviction {
        Eviction((self.pages[self.index(page)].0 >> Entry::EVICTED_SHIFT) as u16)
    }

    /// Says that `page` is evicted now: it is not known to be in use any more.
    pub fn set_evicted(&mut self, page: PageNumber, now: Eviction) {
        let index = self.index(page);
        let entry = &mut self.pages[index];
        entry.0 = entry.0 & !(Entry::ACTIVE | Entry::EVICTED) | u64::from(now.0) << Entry::EVICTED_SHIFT;
    }

    /// Whether all 2^order pages at `head` are without content.
    pub fn all_none(&self, head: PageNumber, order: Order) -> bool {
        let start = self.index(head);
        self.pages[start..start + order.pages() as usize].iter().all(|entry| entry.0 & Entry::KIND == 0)
    }

    /// How many of the 2^order pages at `head` are holes.
    pub fn holes(&self, head: PageNumber, order: Order) -> u32 {
        let start = self.index(head);
        let entries = &self.pages[start..start + order.pages() as usize];
        entries.iter().filter(|entry| entry.0 & Entry::KIND == Entry::HOLE).count() as u32
    }

    /// Whether the block is in the queue of those with partially mapped folios.
    pub fn is_deferred(&self) -> bool {
        self.deferred
    }

    /// Says whether the block is in the queue of those with partially mapped folios; returns what it was.
    pub fn set_deferred(&mut self, deferred: bool) -> bool {
        std::mem::replace(&mut self.deferred, deferred)
    }

    /// Every folio that has a page in the block, as its first page and that page's state.
    pub fn folios(&self) -> impl Iterator<Item = (PageNumber, PageState)> + '_ {
        (0..BLOCK_PAGES as u32).filter_map(|index| {
            let page = self.first.offset(index);
            let state = self.get(page);
            state.order().filter(|&order| page.head(order) == page).map(|_| (page, state))
        })
    }
}

/// 2 MiB of managed address space.
pub struct Block(Mutex<Box<Entries>, ranks::Block>);

impl Block {
    /// Takes the block's lock.
    pub fn lock(&self) -> MutexGuard<'_, Box<Entries>, ranks::Block> {
        self.0.lock()
    }
}

// A block number of a 47-bit address space has 26 bits: 8 + 9 + 9.
const ROOT_BITS: u32 = 8;
const LEVEL_BITS: u32 = 9;
const _: () = assert!(ROOT_BITS + 2 * LEVEL_BITS == 47 - 21);

type Leaf = Box<[OnceLock<Block>; 1 << LEVEL_BITS]>;
type Middle = Box<[OnceLock<Leaf>; 1 << LEVEL_BITS]>;

/// The radix tree over all blocks.
pub struct PageTable {
    root: Box<[OnceLock<Middle>; 1 << ROOT_BITS]>,
}

fn level<T, const LEN: usize>() -> Box<[OnceLock<T>; LEN]> {
    let places: Box<[OnceLock<T>]> = (0..LEN).map(|_| OnceLock::new()).collect();
    let Ok(level) = places.try_into() else { unreachable!("as many as a level has") };
    level
}

impl Default for PageTable {
    fn default() -> Self {
        PageTable { root: level() }
    }
}

impl PageTable {
    fn path(page: PageNumber) -> (usize, usize, usize) {
        let block = page.0 / BLOCK_PAGES as u64;
        let mask = (1 << LEVEL_BITS) - 1;
        ((block >> (2 * LEVEL_BITS)) as usize, (block >> LEVEL_BITS) as usize & mask, block as usize & mask)
    }

    /// The block of `page`, if it was ever needed. Pages beyond a 47-bit address space have none.
    pub fn get(&self, page: PageNumber) -> Option<&Block> {
        let (root, middle, leaf) = Self::path(page);
        self.root.get(root)?.get()?[middle].get()?[leaf].get()
    }

    /// The block of `page`, made if need be; `None` beyond a 47-bit address space.
    pub fn get_or_create(&self, page: PageNumber) -> Option<&Block> {
        let (root, middle, leaf) = Self::path(page);
        let middle_level = self.root.get(root)?.get_or_init(level);
        let leaf_level = middle_level[middle].get_or_init(level);
        Some(leaf_level[leaf].get_or_init(|| {
            let first = page.head(crate::units::MAX_ORDER);
            Block(Mutex::new(Box::new(Entries { first, deferred: false, pages: [Entry::default(); BLOCK_PAGES] })))
        }))
    }

    /// Every block there is, in ascending order.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        let middles = self.root.iter().filter_map(OnceLock::get);
        let leaves = middles.flat_map(|middle| middle.iter().filter_map(OnceLock::get));
        leaves.flat_map(|leaf| leaf.iter().filter_map(OnceLock::get))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::FolioName;
    use proptest::prelude::*;

    fn any_state() -> impl Strategy<Value = PageState> {
        let order = (0u8..10).prop_map(|order| Order::new(order).unwrap());
        prop_oneof![
            Just(PageState::None),
            (any::<u32>(), order.clone()).prop_map(|(n, order)| PageState::Resident { frame: Frame(n), order }),
            (any::<u32>(), order.clone()).prop_map(|(n, order)| PageState::Hole { frame: Frame(n), order }),
            (any::<u32>(), order.clone(), any::<bool>()).prop_map(|(n, order, writeback)| PageState::Home {
                frame: Frame(n),
                order,
                writeback
            }),
            (any::<u32>(), order, any::<bool>()).prop_map(|(n, order, fetching)| PageState::Swapped {
                slot: Slot(n),
                order,
                fetching
            }),
        ]
    }

    proptest! {
        #[test]
        fn an_entry_decodes_to_what_was_encoded(state in any_state(), queued: bool) {
            let table = PageTable::default();
            let page = PageNumber(0x0007_f123_4567);
            let mut entries = table.get_or_create(page).unwrap().lock();
            entries.set(page, state);
            if queued {
                prop_assert!(entries.set_queued(page).is_some());
            }
            prop_assert_eq!(entries.get(page), state);
            prop_assert_eq!(entries.is_queued(page), queued);
        }

        #[test]
        fn a_claim_holds_until_its_folio_is_unqueued(states in prop::collection::vec(any_state(), 1..60)) {
            let table = PageTable::default();
            let page = PageNumber(0x0007_f123_4567);
            let mut entries = table.get_or_create(page).unwrap().lock();
            let mut last: Vec<Claim> = Vec::new();
            for state in states {
                entries.set(page, state);
                if state == PageState::None {
                    prop_assert!(!last.iter().any(|&claim| entries.holds(claim)));
                }
                if let Some(ticket) = entries.set_queued(page) {
                    last.push(Claim { folio: FolioName { head: page, order: Order::ZERO }, ticket });
                }
                prop_assert_eq!(last.iter().filter(|&&claim| entries.holds(claim)).count(), 1);
                prop_assert!(entries.holds(*last.last().unwrap()));
                prop_assert_eq!(entries.get(page), state);
                entries.set_unqueued(page);
            }
        }
    }

    #[test]
    fn blocks_are_found_again_and_beyond_the_address_space_there_are_none() {
        let table = PageTable::default();
        let pages = [PageNumber(0), PageNumber(511), PageNumber(512), PageNumber((1 << 35) - 1)];
        for page in pages {
            assert!(table.get_or_create(page).is_some());
            assert_eq!(table.get(page).unwrap().lock().first(), page.head(crate::units::MAX_ORDER));
        }
        assert_eq!(table.blocks().count(), 3);
        assert!(table.get_or_create(PageNumber(1 << 35)).is_none());
        assert!(table.get(PageNumber(1024)).is_none());
    }
}
