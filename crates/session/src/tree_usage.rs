//! Memory use of the tree of processes, and the limit that follows its need.
//!
//! The sums are over the slots of living processes. There is no lock: a sum counts when two reads
//! in a row agree.

use crate::budget::sharing_headroom_pages;
use crate::process_table::{ProcessSlot, SlotIndex};
use crate::segment::Control;
use foliomem_sys::clock;
use foliomem_types::units::PAGE_BYTES;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum number of reads of sizes that change all the time, until two in a row agree.
const MAX_READS: u32 = 16;

/// Minimum size of the stored data, uncompressed, from which the tree's compression ratio is known.
const MIN_STORED_BYTES: u64 = 1 << 20;

/// Peaks of a run, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peaks {
    /// Peak of the memory of the process tree.
    pub taken_bytes: u64,
    /// Peak of the memory that the tree would have taken without compression.
    pub needed_bytes: u64,
}

/// How much a run has waited for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryStall {
    /// Time that threads have waited for memory, in nanoseconds. Each moment counts in proportion
    /// to the share of the non-sleeping threads that wait.
    pub stall_ns: u64,
    /// How many times the run has begun to thrash.
    pub thrashing: u64,
}

impl Control {
    /// Notes that the program starts now. The supervisor calls it.
    pub fn note_start(&self) {
        self.header.started_ns.store(clock::now_ns(), Ordering::Relaxed);
    }

    /// Returns the time since the start of the program.
    pub fn elapsed(&self) -> Duration {
        let started_ns = self.header.started_ns.load(Ordering::Relaxed);
        Duration::from_nanos(clock::now_ns().saturating_sub(started_ns))
    }

    /// Raises the peaks to the present sizes. The supervisor calls it.
    pub fn sample_peaks(&self) {
        let ended_bytes = self.ended_peak_bytes();
        let taken_bytes = self.tree_measured_bytes().max(ended_bytes);
        self.header.taken_peak_bytes.fetch_max(taken_bytes, Ordering::Relaxed);
        self.follow_need();
        // If the limit follows the need, `follow_need` has kept the peak of the need itself.
        let needed_bytes = match self.header.settings.need_divisor.load(Ordering::Relaxed) {
            0 => self.tree_needed_bytes().max(ended_bytes),
            _ => self.need_peak_bytes(),
        };
        self.header.needed_peak_bytes.fetch_max(needed_bytes, Ordering::Relaxed);
    }

    /// Returns the peaks that the supervisor has sampled, or the present sizes where these are
    /// larger: the last sample may be some time ago.
    pub fn peaks(&self) -> Peaks {
        self.peaks_with(self.tree_measured_bytes(), self.tree_needed_bytes())
    }

    /// Returns the peaks, which are no less than the sizes that the caller has just read.
    pub fn peaks_with(&self, taken_bytes: u64, needed_bytes: u64) -> Peaks {
        let sampled = |bytes: &AtomicU64| bytes.load(Ordering::Relaxed);
        Peaks {
            taken_bytes: sampled(&self.header.taken_peak_bytes).max(taken_bytes),
            needed_bytes: sampled(&self.header.needed_peak_bytes).max(needed_bytes),
        }
    }

    /// If the limit follows the need (`need/N`), raises it to the tree's current need divided by N,
    /// at most to the largest allowed limit. A fixed limit stays as it is.
    pub fn follow_need(&self) {
        if let Some(divisor) = NonZeroU32::new(self.header.settings.need_divisor.load(Ordering::Relaxed)) {
            let needed_bytes = self.tree_needed_bytes();
            self.header.need_peak_bytes.fetch_max(needed_bytes, Ordering::Relaxed);
            let share_bytes = needed_bytes / u64::from(divisor.get());
            let max_bytes = self.header.settings.max_limit_bytes.load(Ordering::Relaxed);
            self.header.limit_bytes.fetch_max(share_bytes.min(max_bytes), Ordering::Relaxed);
        }
    }

    /// Returns the maximum need that [`Control::follow_need`] has seen in any process, in bytes; 0
    /// for a fixed limit.
    pub fn need_peak_bytes(&self) -> u64 {
        self.header.need_peak_bytes.load(Ordering::Relaxed)
    }

