//! A program on the lab's machine: what it does becomes calls of the engine.

use crate::error::LabError;
use crate::machine::LabMachine;
use crate::workload::CacheOutcome;
use foliomem_core::cluster::SlotCounters;
use foliomem_core::engine::{Attempt, Engine, EngineConfig, Served};
use foliomem_core::machine::Machine;
use foliomem_core::stats::FaultKind;
use foliomem_core::units::{CpuNumber, PageNumber};
use foliomem_core::watermark;
use std::ops::Range;

/// See the module.
pub struct Lab {
    engine: Engine<LabMachine>,
    most_pages: u64,
    accesses: u64,
    faults: u64,
    /// Faults between checks of the whole engine.
    check_every: Option<u64>,
    dropped_pages: u64,
    peak_swapped_pages: u64,
    is_kept: bool,
    /// The fault after which more is fetched now, and how long the last part takes from now on.
    ahead: Option<PageNumber>,
    ahead_ns: i64,
    clusters_paid: u64,
    lists_busy_until_ns: u64,
    page_cache: Option<CacheOutcome>,
}

/// What a CPU did for a while, in virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spent {
    /// All of it.
    pub ns: u64,
    /// What of that the program computed.
    pub computed_ns: u64,
    /// What of it was waiting for the lists of clusters.
    pub waited_ns: u64,
}

