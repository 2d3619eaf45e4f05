//! The budget of one process: what it may take of the tree's limit.
//!
//! The measure is the kernel's count of the process's anonymous resident pages. It covers the
//! program, the arena, the store, and the engine's tables. A sample is a read of
//! `/proc/self/statm`. Between samples the budget adds the pages that the engine charges. Each
//! sample is published in the process's slot of the control segment, which also lets a limit grow
//! that follows the need. The limit less what other processes have published is left for this one.
//! After a fork, shared pages count in proportion ([`Budget::set_shared_pages`]).
//!
//! No lock: any thread may call. The figures of concurrent callers may be wrong by what they charge
//! at the same moment, which the next sample corrects.

use crate::messages::Excess;
use crate::process_table::SlotIndex;
use crate::segment::Control;
use foliomem_sys::clock::now_ns;
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::pagemap;
use foliomem_types::counters::Counters;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::OwnedFd;
use rustix::process::Pid;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// A sample this old may be made anew by whoever is refused. Reading takes about 2 us.
const STALE_NS: u64 = 50_000;
/// How far beyond the limit the tree may be without a word, as a share of the limit (1/2^5): reclaim needs a
/// little memory to free more.
const TOLERANCE_SHIFT: u32 = 5;
/// Further is worth a word if it lasts as long as this,
const LASTING_NS: u64 = 100_000_000;
/// or if it is this share of the limit (1/2^2) at once.
const AT_ONCE_SHIFT: u32 = 2;
/// What cannot be managed is that if it is so much, 8 MiB: the agent's own is counted with it.
const UNMANAGED_MIN_PAGES: i64 = (8 << 20) / PAGE_BYTES as i64;
/// Others get so long to give way before nobody waits for them any more.
const LATELY_NS: u64 = 300_000_000;

/// What belongs to one process, and differs in the child of a fork.
pub struct BudgetProcess {
    /// Its slot.
    pub slot: SlotIndex,
    /// The `statm` of its memory, once the companion has opened it.
    pub statm: Option<OwnedFd>,
    /// The program's process.
    pub program: Option<Pid>,
    /// The `/proc/PID/stat` of that process, where /proc shows it.
    pub stat: Option<OwnedFd>,
}

/// The budget of one process. See the module.
pub struct Budget {
    control: &'static Control,
    process: ForkCell<BudgetProcess>,
    own_pages: AtomicI64,
    shared_pages: AtomicI64,
    /// Minor faults of the process when that was measured.
    shared_at_faults: AtomicI64,
    shares: AtomicBool,
    /// Minor faults of the process at the last fork.
    forked_at_faults: AtomicI64,
    others_pages: AtomicI64,
    /// Pages that are neither the engine's nor known to it, when that was last looked at.
    unmanaged_pages: AtomicI64,
    sampled_ns: AtomicU64,
    /// When the tolerance was first exceeded; 0 while it is not.
    over_since_ns: AtomicU64,
    is_detached: AtomicBool,
}

impl Budget {
    /// The budget of the process that has `slot`. Nothing is sampled before its
    /// [process](Budget::process) has a `statm`.
    pub fn new(control: &'static Control, slot: SlotIndex) -> Budget {
        Budget {
            control,
            process: ForkCell::new(BudgetProcess { slot, statm: None, program: None, stat: None }),
            own_pages: AtomicI64::new(0),
            shared_pages: AtomicI64::new(0),
            shared_at_faults: AtomicI64::new(0),
            shares: AtomicBool::new(false),
            forked_at_faults: AtomicI64::new(0),
            others_pages: AtomicI64::new(0),
            unmanaged_pages: AtomicI64::new(0),
            sampled_ns: AtomicU64::new(0),
            over_since_ns: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
        }
    }

    /// The cell of what belongs to this process, for the companion to fill at its start.
    pub fn process(&self) -> &ForkCell<BudgetProcess> {
        &self.process
    }

    /// Whether the process that this is the budget of has a slot of its own.
    pub fn has_own_slot(&self) -> bool {
        self.process.program.is_some_and(|program| self.control.is_of(self.process.slot, program))
    }

    /// The `statm` of the process's memory, once it is armed.
    pub fn statm(&self) -> Option<&OwnedFd> {
        self.process.statm.as_ref()
    }

