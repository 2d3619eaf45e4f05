//! The engine: faults, reclaim and mapping changes over one program's memory.
//!
//! A page's life: its first touch or its adoption makes it part of a *resident* folio, the youngest
//! one on probation. Reclaim *stages* the oldest folios: their pages move into the arena, out of
//! the program's reach. If the program touches a staged folio, the engine maps the folio in again
//! (second chance), and the folio is active from then on. A folio that returns after a short
//! refault distance ([`crate::workingset`]) becomes active, too. A staged folio that is not touched
//! is *written back*: compressed piece by piece into the store under consecutive swap slots. Its
//! frames are free then. If there is a swap file and the store takes too much, the oldest pieces of
//! the store are written to that file. A touch of a swapped-out folio *swaps it in*: the whole
//! folio, or a part if the program uses only parts ([`crate::locality`]). The engine may keep the
//! slots of a swapped-in folio until its content changes ([`crate::swap_cache`]). Every move into
//! the program goes through `map_in`, every move out of the program through `stage`, and every
//! split through `split_borders`. A resident folio of which a part is unmapped or discarded stays
//! together for a while (see `partial`).
//!
//! Any number of threads may call the engine. Long work (compressing, decompressing) runs without a
//! lock, with its pages marked busy; [`crate::page_table`] says who owns what then. Lock order: one
//! block, then leaves (free frames, queues, slots, store). No thread holds two block locks.

mod background;
mod backoff;
mod check;
mod claims;
mod cold;
mod explode;
mod fault;
mod first_touch;
mod map_in;
mod mapping;
mod migrate;
mod partial;
mod read_ahead;
mod reclaim;
mod recompress;
mod restore;
mod resume;
mod share;
mod stage;
mod store_compaction;
mod stored_content;
mod strays;
mod swap_in;
mod unmanaged;
mod write_back;

pub use cold::ColdWriteBack;
pub use fault::Served;
pub use recompress::Recompression;
pub use resume::Resumed;
pub use share::Sharing;
pub use stored_content::StoredContent;

use crate::cluster::{NoSlots, SlotCounters, Strategy, SwapClusters, SwapDevice};
use crate::compaction::{Compactor, Variant};
use crate::discards::Discards;
use crate::homes::{Homes, Urgency};
use crate::locality::{Locality, SwapIn};
use crate::pacing::Pacing;
use crate::page_table::{PageState, PageTable};
use crate::ports::{
    AddressSpace, Arena, Budget, Clock, Ports, SharedPages, SharedStore, SwapDevice as _, assert_unlocked,
};
use crate::queue::Queue;
use crate::readahead::Readahead;
use crate::rmap::Rmap;
use crate::run_tokens::UniqueRun;
use crate::slot_map::SlotMap;
use crate::store::{HolderId, RunSource, Store, StoreStats};
use crate::swap_cache::SwapCache;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::workingset::Workingset;
use backoff::Backoff;
use foliomem_types::counters::Counters;
use foliomem_types::discard::Discard;
use foliomem_types::units::{ClusterNumber, Frame, FrameRun, Order, OrderSet, PageNumber, Slot};
use std::ops::Range;

/// The configuration of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The maximum order of a piece.
    pub granule: Order,
    /// Number of frames of the arena, at least one. Only used frames cost memory.
    pub arena_frames: u32,
    /// Number of slots of the swap device. Only used slots cost memory.
    pub swap_slots: u32,
    /// The strategy of the slot allocator.
    pub strategy: Strategy,
    /// How much of a folio a fault maps in.
    pub swap_in: SwapIn,
    /// What a fault does when the limit leaves no room for a large folio.
    pub no_room: NoRoom,
    /// Folio sizes that are swapped out whole. Others are split first (Linux before 6.10: all but 2
    /// MiB).
    pub whole_out: OrderSet,
    /// Whether to keep the slots of swapped-in folios while that pays. (For synchronous devices the
    /// kernel frees them at once.)
    pub keep_copies: bool,
    /// Whether to populate new memory before the program touches it, where the program touches
    /// memory in order. The engine does not see the first touches of such memory.
    pub make_ahead: bool,
    /// How hard the engine works for room.
    pub pacing: Pacing,
    /// How runs of frames are made by compaction.
    pub compaction: Variant,
    /// Number of CPUs that allocate slots.
    pub cpus: u16,
    /// The initial protected minimum in pages: resident pages that reclaim leaves to the program,
    /// whatever the limit says. If the data do not compress into the limit, exceeding it is better
    /// than swapping the last pages forever. [`Engine::follow_limit`] changes it.
    pub protected_pages: u64,
    /// The swap file behind the store, if there is one.
    pub backing: Option<BackingConfig>,
    /// Minimum time in the store before a piece is recompressed with a slower codec; `None` if
    /// there is none.
    pub recompress_idle_ns: Option<u64>,
}

