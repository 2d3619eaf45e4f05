//! The page table: the state of every page of the managed address space, as a radix tree of blocks.
//!
//! A [`Block`] covers 2 MiB of address space: 512 entries of 8 bytes (0.2% of the memory they
//! describe) under one lock. A folio is naturally aligned and at most 2 MiB, so it lies in one
//! block and needs one lock. The entry of every page of a folio of order `k` holds `k` and the
//! page's own frame or slot. Frames or slots are consecutive over the folio, so the entry of any
//! page determines the frame or slot of the head.
//!
//! States of a page, and who may change them (always under the block's lock):
//!
//! | state | content | left by |
//! |---|---|---|
//! | `None` | none: reads as zeros | first touch, adoption |
//! | `Resident` | in the program; its home frame is unpopulated and reserved | staging, unmap |
//! | `Hole` | none; the resident folio keeps its home frame | first touch, adoption, split |
//! | `Home` | staged: in the arena, out of the program's reach | a fault, writeback, unmap |
//! | `Home` + writeback | staged; a worker reads it | the worker; a fault copies; unmap |
//! | `Swapped` | in the store, under its slot | a fault, unmap |
//! | `Swapped` + fetching | in the store; a worker reads it | the worker; unmap |
//!
//! **Only the worker that writes back frees the frame; only the worker that fetches frees the
//! slot.**
//!
//! Lock rank 2 (block). A lookup takes no lock. Blocks are never freed.

use crate::queue::{Claim, Ticket};
use crate::run_tokens::{RunMut, RunRef, SharedRun, UniqueRun};
use crate::sync::{Mutex, MutexGuard, OnceLock, ranks};
use crate::workingset::Eviction;
use foliomem_types::units::{BLOCK_PAGES, Frame, FrameRun, Order, PageNumber, Slot};

/// The state of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PageState {
    /// The page has no content.
    #[default]
    None,
    /// The page is mapped in the program.
    Resident {
        /// The reserved, unpopulated home frame.
        frame: Frame,
        /// The order of the page's folio.
        order: Order,
    },
    /// A hole: the page has no content, but belongs to a resident, partially mapped folio.
    Hole {
        /// The reserved, unpopulated home frame.
        frame: Frame,
        /// The order of the page's folio.
        order: Order,
    },
    /// The page is staged in the arena.
    Home {
        /// The home frame with the content.
        frame: Frame,
        /// The order of the page's folio.
        order: Order,
        /// Whether a worker is compressing the folio.
        writeback: bool,
    },
    /// The page is swapped out: its content is in the store.
    Swapped {
        /// The slot of the page.
        slot: Slot,
        /// The order of the page's folio.
        order: Order,
        /// Whether a worker is fetching the folio.
        fetching: bool,
    },
}

impl PageState {
    /// Returns the order of the page's folio, if it belongs to one.
    pub fn order(self) -> Option<Order> {
        match self {
            PageState::None => None,
            PageState::Resident { order, .. }
            | PageState::Hole { order, .. }
            | PageState::Home { order, .. }
            | PageState::Swapped { order, .. } => Some(order),
        }
    }

    /// Returns whether the page is staged or swapped out: the engine has its content.
    pub fn is_out(self) -> bool {
        matches!(self, PageState::Home { .. } | PageState::Swapped { .. })
    }

    /// Returns this state in a folio of order `new`.
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

    /// Returns this state with the frame `new`. A state without a frame stays as it is.
    #[must_use]
    pub fn with_frame(self, new: Frame) -> PageState {
        match self {
            PageState::Resident { order, .. } => PageState::Resident { frame: new, order },
            PageState::Hole { order, .. } => PageState::Hole { frame: new, order },
            PageState::Home { order, writeback, .. } => PageState::Home { frame: new, order, writeback },
            PageState::None | PageState::Swapped { .. } => self,
        }
    }

