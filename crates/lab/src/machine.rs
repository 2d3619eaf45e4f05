//! The lab's machine: dense arrays instead of memory, and a clock that advances by costs.
//!
//! A page has no bytes, only a *version*: the number of writes since it was new, 0 for zeros.
//! Versions are words in arrays, one for each used 2 MiB of the address space. Another array says
//! for each frame which page is staged there. Both together replace content: compressed content is
//! named by its first page and a hash of the versions, and that name returns as the piece's
//! checksum. So every swap-in is checked: it brings the right version of the right page, or the run
//! ends.
//!
//! The machine is all of the engine's ports in one, because each operation moves the clock. Marks,
//! shared pages, a second codec and a swap file are absent: a program of the lab announces all that
//! it discards, and never forks.
//!
//! Everything is atomic, because the engine needs ports that threads can share. There is one
//! thread, and the engine is built for that ([`foliomem_core::sync`]): atomics are cells. Nothing
//! here depends on time, addresses or random hash seeds, so runs are identical to the bit.

mod address_space;
mod arena;
mod budget;
mod clock;
mod pieces;

use crate::costs::{CodecCosts, Costs};
use crate::density::Density;
use foliomem_core::ports::{Absent, Budget, Ports};
use foliomem_core::sync::Mutex;
use foliomem_core::sync::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use foliomem_types::counters::Counters;
use foliomem_types::units::{BLOCK_PAGES, CpuNumber, FrameRun, ORDERS, OrderSet, PAGE_BYTES, PageNumber};
use serde::Deserialize;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// An access of a program to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The program reads the page.
    Read,
    /// The program writes the page, whose content changes.
    Write,
}

/// The place of compressed memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Store {
    /// Inside the limit, as foliomem's store, with the sizes of lz4.
    Lz4,
    /// Inside the limit, with the sizes of zstd.
    Zstd,
    /// Outside the limit: zram with lz4, which no memory cgroup pays for.
    Outside,
    /// Outside the limit, and not compressed.
    RamDisk,
}

/// The content of pages, and the place where it is swapped to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Content {
    /// The place of compressed memory.
    pub store: Store,
    /// Every page repeats one word, which needs no bytes in any store.
    pub filled: bool,
}

impl Content {
    /// Returns the codec, if there is one.
    #[inline]
    fn codec(self, costs: &Costs) -> Option<&CodecCosts> {
        match self.store {
            _ if self.filled => None,
            Store::Lz4 | Store::Outside => Some(&costs.lz4),
            Store::Zstd => Some(&costs.zstd),
            Store::RamDisk => None,
        }
    }
}

/// Consecutive staged pages.
struct HomeContent<'a> {
    /// The number of the first page.
    first: u64,
    words: &'a [AtomicU32],
}

impl HomeContent<'_> {
    /// Iterates over the pages and their versions.
    fn versions(&self) -> impl Iterator<Item = (u64, u32)> {
        (self.first..).zip(versions(self.words))
    }

    /// Returns the name of the content: its first page in the upper half and a hash in the lower; 0
    /// for zeros.
    #[inline]
    fn name(&self) -> u64 {
        match hash_versions(self.words) {
            0 => 0,
            hash => self.first << 32 | u64::from(hash),
        }
    }

    /// Returns the compressed length with a codec that compresses a page to `page_bytes` on
    /// average. Larger pieces gain as real ones do, and each page has its own random size unless
    /// its density is known.
    #[inline]
    fn len_bytes(&self, page_bytes: u64, density: Option<&Density>) -> u32 {
        let known = |page| density.map_or((1000, false), |density| density.permille(PageNumber(page)));
        let sizes = self.versions().map(|(page, version)| {
            let (permille, is_known) = known(page);
            let mean_bytes = page_bytes * permille / 1000;
            // Between half and one and a half of the mean.
            if is_known { mean_bytes } else { mean_bytes / 2 + mix(page, version.into()) % mean_bytes.max(1) }
        });
        let whole_bytes = self.words.len() * PAGE_BYTES;
        (sizes.sum::<u64>() as u32).clamp(1, whole_bytes as u32)
    }
}

