//! Counters, named like the kernel's.
//!
//! [`Counters`] is plain atomics in a fixed layout, so that the agent can keep them in memory
//! shared with the supervisor: counts survive any end of the process. All counters are monotonic
//! except those documented as gauges. Per-size names come from
//! `/sys/kernel/mm/transparent_hugepage/hugepages-<size>kB/stats`, the others from `/proc/vmstat`
//! and from zram's `mm_stat`. Every access is relaxed: counts order nothing.

use crate::units::{ORDERS, Order};
// No protocol depends on a counter, so the schedule explorer need not see it, and the struct must
// stay plain memory.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One monotonic count or gauge.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at zero.
    pub const fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Subtracts `n` from a gauge. A gauge never goes below zero.
    pub fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "gauge {before} - {n}");
    }

    /// Sets a gauge.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Raises a maximum to `value`.
    pub fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Buckets of a [`Histogram`]: four per power of two up to 2^40 ns (18 minutes).
pub const HISTOGRAM_BUCKETS: usize = 160;

/// A histogram of durations in nanoseconds: bucket `4*e + q` counts values in
/// `[2^e * (1 + q/4), 2^e * (1 + (q+1)/4))`, so that a quantile is right within 25%.
#[derive(Debug)]
#[repr(C)]
pub struct Histogram {
    /// Observations per bucket.
    pub buckets: [Counter; HISTOGRAM_BUCKETS],
    /// Sum of all observations.
    pub sum_ns: Counter,
    /// The largest observation.
    pub max_ns: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: [const { Counter::new() }; HISTOGRAM_BUCKETS],
            sum_ns: Counter::new(),
            max_ns: Counter::new(),
        }
    }
}

impl Histogram {
    /// Returns the bucket that counts `ns`.
    pub const fn bucket_of(ns: u64) -> usize {
        if ns < 4 {
            return ns as usize * 2; // 1, 2 and 3 ns are 2^0, 2^1 and 2^1 * 1.5
        }
        let exponent = 63 - ns.leading_zeros() as usize;
        let quarter = (ns >> (exponent - 2)) as usize & 3;
        let bucket = 4 * exponent + quarter;
        if bucket < HISTOGRAM_BUCKETS { bucket } else { HISTOGRAM_BUCKETS - 1 }
    }

    /// Returns the smallest duration above every value that `bucket` counts.
    pub const fn upper_bound_ns(bucket: usize) -> u64 {
        let (exponent, quarter) = (bucket / 4, bucket as u64 % 4);
        ((1u64 << exponent) * (5 + quarter)).div_ceil(4)
    }

    /// Counts one duration.
    pub fn record(&self, ns: u64) {
        self.buckets[Self::bucket_of(ns)].inc();
        self.sum_ns.add(ns);
        self.max_ns.raise_to(ns);
    }

    /// Returns how many durations were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// Returns an upper bound of the `quantile` (0..=1), at most 25% too high; 0 if nothing was
    /// counted.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        let count = self.count();
        if count == 0 {
            return 0;
        }
        let rank = ((count as f64 * quantile).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (bucket, counter) in self.buckets.iter().enumerate() {
            seen += counter.get();
            if seen >= rank {
                return Self::upper_bound_ns(bucket).min(self.max_ns.get());
            }
        }
        self.max_ns.get()
    }

    fn fold_into(&self, total: &Histogram) {
        for (from, to) in self.buckets.iter().zip(&total.buckets) {
            to.add(from.get());
        }
        total.sum_ns.add(self.sum_ns.get());
        total.max_ns.raise_to(self.max_ns.get());
    }

    fn clear(&self) {
        self.buckets.iter().chain([&self.sum_ns, &self.max_ns]).for_each(|counter| counter.set(0));
    }
}

macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $($(#[doc = $doc:literal])* $field:ident: $kind:ident,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $doc])* pub $field: Counter,)* }

        impl $name {
            /// What each counter counts, in the order of declaration. A text begins with a space.
            pub const MEANINGS: &[&str] = &[$(concat!($($doc),*)),*];

            /// Iterates over all counters with their names, in the order of declaration.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, &Counter)> {
                [$((stringify!($field), &self.$field)),*].into_iter()
            }

            fn fold_into(&self, total: &$name) {
                $(counters!(@fold $kind, self.$field, total.$field);)*
            }

            /// Clears the gauges of a process that ended.
            fn clear_gauges(&self) {
                $(counters!(@clear $kind, self.$field);)*
            }

            /// Copies the parent's gauges to the child of a fork.
            fn inherit_gauges(&self, parent: &$name) {
                $(counters!(@inherit $kind, self.$field, parent.$field);)*
            }
        }
    };
    (@fold count, $from:expr, $to:expr) => { $to.add($from.get()) };
    (@fold gauge, $from:expr, $to:expr) => { $to.add($from.get()) };
    (@fold max, $from:expr, $to:expr) => { $to.add($from.get()) };
    (@clear gauge, $field:expr) => { $field.set(0) };
    (@clear $kind:ident, $field:expr) => { let _ = &$field; };
    (@inherit gauge, $field:expr, $parent:expr) => { $field.set($parent.get()) };
    (@inherit $kind:ident, $field:expr, $parent:expr) => { let _ = (&$field, &$parent); };
}

counters! {
    /// Counters of one folio size: `hugepages-<size>kB/stats`.
    SizeCounters {
        /// Folios allocated, charged and mapped for a first touch.
        anon_fault_alloc: count,
        /// First touches that tried this order and fell back to a lower one.
        anon_fault_fallback: count,
        /// Those of `anon_fault_fallback` that the limit caused: frames were available.
        anon_fault_fallback_charge: count,
        /// Folios written to the swap device in one piece.
        swpout: count,
        /// Folios split before swap-out because no contiguous slots could be had.
        swpout_fallback: count,
        /// Folios read from the swap device in one piece.
        swpin: count,
        /// Swap-ins that tried this order and fell back to a lower one.
        swpin_fallback: count,
        /// Those of `swpin_fallback` that the limit caused.
        swpin_fallback_charge: count,
        /// Folios split into smaller ones.
        split: count,
        /// Folios that became partially mapped and were queued for a split.
        split_deferred: count,
        /// Splits refused because a page was pinned: always 0, because a split only changes the
        /// page table here.
        split_failed: count,
        /// Gauge: resident folios of this size.
        nr_anon: gauge,
        /// Those of `nr_anon`, counted now, that are partially mapped. Gauge.
        nr_anon_partially_mapped: gauge,
    }
}

counters! {
    /// Counters of the whole process: `/proc/vmstat`.
    VmCounters {
        /// Faults handled, of all kinds.
        pgfault: count,
        /// Faults that had to decompress or read the content.
        pgmajfault: count,
        /// Pages read from the swap device.
        pswpin: count,
        /// Pages written to the swap device.
        pswpout: count,
        /// Pages swapped in that repeat one word, without decompressing; part of `pswpin`.
        swpin_zero: count,
        /// Pages swapped out that repeat one word and take no memory; part of `pswpout`.
        swpout_zero: count,
        /// Pages of staged folios that were touched and mapped in again without a read: second
        /// chances.
        pgactivate: count,
        /// Swapped-out pages that were touched.
        workingset_refault_anon: count,
        /// Those of `workingset_refault_anon` whose refault distance was short; they become active.
        workingset_activate_anon: count,
        /// Pages staged: unmapped into the arena.
        pgdeactivate: count,
        /// Pages reclaimed in the background.
        pgsteal_kswapd: count,
        /// Pages reclaimed by faults that waited for it.
        pgsteal_direct: count,
        /// Pages swapped in before they were touched.
        swap_ra: count,
        /// Gauge: resident pages that also have a swap-cache entry.
        nr_swapcached: gauge,
        /// Pages swapped out without compressing them again, because their swap-cache entry was
        /// still good.
        pswpout_cached: count,
        /// Faults that reclaimed by themselves.
        allocstall: count,
        /// Pages that could not be unmapped (pinned, locked, or in a mapping without write
        /// permission).
        unevictable_pgs_culled: count,
        /// Those of `unevictable_pgs_culled` that were retried.
        unevictable_pgs_rescued: count,
        /// Pages taken over from the kernel when the agent adopted their mapping.
        pgadopted: count,
        /// Swapped-out pages that the program discarded without a message (guards). They read as
        /// zeros.
        discarded_unheard: count,
        /// Processes whose code can make system calls that the agent does not see.
        unseen_callers: count,
        /// Searches of all mappings for memory to manage.
        mapping_searches: count,
        /// Pages left unmanaged because the arena was full.
        unmanaged_arena_full: count,
        /// Pages the migrate scanner looked at.
        compact_migrate_scanned: count,
        /// Pages the free scanner looked at.
        compact_free_scanned: count,
        /// Pages migrated to other frames, by a copy or by changing only their home frame.
        pgmigrate_success: count,
        /// Pages that could not be migrated.
        pgmigrate_fail: count,
        /// Pages isolated for migration.
        compact_isolated: count,
        /// Allocations that waited for compaction.
        compact_stall: count,
        /// Compactions that produced the wanted run.
        compact_success: count,
        /// Compactions that did not produce the wanted run.
        compact_fail: count,
        /// Pieces whose checksum did not match. The program was stopped before it could read one.
        store_corrupted: count,
        /// Times the limit was exceeded because the data did not compress into it.
        limit_exceeded: count,
    }
}

