//! Pages of the program: their moves between the program and the arena, and the knowledge about
//! them.
//!
//! One userfaultfd has the program's ranges registered for missing pages. The arena is registered
//! with the same userfaultfd. So the kernel refuses to move any page, in or out, while a mapping
//! change is pending that no thread has received. The lock of the mappings covers the time from
//! receiving a change to applying it; every thread that moves pages holds it for reading.
//!
//! Lock order: the lock of the mappings, then leaves (ranges, advice, growth).

use crate::address_space::advice::Advices;
use crate::address_space::mapping_changes::Changes;
use crate::address_space::marks::Marks;
use crate::address_space::ranges::{self, RangeAdvice, Ranges};
use crate::address_space::thread_control_block::ControlBlocks;
use crate::ports::arena_memory::ArenaMemory;
use crate::ports::attachment::{ArenaSide, Attachment, Descriptors, move_error};
use crate::ports::swap::report_last;
use crate::tracer::Tracer;
use foliomem_core::page_table::Entries;
use foliomem_core::ports::{self, Corrupted, Mapping, MoveError, Stopped};
use foliomem_session::budget::Budget;
use foliomem_session::cluster_ownership::Event;
use foliomem_sync::ranks::Mappings;
use foliomem_sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use foliomem_sys::memory_advice::{self, Forks};
use foliomem_sys::seccomp::{self, Call};
use foliomem_sys::unshare_pages::unshare;
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_sys::{maps, pagemap, process_limits};
use foliomem_types::size_policy::{Advice, Disabled};
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, OrderSet, PAGE_BYTES, PageNumber};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// The program's address space. Lock order: the gate, the lock of the mappings, the engine's locks,
/// then leaves.
pub struct AddressSpace {
    attachment: &'static Attachment,
    arena: &'static ArenaMemory,
    budget: &'static Budget,
    /// The managed ranges.
    ranges: Ranges,
    /// All registered ranges of the program: the managed ones and reserves.
    registered: Ranges,
    advices: Advices,
    control_blocks: &'static ControlBlocks,
    marks: Marks,
    /// Addresses of mappings that may have grown: the kernel sends no message about it.
    may_have_grown: Mutex<Vec<usize>>,
    /// Held for writing from the read of a message until its event is applied or waits for others.
    mappings: RwLock<Changes, Mappings>,
    /// The kernel's last answer, as the number of a [`Disabled`].
    disabled: AtomicU8,
    tracer: &'static Tracer,
}

impl AddressSpace {
    /// Makes an address space without managed ranges.
    pub(super) fn new(
        attachment: &'static Attachment,
        arena: &'static ArenaMemory,
        budget: &'static Budget,
        control_blocks: &'static ControlBlocks,
        marks: Marks,
        tracer: &'static Tracer,
    ) -> AddressSpace {
        AddressSpace {
            attachment,
            arena,
            budget,
            ranges: Ranges::default(),
            registered: Ranges::default(),
            advices: Advices::default(),
            control_blocks,
            marks,
            may_have_grown: Mutex::default(),
            mappings: RwLock::default(),
            disabled: AtomicU8::new(Disabled::No as u8),
            tracer,
        }
    }

    /// Returns the descriptors of this process.
    pub fn descriptors(&self) -> &Descriptors {
        self.attachment.descriptors()
    }

    /// Registers the managed ranges with `program`, the userfaultfd of the child of a fork.
    pub(super) fn register_anew(&self, program: &Userfaultfd) -> Result<(), userfaultfd::UffdError> {
        self.registered.remove(0..usize::MAX);
        self.registered.insert_all(&self.ranges);
        for range in self.ranges.snapshot() {
            program.register(range.start, range.end - range.start, userfaultfd::Mode::Faults)?;
        }
        self.advices.start_anew(&self.ranges);
        Ok(())
    }

    /// Makes the threads that wait for `page` fault again, so that a handler receives the fault.
    pub(crate) fn fault_again(&self, page: PageNumber) {
        let _ = self.attachment.descriptors().program.wake(page.address() as usize, PAGE_BYTES);
    }

    /// Returns the managed ranges of the program.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// Returns the registered ranges of the program: the managed ones and reserves
    /// ([`crate::address_space::adopt`]). They change under the lock of the mappings, but a range
    /// that was registered just now may be missing.
    pub fn registered(&self) -> &Ranges {
        &self.registered
    }

    /// Returns the parts of `range` that are registered and not managed.
    pub fn reserved(&self, range: Range<usize>) -> Vec<Range<usize>> {
        self.registered.within(range).into_iter().flat_map(|part| self.ranges.missing(part)).collect()
    }

