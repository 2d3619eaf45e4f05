//! The Linux machine: the program's memory and the arena, through a userfaultfd.
//!
//! One userfaultfd has the program's ranges registered for missing pages, and hears of unmapped, remapped and
//! discarded ranges. The arena is registered with it, too, so that pages may be moved there: the kernel then
//! refuses to move any page, in or out, while a change of mappings is under way that has not been heard. For
//! the moment between hearing and applying there is the lock of the mappings, which whoever moves pages holds for
//! reading. So no page is ever moved out of, or into, a mapping that has taken the place of the one the engine knows.
//!
//! An empty home is never touched: whoever reads or writes arena memory has a token of it
//! ([`crate::arena`]). After a fork the child makes userfaultfds of its own
//! ([`LinuxMachine::rearm`]).

use crate::advice::{self, Advices};
use crate::arena::Arena;
use crate::changes::Changes;
use crate::lenders::Lenders;
use crate::marks::Marks;
use crate::ranges::{self, Ranges};
use crate::swap_file::{ReadBuffer, SwapFile};
use crate::swap_writer::SwapWriter;
use crate::thread_control_block::ControlBlocks;
use crate::tracer::Tracer;
use foliomem_core::machine::{Compressed, Corrupted, Machine, Mapping, MoveError, NotWritten, Recompressed, Stopped};
use foliomem_core::run_tokens::{RunMut, RunRef};
use foliomem_core::store::{FilePlace, FragmentMut, FragmentRef, Piece, PlaceMut, Seal, WriteBatch};
use foliomem_session::budget::Budget;
use foliomem_session::cluster_ownership::{Event, RowIndex, SwapSpace};
use foliomem_sync::ranks::Mappings;
use foliomem_sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use foliomem_sys::clock::{self, now_ns};
use foliomem_sys::codec::{Compressor, Decompressor, Dictionaries, checksum, fill_word};
use foliomem_sys::filters::{self, Call};
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::identity;
use foliomem_sys::maps;
use foliomem_sys::pagemap;
use foliomem_sys::region::Region;
use foliomem_sys::swap_discard;
use foliomem_sys::unshare_pages::unshare;
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_types::codec::Codec;
use foliomem_types::counters::Counters;
use foliomem_types::size_policy::{Advice, Disabled};
use foliomem_types::units::{
    ClusterNumber, CpuNumber, Frame, FrameRun, MAX_ORDER, Order, OrderSet, PAGE_BYTES, PageNumber,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::mm::{Advice as MemoryAdvice, madvise};
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

/// The contexts and scratch memory of one thread that compresses.
pub struct Worker {
    compressor: Compressor,
    /// Only of those that recompress: the contexts of a slow codec take megabytes.
    recompressor: Option<Compressor>,
    decompressors: Decompressors,
    /// Room for one piece; what `compress` left there is `filled_bytes` long, unless it was raw.
    scratch: Box<[u8]>,
    filled_bytes: usize,
    /// Room for a piece's stored bytes where it lies in several fragments; what `recompress` left there is `filled_bytes` long.
    gathered: Box<[u8]>,
    /// Room for what is read from the swap file.
    reading: ReadBuffer,
    writer: SwapWriter,
}

/// For what either codec has compressed.
struct Decompressors {
    first: Decompressor,
    second: Option<Decompressor>,
}

impl Decompressors {
    fn of(&mut self, piece: &Piece<'_>) -> Result<&mut Decompressor, Corrupted> {
        if piece.recompressed { self.second.as_mut().ok_or(Corrupted) } else { Ok(&mut self.first) }
    }
}

impl Worker {
    fn new(codec: Codec, recompress: Option<Codec>, dictionaries: &Arc<Dictionaries>) -> Worker {
        let decompressor = |codec| Decompressor::new(codec, dictionaries);
        Worker {
            compressor: Compressor::new(codec, dictionaries),
            recompressor: None,
            decompressors: Decompressors { first: decompressor(codec), second: recompress.map(decompressor) },
            scratch: vec![0; MAX_ORDER.bytes()].into_boxed_slice(),
            filled_bytes: 0,
            gathered: vec![0; MAX_ORDER.bytes()].into_boxed_slice(),
            reading: ReadBuffer::default(),
            writer: SwapWriter::default(),
        }
    }

    /// Makes a dictionary of what has been compressed, if enough has been. For threads that nobody waits for.
    pub fn train_if_due(&mut self) {
        self.compressor.train_if_due();
    }
}

/// Where the kernel has no huge page to give, or never gives one, it is asked again after so many runs.
const HUGE_PAUSE_RUNS: u32 = 8;

/// What a reclaimer takes for a hundred pages or so.
const PAUSE: Duration = Duration::from_micros(500);

/// No row of the swap file's table.
const NO_ROW: u32 = u32::MAX;

/// This process's part in the swap file.
struct Swap {
    file: SwapFile,
    space: &'static SwapSpace,
    /// Its row of the table of who holds what.
    row: AtomicU32,
    /// While a fork goes on: the child's.
    child_row: AtomicU32,
    /// The process that made this: a child of a fork finds its parent here.
    pid: AtomicU32,
}

impl Swap {
    fn row(&self) -> RowIndex {
        let Some(row) = RowIndex::new(self.row.load(Ordering::Relaxed)) else { unreachable!("a row was claimed") };
        row
    }
}

/// See the module.
pub struct LinuxMachine {
    arena: Arena,
    descriptors: ForkCell<Descriptors>,
    budget: &'static Budget,
    ranges: Ranges,
    /// What is managed, and what else of the program's is registered.
    registered: Ranges,
    advices: Advices,
    /// Runs of the highest order to be populated without asking for a huge page.
    huge_pause: AtomicU32,
    lenders: &'static Lenders,
    control_blocks: &'static ControlBlocks,
    /// Those of all workers.
    dictionaries: Arc<Dictionaries>,
    marks: Marks,
    /// Addresses whose mappings may have grown, which the kernel does not tell of.
    may_have_grown: Mutex<Vec<usize>>,
    /// Held for writing from the reading of a message until what it says is applied, or waits to be.
    mappings: RwLock<Changes, Mappings>,
    swap: Option<Swap>,
    tracer: &'static Tracer,
    /// See [`LinuxMachine::detach`].
    is_detached: AtomicBool,
    detached_swap_file: AtomicI32,
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
        let _ = arena.allow_huge(0, arena.len(), false);
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

    /// Everything a thread needs to compress with `codec`, and to read what others have compressed with it, or again with
    /// `recompress`; allocates only here.
    pub fn worker(&self, codec: Codec, recompress: Option<Codec>) -> Worker {
        Worker::new(codec, recompress, &self.dictionaries)
    }

    /// Gives `worker` what it needs to recompress with `codec`.
    pub fn let_recompress(&self, worker: &mut Worker, codec: Codec) {
        worker.recompressor = Some(Compressor::new(codec, &self.dictionaries));
    }

    /// Has who waits for `page` fault again: a handler will hear it.
    pub(crate) fn fault_again(&self, page: PageNumber) {
        let _ = self.descriptors().program.wake(page.address() as usize, PAGE_BYTES);
    }

    /// The ranges of the program that are managed.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// All of the program's that is registered: that, and reserves ([`crate::adopt`]). Changed under the lock of the mappings, except
    /// that what has just been registered may be missing.
    pub fn registered(&self) -> &Ranges {
        &self.registered
    }

    /// What is registered of `range` and not managed.
    pub fn reserved(&self, range: Range<usize>) -> Vec<Range<usize>> {
        self.registered.within(range).into_iter().flat_map(|part| self.ranges.missing(part)).collect()
    }

    /// Registers a reserve. Called under the lock of the mappings.
    pub fn reserve(&self, range: Range<usize>) {
        if self.descriptors().program.register(range.start, range.len(), userfaultfd::Mode::Faults).is_ok() {
            self.registered.insert(range);
        }
    }

    /// Leaves `range` to the kernel, except what is managed: that may be out. Called under the lock of the mappings.
    pub fn let_go(&self, range: Range<usize>) {
        for part in self.ranges.missing(range) {
            let _ = self.descriptors().program.unregister(part.start, part.len());
            self.registered.remove(part);
        }
    }

    /// Parts of the managed ranges in which nothing is a thread's control block.
    pub(crate) fn protectable(&self) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        for mut rest in self.ranges.snapshot() {
            while let Some(page) = self.control_blocks.first_within(rest.clone()) {
                parts.push(rest.start..page);
                rest.start = page + PAGE_BYTES;
            }
            parts.push(rest);
        }
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// The program has unmapped `range`. Called under the lock of the mappings.
    pub fn unmapped(&self, range: Range<usize>) {
        self.ranges.remove(range.clone());
        self.marks.forget(range.clone());
        self.registered.remove(range);
    }

    /// The program has discarded the content of `range`. Called under the lock of the mappings.
    pub fn discarded(&self, range: Range<usize>) {
        self.marks.forget(range);
    }

    /// The program has moved `from` to what starts at `to`. Called under the lock of the mappings.
    pub fn moved(&self, from: Range<usize>, to: usize) {
        self.registered.relocate(from.clone(), to);
        self.marks.relocate(from.clone(), to);
        self.ranges.relocate(from, to);
    }

    /// What the program says about its mappings.
    pub(crate) fn advices(&self) -> &Advices {
        &self.advices
    }

    /// The folio sizes there may be where the program has said `advice`.
    fn sizes(&self, advice: Advice) -> OrderSet {
        let policy = self.budget.control().sizes();
        // The system call costs a twentieth of what serving a fault does.
        if policy.allowed(Advice::Huge, Disabled::No) == OrderSet::EMPTY {
            OrderSet::EMPTY
        } else {
            policy.allowed(advice, advice::disabled())
        }
    }

    /// Where there may be folios of the highest order in `range`, they can be real huge pages only if the kernel takes
    /// part: it must not make a table of single pages for a fault there, before we hear of it.
    pub fn prepare_for_huge(&self, range: Range<usize>) {
        for part in self.ranges.advised_within(range) {
            let first = part.range.start.next_multiple_of(MAX_ORDER.bytes());
            if first + MAX_ORDER.bytes() <= part.range.end && self.sizes(part.advice).contains(MAX_ORDER) {
                let start = std::ptr::with_exposed_provenance_mut(part.range.start);
                // SAFETY: changes no content. Where it fails, folios are made of single pages.
                let _ = unsafe { madvise(start, part.range.len(), MemoryAdvice::LinuxHugepage) };
            }
        }
    }

    /// The budget it charges.
    pub fn budget(&self) -> &'static Budget {
        self.budget
    }

    /// The descriptors of this process.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// The mapping around `address` may be larger than it is known to be.
    pub fn may_have_grown(&self, address: usize) {
        self.may_have_grown.lock().push(address);
    }

    /// Whether there are such mappings.
    pub fn has_unknown_growth(&self) -> bool {
        !self.may_have_grown.lock().is_empty()
    }

    /// Looks up how large they are. Called under the lock of the mappings, while no change is under way.
    pub fn learn_growth(&self) {
        let candidates = std::mem::take(&mut *self.may_have_grown.lock());
        for address in candidates {
            let Some(mapping) = maps::query(&self.descriptors().maps, address) else { continue };
            if self.ranges.missing(mapping.clone()).is_empty() {
                continue;
            }
            let uffd = &self.descriptors().program;
            if uffd.is_registered(address) {
                self.adopt_range(mapping.clone(), mapping);
            } else if uffd.mapping_is_changing() {
                self.may_have_grown(address);
            }
        }
    }

    /// Manages `part` of `mapping` from now on, which is registered. Called as `learn_growth`.
    pub fn adopt_range(&self, part: Range<usize>, mapping: Range<usize>) {
        allow_fork(&part, false);
        // Now the kernel has joined what has grown with what it has grown from.
        let mapping = maps::query(&self.descriptors().maps, part.start).unwrap_or(mapping);
        self.registered.insert_in(&mapping, part.clone(), Advice::None);
        self.advices.adopt(&self.ranges, part, mapping);
    }

    /// Keeps others from hearing messages and from moving pages out.
    pub fn hold_mappings(&self) -> RwLockWriteGuard<'_, Changes, Mappings> {
        self.mappings.write()
    }

    /// Whether somebody [holds the mappings](Self::hold_mappings).
    pub fn is_being_heard(&self) -> bool {
        self.mappings.is_written()
    }

    /// Whether it has a swap file.
    pub fn has_swap_file(&self) -> bool {
        self.swap.is_some()
    }

    /// Before a fork: what this process holds of the swap file its child will hold, too. Called by a thread of the agent.
    pub fn share_swap_file(&self) {
        let Some(swap) = &self.swap else { return };
        let row = swap.space.share(swap.row(), swap.pid.load(Ordering::Relaxed));
        swap.child_row.store(row.map_or(NO_ROW, RowIndex::get), Ordering::Relaxed);
    }

    /// The process ends: it holds nothing of the swap file any more.
    pub fn leave_swap_file(&self) {
        self.swap.iter().for_each(|swap| swap.space.leave(swap.row()));
    }

    /// The swap file, in the table of the agent's threads.
    pub fn swap_file_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.swap_file().map(|(_, file)| file)
    }

    /// In the parent after a fork, or where it has failed.
    pub fn shared_swap_file(&self, forked: bool) {
        let Some(swap) = &self.swap else { return };
        let row = RowIndex::new(swap.child_row.swap(NO_ROW, Ordering::Relaxed));
        if let Some(row) = row.filter(|_| !forked) {
            swap.space.leave(row);
        }
    }

    /// In the child of a fork: what is held of the swap file is held by this process. False where that is not so.
    pub fn adopt_swap_file(&self) -> bool {
        let Some(swap) = &self.swap else { return true };
        let (parent, pid) = (swap.pid.load(Ordering::Relaxed), identity::of(rustix::process::getpid()));
        let Some(row) = RowIndex::new(swap.child_row.swap(NO_ROW, Ordering::Relaxed)) else { return false };
        swap.row.store(row.get(), Ordering::Relaxed);
        swap.pid.store(pid, Ordering::Relaxed);
        swap.space.adopt(row, parent, pid)
    }

    /// Says once in a run what has happened to the swap file.
    fn tell(&self, swap: &Swap, event: Event, text: std::fmt::Arguments<'_>) {
        if swap.space.is_news(event) {
            self.budget.control().notice(text);
        }
    }

    /// The same of what ends the program: said before it is marked as said, because another thread that finds it said may
    /// end the program at once. Rather twice than not at all.
    fn tell_last(&self, event: Event, text: std::fmt::Arguments<'_>) {
        let control = self.budget.control();
        if !control.swap().was_told(event) {
            control.notice(text);
            control.swap().is_news(event);
        }
    }

    fn swap_file(&self) -> Option<(&Swap, BorrowedFd<'_>)> {
        let file = if self.is_detached() {
            let number = self.detached_swap_file.load(Ordering::Relaxed);
            // SAFETY: the caller of `detach` keeps it open until everything is read.
            (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
        } else {
            self.descriptors().swap_file.as_ref().map(AsFd::as_fd)
        };
        self.swap.as_ref().zip(file)
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

    /// Allows or forbids forks to copy the managed ranges. They are forbidden except while a fork goes
    /// on that the agent knows of: the child of any other would read pages that are out as zeros, and
    /// now stops with SIGSEGV instead.
    pub fn allow_forks(&self, allow: bool) {
        self.ranges.snapshot().iter().for_each(|range| allow_fork(range, allow));
    }

    /// Keeps those of `pages` where they are that are managed: they are fetched, and locked in memory. Or lets them
    /// go again. (A child of a fork starts without locks.)
    pub fn hold_in_place(&self, pages: &[usize], hold: bool) {
        if !filters::allow(if hold { Call::Mlock } else { Call::Munlock }) {
            return;
        }
        for &page in pages.iter().filter(|&&page| self.ranges.containing(page).is_some()) {
            let start = std::ptr::with_exposed_provenance_mut(page);
            // SAFETY: changes no content. Where locking is forbidden, the page is in all likelihood there: its
            // thread has just used it.
            let _ = unsafe {
                if hold { rustix::mm::mlock(start, PAGE_BYTES) } else { rustix::mm::munlock(start, PAGE_BYTES) }
            };
        }
    }

    /// Empties the homes of `run`, a run of the highest order, and lets the kernel put a huge page there if it has one. Not
    /// tried where it had none lately. (An empty table of single pages is in a huge page's way: emptying removes it,
    /// since Linux 6.14.)
    fn populate_huge(&self, run: FrameRun) -> bool {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if self.huge_pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |runs| runs.checked_sub(1)).is_ok() {
            return false;
        }
        let populated = self.unregistered(run, || {
            self.arena.discard(offset, len)?;
            self.arena.allow_huge(offset, len, true)?;
            let populated = self.arena.populate(offset, len);
            self.arena.allow_huge(offset, len, false).and(populated)
        });
        if !pagemap::is_huge(&self.descriptors().pagemap, self.home(run)) {
            self.huge_pause.store(HUGE_PAUSE_RUNS, Ordering::Relaxed);
        }
        populated
    }

    /// Discards memory of the arena as a guard does, without a message to wait for: half the price of
    /// [`unregistered`](Self::unregistered), and no other thread waits for it.
    fn discard_by_guard(&self, offset: usize, len: usize) -> bool {
        // Of a huge page nothing goes back as long as it is one.
        let _ = self.arena.split_huge(offset, len);
        self.arena.guard(offset, len).is_ok() && self.arena.unguard(offset, len).is_ok()
    }

    /// Does something that would be told to us of registered memory, and wait until we have heard of it.
    fn unregistered(&self, run: FrameRun, act: impl FnOnce() -> Result<(), Errno>) -> bool {
        let (start, len, uffd) = (self.home(run), run.order.bytes(), &self.descriptors().program);
        uffd.unregister(start, len).is_ok() && {
            let done = act();
            uffd.register(start, len, userfaultfd::Mode::Destination).is_ok() && done.is_ok()
        }
    }

    fn home(&self, run: FrameRun) -> usize {
        self.arena.start() + run.head.0 as usize * PAGE_BYTES
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

    fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }

    /// Gives all frames back to the system; the arena has no content that counts any more.
    pub fn give_arena_back(&self) {
        // A failure leaves them.
        let _ = self.arena.discard(0, self.arena.len());
    }

    /// From now on pages that are swapped out are marked; whether all that are must be, before
    /// [`LinuxMachine::miss_marks`].
    pub(crate) fn begin_to_mark(&self) -> bool {
        self.marks.begin()
    }

    /// From now on a missing mark tells that the program has discarded the page.
    pub(crate) fn miss_marks(&self) {
        self.marks.miss();
    }

    /// Reports pages without marks. While a change of mappings is under way that nobody has received, a missing mark says
    /// nothing: the kernel has moved it, and the page's content counts where it is now.
    fn report_lost(&self, found: Vec<Range<usize>>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if !found.is_empty() && !self.descriptors().program.mapping_is_changing() {
            found.into_iter().for_each(|run| lost(ranges::pages(&run)));
        }
    }

    /// Copies pages of the arena to the program, of whose memory the calling thread is the only user.
    fn copy_detached(&self, to: usize, from: usize, len: usize) {
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
        // SAFETY: the source is a run of the arena that the engine holds. The target is managed memory of the program, mapped
        // readable and writable in this process (`detach`), and nobody else runs here.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance::<u8>(from), target, len) };
    }

    /// Moves `pages` pages and reports progress the engine's way.
    fn move_pages(&self, to: usize, from: usize, pages: u32) -> Result<(), Stopped> {
        let len = pages as usize * PAGE_BYTES;
        if self.is_detached() {
            self.copy_detached(to, from, len);
            return Ok(());
        }
        let mut moved = 0;
        while moved < len {
            let before = moved;
            // SAFETY: one side is a run of the arena that the engine holds, the other is memory of the
            // program that the kernel checks to be registered or movable.
            let outcome = unsafe { self.descriptors().program.move_pages(to + moved, from + moved, len - moved) };
            moved += outcome.moved_bytes;
            let Some(error) = outcome.error else { continue };
            if matches!(error, userfaultfd::MoveError::Exists | userfaultfd::MoveError::NotFound) {
                // Linux 6.18 repeats a step that has succeeded after a retry, and then finds the pages where it has
                // just put them: what it says it has moved is too little.
                moved += pagemap::moved_bytes(&self.descriptors().pagemap, to + moved, from + moved, len - moved);
            }
            // An error after some progress is an interruption: go on while there is progress.
            if moved == before {
                return Err(Stopped { moved_pages: (moved / PAGE_BYTES) as u32, error: move_error(error) });
            }
        }
        Ok(())
    }

    /// Marks `pages`, which have moved to `home`. A huge page that has moved as one is to return as one, which the page table that
    /// holds marks prevents.
    fn mark_moved(&self, pages: Range<PageNumber>, home: usize) {
        let is_block = pages.end.0 - pages.start.0 == u64::from(MAX_ORDER.pages());
        if is_block && pagemap::is_huge(&self.descriptors().pagemap, home) {
            self.marks.leave_out(addresses(&pages));
        } else {
            self.marks.set(&self.descriptors().program, addresses(&pages));
        }
    }

    /// Fills the absent `page` by `fill`, which the kernel refuses where there is a mark: that is removed before.
    fn unmarked(
        &self,
        page: PageNumber,
        fill: impl Fn(&Userfaultfd, usize) -> Result<(), userfaultfd::MoveError>,
    ) -> Result<(), MoveError> {
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let range = addresses(&page.folio(Order::ZERO));
        match fill(program, range.start) {
            Err(userfaultfd::MoveError::Exists) if self.marks.clear_stale(program, pagemap, range.clone()) => {
                fill(program, range.start)
            }
            filled => filled,
        }
        .map_err(move_error)
    }
}

