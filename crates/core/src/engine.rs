//! The memory manager: faults, reclaim and mapping changes over one program's memory.
//!
//! A page's life: first touch or adoption makes it part of a *resident* folio, the youngest of those on
//! probation. Reclaim *stages* the oldest folios: their pages move home, out of the program's reach.
//! A staged folio that is touched moves straight back (second chance), and is active from then on, as one is that was
//! out for a short time only ([`crate::workingset`]); one that is not is *written
//! back*: compressed piece by piece into the store under consecutive swap slots, its frames free for
//! others. Where there is a swap file, the oldest pieces of the store are in turn written there when the store
//! takes too much. Touching it then *swaps it in*: whole, or a part of it where that is all that is used
//! ([`crate::locality`]); its slots may be kept until it is changed
//! ([`crate::swap_cache`]). Every way into the program goes through
//! `bring_in`, every way out through `stage`, every split through `carve`.
//! A resident folio of which a part is unmapped or discarded stays together for a while (see `partial`).
//!
//! Any number of threads may call in. Long work (compressing, decompressing) is done without a lock,
//! its pages marked busy; see [`crate::page_table`] for who owns what then. Lock order: one block, then
//! leaves (homes, queues, slots, store). Never two blocks.

mod backoff;
mod check;
mod claims;
mod fault;
mod mapping;
mod migrate;
mod partial;
mod reclaim;
mod recompress;
mod restore;
mod stage;
mod store_compaction;
mod take_apart;
mod unmanaged;
mod write_back;

pub use fault::Served;
pub use reclaim::Attempt;

use crate::cluster::{Discard, NoSlots, SlotCounters, Strategy, SwapClusters, SwapDevice};
use crate::compaction::{Compactor, Variant};
use crate::discards::Discards;
use crate::homes::{Homes, Urgency};
use crate::locality::{Locality, SwapIn};
use crate::machine::Machine;
use crate::page_table::{PageState, PageTable};
use crate::queue::Queue;
use crate::readahead::Readahead;
use crate::rmap::Rmap;
use crate::run_tokens::UniqueRun;
use crate::slot_map::SlotMap;
use crate::stats::Counters;
use crate::store::{HolderId, RunSource, Store, StoreStats};
use crate::swap_cache::SwapCache;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::units::{ClusterNumber, Frame, FrameRun, Order, OrderSet, PageNumber, Slot};
use crate::workingset::Workingset;
use backoff::Backoff;

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The largest piece that is compressed as one.
    pub granule: Order,
    /// Frames in the arena, at least one. Only what is used costs memory.
    pub arena_frames: u32,
    /// Slots of the swap device. Only what is used costs memory.
    pub swap_slots: u32,
    /// How slots are found.
    pub strategy: Strategy,
    /// How much of a folio a fault brings back.
    pub swap_in: SwapIn,
    /// What a fault does when the limit leaves no room for a large folio.
    pub no_room: NoRoom,
    /// Folio sizes that go out whole. Others are split before they do (Linux before 6.10: all but 2 MiB).
    pub whole_out: OrderSet,
    /// Keep the slots of what was swapped in, while that pays. (For synchronous devices the kernel frees them at once.)
    pub keep_copies: bool,
    /// Make new memory before it is touched, where it is touched in order. Nobody knows then when it is touched first.
    pub make_ahead: bool,
    /// How runs of frames are made where there are none.
    pub compaction: Variant,
    /// CPUs that allocate slots.
    pub cpus: u16,
    /// Pages the program keeps in reach whatever the limit says: where the data do not compress into the
    /// limit, going over it beats moving the last pages in and out for ever. To begin with ([`Engine::limit_is`]).
    pub floor_pages: u64,
    /// The swap file behind the store, if there is one.
    pub backing: Option<BackingConfig>,
    /// How long a piece has been in the store, at least, before a slower codec is tried on it; `None` if there is none.
    pub recompress_idle_ns: Option<u64>,
}

/// What a fault does when the limit leaves no room for a large folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NoRoom {
    /// Makes room, and takes a smaller one only if that does not help.
    #[default]
    Reclaim,
    /// Takes a smaller one at once, and makes room for single pages only: Linux by default (`GFP_TRANSHUGE_LIGHT`).
    FallBack,
}