/// The content of a frame. Other values are a page number plus [`Self::FIRST_PAGE`].
struct Home;

impl Home {
    const EMPTY: u32 = 0;
    /// Zeros, or content that the engine no longer needs.
    const ANY: u32 = 1;
    const FIRST_PAGE: u32 = 2;
}

/// The bit of a resident page; the other bits are its version.
const PRESENT: u32 = 1 << 31;

/// A simulated machine.
pub struct LabMachine {
    homes: Box<[AtomicU32]>,
    pages: Pages,
    /// The ends of the mappings by their starts.
    mappings: Mutex<BTreeMap<PageNumber, PageNumber>>,
    /// The folio sizes that all mappings may have.
    sizes: OrderSet,
    content: Content,
    costs: Costs,
    density: Mutex<Option<Density>>,
    /// Average compressed bytes of a page, by the order of its piece.
    stored_page_bytes: [u64; ORDERS],
    limit_pages: i64,
    charged_pages: AtomicI64,
    peak_pages: AtomicI64,
    /// The pages staged since [`take_moved_home`](LabMachine::take_moved_home) was first called.
    moved_home: Mutex<Option<Vec<Range<PageNumber>>>>,
    cpu: AtomicU16,
    /// The start of the current event, and its cost so far: in the program itself, and in the
    /// memory manager.
    started_ns: AtomicU64,
    computed_ns: AtomicU64,
    spent_ns: AtomicU64,
    counters: Counters,
}

/// One word for each page of the address space, in blocks that are allocated when a page is first
/// moved in. Unused blocks take next to nothing.
struct Pages(Box<[OnceCell<Box<[AtomicU32; BLOCK_PAGES]>>]>);

impl Pages {
    fn new(pages: u32) -> Pages {
        Pages((0..pages as usize).step_by(BLOCK_PAGES).map(|_| OnceCell::new()).collect())
    }

    /// Returns the first page beyond the address space.
    fn end(&self) -> PageNumber {
        PageNumber((self.0.len() * BLOCK_PAGES) as u64)
    }

    /// Returns the word of `page` if its block exists. All others are 0.
    #[inline]
    fn find(&self, page: u64) -> Option<&AtomicU32> {
        Some(&self.0[page as usize / BLOCK_PAGES].get()?[page as usize % BLOCK_PAGES])
    }

    /// Returns the words of `pages` pages of a folio from `first` on.
    #[inline]
    fn folio(&self, first: PageNumber, pages: u32) -> &[AtomicU32] {
        let block = &self.0[first.0 as usize / BLOCK_PAGES];
        let start = first.0 as usize % BLOCK_PAGES;
        &block.get_or_init(|| Box::new([const { AtomicU32::new(0) }; BLOCK_PAGES]))[start..start + pages as usize]
    }

    /// Iterates over all nonzero words in `range`, and possibly others.
    fn used(&self, range: Range<PageNumber>) -> impl Iterator<Item = &AtomicU32> {
        let (start, end) = (range.start.0 as usize, range.end.0 as usize);
        (start / BLOCK_PAGES..end.div_ceil(BLOCK_PAGES))
            .filter_map(|block| self.0[block].get().map(|words| (block, words)))
            .flat_map(move |(block, words)| {
                let first = block * BLOCK_PAGES;
                &words[start.saturating_sub(first)..(end - first).min(BLOCK_PAGES)]
            })
    }
}

