//! The budget of one process: how much memory it may use of the tree's limit.
//!
//! The budget measures the kernel's count of the process's anonymous resident pages. The count
//! covers the program, the arena, the store, and the engine's tables. A sample is a read of
//! `/proc/self/statm`. Between samples the budget adds the pages that the engine charges. Each
//! sample is published in the process's slot of the control segment. A sample also lets a limit
//! grow that follows the need. The room of this process is the limit less its own pages and those
//! that the other processes have published. After a fork, shared pages count in proportion
//! ([`Budget::set_shared_pages`]).
//!
//! There is no lock: any thread may call. Concurrent callers may miss each other's latest charges;
//! the next sample corrects the figures.

use crate::excess::{OutOfReach, unevictable_pages};
use crate::messages::Excess;
use crate::process_table::{ProcessSlot, SlotIndex};
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

/// Maximum age of a sample, in nanoseconds, when a charge is refused: an older sample is repeated
/// first. A read of `statm` takes about 2 us.
const STALE_NS: u64 = 50_000;
/// Minimum age, in nanoseconds, at which the sum of the other processes' sizes is computed again.
/// The computation takes about 10 ns for each process.
const OTHERS_STALE_NS: u64 = 20_000;
/// Headroom: the share of the limit that charges leave free, as a shift (1/2^6, or 1/2^4 for a
/// process that shares pages). It is for memory that nobody charges: memory that the program
/// touches before it is managed, agent memory, and copies of shared pages that are made to swap
/// them out.
const HEADROOM_SHIFT: u32 = 6;
const SHARING_HEADROOM_SHIFT: u32 = 4;
/// Minimum headroom: 1 MiB, but at most the headroom of a process that shares pages.
const HEADROOM_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;

/// Returns the headroom of a process that shares no pages.
fn headroom_pages(limit_pages: i64) -> i64 {
    HEADROOM_MIN_PAGES.clamp(limit_pages >> HEADROOM_SHIFT, sharing_headroom_pages(limit_pages))
}

/// Returns the headroom of a process that shares pages with others.
pub(crate) fn sharing_headroom_pages(limit_pages: i64) -> i64 {
    limit_pages >> SHARING_HEADROOM_SHIFT
}

/// Overrun that is tolerated silently, as a shift of the limit (1/2^5): reclaim needs a little
/// memory to free more.
const TOLERANCE_SHIFT: u32 = 5;
/// Warn about an overrun that lasts longer than 100 ms.
const LONG_NS: u64 = 100_000_000;
/// Warn at once about an overrun of a quarter of the limit, as a shift (1/2^2).
const LARGE_SHIFT: u32 = 2;
/// Minimum unmanaged memory, in pages, to be named as the reason of an overrun: 8 MiB, because the
/// figure includes the agent's own memory.
pub(crate) const UNMANAGED_MIN_PAGES: i64 = (8 << 20) / PAGE_BYTES as i64;
/// Minimum memory of a managed process, in pages: 1 MiB. Tables, stacks and threads of a managed
/// process take about half of that.
const MANAGED_MIN_PAGES: i64 = (1 << 20) / PAGE_BYTES as i64;
/// Time in nanoseconds without freed memory in the tree after which a process stops waiting for
/// others.
const YIELD_NS: u64 = 300_000_000;
/// Time in nanoseconds for which a process waits for others while the tree is over its limit. After
/// that time waiting has not helped, so no process waits again before the tree has been within its
/// limit for [`RECOVERY_NS`]. Otherwise a tree that hovers at its limit would wait at each write to
/// a shared page.
const MAX_YIELD_NS: u64 = 2_000_000_000;
const RECOVERY_NS: u64 = 1_000_000_000;
/// A process waits longer than [`MAX_YIELD_NS`] while the memory that the tree's processes share
/// shrinks by 4 MiB in each 40 ms ([`UNSHARING_NS`]). Reclaim of shared pages frees nothing before
/// the last process has swapped them out, which may take that long. Slower reclaim is not worth
/// waiting for: a tree whose data does not compress into its limit waited at each swap-in, and took
/// five times as long.
const UNSHARED_BYTES: u64 = 4 << 20;
const UNSHARING_NS: u64 = 40_000_000;
/// Maximum number of processes in a tree that waits for shrinking shared memory
/// ([`UNSHARED_BYTES`]). In a tree of many processes that fork all the time, shared memory shrinks
/// all the time, and the agents may not fit into the limit.
const MAX_UNSHARING: u32 = 16;

