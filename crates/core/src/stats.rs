//! Counters, named as the kernel names its own.
//!
//! [`Counters`] is plain atomics in a fixed layout, so that the agent keeps them in memory shared with
//! the supervisor: whatever way a process ends, its counts are there. All are monotonic except
//! those documented as gauges. Per-size names are those of
//! `/sys/kernel/mm/transparent_hugepage/hugepages-<size>kB/stats`, the others those of `/proc/vmstat`
//! and of zram's `mm_stat`. Every access is relaxed: counts order nothing.

// A counter is never part of a protocol a schedule explorer should explore, and the struct must stay plain memory.
use crate::sync::unordered::{AtomicU64, Ordering::Relaxed};
use crate::units::{ORDERS, Order};

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

    /// Takes `n` off a gauge. A gauge never goes below zero.
    pub fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "gauge {before} - {n}");
    }

    /// Sets a gauge.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Raises a maximum.
    pub fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }

    /// Its value.
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
    /// The largest.
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
    /// The bucket that counts `ns`.
    pub const fn bucket_of(ns: u64) -> usize {
        if ns < 4 {
            return ns as usize * 2; // 1, 2 and 3 ns are 2^0, 2^1 and 2^1 * 1.5
        }
        let exponent = 63 - ns.leading_zeros() as usize;
        let quarter = (ns >> (exponent - 2)) as usize & 3;
        let bucket = 4 * exponent + quarter;
        if bucket < HISTOGRAM_BUCKETS { bucket } else { HISTOGRAM_BUCKETS - 1 }
    }

    /// The smallest duration above every value that bucket `bucket` counts.
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

    /// How many durations were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// An upper bound of the `quantile` (0..=1), within 25%; 0 where nothing was counted.
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
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ident,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        #[repr(C)]
        pub struct $name { $($(#[$field_meta])* pub $field: Counter,)* }

        impl $name {
            /// Every counter with its name, in the order of declaration.
            pub fn fields(&self) -> impl Iterator<Item = (&'static str, &Counter)> {
                [$((stringify!($field), &self.$field)),*].into_iter()
            }

            fn fold_into(&self, total: &$name) {
                $(counters!(@fold $kind, self.$field, total.$field);)*
            }

            /// Takes a process that has ended out of the gauges.
            fn clear_gauges(&self) {
                $(counters!(@clear $kind, self.$field);)*
            }

            /// The child of a fork has what its parent has.
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
    /// Per folio size: `hugepages-<size>kB/stats`.
    SizeCounters {
        /// Folios allocated, charged and mapped for a first touch.
        anon_fault_alloc: count,
        /// This order was tried at a first touch and could not be had.
        anon_fault_fallback: count,
        /// Of those: frames could have been had, the limit forbade it.
        anon_fault_fallback_charge: count,
        /// Folios written to the swap device in one piece.
        swpout: count,
        /// Folios split before swap-out because no contiguous slots could be had.
        swpout_fallback: count,
        /// Folios read from the swap device in one piece.
        swpin: count,
        /// This order was tried at swap-in and could not be had.
        swpin_fallback: count,
        /// Of those: the limit forbade it.
        swpin_fallback_charge: count,
        /// Folios split into smaller ones.
        split: count,
        /// Folios that became partially mapped and were queued for a split.
        split_deferred: count,
        /// Splits that were refused because a page was pinned: none, because here a split is a note in the page table.
        split_failed: count,
        /// Gauge: resident folios of this size.
        nr_anon: gauge,
        /// Gauge: of those, partially mapped ones.
        nr_anon_partially_mapped: gauge,
    }
}

counters! {
    /// `/proc/vmstat`.
    VmCounters {
        /// Faults handled, of all kinds.
        pgfault: count,
        /// Of those: the content had to be decompressed or read.
        pgmajfault: count,
        /// Pages read from the swap device.
        pswpin: count,
        /// Pages written to the swap device.
        pswpout: count,
        /// Pages that came back as zeros without the swap device.
        swpin_zero: count,
        /// Pages that went out as zeros without the swap device.
        swpout_zero: count,
        /// Pages of staged folios that were touched and given back without a read: second chances.
        pgactivate: count,
        /// Pages that were touched while they were out.
        workingset_refault_anon: count,
        /// Those of them that had been out for a short time only, and are active from then on.
        workingset_activate_anon: count,
        /// Pages moved out of the program's reach, to their home.
        pgdeactivate: count,
        /// Pages reclaimed in the background.
        pgsteal_kswapd: count,
        /// Pages reclaimed by a fault that had to wait for it.
        pgsteal_direct: count,
        /// Pages read from the swap device before they were touched.
        swap_ra: count,
        /// Gauge: pages in the program that have a compressed copy, too.
        nr_swapcached: gauge,
        /// Pages that went out without being compressed again: their copy was still good.
        pswpout_cached: count,
        /// Faults that had to reclaim by themselves.
        allocstall: count,
        /// Pages that could not be moved out (pinned, locked, or of a mapping that may not be written).
        unevictable_pgs_culled: count,
        /// Those of them that were tried again.
        unevictable_pgs_rescued: count,
        /// Pages taken over from the kernel when their mapping was adopted.
        pgadopted: count,
        /// Swapped-out pages that the program had discarded without a message (guards): they read as zeros.
        discarded_unheard: count,
        /// Pages that were left to the system, because the arena was full.
        unmanaged_arena_full: count,
        /// Pages the migrate scanner looked at.
        compact_migrate_scanned: count,
        /// Pages the free scanner looked at.
        compact_free_scanned: count,
        /// Pages moved to other frames, whether that took a copy or only a note of their new home.
        pgmigrate_success: count,
        /// Pages that could not be.
        pgmigrate_fail: count,
        /// Pages isolated for migration.
        compact_isolated: count,
        /// Allocations that waited for compaction.
        compact_stall: count,
        /// Compactions that made the wanted run.
        compact_success: count,
        /// Compactions that did not.
        compact_fail: count,
        /// Pieces whose checksum did not match. The program was stopped before it could see one.
        store_corrupted: count,
        /// Times the limit was exceeded because the data did not compress into it.
        limit_exceeded: count,
    }
}

counters! {
    /// zram's `mm_stat`, in bytes, but for what counts pages or pieces.
    StoreCounters {
        /// Gauge: uncompressed size of what is stored.
        orig_data_size: gauge,
        /// Gauge: compressed size of what is stored.
        compr_data_size: gauge,
        /// Gauge: memory the store takes, waste and metadata included.
        mem_used_total: gauge,
        /// The most `mem_used_total` has been.
        mem_used_max: max,
        /// Gauge: pages that are one repeated word and take no memory.
        same_pages: gauge,
        /// Pages that compaction of the store has freed.
        pages_compacted: count,
        /// Gauge: pages in pieces kept raw because they do not compress.
        huge_pages: gauge,
        /// Pieces on which the second codec was tried.
        recompress_tried: count,
        /// Those of them that take less room since.
        recompressed: count,
        /// Bytes by which they took less at that time.
        recompress_saved: count,
    }
}

counters! {
    /// zram's `bd_stat`, in pages of 4 KiB, and what of `io_stat` there is here.
    BackingCounters {
        /// Gauge: pages of the swap file in use.
        bd_count: gauge,
        /// Pages read from the swap file.
        bd_reads: count,
        /// Pages written to the swap file.
        bd_writes: count,
        /// Those of `bd_writes` that io_uring has written.
        bd_writes_uring: count,
        /// Pages of the swap file that were free and discarded.
        bd_discards: count,
        /// Pieces that the swap file did not give back as they were written.
        failed_reads: count,
        /// Writes that failed: what was to be written stays in memory.
        failed_writes: count,
        /// Times the swap file had no room.
        full: count,
    }
}

/// How a fault was served, as an index of [`Counters::fault_ns`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// First touch: a new folio of zeros.
    FirstTouch,
    /// The folio was still at home: second chance.
    Home,
    /// Decompressed from the store.
    SwapIn,
    /// Nothing to do: somebody else had served it.
    Spurious,
    /// It waited for room for a copy of what a fork has left shared.
    Copy,
}

impl FaultKind {
    /// All kinds, in index order.
    pub const ALL: [FaultKind; 5] =
        [FaultKind::FirstTouch, FaultKind::Home, FaultKind::SwapIn, FaultKind::Spurious, FaultKind::Copy];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::FirstTouch => "first_touch",
            FaultKind::Home => "home",
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
    /// By order.
    pub size: [SizeCounters; ORDERS],
    /// Whole process.
    pub vm: VmCounters,
    /// Its compressed store.
    pub store: StoreCounters,
    /// The swap file behind that.
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
    /// The counters of folios of `order`.
    pub fn of(&self, order: Order) -> &SizeCounters {
        &self.size[order.index()]
    }

    /// The histogram of faults of `kind`.
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

    /// Sets every gauge to the parent's: what the child of a fork holds.
    pub fn inherit_gauges(&self, parent: &Counters) {
        for (own, parent) in self.size.iter().zip(&parent.size) {
            own.inherit_gauges(parent);
        }
        self.vm.inherit_gauges(&parent.vm);
        self.store.inherit_gauges(&parent.store);
        self.backing.inherit_gauges(&parent.backing);
    }

    /// Adds every count to `total` and starts at zero again.
    pub fn drain_into(&self, total: &Counters) {
        self.fold_into(total);
        let sizes = self.size.iter().flat_map(SizeCounters::fields);
        let counters = sizes.chain(self.vm.fields()).chain(self.store.fields()).chain(self.backing.fields());
        counters.for_each(|(_, counter)| counter.set(0));
        self.fault_ns.iter().for_each(Histogram::clear);
    }

    /// Sets every gauge to zero: what a process that has ended holds.
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
        a.faults(FaultKind::Home).record(500);
        a.fold_into(&total);
        a.fold_into(&total);
        assert_eq!(total.of(Order::ZERO).swpout.get(), 6);
        assert_eq!(total.vm.pgfault.get(), 14);
        assert_eq!(total.faults(FaultKind::Home).count(), 2);
        assert_eq!(total.faults(FaultKind::Home).max_ns.get(), 500);
    }
}
