//! Making room: staging the oldest folios at home, and writing staged ones back to the store.

use super::Engine;
use super::write_back::Writing;
use crate::homes::Urgency;
use crate::machine::{Compressed, Machine, MoveError, Stopped};
use crate::page_table::{Block, Entries, PageState};
use crate::queue::FolioName;
use crate::store::PieceInfo;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::{FrameRun, MAX_ORDER, Order, PAGE_BYTES, PageNumber, Slot};
use crate::workingset::PROBATION_SHARE;
use std::ops::Range;

/// Folios looked at without staging any before reclaim gives up: all the rest is pinned, too.
const STAGE_ATTEMPTS: usize = 256;
/// Pages that are copied in the store before reclaim gives up: 4 MiB, a millisecond.
const COMPACT_PAGES: u32 = 1024;

/// Pages given back at a time though nobody asks for them: 32 MiB, some milliseconds.
const GIVE_BACK_PAGES: u32 = 16 * MAX_ORDER.pages();

/// What staging one folio came to.
#[derive(PartialEq, Eq, Debug)]
enum Staged {
    /// This many pages are at home now.
    Pages(u32),
    /// The folio was gone, or has been split into smaller ones that were queued again.
    Nothing,
    /// It stays where it is.
    Pinned,
}

/// What writing back one folio came to.
#[derive(PartialEq, Eq, Debug)]
enum WrittenBack {
    /// Bytes of frames that became free, less what the store took.
    Freed(i64),
    /// The folio was gone, or busy.
    Nothing,
    /// There is no room for it anywhere.
    NoRoom,
}

impl<M: Machine> Engine<M> {
    /// Makes at least `target_pages` free, if it can; returns how many were, net of what the store
    /// took. Nothing is freed where everything is pinned, or nothing compresses.
    pub fn reclaim(&self, worker: &mut M::Worker, target_pages: u64) -> u64 {
        let target_bytes = target_pages as i64 * PAGE_BYTES as i64;
        let mut writing = Writing::default();
        let mut freed_bytes: i64 = 0;
        let mut fruitless = 0;
        while freed_bytes + i64::from(writing.pages()) * (PAGE_BYTES as i64) < target_bytes
            && fruitless < STAGE_ATTEMPTS
        {
            if self.store_presses(&writing)
                && let Some(bytes) = self.write_out(worker, &mut writing)
            {
                freed_bytes += bytes as i64;
                fruitless = if bytes > 0 { 0 } else { fruitless + 1 };
                continue;
            }
            if self.urgency() != Urgency::Normal {
                if !writing.is_none() {
                    freed_bytes += self.finish_write_out(worker, &mut writing) as i64;
                    continue;
                }
                self.shed_copies();
                freed_bytes += i64::from(self.compact_wasteful_store()) * PAGE_BYTES as i64;
                break;
            }
            if self.staged_pages() < self.staged_target_pages() {
                self.stage_oldest(2 * target_pages);
            }
            let before = freed_bytes;
            match self.write_back_oldest(worker) {
                Some(WrittenBack::Freed(bytes)) => freed_bytes += bytes,
                Some(WrittenBack::Nothing) => {}
                Some(WrittenBack::NoRoom) if !writing.is_none() => {
                    freed_bytes += self.finish_write_out(worker, &mut writing) as i64;
                }
                Some(WrittenBack::NoRoom) if self.shed_copies() > 0 => {}
                Some(WrittenBack::NoRoom) => match self.compact_store(COMPACT_PAGES) {
                    0 => break,
                    frames => freed_bytes += i64::from(frames) * PAGE_BYTES as i64,
                },
                None if self.stage_oldest(target_pages) == 0 => break,
                None => {}
            }
            fruitless = if freed_bytes > before { 0 } else { fruitless + 1 };
        }
        freed_bytes += self.finish_write_out(worker, &mut writing) as i64;
        self.publish_store();
        freed_bytes.max(0) as u64 / PAGE_BYTES as u64
    }

    /// Drops all compressed copies of what is in the program; returns how many pages they were of.
    pub(super) fn shed_copies(&self) -> u64 {
        let mut pages = 0;
        while let Some(copy) = self.swap_cache.take_any() {
            self.free_slots(copy.slot, copy.order.pages());
            pages += u64::from(copy.order.pages());
        }
        pages
    }