/// The part of a budget that belongs to one process, and differs in the child of a fork.
pub struct BudgetProcess {
    /// The process's slot in the control segment.
    pub slot: SlotIndex,
    /// The process's `/proc/self/statm`, once the companion has opened it.
    pub statm: Option<OwnedFd>,
    /// The program's process.
    pub program: Option<Pid>,
    /// The program's `/proc/PID/stat`, if /proc shows the program.
    pub stat: Option<OwnedFd>,
}

/// The budget of one process: samples its size, and grants pages below the tree's limit.
pub struct Budget {
    control: &'static Control,
    process: ForkCell<BudgetProcess>,
    own_pages: AtomicI64,
    shared_pages: AtomicI64,
    /// Minor faults of the process when `shared_pages` was measured.
    shared_at_faults: AtomicI64,
    shares: AtomicBool,
    /// Minor faults of the process at the last fork.
    forked_at_faults: AtomicI64,
    others_pages: AtomicI64,
    /// When `others_pages` was last added up, in nanoseconds.
    others_ns: AtomicU64,
    /// Pages that the engine neither holds nor knows, at the last measurement.
    unmanaged_pages: AtomicI64,
    sampled_ns: AtomicU64,
    /// Time at which the overrun exceeded the tolerance, in nanoseconds; 0 while it does not.
    over_since_ns: AtomicU64,
    /// Time since which the tree is over its limit, except for moments, in nanoseconds; 0 while it
    /// is not.
    exceeded_since_ns: AtomicU64,
    /// Time since which the tree is within its limit, in nanoseconds; 0 while it is not.
    within_since_ns: AtomicU64,
    /// The memory that the tree's processes shared when this amount last rose, or fell by
    /// [`UNSHARED_BYTES`], in bytes; and the time of that last fall, in nanoseconds.
    tree_shared_bytes: AtomicU64,
    unshared_ns: AtomicU64,
    is_detached: AtomicBool,
}