    /// Registers a reserve. The caller holds the lock of the mappings.
    pub fn reserve(&self, range: Range<usize>) {
        if self.attachment.descriptors().program.register(range.start, range.len(), userfaultfd::Mode::Faults).is_ok() {
            self.registered.insert(range);
        }
    }

    /// Unregisters `range`, except its managed parts, which may have swapped-out pages. The caller
    /// holds the lock of the mappings.
    pub fn unregister(&self, range: Range<usize>) {
        for part in self.ranges.missing(range) {
            let _ = self.attachment.descriptors().program.unregister(part.start, part.len());
            self.registered.remove(part);
        }
    }

    /// Returns the parts of the managed ranges without thread control blocks and the pages `but`.
    pub(crate) fn protectable(&self, but: &[usize]) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        for mut rest in self.ranges.snapshot() {
            let first = |rest: &Range<usize>| {
                let but = but.iter().copied().filter(|page| rest.contains(page));
                but.chain(self.control_blocks.first_within(rest.clone())).min()
            };
            while let Some(page) = first(&rest) {
                parts.push(rest.start..page);
                rest.start = page + PAGE_BYTES;
            }
            parts.push(rest);
        }
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// Notes that the program has unmapped `range`. The caller holds the lock of the mappings.
    pub fn unmapped(&self, range: Range<usize>) {
        self.ranges.remove(range.clone());
        self.marks.forget(range.clone());
        self.registered.remove(range);
    }

    /// Notes that the program has discarded the content of `range`. The caller holds the lock of
    /// the mappings.
    pub fn discarded(&self, range: Range<usize>) {
        self.marks.forget(range);
    }

    /// Notes that the program has moved `from` to `to`. The caller holds the lock of the mappings.
    pub fn moved(&self, from: Range<usize>, to: usize) {
        self.registered.relocate(from.clone(), to);
        self.marks.relocate(from.clone(), to);
        self.ranges.relocate(from, to);
    }

    /// Returns the program's advice about its mappings.
    pub(crate) fn advices(&self) -> &Advices {
        &self.advices
    }

    /// Asks the kernel whether the program has disabled huge pages. [`sizes_of_return`] uses this
    /// answer until the next call of this function.
    ///
    /// [`sizes_of_return`]: ports::AddressSpace::sizes_of_return
    pub fn ask_disabled(&self) -> Disabled {
        let disabled = process_limits::disabled_huge_pages();
        self.disabled.store(disabled as u8, Relaxed);
        disabled
    }

    /// Returns the folio sizes that are allowed in memory with `advice`.
    fn sizes(&self, advice: Advice) -> OrderSet {
        let policy = self.budget.control().sizes();
        // The system call costs a twentieth of serving a fault.
        if policy.allowed(Advice::Huge, Disabled::No) == OrderSet::EMPTY {
            OrderSet::EMPTY
        } else {
            policy.allowed(advice, self.ask_disabled())
        }
    }

    /// Lets the kernel use huge pages in `range` where folios of the highest order are allowed.
    /// Otherwise the kernel creates a table of single pages at a fault, before the agent receives
    /// it.
    pub fn prepare_for_huge(&self, range: Range<usize>) {
        for part in self.ranges.advised_within(range) {
            let first = part.range.start.next_multiple_of(MAX_ORDER.bytes());
            if first + MAX_ORDER.bytes() <= part.range.end && self.sizes(part.advice.huge_pages).contains(MAX_ORDER) {
                // If this fails, folios consist of single pages.
                memory_advice::ask_for_huge(&part.range);
            }
        }
    }

    /// Returns whether the page at `address` of private anonymous memory is registered. The caller
    /// holds the lock of the mappings.
    pub fn is_registered(&self, address: usize) -> bool {
        let uffd = &self.attachment.descriptors().program;
        // Only managed pages have marks.
        let is_managed = self.ranges.containing(address).is_some();
        if is_managed { uffd.is_registered(address) } else { uffd.is_registered_unmarked(address) }
    }

    /// Notes that the mapping around `address` may be larger than known.
    pub fn note_growth(&self, address: usize) {
        self.may_have_grown.lock().push(address);
    }

    /// Returns whether mappings that may have grown remain to be looked up.
    pub fn has_unknown_growth(&self) -> bool {
        !self.may_have_grown.lock().is_empty()
    }

