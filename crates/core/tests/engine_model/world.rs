//! The program, the engine and the model: what each step of a program does, and the checks.

use super::double::{Double, Worker, resume_all};
use super::step::incompressible;
use foliomem_core::cluster::Strategy as SlotStrategy;
use foliomem_core::compaction::Variant;
use foliomem_core::discards::GRACE_NS;
use foliomem_core::engine::{BackingConfig, ColdWriteBack, Engine, EngineConfig, NoRoom, Served};
use foliomem_core::locality::SwapIn;
use foliomem_core::pacing::{BATCH_PAGES, Pacing};
use foliomem_types::size_policy::{Advice, SizePolicy};
use foliomem_types::units::{Order, OrderSet, PageNumber};
use std::collections::BTreeMap;
use std::ops::Range;

/// The test's address space: 4 blocks of 512 pages, from an arbitrary base.
pub const BASE: u64 = 512 * 1000;
pub const PAGES: u64 = 2048;

pub fn config(granule: u8) -> EngineConfig {
    EngineConfig {
        granule: Order::new(granule).unwrap(),
        // The last frame is the spare one.
        arena_frames: 16385,
        swap_slots: 512 * 64,
        strategy: SlotStrategy::default(),
        swap_in: SwapIn::default(),
        no_room: NoRoom::default(),
        whole_out: OrderSet::ALL,
        keep_copies: true,
        make_ahead: true,
        pacing: Pacing::Watermarks,
        compaction: Variant::default(),
        cpus: 1,
        protected_pages: 0,
        backing: None,
        recompress_idle_ns: Some(0),
    }
}

/// The program, the engine and the expected content of every page.
pub struct World {
    pub engine: Engine<Double>,
    pub worker: Worker,
    /// The content of every mapped page.
    pub model: BTreeMap<u64, u64>,
}

impl World {
    pub fn new(sizes: u16, granule: u8, limit_pages: i64, swap_clusters: u32) -> World {
        World::with(EngineConfig { swap_slots: 512 * swap_clusters, ..config(granule) }, sizes, limit_pages)
    }

    pub fn with_backing(limit_pages: i64, backing: BackingConfig) -> World {
        World::with(EngineConfig { backing: Some(backing), ..config(4) }, 1 << 4, limit_pages)
    }

    pub fn with(config: EngineConfig, sizes: u16, limit_pages: i64) -> World {
        let engine = Engine::new(Double::new(limit_pages), config);
        engine.ports().state.lock().sizes = SizePolicy::always(OrderSet::from_bits(sizes));
        World { engine, worker: Worker::default(), model: BTreeMap::new() }
    }

    pub fn write_incompressible(&mut self, pages: u64) {
        (0..pages).for_each(|page| self.run(&incompressible(page)));
    }

    pub fn mapped(&self, start: u64, pages: u64) -> Vec<u64> {
        let start = BASE + start;
        self.model.range(start..(start + pages).min(BASE + PAGES)).map(|(&page, _)| page).collect()
    }

    /// Makes `page` resident, as a touch does. Returns false if the touch ends the program; the
    /// unreadable pages are then unmapped.
    pub fn touch(&mut self, page: u64) -> bool {
        let present = self.engine.ports().state.lock().program.contains_key(&page);
        if !present {
            let before = self.allocated();
            self.engine.ports().state.lock().woken.clear();
            let unheard = || self.engine.counters().vm.discarded_unheard.get();
            let before_fault = unheard();
            let mut served = self.engine.fault(&mut self.worker, PageNumber(page));
            let is_there = || self.engine.ports().state.lock().program.contains_key(&page);
            if unheard() > before_fault && !is_there() {
                // The woken thread faults again and finds no content to map in.
                served = self.engine.fault(&mut self.worker, PageNumber(page));
            }
            assert!(matches!(served, Served::Done(_)), "{served:?}");
            assert!(
                self.engine.ports().state.lock().woken.contains(&page),
                "a thread that waits for {page:x} was not woken"
            );
            let allowed = self.allowed(page);
            let is_new = |order: &Order| self.allocated()[order.index()] > before[order.index()];
            assert!(Order::all().filter(is_new).all(|order| allowed.contains(order)), "{allowed:?} at {page:x}");
            while self
                .engine
                .claim_ahead(PageNumber(page))
                .is_some_and(|(ahead, order)| self.engine.read_ahead(&mut self.worker, ahead, order))
            {}
        }
        let lost = std::mem::take(&mut self.engine.ports().state.lock().poisoned);
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
        let state = self.engine.ports().state.lock();
        assert_ne!(
            state.program.contains_key(&page),
            lost.contains(&page),
            "page {page:x} is neither resident nor poisoned after its fault"
        );
        !lost.contains(&page)
    }