    /// Stages up to `most_pages` pages of the oldest folios; returns how many.
    pub fn stage_oldest(&self, most_pages: u64) -> u64 {
        let mut staged = 0;
        let mut pinned = 0;
        let mut looked_at = self.probation.elements() + self.active.elements();
        while staged < most_pages && pinned < STAGE_ATTEMPTS && looked_at > 0 {
            let Some(folio) = self.oldest_resident() else { break };
            looked_at -= 1;
            match self.stage(folio) {
                Staged::Pages(pages) => staged += u64::from(pages),
                Staged::Nothing => {}
                Staged::Pinned => pinned += 1,
            }
        }
        staged
    }

    /// Takes the resident folio that is to go next out of its queue.
    fn oldest_resident(&self) -> Option<FolioName> {
        let (probation, active) = (self.probation.pages(), self.active.pages());
        if probation * PROBATION_SHARE >= probation + active {
            self.probation.pop().or_else(|| self.active.pop())
        } else {
            self.active.pop().or_else(|| self.probation.pop())
        }
    }

    /// Moves every resident folio of `pages` home and writes it back: MADV_PAGEOUT.
    pub fn page_out(&self, worker: &mut M::Worker, pages: Range<PageNumber>) {
        let mut page = pages.start;
        while page < pages.end {
            let state = self.table.get(page).map_or(PageState::None, |block| block.lock().get(page));
            let order = state.order().unwrap_or(Order::ZERO);
            let folio = FolioName { head: page.head(order), order };
            if matches!(state, PageState::Resident { .. }) {
                self.stage(folio);
            }
            let written = self.write_back(worker, folio);
            // Without contiguous slots it was split, and its pages go one by one.
            if written != WrittenBack::Nothing || order == Order::ZERO || !self.is_split(folio) {
                page = folio.head.offset(order.pages());
            }
        }
        self.publish_store();
    }

    /// Whether the pages of `folio` are at home, as folios of a lower order.
    fn is_split(&self, folio: FolioName) -> bool {
        let state = self.table.get(folio.head).map_or(PageState::None, |block| block.lock().get(folio.head));
        matches!(state, PageState::Home { order, .. } if order < folio.order)
    }

    /// Moves one resident folio home.
    fn stage(&self, folio: FolioName) -> Staged {
        let Some(block) = self.table.get(folio.head) else { return Staged::Nothing };
        match self.try_stage(block, folio) {
            Err(MoveError::Changing) => self.stage_later(block, folio),
            Err(MoveError::Busy) => {
                // Shared since a fork, or pinned: only the first can be mended.
                self.machine.unshare(folio.head.folio(folio.order));
                match self.try_stage(block, folio) {
                    Err(MoveError::Changing) => self.stage_later(block, folio),
                    Ok(staged) => staged,
                    Err(error) => self.leave_resident(block, folio, error),
                }
            }
            Ok(staged) => staged,
            Err(error) => self.leave_resident(block, folio, error),
        }
    }

    /// The program is changing its mappings: what lies there may be something else by now. It stays, as the
    /// youngest.
    fn stage_later(&self, block: &Block, folio: FolioName) -> Staged {
        let mut entries = block.lock();
        if matches!(entries.get(folio.head), PageState::Resident { order, .. } if order == folio.order) {
            entries.set_queued(folio.head, false);
            self.enqueue(self.resident_queue(&entries, folio.head), &mut entries, folio.head, folio.order);
        }
        Staged::Pinned
    }

    fn try_stage(&self, block: &Block, folio: FolioName) -> Result<Staged, MoveError> {
        let _steady = self.machine.steady().ok_or(MoveError::Changing)?;
        let mut entries = block.lock();
        let FolioName { head, order } = folio;
        let frame = match entries.get(head) {
            PageState::Resident { frame, order: now } if now == order => frame,
            _ => return Ok(Staged::Nothing),
        };
        match self.machine.move_out(head, FrameRun::new(frame, order)) {
            Ok(()) => {
                self.make_staged(&mut entries, folio);
                Ok(Staged::Pages(order.pages()))
            }
            Err(Stopped { moved_pages: 0, error }) => Err(error),
            Err(Stopped { moved_pages, .. }) => {
                // The rest stays, and is tried again on its own.
                self.carve_to(&mut entries, head, order, Order::ZERO);
                self.counters().of(order).split.inc();
                for index in 0..moved_pages {
                    self.make_staged(&mut entries, FolioName { head: head.offset(index), order: Order::ZERO });
                }
                Ok(Staged::Pages(moved_pages))
            }
        }
    }

