//! The process table: a slot of the control segment for each process of a run.
//!
//! A slot belongs to the address space of the process whose pid it holds. The slot is free when
//! that process ends, or executes another program, which claims a new slot. The companion marks the
//! end; if the companion was killed, the kernel marks it ([`foliomem_sys::process_exit_notice`]). A
//! marked process is no longer counted. The supervisor, or a process that needs a slot, adds the
//! counters of ended processes to the totals.
//!
//! The only lock is that of the totals. It names its owner, so that another process can break it if
//! the owner is killed. No other lock is taken under it.

use crate::custody::Offer;
use crate::memory_request::MemoryRequest;
use crate::segment::{Control, ControlError};
use crate::trace_ring::TraceRing;
use foliomem_sys::identity::{self, is_alive};
use foliomem_sys::{pagemap, process_exit_notice, shared_words};
use foliomem_types::counters::Counters;
use foliomem_types::units::PAGE_BYTES;
use rustix::process::Pid;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum number of simultaneous processes of a run. The limit does not cover further processes;
/// foliomem reports that once.
pub const MAX_PROCESSES: usize = 1024;
/// The field of `/proc/PID/stat` with the flags of a process.
const FLAGS_FIELD: usize = 9;
/// The flag of a process that exits or has exited (`include/linux/sched.h`).
const PF_EXITING: u32 = 4;
/// In `ended`: the companion has begun to end by itself.
const ENDING: u32 = 1;
/// In `ended`: the companion writes to its slot no more.
const ENDED: u32 = 2;
/// In `ended`: the companion has crashed, and the process is being stopped.
const CRASHED: u32 = 3;

shared_words! {
    /// The slot of one process.
    #[derive(Debug)]
    pub struct ProcessSlot {
        /// The process, as `identity` encodes its pid; 0 while the slot is free.
        pub(crate) pid: AtomicU32,
        /// The companion's exit notice: the kernel marks this word when the companion ends.
        pub exit_notice: AtomicU32,
        /// The companion's process id.
        pub companion: AtomicU32,
        /// [`ENDING`] and later [`ENDED`] if the companion ends by itself, [`CRASHED`] if it has
        /// crashed; 0 before.
        pub(crate) ended: AtomicU32,
        /// The process's userfaultfd, offered to the supervisor.
        pub offer: Offer,
        /// Upper bound of the process's anonymous memory, in bytes: pages that it may have copied
        /// since the last measurement count as its own.
        pub anon_bytes: AtomicU64,
        /// The process's anonymous memory at the last measurement, in bytes, with shared pages in
        /// proportion: for reports.
        pub measured_bytes: AtomicU64,
        /// Start of the last measurement of shared pages that `anon_bytes` covers, in nanoseconds;
        /// `u64::MAX` if the process shares no page.
        pub(crate) shares_known_ns: AtomicU64,
        /// Upper bound of the part of the process's memory that counts for others, because it
        /// shares it with them, in bytes. Until the next fork it only falls.
        pub(crate) shared_bytes: AtomicU64,
        /// 1 while the process changes its size, and so may keep other processes from a CPU.
        pub awake: AtomicU32,
        /// 1 while the supervisor has seen the process use no CPU for the time of `--idle`.
        pub(crate) idle: AtomicU32,
        /// Until when the process is held, in nanoseconds of the monotonic clock; 0 if it is not.
        pub(crate) held_until_ns: AtomicU64,
        /// 1 while threads wait for faults that the companion has left.
        pub(crate) left_faults: AtomicU32,
        /// A number that all processes share which forks have made from one; 0 before the first
        /// fork.
        pub(crate) family: AtomicU32,
        /// The process of which this one is a fork: its slot (bits 32..64) and its pid, as
        /// `identity` encodes it; 0 if there is none.
        pub(crate) parent: AtomicU64,
        /// The size of what was swapped out when it was compared with the parent's, in bytes, and
        /// the share of it that is repeated, in 1/65,536 ([`crate::content_sample`]).
        pub(crate) compared_bytes: AtomicU64,
        pub(crate) repeated_share: AtomicU64,
        /// What `ctl` or the supervisor asks the companion to swap out or in.
        pub request: MemoryRequest,
        /// The process's counters.
        pub counters: Counters,
    }
}

/// The faults of a held process that its companion has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeftFaults {
    /// There are none.
    None,
    /// There are some.
    Some,
}

impl ProcessSlot {
    /// Returns the size of the process at its last measurement, in bytes.
    pub fn measured_bytes(&self) -> u64 {
        self.measured_bytes.load(Ordering::Relaxed)
    }

