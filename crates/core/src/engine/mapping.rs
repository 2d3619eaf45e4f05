//! Mapping changes of the program: adoption, unmap, discard, remap, and the splits that they need.

use super::Engine;
use super::partial::is_deferrable;
use crate::page_table::{Entries, PageState};
use crate::ports::{AddressSpace, Clock, Mapping, Marks, MoveError, Ports, SharedPages};
use crate::sync;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{BLOCK_PAGES, FrameRun, MAX_ORDER, Order, OrderSet, PageNumber};
use std::ops::Range;

impl<P: Ports> Engine<P> {
    /// Calls `act` with every existing block that has pages in `range`, locked, and with these
    /// pages.
    pub(super) fn in_blocks(&self, range: Range<PageNumber>, mut act: impl FnMut(&mut Entries, Range<PageNumber>)) {
        let mut page = range.start;
        while page < range.end {
            let next = page.head(MAX_ORDER).offset(MAX_ORDER.pages());
            if let Some(block) = self.table.get(page) {
                act(&mut block.lock(), page..next.min(range.end));
            }
            page = next;
        }
    }

    /// Takes over the pages that the program has in `range` already: each becomes part of the
    /// largest enabled folio that is wholly present, or of the folio of which it is a hole. First
    /// touches in `range` must already come to [`fault`](Engine::fault).
    ///
    /// # Errors
    /// The part left to do while the program changes its mappings. The caller receives the change
    /// and retries.
    pub fn adopt(&self, range: Range<PageNumber>) -> Result<(), Range<PageNumber>> {
        // From now on pages can only disappear. A mapping may be far larger than its used part, so
        // blocks are made only where there are pages.
        let mut blocks: Vec<PageNumber> = Vec::new();
        self.ports.address_space().for_each_present(range.clone(), &mut |run| {
            let first = blocks.last().map_or(run.start, |last| run.start.max(last.offset(MAX_ORDER.pages())));
            blocks.extend((first.head(MAX_ORDER).0..run.end.0).step_by(BLOCK_PAGES).map(PageNumber));
        });
        for head in blocks {
            let (page, next) = (head.max(range.start), head.offset(MAX_ORDER.pages()));
            let Some(block) = self.table.get_or_create(page) else { break };
            // A new mapping in the place of a removed one must not be taken for the old one.
            let Some(_steady) = self.ports.address_space().steady() else { return Err(page..range.end) };
            let mut entries = block.lock();
            for part in self.discards.outside(page..next.min(range.end)) {
                self.ports.address_space().for_each_present(part, &mut |run| {
                    let adopted_pages = self.adopt_run(&mut entries, run);
                    self.counters().vm.pgadopted.add(adopted_pages);
                });
            }
        }
        Ok(())
    }

    fn adopt_run(&self, entries: &mut Entries, run: Range<PageNumber>) -> u64 {
        let mut adopted = 0;
        let mut page = run.start;
        let mut mapping = Mapping { pages: page..page, sizes: OrderSet::EMPTY };
        while page < run.end {
            if page >= mapping.pages.end {
                let Some(found) = self.ports.address_space().mapping(page) else { break };
                mapping = found;
            }
            if self.keep_holes(entries, page, &mapping) {
                self.fill_holes(entries, page.folio(Order::ZERO));
                adopted += 1;
                page = page.offset(1);
                continue;
            }
            let end = run.end.min(mapping.pages.end);
            let fits = |&order: &Order| {
                page.head(order) == page && page.offset(order.pages()) <= end && entries.all_none(page, order)
            };
            let home = mapping.sizes.descending().filter(fits).find_map(|order| self.homes.alloc_empty(order));
            let Some(home) = home else {
                page = page.offset(1);
                continue;
            };
            let order = home.order;
            self.rmap.set_folio(home, page);
            entries.set_folio(page, order, PageState::Resident { frame: home.head, order });
            self.resident_pages.fetch_add(u64::from(order.pages()), Relaxed);
            self.counters().of(order).nr_anon.inc();
            self.enqueue(&self.probation, entries, page, order);
            adopted += u64::from(order.pages());
            page = page.offset(order.pages());
        }
        adopted
    }