    /// Returns the state of the page `pages` pages later in the same folio.
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

/// A [`PageState`] in one word. Bits 0..3 kind (0 `None`, 1 `Resident`, 2 `Home`, 3 `Swapped`, 4
/// `Hole`), bit 3 busy (writeback or fetching), bit 4 queued, bit 5 active, bits 6..10 order, bits
/// 10..16 the last ticket, bits 16..32 the time of the last eviction, bits 32..64 frame or slot.
/// The all-zero word is `None`, not queued.
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
    /// The difference between the words of neighbouring frames or slots.
    const NEXT_NUMBER: u64 = 1 << 32;
    /// The bits beside the state; they stay as long as the page has content. (The ticket always
    /// stays: a queue may still have claims on content that is gone.)
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

    /// Returns the bits that an entry keeps when its state becomes `state`.
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
            // The only kind left is 4.
            _ => PageState::Hole { frame: Frame(number), order },
        }
    }
}

/// The entries of one block, accessible to the holder of its lock.
pub struct Entries {
    first: PageNumber,
    /// Whether the block is in the queue of blocks with partially mapped folios.
    deferred: bool,
    pages: [Entry; BLOCK_PAGES],
}

impl Entries {
    /// Returns the first page of the block.
    pub fn first(&self) -> PageNumber {
        self.first
    }

    /// Returns the page after the block.
    pub fn end(&self) -> PageNumber {
        self.first.offset(BLOCK_PAGES as u32)
    }

    fn index(&self, page: PageNumber) -> usize {
        debug_assert_eq!(page.head(foliomem_types::units::MAX_ORDER), self.first, "page of another block");
        page.index_in_block()
    }

    /// Returns the state of `page`.
    pub fn get(&self, page: PageNumber) -> PageState {
        self.pages[self.index(page)].decode()
    }

    /// Sets the state of `page`. The queued, active and evicted bits stay unless the content is
    /// gone.
    #[inline]
    pub fn set(&mut self, page: PageNumber, state: PageState) {
        let index = self.index(page);
        self.pages[index] = Entry(Entry::encode(state).0 | self.pages[index].0 & Entry::kept_by(state));
    }

    /// Sets the 2^order pages at `head` to consecutive states, the first of which is `state`.
    #[inline]
    pub fn set_folio(&mut self, head: PageNumber, order: Order, state: PageState) {
        debug_assert_eq!(head.head(order), head);
        match order {
            Order::ZERO => self.set(head, state),
            _ => self.set_large_folio(head, order, state),
        }
    }

    /// Sets the states of a folio above order 0. This is a separate function, because the cost of a
    /// call is small compared with this loop, but large compared with the one store of order 0.
    fn set_large_folio(&mut self, head: PageNumber, order: Order, state: PageState) {
        let start = self.index(head);
        let (mut word, kept) = (Entry::encode(state).0, Entry::kept_by(state));
        let step = if state == PageState::None { 0 } else { Entry::NEXT_NUMBER };
        for entry in &mut self.pages[start..start + order.pages() as usize] {
            *entry = Entry(word | entry.0 & kept);
            word = word.wrapping_add(step);
        }
    }

