//! The sizes and numbers everything else is counted in, each a type of its own.
//!
//! Identities: a page is [`PAGE_BYTES`]; an [`Order`] is 0..=9; a run of order `k` is `2^k` pages
//! and starts at a multiple of `2^k`; a cluster is `2^9` slots, so that an order-9 folio fills one.

use std::fmt;
use std::ops::Range;

/// Bytes in a page, a frame and a swap slot.
pub const PAGE_BYTES: usize = 4096;
/// `log2(PAGE_BYTES)`.
pub const PAGE_SHIFT: u32 = 12;
/// The highest order: 2 MiB, what one entry of a page middle directory maps.
pub const MAX_ORDER: Order = Order(9);
/// How many orders there are.
pub const ORDERS: usize = 10;
/// Pages in a block of address space and slots in a cluster: `2^MAX_ORDER`.
pub const BLOCK_PAGES: usize = 512;

/// Slots in a cluster, so that a folio of the highest order fills one.
pub const CLUSTER_SLOTS: u32 = MAX_ORDER.pages();

const _: () = assert!(1 << PAGE_SHIFT == PAGE_BYTES);
const _: () = assert!(1 << MAX_ORDER.0 == BLOCK_PAGES);
const _: () = assert!(MAX_ORDER.0 as usize + 1 == ORDERS);

/// The binary logarithm of a number of pages, 0 (4 KiB) to 9 (2 MiB).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Order(u8);

impl Order {
    /// 4 KiB.
    pub const ZERO: Order = Order(0);

    /// `order` if it is at most [`MAX_ORDER`].
    pub const fn new(order: u8) -> Option<Order> {
        if order <= MAX_ORDER.0 { Some(Order(order)) } else { None }
    }

    /// The order of a folio of exactly `bytes`; `None` where no folio has that size.
    pub const fn from_bytes(bytes: u64) -> Option<Order> {
        if !bytes.is_power_of_two() || bytes < PAGE_BYTES as u64 {
            return None;
        }
        let order = bytes.trailing_zeros() - PAGE_SHIFT;
        if order > MAX_ORDER.0 as u32 { None } else { Some(Order(order as u8)) }
    }

    /// The highest order of which there may be a run at `at`, among `pages` of them, one at least.
    pub fn largest_at(at: u32, pages: u32) -> Order {
        Order(at.trailing_zeros().min(pages.ilog2()).min(u32::from(MAX_ORDER.0)) as u8)
    }

    /// The number itself.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The number itself, for indexing arrays of [`ORDERS`] elements.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Pages of a folio of this order.
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// Bytes of a folio of this order.
    pub const fn bytes(self) -> usize {
        PAGE_BYTES << self.0
    }

    /// KiB of a folio of this order, as in the kernel's `hugepages-<size>kB`.
    pub const fn kib(self) -> u32 {
        4 << self.0
    }

    /// The next lower order.
    pub const fn lower(self) -> Option<Order> {
        if self.0 == 0 { None } else { Some(Order(self.0 - 1)) }
    }

    /// The next higher order.
    pub const fn higher(self) -> Option<Order> {
        Order::new(self.0 + 1)
    }

    /// Every order, ascending.
    pub fn all() -> impl DoubleEndedIterator<Item = Order> + Clone {
        (0..=MAX_ORDER.0).map(Order)
    }

    /// Those above 4K, ascending.
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
    /// Only order 0.
    pub const EMPTY: OrderSet = OrderSet(0);
    /// Every order.
    pub const ALL: OrderSet = OrderSet::from_bits(u16::MAX);

    /// The set whose bit `k` stands for order `k`; bit 0 and bits above order 9 are ignored.
    pub const fn from_bits(bits: u16) -> OrderSet {
        OrderSet(bits & 0x3fe)
    }

    /// Bit `k` stands for order `k`.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// This set and `order`.
    pub const fn with(self, order: Order) -> OrderSet {
        OrderSet::from_bits(self.0 | 1 << order.0)
    }

    /// Whether `order` is allowed; order 0 always is.
    pub const fn contains(self, order: Order) -> bool {
        order.0 == 0 || self.0 & (1 << order.0) != 0
    }

