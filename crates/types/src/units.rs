//! Units: sizes and numbers of pages, frames, slots and clusters, each as its own type.
//!
//! Identities: a page is [`PAGE_BYTES`]; an [`Order`] is 0..=9; a run of order `k` has `2^k` pages
//! and starts at a multiple of `2^k`; a cluster is `2^9` slots, so that an order-9 folio fills one
//! cluster.

use std::fmt;
use std::ops::Range;

/// Bytes in a page, a frame and a swap slot.
pub const PAGE_BYTES: usize = 4096;
/// `log2(PAGE_BYTES)`.
pub const PAGE_SHIFT: u32 = 12;
/// The highest order: 2 MiB, the span of one page middle directory entry.
pub const MAX_ORDER: Order = Order(9);
/// Number of orders, 0..=[`MAX_ORDER`].
pub const ORDERS: usize = 10;
/// Pages in a block of address space and slots in a cluster: `2^MAX_ORDER`.
pub const BLOCK_PAGES: usize = 512;

/// Slots in a cluster: a folio of the highest order fills one cluster.
pub const CLUSTER_SLOTS: u32 = MAX_ORDER.pages();
/// Bytes in a cluster.
pub const CLUSTER_BYTES: u64 = CLUSTER_SLOTS as u64 * PAGE_BYTES as u64;

const _: () = assert!(1 << PAGE_SHIFT == PAGE_BYTES);
const _: () = assert!(1 << MAX_ORDER.0 == BLOCK_PAGES);
const _: () = assert!(MAX_ORDER.0 as usize + 1 == ORDERS);

/// The binary logarithm of a number of pages, 0 (4 KiB) to 9 (2 MiB).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Order(u8);

impl Order {
    /// Order 0: one page of 4 KiB.
    pub const ZERO: Order = Order(0);

    /// Returns `order` if it is at most [`MAX_ORDER`].
    pub const fn new(order: u8) -> Option<Order> {
        if order <= MAX_ORDER.0 { Some(Order(order)) } else { None }
    }

    /// Returns the order of a folio of exactly `bytes` bytes, or `None` if no folio has that size.
    pub const fn from_bytes(bytes: u64) -> Option<Order> {
        if !bytes.is_power_of_two() || bytes < PAGE_BYTES as u64 {
            return None;
        }
        let order = bytes.trailing_zeros() - PAGE_SHIFT;
        if order > MAX_ORDER.0 as u32 { None } else { Some(Order(order as u8)) }
    }

    /// Returns the highest order of a naturally aligned run that starts at `at` and fits into
    /// `pages` pages. `pages` must be at least 1.
    pub fn largest_at(at: u32, pages: u32) -> Order {
        Order(at.trailing_zeros().min(pages.ilog2()).min(u32::from(MAX_ORDER.0)) as u8)
    }

    /// Returns the order as a number.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the order as an index into arrays of [`ORDERS`] elements.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the number of pages of a folio of this order.
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// Returns the number of bytes of a folio of this order.
    pub const fn bytes(self) -> usize {
        PAGE_BYTES << self.0
    }

    /// Returns the size of a folio of this order in KiB, as in the kernel's `hugepages-<size>kB`.
    pub const fn kib(self) -> u32 {
        4 << self.0
    }

    /// Returns the next lower order, if there is one.
    pub const fn lower(self) -> Option<Order> {
        if self.0 == 0 { None } else { Some(Order(self.0 - 1)) }
    }

    /// Returns the next higher order, if there is one.
    pub const fn higher(self) -> Option<Order> {
        Order::new(self.0 + 1)
    }

    /// Iterates over every order, ascending.
    pub fn all() -> impl DoubleEndedIterator<Item = Order> + Clone {
        (0..=MAX_ORDER.0).map(Order)
    }

    /// Iterates over the orders above 4K, ascending.
    pub fn sizes() -> impl DoubleEndedIterator<Item = Order> + Clone {
        (1..=MAX_ORDER.0).map(Order)
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o{}", self.0)
    }
}

/// A set of orders, one bit each. Order 0 is always allowed and never stored.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct OrderSet(u16);

impl OrderSet {
    /// The set that contains only order 0.
    pub const EMPTY: OrderSet = OrderSet(0);
    /// The set of all orders.
    pub const ALL: OrderSet = OrderSet::from_bits(u16::MAX);

    /// Returns the set in which bit `k` stands for order `k`. Bit 0 and bits above order 9 are
    /// ignored.
    pub const fn from_bits(bits: u16) -> OrderSet {
        OrderSet(bits & 0x3fe)
    }

    /// Returns the set as bits; bit `k` stands for order `k`.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Returns this set with `order` added.
    pub const fn with(self, order: Order) -> OrderSet {
        OrderSet::from_bits(self.0 | 1 << order.0)
    }

    /// Returns whether the set allows `order`. Order 0 is always allowed.
    pub const fn contains(self, order: Order) -> bool {
        order.0 == 0 || self.0 & (1 << order.0) != 0
    }

    /// Returns the orders of this set that are at most `order`.
    pub const fn up_to(self, order: Order) -> OrderSet {
        OrderSet(self.0 & ((2 << order.get()) - 1))
    }

    /// Returns the highest allowed order.
    pub const fn highest(self) -> Order {
        Order((self.0 | 1).ilog2() as u8)
    }

