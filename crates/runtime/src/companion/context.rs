//! The context of a companion: the state that all roles need and no role owns.
//!
//! Invariant: each part is set at the start of a companion and constant afterwards, or has its own
//! lock or atomics. The lock of the agent's memory is a leaf.

use crate::companion::error::RuntimeError;
use crate::companion::memory_users;
use crate::tracer::{Recording, Tracer};
use foliomem_core::pacing::{Pacing, Room, Watermarks};
use foliomem_session::budget::Budget;
use foliomem_session::process_table::SlotIndex;
use foliomem_session::segment::Control;
use foliomem_sync::Mutex;
use foliomem_sys::agent_memory::AgentMemory;
use foliomem_sys::fork_cell::ForkCell;
use foliomem_sys::pagemap;
use foliomem_sys::region::Region;
use foliomem_sys::userfaultfd;
use foliomem_types::settings::Configuration;
use foliomem_types::units::PAGE_BYTES;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// Maximum size of the writable memory of a process that is not managed because it is small, in
/// pages: 12 MiB, half of which belongs to the agent. The process may fill the rest before the
/// monitor samples it again.
const SMALL_DATA_PAGES: i64 = (12 << 20) / PAGE_BYTES as i64;

/// The companion's open files.
pub(crate) struct ProcFiles {
    /// `/proc`, kept open because the program may change its root.
    pub(crate) proc: OwnedFd,
    pub(crate) smaps_rollup: OwnedFd,
    /// The device, kept open because the program may change its root before activation.
    pub(crate) userfaultfd: Result<OwnedFd, Errno>,
    /// Open only if pieces are recompressed.
    pub(crate) loadavg: Option<OwnedFd>,
    /// Opened at the start and taken at activation: the program may change its user in between.
    pub(crate) memory: Mutex<Option<MemoryFiles>>,
}

/// Files of the program's memory. The kernel gives them to root once the program has changed its
/// user or has made itself undumpable.
pub(crate) struct MemoryFiles {
    pub(crate) pagemap: OwnedFd,
    pub(crate) memory: OwnedFd,
}

impl MemoryFiles {
    /// Opens the files under `proc`. Fails if the kernel refuses.
    pub(crate) fn open(proc: &OwnedFd) -> Result<MemoryFiles, RuntimeError> {
        Ok(MemoryFiles { pagemap: open_in(proc, "self/pagemap")?, memory: open_in(proc, "self/mem")? })
    }
}

/// The settings, budget, memory ranges, tracer and files of a companion.
pub(crate) struct Context {
    pub(crate) settings: Configuration,
    pub(crate) budget: Budget,
    pub(crate) agent_memory: AgentMemory,
    pub(crate) tracer: Tracer,
    pub(crate) files: ForkCell<Option<ProcFiles>>,
}

impl Context {
    /// Creates the context of the process in `slot`. Its monitor opens the files.
    pub(crate) fn new(control: &'static Control, slot: SlotIndex, agent_memory: AgentMemory) -> Context {
        let settings = control.configuration();
        Context {
            tracer: Tracer::new(if settings.records { Recording::On } else { Recording::Off }),
            settings,
            budget: Budget::new(control, slot),
            agent_memory,
            files: ForkCell::new(None),
        }
    }

    /// Reserves `bytes` of agent memory. Fails if there is no address space.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Region, RuntimeError> {
        let region = Region::reserve(bytes).map_err(|errno| RuntimeError::Reserve(bytes >> 20, errno))?;
        self.agent_memory.add(region.start()..region.start() + region.len());
        Ok(region)
    }

    /// Opens a file of `/proc`, even if the program has changed its root.
    pub(crate) fn open(&self, path: &'static str) -> Result<OwnedFd, RuntimeError> {
        let Some(files) = &*self.files else { unreachable!("the monitor opens it first") };
        open_in(&files.proc, path)
    }

    /// Returns whether the program's process, `number` in `/proc`, has a thread with this id.
    pub(crate) fn is_program_thread(&self, number: u32, thread: u32) -> bool {
        let Some(files) = &*self.files else { unreachable!("the monitor opens it first") };
        memory_users::has_thread(&files.proc, number, thread)
    }

    /// Returns how hard the engine works for room.
    pub(crate) fn pacing(&self) -> Pacing {
        if self.settings.torture { Pacing::Torture } else { Pacing::Watermarks }
    }

    /// Returns the room before activation.
    pub(crate) fn room(&self) -> Room {
        Room { pages: self.budget.room_pages(), watermarks: Watermarks::of(self.budget.limit_pages()) }
    }

    /// Returns whether the process is too small to be managed: it cannot grow much without a
    /// notice, and managing it would take about as much memory as it could free.
    pub(crate) fn is_small(&self) -> bool {
        let data_pages = || self.budget.statm().map_or(0, pagemap::data_pages) as i64;
        self.pacing() == Pacing::Watermarks && self.budget.is_small() && data_pages() < SMALL_DATA_PAGES
    }

    /// Returns whether there may soon be no room if the program takes `bytes`.
    pub(crate) fn lacks_room(&self, bytes: usize) -> bool {
        let Room { pages, watermarks } = self.room();
        pages - (bytes.div_ceil(PAGE_BYTES) as i64) < watermarks.activation_pages()
    }
}

/// Opens `/proc`.
pub(crate) fn open_proc() -> Result<OwnedFd, RuntimeError> {
    rustix::fs::openat(CWD, "/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| RuntimeError::Proc("", errno))
}

/// Opens `path` in `/proc`.
pub(crate) fn open_in(proc: impl AsFd, path: &'static str) -> Result<OwnedFd, RuntimeError> {
    rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| RuntimeError::Proc(path, errno))
}

/// Opens the userfaultfd device and the files of the program's memory, or gets them from the
/// supervisor. Uses `device` if the parent has handed it over.
pub(crate) fn open_device_and_memory(
    device: Option<OwnedFd>,
    proc: &OwnedFd,
    control: &Control,
) -> (Result<OwnedFd, Errno>, Option<MemoryFiles>) {
    let (device, memory) = (device.map_or_else(userfaultfd::device, Ok), MemoryFiles::open(proc));
    let is_refused = matches!(memory, Err(RuntimeError::Proc(_, Errno::ACCESS)));
    let given = if is_refused || matches!(device, Err(Errno::ACCESS)) { control.knock() } else { None };
    let Some(given) = given else { return (device, memory.ok()) };
    let files = given.pagemap.zip(given.memory).map(|(pagemap, memory)| MemoryFiles { pagemap, memory });
    (device.or_else(|errno| given.device.ok_or(errno)), memory.ok().or(files))
}