counters! {
    /// Counters of the compressed store: zram's `mm_stat`, in bytes unless they count pages or
    /// pieces.
    StoreCounters {
        /// Gauge: uncompressed size of the stored pieces.
        orig_data_size: gauge,
        /// Gauge: compressed size of the stored pieces.
        compr_data_size: gauge,
        /// Gauge: memory of the store, including waste and metadata.
        mem_used_total: gauge,
        /// The maximum of `mem_used_total`.
        mem_used_max: max,
        /// Gauge: pages that repeat one word and take no memory.
        same_pages: gauge,
        /// Pages freed by compaction of the store.
        pages_compacted: count,
        /// Gauge: pages in pieces stored raw because they do not compress.
        huge_pages: gauge,
        /// Pieces recompressed with the second codec as a trial.
        recompress_tried: count,
        /// The pieces of `recompress_tried` that became smaller.
        recompressed: count,
        /// Bytes saved by `recompressed`, counted at that time.
        recompress_saved: count,
    }
}

counters! {
    /// Counters of the swap file: zram's `bd_stat`, in pages of 4 KiB, and the matching parts of
    /// `io_stat`.
    BackingCounters {
        /// Gauge: pages of the swap file in use.
        bd_count: gauge,
        /// Pages read from the swap file.
        bd_reads: count,
        /// Pages written to the swap file.
        bd_writes: count,
        /// Those of `bd_writes` that io_uring wrote.
        bd_writes_uring: count,
        /// Free pages of the swap file that were discarded.
        bd_discards: count,
        /// Pieces that the swap file returned with other content than was written.
        failed_reads: count,
        /// Writes that failed. Their pieces stay in memory.
        failed_writes: count,
        /// Times the swap file was full.
        full: count,
        /// Pieces of which the shared store had the bytes already, from a relative.
        joined: count,
    }
}

/// How a fault was served, as an index of [`Counters::fault_ns`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// First touch: a new folio of zeros.
    FirstTouch,
    /// The folio was still staged: second chance.
    Staged,
    /// Decompressed from the store.
    SwapIn,
    /// Nothing to do: another thread served the fault.
    Spurious,
    /// The fault waited for room for a copy-on-write copy of a page that a fork left shared.
    Copy,
}

impl FaultKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [FaultKind; 5] =
        [FaultKind::FirstTouch, FaultKind::Staged, FaultKind::SwapIn, FaultKind::Spurious, FaultKind::Copy];

    /// Returns the name of the kind in reports.
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::FirstTouch => "first_touch",
            FaultKind::Staged => "staged",
            FaultKind::SwapIn => "swap_in",
            FaultKind::Spurious => "spurious",
            FaultKind::Copy => "copy",
        }
    }
}

/// All counters of one process.
#[derive(Debug)]
#[repr(C)]
pub struct Counters {
    /// Counters by folio order.
    pub size: [SizeCounters; ORDERS],
    /// Counters of the whole process.
    pub vm: VmCounters,
    /// Counters of the compressed store.
    pub store: StoreCounters,
    /// Counters of the swap file behind the store.
    pub backing: BackingCounters,
    /// Time from reading a fault to waking the program, by [`FaultKind`].
    pub fault_ns: [Histogram; FaultKind::ALL.len()],
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            size: std::array::from_fn(|_| SizeCounters::default()),
            vm: VmCounters::default(),
            store: StoreCounters::default(),
            backing: BackingCounters::default(),
            fault_ns: std::array::from_fn(|_| Histogram::default()),
        }
    }
}