/// Turns the stored bytes of a piece back into its content from page `skip_pages` on.
fn restore(
    decompressors: &mut Decompressors,
    scratch: &mut [u8],
    piece: &Piece<'_>,
    stored: &[u8],
    skip_pages: u32,
    target: &mut [u8],
) -> Result<(), Corrupted> {
    if checksum(stored) != piece.checksum {
        return Err(Corrupted);
    }
    let skip = skip_pages as usize * PAGE_BYTES;
    if piece.raw {
        target.copy_from_slice(&stored[skip..skip + target.len()]);
        return Ok(());
    }
    let decompressor = decompressors.of(piece)?;
    if target.len() == piece.granule.bytes() {
        return decompressor.decompress(stored, target).map_err(|_| Corrupted);
    }
    let whole = &mut scratch[..piece.granule.bytes()];
    decompressor.decompress_start(stored, whole, skip + target.len()).map_err(|_| Corrupted)?;
    target.copy_from_slice(&whole[skip..skip + target.len()]);
    Ok(())
}

fn move_error(error: userfaultfd::MoveError) -> MoveError {
    match error {
        userfaultfd::MoveError::Again => MoveError::Changing,
        userfaultfd::MoveError::Busy => MoveError::Busy,
        userfaultfd::MoveError::Exists => MoveError::Exists,
        userfaultfd::MoveError::NotFound => MoveError::Absent,
        userfaultfd::MoveError::Gone => MoveError::Gone,
        userfaultfd::MoveError::Invalid | userfaultfd::MoveError::NoMemory | userfaultfd::MoveError::Other(_) => {
            MoveError::Refused
        }
    }
}

