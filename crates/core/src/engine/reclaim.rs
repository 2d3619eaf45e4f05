//! Reclaim: writes staged folios back to the store to make room.

use super::Engine;
use super::write_back::Writing;
use crate::homes::Urgency;
use crate::page_table::{Block, PageState};
use crate::ports::{Arena, Clock, Compressed, Pieces, Ports, assert_unlocked};
use crate::queue::FolioName;
use crate::run_tokens::{RunRef, SharedRun};
use crate::store::PieceInfo;
use crate::swap_cache::EntryCheck;
use crate::sync::atomic::Ordering::Relaxed;
use foliomem_types::units::{MAX_ORDER, Order, PAGE_BYTES, PageNumber, Slot};
use std::ops::Range;

/// Number of folios that reclaim tries in vain to stage before it gives up: the rest is probably
/// pinned, too.
pub(super) const STAGE_ATTEMPTS: usize = 256;
/// Profitability as a divisor: reclaim does not pay if it frees less than 1/32 of what it
/// compresses. Among much incompressible data there is always something that compresses.
const PAYS: i64 = 32;
/// Pages that one attempt usually compresses: a folio of 64 KiB.
const ATTEMPT_PAGES: u64 = 16;
/// Number of folios probed to see whether reclaim pays again, and the share of them, as a divisor,
/// that must be freed.
const PROBE_FOLIOS: usize = 4;
const PROBE_SHARE: i64 = 4;
/// Pages that reclaim copies to compact the store before it gives up: 4 MiB, a millisecond.
const COMPACT_PAGES: u32 = 1024;

/// Pages released to the system at a time without demand: 32 MiB, some milliseconds.
const GIVE_BACK_PAGES: u32 = 16 * MAX_ORDER.pages();

/// The result of reclaim.
struct Reclaimed {
    freed_pages: u64,
    /// Whether reclaim found a folio to compress: other threads may be handling all of them.
    found_any: bool,
    pays: bool,
}

/// The result of an attempt to reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Attempt {
    /// This many pages were freed.
    Freed(u64),
    /// There was nothing to reclaim at the moment.
    Nothing,
    /// No attempt was made, because none paid recently.
    Deferred,
}

/// The result of writing back one folio.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum WrittenBack {
    /// Pages that were swapped out, and bytes of freed frames minus what the store took.
    Freed { pages: u64, bytes: i64 },
    /// The folio was gone or busy.
    Nothing,
    /// Neither the store nor the file has room for the folio.
    NoRoom,
}

impl<P: Ports> Engine<P> {
    /// Reclaims like [`reclaim`](Engine::reclaim), but backs off if that did not pay recently.
    pub(super) fn try_reclaim(&self, worker: &mut P::Worker, target_pages: u64) -> Attempt {
        if self.can_write_out() {
            // Even incompressible data free memory once they are in the file.
            return Attempt::Freed(self.reclaim(worker, target_pages));
        }
        if self.backoff.defers() {
            return Attempt::Deferred;
        }
        let shift = self.backoff.shift();
        // A reclaim that the protected minimum stops does not count as a failure.
        let counts = self.urgency() == Urgency::Normal;
        let youngest_pay = shift > 0 && self.probe_youngest(worker);
        let reclaimed = self.reclaim_some(worker, target_pages, STAGE_ATTEMPTS >> shift);
        // A reclaim that finds no folio is neither a failure nor a success: other threads may be
        // handling all of them.
        if counts && (reclaimed.found_any || shift > 0) {
            self.backoff.note(youngest_pay || reclaimed.pays);
        }
        if reclaimed.found_any || reclaimed.freed_pages > 0 {
            Attempt::Freed(reclaimed.freed_pages)
        } else {
            Attempt::Nothing
        }
    }

    /// Returns whether reclaim did not pay recently. A thread that needs memory notices when that
    /// changes.
    pub fn reclaim_is_futile(&self) -> bool {
        self.backoff.shift() > 0 && !self.can_write_out()
    }