    /// The pages of a resident folio have come home.
    fn make_staged(&self, entries: &mut Entries, folio: FolioName) {
        let FolioName { head, order } = folio;
        let PageState::Resident { frame, .. } = entries.get(head) else { unreachable!("{head:?} was resident") };
        entries.set_folio(head, order, PageState::Home { frame, order, writeback: false });
        self.resident_pages.fetch_sub(u64::from(order.pages()), Relaxed);
        self.staged_pages.fetch_add(u64::from(order.pages()), Relaxed);
        self.counters().of(order).nr_anon.sub(1);
        self.counters().vm.pgdeactivate.add(u64::from(order.pages()));
        entries.set_queued(head, false);
        self.enqueue(&self.staged, entries, head, order);
    }

    /// A folio that could not be moved: parts of it may be gone, or movable on their own.
    fn leave_resident(&self, block: &Block, folio: FolioName, error: MoveError) -> Staged {
        let Some(_steady) = self.machine.steady() else { return self.stage_later(block, folio) };
        let mut entries = block.lock();
        let FolioName { head, order } = folio;
        if !matches!(entries.get(head), PageState::Resident { order: now, .. } if now == order) {
            return Staged::Nothing;
        }
        entries.set_queued(head, false);
        let range = head.folio(order);
        if self.drop_absent(&mut entries, range.clone()) > 0 {
            return Staged::Nothing;
        }
        if order > Order::ZERO {
            self.carve_to(&mut entries, head, order, Order::ZERO);
            self.counters().of(order).split.inc();
            return Staged::Nothing;
        }
        debug_assert!(error != MoveError::Exists, "the home of a resident page is empty");
        self.counters().vm.unevictable_pgs_stranded.inc();
        // Among the active ones it is met seldom. On probation, many of its kind would be all that is ever looked at.
        entries.set_active(head, order, true);
        self.enqueue(&self.active, &mut entries, head, order);
        Staged::Pinned
    }

    fn write_back_oldest(&self, worker: &mut M::Worker) -> Option<WrittenBack> {
        let folio = self.staged.pop()?;
        Some(self.write_back(worker, folio))
    }

    /// Compresses one staged folio into the store and frees its frames.
    fn write_back(&self, worker: &mut M::Worker, folio: FolioName) -> WrittenBack {
        let FolioName { head, order } = folio;
        let Some(block) = self.table.get(head) else { return WrittenBack::Nothing };
        let frame = {
            let mut entries = block.lock();
            match entries.get(head) {
                PageState::Home { frame, order: now, writeback: false } if now == order => {
                    entries.set_folio(head, order, PageState::Home { frame, order, writeback: true });
                    entries.set_queued(head, false);
                    frame
                }
                _ => return WrittenBack::Nothing,
            }
        };
        let run = FrameRun::new(frame, order);
        if let Some(slot) = self.unchanged_copy(run) {
            self.counters().vm.pswpout_cached.add(u64::from(order.pages()));
            return self.finish_write_back(block, folio, run, slot, 0);
        }
        let Some(slot) = self.alloc_slots(order) else {
            return self.write_back_in_parts(block, folio, run);
        };
        match self.compress_folio(worker, folio, run, slot) {
            Some(stored_bytes) => {
                if stored_bytes == 0 {
                    self.counters().vm.swpout_zero.add(u64::from(order.pages()));
                }
                self.finish_write_back(block, folio, run, slot, stored_bytes)
            }
            None => {
                self.undo_writeback(block, folio, run);
                WrittenBack::NoRoom
            }
        }
    }

    /// The slots that still hold the content of `run`, a folio under writeback.
    fn unchanged_copy(&self, run: FrameRun) -> Option<Slot> {
        let copy = self.swap_cache.take(run.head)?;
        let good = copy.order == run.order && self.machine.hash(run) == copy.hash;
        self.swap_cache.judged(good);
        if !good {
            self.free_slots(copy.slot, copy.order.pages());
            return None;
        }
        self.slots.mark_in_use(copy.slot, copy.order.pages());
        Some(copy.slot)
    }

    /// No contiguous slots: the folio is split and its pages are queued one by one.
    fn write_back_in_parts(&self, block: &Block, folio: FolioName, run: FrameRun) -> WrittenBack {
        self.undo_writeback(block, folio, run);
        if folio.order == Order::ZERO {
            return WrittenBack::NoRoom;
        }
        let mut entries = block.lock();
        if matches!(entries.get(folio.head), PageState::Home { order, writeback: false, .. } if order == folio.order) {
            self.carve_to(&mut entries, folio.head, folio.order, Order::ZERO);
            self.counters().of(folio.order).swpout_fallback.inc();
            self.counters().of(folio.order).split.inc();
        }
        WrittenBack::Nothing
    }