    /// The program's process.
    pub fn program(&self) -> Option<Pid> {
        self.process.program
    }

    /// Whether the program's process has one thread; `false` where that is unknown.
    pub fn has_one_thread(&self) -> bool {
        self.process.stat.as_ref().and_then(pagemap::threads) == Some(1)
    }

    /// Minor faults so far, of the program's threads and of the agent's.
    fn minor_faults(&self) -> i64 {
        let program = self.process.stat.as_ref().and_then(pagemap::minor_faults).unwrap_or(0);
        program + pagemap::own_minor_faults()
    }

    /// Writing to a shared page makes it one's own, which shows as a minor fault only: each since sharing was measured
    /// is taken to be one.
    fn still_shared_pages(&self) -> i64 {
        let shared = self.shared_pages.load(Relaxed);
        if shared == 0 {
            return 0;
        }
        (shared - (self.minor_faults() - self.shared_at_faults.load(Relaxed)).max(0)).max(0)
    }

    /// Whether it is armed: in the child of a fork it is the parent's.
    pub fn is_armed(&self) -> bool {
        self.process.statm.is_some()
    }

    /// The process's counters.
    pub fn counters(&self) -> &Counters {
        &self.control.process(self.process.slot).counters
    }

    /// Its slot.
    pub fn slot(&self) -> SlotIndex {
        self.process.slot
    }