impl Lab {
    /// The engine, set up as `config` says, on `machine`; checked after so many faults, if it is to be. A program that takes
    /// more than `most_pages` is out of memory: what it has fits nowhere else. (An engine goes beyond the limit rather than let a
    /// program wait for ever.)
    pub fn new(machine: LabMachine, config: EngineConfig, most_pages: u64, check_every: Option<u64>) -> Lab {
        Lab {
            engine: Engine::new(machine, config),
            most_pages,
            accesses: 0,
            faults: 0,
            check_every,
            dropped_pages: 0,
            peak_swapped_pages: 0,
            is_kept: false,
            ahead: None,
            ahead_ns: 0,
            clusters_paid: 0,
            lists_busy_until_ns: 0,
            page_cache: None,
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<LabMachine> {
        &self.engine
    }

    /// The machine.
    pub fn machine(&self) -> &LabMachine {
        self.engine.machine()
    }

    /// What the slot allocator has done.
    pub fn slots(&self) -> SlotCounters {
        self.engine.slot_counters()
    }

    /// From now on `cpu` runs, at `now_ns`.
    pub fn begin(&mut self, cpu: CpuNumber, now_ns: u64) {
        self.machine().begin(cpu, now_ns);
    }

    /// What the CPU that runs did since `now_ns`, when it [began](Self::begin).
    ///
    /// Clusters on lists are looked through under one lock. It serves the CPUs in the order of their beginnings, and who
    /// comes later waits: so that all of them together never look through more than one CPU could.
    pub fn end(&mut self, now_ns: u64) -> Spent {
        let scanned = self.engine.clusters_scanned();
        let looking_ns = (scanned - self.clusters_paid) * u64::from(self.machine().costs().cluster_ns);
        self.clusters_paid = scanned;
        self.machine().spend(looking_ns);
        let ns = self.machine().spent_ns();
        self.lists_busy_until_ns = self.lists_busy_until_ns.max(now_ns) + looking_ns;
        let waited_ns = self.lists_busy_until_ns.saturating_sub(now_ns + ns) * u64::from(looking_ns > 0);
        Spent { ns: ns + waited_ns, computed_ns: self.machine().computed_ns(), waited_ns }
    }

    /// The program maps `range`.
    pub fn map(&mut self, range: Range<PageNumber>) {
        self.machine().map(range);
    }

    /// The program unmaps `range`, a whole mapping.
    pub fn unmap(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.unmapped(range.clone());
        self.machine().unmap(range);
    }

    /// MADV_DONTNEED.
    pub fn discard(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.discarded(range.clone());
        self.machine().drop_pages(range);
    }

    /// What was in `range` is gone, and so may be mappings there.
    pub fn forget(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.unmapped(range.clone());
        self.machine().drop_pages(range);
    }

    /// From now on the engine is used as foliomem uses it: some room is kept, and what is likely to be touched after a fault
    /// is fetched with it.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Fetches the next part of what is likely to be touched, once the program has had the time that the last one took.
    fn read_ahead(&mut self) {
        let Some(page) = self.ahead.filter(|_| self.ahead_ns <= 0) else { return };
        let before_ns = self.machine().spent_ns();
        if self.engine.claim_ahead(page).is_some_and(|(ahead, order)| self.engine.read_ahead(&mut (), ahead, order)) {
            self.ahead_ns += (self.machine().spent_ns() - before_ns) as i64;
        } else {
            self.ahead = None;
        }
    }

    /// What reclaimers do once they are woken, with nobody in their way.
    fn keep_room(&mut self) {
        let low = watermark::low_pages(self.machine().limit_pages() as i64);
        let room = |lab: &Lab| lab.machine().room_pages() + i64::from(lab.engine.free_frames());
        if room(self) >= low || self.engine.reclaim_is_futile() {
            return;
        }
        while room(self) < 2 * low {
            if self.engine.compact_wasteful_store() > 0 {
                continue;
            }
            let Attempt::Freed(1..) = self.engine.try_reclaim(&mut (), watermark::BATCH_PAGES) else { break };
        }
        while self.engine.compact_proactively() {}
    }

    /// So many pages that the engine does not manage take a part of the room: `before` until now.
    pub fn charge_others(&mut self, before_pages: u32, now_pages: u32) {
        self.machine().uncharge(before_pages);
        self.machine().charge(now_pages);
        if self.is_kept {
            self.keep_room();
        }
    }

    /// MADV_PAGEOUT, and what the keeper does meanwhile: without it claims of what is out stay where nothing is reclaimed.
    pub fn page_out(&mut self, range: Range<PageNumber>) {
        self.engine.page_out(&mut (), range);
        self.engine.tend();
    }

    /// The program reads or writes `page`.
    #[inline]
    pub fn touch(&mut self, page: PageNumber, write: bool) -> Result<(), LabError> {
        self.accesses += 1;
        self.machine().compute(self.machine().costs().touch_ns.into());
        if !self.machine().access(page, write) {
            return self.fault(page, write);
        }
        if self.ahead.is_some() {
            self.ahead_ns -= i64::from(self.machine().costs().touch_ns);
            self.read_ahead();
        }
        Ok(())
    }

    fn fault(&mut self, page: PageNumber, write: bool) -> Result<(), LabError> {
        self.faults += 1;
        self.machine().spend(self.machine().costs().fault_ns.into());
        // Who serves it fetches what comes next until it hears of it: often that is what was touched.
        self.ahead_ns = 0;
        self.read_ahead();
        let served = self.engine.fault(&mut (), page);
        assert!(matches!(served, Served::Done(_)) && self.machine().access(page, write), "{page:?} is not there");
        if served == Served::Done(FaultKind::SwapIn) {
            self.engine.counters().vm.pgmajfault.inc();
        }
        if self.is_kept {
            self.keep_room();
            let goes_on =
                matches!(served, Served::Done(FaultKind::SwapIn | FaultKind::FirstTouch | FaultKind::Spurious));
            self.ahead = goes_on.then_some(page);
            self.ahead_ns = 0;
            self.read_ahead();
        }
        if self.check_every.is_some_and(|every| self.faults.is_multiple_of(every)) {
            self.engine.check();
        }
        if self.machine().charged_pages() > self.most_pages {
            return Err(LabError::OutOfMemory {
                faults: self.faults,
                held_mib: self.machine().charged_pages() >> 8,
                limit_mib: self.machine().limit_pages() >> 8,
            });
        }
        Ok(())
    }

    /// The program reads or writes all pages of `range`, in order.
    pub fn touch_all(&mut self, range: Range<PageNumber>, write: bool) -> Result<(), LabError> {
        (range.start.0..range.end.0).try_for_each(|page| self.touch(PageNumber(page), write))
    }

    /// Notes how full the device is, now and then: counting takes time.
    pub fn note_swapped(&mut self) {
        self.peak_swapped_pages = self.peak_swapped_pages.max(self.engine.swapped_pages());
    }

    /// The most pages that were out whenever that was noted.
    pub fn peak_swapped_pages(&self) -> u64 {
        self.peak_swapped_pages
    }

    /// Whether everything is to be checked now and then.
    pub fn is_checked(&self) -> bool {
        self.check_every.is_some()
    }

    /// Notes what a workload that has a page cache came to.
    pub fn note_page_cache(&mut self, outcome: CacheOutcome) {
        self.page_cache = Some(outcome);
    }

    /// See [`note_page_cache`](Self::note_page_cache).
    pub fn page_cache(&self) -> Option<&CacheOutcome> {
        self.page_cache.as_ref()
    }

    /// Accesses of pages, and those of them that were faults.
    pub fn accesses(&self) -> (u64, u64) {
        (self.accesses, self.faults)
    }

    /// Pages that came or went: first touches, second chances, swap-outs, swap-ins, what was unmapped, and what a page cache did.
    pub fn page_events(&self) -> u64 {
        let counters = self.machine().counters();
        let vm = &counters.vm;
        let sizes = foliomem_core::units::Order::all();
        let first: u64 = sizes.map(|order| counters.of(order).anon_fault_alloc.get() << order.get()).sum();
        let moved = vm.pgactivate.get() + vm.pswpin.get() + vm.pswpout.get();
        first + moved + self.dropped_pages + self.page_cache.as_ref().map_or(0, CacheOutcome::page_events)
    }
}
