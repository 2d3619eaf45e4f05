//! What a kernel takes for what its page cache does, in CPU time.

/// Nanoseconds by operation.
///
/// Measured on Linux 6.18 (a virtual machine with two CPUs, ext4 on a loop device with windows of 128 KiB, a sparse file, so that
/// no disk has a part in it; docs/lab.md says how). What is "a folio" here does not depend on its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelCosts {
    /// `read()` of a page that is cached, in a folio that was just read from.
    pub read_page_ns: u64,
    /// Another folio for it.
    pub read_folio_ns: u64,
    /// A fault that maps what is cached around it.
    pub fault_ns: u64,
    /// Each folio of that.
    pub map_folio_ns: u64,
    /// Zeroing a page, as for a hole of a file.
    pub zero_page_ns: u64,
    /// Allocating a folio and putting it into the page cache.
    pub insert_folio_ns: u64,
    /// Taking a folio out and freeing it, and each page of it.
    pub free_folio_ns: u64,
    /// See `free_folio_ns`.
    pub free_page_ns: u64,
    /// Looking up who maps a page, for each that does: whether it was used, or to unmap it.
    pub rmap_page_ns: u64,
    /// A page, or a folio, that a scanner of compaction looks at.
    pub scan_ns: u64,
    /// Moving a folio, and each page of it.
    pub migrate_folio_ns: u64,
    /// See `migrate_folio_ns`.
    pub migrate_page_ns: u64,
    /// Copying a page: after a fork, or for writing it back.
    pub copy_page_ns: u64,
    /// A program that reads or writes all words of a page.
    pub use_page_ns: u64,
    /// A program that reads or writes a word of a page it has not used lately.
    pub use_word_ns: u64,
}

impl KernelCosts {
    /// See the type.
    pub const MEASURED: KernelCosts = KernelCosts {
        read_page_ns: 175,
        read_folio_ns: 225,
        fault_ns: 620,
        map_folio_ns: 290,
        zero_page_ns: 90,
        insert_folio_ns: 120,
        free_folio_ns: 115,
        free_page_ns: 15,
        rmap_page_ns: 45,
        scan_ns: 2,
        migrate_folio_ns: 900,
        migrate_page_ns: 300,
        copy_page_ns: 300,
        use_page_ns: 955,
        use_word_ns: 100,
    };
}