/// What a fault does when the limit leaves no room for a large folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NoRoom {
    /// The fault reclaims, and takes a smaller folio only if that does not help.
    #[default]
    Reclaim,
    /// The fault takes a smaller folio at once, and reclaims only for single pages: Linux by
    /// default (`GFP_TRANSHUGE_LIGHT`).
    FallBack,
}

/// Maximum attempts to allocate slots after swap-cache entries gave up theirs. Each retry means
/// that entries could be dropped, or that another thread just took the freed slots, so a few
/// suffice.
const SLOT_TRIES: u32 = 4;

/// The configuration of the swap file behind the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingConfig {
    /// Number of slots of the file, in whole clusters.
    pub slots: u32,
    /// Whether free clusters of the file are discarded.
    pub discard: Discard,
    /// The initial maximum of the store's pages in memory, beyond which its oldest pieces go to the
    /// file. [`Engine::follow_limit`] changes it.
    pub store_pages: u32,
}

/// Share of the content kept staged under pressure, as a shift (1/2^5): enough that a used folio is
/// touched before its writeback, and little enough that those touches cost little.
const STAGED_SHARE_SHIFT: u32 = 5;
/// Minimum number of staged pages under pressure: 1 MiB.
const STAGED_MIN_PAGES: u64 = 256;

/// The memory manager of one program.
pub struct Engine<P: Ports> {
    ports: P,
    config: EngineConfig,
    /// The protected minimum, which [`Engine::follow_limit`] sets.
    protected_pages: AtomicU64,
    store_pages: AtomicU32,
    /// Number of checks that still skip the file, because it was full or failed.
    file_pause: AtomicU32,
    /// Bytes that recompression has saved in this pass over the pieces.
    saved_in_pass_bytes: AtomicU64,
    backoff: Backoff,
    /// The arena's last frame, for pages that must pass through the arena when all others are
    /// taken. The lock is held only briefly.
    spare: Mutex<Option<UniqueRun>>,
    table: PageTable,
    homes: Homes,
    rmap: Rmap,
    compactor: Compactor,
    probation: Queue,
    active: Queue,
    /// Resident folios with a swap-cache entry that are not active.
    cached: Queue,
    /// Folios that could not be unmapped when it was tried.
    unevictable: Queue,
    staged: Queue,
    /// The blocks with partially mapped folios.
    deferred: Queue,
    workingset: Workingset,
    slots: SwapClusters,
    slot_map: SlotMap,
    store: Store,
    swap_cache: SwapCache,
    readahead: Readahead,
    locality: Locality,
    discards: Discards,
    resident_pages: AtomicU64,
    staged_pages: AtomicU64,
    /// 1 once the program can discard pages without a message.
    discards_unheard: AtomicU32,
}

/// The engine's frames as the source of the store's memory, and the urgency of their allocation.
/// During writeback the store may use the reserve, because each folio frees more memory than its
/// piece takes. For compaction the store may not use it.
struct StoreRuns<'a, P: Ports>(&'a Engine<P>, Urgency);

impl<P: Ports> RunSource for StoreRuns<'_, P> {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        self.0.homes.alloc_full(&self.0.ports, order, self.1).ok().map(|(run, _)| run.into_run())
    }

    fn free_run(&self, run: FrameRun) {
        self.0.homes.free_full(UniqueRun::mint(run));
    }

    fn note_holder(&self, run: FrameRun, holder: HolderId) {
        self.0.rmap.set_store(run, holder);
    }

    fn claim_cluster(&self, cluster: ClusterNumber) -> bool {
        self.0.ports.swap_device().is_some_and(|device| device.claim(cluster))
    }

    fn release_cluster(&self, cluster: ClusterNumber) {
        self.0.ports.swap_device().into_iter().for_each(|device| device.release(cluster));
    }

    fn fence_cluster(&self, cluster: ClusterNumber) -> bool {
        self.0.ports.swap_device().is_some_and(|device| device.fence(cluster))
    }

    fn join_cluster(&self, cluster: ClusterNumber, generation: u64) -> bool {
        self.0.ports.swap_device().is_some_and(|device| device.join(cluster, generation))
    }

    fn count_user(&self, slots: Range<u32>) {
        self.0.ports.shared_store().into_iter().for_each(|shared| shared.count_user(slots.clone()));
    }

    fn add_user(&self, slot: Slot) -> bool {
        self.0.ports.shared_store().is_none_or(|shared| shared.add_user(slot))
    }

    fn drop_user(&self, slot: Slot) -> bool {
        self.0.ports.shared_store().is_some_and(|shared| shared.drop_user(slot))
    }

    fn discard_slots(&self, slots: Range<u32>) {
        self.0.ports.shared_store().into_iter().for_each(|shared| shared.discard(slots.clone()));
    }
}