    /// Returns the size of what the process has swapped out, without swap-cache entries, in bytes.
    pub fn swapped_out_bytes(&self) -> u64 {
        let Counters { store, vm, .. } = &self.counters;
        // The program may have overwritten any of these words.
        let cached_bytes = vm.nr_swapcached.get().saturating_mul(PAGE_BYTES as u64);
        store.orig_data_size.get().saturating_sub(cached_bytes)
    }

    /// Returns the memory that the process would take without compression, and if relatives shared
    /// nothing of what is swapped out, in bytes.
    pub fn needed_bytes(&self) -> u64 {
        let stored_bytes = self.counters.store.mem_used_total.get();
        // The program may have overwritten any of these words.
        self.measured_bytes().saturating_add(self.swapped_out_bytes()).saturating_sub(stored_bytes)
    }

    /// Marks the process as idle. The supervisor calls it.
    pub fn mark_idle(&self) {
        self.idle.store(1, Ordering::Relaxed);
    }

    /// Marks the process as not idle. The supervisor calls it.
    pub fn mark_busy(&self) {
        self.idle.store(0, Ordering::Relaxed);
    }

    /// Returns whether the process was idle a moment ago.
    pub fn is_idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed) == 1
    }

    /// Has the companion serve no faults until `until_ns` of the monotonic clock. The supervisor
    /// calls this again and again while it holds the process: one that is stopped or killed holds
    /// none for long. Returns whether the process was not held before.
    pub fn hold_until(&self, until_ns: u64) -> bool {
        self.held_until_ns.swap(until_ns, Ordering::Relaxed) == 0
    }

    /// Ends [`ProcessSlot::hold_until`] now. Returns whether the process was held.
    pub fn let_run(&self) -> bool {
        self.held_until_ns.swap(0, Ordering::Relaxed) != 0
    }

    /// Returns whether faults are not served. `now_ns` is called only if they may not be.
    pub fn is_held(&self, now_ns: impl FnOnce() -> u64) -> bool {
        let until_ns = self.held_until_ns.load(Ordering::Relaxed);
        until_ns != 0 && now_ns() < until_ns
    }

    /// Notes whether threads wait for faults that the companion has left because the process is
    /// held. The companion calls this.
    pub fn note_left_faults(&self, are_left: LeftFaults) {
        self.left_faults.store(u32::from(are_left == LeftFaults::Some), Ordering::Relaxed);
    }

    /// Returns whether threads wait for faults that the companion has left.
    pub fn left_faults(&self) -> LeftFaults {
        if self.left_faults.load(Ordering::Relaxed) == 0 { LeftFaults::None } else { LeftFaults::Some }
    }

    /// Marks that the companion ends shortly before its process. The slot keeps its figures until
    /// the process has ended.
    pub fn mark_companion_ending(&self) {
        // Release pairs with the Acquire in `unattended`: the exit notice is not that of a killed
        // companion.
        self.ended.store(ENDING, Ordering::Release);
    }

    /// Marks that the process has ended: it uses no memory from here on, and its slot may be used
    /// again.
    pub fn mark_ended(&self) {
        // Release pairs with the Acquire in `unattended`: the exit notice is not that of a killed
        // companion.
        self.ended.store(ENDING, Ordering::Release);
        self.anon_bytes.store(0, Ordering::Relaxed);
        self.measured_bytes.store(0, Ordering::Relaxed);
        process_exit_notice::mark(&self.exit_notice);
        // Release pairs with the Acquire in `is_gone`: the companion writes nothing here after the
        // slot is used again.
        self.ended.store(ENDED, Ordering::Release);
    }

    /// Makes this slot's process a relative of its parent: in the parent's family, else in that
    /// with the fresh `number`.
    fn join_family(&self, parent: &ProcessSlot, number: u32) {
        let family = parent.family.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        self.family.store(family.map_or_else(|family| family, |_| number), Ordering::Relaxed);
    }

    /// Returns whether the companion has crashed.
    pub fn has_crashed(&self) -> bool {
        // Acquire pairs with the Release in `companion_crashed`.
        self.ended.load(Ordering::Acquire) == CRASHED
    }

    /// Returns whether process `pid` of this slot, whose exit notice is marked, may still have its
    /// memory. Returns `false` for a nested process, whose end the supervisor cannot see.
    fn outlives_companion(&self, pid: u32) -> bool {
        // Acquire pairs with the Release in `mark_companion_ending`.
        self.ended.load(Ordering::Acquire) == ENDING && !identity::is_of_nested(pid)
    }

    /// Returns whether the process and its companion have ended.
    fn is_gone(&self) -> bool {
        // Acquire pairs with the AcqRel in `try_claim`.
        let pid = self.pid.load(Ordering::Acquire);
        let companion = self.exit_notice.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `mark_ended`.
        let has_ended = self.ended.load(Ordering::Acquire) == ENDED;
        if identity::is_of_nested(pid) {
            // The kernel marks the word also when it kills a whole pid namespace.
            return has_ended || process_exit_notice::is_marked(&self.exit_notice);
        }
        let has_companion = companion != 0 && !process_exit_notice::is_marked(&self.exit_notice) && is_alive(companion);
        pid != 0 && (has_ended || !is_alive(pid) && !has_companion)
    }

    /// Moves half of the parent's figures to this slot, which the child of a fork has claimed.
    /// Later samples correct both; no memory is counted twice at any time.
    fn inherit(&self, parent: &ProcessSlot) {
        self.counters.inherit_gauges(&parent.counters);
        for (ours, theirs) in [(&self.anon_bytes, &parent.anon_bytes), (&self.measured_bytes, &parent.measured_bytes)] {
            let keep = |bytes: u64| Some(bytes - bytes / 2);
            // AcqRel pairs with the AcqRel of `publish` in the parent, and with the Acquire in
            // `tree_bytes`: readers see that the child's slot is claimed.
            let half = theirs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, keep).unwrap_or(0) / 2;
            ours.store(half, Ordering::Relaxed);
        }
    }
}

