//! Why a limit is exceeded: decided by what takes the memory, of one process or of a tree.
//!
//! There is no lock.

use crate::budget::UNMANAGED_MIN_PAGES;
use crate::cluster_ownership::Event;
use crate::messages::Excess;
use crate::segment::Control;
use foliomem_types::counters::Counters;
use foliomem_types::units::PAGE_BYTES;
use std::sync::atomic::Ordering;

/// The memory that reclaim does not reach, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct OutOfReach {
    /// Pages that could not be unmapped.
    pub(crate) unevictable_pages: i64,
    /// Pages that the engine does not manage.
    pub(crate) unmanaged_pages: i64,
    /// Resident pages that count for other processes.
    pub(crate) shared_pages: i64,
}

/// Returns how many pages of a process could not be unmapped. The program may have overwritten the
/// counters: then the result is arbitrary.
pub(crate) fn unevictable_pages(counters: &Counters) -> i64 {
    let vm = &counters.vm;
    vm.unevictable_pgs_culled.get().saturating_sub(vm.unevictable_pgs_rescued.get()) as i64
}

impl Control {
    /// Returns the reason of an overrun: the first kind of memory that takes an eighth of the
    /// limit.
    pub(crate) fn excess_of(&self, memory: OutOfReach) -> Excess {
        let swap = self.swap();
        let min_pages = self.limit_pages() >> 3;
        if memory.unevictable_pages > min_pages {
            Excess::Unevictable
        } else if memory.unmanaged_pages > min_pages.max(UNMANAGED_MIN_PAGES) {
            Excess::Unmanaged
        } else if self.tree_compressed_bytes() <= self.limit_bytes() {
            // If all data were compressed, it would fit into the limit.
            if memory.shared_pages > min_pages { Excess::Shared } else { Excess::SlowReclaim }
        } else if swap.clusters() > 0 && swap.was_reported(Event::Full) {
            Excess::SwapFull
        } else {
            Excess::Incompressible
        }
    }

    /// Returns the reason why the whole tree exceeds its limit, as far as the counters tell.
    pub fn tree_excess(&self) -> Excess {
        if self.unmanaged_bytes() > self.limit_bytes() >> 3 {
            return Excess::WithoutAgent;
        }
        let mut memory = OutOfReach::default();
        for process in self.living() {
            let counters = &process.counters;
            let resident = i64::try_from(counters.resident_pages()).unwrap_or(i64::MAX);
            let in_pages = |bytes: u64| (bytes / PAGE_BYTES as u64) as i64;
            let taken = in_pages(process.anon_bytes.load(Ordering::Relaxed));
            let unmanaged =
                taken.saturating_sub(resident).saturating_sub(in_pages(counters.store.mem_used_total.get()));
            memory.unevictable_pages = memory.unevictable_pages.saturating_add(unevictable_pages(counters).max(0));
            memory.unmanaged_pages = memory.unmanaged_pages.saturating_add(unmanaged.max(0));
        }
        self.excess_of(memory)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use foliomem_types::settings::{Configuration, Limit};
    use foliomem_types::units::Order;

    #[test]
    fn only_what_small_processes_take_is_small() {
        let control = Control::create(&Configuration::plain(Limit::Bytes(80 << 20))).unwrap().0;
        let own = rustix::process::getpid();
        for bytes in [600 << 10, 3 << 20, 900 << 10] {
            control.process(control.claim_slot(own).unwrap()).measured_bytes.store(bytes, Ordering::Relaxed);
        }
        assert_eq!(control.bytes_of_small(1 << 20), 1500 << 10);
        assert_eq!(control.bytes_of_small(600 << 10), 0);
    }

    #[test]
    fn the_reason_of_a_tree_is_what_takes_most_of_the_limit() {
        let configuration = Configuration::plain(Limit::Bytes(80 << 20));
        let control = Control::create(&configuration).unwrap().0;
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        me.anon_bytes.store(100 << 20, Ordering::Relaxed);
        assert_eq!(control.tree_excess(), Excess::Unmanaged, "no engine holds anything of it");
        me.counters.of(Order::new(4).unwrap()).nr_anon.set(1600);
        assert_eq!(control.tree_excess(), Excess::SlowReclaim, "nothing is known of how it compresses");
        me.counters.store.orig_data_size.set(64 << 20);
        me.counters.store.mem_used_total.set(60 << 20);
        assert_eq!(control.tree_excess(), Excess::Incompressible);
        me.counters.vm.unevictable_pgs_culled.add(4000);
        assert_eq!(control.tree_excess(), Excess::Unevictable);
        me.counters.vm.unevictable_pgs_rescued.add(u64::MAX);
        assert_eq!(control.tree_excess(), Excess::Incompressible, "overwritten counters do no harm");
        control.set_unmanaged_bytes(20 << 20);
        assert_eq!(control.tree_excess(), Excess::WithoutAgent);
    }
}