    /// Takes the busy mark off what is still there, and frees the frames of what is not.
    fn undo_writeback(&self, block: &Block, folio: FolioName, run: FrameRun) {
        let mut entries = block.lock();
        for index in 0..run.frames() {
            let page = folio.head.offset(index);
            let frame = run.head.offset(index);
            match entries.get(page) {
                PageState::Home { frame: now, order, writeback: true } if now == frame => {
                    entries.set(page, PageState::Home { frame, order, writeback: false });
                    if page.head(order) == page {
                        self.enqueue(&self.staged, &mut entries, page, order);
                    }
                }
                _ => self.free_content(run.part(index, Order::ZERO)),
            }
        }
    }

    /// Puts the content of `run`, that of `folio`, into the store under the slots from `slot` on, piece by piece.
    /// Returns the bytes it takes there; on failure the slots are free again.
    fn compress_folio(&self, worker: &mut M::Worker, folio: FolioName, run: FrameRun, slot: Slot) -> Option<u64> {
        let part = self.locality.part_order(folio.head).unwrap_or(MAX_ORDER);
        let granule = self.config.granule.min(run.order).min(part).min(self.largest_piece());
        let mut stored_bytes = 0;
        for done in (0..run.frames()).step_by(granule.pages() as usize) {
            let part = run.part(done, granule);
            let piece = match self.machine.compress(worker, part) {
                Compressed::Filled(word) => self.store.insert_filled(word, granule, granule.pages() as u16),
                Compressed::Bytes { len_bytes, raw, checksum } => {
                    let info = PieceInfo { len_bytes, granule, raw, checksum, pages: granule.pages() as u16 };
                    self.store.insert(&self.runs(), info).map(|(piece, place)| {
                        self.machine.write_piece(worker, part, &place);
                        self.store.seal(piece);
                        stored_bytes += u64::from(len_bytes);
                        piece
                    })
                }
            };
            let Some(piece) = piece else {
                self.free_slots(slot, done);
                self.slots.free(slot.offset(done), run.frames() - done);
                return None;
            };
            self.slot_map.set(slot.offset(done), granule.pages(), piece);
        }
        Some(stored_bytes)
    }

    fn finish_write_back(
        &self,
        block: &Block,
        folio: FolioName,
        run: FrameRun,
        slot: Slot,
        stored_bytes: u64,
    ) -> WrittenBack {
        let FolioName { head, order } = folio;
        let now = self.workingset.evict(u64::from(order.pages()));
        let mut entries = block.lock();
        let mut out_pages = 0;
        for index in 0..run.frames() {
            let page = head.offset(index);
            match entries.get(page) {
                PageState::Home { frame, order, writeback: true } if frame == run.head.offset(index) => {
                    entries.set(page, PageState::Swapped { slot: slot.offset(index), order, fetching: false });
                    entries.set_evicted(page, now);
                    out_pages += 1;
                }
                // Touched, unmapped or discarded meanwhile: what was compressed is of no use.
                _ => self.free_slots(slot.offset(index), 1),
            }
        }
        drop(entries);
        self.free_content(run);
        self.staged_pages.fetch_sub(out_pages, Relaxed);
        let vm = &self.counters().vm;
        vm.pswpout.add(out_pages);
        if out_pages == u64::from(run.frames()) {
            self.counters().of(order).swpout.inc();
        }
        WrittenBack::Freed(out_pages as i64 * PAGE_BYTES as i64 - stored_bytes as i64)
    }

    /// Takes back what is still there of ranges that the program has discarded (MADV_FREE leaves pages until the
    /// kernel wants them), and compacts a wasteful store a little. What a background thread does between reclaims.
    pub fn tend(&self) {
        for range in self.discards.take_due(self.machine.now_ns()) {
            if let Err(rest) = self.adopt(range) {
                self.discards.add(rest, self.machine.now_ns());
            }
        }
        self.compact_wasteful_store();
        self.publish_store();
    }

    /// Gives up to `most_pages` free frames back to the system, keeping `keep_pages`.
    pub fn shrink(&self, keep_pages: u32, most_pages: u32) -> u32 {
        self.homes.shrink(&self.machine, keep_pages, most_pages, Order::ZERO)
    }

    /// Gives some free runs of the highest order back to the system, keeping `keep_pages` free frames. Smaller runs stay: they
    /// cost as many system calls.
    pub fn give_back_runs(&self, keep_pages: u32) -> u32 {
        self.homes.shrink(&self.machine, keep_pages, GIVE_BACK_PAGES, MAX_ORDER)
    }
}
