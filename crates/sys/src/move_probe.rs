//! A probe of page moves: moves pages between two regions of the process, to measure the cost.
//!
//! It serves faults as the agent does: a handler polls, reads the message, moves a page, and wakes
//! the thread. It has no engine and no lock.

use crate::cpus::{self, run_on};
use crate::memory_advice::{self, Forks};
use crate::region::{HugePages, Region};
use crate::userfaultfd::{Features, Message, Mode, MoveError, UffdError, Userfaultfd};
use foliomem_types::units::PAGE_BYTES;
use rustix::io::Errno;
use thiserror::Error;

/// The reason why a probe cannot be made or used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum MoveProbeError {
    /// The kernel refuses a userfaultfd.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The kernel refuses memory.
    #[error("cannot map memory: {0}")]
    Memory(Errno),
    /// The kernel refuses to move pages.
    #[error("cannot move pages: {0}")]
    Move(#[from] MoveError),
}

/// The CPU of the handler that serves the faults of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandlerCpu {
    /// The thread's.
    Same,
    /// Another one, if there is another one.
    Another,
}

/// Two regions, one of which has the pages. Between calls they are in the home region.
pub struct MoveProbe {
    uffd: Userfaultfd,
    home: Region,
    program: Region,
}

impl MoveProbe {
    /// Makes a probe with `len` bytes of single pages. `len` is a multiple of the page size.
    ///
    /// # Errors
    /// Fails if the kernel refuses a userfaultfd or memory.
    pub fn new(len: usize) -> Result<MoveProbe, MoveProbeError> {
        let uffd = Userfaultfd::open(Features { events: false })?;
        let reserve = || Region::reserve(len).map_err(MoveProbeError::Memory);
        let (home, program) = (reserve()?, reserve()?);
        for region in [&home, &program] {
            // A page that a fork has shared cannot be moved.
            memory_advice::set_forks(&(region.start()..region.start() + region.len()), Forks::LeaveOut);
        }
        home.set_huge_pages(0, len, HugePages::Forbidden)
            .and_then(|()| home.populate(0, len))
            .map_err(MoveProbeError::Memory)?;
        uffd.register(home.start(), len, Mode::Destination)?;
        uffd.register(program.start(), len, Mode::Faults)?;
        Ok(MoveProbe { uffd, home, program })
    }

    /// Moves all pages into the program's region and back, with one call for each `piece_bytes`.
    ///
    /// # Errors
    /// Fails if the kernel refuses to move pages.
    pub fn move_there_and_back(&mut self, piece_bytes: usize) -> Result<(), MoveProbeError> {
        self.move_all(self.home.start(), self.program.start(), piece_bytes)?;
        self.move_all(self.program.start(), self.home.start(), piece_bytes)
    }

    /// Moves all pages from the region at `from` to the region at `to`, with one call for each
    /// `piece_bytes`.
    fn move_all(&self, from: usize, to: usize, piece_bytes: usize) -> Result<(), MoveProbeError> {
        for at in (0..self.home.len()).step_by(piece_bytes) {
            self.move_piece(from + at, to + at, piece_bytes.min(self.home.len() - at))?;
        }
        Ok(())
    }

    /// Moves `len` bytes, and repeats the call until all have moved.
    fn move_piece(&self, from: usize, to: usize, len: usize) -> Result<(), MoveProbeError> {
        let mut done = 0;
        while done < len {
            // SAFETY: both ranges lie in regions of this probe, and no reference into them exists.
            let outcome = unsafe { self.uffd.move_pages(to + done, from + done, len - done) };
            done += outcome.moved_bytes;
            match outcome.error {
                None | Some(MoveError::Again) => {}
                Some(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Lets a thread touch every page of the program's region in order, while a handler on
    /// `handler_cpu` serves the faults.
    ///
    /// # Errors
    /// Fails if a fault cannot be served.
    pub fn fault_all(&mut self, handler_cpu: HandlerCpu) -> Result<(), MoveProbeError> {
        let cpu = rustix::thread::sched_getcpu() as u32;
        let handler_cpu = match handler_cpu {
            HandlerCpu::Same => cpu,
            HandlerCpu::Another => cpus::another_than(cpu).unwrap_or(cpu),
        };
        let probe = &*self;
        std::thread::scope(|scope| {
            let handler = scope.spawn(move || {
                run_on(handler_cpu);
                let served = probe.serve();
                if served.is_err() {
                    // The kernel fills the missing pages with zeros, so that the thread does not
                    // wait forever.
                    let _ = probe.uffd.unregister(probe.program.start(), probe.program.len());
                }
                served
            });
            scope.spawn(move || {
                run_on(cpu);
                // SAFETY: the region is mapped, and nobody writes to it. A fault ends when the page
                // is there.
                let content = unsafe { probe.program.slice(0, probe.program.len()) };
                std::hint::black_box(content.iter().step_by(PAGE_BYTES).fold(0, |sum: u8, byte| sum ^ byte));
            });
            handler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        self.move_all(self.program.start(), self.home.start(), self.program.len())
    }

    /// Serves one fault for each page.
    fn serve(&self) -> Result<(), MoveProbeError> {
        for _ in 0..self.program.len() / PAGE_BYTES {
            let page = loop {
                self.uffd.wait(None).map_err(MoveError::from)?;
                if let Some(Message::Fault { address, .. }) = self.uffd.read_message().map_err(MoveError::from)? {
                    break address - address % PAGE_BYTES;
                }
            };
            self.move_piece(self.home.start() + (page - self.program.start()), page, PAGE_BYTES)?;
            self.uffd.wake(page, PAGE_BYTES).map_err(MoveError::from)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_keep_their_content_when_they_move() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mut probe = MoveProbe::new(300 * PAGE_BYTES).unwrap();
        for (at, byte) in probe.home.as_mut_slice().iter_mut().enumerate() {
            *byte = (at / PAGE_BYTES * 7 + at % 13) as u8;
        }
        let before = probe.home.as_mut_slice().to_vec();
        probe.move_there_and_back(PAGE_BYTES).unwrap();
        probe.move_there_and_back(16 * PAGE_BYTES).unwrap();
        probe.fault_all(HandlerCpu::Same).unwrap();
        probe.fault_all(HandlerCpu::Another).unwrap();
        assert!(probe.home.as_mut_slice() == before.as_slice());
        assert!(probe.program.start() != probe.home.start());
    }
}