impl<P: Ports> Engine<P> {
    /// Makes an engine on `ports` that manages nothing yet.
    pub fn new(ports: P, config: EngineConfig) -> Engine<P> {
        let clusters = |slots, discard| SwapClusters::new(SwapDevice { slots, discard }, config.cpus, config.strategy);
        let store = match config.backing {
            Some(BackingConfig { slots, discard, .. }) => {
                Store::with_backing(config.swap_slots, clusters(slots, discard))
            }
            None => Store::new(config.swap_slots),
        };
        let managed_frames = config.arena_frames - 1;
        Engine {
            file_pause: AtomicU32::new(0),
            saved_in_pass_bytes: AtomicU64::new(0),
            backoff: Backoff::default(),
            spare: Mutex::new(Some(UniqueRun::mint(FrameRun::new(Frame(managed_frames), Order::ZERO)))),
            table: PageTable::default(),
            homes: Homes::new(managed_frames),
            rmap: Rmap::new(config.arena_frames),
            compactor: Compactor::new(config.compaction),
            probation: Queue::default(),
            active: Queue::default(),
            cached: Queue::default(),
            unevictable: Queue::default(),
            staged: Queue::default(),
            deferred: Queue::default(),
            workingset: Workingset::default(),
            slots: clusters(config.swap_slots, Discard::Never),
            slot_map: SlotMap::new(config.swap_slots),
            store,
            swap_cache: SwapCache::default(),
            readahead: Readahead::default(),
            locality: Locality::new(config.swap_in),
            discards: Discards::default(),
            resident_pages: AtomicU64::new(0),
            staged_pages: AtomicU64::new(0),
            discards_unheard: AtomicU32::new(0),
            protected_pages: AtomicU64::new(config.protected_pages),
            store_pages: AtomicU32::new(config.backing.map_or(0, |backing| backing.store_pages)),
            ports,
            config,
        }
    }

    /// Returns the ports.
    pub fn ports(&self) -> &P {
        &self.ports
    }

