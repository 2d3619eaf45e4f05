//! The connection of a process to its program: the descriptors by which the ports reach the memory.
//!
//! After a fork the child makes descriptors of its own. A child whose companion cannot start is
//! *detached*: its only thread copies its memory back by itself. There is no lock.

use crate::ports::arena_memory::ArenaMemory;
use foliomem_core::ports::{MoveError, Stopped};
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::pagemap;
use foliomem_sys::userfaultfd::{self, Userfaultfd};
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The descriptors of one process. The child of a fork opens its own.
#[derive(Debug)]
pub struct Descriptors {
    /// Receives the program's faults and mapping events.
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

/// The side of a move whose pages only the agent changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ArenaSide {
    /// Pages move out of the arena.
    Source,
    /// Pages move into the arena.
    Destination,
}

/// The connection to the program.
pub struct Attachment {
    descriptors: ForkCell<Descriptors>,
    arena: &'static ArenaMemory,
    /// Set by [`Attachment::detach`].
    is_detached: AtomicBool,
    detached_swap_file: AtomicI32,
}

impl Attachment {
    /// Makes the connection by `descriptors`. Frames lie in `arena`, which is registered.
    pub(super) fn new(descriptors: Descriptors, arena: &'static ArenaMemory) -> Attachment {
        Attachment {
            descriptors: ForkCell::new(descriptors),
            arena,
            is_detached: AtomicBool::new(false),
            detached_swap_file: AtomicI32::new(-1),
        }
    }

    /// Returns the descriptors of this process.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// Replaces the descriptors, in the child of a fork.
    ///
    /// # Safety
    /// No other thread of this process uses the ports.
    pub(super) unsafe fn replace(&self, descriptors: Descriptors) {
        // SAFETY: no other thread, by the contract. The old descriptors are those of the parent's
        // threads and do not exist in this process's table: they are forgotten, not closed.
        unsafe { self.descriptors.replace_forgetting(descriptors) };
    }

    /// Makes the calling thread copy pages to the program from now on, without a userfaultfd.
    /// `swap_file` is the number of the swap file in this thread's descriptor table.
    ///
    /// # Safety
    /// The calling thread is the only one that uses the memory. No page moves out from now on. The
    /// swap file stays open until all pieces are read.
    pub(super) unsafe fn detach(&self, swap_file: Option<RawFd>) {
        self.is_detached.store(true, Ordering::Relaxed);
        self.detached_swap_file.store(swap_file.unwrap_or(-1), Ordering::Relaxed);
    }