    /// Returns whether the pages that the program touched last are compressible. The oldest folios
    /// do not show whether the many younger ones are compressible.
    fn probe_youngest(&self, worker: &mut P::Worker) -> bool {
        let (mut freed_bytes, mut probed_pages) = (0, 0);
        for (block, folio) in (0..PROBE_FOLIOS).map_while(|_| self.pop_youngest_from(&self.probation)) {
            self.stage_in(block, folio);
            if let WrittenBack::Freed { pages, bytes } = self.write_back(worker, block, folio) {
                freed_bytes += bytes;
                probed_pages += pages;
            }
        }
        // Some of the pages may be new and not written yet.
        freed_bytes * PROBE_SHARE > (probed_pages * PAGE_BYTES as u64) as i64
    }

    /// Frees at least `target_pages` if possible; returns the number of freed pages minus what the
    /// store took. It frees nothing if everything is pinned or nothing compresses.
    pub fn reclaim(&self, worker: &mut P::Worker, target_pages: u64) -> u64 {
        self.reclaim_some(worker, target_pages, STAGE_ATTEMPTS).freed_pages
    }

    /// Reclaims until `target_pages` are free. Gives up after `attempts` steps in a row that freed
    /// nothing, or after as much work that freed too little.
    fn reclaim_some(&self, worker: &mut P::Worker, target_pages: u64, attempts: usize) -> Reclaimed {
        let target_bytes = target_pages as i64 * PAGE_BYTES as i64;
        let mut writing = Writing::none();
        let mut freed_bytes: i64 = 0;
        let (mut fruitless, mut compressed_pages, mut found_any) = (0, 0, false);
        let pays =
            |freed_bytes: i64, pages: u64| freed_bytes > 0 && freed_bytes * PAYS >= (pages * PAGE_BYTES as u64) as i64;
        while freed_bytes + i64::from(writing.pages()) * (PAGE_BYTES as i64) < target_bytes
            && fruitless < attempts
            && (compressed_pages < attempts as u64 * ATTEMPT_PAGES || pays(freed_bytes, compressed_pages))
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
                if self.retry_unevictable(target_pages) > 0 {
                    continue;
                }
                self.drop_swap_cache();
                freed_bytes += i64::from(self.compact_wasteful_store()) * PAGE_BYTES as i64;
                break;
            }
            if self.staged_pages() < self.staged_target_pages() {
                self.stage_oldest(2 * target_pages);
            }
            let before = freed_bytes;
            let written_back = self.write_back_oldest(worker);
            found_any |= matches!(written_back, Some(WrittenBack::Freed { .. } | WrittenBack::NoRoom));
            match written_back {
                Some(WrittenBack::Freed { pages, bytes }) => {
                    freed_bytes += bytes;
                    compressed_pages += pages;
                }
                Some(WrittenBack::Nothing) => {}
                Some(WrittenBack::NoRoom) if !writing.is_none() => {
                    freed_bytes += self.finish_write_out(worker, &mut writing) as i64;
                }
                Some(WrittenBack::NoRoom) if self.split_deferred() || self.drop_swap_cache() > 0 => {}
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
        let freed_pages = freed_bytes.max(0) as u64 / PAGE_BYTES as u64;
        Reclaimed { freed_pages, found_any, pays: pays(freed_bytes, compressed_pages) }
    }

    /// Drops all swap-cache entries; returns the number of their pages.
    pub(super) fn drop_swap_cache(&self) -> u64 {
        let mut pages = 0;
        while let Some(entry) = self.swap_cache.take_any() {
            self.free_slots(entry.slot, entry.order.pages());
            pages += u64::from(entry.order.pages());
        }
        pages
    }