    /// Looks up the sizes of the mappings that may have grown. The caller holds the lock of the
    /// mappings, and no change is under way.
    pub fn learn_growth(&self) {
        let candidates = std::mem::take(&mut *self.may_have_grown.lock());
        for address in candidates {
            let Some(mapping) = maps::query(&self.attachment.descriptors().maps, address) else { continue };
            if self.ranges.missing(mapping.clone()).is_empty() {
                continue;
            }
            let uffd = &self.attachment.descriptors().program;
            if self.is_registered(address) {
                self.adopt_range(mapping.clone(), mapping);
            } else if uffd.mapping_is_changing() {
                self.note_growth(address);
            }
        }
    }

    /// Adds `part` of `mapping`, which is registered, to the managed ranges. The caller holds the
    /// lock of the mappings, and no change is under way.
    pub fn adopt_range(&self, part: Range<usize>, mapping: Range<usize>) {
        let advice = self.advices.take_for(&self.ranges, &part, &mapping);
        memory_advice::set_forks(&part, Forks::LeaveOut);
        // This part now has the flags of all managed memory (`MADV_DONTFORK`). So the kernel may
        // have merged it with an adjacent managed mapping, as it would without the agent. `advice`
        // stays unchanged: the advice about the adjacent mapping does not hold for this part.
        let mapping = maps::query(&self.attachment.descriptors().maps, part.start).unwrap_or(mapping);
        self.registered.insert_in(&mapping, part.clone(), RangeAdvice::default());
        self.ranges.insert_in(&mapping, part, advice);
    }

    /// Keeps other threads from receiving messages and from moving pages.
    pub fn hold_mappings(&self) -> RwLockWriteGuard<'_, Changes, Mappings> {
        self.mappings.write()
    }

    /// Returns whether a thread [holds the mappings](Self::hold_mappings).
    pub fn is_receiving(&self) -> bool {
        self.mappings.is_written()
    }

    /// Lets forks copy the managed ranges, except those that the program has left out
    /// (MADV_DONTFORK). Called before a fork that the agent knows.
    pub fn allow_forks(&self) {
        let copied = self.advices.copied_by_forks(&self.ranges);
        copied.iter().for_each(|range| memory_advice::set_forks(range, Forks::Copy));
    }

    /// Keeps forks from copying the managed ranges. The child of a fork that the agent does not
    /// know would read swapped-out pages as zeros; now it stops with SIGSEGV instead.
    pub fn forbid_forks(&self) {
        self.ranges.snapshot().iter().for_each(|range| memory_advice::set_forks(range, Forks::LeaveOut));
    }

    /// Maps in the managed ones of `pages`, and locks them in memory. (The child of a fork starts
    /// without locks.)
    pub fn lock_pages(&self, pages: &[usize]) {
        if seccomp::allow(Call::Mlock) {
            // If locking is forbidden, the page is most likely resident: its thread has just used
            // it.
            self.managed_pages(pages).for_each(memory_advice::lock_page);
        }
    }

    /// Unlocks the pages that [`AddressSpace::lock_pages`] has locked.
    pub fn unlock_pages(&self, pages: &[usize]) {
        if seccomp::allow(Call::Munlock) {
            self.managed_pages(pages).for_each(memory_advice::unlock_page);
        }
    }

    fn managed_pages<'a>(&'a self, pages: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        pages.iter().copied().filter(|&page| self.ranges.containing(page).is_some())
    }

    /// Starts to mark swapped-out pages. Returns whether the caller must mark all pages that are
    /// swapped out, before [`AddressSpace::miss_marks`].
    pub(crate) fn begin_to_mark(&self) -> bool {
        self.marks.begin()
    }

    /// Notes that all swapped-out pages have marks: a missing mark means from now on that the
    /// program has discarded the page.
    pub(crate) fn miss_marks(&self) {
        self.marks.miss();
    }

    /// Reports pages without marks. While a mapping change is pending that no thread has received,
    /// a missing mark proves nothing: the kernel may have moved the mark, and the page's content is
    /// valid at the new address.
    fn report_lost(&self, found: Vec<Range<usize>>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if !found.is_empty() && !self.attachment.descriptors().program.mapping_is_changing() {
            found.into_iter().for_each(|run| lost(ranges::pages(&run)));
        }
    }

    /// Marks `pages`, which have moved to `home`. A huge page that has moved as one gets no marks:
    /// marks need a page table, with which the kernel could not map the huge page again as one.
    fn mark_moved(&self, pages: Range<PageNumber>, home: usize) {
        let is_block = pages.end.0 - pages.start.0 == u64::from(MAX_ORDER.pages());
        if is_block && pagemap::is_huge(&self.attachment.descriptors().pagemap, home) {
            self.marks.leave_out(addresses(&pages));
        } else {
            self.marks.set(&self.attachment.descriptors().program, addresses(&pages));
        }
    }

    /// Fills the absent `page` with `fill`. The kernel refuses a page with a mark, so a stale mark
    /// is removed first.
    fn unmarked(
        &self,
        page: PageNumber,
        fill: impl Fn(&Userfaultfd, usize) -> Result<(), userfaultfd::MoveError>,
    ) -> Result<(), MoveError> {
        let Descriptors { program, pagemap, .. } = self.attachment.descriptors();
        let range = addresses(&page.folio(Order::ZERO));
        match fill(program, range.start) {
            Err(userfaultfd::MoveError::Exists) if Marks::clear_stale(program, pagemap, range.clone()) => {
                fill(program, range.start)
            }
            filled => filled,
        }
        .map_err(move_error)
    }

    /// Maps a new page of zeros, which is not managed, into the program; wakes nobody.
    pub(crate) fn map_zeros(
        &self,
        _steady: &RwLockReadGuard<'_, Changes, Mappings>,
        to: PageNumber,
    ) -> Result<(), MoveError> {
        if self.attachment.is_detached() {
            return Ok(());
        }
        self.unmarked(to, |program, page| program.zero(page))
    }
}