    /// Returns whether the process continues without its agent.
    pub(super) fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Relaxed)
    }

    /// Returns the swap file's descriptor, if there is one.
    pub(super) fn swap_file(&self) -> Option<BorrowedFd<'_>> {
        if !self.is_detached() {
            return self.descriptors().swap_file.as_ref().map(AsFd::as_fd);
        }
        let number = self.detached_swap_file.load(Ordering::Relaxed);
        // SAFETY: the caller of `detach` keeps the descriptor open until all pieces are read.
        (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Copies pages of the arena to the program, when the calling thread is the only user of the
    /// program's memory.
    pub(super) fn copy_detached(&self, to: usize, from: usize, len: usize) {
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
        // SAFETY: the source is a run of the arena that the engine holds. The target is managed
        // memory of the program, readable and writable in this process (`detach`), and no other
        // thread runs here.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance::<u8>(from), target, len) };
    }

    /// Moves `pages` pages, of which those in `arena` belong to the agent. On an error, returns how
    /// far the move came, as the engine expects.
    pub(super) fn move_pages(&self, to: usize, from: usize, pages: u32, arena: ArenaSide) -> Result<(), Stopped> {
        let len = pages as usize * PAGE_BYTES;
        if self.is_detached() {
            self.copy_detached(to, from, len);
            return Ok(());
        }
        let mut moved = 0;
        while moved < len {
            let before = moved;
            // SAFETY: one side is a run of the arena that the engine holds. The other is memory of
            // the program; the kernel checks that it is registered or movable.
            let outcome = unsafe { self.descriptors().program.move_pages(to + moved, from + moved, len - moved) };
            moved += outcome.moved_bytes;
            let Some(error) = outcome.error else { continue };
            moved += self.uncounted_bytes(to + moved, from + moved, len - moved, arena);
            // An error after some progress is an interruption: continue while there is progress.
            if moved == before && !(arena == ArenaSide::Destination && self.remove_stray(to + moved, from + moved)) {
                return Err(Stopped { moved_pages: (moved / PAGE_BYTES) as u32, error: move_error(error) });
            }
        }
        Ok(())
    }

    /// Returns how many of the next `len` bytes have moved, after an error. Linux 6.18 repeats a
    /// step that has succeeded after a retry, and finds the pages already moved. So its count of
    /// moved bytes is too small. Only the arena shows what has moved: by now the program may have
    /// moved, discarded or unmapped the pages on its side.
    fn uncounted_bytes(&self, to: usize, from: usize, len: usize, arena: ArenaSide) -> usize {
        let pagemap = &self.descriptors().pagemap;
        match arena {
            ArenaSide::Source => pagemap::leading_absent_bytes(pagemap, from, from + len),
            ArenaSide::Destination => {
                let len = pagemap::leading_present_bytes(pagemap, to, to + len);
                let has_moved = |offset: &usize| !self.is_stray(to + offset, from + offset);
                (0..len).step_by(PAGE_BYTES).take_while(has_moved).count() * PAGE_BYTES
            }
        }
    }

    /// Returns whether the page in the frame at `to` is a stray: for whoever reads an unpopulated
    /// frame, as a debugger may, the kernel puts its page of zeros there. A page that has moved
    /// from `from` may be one, too; but then the program has a newer page at `from`.
    fn is_stray(&self, to: usize, from: usize) -> bool {
        let pagemap = &self.descriptors().pagemap;
        pagemap::is_page_of_zeros(pagemap, to) && pagemap::leading_present_bytes(pagemap, from, from + PAGE_BYTES) > 0
    }

    /// Removes a stray from the frame at `to`, to which no page can move otherwise. Returns whether
    /// there was one.
    fn remove_stray(&self, to: usize, from: usize) -> bool {
        self.is_stray(to, from) && self.arena.discard_by_guard(to - self.arena.start(), PAGE_BYTES)
    }
}