/// Times an allocation of slots is tried again after copies have given up theirs. Each time some are there to be
/// given up, or were taken by somebody else just now, so that a few are enough.
const SLOT_TRIES: u32 = 4;

/// The swap file behind the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingConfig {
    /// Its slots, in whole clusters.
    pub slots: u32,
    /// Whether clusters of it are discarded when they are free.
    pub discard: Discard,
    /// What the store may take before its oldest pieces are written to the file, to begin with ([`Engine::limit_is`]).
    pub store_pages: u32,
}

/// Part of the content (1/2^5) that is kept staged while there is pressure: enough that a folio in use
/// is touched before it is written back, little enough that the touches cost little.
const STAGED_SHARE_SHIFT: u32 = 5;
/// Never fewer staged pages than this: 1 MiB.
const STAGED_MIN_PAGES: u64 = 256;

/// The memory manager of one program.
pub struct Engine<M: Machine> {
    machine: M,
    config: EngineConfig,
    /// See [`Engine::limit_is`].
    floor_pages: AtomicU64,
    store_pages: AtomicU32,
    /// Looks at the store that leave the file alone, because it was full or failed.
    file_pause: AtomicU32,
    backoff: Backoff,
    /// The arena's last frame, for what has to pass through it when all others are taken. Nobody holds the lock for long.
    spare: Mutex<Option<UniqueRun>>,
    table: PageTable,
    homes: Homes,
    rmap: Rmap,
    compactor: Compactor,
    probation: Queue,
    active: Queue,
    /// Neither, and with a compressed copy.
    copied: Queue,
    /// What could not be moved when it was tried.
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
}

/// The engine's frames as the store's memory. The store grows only while something larger is written
/// back, so it may take the reserve; for compaction it may not.
struct StoreRuns<'a, M: Machine>(&'a Engine<M>, Urgency);

impl<M: Machine> RunSource for StoreRuns<'_, M> {
    fn alloc_run(&self, order: Order) -> Option<FrameRun> {
        self.0.homes.alloc_full(&self.0.machine, order, self.1).ok().map(|(run, _)| run.into_run())
    }

    fn free_run(&self, run: FrameRun) {
        self.0.homes.free_full(UniqueRun::mint(run));
    }

    fn note_holder(&self, run: FrameRun, holder: HolderId) {
        self.0.rmap.set_store(run, holder);
    }

    fn claim_cluster(&self, cluster: ClusterNumber) -> bool {
        self.0.machine.claim_cluster(cluster)
    }

    fn release_cluster(&self, cluster: ClusterNumber) {
        self.0.machine.release_cluster(cluster);
    }

    fn is_sole_holder(&self, cluster: ClusterNumber) -> bool {
        self.0.machine.is_sole_holder(cluster)
    }
}