    /// Returns the configuration.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        self.ports.counters()
    }

    /// Returns the number of resident pages.
    pub fn resident_pages(&self) -> u64 {
        self.resident_pages.load(Relaxed)
    }

    /// Returns the number of staged pages.
    pub fn staged_pages(&self) -> u64 {
        self.staged_pages.load(Relaxed)
    }

    /// Returns the pages of memory that the engine accounts for: resident and staged pages, free
    /// populated frames, and the store's frames.
    pub fn held_pages(&self) -> u64 {
        let frames = self.free_frames() + self.store.held_frames();
        self.resident_pages() + self.staged_pages() + u64::from(frames)
    }

    /// Returns the number of free populated frames, which need no charge.
    pub fn free_frames(&self) -> u32 {
        self.homes.full_frames()
    }

    /// Returns the number of swapped-out pages.
    pub fn swapped_pages(&self) -> u64 {
        u64::from(self.slots.used_slots()).saturating_sub(self.swap_cache.pages())
    }

    /// Returns whether any content of the program is staged or swapped out.
    pub fn has_content_out(&self) -> bool {
        self.staged_pages() + self.swapped_pages() > 0
    }

    /// Returns the counters of the slot allocator.
    pub fn slot_counters(&self) -> SlotCounters {
        self.slots.counters()
    }

    /// Returns only the counter of scanned clusters.
    pub fn clusters_scanned(&self) -> u64 {
        self.slots.clusters_scanned()
    }

    /// Returns the statistics of the store.
    pub fn store_stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Publishes the gauges of the store.
    pub fn publish_store(&self) {
        let stats = self.store_stats();
        let store = &self.counters().store;
        store.orig_data_size.set(stats.orig_data_bytes);
        store.compr_data_size.set(stats.compr_data_bytes);
        store.mem_used_total.set(stats.used_bytes);
        store.mem_used_max.raise_to(stats.used_bytes);
        store.same_pages.set(stats.same_filled_pages);
        store.huge_pages.set(stats.huge_pages);
        self.counters().backing.bd_count.set(u64::from(self.store.file_slots()));
        self.counters().vm.nr_swapcached.set(self.swap_cache.pages());
    }

    /// Returns the order of the folio of `page`, if the page has content.
    pub fn order_of(&self, page: PageNumber) -> Option<Order> {
        self.table.get(page)?.lock().get(page).order()
    }

    /// Returns whether `page` is resident.
    pub fn is_resident(&self, page: PageNumber) -> bool {
        self.table.get(page).is_some_and(|block| matches!(block.lock().get(page), PageState::Resident { .. }))
    }

    /// Returns the urgency with which a fault may allocate frames.
    #[inline]
    fn urgency(&self) -> Urgency {
        // Unevictable pages are no part of the protected minimum: otherwise the rest would be
        // swapped in and out in turn.
        let protected_pages = self.protected_pages.load(Relaxed) + self.unevictable.pages();
        if self.resident_pages() + self.staged_pages() < protected_pages { Urgency::Reclaim } else { Urgency::Normal }
    }

    /// Wakes the threads that wait for one of `pages`, which may be empty.
    #[inline]
    fn wake(&self, pages: Range<PageNumber>) {
        assert_unlocked();
        self.ports.address_space().wake(pages);
    }

    /// Sleeps while other threads free memory.
    fn pause(&self) {
        assert_unlocked();
        self.ports.clock().pause();
    }

    /// Returns whether other processes may share pages since a fork.
    fn shares_pages(&self) -> bool {
        self.ports.shared_pages().is_some_and(SharedPages::exist)
    }

    /// Returns how many pages reclaim keeps staged. Staging a page that processes share copies it,
    /// so after a fork reclaim stages pages only in order to write them back.
    fn staged_target_pages(&self) -> u64 {
        if self.shares_pages() {
            return 0;
        }
        ((self.resident_pages() + self.staged_pages()) >> STAGED_SHARE_SHIFT).max(STAGED_MIN_PAGES)
    }

    fn runs(&self) -> StoreRuns<'_, P> {
        StoreRuns(self, Urgency::Reclaim)
    }

    /// Allocates 2^order contiguous slots; drops swap-cache entries if they are needed for that.
    #[inline]
    fn alloc_slots(&self, order: Order) -> Option<Slot> {
        for _ in 0..SLOT_TRIES {
            match self.slots.alloc(self.ports.clock().cpu(), order) {
                Ok(slot) => return Some(slot),
                Err(NoSlots::Reclaim(slots)) => {
                    for entry in self.swap_cache.take_overlapping(slots) {
                        self.free_slots(entry.slot, entry.order.pages());
                    }
                }
                Err(NoSlots::Full) => return None,
                Err(NoSlots::Discard) => unreachable!("the store's device has no discard"),
            }
        }
        None
    }

    /// Drops the swap-cache entry of the folio whose head frame is `head`, if there is one.
    fn drop_cache_entry(&self, head: Frame) {
        if let Some(entry) = self.swap_cache.take(head) {
            self.free_slots(entry.slot, entry.order.pages());
        }
    }

    /// Frees frames that held pages of the program, and the swap-cache entry of the folio that
    /// began there.
    fn free_content(&self, run: UniqueRun) {
        self.drop_cache_entry(run.head);
        self.free_frames_of_content(run);
    }

    /// Frees frames that held pages of the program and have no swap-cache entry.
    #[inline]
    fn free_frames_of_content(&self, mut run: UniqueRun) {
        if self.ports.arena().frames_escape() {
            self.ports.arena().release(run.as_mut());
            self.ports.budget().uncharge(run.frames());
            self.homes.free_empty(run.into_run());
        } else {
            self.homes.free_full(run);
        }
    }

    /// Frees `slots` slots from `first` on and drops their references to their pieces.
    fn free_slots(&self, first: Slot, slots: u32) {
        let mut done = 0;
        while done < slots {
            let piece = self.slot_map.take(first.offset(done));
            let mut pages = 1;
            while done + pages < slots && self.slot_map.get(first.offset(done + pages)) == piece {
                self.slot_map.take(first.offset(done + pages));
                pages += 1;
            }
            self.store.release(&self.runs(), piece, pages as u16);
            done += pages;
        }
        self.slots.free(self.ports.clock().cpu(), first, slots);
    }
}
