//! What things cost in virtual time, on the reference machine.

use foliomem_core::units::ORDERS;

/// Nanoseconds by operation, and how well memory compresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Costs {
    /// A fault that is served, without what serving it takes.
    pub fault_ns: u32,
    /// A touch of a page that is there, with the work a program does between touches of new pages.
    pub touch_ns: u32,
    /// A move, and each page of it.
    pub move_ns: u32,
    /// See `move_ns`.
    pub move_page_ns: u32,
    /// A page that is got from the system.
    pub populate_page_ns: u32,
    /// A page that is zeroed.
    pub zero_page_ns: u32,
    /// A page that is hashed.
    pub hash_page_ns: u32,
    /// A page that is copied.
    pub copy_page_ns: u32,
    /// A cluster that is looked through for slots.
    pub cluster_ns: u32,
    /// A codec.
    pub lz4: CodecCosts,
}

/// Of a codec, by the order of the piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodecCosts {
    /// Compressing a page of the piece.
    pub compress_page_ns: [u32; ORDERS],
    /// Decompressing a page of the piece.
    pub decompress_page_ns: [u32; ORDERS],
    /// Original to compressed size.
    pub ratio_percent: [u32; ORDERS],
}

impl Costs {
    /// A virtual machine with two CPUs and Linux 6.18 (docs/benchmarks.md: moves, fault round trips, swap-out and swap-in by
    /// folio size, compression by granule; orders between those that were measured are interpolated).
    pub const REFERENCE: Costs = Costs {
        fault_ns: 5_700,
        touch_ns: 100,
        move_ns: 680,
        move_page_ns: 120,
        populate_page_ns: 1_000,
        zero_page_ns: 90,
        hash_page_ns: 250,
        copy_page_ns: 300,
        cluster_ns: 60,
        lz4: CodecCosts {
            compress_page_ns: [5_900, 5_550, 5_375, 5_290, 5_245, 5_220, 5_210, 5_205, 5_200, 5_200],
            decompress_page_ns: [1_150, 1_000, 925, 890, 870, 860, 855, 850, 850, 850],
            ratio_percent: [171, 180, 189, 196, 203, 204, 205, 205, 206, 206],
        },
    };
}