/// Hashes two numbers; every bit depends on all of their bits.
#[inline]
pub fn mix(a: u64, b: u64) -> u64 {
    let mut hash = (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ hash >> 29
}

fn versions(words: &[AtomicU32]) -> impl Iterator<Item = u32> {
    words.iter().map(|word| word.load(Relaxed) & !PRESENT)
}

/// Hashes the versions of some pages; 0 if all are zeros.
#[inline]
fn hash_versions(words: &[AtomicU32]) -> u32 {
    let (mut hash, mut any) = (0, 0);
    for version in versions(words) {
        any |= version;
        hash = mix(hash, version.into());
    }
    if any == 0 { 0 } else { (hash as u32).max(1) }
}

impl LabMachine {
    /// Makes a machine without mappings, for addresses below `pages` pages.
    pub fn new(
        pages: u32,
        arena_frames: u32,
        limit_pages: u32,
        sizes: OrderSet,
        content: Content,
        costs: Costs,
    ) -> LabMachine {
        let stored_page_bytes = content.codec(&costs).map_or([0; ORDERS], |codec| {
            std::array::from_fn(|order| {
                let ratio_percent = u64::from(codec.ratio_percent[order].max(1));
                let piece_bytes = (PAGE_BYTES as u64) << order;
                (piece_bytes * 100 / ratio_percent) >> order
            })
        });
        LabMachine {
            homes: (0..arena_frames).map(|_| AtomicU32::new(Home::EMPTY)).collect(),
            pages: Pages::new(pages),
            mappings: Mutex::default(),
            sizes,
            content,
            costs,
            density: Mutex::default(),
            stored_page_bytes,
            limit_pages: limit_pages.into(),
            charged_pages: AtomicI64::new(0),
            peak_pages: AtomicI64::new(0),
            moved_home: Mutex::default(),
            cpu: AtomicU16::new(0),
            started_ns: AtomicU64::new(0),
            computed_ns: AtomicU64::new(0),
            spent_ns: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    /// Makes `cpu` the running CPU at `now_ns`, which never goes back.
    pub fn begin(&self, cpu: CpuNumber, now_ns: u64) {
        self.cpu.store(cpu.0, Relaxed);
        self.started_ns.fetch_max(now_ns, Relaxed);
        self.computed_ns.store(0, Relaxed);
        self.spent_ns.store(0, Relaxed);
    }

    /// Returns the cost since [`begin`](Self::begin).
    pub fn spent_ns(&self) -> u64 {
        self.computed_ns() + self.spent_ns.load(Relaxed)
    }

    /// Returns the part of that cost in which the program computed.
    pub fn computed_ns(&self) -> u64 {
        self.computed_ns.load(Relaxed)
    }

    /// Returns the folio sizes that mappings may have.
    pub fn sizes(&self) -> OrderSet {
        self.sizes
    }

    /// Returns the costs of the machine.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Spends `ns` on the running CPU, in the memory manager.
    pub fn spend(&self, ns: u64) {
        self.spent_ns.fetch_add(ns, Relaxed);
    }

    /// Spends `ns` on the running CPU, in the program.
    pub fn compute(&self, ns: u64) {
        self.computed_ns.fetch_add(ns, Relaxed);
    }

    /// Returns the program's limit.
    pub fn limit_pages(&self) -> u64 {
        self.limit_pages as u64
    }

    /// Returns the pages staged since the last call; recording starts with the first call.
    pub fn take_moved_home(&self) -> Vec<Range<PageNumber>> {
        self.moved_home.lock().replace(Vec::new()).unwrap_or_default()
    }

    /// Returns the charged pages.
    pub fn charged_pages(&self) -> u64 {
        self.charged_pages.load(Relaxed) as u64
    }

    /// Returns the peak of the charged pages.
    pub fn peak_pages(&self) -> u64 {
        self.peak_pages.load(Relaxed) as u64
    }

    /// Maps `range`; overlapping mappings merge with it, as VMAs do.
    pub fn map(&self, range: Range<PageNumber>) {
        assert!(range.end <= self.pages.end(), "{range:?} is beyond the machine's addresses");
        let mut mappings = self.mappings.lock();
        while let Some((&start, _)) = mappings.range(range.clone()).next() {
            mappings.remove(&start);
        }
        mappings.insert(range.start, range.end);
    }

    /// Replaces the mappings in `range` by `mappings`. No mapping crosses the ends of `range`.
    pub fn map_anew(&self, range: Range<PageNumber>, mappings: impl Iterator<Item = Range<PageNumber>>) {
        let mut all = self.mappings.lock();
        let gone: Vec<PageNumber> = all.range(range).map(|(&start, _)| start).collect();
        for start in gone {
            all.remove(&start);
        }
        all.extend(mappings.map(|mapping| (mapping.start, mapping.end)));
    }

    /// Removes the mapping `range`. The engine already received that event.
    pub fn unmap(&self, range: Range<PageNumber>) {
        self.drop_pages(range.clone());
        let end = self.mappings.lock().remove(&range.start);
        assert_eq!(end, Some(range.end), "the mapping at {:?}", range.start);
    }

    /// Drops the program's pages in `range`; they read as zeros. The engine already received that
    /// event.
    pub fn drop_pages(&self, range: Range<PageNumber>) {
        let mut present = 0;
        for page in self.pages.used(range) {
            present += page.load(Relaxed) >> 31;
            page.store(0, Relaxed);
        }
        self.uncharge(present);
    }

    /// Accesses `page` as the program does. Returns false if it is not resident.
    #[inline]
    pub fn access(&self, page: PageNumber, access: Access) -> bool {
        let Some(word) = self.pages.find(page.0) else { return false };
        let now = word.load(Relaxed);
        if now & PRESENT == 0 {
            return false;
        }
        if access == Access::Write {
            // Version 0 means zeros. The wraparound after 2^31 writes does not matter.
            let version = ((now + 1) & !PRESENT).max(1);
            word.store(PRESENT | version, Relaxed);
        }
        true
    }

    #[inline]
    fn staged(&self, run: FrameRun) -> &[AtomicU32] {
        &self.homes[run.head.0 as usize..(run.head.0 + run.frames()) as usize]
    }

    /// Returns the staged content in `run`; `None` for zeros of unknown pages.
    fn content(&self, run: FrameRun) -> Option<HomeContent<'_>> {
        let homes = self.staged(run);
        let (mut first, mut zeros) = (None, 0);
        for (index, home) in (0..).zip(homes) {
            match home.load(Relaxed) {
                Home::EMPTY => panic!("{run:?} has no content"),
                Home::ANY => zeros += 1,
                staged => {
                    let of_run = staged - Home::FIRST_PAGE - index;
                    assert!(first.replace(of_run).is_none_or(|first| first == of_run), "{run:?} is of several places");
                }
            }
        }
        // Zeros from the store do not name their page; if all are zeros, the page does not matter.
        let first = first?;
        let words = self.pages.folio(PageNumber(first.into()), run.frames());
        if zeros > 0 {
            let is_right = |(home, version): (&AtomicU32, u32)| home.load(Relaxed) != Home::ANY || version == 0;
            assert!(homes.iter().zip(versions(words)).all(is_right), "{run:?} has zeros where a page was written");
        }
        Some(HomeContent { first: first.into(), words })
    }

    fn codec(&self) -> Option<&CodecCosts> {
        self.content.codec(&self.costs)
    }

    /// Sets the densities of memory, so that sizes are no longer random.
    pub fn set_density(&self, density: Density) {
        *self.density.lock() = Some(density);
    }

    /// Records that `pages` were compressed as one piece of `len_bytes`.
    pub fn learn_density(&self, pages: &Range<PageNumber>, len_bytes: u32) {
        self.density.lock().as_mut().into_iter().for_each(|density| density.learn(pages, len_bytes));
    }

    #[inline]
    fn spend_by_page(&self, base_ns: u32, page_ns: u32, pages: u32) {
        self.spend(u64::from(base_ns) + u64::from(page_ns) * u64::from(pages));
    }
}

impl Ports for LabMachine {
    type Worker = ();
    type Clock = Self;
    type Budget = Self;
    type Arena = Self;
    type AddressSpace = Self;
    type Pieces = Self;
    type Recompressor = Absent;
    type Marks = Absent;
    type SharedPages = Absent;
    type SwapDevice = Absent;
    type SharedStore = Absent;

    #[inline]
    fn counters(&self) -> &Counters {
        &self.counters
    }

    #[inline]
    fn clock(&self) -> &Self {
        self
    }

    #[inline]
    fn budget(&self) -> &Self {
        self
    }

    #[inline]
    fn arena(&self) -> &Self {
        self
    }

    #[inline]
    fn address_space(&self) -> &Self {
        self
    }

    #[inline]
    fn pieces(&self) -> &Self {
        self
    }

    fn recompressor(&self) -> Option<&Absent> {
        None
    }

    fn marks(&self) -> Option<&Absent> {
        None
    }

    fn shared_pages(&self) -> Option<&Absent> {
        None
    }

    fn swap_device(&self) -> Option<&Absent> {
        None
    }

    fn shared_store(&self) -> Option<&Absent> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_core::homes::{Homes, Urgency};
    use foliomem_core::page_table::PageTable;
    use foliomem_core::ports::{AddressSpace, Arena, Compressed, Corrupted, Pieces, Stopped};
    use foliomem_core::run_tokens::UniqueRun;
    use foliomem_core::store::{RunSource, Store as PieceStore};
    use foliomem_types::units::Order;

    const PAGE: PageNumber = PageNumber(7);

    fn move_in(machine: &LabMachine, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        let table = PageTable::default();
        machine.move_in(&(), &table.get_or_create(to).unwrap().lock(), run, to)
    }

    fn move_out(machine: &LabMachine, from: PageNumber, run: FrameRun) -> Result<(), Stopped> {
        let table = PageTable::default();
        machine.move_out(&(), &table.get_or_create(from).unwrap().lock(), from, run.head, run.frames())
    }

    /// Returns a machine with one written and staged page, the page's run, and the name of its
    /// content.
    fn machine() -> (LabMachine, UniqueRun, u64) {
        let content = Content { store: Store::Outside, filled: false };
        let machine = LabMachine::new(64, 64, 64, OrderSet::EMPTY, content, Costs::reference());
        let (run, _) = Homes::new(64).alloc_full(&machine, Order::ZERO, Urgency::Normal).unwrap();
        assert_eq!(move_in(&machine, *run, PAGE), Ok(()));
        assert!(machine.access(PAGE, Access::Write));
        assert_eq!(move_out(&machine, PAGE, *run), Ok(()));
        let name = machine.hash(run.as_ref());
        (machine, run, name)
    }

    struct NoFrames;

    impl RunSource for NoFrames {
        fn alloc_run(&self, _order: Order) -> Option<FrameRun> {
            None
        }
        fn free_run(&self, _run: FrameRun) {}
    }

    fn read(machine: &LabMachine, run: &mut UniqueRun, name: u64) -> Result<(), Corrupted> {
        let store = PieceStore::new(1);
        let id = store.insert_filled(name, Order::ZERO, 1).unwrap();
        let pinned = store.pin(id);
        let read = machine.read(&mut (), pinned.piece(), 0, run.as_mut());
        store.unpin(&NoFrames, pinned);
        read
    }

    #[test]
    fn wrong_content_is_detected() {
        let (machine, mut run, name) = machine();
        assert_eq!(machine.compress(&mut (), PageNumber(0), run.as_ref()), Compressed::Filled(name));
        assert_eq!(read(&machine, &mut run, name), Ok(()));
        assert_eq!(read(&machine, &mut run, name ^ 1), Err(Corrupted));
        assert_eq!(move_in(&machine, *run, PAGE), Ok(()));
        assert!(machine.access(PAGE, Access::Write));
        assert_eq!(move_out(&machine, PAGE, *run), Ok(()));
        assert_eq!(read(&machine, &mut run, name), Err(Corrupted), "the page was written since");
    }

    #[test]
    #[should_panic(expected = "was given the content")]
    fn a_page_is_not_given_the_content_of_another() {
        let (machine, run, _) = machine();
        let _ = move_in(&machine, *run, PageNumber(8));
    }
}