impl ports::AddressSpace for AddressSpace {
    type Steady<'a> = RwLockReadGuard<'a, Changes, Mappings>;

    fn steady(&self) -> Option<Self::Steady<'_>> {
        let changes = self.mappings.read();
        changes.is_applied().then_some(changes)
    }

    fn mapping(&self, page: PageNumber) -> Option<Mapping> {
        self.advices.receive(&self.ranges);
        let known = self.ranges.containing(address(page))?;
        Some(Mapping { pages: ranges::pages(&known.range), sizes: self.sizes(known.advice.huge_pages) })
    }

    fn sizes_of_return(&self, page: PageNumber) -> OrderSet {
        self.advices.receive(&self.ranges);
        let Some(known) = self.ranges.containing(address(page)) else { return OrderSet::ALL };
        let disabled = Disabled::from_number(self.disabled.load(Relaxed));
        self.budget.control().sizes().allowed(known.advice.huge_pages, disabled)
    }

    fn for_each_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        let (start, len) = page_range(&pages);
        for managed in self.ranges.within(start..start + len) {
            pagemap::present(&self.attachment.descriptors().pagemap, managed.start, managed.end, &mut |range| {
                found(PageNumber::containing(range.start as u64)..PageNumber::containing(range.end as u64));
            });
        }
    }

    fn is_shared(&self, page: PageNumber) -> bool {
        pagemap::is_shared(&self.attachment.descriptors().pagemap, address(page))
    }

    fn move_in(
        &self,
        _steady: &Self::Steady<'_>,
        _block: &Entries,
        run: FrameRun,
        to: PageNumber,
    ) -> Result<(), Stopped> {
        let Err(Stopped { moved_pages, error }) =
            self.attachment.move_pages(address(to), self.arena.home(run), run.frames(), ArenaSide::Source)
        else {
            return Ok(());
        };
        let rest = |moved_pages| address(to.offset(moved_pages))..address(to.offset(run.frames()));
        let Descriptors { program, pagemap, .. } = self.attachment.descriptors();
        let mut stopped = Stopped { moved_pages, error };
        if error == MoveError::Exists && Marks::clear_stale(program, pagemap, rest(moved_pages)) {
            let (from, pages) = (self.arena.home(run) + moved_pages as usize * PAGE_BYTES, run.frames() - moved_pages);
            let to = rest(moved_pages).start;
            let Err(again) = self.attachment.move_pages(to, from, pages, ArenaSide::Source) else { return Ok(()) };
            stopped = Stopped { moved_pages: moved_pages + again.moved_pages, ..again };
        }
        self.marks.set_again(program, pagemap, rest(stopped.moved_pages));
        Err(stopped)
    }

    fn move_out(
        &self,
        _steady: &Self::Steady<'_>,
        _block: &Entries,
        from: PageNumber,
        to: Frame,
        pages: u32,
    ) -> Result<(), Stopped> {
        let (home, start) = (self.arena.home(FrameRun::new(to, Order::ZERO)), address(from));
        let staying = self.control_blocks.first_within(start..start + pages as usize * PAGE_BYTES);
        let before = staying.map_or(pages, |staying| ((staying - start) / PAGE_BYTES) as u32);
        let moved = match self.attachment.move_pages(home, start, before, ArenaSide::Destination) {
            Ok(()) if before < pages => Err(Stopped { moved_pages: before, error: MoveError::Refused }),
            moved => moved,
        };
        let moved_pages = moved.map_or_else(|stopped| stopped.moved_pages, |()| pages);
        self.mark_moved(from..from.offset(moved_pages), home);
        self.tracer.staged(self.budget, from..from.offset(moved_pages));
        moved
    }

    fn copy_in(
        &self,
        _steady: &Self::Steady<'_>,
        _block: &Entries,
        frame: Frame,
        to: PageNumber,
    ) -> Result<(), MoveError> {
        let from = self.arena.home(FrameRun::new(frame, Order::ZERO));
        if self.attachment.is_detached() {
            self.attachment.copy_detached(address(to), from, PAGE_BYTES);
            return Ok(());
        }
        // SAFETY: the frame is populated and held by the engine; the kernel checks the destination.
        unsafe { self.attachment.descriptors().program.copy(address(to), from, PAGE_BYTES) }.map_err(move_error)
    }

    fn zero_in(&self, steady: &Self::Steady<'_>, _block: &Entries, to: PageNumber) -> Result<(), MoveError> {
        self.map_zeros(steady, to)
    }

    fn poison(
        &self,
        _steady: &Self::Steady<'_>,
        _block: &Entries,
        page: PageNumber,
        why: Corrupted,
    ) -> Result<(), MoveError> {
        if self.attachment.is_detached() {
            // The process has no userfaultfd: SIGSEGV is the alternative.
            let start = address(page);
            // SAFETY: the page belongs to the program, and its content is lost.
            unsafe { memory_advice::forbid_access(&(start..start + PAGE_BYTES)) };
        } else {
            self.unmarked(page, |program, page| program.poison(page, PAGE_BYTES))?;
        }
        // One message is enough: the counters have the number of lost pages.
        report_last(
            self.budget.control(),
            Event::Lost,
            format_args!(
                "the memory at {:#x} is lost: {why}; the program gets SIGBUS rather than wrong data",
                page.address()
            ),
        );
        Ok(())
    }

    fn split_huge(&self, _block: &Entries, head: PageNumber, border: PageNumber) {
        for side in [head..border, border..head.offset(MAX_ORDER.pages())] {
            // A failure leaves memory to the kernel's own splitting.
            memory_advice::split_huge(&addresses(&side));
        }
    }

    fn wake(&self, pages: Range<PageNumber>) {
        if !pages.is_empty() {
            let (start, len) = page_range(&pages);
            let _ = self.attachment.descriptors().program.wake(start, len);
        }
    }
}