/// Converts an error of userfaultfd to the engine's type.
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

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_sys::region::Region;
    use foliomem_sys::userfaultfd::{Features, Mode};
    use std::fs::File;
    use std::time::Duration;

    const PAGES: usize = 6;
    const LEN: usize = PAGES * PAGE_BYTES;

    /// An attachment, closed first: unmapping the others would wait for somebody to receive it.
    struct Attached {
        attachment: Attachment,
        arena: &'static ArenaMemory,
        memory: Region,
    }

    /// Attaches memory of the program, and an arena that lacks its first `moved` pages.
    fn attach(moved: usize) -> Option<Attached> {
        let program = Userfaultfd::open(Features { events: true }).ok()?;
        let [arena, memory] = [(); 2].map(|()| Region::reserve(LEN).unwrap());
        let arena: &ArenaMemory = Box::leak(Box::new(ArenaMemory::new(arena)));
        arena.populate(moved * PAGE_BYTES, LEN - moved * PAGE_BYTES).unwrap();
        program.register(arena.start(), LEN, Mode::Destination).unwrap();
        program.register(memory.start(), LEN, Mode::Faults).unwrap();
        let open = |name| OwnedFd::from(File::open(name).unwrap());
        let descriptors = Descriptors {
            program,
            pagemap: open("/proc/self/pagemap"),
            maps: open("/proc/self/maps"),
            memory: open("/proc/self/mem"),
            swap_file: None,
        };
        Some(Attached { attachment: Attachment::new(descriptors, arena), arena, memory })
    }

    /// Moves `pages` pages, of which the agent then knows nothing.
    fn move_uncounted(attachment: &Attachment, to: usize, from: usize, pages: usize) {
        let program = &attachment.descriptors().program;
        // SAFETY: both sides lie in regions of the test, and no reference into them exists.
        let outcome = unsafe { program.move_pages(to, from, pages * PAGE_BYTES) };
        assert_eq!((outcome.moved_bytes, outcome.error), (pages * PAGE_BYTES, None));
    }

    #[test]
    fn pages_that_the_kernel_did_not_count_are_counted() {
        let Some(Attached { attachment, arena, memory }) = &attach(0) else { return };
        let (home, page) = (arena.start(), memory.start());
        let uncounted = |to, from, side| attachment.uncounted_bytes(to, from, LEN, side) / PAGE_BYTES;
        assert_eq!(uncounted(page, home, ArenaSide::Source), 0);
        move_uncounted(attachment, page, home, 2);
        assert_eq!(uncounted(page, home, ArenaSide::Source), 2);
        assert_eq!(attachment.move_pages(page, home, PAGES as u32, ArenaSide::Source), Ok(()), "goes on with the rest");
        assert_eq!(uncounted(home, page, ArenaSide::Destination), 0);
        move_uncounted(attachment, home, page, 3);
        assert_eq!(uncounted(home, page, ArenaSide::Destination), 3);
        assert_eq!(attachment.move_pages(home, page, PAGES as u32, ArenaSide::Destination), Ok(()));
    }

    #[test]
    fn frames_that_somebody_has_read_take_pages() {
        let Some(Attached { attachment, arena, memory }) = &attach(PAGES) else { return };
        let (home, page) = (arena.start(), memory.start());
        // Only a kernel with guards can remove the pages of zeros.
        if !arena.discard_by_guard(0, PAGE_BYTES) {
            return;
        }
        let Descriptors { program, memory: file, .. } = attachment.descriptors();
        program.zero(page).unwrap();
        // SAFETY: the source is an array, and nobody uses the memory of the test.
        (1..PAGES).for_each(|index| unsafe {
            program
                .copy(page + index * PAGE_BYTES, [index as u8; PAGE_BYTES].as_ptr().expose_provenance(), PAGE_BYTES)
                .unwrap();
        });
        let read = |from: usize| {
            let mut bytes = [0u8; LEN];
            assert_eq!(rustix::io::pread(file, &mut bytes, from as u64), Ok(LEN));
            bytes
        };
        assert_eq!(read(home), [0; LEN]);
        assert_eq!(attachment.uncounted_bytes(home, page, LEN, ArenaSide::Destination), 0);
        assert_eq!(attachment.move_pages(home, page, PAGES as u32, ArenaSide::Destination), Ok(()));
        assert!(read(home).chunks(PAGE_BYTES).enumerate().all(|(index, bytes)| bytes == [index as u8; PAGE_BYTES]));
    }

    #[test]
    fn pages_that_the_program_has_discarded_since_have_moved() {
        let Some(Attached { attachment, arena, memory }) = &attach(2) else { return };
        // After the event of a discard, nothing shows that it is under way.
        let moved = attachment.move_pages(memory.start(), arena.start(), 2, ArenaSide::Source);
        assert_eq!(moved, Ok(()));
    }

    #[test]
    fn pages_that_the_program_has_unmapped_since_have_moved() {
        for side in [ArenaSide::Source, ArenaSide::Destination] {
            let Some(attached) = attach(0) else { return };
            let (attachment, home, page) = (&attached.attachment, attached.arena.start(), attached.memory.start());
            let program = &attachment.descriptors().program;
            let (to, from) = if side == ArenaSide::Source {
                (page, home)
            } else {
                move_uncounted(attachment, page, home, PAGES);
                (home, page)
            };
            move_uncounted(attachment, to, from, 4);
            let memory = attached.memory;
            let moved = std::thread::scope(|scope| {
                // The program waits in munmap until its event is received.
                scope.spawn(|| drop(memory));
                while !program.mapping_is_changing() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let moved = attachment.move_pages(to, from, PAGES as u32, side);
                assert!(matches!(program.read_message(), Ok(Some(_))), "the event");
                moved
            });
            assert_eq!(moved, Err(Stopped { moved_pages: 4, error: MoveError::Changing }), "{side:?}");
        }
    }
}