impl Budget {
    /// Creates the budget of the process that has `slot`. It takes no samples until
    /// [`Budget::process`] has a `statm`.
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
            others_ns: AtomicU64::new(0),
            unmanaged_pages: AtomicI64::new(0),
            sampled_ns: AtomicU64::new(0),
            over_since_ns: AtomicU64::new(0),
            exceeded_since_ns: AtomicU64::new(0),
            within_since_ns: AtomicU64::new(0),
            tree_shared_bytes: AtomicU64::new(0),
            unshared_ns: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
        }
    }

    /// Returns the cell with the process's own part, which the companion fills at its start.
    pub fn process(&self) -> &ForkCell<BudgetProcess> {
        &self.process
    }

    /// Returns whether the process of this budget has a slot of its own.
    pub fn has_own_slot(&self) -> bool {
        self.process.program.is_some_and(|program| self.control.is_slot_of(self.process.slot, program))
    }

    /// Returns the process's `statm`, once the budget is armed.
    pub fn statm(&self) -> Option<&OwnedFd> {
        self.process.statm.as_ref()
    }

    /// Returns the program's process.
    pub fn program(&self) -> Option<Pid> {
        self.process.program
    }

    /// Returns whether the program's process has one thread; `false` if that is unknown.
    pub fn has_one_thread(&self) -> bool {
        self.process.stat.as_ref().and_then(pagemap::threads) == Some(1)
    }

    /// Returns the number of minor faults so far, of the program's threads and of the agent's.
    pub fn minor_faults(&self) -> i64 {
        let program = self.process.stat.as_ref().and_then(pagemap::minor_faults).unwrap_or(0);
        program + pagemap::own_minor_faults()
    }

    /// Returns the shared pages that are left. A write to a shared page copies it, which shows only
    /// as a minor fault. Hence every minor fault since the last measurement counts as one such
    /// copy.
    pub fn still_shared_pages(&self) -> i64 {
        let shared = self.shared_pages.load(Relaxed);
        if shared == 0 {
            return 0;
        }
        (shared - (self.minor_faults() - self.shared_at_faults.load(Relaxed)).max(0)).max(0)
    }

    /// Returns whether the budget is armed. In the child of a fork it has the parent's `statm` at
    /// first.
    pub fn is_armed(&self) -> bool {
        self.process.statm.is_some()
    }

    /// Returns the process's counters.
    pub fn counters(&self) -> &Counters {
        &self.control.process(self.process.slot).counters
    }

    /// Returns the process's slot.
    pub fn slot(&self) -> SlotIndex {
        self.process.slot
    }

    /// Returns the slot of this process.
    pub fn own_slot(&self) -> &'static ProcessSlot {
        self.control().process(self.slot())
    }

    /// Returns the control segment.
    pub fn control(&self) -> &'static Control {
        self.control
    }

    /// Returns the limit of the tree, in pages.
    pub fn limit_pages(&self) -> i64 {
        self.control.limit_pages()
    }

    /// Returns the pages of this process, shared pages in proportion.
    pub fn own_pages(&self) -> i64 {
        self.own_pages.load(Relaxed)
    }

    /// Returns the pages left below the limit less the headroom; negative if the tree exceeds that.
    pub fn room_pages(&self) -> i64 {
        let limit_pages = self.limit_pages();
        let headroom_pages =
            if self.shares() { sharing_headroom_pages(limit_pages) } else { headroom_pages(limit_pages) };
        limit_pages - headroom_pages - self.taken_pages()
    }

    /// Returns the pages that the tree takes.
    fn taken_pages(&self) -> i64 {
        self.own_pages.load(Relaxed) + self.others_pages.load(Relaxed)
    }

    /// Returns the pages beyond the limit; negative below it.
    fn over_pages(&self) -> i64 {
        self.taken_pages() - self.limit_pages()
    }

    /// Measures the process's size, publishes it, and reads the sizes of the other processes.
    pub fn sample(&self) {
        let Some(statm) = self.statm() else { return };
        let slot = self.control.process(self.process.slot);
        let (own, others_bytes, still_shared, processes) = loop {
            // Acquire pairs with the AcqRel of `ProcessSlot::inherit`: the sum below includes every
            // child that has halved these words.
            let [before_bytes, before_measured_bytes] =
                [&slot.anon_bytes, &slot.measured_bytes].map(|word| word.load(Acquire));
            let resident = pagemap::anon_resident_pages(statm) as i64;
            let (still_shared, shared) = (self.still_shared_pages(), self.shared_pages.load(Relaxed).max(0));
            let (tree_bytes, processes) = self.control.tree_anon_bytes();
            // Only living processes share pages: with one other process, at most half of the pages
            // are shared. The bound corrects the estimate for a process whose short-lived children
            // have ended.
            let max_shared = resident - resident / i64::from(processes.max(1));
            let [own, measured] = [still_shared, shared].map(|pages| (resident - pages.min(max_shared)).max(0));
            // A child that appeared after the sum has halved the word (`ProcessSlot::inherit`), or
            // another thread has charged pages that may not be resident yet; then the sample is
            // repeated.
            if publish(&slot.anon_bytes, before_bytes, own)
                && publish(&slot.measured_bytes, before_measured_bytes, measured)
            {
                break (own, (tree_bytes as i64 - before_bytes as i64).max(0), still_shared, processes);
            }
        };
        if self.own_pages.swap(own, Relaxed) > own {
            self.control.note_shrunk(now_ns());
        }
        slot.shared_bytes.store(still_shared as u64 * PAGE_BYTES as u64, Relaxed);
        self.note_unshared(processes);
        self.set_others(others_bytes);
        self.sampled_ns.store(now_ns(), Relaxed);
        self.control.follow_need();
        self.update_over_since();
    }

    /// Notes when the tree's `processes` share less than before.
    fn note_unshared(&self, processes: u32) {
        if processes > MAX_UNSHARING {
            return;
        }
        let (before, now) = (self.tree_shared_bytes.load(Relaxed), self.control.tree_shared_bytes());
        if now > before || now.saturating_add(UNSHARED_BYTES) <= before {
            self.tree_shared_bytes.store(now, Relaxed);
        }
        if now.saturating_add(UNSHARED_BYTES) <= before {
            self.unshared_ns.store(now_ns(), Relaxed);
        }
    }

    fn set_others(&self, bytes: i64) {
        self.others_pages.store(bytes / PAGE_BYTES as i64, Relaxed);
        self.others_ns.store(now_ns(), Relaxed);
    }

    /// Adds `pages` to the size of this process, and publishes it at once: several processes that
    /// charge between two samples must not take the same room.
    fn add(&self, pages: i64) {
        self.own_pages.fetch_add(pages, Relaxed);
        // Relaxed: the figure only counts. `publish` notices that it has changed.
        let word = &self.control.process(self.process.slot).anon_bytes;
        let bytes = pages * PAGE_BYTES as i64;
        let _ = word.fetch_update(Relaxed, Relaxed, |before| Some(before.saturating_add_signed(bytes)));
    }

    /// Adds up the sizes of the other processes, unless that was just done.
    fn update_others(&self) {
        if now_ns().saturating_sub(self.others_ns.load(Relaxed)) > OTHERS_STALE_NS {
            let own_bytes = self.control.process(self.process.slot).anon_bytes.load(Relaxed);
            self.set_others((self.control.tree_anon_bytes().0 as i64 - own_bytes as i64).max(0));
        }
    }

    /// Updates the time since which the overrun exceeds the tolerance, and returns it; `None`
    /// without such an overrun.
    fn update_over_since(&self) -> Option<u64> {
        self.update_exceeded_since();
        time_since(&self.over_since_ns, self.over_pages() > self.limit_pages() >> TOLERANCE_SHIFT)
    }

    /// Updates and returns the time since which the tree has been over its limit; `None` if it is
    /// within its limit now. It must stay within for [`RECOVERY_NS`] before the time starts anew.
    fn update_exceeded_since(&self) -> Option<u64> {
        let is_over = self.over_pages() > 0;
        match time_since(&self.within_since_ns, !is_over) {
            Some(since) if now_ns().saturating_sub(since) < RECOVERY_NS => None,
            _ => time_since(&self.exceeded_since_ns, is_over),
        }
    }

    /// Notes that the process has forked, or is the child of a fork. Half of its pages count as the
    /// other process's until they are measured.
    pub fn forked(&self) {
        let (faults, now) = (self.minor_faults(), now_ns());
        self.set_shared_pages(self.still_shared_pages() + self.own_pages() / 2, faults, now);
        self.forked_at_faults.store(faults, Relaxed);
        self.shares.store(true, Relaxed);
        self.sample();
    }

    /// Returns the shared pages at the last measurement, in proportion.
    pub fn shared_pages(&self) -> i64 {
        self.shared_pages.load(Relaxed)
    }

    /// Returns an upper bound of the pages that the process has copied since the fork.
    pub fn copied_pages(&self) -> i64 {
        self.minor_faults() - self.forked_at_faults.load(Relaxed)
    }

    /// Returns whether other processes may share pages with this one.
    pub fn shares(&self) -> bool {
        self.shares.load(Relaxed)
    }

    /// Sets the number of resident pages that count for other processes, in proportion to their
    /// sharers. The kernel began to count them at `known_ns`, after `at_faults`
    /// [minor faults](Budget::minor_faults): a page that was copied since is no longer shared.
    pub fn set_shared_pages(&self, pages: i64, at_faults: i64, known_ns: u64) {
        self.shared_at_faults.store(at_faults, Relaxed);
        self.shared_pages.store(pages, Relaxed);
        self.shares.store(pages > 0, Relaxed);
        self.shares_are_known(if pages > 0 { known_ns } else { u64::MAX });
    }

    /// Notes that the published size covers what the process took at `known_ns`, shared pages
    /// included.
    pub fn shares_are_known(&self, known_ns: u64) {
        self.control.process(self.process.slot).shares_known_ns.store(known_ns, Relaxed);
    }

    /// Returns whether the published size may fall to what was measured at `measured_ns`. A shared
    /// page that this process has swapped out counts more for its other sharers. They must publish
    /// their larger sizes first; otherwise the sum would be too small meanwhile.
    pub fn may_share_more(&self, measured_ns: u64) -> bool {
        self.control.others_shares_known_ns(self.process.slot) >= measured_ns
    }

    /// Takes the process out of the limit: every later charge succeeds.
    pub fn detach(&self) {
        self.is_detached.store(true, Relaxed);
    }

    /// Charges `pages` unless that would exceed the limit. Returns whether they were charged.
    pub fn try_charge(&self, pages: u32) -> bool {
        if self.is_detached.load(Relaxed) {
            return true;
        }
        let pages = i64::from(pages);
        self.update_others();
        if self.room_pages() < pages && now_ns().saturating_sub(self.sampled_ns.load(Relaxed)) > STALE_NS {
            self.sample();
        }
        let fits = self.room_pages() >= pages;
        if fits {
            self.add(pages);
        }
        fits
    }

    /// Charges `pages` even beyond the limit. Warns about a lasting overrun, or stops the tree if
    /// the limit is hard.
    pub fn charge(&self, pages: u32) {
        self.add(i64::from(pages));
        self.report_if_over(|| self.excess());
    }

    /// Notes that the engine does not hold `unmanaged_pages` of the process. Warns if they alone
    /// exceed the limit: unmanaged memory causes no fault that would warn.
    pub fn note_unmanaged(&self, unmanaged_pages: i64) {
        self.unmanaged_pages.store(unmanaged_pages, Relaxed);
        if unmanaged_pages > self.limit_pages() {
            self.report_if_over(|| self.excess());
        }
    }

    /// Returns whether the process takes less than what is worth managing.
    pub fn is_small(&self) -> bool {
        self.own_pages() < MANAGED_MIN_PAGES
    }

    /// Warns if the tree exceeds its limit, and processes that are too small to be managed take an
    /// eighth of it.
    pub fn report_small(&self) {
        let limit_bytes = self.control.limit_bytes();
        // Where many processes share pages, the sum of their pages is more than they take.
        if self.control.tree_measured_bytes() > limit_bytes
            && self.control.bytes_of_small(MANAGED_MIN_PAGES as u64 * PAGE_BYTES as u64) > limit_bytes >> 3
        {
            self.report_if_over(|| Excess::Unmanaged);
        }
    }

    fn report_if_over(&self, cause: impl FnOnce() -> Excess) {
        let Some(since) = self.update_over_since() else { return };
        let over = self.over_pages();
        if now_ns().saturating_sub(since) > LONG_NS || over > self.limit_pages() >> LARGE_SHIFT {
            self.counters().vm.limit_exceeded.inc();
            self.control.limit_exceeded(cause());
        }
    }

    fn excess(&self) -> Excess {
        self.control.excess_of(OutOfReach {
            unevictable_pages: unevictable_pages(self.counters()),
            unmanaged_pages: self.unmanaged_pages.load(Relaxed),
            shared_pages: self.shared_pages(),
        })
    }

    /// Returns whether the tree is over its limit but shrinks, so that waiting may help: a process
    /// of the tree has freed memory recently, and the tree has not been over its limit for long or
    /// its shared memory shrinks quickly.
    pub fn is_shrinking(&self) -> bool {
        self.update_others();
        let now = now_ns();
        let is_unsharing = now.saturating_sub(self.unshared_ns.load(Relaxed)) < UNSHARING_NS;
        let is_worth_waiting = |since: u64| is_unsharing || now.saturating_sub(since) < MAX_YIELD_NS;
        self.update_exceeded_since().is_some_and(is_worth_waiting)
            && now.saturating_sub(self.control.shrunk_ns()) < YIELD_NS
    }

    /// Gives `pages` back to the budget.
    pub fn uncharge(&self, pages: u32) {
        self.add(-i64::from(pages));
    }
}

/// Keeps in `word` the time since which `is_true` holds, in nanoseconds; 0 while it is false.
/// Returns that time.
fn time_since(word: &AtomicU64, is_true: bool) -> Option<u64> {
    if !is_true {
        word.store(0, Relaxed);
        return None;
    }
    let now = now_ns();
    Some(word.compare_exchange(0, now, Relaxed, Relaxed).map_or_else(|since| since, |_| now))
}

/// Publishes `pages` if the word still has the value `before_bytes`. Returns whether it had.
fn publish(word: &AtomicU64, before_bytes: u64, pages: i64) -> bool {
    // AcqRel pairs with the AcqRel of `ProcessSlot::inherit` in a child, and with the Acquire in
    // `Control::tree_bytes`.
    word.compare_exchange(before_bytes, pages as u64 * PAGE_BYTES as u64, AcqRel, Relaxed).is_ok()
}
