//! The process table: a slot of the control segment for each process of a run.
//!
//! A slot belongs to one memory: to the process whose pid it holds, until that ends or executes
//! another program, which claims a slot of its own. The companion marks the end, and the kernel does
//! so if the companion was killed ([`foliomem_sys::process_exit_notice`]). From then on the process
//! counts no more. The supervisor, or another process that needs a slot, folds the counters of ended
//! processes into the totals.
//!
//! The only lock is that of the totals. It names its owner, so that it can be broken if the owner is
//! killed. No other lock is taken under it.

use crate::custody::Offer;
use crate::segment::{Control, ControlError};
use crate::trace_ring::TraceRing;
use foliomem_sys::identity::{self, is_alive};
use foliomem_sys::{process_exit_notice, shared_words};
use foliomem_types::counters::Counters;
use rustix::process::Pid;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Processes of a run at one time. What those beyond have is not in the limit, which is said once.
pub const MOST_PROCESSES: usize = 1024;
/// The companion ends by itself.
const ENDING: u32 = 1;
/// It writes to its slot no more.
const ENDED: u32 = 2;
/// The companion has crashed, and the process is being stopped.
const CRASHED: u32 = 3;

shared_words! {
    /// One process.
    #[derive(Debug)]
    pub struct ProcessSlot {
        pub(crate) pid: AtomicU32,
        /// Held by the companion: marked when it ends.
        pub keeper: AtomicU32,
        /// The companion's process id.
        pub companion: AtomicU32,
        /// [`ENDING`] and [`ENDED`] once its companion ends by itself, [`CRASHED`] when that has crashed.
        pub(crate) ended: AtomicU32,
        /// Its userfaultfd, for the supervisor.
        pub offer: Offer,
        /// Anonymous memory the process takes, at most: what it may have stopped sharing since that was measured
        /// counts as its own.
        pub anon_bytes: AtomicU64,
        /// The same with what it shared when that was measured: for reports.
        pub measured_bytes: AtomicU64,
        /// 1 while it changes its size: other processes may then be without a CPU.
        pub awake: AtomicU32,
        /// Its counters.
        pub counters: Counters,
    }
}

impl ProcessSlot {
    /// The companion ends before its process, which is about to end: the slot keeps its figures until
    /// then.
    pub fn companion_ends(&self) {
        // Release pairs with the Acquire in `unattended`: the mark is not a killed companion's.
        self.ended.store(ENDING, Ordering::Release);
    }

    /// The process takes nothing from here on, and the slot may be used again.
    pub fn has_ended(&self) {
        // Release pairs with the acquire in `unattended`: the mark is not a killed companion's.
        self.ended.store(ENDING, Ordering::Release);
        self.anon_bytes.store(0, Ordering::Relaxed);
        self.measured_bytes.store(0, Ordering::Relaxed);
        process_exit_notice::mark(&self.keeper);
        // Release pairs with the acquire in `is_gone`: nothing is written here after the slot is used again.
        self.ended.store(ENDED, Ordering::Release);
    }

    /// Whether the companion has crashed.
    pub fn has_crashed(&self) -> bool {
        // Acquire pairs with the Release in `companion_crashed`.
        self.ended.load(Ordering::Acquire) == CRASHED
    }

    /// Whether the process and its companion have ended.
    fn is_gone(&self) -> bool {
        let pid = self.pid.load(Ordering::Acquire);
        let companion = self.keeper.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `has_ended`.
        let has_ended = self.ended.load(Ordering::Acquire) == ENDED;
        if identity::is_of_nested(pid) {
            // The kernel marks the word also where it kills a whole pid namespace.
            return has_ended || process_exit_notice::is_marked(&self.keeper);
        }
        let has_companion = companion != 0 && !process_exit_notice::is_marked(&self.keeper) && is_alive(companion);
        pid != 0 && (has_ended || !is_alive(pid) && !has_companion)
    }

    /// In the child of a fork, which has claimed this slot: half of what the parent takes is the child's, until both have
    /// looked; at no time is it counted twice.
    pub fn inherit(&self, parent: &ProcessSlot) {
        self.counters.inherit_gauges(&parent.counters);
        for (ours, theirs) in [(&self.anon_bytes, &parent.anon_bytes), (&self.measured_bytes, &parent.measured_bytes)] {
            let keep = |bytes: u64| Some(bytes - bytes / 2);
            // AcqRel pairs with that of `publish` in the parent, and with the Acquire in
            // `tree_bytes`: the child's slot is claimed.
            let half = theirs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, keep).unwrap_or(0) / 2;
            ours.store(half, Ordering::Relaxed);
        }
    }
}