    /// Drops everything in `range`, which the program unmapped.
    pub fn unmapped(&self, range: Range<PageNumber>) {
        self.in_blocks(range, |entries, part| self.drop_pages(entries, part));
    }

    /// Drops everything in `range`, whose content the program is about to discard (MADV_DONTNEED,
    /// MADV_FREE), so that it reads as zeros. The program drops resident pages only after the agent
    /// received the event, so the engine must not move these pages. The engine forgets them, and
    /// later adopts those that remain ([`maintain`](Engine::maintain)).
    pub fn discarded(&self, range: Range<PageNumber>) {
        self.unmapped(range.clone());
        self.discards.add(range, self.ports.clock().now_ns());
    }

    /// Drops all swapped-out content that the program has discarded without a message. No other
    /// call may be in progress: in the child of a fork, missing marks do not mean discarded pages.
    pub fn drop_all_lost(&self) {
        let Some(marks) = self.ports.marks() else { return };
        self.for_each_out(|entries, pages| {
            let mut lost = Vec::new();
            marks.for_each_lost(entries, pages, &mut |run| lost.push(run));
            lost.into_iter().for_each(|run| self.drop_pages(entries, run));
        });
    }

    /// Marks all staged and swapped-out pages, in the child of a fork.
    pub fn mark_all(&self) {
        let Some(marks) = self.ports.marks() else { return };
        self.for_each_out(|entries, pages| marks.set(entries, pages));
    }

    /// Calls `act` with each run of staged and swapped-out pages of one block.
    fn for_each_out(&self, mut act: impl FnMut(&mut Entries, Range<PageNumber>)) {
        self.table.blocks().for_each(|block| for_each_run(&mut block.lock(), PageState::is_out, &mut act));
    }

    /// Lets the program write to the pages of `range` that are not swapped out. A page that the
    /// engine does not know may be one of the program's, protected before the engine forgot it.
    /// Fails with [`MoveError::Changing`] if some are still protected because the program is
    /// changing its mappings; then the caller must receive that event and retry.
    pub fn unprotect(&self, range: Range<PageNumber>) -> Result<(), MoveError> {
        let Some(shared) = self.ports.shared_pages() else { return Ok(()) };
        let may_be_mapped = |state: PageState| !state.is_out();
        let mut result = Ok(());
        self.for_each_of(range, may_be_mapped, |entries, run| {
            if shared.unprotect(entries, run) == Err(MoveError::Changing) {
                result = Err(MoveError::Changing);
            }
        });
        result
    }

    /// Calls `act` with each run of resident pages of `range` in one block, under the block's lock.
    pub fn for_each_resident(&self, range: Range<PageNumber>, act: impl FnMut(&Entries, Range<PageNumber>)) {
        self.for_each_of(range, |state| matches!(state, PageState::Resident { .. }), act);
    }

    /// Calls `act` with each run of wanted pages of `range` in one block, under the block's lock.
    fn for_each_of(
        &self,
        range: Range<PageNumber>,
        is_wanted: impl Fn(PageState) -> bool,
        mut act: impl FnMut(&Entries, Range<PageNumber>),
    ) {
        self.in_blocks(range, |entries, part| {
            for_each_run(entries, &is_wanted, &mut |entries: &mut Entries, run: Range<PageNumber>| {
                let run = run.start.max(part.start)..run.end.min(part.end);
                if run.start < run.end {
                    act(entries, run);
                }
            });
        });
    }