impl<M: Machine> Engine<M> {
    /// A manager of `machine` that manages nothing yet.
    pub fn new(machine: M, config: EngineConfig) -> Engine<M> {
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
            backoff: Backoff::default(),
            spare: Mutex::new(Some(UniqueRun::mint(FrameRun::new(Frame(managed_frames), Order::ZERO)))),
            table: PageTable::default(),
            homes: Homes::new(managed_frames),
            rmap: Rmap::new(config.arena_frames),
            compactor: Compactor::new(config.compaction),
            probation: Queue::default(),
            active: Queue::default(),
            copied: Queue::default(),
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
            floor_pages: AtomicU64::new(config.floor_pages),
            store_pages: AtomicU32::new(config.backing.map_or(0, |backing| backing.store_pages)),
            machine,
            config,
        }
    }

    /// The machine it manages.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// How it was set up.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Its counters.
    pub fn counters(&self) -> &Counters {
        self.machine.counters()
    }

    /// Pages in the program.
    pub fn resident_pages(&self) -> u64 {
        self.resident_pages.load(Relaxed)
    }

    /// Pages staged at home.
    pub fn staged_pages(&self) -> u64 {
        self.staged_pages.load(Relaxed)
    }

    /// Pages of memory that it knows of: in the program, and frames that are full or charged.
    pub fn held_pages(&self) -> u64 {
        let frames = self.free_frames() + self.store.held_frames();
        self.resident_pages() + self.staged_pages() + u64::from(frames)
    }

    /// Free frames that need no charge.
    pub fn free_frames(&self) -> u32 {
        self.homes.full_frames()
    }

    /// Pages in the store.
    pub fn swapped_pages(&self) -> u64 {
        u64::from(self.slots.used_slots()).saturating_sub(self.swap_cache.pages())
    }

    /// Whether any content of the program is at home or in the store.
    pub fn has_content_out(&self) -> bool {
        self.staged_pages() + self.swapped_pages() > 0
    }

    /// What the slot allocator has done.
    pub fn slot_counters(&self) -> SlotCounters {
        self.slots.counters()
    }

    /// Of that, the clusters whose slots were looked through.
    pub fn clusters_scanned(&self) -> u64 {
        self.slots.clusters_scanned()
    }

    /// What the store holds.
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

    /// The limit is another now: what the program keeps in reach, and what the store may take, is this
    /// ([`EngineConfig::floor_pages`], [`BackingConfig::store_pages`]).
    pub fn limit_is(&self, floor_pages: u64, store_pages: u32) {
        self.floor_pages.store(floor_pages, Relaxed);
        self.store_pages.store(store_pages, Relaxed);
    }

    /// The order of the folio around `page`, if it has content.
    pub fn order_of(&self, page: PageNumber) -> Option<Order> {
        self.table.get(page)?.lock().get(page).order()
    }

    /// Whether `page` is in the program.
    pub fn is_resident(&self, page: PageNumber) -> bool {
        self.table.get(page).is_some_and(|block| matches!(block.lock().get(page), PageState::Resident { .. }))
    }

    /// How badly a fault may want frames.
    #[inline]
    fn urgency(&self) -> Urgency {
        // What cannot be moved is no part of what is kept in reach: all the rest would be moved in and out in turn.
        let floor_pages = self.floor_pages.load(Relaxed) + self.unevictable.pages();
        if self.resident_pages() + self.staged_pages() < floor_pages { Urgency::Reclaim } else { Urgency::Normal }
    }

    fn staged_target_pages(&self) -> u64 {
        ((self.resident_pages() + self.staged_pages()) >> STAGED_SHARE_SHIFT).max(STAGED_MIN_PAGES)
    }

    fn runs(&self) -> StoreRuns<'_, M> {
        StoreRuns(self, Urgency::Reclaim)
    }

    /// 2^order contiguous slots, for which compressed copies of what is in the program may have to go.
    #[inline]
    fn alloc_slots(&self, order: Order) -> Option<Slot> {
        for _ in 0..SLOT_TRIES {
            match self.slots.alloc(self.machine.cpu(), order) {
                Ok(slot) => return Some(slot),
                Err(NoSlots::Reclaim(slots)) => {
                    for copy in self.swap_cache.take_overlapping(slots) {
                        self.free_slots(copy.slot, copy.order.pages());
                    }
                }
                Err(NoSlots::Full) => return None,
                Err(NoSlots::Discard) => unreachable!("the store wants no discard"),
            }
        }
        None
    }

    /// Frees the compressed copy of the folio whose head frame is `head`, if there is one.
    fn drop_copy(&self, head: Frame) {
        if let Some(copy) = self.swap_cache.take(head) {
            self.free_slots(copy.slot, copy.order.pages());
        }
    }

    /// Frees frames that held pages of the program, and a compressed copy of the folio that began there.
    fn free_content(&self, run: UniqueRun) {
        self.drop_copy(run.head);
        self.free_frames_of_content(run);
    }

    /// The same where there is no copy.
    #[inline]
    fn free_frames_of_content(&self, mut run: UniqueRun) {
        if self.machine.frames_escape() {
            self.machine.release(run.as_mut());
            self.machine.uncharge(run.frames());
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
        self.slots.free(self.machine.cpu(), first, slots);
    }
}
