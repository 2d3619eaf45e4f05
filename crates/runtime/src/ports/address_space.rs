//! Pages of the program: how they move between the program and the arena, and what is known of them.
//!
//! One userfaultfd has the program's ranges registered for missing pages. The arena is registered
//! with it, too: the kernel then refuses to move any page, in or out, while a change of mappings is
//! under way that has not been received. Between receiving and applying there is the lock of the
//! mappings, which whoever moves pages holds for reading.

use crate::address_space::advice::{self, Advices};
use crate::address_space::mapping_changes::Changes;
use crate::address_space::marks::Marks;
use crate::address_space::ranges::{self, Ranges};
use crate::ports::machine::{Descriptors, LinuxMachine};
use foliomem_core::machine::{Corrupted, MoveError, Stopped};
use foliomem_session::cluster_ownership::Event;
use foliomem_sync::RwLockWriteGuard;
use foliomem_sync::ranks::Mappings;
use foliomem_sys::filters::{self, Call};
use foliomem_sys::memory_advice::{self, Forks};
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_sys::{maps, pagemap};
use foliomem_types::size_policy::{Advice, Disabled};
use foliomem_types::units::{Frame, FrameRun, MAX_ORDER, Order, OrderSet, PAGE_BYTES, PageNumber};
use std::ops::Range;

impl LinuxMachine {
    /// Has who waits for `page` fault again: a handler will hear it.
    pub(crate) fn fault_again(&self, page: PageNumber) {
        let _ = self.descriptors().program.wake(page.address() as usize, PAGE_BYTES);
    }

    /// The ranges of the program that are managed.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// All of the program's that is registered: that, and reserves ([`crate::address_space::adopt`]). Changed under the lock of the mappings, except
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
    pub(super) fn sizes(&self, advice: Advice) -> OrderSet {
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
                // Where it fails, folios are made of single pages.
                memory_advice::ask_for_huge(&part.range);
            }
        }
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
            // Where locking is forbidden, the page is in all likelihood there: its thread has just used it.
            if hold { memory_advice::lock_page(page) } else { memory_advice::unlock_page(page) }
        }
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
    pub(super) fn report_lost(&self, found: Vec<Range<usize>>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if !found.is_empty() && !self.descriptors().program.mapping_is_changing() {
            found.into_iter().for_each(|run| lost(ranges::pages(&run)));
        }
    }

    /// Copies pages of the arena to the program, of whose memory the calling thread is the only user.
    pub(super) fn copy_detached(&self, to: usize, from: usize, len: usize) {
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
        // SAFETY: the source is a run of the arena that the engine holds. The target is managed memory of the program, mapped
        // readable and writable in this process (`detach`), and nobody else runs here.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance::<u8>(from), target, len) };
    }

    /// Moves `pages` pages and reports progress the engine's way.
    pub(super) fn move_pages(&self, to: usize, from: usize, pages: u32) -> Result<(), Stopped> {
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
    pub(super) fn mark_moved(&self, pages: Range<PageNumber>, home: usize) {
        let is_block = pages.end.0 - pages.start.0 == u64::from(MAX_ORDER.pages());
        if is_block && pagemap::is_huge(&self.descriptors().pagemap, home) {
            self.marks.leave_out(addresses(&pages));
        } else {
            self.marks.set(&self.descriptors().program, addresses(&pages));
        }
    }

    /// Fills the absent `page` by `fill`, which the kernel refuses where there is a mark: that is removed before.
    pub(super) fn unmarked(
        &self,
        page: PageNumber,
        fill: impl Fn(&Userfaultfd, usize) -> Result<(), userfaultfd::MoveError>,
    ) -> Result<(), MoveError> {
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let range = addresses(&page.folio(Order::ZERO));
        match fill(program, range.start) {
            Err(userfaultfd::MoveError::Exists) if Marks::clear_stale(program, pagemap, range.clone()) => {
                fill(program, range.start)
            }
            filled => filled,
        }
        .map_err(move_error)
    }

    /// Calls `lost` with pages of `pages` that the program has discarded.
    pub(super) fn find_lost(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if self.is_detached() {
            // A fork copies no marks; lost content was dropped before it.
            return;
        }
        let mut found = Vec::new();
        self.marks.check(&self.descriptors().pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, lost);
    }

    /// Removes the marks of `pages`, and calls `lost` with those that had none.
    pub(super) fn take_marks_of(&self, pages: Range<PageNumber>, lost: &mut dyn FnMut(Range<PageNumber>)) {
        if self.is_detached() {
            return;
        }
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let mut found = Vec::new();
        self.marks.take(program, pagemap, addresses(&pages), &mut |run| found.push(run));
        self.report_lost(found, lost);
    }

    /// Moves `run` to the program's pages from `to` on.
    pub(super) fn move_run_in(&self, run: FrameRun, to: PageNumber) -> Result<(), Stopped> {
        let Err(Stopped { moved_pages, error }) = self.move_pages(address(to), self.home(run), run.frames()) else {
            return Ok(());
        };
        let rest = |moved_pages| address(to.offset(moved_pages))..address(to.offset(run.frames()));
        let Descriptors { program, pagemap, .. } = self.descriptors();
        let mut stopped = Stopped { moved_pages, error };
        if error == MoveError::Exists && Marks::clear_stale(program, pagemap, rest(moved_pages)) {
            let (from, pages) = (self.home(run) + moved_pages as usize * PAGE_BYTES, run.frames() - moved_pages);
            let Err(again) = self.move_pages(rest(moved_pages).start, from, pages) else { return Ok(()) };
            stopped = Stopped { moved_pages: moved_pages + again.moved_pages, ..again };
        }
        self.marks.set(program, rest(stopped.moved_pages));
        Err(stopped)
    }

    /// Moves pages of the program to the frames from `to` on.
    pub(super) fn move_run_out(&self, from: PageNumber, to: Frame, pages: u32) -> Result<(), Stopped> {
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

    /// Copies a frame to a page of the program.
    pub(super) fn copy_page_in(&self, frame: Frame, to: PageNumber) -> Result<(), MoveError> {
        let from = self.home(FrameRun::new(frame, Order::ZERO));
        if self.is_detached() {
            self.copy_detached(address(to), from, PAGE_BYTES);
            return Ok(());
        }
        // SAFETY: the frame is full and ours; the kernel checks the destination.
        unsafe { self.descriptors().program.copy(address(to), from, PAGE_BYTES) }.map_err(move_error)
    }

    /// Makes an access to `page` a SIGBUS.
    pub(super) fn poison_page(&self, page: PageNumber, why: Corrupted) -> Result<(), MoveError> {
        if self.is_detached() {
            // The next best.
            let start = address(page);
            // SAFETY: the page is the program's, and has no content that counts.
            unsafe { memory_advice::forbid_access(&(start..start + PAGE_BYTES)) };
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

    /// Calls `found` with the managed pages of `pages` that are resident.
    pub(super) fn find_present(&self, pages: Range<PageNumber>, found: &mut dyn FnMut(Range<PageNumber>)) {
        let (start, len) = page_range(&pages);
        for managed in self.ranges.within(start..start + len) {
            pagemap::present(&self.descriptors().pagemap, managed.start, managed.end, &mut |range| {
                found(PageNumber::containing(range.start as u64)..PageNumber::containing(range.end as u64));
            });
        }
    }
}

pub(super) fn move_error(error: userfaultfd::MoveError) -> MoveError {
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
pub(super) fn allow_fork(range: &Range<usize>, allow: bool) {
    memory_advice::set_forks(range, if allow { Forks::Copy } else { Forks::LeaveOut });
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
