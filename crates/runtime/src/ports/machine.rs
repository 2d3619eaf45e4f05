//! The engine's machine on Linux: the state, and the table of what the engine can ask for.
//!
//! One userfaultfd has the program's ranges and the arena registered
//! ([`crate::ports::address_space`]). No page moves out of, or into, a mapping that has replaced
//! the one that the engine knows: the kernel refuses moves while a change is pending, and the lock
//! of the mappings covers the time until a received change is applied.
//!
//! An unpopulated home frame is never touched: a reader or writer of the arena has a token of the
//! run ([`crate::ports::arena`]). After a fork the child makes userfaultfds of its own
//! ([`LinuxMachine::rearm`]).
//!
//! Lock order: the gate, the lock of the mappings, the engine's locks, then leaves.

use crate::address_space::advice::Advices;
use crate::address_space::lent_pages::Lenders;
use crate::address_space::mapping_changes::Changes;
use crate::address_space::marks::Marks;
use crate::address_space::ranges::{self, Ranges};
use crate::address_space::thread_control_block::ControlBlocks;
use crate::ports::address_space::{address, addresses, page_range};
use crate::ports::arena::Arena;
use crate::ports::encrypted_file::SwapFile;
use crate::ports::pieces::Worker;
use crate::ports::swap::{NO_ROW, Swap};
use crate::tracer::Tracer;
use foliomem_core::machine::{Compressed, Corrupted, Machine, Mapping, MoveError, NotWritten, Recompressed, Stopped};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{FilePlace, FragmentMut, FragmentRef, Piece, PlaceMut, Seal, WriteBatch};
use foliomem_session::budget::Budget;
use foliomem_session::cluster_ownership::Event;
use foliomem_sync::ranks::Mappings;
use foliomem_sync::{Mutex, RwLock, RwLockReadGuard};
use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::codec::{Dictionaries, checksum};
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::region::{HugePages, Region};
use foliomem_sys::unshare_pages::unshare;
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_sys::{identity, memory_advice, pagemap};
use foliomem_types::counters::Counters;
use foliomem_types::units::{ClusterNumber, CpuNumber, Frame, FrameRun, MAX_ORDER, Order, PageNumber};
use rustix::fd::{OwnedFd, RawFd};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

/// What belongs to one process and must be made anew in the child of a fork.
#[derive(Debug)]
pub struct Descriptors {
    /// Hears the program's faults and mapping changes.
    pub program: Userfaultfd,
    /// `/proc/self/pagemap`.
    pub pagemap: OwnedFd,
    /// `/proc/self/maps`.
    pub maps: OwnedFd,
    /// `/proc/self/mem`.
    pub memory: OwnedFd,
    /// The swap file, if there is one.
    pub swap_file: Option<OwnedFd>,
}

/// What a reclaimer takes for a hundred pages or so.
const PAUSE: Duration = Duration::from_micros(500);

/// See the module.
pub struct LinuxMachine {
    pub(super) arena: Arena,
    pub(super) descriptors: ForkCell<Descriptors>,
    pub(super) budget: &'static Budget,
    pub(super) ranges: Ranges,
    /// What is managed, and what else of the program's is registered.
    pub(super) registered: Ranges,
    pub(super) advices: Advices,
    /// Runs of the highest order to be populated without asking for a huge page.
    pub(super) huge_pause: AtomicU32,
    pub(super) lenders: &'static Lenders,
    pub(super) control_blocks: &'static ControlBlocks,
    /// Those of all workers.
    pub(super) dictionaries: Arc<Dictionaries>,
    pub(super) marks: Marks,
    /// Addresses whose mappings may have grown, which the kernel does not tell of.
    pub(super) may_have_grown: Mutex<Vec<usize>>,
    /// Held for writing from the reading of a message until what it says is applied, or waits to be.
    pub(super) mappings: RwLock<Changes, Mappings>,
    pub(super) swap: Option<Swap>,
    pub(super) tracer: &'static Tracer,
    /// See [`LinuxMachine::detach`].
    pub(super) is_detached: AtomicBool,
    pub(super) detached_swap_file: AtomicI32,
}