/// Whether forks copy `range`. A failure means that it is unmapped already.
fn allow_fork(range: &Range<usize>, allow: bool) {
    let advice = if allow { MemoryAdvice::LinuxDoFork } else { MemoryAdvice::LinuxDontFork };
    let start = std::ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: the advice changes what a fork copies, nothing of this process.
    let _ = unsafe { madvise(start, range.len(), advice) };
}

fn address(page: PageNumber) -> usize {
    page.address() as usize
}

fn addresses(pages: &Range<PageNumber>) -> Range<usize> {
    address(pages.start)..address(pages.end)
}

fn page_range(pages: &Range<PageNumber>) -> (usize, usize) {
    (address(pages.start), (pages.end.0 - pages.start.0) as usize * PAGE_BYTES)
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

    fn populate(&self, run: RunMut<'_>) {
        if run.order == MAX_ORDER && self.populate_huge(*run) {
            return;
        }
        // A failure (the machine itself is out of memory) shows when the pages are touched.
        let _ = self.arena.populate(run.head.0 as usize * PAGE_BYTES, run.order.bytes());
    }

    fn split_huge(&self, head: PageNumber, border: PageNumber) {
        for side in [head..border, border..head.offset(MAX_ORDER.pages())] {
            let (start, len) = page_range(&side);
            // SAFETY: changes no content. A failure leaves memory to the kernel's own splitting.
            let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(start), len, MemoryAdvice::LinuxCold) };
        }
    }

    fn release(&self, run: RunMut<'_>) {
        let (offset, len) = (run.head.0 as usize * PAGE_BYTES, run.order.bytes());
        if run.order < MAX_ORDER && self.marks.can_guard() && self.discard_by_guard(offset, len) {
            return;
        }
        let released = self.unregistered(*run, || {
            if run.order < MAX_ORDER {
                // Of a huge page nothing goes back as long as it is one.
                let _ = self.arena.split_huge(offset, len);
            }
            self.arena.discard(offset, len)
        });
        if !released {
            self.budget.control().notice(format_args!("cannot give memory back to the system"));
        }
    }

    fn zero(&self, run: RunMut<'_>) {
        let may_be_huge = run.order == MAX_ORDER && !pagemap::is_huge(&self.descriptors().pagemap, self.home(*run));
        if !may_be_huge || !self.populate_huge(*run) {
            self.arena.bytes_mut(run).fill(0);
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

    fn for_each_lost(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if self.is_detached() {
            // A fork copies no marks; lost content was dropped before it.
            return;
        }
        let mut found = Vec::new();
        self.marks.check(&self.descriptors().pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, lost);
    }

    fn take_marks(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if self.is_detached() {
            return;
        }
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let mut found = Vec::new();
        self.marks.take(program, pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, lost);
    }

    fn mark(&self, pages: Range<PageNumber>) {
        if self.is_detached() {
            return;
        }
        self.marks.set(&self.descriptors().program, addresses(&pages));
    }

    fn move_in(&self, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        let Err(Stopped { moved_pages, error }) = self.move_pages(address(to), self.home(run), run.frames()) else {
            return Ok(());
        };
        let rest = |moved_pages| address(to.offset(moved_pages))..address(to.offset(run.frames()));
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let mut stopped = Stopped { moved_pages, error };
        if error == MoveError::Exists && self.marks.clear_stale(program, pagemap, rest(moved_pages)) {
            let (from, pages) = (self.home(run) + moved_pages as usize * PAGE_BYTES, run.frames() - moved_pages);
            let Err(again) = self.move_pages(rest(moved_pages).start, from, pages) else { return Ok(()) };
            stopped = Stopped { moved_pages: moved_pages + again.moved_pages, ..again };
        }
        self.marks.set(program, rest(stopped.moved_pages));
        Err(stopped)
    }

    fn move_out(&self, from: PageNumber, to: Frame, pages: u32) -> Result<(), Stopped> {
        let (home, start) = (self.home(FrameRun::new(to, Order::ZERO)), address(from));
        let staying = self.control_blocks.first_within(start..start + pages as usize * PAGE_BYTES);
        let before = staying.map_or(pages, |staying| ((staying - start) / PAGE_BYTES) as u32);
        let moved = match self.move_pages(home, start, before) {
            Ok(()) if before < pages => Err(Stopped { moved_pages: before, error: MoveError::Refused }),
            moved => moved,
        };
        let moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| pages);
        self.mark_moved(from..from.offset(moved_pages), home);
        self.tracer.staged(self.budget, from..from.offset(moved_pages));
        moved
    }

    fn copy_in(&self, frame: Frame, to: PageNumber) -> Result<(), MoveError> {
        let from = self.home(FrameRun::new(frame, Order::ZERO));
        if self.is_detached() {
            self.copy_detached(address(to), from, PAGE_BYTES);
            return Ok(());
        }
        // SAFETY: the frame is full and ours; the kernel checks the destination.
        unsafe { self.descriptors().program.copy(address(to), from, PAGE_BYTES) }.map_err(move_error)
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

    fn poison(&self, page: PageNumber, why: Corrupted) -> Result<(), MoveError> {
        if self.is_detached() {
            // The next best.
            let start = std::ptr::with_exposed_provenance_mut(address(page));
            // SAFETY: the page has no content that counts.
            let _ = unsafe { rustix::mm::mprotect(start, PAGE_BYTES, rustix::mm::MprotectFlags::empty()) };
        } else {
            self.unmarked(page, |program, page| program.poison(page, PAGE_BYTES))?;
        }
        // Page by page it would drown what else there is to say; all are counted.
        self.tell_last(
            Event::Lost,
            format_args!(
                "the memory at {:#x} is lost: {why}; the program gets SIGBUS rather than wrong data",
                page.address()
            ),
        );
        Ok(())
    }

    fn mapping(&self, page: PageNumber) -> Option<Mapping> {
        self.advices.hear(&self.ranges);
        let known = self.ranges.containing(address(page))?;
        Some(Mapping { pages: ranges::pages(&known.range), sizes: self.sizes(known.advice) })
    }

    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        let (start, len) = page_range(&pages);
        for managed in self.ranges.within(start..start + len) {
            pagemap::present(&self.descriptors().pagemap, managed.start, managed.end, &mut |range| {
                found(PageNumber::containing(range.start as u64)..PageNumber::containing(range.end as u64));
            });
        }
    }

    fn compress(&self, worker: &mut Worker, head: PageNumber, run: RunRef<'_>) -> Compressed {
        let content = self.arena.bytes(run);
        let compressed = if let Some(word) = fill_word(content) {
            Compressed::Filled(word)
        } else if let Some(len) = worker.compressor.compress(content, &mut worker.scratch[..content.len()]) {
            worker.filled_bytes = len;
            Compressed::Bytes { len_bytes: len as u32, raw: false, checksum: checksum(&worker.scratch[..len]) }
        } else {
            worker.filled_bytes = 0;
            Compressed::Bytes { len_bytes: content.len() as u32, raw: true, checksum: checksum(content) }
        };
        self.tracer.compressed(self.budget, head.folio(run.order), compressed.len_bytes());
        compressed
    }

    fn write_piece(&self, worker: &mut Worker, run: RunRef<'_>, place: PlaceMut<'_>) {
        let bytes =
            if worker.filled_bytes == 0 { self.arena.bytes(run) } else { &worker.scratch[..worker.filled_bytes] };
        self.arena.scatter(bytes, place);
    }

    fn copy_piece(&self, from: FragmentRef<'_>, to: FragmentMut<'_>) {
        self.arena.copy_stored(from, to);
    }

    fn read_piece(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let target = self.arena.bytes_mut(into);
        if let Some(word) = piece.filled {
            target.as_chunks_mut::<8>().0.fill(word.to_ne_bytes());
            return Ok(());
        }
        let stored = self.arena.gather(&mut worker.gathered, piece);
        restore(&mut worker.decompressors, &mut worker.scratch, piece, stored, skip_pages, target)
    }

    fn recompress(&self, worker: &mut Worker, piece: &Piece<'_>) -> Option<Recompressed> {
        let content = &mut worker.scratch[..piece.granule.bytes()];
        let stored = self.arena.gather(&mut worker.gathered, piece);
        restore(&mut worker.decompressors, &mut [], piece, stored, 0, content).ok()?;
        let len = worker.recompressor.as_mut()?.compress(content, &mut worker.gathered)?;
        worker.filled_bytes = len;
        Some(Recompressed { len_bytes: len as u32, checksum: checksum(&worker.gathered[..len]) })
    }

    fn write_recompressed(&self, worker: &mut Worker, place: PlaceMut<'_>) {
        self.arena.scatter(&worker.gathered[..worker.filled_bytes], place);
    }

    fn begin_write(&self, worker: &mut Worker, batch: &WriteBatch<'_>, seals: &mut Vec<Seal>) {
        let Some((swap, file)) = self.swap_file() else { return };
        let mut pieces = batch.pieces();
        let fill = |bytes: &mut [u8]| {
            let (piece, start_bytes) = pieces.next()?;
            let start = start_bytes as usize;
            let len = self.arena.copy_out(piece, &mut bytes[start..]);
            Some(start..start + len)
        };
        worker.writer.begin(&swap.file, &file, (batch.first(), batch.slots()), fill, seals);
    }

    fn finish_write(&self, worker: &mut Worker) -> Result<(), NotWritten> {
        let (swap, file) = self.swap_file().ok_or(NotWritten)?;
        let by_ring_slots = worker.writer.finish(&file).map_err(|error| {
            self.tell(swap, Event::Write, format_args!("cannot write to the swap file: {error}: going on without it"));
            NotWritten
        })?;
        self.counters().backing.bd_writes_uring.add(by_ring_slots.into());
        Ok(())
    }

    fn swap_file_full(&self) {
        let Some(swap) = &self.swap else { return };
        swap.space.reap();
        self.tell(swap, Event::Full, format_args!("the swap file is full: going on without more of it"));
    }

    fn read_back(
        &self,
        worker: &mut Worker,
        piece: &Piece<'_>,
        place: &FilePlace,
        skip_pages: u32,
        into: RunMut<'_>,
    ) -> Result<(), Corrupted> {
        let (swap, file) = self.swap_file().ok_or(Corrupted)?;
        let stored = swap.file.read(&file, &mut worker.reading, place).map_err(|error| {
            self.tell_last(Event::Read, format_args!("cannot read the swap file: {error}"));
            Corrupted
        })?;
        restore(&mut worker.decompressors, &mut worker.scratch, piece, stored, skip_pages, self.arena.bytes_mut(into))
    }

    fn discard_cluster(&self, cluster: ClusterNumber) -> bool {
        let Some((swap, file)) = self.swap_file() else { return false };
        swap.space.discarded(cluster);
        swap_discard::discard(file, swap.space.discard(), cluster).is_ok()
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