    /// Brings back what is swapped out, ahead of touches, and as far as there is room.
    pub fn resume(&mut self) {
        resume_all(&self.engine, &mut self.worker);
        let lost = std::mem::take(&mut self.engine.ports().state.lock().poisoned);
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
    }

    /// Searches for cold memory, as the agent does in a round.
    pub fn find_cold(&mut self, pages: u64, rounds: u64) {
        self.engine.begin_cold_round();
        while self.engine.write_back_cold(&mut self.worker, rounds) == ColdWriteBack::Some {}
        let mut left = pages;
        while left > 0 {
            let staged_pages = self.engine.stage_oldest(left.min(BATCH_PAGES));
            left = if staged_pages > 0 { left.saturating_sub(staged_pages) } else { 0 };
        }
    }

    /// Returns the number of first touches by the order that served them.
    pub fn allocated(&self) -> Vec<u64> {
        Order::all().map(|order| self.engine.counters().of(order).anon_fault_alloc.get()).collect()
    }

    /// Returns the orders that a folio at `page` may have.
    pub fn allowed(&self, page: u64) -> OrderSet {
        let state = self.engine.ports().state.lock();
        let advice = state.mapping(page).map_or(Advice::None, |(_, advice)| *advice);
        state.sizes.allowed(advice, state.disabled)
    }

    pub fn map(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        if self.model.range(start..end).next().is_some() {
            return;
        }
        self.model.extend((start..end).map(|page| (page, 0)));
        self.engine.ports().state.lock().mappings.push((start..end, Advice::None));
    }

    /// Touches pages before their mapping is registered, so that they are adopted.
    pub fn native_touch(&mut self, start: u64, pages: u64, value: u64) {
        for page in self.mapped(start, pages) {
            let mut state = self.engine.ports().state.lock();
            // Only pages unknown to the engine can be touched without a fault.
            if self.model[&page] == 0 && !state.program.contains_key(&page) && state.homes.is_empty() {
                state.program.insert(page, value);
                state.charged += 1;
                self.model.insert(page, value);
            }
        }
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        assert_eq!(self.engine.adopt(PageNumber(start)..PageNumber(end)), Ok(()));
    }

    pub fn unmap(&mut self, start: u64, pages: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        self.engine.ports().state.lock().unmap(start..end);
        self.model.retain(|page, _| !(start..end).contains(page));
        self.engine.unmapped(PageNumber(start)..PageNumber(end));
    }

    /// Discards a range; the kernel drops one in `every` of its resident pages: all for
    /// MADV_DONTNEED, some for MADV_FREE.
    pub fn discard(&mut self, start: u64, pages: u64, every: u64) {
        let (start, end) = (BASE + start, (BASE + start + pages).min(BASE + PAGES));
        self.engine.discarded(PageNumber(start)..PageNumber(end));
        {
            let mut state = self.engine.ports().state.lock();
            for page in start..end {
                let stays = state.program.contains_key(&page) && !page.is_multiple_of(every);
                if !stays {
                    state.drop_page(page);
                    state.shared.remove(&page);
                    self.model.entry(page).and_modify(|value| *value = 0);
                }
            }
        }
        self.engine.maintain();
    }

    /// Maps in all content, whatever the limit is: the program continues without the engine.
    pub fn bring_all_in(&mut self) {
        let limit_pages = std::mem::replace(&mut self.engine.ports().state.lock().limit_pages, i64::MAX / 2);
        self.engine.bring_all_in(&mut self.worker);
        let lost = {
            let mut state = self.engine.ports().state.lock();
            state.limit_pages = limit_pages;
            for (page, &value) in &self.model {
                let content = state.program.get(page).copied();
                assert!(state.poisoned.contains(page) || content.unwrap_or(0) == value, "{page:x}: {content:?}");
            }
            std::mem::take(&mut state.poisoned)
        };
        lost.iter().for_each(|&page| self.unmap(page - BASE, 1));
    }