    /// Stages every resident folio of `pages` and writes it back: MADV_PAGEOUT.
    pub fn page_out(&self, worker: &mut P::Worker, pages: Range<PageNumber>) {
        let mut page = pages.start;
        while page < pages.end {
            let Some(block) = self.table.get(page) else {
                page = page.head(MAX_ORDER).offset(MAX_ORDER.pages());
                continue;
            };
            let state = {
                let mut entries = block.lock();
                self.split_partial(&mut entries, page.folio(Order::ZERO));
                entries.get(page)
            };
            let order = state.order().unwrap_or(Order::ZERO);
            let folio = FolioName { head: page.head(order), order };
            if matches!(state, PageState::Resident { .. }) {
                self.stage_all(block, folio, &pages);
            }
            let written = self.write_back(worker, block, folio);
            // Without contiguous slots the folio was split, and its pages go one by one.
            if written != WrittenBack::Nothing || order == Order::ZERO || !is_split(block, folio) {
                page = folio.head.offset(order.pages());
            }
        }
        self.publish_store();
    }

    #[inline]
    fn write_back_oldest(&self, worker: &mut P::Worker) -> Option<WrittenBack> {
        let (block, folio) = self.pop_from(&self.staged)?;
        Some(self.write_back(worker, block, folio))
    }

    /// Compresses one staged folio of `block` into the store and frees its frames.
    pub(super) fn write_back(&self, worker: &mut P::Worker, block: &Block, folio: FolioName) -> WrittenBack {
        let FolioName { head, order } = folio;
        let Some(run) = block.lock().begin_writeback(head, order) else { return WrittenBack::Nothing };
        let (slot, stored_bytes) = if let Some(slot) = self.unchanged_entry(run.as_ref()) {
            self.counters().vm.pswpout_cached.add(u64::from(order.pages()));
            (slot, 0)
        } else {
            let whole = self.config.whole_out.contains(order);
            let Some(slot) = whole.then(|| self.alloc_slots(order)).flatten() else {
                return self.write_back_in_parts(block, folio, run);
            };
            let Some(stored_bytes) = self.compress_folio(worker, folio, run.as_ref(), slot) else {
                self.undo_writeback(block, folio, run);
                return WrittenBack::NoRoom;
            };
            if stored_bytes == 0 {
                self.counters().vm.swpout_zero.add(u64::from(order.pages()));
            }
            (slot, stored_bytes)
        };
        self.finish_write_back(block, folio, run, slot, stored_bytes)
    }

    /// Returns the slots that still hold the content of `run`, a folio under writeback.
    #[inline]
    fn unchanged_entry(&self, run: RunRef<'_>) -> Option<Slot> {
        let entry = self.swap_cache.take(run.head)?;
        let is_unchanged = entry.order == run.order && self.ports.arena().hash(run) == entry.hash;
        let check = if is_unchanged { EntryCheck::Good } else { EntryCheck::Stale };
        self.swap_cache.note_check(check);
        if check == EntryCheck::Stale {
            self.free_slots(entry.slot, entry.order.pages());
            return None;
        }
        self.slots.mark_in_use(entry.slot, entry.order.pages());
        Some(entry.slot)
    }

    /// Ends a writeback without contiguous slots, or with none wanted: splits the folio and queues
    /// its pages.
    fn write_back_in_parts(&self, block: &Block, folio: FolioName, run: SharedRun) -> WrittenBack {
        self.undo_writeback(block, folio, run);
        if folio.order == Order::ZERO {
            return WrittenBack::NoRoom;
        }
        let mut entries = block.lock();
        if matches!(entries.get(folio.head), PageState::Home { order, writeback: false, .. } if order == folio.order) {
            self.split_to(&mut entries, folio.head, folio.order, Order::ZERO);
            self.counters().of(folio.order).swpout_fallback.inc();
            self.counters().of(folio.order).split.inc();
        }
        WrittenBack::Nothing
    }

    /// Removes the writeback mark from the pages that are still there, and frees the frames of the
    /// others.
    fn undo_writeback(&self, block: &Block, folio: FolioName, run: SharedRun) {
        let mut entries = block.lock();
        for (index, part) in (0..).zip(run.into_pages()) {
            let page = folio.head.offset(index);
            if let Some(left) = entries.cancel_writeback(page, part) {
                self.free_content(left);
            } else if let PageState::Home { order, .. } = entries.get(page)
                && page.head(order) == page
            {
                self.enqueue(&self.staged, &mut entries, page, order);
            }
        }
    }