/// Which slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// Slot number `index`, if there is one.
    pub fn new(index: u32) -> Option<SlotIndex> {
        ((index as usize) < MOST_PROCESSES).then_some(SlotIndex(index))
    }

    /// Its number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Control {
    /// Claims a slot for process `pid`: a free one, else that of a process that is gone.
    pub fn claim_slot(&self, pid: Pid) -> Result<SlotIndex, ControlError> {
        let pid = identity::of(pid);
        // Before an exec it had another one, which its companion still uses.
        let is_new = self.slots().all(|slot| self.pid(slot) != pid);
        loop {
            if let Some(slot) = self.slots().find(|&slot| self.try_claim(slot, 0, pid)) {
                self.header.processes.fetch_add(is_new.into(), Ordering::Relaxed);
                return Ok(slot);
            }
            // One more, which whoever looks for one may find.
            if SlotIndex::new(self.header.slots_used.fetch_add(1, Ordering::Relaxed)).is_some() || self.reap() > 0 {
                continue;
            }
            if self.header.is_crowded.swap(1, Ordering::Relaxed) == 0 {
                self.notice(format_args!(
                    "more than {MOST_PROCESSES} processes at a time: the memory of those beyond is not in the limit"
                ));
            }
            return Err(ControlError::Full);
        }
    }

    fn try_claim(&self, slot: SlotIndex, from: u32, pid: u32) -> bool {
        let word = &self.process(slot).pid;
        // AcqRel pairs with itself, and with the Acquire in `pid`: the slot is as its last owner,
        // or `retire`, has left it.
        word.compare_exchange(from, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Folds the slots of processes that are gone into the totals, and frees them; returns how many.
    ///
    /// A process of another pid namespace cannot tell which are gone, and frees none.
    pub fn reap(&self) -> usize {
        if identity::is_nested() {
            return 0;
        }
        let gone: Vec<SlotIndex> = self.slots().filter(|&slot| self.process(slot).is_gone()).collect();
        for &slot in &gone {
            let pid = self.pid(slot);
            if self.process(slot).is_gone() {
                self.retire(slot, pid);
                let _ = self.try_claim(slot, pid, 0);
            }
        }
        gone.len()
    }

    /// Folds what the process has counted so far into the totals, and starts its slot anew.
    fn retire(&self, slot: SlotIndex, pid: u32) {
        let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
        let owner = &self.header.totals_owner;
        // Acquire pairs with the Release of the holder before, below.
        while let Err(holder) = owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if !is_alive(holder) {
                // Killed in the middle: what it folded may be counted twice, which beats waiting for ever.
                // Relaxed: it continues the release sequence of the dead holder, which released
                // nothing.
                let _ = owner.compare_exchange(holder, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            foliomem_sync::back_off();
        }
        let process = self.process(slot);
        if self.pid(slot) == pid {
            process.keeper.store(0, Ordering::Relaxed);
            process.companion.store(0, Ordering::Relaxed);
            process.ended.store(0, Ordering::Relaxed);
            process.offer.withdraw(&self.header.custody);
            process.anon_bytes.store(0, Ordering::Relaxed);
            let measured_bytes = process.measured_bytes.swap(0, Ordering::Relaxed);
            self.header.ended_peak_bytes.fetch_max(measured_bytes, Ordering::Relaxed);
            process.awake.store(0, Ordering::Relaxed);
            process.counters.clear_gauges();
            process.counters.drain_into(&self.totals);
        }
        // Release pairs with the Acquire above, of the next holder.
        owner.store(0, Ordering::Release);
    }

    /// Process `companion` has crashed. Returns the process whose companion it was, if it was one's.
    pub fn companion_crashed(&self, companion: Pid) -> Option<Pid> {
        let companion = companion.as_raw_nonzero().get() as u32;
        let is_kept_by = |slot: &SlotIndex| self.process(*slot).companion.load(Ordering::Relaxed) == companion;
        let slot = self.slots().find(is_kept_by)?;
        // Where the companion's list of locks is not mapped any more, the kernel has not done this.
        process_exit_notice::mark(&self.process(slot).keeper);
        // Release pairs with the Acquire in `has_crashed`.
        self.process(slot).ended.store(CRASHED, Ordering::Release);
        Pid::from_raw(self.pid(slot) as i32)
    }

    /// Whether a slot is that of process `pid`: where all are taken, a child shares its parent's.
    pub fn is_of(&self, slot: SlotIndex, pid: Pid) -> bool {
        self.pid(slot) == identity::of(pid)
    }

    pub(crate) fn pid(&self, slot: SlotIndex) -> u32 {
        // Acquire pairs with the AcqRel in `try_claim`.
        self.process(slot).pid.load(Ordering::Acquire)
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = SlotIndex> {
        let used = self.header.slots_used.load(Ordering::Relaxed).min(MOST_PROCESSES as u32);
        (0..used).map(SlotIndex)
    }

    /// A slot.
    pub fn process(&self, slot: SlotIndex) -> &ProcessSlot {
        &self.processes[slot.0 as usize]
    }

    /// What the process of a slot tells.
    pub fn trace(&self, slot: SlotIndex) -> &TraceRing {
        &self.traces[slot.0 as usize]
    }

    /// Every slot that was ever claimed, and whether its process lives.
    pub fn each_slot(&self) -> impl Iterator<Item = (SlotIndex, bool)> {
        self.slots().map(|slot| {
            let process = self.process(slot);
            (slot, process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.keeper))
        })
    }

    /// Pids of the processes that have a slot and are in the supervisor's pid namespace.
    pub fn pids(&self) -> Vec<u32> {
        let pids = self.slots().map(|slot| self.pid(slot));
        pids.filter(|&pid| pid != 0 && !identity::is_of_nested(pid)).collect()
    }

    /// The slots of processes that have not ended.
    pub(crate) fn living(&self) -> impl Iterator<Item = &ProcessSlot> {
        let processes = self.slots().map(|slot| self.process(slot));
        processes.filter(|process| {
            process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.keeper)
        })
    }

    /// Processes that have claimed a slot so far.
    pub fn processes_seen(&self) -> u32 {
        self.header.processes.load(Ordering::Relaxed)
    }

    /// The counters of all processes, those gone included.
    pub fn sum(&self) -> Box<Counters> {
        let total = Box::new(Counters::default());
        self.totals.fold_into(&total);
        self.slots().for_each(|slot| self.process(slot).counters.fold_into(&total));
        total
    }
}
