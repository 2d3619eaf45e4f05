//! What things cost in virtual time, on the reference machine.

/// Nanoseconds by operation, and how well memory compresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Costs {
    /// A fault that is served, without what serving it takes.
    pub fault_ns: u64,
    /// A touch of a page that is there, with the work a program does between touches of new pages.
    pub touch_ns: u64,
    /// A move, and each page of it.
    pub move_ns: u64,
    /// See `move_ns`.
    pub move_page_ns: u64,
    /// A page that is got from the system.
    pub populate_page_ns: u64,
    /// A page that is zeroed.
    pub zero_page_ns: u64,
    /// A page that is hashed.
    pub hash_page_ns: u64,
    /// A page that is copied.
    pub copy_page_ns: u64,
    /// Compressing a piece, and each page of it.
    pub compress_ns: u64,
    /// See `compress_ns`.
    pub compress_page_ns: u64,
    /// Decompressing a piece, and each page of it.
    pub decompress_ns: u64,
    /// See `decompress_ns`.
    pub decompress_page_ns: u64,
    /// Original to compressed size, by the order of the piece.
    pub ratio_percent: [u32; foliomem_core::units::ORDERS],
}

impl Costs {
    /// A virtual machine with two CPUs and Linux 6.18, lz4 (docs/benchmarks.md: moves, fault round trips, swap-out and
    /// swap-in by folio size, compression by granule; orders between those that were measured are interpolated).
    pub const REFERENCE: Costs = Costs {
        fault_ns: 5_700,
        touch_ns: 100,
        move_ns: 680,
        move_page_ns: 120,
        populate_page_ns: 1_000,
        zero_page_ns: 90,
        hash_page_ns: 250,
        copy_page_ns: 300,
        compress_ns: 700,
        compress_page_ns: 5_200,
        decompress_ns: 300,
        decompress_page_ns: 850,
        ratio_percent: [171, 180, 189, 196, 203, 204, 205, 205, 206, 206],
    };
}