    /// Stores the content of `run`, which belongs to `folio`, under the slots from `slot` on, piece
    /// by piece. Returns the number of stored bytes; on failure the slots are free again.
    #[inline]
    fn compress_folio(&self, worker: &mut P::Worker, folio: FolioName, run: RunRef<'_>, slot: Slot) -> Option<u64> {
        let part = self.locality.part_order(folio.head).unwrap_or(MAX_ORDER);
        let granule = self.config.granule.min(run.order).min(part).min(self.largest_piece());
        let (mut done, mut stored_bytes) = (0, 0);
        while done < run.frames() {
            let part = run.part(done, granule);
            assert_unlocked();
            let piece = match self.ports.pieces().compress(worker, folio.head.offset(done), part) {
                Compressed::Filled(word) => self.store.insert_filled(word, granule, granule.pages() as u16),
                Compressed::Bytes { len_bytes, raw, checksum } => {
                    let info = PieceInfo { len_bytes, granule, raw, checksum, pages: granule.pages() as u16 };
                    self.store.insert(&self.runs(), info).map(|mut place| {
                        self.ports.pieces().write(worker, part, place.as_mut());
                        stored_bytes += u64::from(len_bytes);
                        self.store.seal(place)
                    })
                }
            };
            let Some(piece) = piece else {
                self.free_slots(slot, done);
                self.slots.free(self.ports.clock().cpu(), slot.offset(done), run.frames() - done);
                return None;
            };
            self.slot_map.set(slot.offset(done), granule.pages(), piece);
            done += granule.pages();
        }
        Some(stored_bytes)
    }

    #[inline]
    fn finish_write_back(
        &self,
        block: &Block,
        folio: FolioName,
        run: SharedRun,
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
                // The page was touched, unmapped or discarded meanwhile, so its compressed content
                // is useless.
                _ => self.free_slots(slot.offset(index), 1),
            }
        }
        let run = entries.finish_writeback(head, run);
        drop(entries);
        let pages = run.frames();
        // `unchanged_entry` removed the swap-cache entry, good or not.
        self.free_frames_of_content(run);
        self.staged_pages.fetch_sub(out_pages, Relaxed);
        let vm = &self.counters().vm;
        vm.pswpout.add(out_pages);
        if out_pages == u64::from(pages) {
            self.counters().of(order).swpout.inc();
        }
        WrittenBack::Freed { pages: out_pages, bytes: out_pages as i64 * PAGE_BYTES as i64 - stored_bytes as i64 }
    }

    /// Does the maintenance of a background thread between reclaims: adopts the remaining pages of
    /// discarded ranges (MADV_FREE leaves pages until the kernel wants them), compacts a wasteful
    /// store a little, and drops stale claims.
    pub fn maintain(&self) {
        for range in self.discards.take_due(self.ports.clock().now_ns()) {
            if let Err(rest) = self.adopt(range) {
                self.discards.add(rest, self.ports.clock().now_ns());
            }
        }
        self.drop_stale_claims();
        self.compact_wasteful_store();
        self.publish_store();
    }

    /// Releases up to `most_pages` free frames to the system; keeps `keep_pages`.
    pub fn shrink(&self, keep_pages: u32, most_pages: u32) -> u32 {
        self.homes.shrink(&self.ports, keep_pages, most_pages, Order::ZERO)
    }

    /// Releases some free runs of the highest order to the system; keeps `keep_pages` free frames.
    /// Smaller runs stay, because each costs as many system calls.
    pub fn give_back_runs(&self, keep_pages: u32) -> u32 {
        self.homes.shrink(&self.ports, keep_pages, GIVE_BACK_PAGES, MAX_ORDER)
    }
}

/// Returns whether the pages of `folio`, which is of `block`, are staged as folios of a lower
/// order.
fn is_split(block: &Block, folio: FolioName) -> bool {
    matches!(block.lock().get(folio.head), PageState::Home { order, .. } if order < folio.order)
}
