//! The lab's driver: it turns a program's accesses on the lab's machine into calls of the engine.

use crate::error::LabError;
use crate::machine::{Access, LabMachine};
use crate::workload::CacheOutcome;
use foliomem_core::cluster::SlotCounters;
use foliomem_core::engine::{Engine, EngineConfig, Served};
use foliomem_core::pacing::{BackgroundReclaim, Pacing, reads_ahead_after};
use foliomem_core::ports::{Budget, Ports};
use foliomem_types::counters::FaultKind;
use foliomem_types::units::{CpuNumber, PageNumber};
use std::ops::Range;

/// An engine on a lab machine, with the state of its program.
pub struct Lab {
    engine: Engine<LabMachine>,
    most_pages: u64,
    accesses: u64,
    faults: u64,
    /// The faults since the program came near its limit, by kind.
    managed_faults: [u64; FaultKind::ALL.len()],
    /// Whether the program has come so near to its limit that foliomem manages its memory.
    is_activated: bool,
    /// Number of faults between checks of the whole engine.
    check_every: Option<u64>,
    dropped_pages: u64,
    peak_swapped_pages: u64,
    is_kept: bool,
    /// The fault to read ahead after, and the time that the program must still run before that.
    ahead: Option<PageNumber>,
    ahead_ns: i64,
    clusters_paid: u64,
    lists_busy_until_ns: u64,
    page_cache: Option<CacheOutcome>,
}

/// What a CPU did for a while, in virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spent {
    /// The total time.
    pub ns: u64,
    /// The part in which the program computed.
    pub computed_ns: u64,
    /// The part in which the CPU waited for the list lock of the slot allocator.
    pub waited_ns: u64,
}