    /// Moves the state of `pages` pages from `from` to `to`, where nothing is managed yet (mremap).
    pub fn remapped(&self, from: PageNumber, to: PageNumber, pages: u32) {
        let (from_end, to_end) = (from.offset(pages), to.offset(pages));
        self.unmapped(to..to_end);
        self.in_blocks(to..to_end, |entries, part| {
            self.split_partial(entries, part);
        });
        // A folio keeps its order only if it is naturally aligned at its new address.
        let delta = from.0 ^ to.0;
        let fitting = Order::all().rev().find(|order| delta.trailing_zeros() >= u32::from(order.get()));
        let most = fitting.unwrap_or(Order::ZERO);
        let mut page = from;
        while page < from_end {
            let Some(block) = self.table.get(page) else {
                page = page.head(MAX_ORDER).offset(MAX_ORDER.pages());
                continue;
            };
            let mut entries = block.lock();
            self.split_borders(&mut entries, from..from_end);
            self.split_partial(&mut entries, page.folio(Order::ZERO));
            let state = entries.get(page);
            let Some(order) = state.order() else {
                page = page.offset(1);
                continue;
            };
            if matches!(state, PageState::Home { writeback: true, .. } | PageState::Swapped { fetching: true, .. }) {
                // A worker owns the folio's frames or slots, but only briefly.
                drop(entries);
                sync::back_off();
                continue;
            }
            if order > most {
                self.split_to(&mut entries, page, order, most);
                continue;
            }
            entries.set_folio(page, order, PageState::None);
            drop(entries);
            let target = to.offset((page.0 - from.0) as u32);
            self.place(target, order, state);
            page = page.offset(order.pages());
        }
    }

    /// Gives the folio at `head` a state that was removed elsewhere.
    fn place(&self, head: PageNumber, order: Order, state: PageState) {
        let Some(block) = self.table.get_or_create(head) else { unreachable!("the program mapped {head:?}") };
        let mut entries = block.lock();
        debug_assert!(entries.all_none(head, order), "{head:?} was unmapped");
        if let PageState::Resident { frame, .. } | PageState::Home { frame, .. } = state {
            self.rmap.set_folio(FrameRun::new(frame, order), head);
        }
        entries.set_folio(head, order, state);
        match state {
            PageState::Resident { .. } => self.enqueue(&self.probation, &mut entries, head, order),
            PageState::Home { .. } => self.enqueue(&self.staged, &mut entries, head, order),
            PageState::None | PageState::Hole { .. } | PageState::Swapped { .. } => {}
        }
    }

    /// Drops `pages`, which are of one block. A resident folio that loses a part stays together for
    /// now.
    pub(super) fn drop_pages(&self, entries: &mut Entries, pages: Range<PageNumber>) {
        for border in [pages.start, pages.end] {
            if border.head(MAX_ORDER) == entries.first() && !is_deferrable(entries.get(border)) {
                self.split_border(entries, border);
            }
        }
        let mut page = pages.start;
        while page < pages.end {
            let state = entries.get(page);
            let Some(order) = state.order() else {
                page = page.offset(1);
                continue;
            };
            let head = page.head(order);
            let end = head.offset(order.pages());
            if head >= pages.start && end <= pages.end {
                self.drop_folio(entries, head, state);
            } else {
                self.drop_part(entries, head, order, page..end.min(pages.end));
            }
            page = end;
        }
    }

    /// Drops a folio whose mapping is gone, and frees its frames or slots. If a worker is busy with
    /// the folio, that worker frees its frames or slots later.
    pub(super) fn drop_folio(&self, entries: &mut Entries, head: PageNumber, state: PageState) {
        let Some(order) = state.order() else { return };
        let hole_pages = entries.holes(head, order);
        let staged = entries.take_staged(head);
        if staged.is_none() {
            entries.set_folio(head, order, PageState::None);
        }
        let pages = u64::from(order.pages());
        match state {
            PageState::None => {}
            PageState::Resident { frame, .. } | PageState::Hole { frame, .. } => {
                self.resident_pages.fetch_sub(pages - u64::from(hole_pages), Relaxed);
                self.counters().of(order).nr_anon.sub(1);
                if hole_pages > 0 {
                    self.counters().of(order).nr_anon_partially_mapped.sub(1);
                }
                self.drop_cache_entry(frame);
                self.homes.free_empty(FrameRun::new(frame, order));
            }
            PageState::Home { .. } => {
                self.staged_pages.fetch_sub(pages, Relaxed);
                staged.into_iter().for_each(|run| self.free_content(run));
            }
            PageState::Swapped { slot, fetching, .. } => {
                if !fetching {
                    self.free_slots(slot, order.pages());
                }
            }
        }
    }