impl LinuxMachine {
    /// A machine over `arena`, which is registered here.
    /// `lenders` tells whether the program hands pages to the kernel by reference.
    pub(crate) fn new(
        arena: Region,
        descriptors: Descriptors,
        budget: &'static Budget,
        lenders: &'static Lenders,
        control_blocks: &'static ControlBlocks,
        tracer: &'static Tracer,
    ) -> Result<LinuxMachine, userfaultfd::UffdError> {
        // Huge pages only where they were charged: see `populate_huge`.
        let _ = arena.set_huge_pages(0, arena.len(), HugePages::Forbidden);
        let marks = Marks::new(&arena);
        descriptors.program.register(arena.start(), arena.len(), userfaultfd::Mode::Destination)?;
        let space = budget.control().swap();
        let pid = identity::of(rustix::process::getpid());
        let row = descriptors.swap_file.is_some().then(|| space.enter(pid)).flatten();
        let swap = row.map(|row| Swap {
            file: SwapFile::new(&space.key(), space.nonces()),
            space,
            row: AtomicU32::new(row.get()),
            child_row: AtomicU32::new(NO_ROW),
            pid: AtomicU32::new(pid),
        });
        Ok(LinuxMachine {
            arena: Arena::new(arena),
            descriptors: ForkCell::new(descriptors),
            budget,
            ranges: Ranges::default(),
            registered: Ranges::default(),
            advices: Advices::default(),
            huge_pause: AtomicU32::new(0),
            lenders,
            control_blocks,
            dictionaries: Arc::default(),
            marks,
            may_have_grown: Mutex::default(),
            mappings: RwLock::default(),
            swap,
            tracer,
            is_detached: AtomicBool::new(false),
            detached_swap_file: AtomicI32::new(-1),
        })
    }

    /// The budget it charges.
    pub fn budget(&self) -> &'static Budget {
        self.budget
    }

    /// The descriptors of this process.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// In the child of a fork: registers everything anew with userfaultfds of its own.
    ///
    /// # Safety
    /// No other thread of this process uses the machine.
    pub unsafe fn rearm(&self, descriptors: Descriptors) -> Result<(), userfaultfd::UffdError> {
        descriptors.program.register(self.arena.start(), self.arena.len(), userfaultfd::Mode::Destination)?;
        self.registered.remove(0..usize::MAX);
        self.registered.insert_all(&self.ranges);
        for range in self.ranges.snapshot() {
            descriptors.program.register(range.start, range.end - range.start, userfaultfd::Mode::Faults)?;
        }
        self.advices.start_anew(&self.ranges);
        // SAFETY: no other thread, by the contract. The old descriptors are those of the parent's
        // threads and do not exist in this process's table: they are forgotten, not closed.
        unsafe { self.descriptors.replace_forgetting(descriptors) };
        Ok(())
    }

    /// From here on what comes in is copied by the calling thread, without a userfaultfd, and the budget does not count.
    /// `swap_file` is the number of the swap file in this thread's descriptor table.
    ///
    /// # Safety
    /// The calling thread is the only one that uses the memory. Nothing moves out from here on.
    pub unsafe fn detach(&self, swap_file: Option<RawFd>) {
        self.is_detached.store(true, Ordering::Relaxed);
        self.budget.detach();
        self.detached_swap_file.store(swap_file.unwrap_or(-1), Ordering::Relaxed);
    }

    pub(super) fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }
}

impl Machine for LinuxMachine {
    type Worker = Worker;
    type Steady<'a> = RwLockReadGuard<'a, Changes, Mappings>;