    /// What of this set is no higher than `order`.
    pub const fn up_to(self, order: Order) -> OrderSet {
        OrderSet(self.0 & ((2 << order.get()) - 1))
    }

    /// The highest allowed order.
    pub const fn highest(self) -> Order {
        Order((self.0 | 1).ilog2() as u8)
    }

    /// The allowed orders, highest first, order 0 last.
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
    /// The page that holds `address`.
    pub const fn containing(address: u64) -> PageNumber {
        PageNumber(address >> PAGE_SHIFT)
    }

    /// The address of its first byte.
    pub const fn address(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// The first page of the naturally aligned run of `order` that holds this page.
    pub const fn head(self, order: Order) -> PageNumber {
        PageNumber(self.0 & !(order.pages() as u64 - 1))
    }

    /// The pages of the folio of `order` whose head this is.
    pub const fn folio(self, order: Order) -> Range<PageNumber> {
        self..self.offset(order.pages())
    }

    /// The page `pages` further on.
    pub const fn offset(self, pages: u32) -> PageNumber {
        PageNumber(self.0 + pages as u64)
    }

    /// Where in its 2 MiB block this page lies, 0..[`BLOCK_PAGES`].
    pub const fn index_in_block(self) -> usize {
        self.0 as usize % BLOCK_PAGES
    }
}

impl fmt::Debug for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "V{:x}", self.0)
    }
}

/// A page of the budget: page number in the arena, which is also where its home is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame(pub u32);

impl Frame {
    /// The frame `frames` further on.
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
    /// How many frames, as an order.
    pub order: Order,
}

impl FrameRun {
    /// The run of `order` that starts at `head`, which must be aligned to it.
    pub const fn new(head: Frame, order: Order) -> FrameRun {
        debug_assert!(head.0.is_multiple_of(order.pages()));
        FrameRun { head, order }
    }

    /// Frames in the run.
    pub const fn frames(self) -> u32 {
        self.order.pages()
    }

    /// Whether all of `other` lies in it.
    pub const fn contains(self, other: FrameRun) -> bool {
        other.order.get() <= self.order.get() && other.head.0 & !(self.order.pages() - 1) == self.head.0
    }

    /// The part of order `order` that holds frame number `index` of this run.
    pub const fn part(self, index: u32, order: Order) -> FrameRun {
        debug_assert!(index < self.frames() && order.get() <= self.order.get());
        FrameRun { head: Frame(self.head.0 + (index & !(order.pages() - 1))), order }
    }
}

/// A 4 KiB slot of a swap device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot `slots` further on.
    pub const fn offset(self, slots: u32) -> Slot {
        Slot(self.0 + slots)
    }

    /// The cluster it lies in.
    pub const fn cluster(self) -> ClusterNumber {
        ClusterNumber(self.0 / CLUSTER_SLOTS)
    }

    /// Where in its cluster it lies.
    pub const fn index_in_cluster(self) -> SlotIndex {
        SlotIndex((self.0 % CLUSTER_SLOTS) as u16)
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S{:x}", self.0)
    }
}

/// [`CLUSTER_SLOTS`] slots of a swap device, 0 based.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterNumber(pub u32);

impl ClusterNumber {
    /// The slot at `index` of this cluster.
    pub const fn slot(self, index: SlotIndex) -> Slot {
        Slot(self.0 * CLUSTER_SLOTS + index.0 as u32)
    }

    /// All its slots.
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

/// Where in its cluster a slot lies, 0..[`CLUSTER_SLOTS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u16);

impl SlotIndex {
    /// The first slot of a cluster.
    pub const FIRST: SlotIndex = SlotIndex(0);

    /// `index` if a cluster has so many slots.
    pub const fn new(index: u32) -> Option<SlotIndex> {
        if index < CLUSTER_SLOTS { Some(SlotIndex(index as u16)) } else { None }
    }

    /// The first slot of the naturally aligned run of `order` that holds this slot.
    pub const fn head(self, order: Order) -> SlotIndex {
        SlotIndex(self.0 & !(order.pages() as u16 - 1))
    }

    /// The number itself.
    pub const fn get(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Debug for SlotIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

/// The CPU somebody runs on, 0 based.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CpuNumber(pub u16);