    /// Installs and removes a guard on one page in `every`, without a message. A staged or
    /// swapped-out page loses its content.
    pub fn guard(&mut self, start: u64, pages: u64, every: u64) {
        let mut state = self.engine.ports().state.lock();
        for page in (BASE + start..(BASE + start + pages).min(BASE + PAGES)).filter(|page| page.is_multiple_of(every)) {
            if state.marks.remove(&page) && !state.program.contains_key(&page) {
                self.model.entry(page).and_modify(|value| *value = 0);
            }
        }
    }

    /// Waits until discarded pages are gone or managed again.
    pub fn wait(&mut self) {
        self.engine.ports().state.lock().now_ns += 2 * GRACE_NS;
        self.engine.maintain();
    }

    pub fn remap(&mut self, from: u64, to: u64, pages: u64) {
        let (from, to) = (BASE + from, BASE + to);
        let inside = |start: u64| start + pages <= BASE + PAGES;
        let overlap = from < to + pages && to < from + pages;
        let whole = (from..from + pages).all(|page| self.model.contains_key(&page));
        let clear = {
            let state = self.engine.ports().state.lock();
            state.pinned.range(from..from + pages).next().is_none()
        };
        if !inside(from) || !inside(to) || overlap || !whole || !clear {
            return;
        }
        self.unmap(to - BASE, pages);
        self.engine.ports().state.lock().remap(from..from + pages, to);
        for index in 0..pages {
            let value = self.model.remove(&(from + index)).unwrap();
            self.model.insert(to + index, value);
        }
        self.engine.remapped(PageNumber(from), PageNumber(to), pages as u32);
    }

    /// Puts a page of zeros where the engine has content and the program has no page, at every
    /// `every`th of these pages. Returns the number of the new pages.
    pub fn add_strays(&mut self, every: usize) -> usize {
        let mut state = self.engine.ports().state.lock();
        let movable = |page: &u64| !state.refusing.contains(page) && !state.pinned.contains(page);
        let is_out = |page: &u64| self.model[page] != 0 && !state.program.contains_key(page) && movable(page);
        let strays: Vec<u64> = self.model.keys().copied().filter(is_out).step_by(every).collect();
        state.program.extend(strays.iter().map(|&page| (page, 0)));
        strays.len()
    }

    pub fn verify(&mut self, page: u64) {
        if !self.model.contains_key(&page) || !self.touch(page) {
            return;
        }
        let state = self.engine.ports().state.lock();
        assert_eq!(state.program[&page], self.model[&page], "content of page {page:x}");
    }

    pub fn check(&self) {
        self.engine.check();
        assert!(self.worker.writes.is_empty(), "a write is unfinished");
        let state = self.engine.ports().state.lock();
        let taken = (state.homes.len() + state.program.len()) as i64;
        assert_eq!(state.charged, taken, "the charge equals the pages present");
        drop(state);
        self.check_stored();
    }

    /// Verifies that [`Engine::for_each_stored`] passes each page that is swapped out once.
    fn check_stored(&self) {
        let (mut next, mut passed) = (Some(PageNumber(0)), 0);
        let mut end = PageNumber(0);
        while let Some(from) = next {
            next = self.engine.for_each_stored(from, 1, |stored| {
                assert!(stored.page >= end && stored.pages > 0, "{stored:?} after {end:?}");
                end = stored.page.offset(stored.pages);
                passed += u64::from(stored.pages);
            });
        }
        assert_eq!(passed, self.engine.swapped_pages());
    }
}

/// Writes `value` to pages never touched before; returns the maximum charge meanwhile.
pub fn fill(world: &mut World, pages: Range<u64>, value: u64) -> i64 {
    world.engine.ports().state.lock().mappings.push((BASE + pages.start..BASE + pages.end, Advice::None));
    let mut most = 0;
    for page in pages {
        world.model.insert(BASE + page, value);
        assert!(world.touch(BASE + page));
        let mut state = world.engine.ports().state.lock();
        state.program.insert(BASE + page, value);
        most = most.max(state.charged);
    }
    most
}

/// A value that is neither filled nor raw in the double, and compresses well.
pub const COMPRESSIBLE: u64 = 11;
/// A value that is raw in the double: a multiple of 7.
pub const INCOMPRESSIBLE: u64 = 7;
