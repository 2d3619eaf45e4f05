//! The figures of a run, or of one of its processes, at one moment, and the rates between two.

use foliomem_session::process_table::ProcessSlot;
use foliomem_session::segment::Control;
use foliomem_session::swap_file::Medium;
use foliomem_sys::clock::now_ns;
use foliomem_types::counters::{Counters, FaultKind};
use foliomem_types::units::PAGE_BYTES;
use std::time::Instant;

/// The figures of a run or a process at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// The moment.
    at: Instant,
    /// Memory that it takes, the store included, in bytes.
    pub taken_bytes: u64,
    /// Memory of the compressed store, in bytes.
    pub stored_bytes: u64,
    /// Uncompressed size of what the store and the swap file have, in bytes.
    pub content_bytes: u64,
    /// Size of what the swap file has, in bytes.
    pub swap_file_bytes: u64,
    /// Number of faults that were served.
    pub faults: u64,
    /// Time that threads waited for faults, added over threads, in nanoseconds.
    pub waited_ns: u64,
    /// Number of processes that are held: their faults are not served until their turn.
    pub held_processes: u64,
}

/// What has happened between two moments, per second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Rates {
    /// Faults served in a second.
    pub faults_per_s: f64,
    /// Time that threads waited for faults, in per cent of the time; above 100 if several waited at
    /// once.
    pub waiting_percent: f64,
}

impl Figures {
    /// Returns the figures of a run. Its shared store counts as stored. The sampler adds how many
    /// of its processes are held.
    pub fn of_run(control: &Control) -> Figures {
        let figures = Figures::new(control.tree_measured_bytes(), &control.sum());
        match control.swap().medium() {
            Medium::Disk => figures,
            Medium::Memory => Figures {
                stored_bytes: figures.stored_bytes.saturating_add(control.shared_store_bytes()),
                swap_file_bytes: 0,
                ..figures
            },
        }
    }

    /// Returns the figures of a process of a run. What it has in the shared store counts as its
    /// own, as shared pages do in its resident set size.
    pub fn of_process(control: &Control, slot: &ProcessSlot) -> Figures {
        let held_processes = u64::from(slot.is_held(now_ns));
        let figures = Figures { held_processes, ..Figures::new(slot.measured_bytes(), &slot.counters) };
        match control.swap().medium() {
            Medium::Disk => figures,
            Medium::Memory => Figures {
                taken_bytes: figures.taken_bytes.saturating_add(figures.swap_file_bytes),
                stored_bytes: figures.stored_bytes.saturating_add(figures.swap_file_bytes),
                swap_file_bytes: 0,
                ..figures
            },
        }
    }

    /// Returns the figures of a run or a process that takes `taken_bytes`, has these counters, and
    /// is not held.
    pub fn new(taken_bytes: u64, counters: &Counters) -> Figures {
        Figures {
            at: Instant::now(),
            taken_bytes,
            stored_bytes: counters.store.mem_used_total.get(),
            content_bytes: counters.store.orig_data_size.get(),
            // The program may have overwritten any of these words.
            swap_file_bytes: counters.backing.bd_count.get().saturating_mul(PAGE_BYTES as u64),
            faults: counters.vm.pgfault.get(),
            waited_ns: FaultKind::ALL.iter().fold(0, |sum, &kind| {
                let waited_ns = counters.faults(kind).sum_ns.get();
                u64::saturating_add(sum, waited_ns)
            }),
            held_processes: 0,
        }
    }

    /// Returns the sums of both.
    pub fn plus(&self, other: &Figures) -> Figures {
        // The program may have overwritten any of these words.
        let add = u64::saturating_add;
        Figures {
            at: self.at,
            taken_bytes: add(self.taken_bytes, other.taken_bytes),
            stored_bytes: add(self.stored_bytes, other.stored_bytes),
            content_bytes: add(self.content_bytes, other.content_bytes),
            swap_file_bytes: add(self.swap_file_bytes, other.swap_file_bytes),
            faults: add(self.faults, other.faults),
            waited_ns: add(self.waited_ns, other.waited_ns),
            held_processes: add(self.held_processes, other.held_processes),
        }
    }

    /// Returns the memory that it takes apart from the store, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.taken_bytes.saturating_sub(self.stored_bytes)
    }

    /// Returns how many times larger the content of store and swap file is than the room that it
    /// takes there; `None` if there is none.
    pub fn ratio(&self) -> Option<f64> {
        let room_bytes = self.stored_bytes.saturating_add(self.swap_file_bytes);
        (self.content_bytes > 0 && room_bytes > 0).then(|| self.content_bytes as f64 / room_bytes as f64)
    }

    /// Returns the rates since `earlier`.
    pub fn since(&self, earlier: &Figures) -> Rates {
        let seconds = self.at.saturating_duration_since(earlier.at).as_secs_f64();
        if seconds == 0.0 {
            return Rates::default();
        }
        // Counters of a process that has just ended are in none of the sums for a moment.
        let faults = self.faults.saturating_sub(earlier.faults);
        let waited_ns = self.waited_ns.saturating_sub(earlier.waited_ns);
        Rates { faults_per_s: faults as f64 / seconds, waiting_percent: waited_ns as f64 / 1e7 / seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rates_are_of_the_time_between_two_moments() {
        let counters = Counters::default();
        counters.store.mem_used_total.set(30);
        counters.store.orig_data_size.set(120);
        let before = Figures::new(100, &counters);
        assert_eq!((before.resident_bytes(), before.ratio()), (70, Some(4.0)));
        counters.vm.pgfault.add(50);
        counters.faults(FaultKind::SwapIn).record(300_000_000);
        counters.faults(FaultKind::Staged).record(700_000_000);
        let after = Figures { at: before.at + Duration::from_millis(500), ..Figures::new(100, &counters) };
        let rates = after.since(&before);
        assert_eq!((rates.faults_per_s, rates.waiting_percent), (100.0, 200.0), "two threads waited all the time");
        assert_eq!(before.since(&after), Rates::default(), "no time has passed");
        assert_eq!(Figures::new(0, &Counters::default()).ratio(), None);
    }

    #[test]
    fn what_lies_in_the_swap_file_counts_in_the_ratio() {
        let counters = Counters::default();
        counters.store.mem_used_total.set(PAGE_BYTES as u64);
        counters.store.orig_data_size.set(8 * PAGE_BYTES as u64);
        counters.backing.bd_count.set(3);
        assert_eq!(Figures::new(0, &counters).ratio(), Some(2.0));
        counters.backing.bd_count.set(u64::MAX);
        assert!(Figures::new(0, &counters).ratio().is_some(), "overwritten counters do no harm");
    }
}