    fn steady(&self) -> Option<RwLockReadGuard<'_, Changes, Mappings>> {
        let changes = self.mappings.read();
        changes.is_applied().then_some(changes)
    }

    fn now_ns(&self) -> u64 {
        now_ns()
    }

    fn cpu(&self) -> CpuNumber {
        CpuNumber(rustix::thread::sched_getcpu() as u16)
    }

    fn try_charge(&self, pages: u32) -> bool {
        self.budget.try_charge(pages)
    }

    fn charge(&self, pages: u32) {
        self.budget.charge(pages);
    }

    fn uncharge(&self, pages: u32) {
        self.budget.uncharge(pages);
    }

    fn room_pages(&self) -> i64 {
        self.budget.room_pages()
    }

    fn counters(&self) -> &Counters {
        self.budget.counters()
    }

    fn split_huge(&self, head: PageNumber, border: PageNumber) {
        for side in [head..border, border..head.offset(MAX_ORDER.pages())] {
            // A failure leaves memory to the kernel's own splitting.
            memory_advice::split_huge(&addresses(&side));
        }
    }

    fn hash(&self, run: RunRef<'_>) -> u64 {
        checksum(self.arena.bytes(run))
    }

    fn copy(&self, from: RunRef<'_>, to: RunMut<'_>) {
        self.arena.bytes_mut(to).copy_from_slice(self.arena.bytes(from));
    }

    fn frames_escape(&self) -> bool {
        self.lenders.may_have_lent()
    }

    fn regroup(&self, from: Frame, to: Frame, pages: u32) -> Result<(), Stopped> {
        let home = |frame| self.home(FrameRun::new(frame, Order::ZERO));
        self.move_pages(home(to), home(from), pages)
    }

    fn mark(&self, pages: Range<PageNumber>) {
        if self.is_detached() {
            return;
        }
        self.marks.set(&self.descriptors().program, addresses(&pages));
    }

    fn zero_in(&self, to: PageNumber) -> Result<(), MoveError> {
        if self.is_detached() {
            return Ok(());
        }
        self.unmarked(to, |program, page| program.zero(page))
    }

    fn arena_is_full(&self) {
        let control = self.budget.control();
        if control.swap().is_news(Event::ArenaFull) {
            control.notice(format_args!(
                "the arena, {} MiB of address space, is full of data that does not compress: what more there is is left to the \
                 system, without a limit; use a larger --limit, or --swap, or allow more address space (ulimit -v)",
                self.arena.len() >> 20
            ));
        }
    }

    fn unprotect(&self, pages: Range<PageNumber>) {
        if self.is_detached() {
            return;
        }
        let (start, len) = page_range(&pages);
        // Where a change of mappings is in the way, a write faults, and it is asked for again.
        let _ = self.descriptors().program.unprotect(start, len);
    }

    fn unshare(&self, pages: Range<PageNumber>) -> bool {
        let (start, len) = page_range(&pages);
        pagemap::present(&self.descriptors().pagemap, start, start + len, &mut |run| unshare(run.start, run.len()));
        true
    }

    fn unshare_home(&self, run: FrameRun) {
        unshare(self.home(run), run.order.bytes());
    }

    fn is_lately_over(&self) -> bool {
        self.budget.is_lately_over()
    }

    fn shares(&self) -> bool {
        self.budget.shares()
    }

    fn pause(&self) {
        clock::sleep(PAUSE);
    }

    fn wake(&self, pages: Range<PageNumber>) {
        if !pages.is_empty() {
            let (start, len) = page_range(&pages);
            let _ = self.descriptors().program.wake(start, len);
        }
    }

    fn mapping(&self, page: PageNumber) -> Option<Mapping> {
        self.advices.receive(&self.ranges);
        let known = self.ranges.containing(address(page))?;
        Some(Mapping { pages: ranges::pages(&known.range), sizes: self.sizes(known.advice.huge_pages) })
    }

    fn populate(&self, run: RunMut<'_>) {
        self.populate_run(run);
    }

    fn release(&self, run: RunMut<'_>) {
        self.release_run(run);
    }

    fn zero(&self, run: RunMut<'_>) {
        self.zero_run(run);
    }

    fn for_each_lost(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        self.find_lost(pages, lost);
    }

    fn take_marks(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        self.take_marks_of(pages, lost);
    }

    fn move_in(&self, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        self.move_run_in(run, to)
    }

    fn move_out(&self, from: PageNumber, to: Frame, pages: u32) -> Result<(), Stopped> {
        self.move_run_out(from, to, pages)
    }

    fn copy_in(&self, frame: Frame, to: PageNumber) -> Result<(), MoveError> {
        self.copy_page_in(frame, to)
    }

    fn poison(&self, page: PageNumber, why: Corrupted) -> Result<(), MoveError> {
        self.poison_page(page, why)
    }

    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        self.find_present(pages, found);
    }

    fn compress(&self, worker: &mut Worker, head: PageNumber, run: RunRef<'_>) -> Compressed {
        self.compress_run(worker, head, run)
    }

    fn write_piece(&self, worker: &mut Worker, run: RunRef<'_>, place: PlaceMut<'_>) {
        self.write_compressed(worker, run, place);
    }

    fn copy_piece(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.copy_fragment(from, to);
    }

    fn read_piece(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        self.read_stored(worker, piece, skip_pages, into)
    }

    fn recompress(&self, worker: &mut Worker, piece: &Piece<'_>) -> Option<Recompressed> {
        self.recompress_piece(worker, piece)
    }

    fn write_recompressed(&self, worker: &mut Worker, place: PlaceMut<'_>) {
        self.write_recompressed_piece(worker, place);
    }

    fn begin_write(&self, worker: &mut Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>) {
        self.begin_write_batch(worker, batch, seals);
    }

    fn finish_write(&self, worker: &mut Worker) -> Result<(), NotWritten> {
        self.finish_write_batch(worker)
    }

    fn swap_file_full(&self) {
        self.tell_swap_file_full();
    }

    fn read_back(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        self.read_from_file(worker, piece, place, skip_pages, into)
    }

    fn discard_cluster(&self, cluster: ClusterNumber) -> bool {
        self.discard_free_cluster(cluster)
    }

    fn claim_cluster(&self, cluster: ClusterNumber) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.space.claim(swap.row(), cluster))
    }

    fn release_cluster(&self, cluster: ClusterNumber) {
        self.swap.iter().for_each(|swap| swap.space.release(swap.row(), cluster));
    }

    fn is_sole_holder(&self, cluster: ClusterNumber) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.space.has_one_holder(cluster))
    }
}