    /// Drops the resident pages of `range` that no longer exist; returns their number.
    pub(super) fn drop_absent(&self, entries: &mut Entries, range: Range<PageNumber>) -> u32 {
        let mut absent = [false; MAX_ORDER.pages() as usize];
        let first = range.start.index_in_block();
        absent[first..first + (range.end.0 - range.start.0) as usize].fill(true);
        self.ports.address_space().for_each_present(range.clone(), &mut |run| {
            for page in run.start.0..run.end.0 {
                absent[PageNumber(page).index_in_block()] = false;
            }
        });
        let mut dropped = 0;
        let mut page = range.start;
        while page < range.end {
            if absent[page.index_in_block()] && matches!(entries.get(page), PageState::Resident { .. }) {
                self.drop_pages(entries, page.folio(Order::ZERO));
                dropped += 1;
            }
            page = page.offset(1);
        }
        dropped
    }

    /// Splits the folios that cross a border of `range`, as little as possible: each rest stays in
    /// the largest naturally aligned folios.
    pub(super) fn split_borders(&self, entries: &mut Entries, range: Range<PageNumber>) {
        for border in [range.start, range.end] {
            if border.head(MAX_ORDER) == entries.first() {
                self.split_border(entries, border);
            }
        }
    }

    fn split_border(&self, entries: &mut Entries, border: PageNumber) {
        while let Some(order) = entries.get(border).order() {
            let head = border.head(order);
            let Some(lower) = order.lower().filter(|_| head != border) else { break };
            if self.split_partial(entries, border.folio(Order::ZERO)) {
                continue;
            }
            if order == MAX_ORDER && matches!(entries.get(head), PageState::Resident { .. }) {
                self.ports.address_space().split_huge(entries, head, border);
            }
            self.split_to(entries, head, order, lower);
        }
    }

    /// Splits the folio at `head`, which has no holes, from order `from` into folios of order `to`.
    pub(super) fn split_to(&self, entries: &mut Entries, head: PageNumber, from: Order, to: Order) {
        let state = entries.get(head);
        if let PageState::Resident { frame, .. } | PageState::Home { frame, writeback: false, .. } = state {
            self.drop_cache_entry(frame);
        }
        entries.set_unqueued(head);
        for index in (0..from.pages()).step_by(to.pages() as usize) {
            let part = head.offset(index);
            let part_state = state.offset(index).with_order(to);
            entries.set_folio(part, to, part_state);
            match part_state {
                PageState::Resident { .. } => self.enqueue(self.resident_queue(entries, part), entries, part, to),
                PageState::Home { writeback: false, .. } => self.enqueue(&self.staged, entries, part, to),
                PageState::None | PageState::Hole { .. } | PageState::Home { .. } | PageState::Swapped { .. } => {}
            }
        }
        if matches!(state, PageState::Resident { .. }) {
            self.counters().of(from).nr_anon.sub(1);
            self.counters().of(to).nr_anon.add(u64::from(from.pages() / to.pages()));
        }
    }
}

/// Calls `act` with each run of pages of the block whose state satisfies `is_wanted`.
fn for_each_run(
    entries: &mut Entries,
    is_wanted: impl Fn(PageState) -> bool,
    act: &mut impl FnMut(&mut Entries, Range<PageNumber>),
) {
    let (mut page, end) = (entries.first(), entries.end());
    while page < end {
        let start = page;
        while page < end && is_wanted(entries.get(page)) {
            page = page.offset(1);
        }
        if start < page {
            act(entries, start..page);
        } else {
            page = page.offset(1);
        }
    }
}