    /// Returns the right to read the folio at `head` while the block is locked, if it is staged.
    pub fn staged(&self, head: PageNumber) -> Option<RunRef<'_>> {
        let PageState::Home { frame, order, .. } = self.get(head) else { return None };
        Some(RunRef::mint(FrameRun::new(frame, order), self))
    }

    /// Returns the right to write the folio at `head` while the block is locked, if it is staged
    /// and not under writeback.
    pub fn staged_mut(&mut self, head: PageNumber) -> Option<RunMut<'_>> {
        let PageState::Home { frame, order, writeback: false } = self.get(head) else { return None };
        Some(RunMut::mint(FrameRun::new(frame, order), self))
    }

    /// Removes the folio at `head` and gives its frames to the caller, if it is staged and not
    /// under writeback.
    pub fn take_staged(&mut self, head: PageNumber) -> Option<UniqueRun> {
        let PageState::Home { frame, order, writeback: false } = self.get(head) else { return None };
        self.set_folio(head, order, PageState::None);
        Some(UniqueRun::mint(FrameRun::new(frame, order)))
    }

    /// Marks the folio of `order` at `head` as under writeback, if it is staged and not under
    /// writeback yet. Returns the right to read it.
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

    /// Returns whether `page` is under writeback and its content is in `frame`.
    pub fn is_written_back(&self, page: PageNumber, frame: Frame) -> bool {
        matches!(self.get(page), PageState::Home { frame: now, writeback: true, .. } if now == frame)
    }

    /// Ends the writeback of `page` without a result. If the content of `page` is still in `part`,
    /// the page stays staged. Otherwise, the frame belongs to the caller.
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

    /// Ends a successful writeback of the folio at `head` and gives its frames to the caller. No
    /// page may still have its content in `run`; earlier readers of `run` held the block's lock.
    pub fn finish_writeback(&mut self, head: PageNumber, run: SharedRun) -> UniqueRun {
        let run = run.into_run();
        debug_assert!(
            (0..run.frames()).all(|index| !self.is_written_back(head.offset(index), run.head.offset(index))),
            "{run:?} is still in use"
        );
        UniqueRun::mint(run)
    }

    /// Returns whether the folio at `head` is in a reclaim queue.
    pub fn is_queued(&self, head: PageNumber) -> bool {
        self.pages[self.index(head)].0 & Entry::QUEUED != 0
    }

    fn ticket(&self, head: PageNumber) -> Ticket {
        Ticket::from_bits(self.pages[self.index(head)].0 >> Entry::TICKET_SHIFT)
    }

    /// Marks the folio at `head` as queued and returns its new ticket; `None` if it is queued
    /// already.
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

    /// Marks the folio at `head` as not queued, so that every claim on it is stale.
    pub fn set_unqueued(&mut self, head: PageNumber) {
        let index = self.index(head);
        self.pages[index].0 &= !Entry::QUEUED;
    }

    /// Returns whether `claim`, on a folio of this block, holds: the folio is queued with its
    /// ticket.
    pub fn holds(&self, claim: Claim) -> bool {
        self.is_queued(claim.folio.head) && self.ticket(claim.folio.head) == claim.ticket
    }

    /// Returns whether the folio at `head` is active.
    pub fn is_active(&self, head: PageNumber) -> bool {
        self.pages[self.index(head)].0 & Entry::ACTIVE != 0
    }

    /// Marks the 2^order pages at `head` as active.
    pub fn set_active(&mut self, head: PageNumber, order: Order) {
        let start = self.index(head);
        for entry in &mut self.pages[start..start + order.pages() as usize] {
            entry.0 |= Entry::ACTIVE;
        }
    }

    /// Returns the time of the last eviction of `page`, if there was one.
    pub fn evicted(&self, page: PageNumber) -> Eviction {
        Eviction((self.pages[self.index(page)].0 >> Entry::EVICTED_SHIFT) as u16)
    }

    /// Records that `page` is evicted at `now` and is no longer active.
    pub fn set_evicted(&mut self, page: PageNumber, now: Eviction) {
        let index = self.index(page);
        let entry = &mut self.pages[index];
        entry.0 = entry.0 & !(Entry::ACTIVE | Entry::EVICTED) | u64::from(now.0) << Entry::EVICTED_SHIFT;
    }

    /// Returns whether none of the 2^order pages at `head` has content.
    pub fn all_none(&self, head: PageNumber, order: Order) -> bool {
        let start = self.index(head);
        self.pages[start..start + order.pages() as usize].iter().all(|entry| entry.0 & Entry::KIND == 0)
    }

    /// Returns the number of holes among the 2^order pages at `head`.
    pub fn holes(&self, head: PageNumber, order: Order) -> u32 {
        let start = self.index(head);
        let entries = &self.pages[start..start + order.pages() as usize];
        entries.iter().filter(|entry| entry.0 & Entry::KIND == Entry::HOLE).count() as u32
    }

    /// Returns whether the block is in the queue of blocks with partially mapped folios.
    pub fn is_deferred(&self) -> bool {
        self.deferred
    }

    /// Records that the block is in the queue of blocks with partially mapped folios. Returns
    /// whether the block was not in that queue before.
    pub fn set_deferred(&mut self) -> bool {
        !std::mem::replace(&mut self.deferred, true)
    }

    /// Records that the block has left the queue of blocks with partially mapped folios.
    pub fn set_not_deferred(&mut self) {
        self.deferred = false;
    }

    /// Iterates over the folios of the block: the first page and its state.
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
    let Ok(level) = places.try_into() else { unreachable!("LEN places were collected") };
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

    /// Returns the block of `page` if it exists. Pages beyond a 47-bit address space have none.
    pub fn get(&self, page: PageNumber) -> Option<&Block> {
        let (root, middle, leaf) = Self::path(page);
        self.root.get(root)?.get()?[middle].get()?[leaf].get()
    }

    /// Returns the block of `page`; makes it if needed. Returns `None` beyond a 47-bit address
    /// space.
    pub fn get_or_create(&self, page: PageNumber) -> Option<&Block> {
        let (root, middle, leaf) = Self::path(page);
        let middle_level = self.root.get(root)?.get_or_init(level);
        let leaf_level = middle_level[middle].get_or_init(level);
        Some(leaf_level[leaf].get_or_init(|| {
            let first = page.head(foliomem_types::units::MAX_ORDER);
            Block(Mutex::new(Box::new(Entries { first, deferred: false, pages: [Entry::default(); BLOCK_PAGES] })))
        }))
    }

    /// Returns the first page of the first existing block that ends after `from`.
    pub fn first_from(&self, from: PageNumber) -> Option<PageNumber> {
        let behind = |block: u64, bits: u32| ((block >> bits) + 1) << bits;
        let mut block = from.0 / BLOCK_PAGES as u64;
        loop {
            let page = PageNumber(block * BLOCK_PAGES as u64);
            let (root, middle, leaf) = Self::path(page);
            let Some(middle_level) = self.root.get(root)?.get() else {
                block = behind(block, 2 * LEVEL_BITS);
                continue;
            };
            block = match middle_level[middle].get() {
                None => behind(block, LEVEL_BITS),
                Some(leaf_level) if leaf_level[leaf].get().is_none() => block + 1,
                Some(_) => return Some(page),
            };
        }
    }

    /// Iterates over all existing blocks, ascending.
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
        fn an_encoded_entry_decodes_to_itself(state in any_state(), queued: bool) {
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
    fn blocks_are_found_again_and_end_with_the_address_space() {
        let table = PageTable::default();
        let pages = [PageNumber(0), PageNumber(511), PageNumber(512), PageNumber((1 << 35) - 1)];
        for page in pages {
            assert!(table.get_or_create(page).is_some());
            assert_eq!(table.get(page).unwrap().lock().first(), page.head(foliomem_types::units::MAX_ORDER));
        }
        assert_eq!(table.blocks().count(), 3);
        let first_from = |page| table.first_from(PageNumber(page)).map(|page| page.0);
        assert_eq!([0, 511, 512, 1023].map(first_from), [Some(0), Some(0), Some(512), Some(512)]);
        assert_eq!([1024, 1 << 30, (1 << 35) - 1].map(first_from), [Some((1 << 35) - 512); 3]);
        assert_eq!(first_from(1 << 35), None);
        assert!(table.get_or_create(PageNumber(1 << 35)).is_none());
        assert!(table.get(PageNumber(1024)).is_none());
    }
}