    /// Returns the tree's current limit, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.header.limit_bytes.load(Ordering::Relaxed)
    }

    /// Returns the tree's current limit, in pages.
    pub fn limit_pages(&self) -> i64 {
        (self.limit_bytes() / PAGE_BYTES as u64) as i64
    }

    /// Changes the limit of the tree at once. Agents of a larger tree reclaim down to it. Only the
    /// supervisor calls this.
    pub fn set_limit_bytes(&self, bytes: u64) {
        self.header.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the tree's anonymous memory in bytes, as its agents published it, and the number of
    /// processes.
    pub fn tree_anon_bytes(&self) -> (u64, u32) {
        self.tree_bytes(|process| &process.anon_bytes)
    }

    /// Sets the memory of processes without an agent, which is a part of the tree's.
    pub fn set_unmanaged_bytes(&self, bytes: u64) {
        self.header.unmanaged_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the memory of processes without an agent, in bytes.
    pub fn unmanaged_bytes(&self) -> u64 {
        self.header.unmanaged_bytes.load(Ordering::Relaxed)
    }

    /// Sets the memory of the shared store, which is a part of the tree's.
    pub fn set_shared_store_bytes(&self, bytes: u64) {
        self.header.shared_store_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the memory of the shared store, in bytes.
    pub fn shared_store_bytes(&self) -> u64 {
        self.header.shared_store_bytes.load(Ordering::Relaxed)
    }

    /// Returns the earliest [`ProcessSlot::shares_known_ns`] of all processes except the one of
    /// `slot`.
    pub fn others_shares_known_ns(&self, slot: SlotIndex) -> u64 {
        let own: *const ProcessSlot = self.process(slot);
        let others = self.living().filter(|process| !std::ptr::eq(*process, own));
        others.map(|process| process.shares_known_ns.load(Ordering::Relaxed)).min().unwrap_or(u64::MAX)
    }

    /// Returns the sum of [`ProcessSlot::shared_bytes`] over the living processes, in bytes.
    pub(crate) fn tree_shared_bytes(&self) -> u64 {
        let shared = self.living().map(|process| process.shared_bytes.load(Ordering::Relaxed));
        // The program may have overwritten any of these words.
        shared.fold(0, u64::saturating_add)
    }

    /// Returns the room of a process that shares pages with others: the pages left below the limit
    /// less the headroom; negative if the tree exceeds that.
    pub fn room_pages(&self) -> i64 {
        let limit_pages = self.limit_pages();
        let taken_pages = (self.tree_anon_bytes().0 / PAGE_BYTES as u64) as i64;
        limit_pages - sharing_headroom_pages(limit_pages) - taken_pages
    }

    /// Notes that a process takes less than before.
    pub(crate) fn note_shrunk(&self, now_ns: u64) {
        self.header.shrunk_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Returns when a process was last seen to take less than before.
    pub(crate) fn shrunk_ns(&self) -> u64 {
        self.header.shrunk_ns.load(Ordering::Relaxed)
    }

    /// Publishes how much the run has waited for memory. The supervisor calls it.
    pub fn note_memory_stall(&self, stall: MemoryStall) {
        self.header.memory_stall_ns.store(stall.stall_ns, Ordering::Relaxed);
        self.header.thrashing.store(stall.thrashing, Ordering::Relaxed);
    }

    /// Returns how much the run has waited for memory so far.
    pub fn memory_stall(&self) -> MemoryStall {
        let [stall_ns, thrashing] =
            [&self.header.memory_stall_ns, &self.header.thrashing].map(|word| word.load(Ordering::Relaxed));
        MemoryStall { stall_ns, thrashing }
    }

    /// Publishes how many times a process was held so that others got on. The supervisor calls it.
    pub fn note_turns(&self, turns: u64) {
        self.header.turns.store(turns, Ordering::Relaxed);
    }

    /// Returns how many times a process was held so that others got on.
    pub fn turns(&self) -> u64 {
        self.header.turns.load(Ordering::Relaxed)
    }

    /// Returns the number of living processes that change their size, and the number of all living
    /// processes.
    pub fn awake_processes(&self) -> (u32, u32) {
        let awake = self.living().map(|process| process.awake.load(Ordering::Relaxed));
        // The program may have overwritten any of these words.
        awake.fold((0, 0), |(awake, all), one| (u32::saturating_add(awake, one), all + 1))
    }

    /// Returns the sum of the measured sizes of the processes that each take less than
    /// `most_bytes`.
    pub(crate) fn bytes_of_small(&self, most_bytes: u64) -> u64 {
        let small = self.living().map(ProcessSlot::measured_bytes).filter(|&bytes| bytes < most_bytes);
        small.fold(0, u64::saturating_add)
    }

    /// Returns the tree's measured anonymous memory in bytes, for reports.
    pub fn tree_measured_bytes(&self) -> u64 {
        self.tree_bytes(|process| &process.measured_bytes).0
    }

    /// Notes the size of the process of `slot`, which was measured just now and is about to end.
    pub fn note_last_size(&self, slot: SlotIndex) {
        let measured_bytes = self.process(slot).measured_bytes.load(Ordering::Relaxed);
        self.header.ended_peak_bytes.fetch_max(measured_bytes, Ordering::Relaxed);
    }

    /// Returns the maximum size of ended processes at their last measurement, in bytes. Many
    /// programs end between two samples of the tree.
    pub fn ended_peak_bytes(&self) -> u64 {
        self.header.ended_peak_bytes.load(Ordering::Relaxed)
    }

    /// Returns the memory that the tree would use now without compression, in bytes. What a child
    /// of a fork has of its parent counts once ([`crate::content_sample`]).
    pub fn tree_needed_bytes(&self) -> u64 {
        let (swapped_out, used) = self.tree_store_bytes();
        let repeated = self.taking_memory().map(ProcessSlot::repeated_bytes).fold(0, u64::saturating_add);
        self.tree_measured_bytes().saturating_add(swapped_out).saturating_sub(used).saturating_sub(repeated)
    }

    /// Returns the memory that the tree would take, in bytes, if all of it were compressed as well
    /// as the part in the stores. The ratio is unknown before [`MIN_STORED_BYTES`] are compressed;
    /// then the resident part counts as nothing.
    pub fn tree_compressed_bytes(&self) -> u64 {
        let (_, used) = self.tree_store_bytes();
        let resident = self.tree_anon_bytes().0.saturating_sub(used);
        let ratio = self.compression_ratio().unwrap_or(0.0);
        used.saturating_add((resident as f64 * ratio) as u64)
    }

    /// Returns what a swapped-out byte of the tree takes in the stores; `None` before
    /// [`MIN_STORED_BYTES`] are compressed.
    pub fn compression_ratio(&self) -> Option<f64> {
        let (out, used) = self.tree_store_bytes();
        (out >= MIN_STORED_BYTES).then(|| used as f64 / out as f64)
    }

    /// Returns the sum of a gauge over the living processes, and their number.
    fn tree_bytes(&self, gauge: impl Fn(&ProcessSlot) -> &AtomicU64) -> (u64, u32) {
        let sum = || {
            // Acquire pairs with the AcqRel of `ProcessSlot::inherit` and `publish`: a reader that
            // sees the parent's halved figure also sees the child's slot.
            let each = self.taking_memory().map(|process| gauge(process).load(Ordering::Acquire));
            // The program may have overwritten any of these words.
            let add = |(bytes, processes), process_bytes| (u64::saturating_add(bytes, process_bytes), processes + 1);
            let no_process = self.unmanaged_bytes().saturating_add(self.shared_store_bytes());
            each.fold((no_process, 0), add)
        };
        // A child moves half of its parent's figure to its own slot. A sum that reads the parent
        // before and the child after the move counts that half twice. Two equal sums in a row rule
        // this out.
        let mut seen = sum();
        for _ in 0..MAX_READS {
            let again = sum();
            if again == seen {
                break;
            }
            seen = again;
        }
        seen
    }

    /// Returns the uncompressed size of the tree's stores, without swap-cache entries, and the
    /// memory that the stores take, both in bytes.
    fn tree_store_bytes(&self) -> (u64, u64) {
        let shared = (0, self.shared_store_bytes());
        self.taking_memory().fold(shared, |(swapped_out, used), process| {
            // The program may have overwritten any of these words.
            let add = u64::saturating_add;
            (add(swapped_out, process.swapped_out_bytes()), add(used, process.counters.store.mem_used_total.get()))
        })
    }
}