    /// The control segment.
    pub fn control(&self) -> &'static Control {
        self.control
    }

    /// The limit of the tree.
    pub fn limit_pages(&self) -> i64 {
        (self.control.limit_bytes() / PAGE_BYTES as u64) as i64
    }

    /// Pages of this process.
    pub fn own_pages(&self) -> i64 {
        self.own_pages.load(Relaxed)
    }

    /// Pages left below the limit; negative beyond it.
    pub fn room_pages(&self) -> i64 {
        self.limit_pages() - self.own_pages.load(Relaxed) - self.others_pages.load(Relaxed)
    }

    /// Reads the process's size, publishes it and learns the others'.
    pub fn sample(&self) {
        let Some(statm) = self.statm() else { return };
        let resident = pagemap::anon_resident_pages(statm) as i64;
        let slot = self.control.process(self.process.slot);
        let (still_shared, shared) = (self.still_shared_pages(), self.shared_pages.load(Relaxed).max(0));
        let (own, others_bytes) = loop {
            // Acquire pairs with the AcqRel of `ProcessSlot::inherit`: a child that has halved
            // these has been counted below.
            let [before_bytes, before_measured_bytes] =
                [&slot.anon_bytes, &slot.measured_bytes].map(|word| word.load(Acquire));
            let (tree_bytes, processes) = self.control.tree_anon_bytes();
            // Pages are shared with processes that live: with one other, half of what there is at most. Whatever was measured
            // or guessed, short children of a process that forks again and again have taken nothing with them.
            let most_shared = resident - resident / i64::from(processes.max(1));
            let [own, measured] = [still_shared, shared].map(|pages| (resident - pages.min(most_shared)).max(0));
            // A child that has come since it was counted has halved what it found there (`ProcessSlot::inherit`).
            if publish(&slot.anon_bytes, before_bytes, own)
                && publish(&slot.measured_bytes, before_measured_bytes, measured)
            {
                break (own, (tree_bytes as i64 - before_bytes as i64).max(0));
            }
        };
        self.own_pages.store(own, Relaxed);
        self.others_pages.store(others_bytes / PAGE_BYTES as i64, Relaxed);
        self.sampled_ns.store(now_ns(), Relaxed);
        self.control.follow_need();
        self.note_whether_over();
    }

    /// Notes since when the tolerance is exceeded; that, or `None`.
    fn note_whether_over(&self) -> Option<u64> {
        if -self.room_pages() <= self.limit_pages() >> TOLERANCE_SHIFT {
            self.over_since_ns.store(0, Relaxed);
            return None;
        }
        let now = now_ns();
        Some(self.over_since_ns.compare_exchange(0, now, Relaxed, Relaxed).map_or_else(|since| since, |_| now))
    }

    /// The process has just forked, or been forked: half of it is the other's, until that is measured.
    pub fn forked(&self) {
        self.set_shared_pages(self.still_shared_pages() + self.own_pages() / 2);
        self.forked_at_faults.store(self.minor_faults(), Relaxed);
        self.shares.store(true, Relaxed);
        self.sample();
    }

    /// What of the resident size was others' when that was measured.
    pub fn shared_pages(&self) -> i64 {
        self.shared_pages.load(Relaxed)
    }

    /// Pages the process has made its own since the fork, at most.
    pub fn copied_pages(&self) -> i64 {
        self.minor_faults() - self.forked_at_faults.load(Relaxed)
    }

    /// Whether other processes may share pages of this one.
    pub fn shares(&self) -> bool {
        self.shares.load(Relaxed)
    }

    /// Says how many pages of the resident size are other processes', too, in proportion.
    pub fn set_shared_pages(&self, pages: i64) {
        self.shared_at_faults.store(self.minor_faults(), Relaxed);
        self.shared_pages.store(pages, Relaxed);
        self.shares.store(pages > 0, Relaxed);
    }

    /// From here on the process is not in the limit.
    pub fn detach(&self) {
        self.is_detached.store(true, Relaxed);
    }

    /// Takes `pages` unless that would exceed the limit.
    pub fn try_charge(&self, pages: u32) -> bool {
        if self.is_detached.load(Relaxed) {
            return true;
        }
        let pages = i64::from(pages);
        if self.room_pages() < pages && now_ns().saturating_sub(self.sampled_ns.load(Relaxed)) > STALE_NS {
            self.sample();
        }
        let fits = self.room_pages() >= pages;
        if fits {
            self.own_pages.fetch_add(pages, Relaxed);
        }
        fits
    }

    /// Takes `pages` even beyond the limit; says so where that lasts, or stops the tree if the limit is hard.
    pub fn charge(&self, pages: u32) {
        self.own_pages.fetch_add(i64::from(pages), Relaxed);
        self.tell_if_over();
    }

    /// The engine does not hold so many pages: they cannot be managed. Says so where that is more than the limit: no fault will tell.
    pub fn note_unmanaged(&self, unmanaged_pages: i64) {
        self.unmanaged_pages.store(unmanaged_pages, Relaxed);
        if unmanaged_pages > self.limit_pages() {
            self.tell_if_over();
        }
    }

    fn tell_if_over(&self) {
        let Some(since) = self.note_whether_over() else { return };
        let over = -self.room_pages();
        if now_ns().saturating_sub(since) > LASTING_NS || over > self.limit_pages() >> AT_ONCE_SHIFT {
            self.counters().vm.limit_exceeded.inc();
            self.control.limit_exceeded(self.excess());
        }
    }

    /// Why the limit is not kept: of what takes an eighth of it, the first.
    fn excess(&self) -> Excess {
        let vm = &self.counters().vm;
        let unevictable = vm.unevictable_pgs_culled.get().saturating_sub(vm.unevictable_pgs_rescued.get());
        let worth_a_word = self.limit_pages() >> 3;
        if unevictable as i64 > worth_a_word {
            Excess::Unevictable
        } else if self.unmanaged_pages.load(Relaxed) > worth_a_word.max(UNMANAGED_MIN_PAGES) {
            Excess::Unmanaged
        } else {
            Excess::Incompressible
        }
    }

    /// Whether the tree went further over its limit than is tolerated, not long ago.
    pub fn is_lately_over(&self) -> bool {
        let since_ns = self.over_since_ns.load(Relaxed);
        since_ns != 0 && now_ns().saturating_sub(since_ns) < LATELY_NS
    }

    /// Gives `pages` back.
    pub fn uncharge(&self, pages: u32) {
        self.own_pages.fetch_sub(i64::from(pages), Relaxed);
    }
}

/// Publishes `pages`, if the word still says what it did before.
fn publish(word: &AtomicU64, before_bytes: u64, pages: i64) -> bool {
    // AcqRel pairs with that of `ProcessSlot::inherit` in a child, and with the Acquire in
    // `Control::tree_bytes`.
    word.compare_exchange(before_bytes, pages as u64 * PAGE_BYTES as u64, AcqRel, Relaxed).is_ok()
}
