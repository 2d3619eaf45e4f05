//! What the tree of processes takes, and the limit that follows its need.
//!
//! The sums are over the living processes' slots. No lock: a sum counts when two looks agree.

use crate::process_table::{ProcessSlot, SlotIndex};
use crate::segment::Control;
use foliomem_types::counters::Counters;
use foliomem_types::units::PAGE_BYTES;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often sizes that change all the time are looked at for two looks that agree.
const MOST_LOOKS: u32 = 16;

impl Control {
    /// Lets the limit grow with what the tree needs, if it does that.
    pub fn follow_need(&self) {
        if let Some(divisor) = NonZeroU32::new(self.header.need_divisor.load(Ordering::Relaxed)) {
            let needed_bytes = self.tree_needed_bytes();
            self.header.need_peak_bytes.fetch_max(needed_bytes, Ordering::Relaxed);
            let share_bytes = needed_bytes / u64::from(divisor.get());
            let most_bytes = self.header.most_limit_bytes.load(Ordering::Relaxed);
            self.header.limit_bytes.fetch_max(share_bytes.min(most_bytes), Ordering::Relaxed);
        }
    }

    /// The largest need that [`Control::follow_need`] has seen in any process; 0 where the limit is fixed.
    pub fn need_peak_bytes(&self) -> u64 {
        self.header.need_peak_bytes.load(Ordering::Relaxed)
    }

    /// What the tree may take now.
    pub fn limit_bytes(&self) -> u64 {
        self.header.limit_bytes.load(Ordering::Relaxed)
    }

    /// Anonymous memory of the tree, as its agents last saw it, and of how many processes.
    pub fn tree_anon_bytes(&self) -> (u64, u32) {
        self.tree_bytes(|process| &process.anon_bytes)
    }

    /// Living processes that change their size, and all.
    pub fn awake_processes(&self) -> (u32, u32) {
        let awake = self.living().map(|process| process.awake.load(Ordering::Relaxed));
        awake.fold((0, 0), |(awake, all), one| (awake + one, all + 1))
    }

    /// Anonymous memory of the tree as it was measured, for reports.
    pub fn tree_measured_bytes(&self) -> u64 {
        self.tree_bytes(|process| &process.measured_bytes).0
    }

    /// The process of `slot` is about to end, and was measured just now.
    pub fn note_last_size(&self, slot: SlotIndex) {
        let measured_bytes = self.process(slot).measured_bytes.load(Ordering::Relaxed);
        self.header.ended_peak_bytes.fetch_max(measured_bytes, Ordering::Relaxed);
    }

    /// The most that a process that has ended took when it was measured last. Many programs end
    /// between two looks at the tree.
    pub fn ended_peak_bytes(&self) -> u64 {
        self.header.ended_peak_bytes.load(Ordering::Relaxed)
    }

    /// What the tree would take now if nothing of it were compressed.
    pub fn tree_needed_bytes(&self) -> u64 {
        let (out, used) = self.tree_store_bytes();
        self.tree_measured_bytes().saturating_add(out).saturating_sub(used)
    }

    /// The sum of a gauge over the living processes, and how many they are.
    fn tree_bytes(&self, gauge: impl Fn(&ProcessSlot) -> &AtomicU64) -> (u64, u32) {
        let sum = || {
            // Acquire pairs with the AcqRel of `ProcessSlot::inherit` and `publish`: of who has
            // halved it, the slot is seen.
            let each = self.living().map(|process| gauge(process).load(Ordering::Acquire));
            each.fold((0, 0), |(bytes, processes), process_bytes| (bytes + process_bytes, processes + 1))
        };
        // A child takes half of its parent's at once: seen before that in the one and after it in the other, it would count
        // twice. Of one instant is what is seen twice.
        let mut seen = sum();
        for _ in 0..MOST_LOOKS {
            let again = sum();
            if again == seen {
                break;
            }
            seen = again;
        }
        seen
    }

    /// What the stores of the tree hold, uncompressed and without copies of what is in memory, too; and what they take for it.
    fn tree_store_bytes(&self) -> (u64, u64) {
        self.living().map(|process| &process.counters).fold((0, 0), |(out, used), counters| {
            let Counters { store, vm, .. } = counters;
            // The program may have written over any of them.
            let copied = vm.nr_swapcached.get().saturating_mul(PAGE_BYTES as u64);
            let add = u64::saturating_add;
            (add(out, store.orig_data_size.get().saturating_sub(copied)), add(used, store.mem_used_total.get()))
        })
    }
}