impl ports::Marks for AddressSpace {
    fn for_each_lost(&self, _block: &Entries, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if self.attachment.is_detached() {
            // A fork copies no marks; discarded content was dropped before it.
            return;
        }
        let mut found = Vec::new();
        self.marks.check(&self.attachment.descriptors().pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, lost);
    }

    fn take(
        &self,
        block: &mut Entries,
        pages: Range<PageNumber>,
        lost: &mut dyn FnMut(&mut Entries, Range<PageNumber>),
    ) {
        if self.attachment.is_detached() {
            return;
        }
        let Descriptors { program, pagemap, .. } = self.attachment.descriptors();
        let mut found = Vec::new();
        self.marks.take(program, pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, &mut |run| lost(block, run));
    }

    fn set(&self, _block: &Entries, pages: Range<PageNumber>) {
        if self.attachment.is_detached() {
            return;
        }
        self.marks.set(&self.attachment.descriptors().program, addresses(&pages));
    }
}

impl ports::SharedPages for AddressSpace {
    fn exist(&self) -> bool {
        self.budget.shares()
    }

    fn unprotect(&self, _block: &Entries, pages: Range<PageNumber>) -> Result<(), MoveError> {
        if self.attachment.is_detached() {
            return Ok(());
        }
        let (start, len) = page_range(&pages);
        self.attachment.descriptors().program.unprotect(start, len).map_err(move_error)
    }

    fn unshare(&self, pages: Range<PageNumber>) {
        let (start, len) = page_range(&pages);
        pagemap::present(&self.attachment.descriptors().pagemap, start, start + len, &mut |run| {
            unshare(run.start, run.len())
        });
    }

    fn unshare_staged(&self, run: FrameRun) {
        unshare(self.arena.home(run), run.order.bytes());
    }
}

pub(super) fn address(page: PageNumber) -> usize {
    page.address() as usize
}

pub(super) fn addresses(pages: &Range<PageNumber>) -> Range<usize> {
    address(pages.start)..address(pages.end)
}

pub(super) fn page_range(pages: &Range<PageNumber>) -> (usize, usize) {
    (address(pages.start), (pages.end.0 - pages.start.0) as usize * PAGE_BYTES)
}