    /// Iterates over the allowed orders, highest first; order 0 comes last.
    pub fn descending(self) -> impl Iterator<Item = Order> {
        let mut left = self.0 | 1;
        std::iter::from_fn(move || {
            let highest = left.checked_ilog2()?;
            left ^= 1 << highest;
            Some(Order(highest as u8))
        })
    }
}

impl fmt::Debug for OrderSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.descending()).finish()
    }
}

/// A page of the program's address space: its address divided by [`PAGE_BYTES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNumber(pub u64);

impl PageNumber {
    /// Returns the page that contains `address`.
    pub const fn containing(address: u64) -> PageNumber {
        PageNumber(address >> PAGE_SHIFT)
    }

    /// Returns the address of the page's first byte.
    pub const fn address(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// Returns the first page of the naturally aligned run of `order` that contains this page.
    pub const fn head(self, order: Order) -> PageNumber {
        PageNumber(self.0 & !(order.pages() as u64 - 1))
    }

    /// Returns the pages of the folio of `order` whose head is this page.
    pub const fn folio(self, order: Order) -> Range<PageNumber> {
        self..self.offset(order.pages())
    }

    /// Returns the page `pages` pages after this one.
    pub const fn offset(self, pages: u32) -> PageNumber {
        PageNumber(self.0 + pages as u64)
    }

    /// Returns the page's index in its 2 MiB block, 0..[`BLOCK_PAGES`].
    pub const fn index_in_block(self) -> usize {
        self.0 as usize % BLOCK_PAGES
    }
}

impl fmt::Debug for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "V{:x}", self.0)
    }
}

/// A page of the budget, numbered by its page in the arena (its home frame).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(pub u32);

impl Frame {
    /// Returns the frame `frames` frames after this one.
    pub const fn offset(self, frames: u32) -> Frame {
        Frame(self.0 + frames)
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "F{:x}", self.0)
    }
}

/// A naturally aligned run of `2^order` frames.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameRun {
    /// The first frame, a multiple of `2^order`.
    pub head: Frame,
    /// Number of frames, as an order.
    pub order: Order,
}

impl FrameRun {
    /// Returns the run of `order` that starts at `head`. `head` must be aligned to `order`.
    pub const fn new(head: Frame, order: Order) -> FrameRun {
        debug_assert!(head.0.is_multiple_of(order.pages()));
        FrameRun { head, order }
    }

    /// Returns the number of frames in the run.
    pub const fn frames(self) -> u32 {
        self.order.pages()
    }

    /// Returns whether `other` lies entirely in this run.
    pub const fn contains(self, other: FrameRun) -> bool {
        other.order.get() <= self.order.get() && other.head.0 & !(self.order.pages() - 1) == self.head.0
    }

    /// Returns the part of order `order` that contains frame number `index` of this run.
    pub const fn part(self, index: u32, order: Order) -> FrameRun {
        debug_assert!(index < self.frames() && order.get() <= self.order.get());
        FrameRun { head: Frame(self.head.0 + (index & !(order.pages() - 1))), order }
    }
}

/// A 4 KiB slot of a swap device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// Returns where the slot begins in the swap file, in bytes.
    pub const fn offset_bytes(self) -> u64 {
        self.0 as u64 * PAGE_BYTES as u64
    }

    /// Returns the slot `slots` slots after this one.
    pub const fn offset(self, slots: u32) -> Slot {
        Slot(self.0 + slots)
    }

    /// Returns the cluster that contains the slot.
    pub const fn cluster(self) -> ClusterNumber {
        ClusterNumber(self.0 / CLUSTER_SLOTS)
    }

    /// Returns the slot's index in its cluster.
    pub const fn index_in_cluster(self) -> SlotIndex {
        SlotIndex((self.0 % CLUSTER_SLOTS) as u16)
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S{:x}", self.0)
    }
}

/// A cluster of [`CLUSTER_SLOTS`] slots of a swap device, numbered from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterNumber(pub u32);

impl ClusterNumber {
    /// Returns the slot at `index` of this cluster.
    pub const fn slot(self, index: SlotIndex) -> Slot {
        Slot(self.0 * CLUSTER_SLOTS + index.0 as u32)
    }

    /// Returns all slots of the cluster.
    pub const fn slots(self) -> Range<Slot> {
        let first = self.slot(SlotIndex::FIRST);
        first..first.offset(CLUSTER_SLOTS)
    }
}

impl fmt::Debug for ClusterNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "C{:x}", self.0)
    }
}

/// A slot's index in its cluster, 0..[`CLUSTER_SLOTS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u16);

impl SlotIndex {
    /// The first slot of a cluster.
    pub const FIRST: SlotIndex = SlotIndex(0);

    /// Returns `index` as a slot index if it is below [`CLUSTER_SLOTS`].
    pub const fn new(index: u32) -> Option<SlotIndex> {
        if index < CLUSTER_SLOTS { Some(SlotIndex(index as u16)) } else { None }
    }

    /// Returns the first slot of the naturally aligned run of `order` that contains this slot.
    pub const fn head(self, order: Order) -> SlotIndex {
        SlotIndex(self.0 & !(order.pages() as u16 - 1))
    }

    /// Returns the index as a number.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Debug for SlotIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

/// A CPU number, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CpuNumber(pub u16);