impl Counters {
    /// Returns the counters of folios of `order`.
    pub fn of(&self, order: Order) -> &SizeCounters {
        &self.size[order.index()]
    }

    /// Returns the number of pages that are resident as parts of folios.
    pub fn resident_pages(&self) -> u64 {
        // The program may have overwritten any of these words.
        let pages = Order::all().map(|order| self.of(order).nr_anon.get().saturating_mul(order.pages().into()));
        pages.fold(0, u64::saturating_add)
    }

    /// Returns the histogram of faults of `kind`.
    pub fn faults(&self, kind: FaultKind) -> &Histogram {
        &self.fault_ns[kind as usize]
    }

    /// Adds every count to `total`.
    pub fn fold_into(&self, total: &Counters) {
        for (from, to) in self.size.iter().zip(&total.size) {
            from.fold_into(to);
        }
        self.vm.fold_into(&total.vm);
        self.store.fold_into(&total.store);
        self.backing.fold_into(&total.backing);
        for (from, to) in self.fault_ns.iter().zip(&total.fault_ns) {
            from.fold_into(to);
        }
    }

    /// Sets every gauge to the parent's value, for the child of a fork.
    pub fn inherit_gauges(&self, parent: &Counters) {
        for (own, parent) in self.size.iter().zip(&parent.size) {
            own.inherit_gauges(parent);
        }
        self.vm.inherit_gauges(&parent.vm);
        self.store.inherit_gauges(&parent.store);
        self.backing.inherit_gauges(&parent.backing);
    }

    /// Adds every count to `total` and resets this one to zero.
    pub fn drain_into(&self, total: &Counters) {
        self.fold_into(total);
        let sizes = self.size.iter().flat_map(SizeCounters::fields);
        let counters = sizes.chain(self.vm.fields()).chain(self.store.fields()).chain(self.backing.fields());
        counters.for_each(|(_, counter)| counter.set(0));
        self.fault_ns.iter().for_each(Histogram::clear);
    }

    /// Sets every gauge to zero, for a process that ended.
    pub fn clear_gauges(&self) {
        self.size.iter().for_each(SizeCounters::clear_gauges);
        self.vm.clear_gauges();
        self.store.clear_gauges();
        self.backing.clear_gauges();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_the_values_below_its_upper_bound() {
        for ns in (1..100_000).chain((10..39).map(|e| (1u64 << e) + 12345)) {
            let bucket = Histogram::bucket_of(ns);
            let upper = Histogram::upper_bound_ns(bucket);
            assert!(ns < upper || bucket == HISTOGRAM_BUCKETS - 1, "{ns} in bucket {bucket} below {upper}");
            assert!(upper <= ns + ns / 4 + 2, "{ns}: {upper} is more than 25% off");
        }
    }

    #[test]
    fn quantiles_bound_the_recorded_values() {
        let histogram = Histogram::default();
        (1..=1000u64).for_each(|n| histogram.record(n * 1000));
        assert_eq!(histogram.count(), 1000);
        let median = histogram.quantile_ns(0.5);
        assert!((500_000..=625_000).contains(&median), "{median}");
        assert_eq!(histogram.quantile_ns(1.0), 1_000_000);
        assert_eq!(Histogram::default().quantile_ns(0.99), 0);
    }

    #[test]
    fn folding_adds_counts_and_keeps_maxima() {
        let (a, total) = (Counters::default(), Counters::default());
        a.of(Order::ZERO).swpout.add(3);
        a.vm.pgfault.add(7);
        a.faults(FaultKind::Staged).record(500);
        a.fold_into(&total);
        a.fold_into(&total);
        assert_eq!(total.of(Order::ZERO).swpout.get(), 6);
        assert_eq!(total.vm.pgfault.get(), 14);
        assert_eq!(total.faults(FaultKind::Staged).count(), 2);
        assert_eq!(total.faults(FaultKind::Staged).max_ns.get(), 500);
    }
}