/// Returns whether process `pid` exists and has not ended.
pub(crate) fn is_running(pid: u32) -> bool {
    let state: Option<char> = pagemap::process_field(pid, 3);
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Returns whether process `pid` exits, has exited, or does not exist.
pub(crate) fn is_exiting(pid: u32) -> bool {
    pagemap::process_field(pid, FLAGS_FIELD).is_none_or(|flags: u32| flags & PF_EXITING != 0)
}

/// The index of a slot in the process table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// Returns the slot with number `index`, if there is one.
    pub fn new(index: u32) -> Option<SlotIndex> {
        ((index as usize) < MAX_PROCESSES).then_some(SlotIndex(index))
    }

    /// Returns the slot's number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Control {
    /// Claims a slot for process `pid`: a free one, else that of an ended process. Fails with
    /// [`ControlError::Full`] if living processes have all slots.
    pub fn claim_slot(&self, pid: Pid) -> Result<SlotIndex, ControlError> {
        let pid = identity::of(pid);
        // After an exec, the companion of the old program still uses the process's earlier slot.
        let is_new = self.slots().all(|slot| self.pid(slot) != pid);
        loop {
            if let Some(slot) = self.slots().find(|&slot| self.try_claim(slot, 0, pid)) {
                self.header.processes.fetch_add(is_new.into(), Ordering::Relaxed);
                return Ok(slot);
            }
            // Open one more slot, which any claiming process may take.
            if SlotIndex::new(self.header.slots_used.fetch_add(1, Ordering::Relaxed)).is_some() || self.reap() > 0 {
                continue;
            }
            if self.header.is_crowded.swap(1, Ordering::Relaxed) == 0 {
                self.notice(format_args!(
                    "more than {MAX_PROCESSES} processes at a time: the memory of those beyond is not in the limit"
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

    /// Adds the counters of ended processes to the totals, and frees their slots. Returns the
    /// number of slots freed.
    ///
    /// A process of another pid namespace cannot tell which processes have ended, and frees none.
    pub fn reap(&self) -> usize {
        self.reap_where(|_| true)
    }

    /// Reaps as [`Self::reap`] does, but leaves `program` as it was at its end, for the report. If
    /// it has executed another program in its place, it has not ended.
    pub fn reap_except(&self, program: Pid) -> usize {
        let program = program.as_raw_nonzero().get() as u32;
        self.reap_where(|pid| pid != program || !is_exiting(pid))
    }

    fn reap_where(&self, may_reap: impl Fn(u32) -> bool) -> usize {
        if identity::is_nested() {
            return 0;
        }
        let is_reapable = |slot: SlotIndex| self.process(slot).is_gone() && may_reap(self.pid(slot));
        let gone: Vec<SlotIndex> = self.slots().filter(|&slot| is_reapable(slot)).collect();
        for &slot in &gone {
            let pid = self.pid(slot);
            if is_reapable(slot) {
                self.retire(slot, pid);
                let _ = self.try_claim(slot, pid, 0);
            }
        }
        gone.len()
    }

    /// Adds the process's counters to the totals, and clears its slot.
    fn retire(&self, slot: SlotIndex, pid: u32) {
        let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
        let owner = &self.header.totals_owner;
        // Acquire pairs with the Release of the previous holder, at the end of this function.
        while let Err(holder) = owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if !is_alive(holder) {
                // The holder was killed: its addition may be counted twice, which is better than
                // waiting forever. Relaxed: this store continues the release sequence of the dead
                // holder, which released nothing.
                let _ = owner.compare_exchange(holder, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            foliomem_sync::back_off();
        }
        let process = self.process(slot);
        if self.pid(slot) == pid {
            process.exit_notice.store(0, Ordering::Relaxed);
            process.companion.store(0, Ordering::Relaxed);
            process.ended.store(0, Ordering::Relaxed);
            process.offer.withdraw(&self.header.custody);
            process.anon_bytes.store(0, Ordering::Relaxed);
            let measured_bytes = process.measured_bytes.swap(0, Ordering::Relaxed);
            self.header.ended_peak_bytes.fetch_max(measured_bytes, Ordering::Relaxed);
            process.shared_bytes.store(0, Ordering::Relaxed);
            process.awake.store(0, Ordering::Relaxed);
            process.idle.store(0, Ordering::Relaxed);
            process.held_until_ns.store(0, Ordering::Relaxed);
            process.left_faults.store(0, Ordering::Relaxed);
            process.family.store(0, Ordering::Relaxed);
            process.parent.store(0, Ordering::Relaxed);
            process.compared_bytes.store(0, Ordering::Relaxed);
            process.repeated_share.store(0, Ordering::Relaxed);
            self.samples[slot.0 as usize].clear();
            process.request.clear();
            process.counters.clear_gauges();
            process.counters.drain_into(&self.totals);
        }
        // Release pairs with the Acquire of the next holder, above.
        owner.store(0, Ordering::Release);
    }

    /// Notes that the process of `child` is the child of a fork of that of `parent`. The child
    /// calls this before it does anything else with its slot.
    pub fn note_fork(&self, child: SlotIndex, parent_slot: SlotIndex) {
        let (child, parent) = (self.process(child), self.process(parent_slot));
        child.inherit(parent);
        child.parent.store(u64::from(parent_slot.0) << 32 | u64::from(self.pid(parent_slot)), Ordering::Relaxed);
        child.repeat_all();
        child.join_family(parent, self.header.families.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
    }

    /// Returns the slot of the living process of which that of `slot` is a fork.
    pub(crate) fn living_parent(&self, slot: SlotIndex) -> Option<SlotIndex> {
        let word = self.process(slot).parent.load(Ordering::Relaxed);
        // The program may have overwritten the word.
        let parent = SlotIndex::new((word >> 32) as u32).filter(|&parent| parent != slot && word != 0)?;
        let is_marked = process_exit_notice::is_marked(&self.process(parent).exit_notice);
        (self.pid(parent) == word as u32 && !is_marked).then_some(parent)
    }

    /// Returns whether a living process and that of `slot` come from one program by forks.
    pub fn has_relatives(&self, slot: SlotIndex) -> bool {
        let own = self.process(slot);
        let family = own.family.load(Ordering::Relaxed);
        let is_relative =
            |other: &ProcessSlot| !std::ptr::eq(other, own) && other.family.load(Ordering::Relaxed) == family;
        family != 0 && self.living().any(is_relative)
    }

    /// Notes that process `companion` has crashed. Returns the program's process; `None` if
    /// `companion` is no companion.
    pub fn companion_crashed(&self, companion: Pid) -> Option<Pid> {
        let companion = companion.as_raw_nonzero().get() as u32;
        let is_served_by = |slot: &SlotIndex| self.process(*slot).companion.load(Ordering::Relaxed) == companion;
        let slot = self.slots().find(is_served_by)?;
        // If the companion's robust list is no longer mapped, the kernel could not mark the word.
        process_exit_notice::mark(&self.process(slot).exit_notice);
        // Release pairs with the Acquire in `has_crashed`.
        self.process(slot).ended.store(CRASHED, Ordering::Release);
        Pid::from_raw(self.pid(slot) as i32)
    }

    /// Returns whether `slot` belongs to process `pid`. A child of a fork uses its parent's slot if
    /// it could claim none.
    pub fn is_slot_of(&self, slot: SlotIndex, pid: Pid) -> bool {
        self.pid(slot) == identity::of(pid)
    }

    /// Returns the process of `slot`, as `identity` encodes its pid; 0 if the slot is free.
    pub(crate) fn pid(&self, slot: SlotIndex) -> u32 {
        // Acquire pairs with the AcqRel in `try_claim`.
        self.process(slot).pid.load(Ordering::Acquire)
    }

    /// Returns the slots that were ever claimed.
    pub(crate) fn slots(&self) -> impl Iterator<Item = SlotIndex> {
        let used = self.header.slots_used.load(Ordering::Relaxed).min(MAX_PROCESSES as u32);
        (0..used).map(SlotIndex)
    }

    /// Returns the pids and the slots of living processes, except those of another pid namespace.
    pub fn living_processes(&self) -> Vec<(u32, &ProcessSlot)> {
        let slots = self.slots().map(|slot| (self.pid(slot), self.process(slot)));
        let is_known = |(pid, slot): &(u32, &ProcessSlot)| {
            *pid != 0 && !identity::is_of_nested(*pid) && !process_exit_notice::is_marked(&slot.exit_notice)
        };
        slots.filter(is_known).collect()
    }

    /// Returns a slot by its index.
    pub fn process(&self, slot: SlotIndex) -> &ProcessSlot {
        &self.processes[slot.0 as usize]
    }

    /// Returns the trace ring of a slot's process.
    pub fn trace(&self, slot: SlotIndex) -> &TraceRing {
        &self.traces[slot.0 as usize]
    }

    /// Returns every slot that was ever claimed, and whether its process is alive.
    pub fn each_slot(&self) -> impl Iterator<Item = (SlotIndex, bool)> {
        self.slots().map(|slot| {
            let process = self.process(slot);
            (slot, process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.exit_notice))
        })
    }

    /// Returns the pids of the processes that have a slot and are in the supervisor's pid
    /// namespace.
    pub fn pids(&self) -> Vec<u32> {
        let pids = self.slots().map(|slot| self.pid(slot));
        pids.filter(|&pid| pid != 0 && !identity::is_of_nested(pid)).collect()
    }

    /// Returns the pids of the companions of processes in the supervisor's pid namespace.
    pub fn companions(&self) -> Vec<u32> {
        let processes = self.living_processes().into_iter();
        processes.map(|(_, slot)| slot.companion.load(Ordering::Relaxed)).collect()
    }

    /// Returns the slots of processes that have not ended.
    pub(crate) fn living(&self) -> impl Iterator<Item = &ProcessSlot> {
        let processes = self.slots().map(|slot| self.process(slot));
        processes.filter(|process| {
            process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.exit_notice)
        })
    }

    /// Returns the slots of processes that take memory: those that have not ended, and those whose
    /// companion has ended first.
    pub(crate) fn taking_memory(&self) -> impl Iterator<Item = &ProcessSlot> {
        self.slots().map(|slot| self.process(slot)).filter(|process| {
            let pid = process.pid.load(Ordering::Relaxed);
            pid != 0 && (!process_exit_notice::is_marked(&process.exit_notice) || process.outlives_companion(pid))
        })
    }

    /// Marks the end of processes whose companions have ended before them. The supervisor calls it:
    /// nobody else may learn of such an end.
    pub fn note_ended(&self) {
        for slot in self.slots() {
            let (process, pid) = (self.process(slot), self.pid(slot));
            if pid != 0
                && process_exit_notice::is_marked(&process.exit_notice)
                && process.outlives_companion(pid)
                && !is_running(pid)
            {
                // The exchange fails if another process has got the slot. Release pairs with the
                // Acquire in `is_gone`, as in `mark_ended`.
                let _ = process.ended.compare_exchange(ENDING, ENDED, Ordering::Release, Ordering::Relaxed);
            }
        }
    }

    /// Returns pids and measured sizes in bytes of the living processes in the supervisor's pid
    /// namespace.
    pub fn process_sizes(&self) -> Vec<(u32, u64)> {
        let sizes = self
            .living()
            .map(|process| (process.pid.load(Ordering::Relaxed), process.measured_bytes.load(Ordering::Relaxed)));
        sizes.filter(|&(pid, _)| pid != 0 && !identity::is_of_nested(pid)).collect()
    }

    /// Returns the number of processes that have claimed a slot so far.
    pub fn processes_seen(&self) -> u32 {
        self.header.processes.load(Ordering::Relaxed)
    }

    /// Returns the sum of the counters of all processes, ended ones included.
    pub fn sum(&self) -> Box<Counters> {
        let total = Box::new(Counters::default());
        self.totals.fold_into(&total);
        self.slots().for_each(|slot| self.process(slot).counters.fold_into(&total));
        total
    }
}