impl Lab {
    /// Makes an engine with `config` on `machine`. The engine is checked after every `check_every`
    /// faults. A program that takes more than `most_pages` is out of memory, because nothing else
    /// has room for it. (An engine exceeds the limit rather than let a program wait forever.)
    pub fn new(machine: LabMachine, config: EngineConfig, most_pages: u64, check_every: Option<u64>) -> Lab {
        Lab {
            engine: Engine::new(machine, config),
            most_pages,
            accesses: 0,
            faults: 0,
            managed_faults: [0; FaultKind::ALL.len()],
            is_activated: false,
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

    /// Returns the engine.
    pub fn engine(&self) -> &Engine<LabMachine> {
        &self.engine
    }

    /// Returns the machine.
    pub fn machine(&self) -> &LabMachine {
        self.engine.ports()
    }

    /// Returns the counters of the slot allocator.
    pub fn slots(&self) -> SlotCounters {
        self.engine.slot_counters()
    }

    /// Makes `cpu` the running CPU at `now_ns`.
    pub fn begin(&mut self, cpu: CpuNumber, now_ns: u64) {
        self.machine().begin(cpu, now_ns);
    }

    /// Returns what the running CPU did since it [began](Self::begin) at `now_ns`.
    ///
    /// One lock protects the scan of listed clusters. It serves the CPUs in the order of their
    /// starts, and later ones wait. So all CPUs together never scan more than one CPU could.
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

    /// Maps `range` into the program.
    pub fn map(&mut self, range: Range<PageNumber>) {
        self.machine().map(range);
    }

    /// Unmaps `range`, which must be a whole mapping.
    pub fn unmap(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.unmapped(range.clone());
        self.machine().unmap(range);
    }

    /// Discards `range` (MADV_DONTNEED).
    pub fn discard(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.discarded(range.clone());
        self.machine().drop_pages(range);
    }

    /// Drops all pages of `range`; mappings there may be gone, too.
    pub fn forget(&mut self, range: Range<PageNumber>) {
        self.dropped_pages += range.end.0 - range.start.0;
        self.engine.unmapped(range.clone());
        self.machine().drop_pages(range);
    }

    /// Uses the engine from now on as foliomem does: it keeps some room free and reads ahead after
    /// faults.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Reads ahead the next part, once the program ran for as long as the last part took.
    fn read_ahead(&mut self) {
        let Some(page) = self.ahead.filter(|_| self.ahead_ns <= 0) else { return };
        let before_ns = self.machine().spent_ns();
        if self.engine.claim_ahead(page).is_some_and(|(ahead, order)| self.engine.read_ahead(&mut (), ahead, order)) {
            self.ahead_ns += (self.machine().spent_ns() - before_ns) as i64;
        } else {
            self.ahead = None;
        }
    }

    /// Reclaims as woken reclaimers do, without contention.
    fn keep_room(&mut self) {
        if !self.engine.should_reclaim(&self.engine.room()) {
            return;
        }
        while !matches!(self.engine.reclaim_in_background(&mut ()), BackgroundReclaim::Done(_)) {}
        while self.engine.compact_in_background() {}
    }

    /// Changes the charge of unmanaged memory from `before_pages` to `now_pages`.
    pub fn charge_others(&mut self, before_pages: u32, now_pages: u32) {
        self.machine().uncharge(before_pages);
        self.machine().charge(now_pages);
        if self.is_kept {
            self.keep_room();
        }
    }

    /// Pages out `range` (MADV_PAGEOUT) and does the monitor's maintenance: without it stale claims
    /// would stay, because nothing is reclaimed.
    pub fn page_out(&mut self, range: Range<PageNumber>) {
        self.engine.page_out(&mut (), range);
        self.engine.maintain();
    }

    /// Reads or writes `page` as the program does.
    #[inline]
    pub fn touch(&mut self, page: PageNumber, access: Access) -> Result<(), LabError> {
        self.accesses += 1;
        self.machine().compute(self.machine().costs().touch_ns.into());
        if !self.machine().access(page, access) {
            return self.fault(page, access);
        }
        if self.ahead.is_some() {
            self.ahead_ns -= i64::from(self.machine().costs().touch_ns);
            self.read_ahead();
        }
        Ok(())
    }

    fn fault(&mut self, page: PageNumber, access: Access) -> Result<(), LabError> {
        self.faults += 1;
        self.machine().spend(self.machine().costs().fault_ns.into());
        // The thread that serves this fault would have read ahead until the fault arrived, and
        // would often have fetched the faulting page itself.
        self.ahead_ns = 0;
        self.read_ahead();
        let served = self.engine.fault(&mut (), page);
        assert!(matches!(served, Served::Done(_)) && self.machine().access(page, access), "{page:?} is not there");
        self.count(served);
        if served == Served::Done(FaultKind::SwapIn) {
            self.engine.counters().vm.pgmajfault.inc();
        }
        if self.is_kept {
            self.keep_room();
            let reads_ahead = matches!(served, Served::Done(kind) if reads_ahead_after(kind));
            self.ahead = reads_ahead.then_some(page);
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

    /// Counts a fault that foliomem would have served: before foliomem activates, the kernel serves
    /// all faults.
    fn count(&mut self, served: Served) {
        self.is_activated = self.is_activated || Pacing::Watermarks.activates(&self.engine.room());
        if let (true, Served::Done(kind)) = (self.is_activated, served) {
            self.managed_faults[kind as usize] += 1;
        }
    }

    /// Returns the faults of a kind since the program came so near to its limit that foliomem
    /// manages its memory.
    pub fn managed_faults(&self, kind: FaultKind) -> u64 {
        self.managed_faults[kind as usize]
    }

    /// Reads or writes all pages of `range` in order, as the program does.
    pub fn touch_all(&mut self, range: Range<PageNumber>, access: Access) -> Result<(), LabError> {
        (range.start.0..range.end.0).try_for_each(|page| self.touch(PageNumber(page), access))
    }

    /// Records the peak of swapped-out pages. It is called now and then, because counting takes
    /// time.
    pub fn note_swapped(&mut self) {
        self.peak_swapped_pages = self.peak_swapped_pages.max(self.engine.swapped_pages());
    }

    /// Returns the recorded peak of swapped-out pages.
    pub fn peak_swapped_pages(&self) -> u64 {
        self.peak_swapped_pages
    }

    /// Returns whether the engine is checked now and then.
    pub fn is_checked(&self) -> bool {
        self.check_every.is_some()
    }

    /// Records the outcome of a workload with a page cache.
    pub fn note_page_cache(&mut self, outcome: CacheOutcome) {
        self.page_cache = Some(outcome);
    }

    /// Returns the outcome recorded by [`note_page_cache`](Self::note_page_cache).
    pub fn page_cache(&self) -> Option<&CacheOutcome> {
        self.page_cache.as_ref()
    }

    /// Returns the number of page accesses and the number of faults among them.
    pub fn accesses(&self) -> (u64, u64) {
        (self.accesses, self.faults)
    }

    /// Returns the number of pages that came or went: first touches, second chances, swap-outs,
    /// swap-ins, unmapped pages, and those of a page cache.
    pub fn page_events(&self) -> u64 {
        let counters = self.machine().counters();
        let vm = &counters.vm;
        let sizes = foliomem_types::units::Order::all();
        let first: u64 = sizes.map(|order| counters.of(order).anon_fault_alloc.get() << order.get()).sum();
        let moved = vm.pgactivate.get() + vm.pswpin.get() + vm.pswpout.get();
        first + moved + self.dropped_pages + self.page_cache.as_ref().map_or(0, CacheOutcome::page_events)
    }
}
