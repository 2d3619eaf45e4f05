//! Activation: from here on the agent manages the program's memory.
//!
//! The monitor activates when the tree comes near its limit, once in the life of a process.
//! Allocating threads are paused meanwhile.
//!
//! Lock order: called inside the gate; takes the lock of the mappings.

use crate::address_space::adopt::{adopt_first, adopt_mappings};
use crate::address_space::mapping_events::MappingEvents;
use crate::address_space::ranges::RangeAdvice;
use crate::companion::activated::Activated;
use crate::companion::context::{Context, MemoryFiles};
use crate::companion::error::RuntimeError;
use crate::companion::guard::start_guard;
use crate::companion::handler::{HandlerStart, handler_entry};
use crate::companion::monitor::MONITOR_NICE;
use crate::companion::placement::CoLocation;
use crate::companion::receive_notices::{pin_control_blocks, search_code};
use crate::companion::reclaimer::{ReclaimerStart, reclaimer_entry};
use crate::companion::workers::{handler_cpus, set_nice};
use crate::ports::LinuxPorts;
use crate::ports::arena_size;
use crate::ports::attachment::Descriptors;
use crate::runtime::Runtime;
use foliomem_core::engine::{BackingConfig, Engine, EngineConfig};
use foliomem_core::pacing::Watermarks;
use foliomem_session::cluster_ownership::Event;
use foliomem_session::swap_file::Medium;
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::identity;
use foliomem_sys::maps;
use foliomem_sys::process_limits;
use foliomem_sys::region::Region;
use foliomem_sys::userfaultfd::{Features, Userfaultfd};
use foliomem_types::units::{CLUSTER_SLOTS, OrderSet, PAGE_BYTES};
use rustix::fd::OwnedFd;
use rustix::process::Pid;

/// Number of CPUs for each reclaimer: the program needs some, too.
const CPUS_PER_RECLAIMER: usize = 2;
/// Number of workers that are enough where the system has no room for more: the first two handlers
/// and a reclaimer.
const NEEDED_WORKERS: usize = 3;

/// Creates the arena and the engine, starts the workers, and adopts the program's memory. Fails if
/// threads, address space or descriptors cannot be had; without threads nothing has changed, and a
/// later call may succeed.
pub(crate) fn activate(runtime: &'static Runtime) -> Result<(), RuntimeError> {
    let _paused = runtime.notices.allocations.pause();
    let handlers = start_workers(runtime)?;
    // Before any page may be swapped out.
    start_guard(runtime)?;
    let max_pages = (runtime.context.settings.limit.most_bytes() / PAGE_BYTES as u64) as i64;
    let [wanted_bytes, needed_bytes] = arena_size::arena_bytes(max_pages);
    // Address space may be limited, or charged as memory (vm.overcommit_memory=2). The companion's
    // mappings count against both, but its limit is not the program's. The arena does not count as
    // data.
    process_limits::adopt(libc::RLIMIT_AS, runtime.companion.program());
    let arena = Region::reserve_uncounted(wanted_bytes)
        .or_else(|_| Region::reserve_uncounted(needed_bytes))
        .map_err(|errno| RuntimeError::Reserve(needed_bytes >> 20, errno))?;
    let arena_bytes = arena.len();
    runtime.context.agent_memory.add(arena.start()..arena.start() + arena.len());
    let ports = LinuxPorts::new(
        arena,
        open_descriptors(runtime)?,
        &runtime.context.budget,
        &runtime.notices.lenders,
        &runtime.notices.control_blocks,
        &runtime.context.tracer,
    )?;
    let config = engine_config(&runtime.context, &ports, arena_bytes);
    let activated = Activated { engine: Engine::new(ports, config) };
    if runtime.activation.activated.set(activated).is_err() {
        unreachable!("only the monitor activates");
    }
    // Threads that start from now on send a notice.
    pin_control_blocks(runtime);
    let Some(events) = runtime.mapping_events() else { unreachable!("it has just been set") };
    // Reading `smaps` takes milliseconds, because it walks all page tables.
    let smaps = runtime.context.open("self/smaps")?;
    adopt_first(events, || learn_advice(runtime, events, &smaps));
    search_code(runtime);
    // From here on pages may be swapped out.
    runtime.workers.release(handlers);
    wait_for_custody(runtime);
    adopt_mappings(events);
    runtime.activation.complete();
    Ok(())
}

/// Learns the advice that the program has given. From now on hooks send notices of it.
fn learn_advice(runtime: &'static Runtime, events: MappingEvents, smaps: &OwnedFd) {
    let advices = events.activated.engine.ports().space.advices();
    maps::for_each_advised(smaps, &mut |range, huge_pages, forks| {
        let found = |part| advices.found(part, RangeAdvice { huge_pages, forks });
        runtime.context.agent_memory.outside(range).into_iter().for_each(found);
    });
}

/// A thread to start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WorkerKind {
    /// The handler with this index, on a CPU.
    Handler { index: usize, cpu: usize },
    /// A reclaimer.
    Reclaimer,
}

/// Returns the workers of a process in the order in which they start: those that are needed come
/// first.
fn planned_workers(cpus: &[usize], reclaimers: usize) -> Vec<WorkerKind> {
    let mut handlers = cpus.iter().enumerate().map(|(index, &cpu)| WorkerKind::Handler { index, cpu });
    let mut planned: Vec<WorkerKind> = handlers.by_ref().take(NEEDED_WORKERS - 1).collect();
    planned.push(WorkerKind::Reclaimer);
    planned.extend(handlers);
    planned.extend(std::iter::repeat_n(WorkerKind::Reclaimer, reclaimers - 1));
    planned
}

/// Starts the handlers and the reclaimers, which wait for [`Workers::release`], and returns the
/// number of handlers. Where the system has no room for all, starts fewer. Fails if it has no room
/// for those that are needed; the next call starts the rest.
///
/// [`Workers::release`]: crate::companion::workers::Workers::release
pub(crate) fn start_workers(runtime: &'static Runtime) -> Result<u32, RuntimeError> {
    // Torture uses all CPUs all the time, and would starve a pinned handler.
    let may_co_locate = set_nice(MONITOR_NICE) && !runtime.context.settings.torture;
    runtime.placement.begin(if may_co_locate { CoLocation::Allowed } else { CoLocation::Forbidden });
    let (cpus, workers) = (handler_cpus(), &runtime.workers);
    if cpus[0] != cpus[1] && runtime.placement.is_unknown() && workers.measured.get().is_none() {
        let _ = workers.measured.set(runtime.context.reserve(PAGE_BYTES)?);
    }
    let reclaimers = match runtime.context.settings.reclaimers {
        0 => cpus.len().div_ceil(CPUS_PER_RECLAIMER),
        some => some as usize,
    };
    let planned = planned_workers(&cpus, reclaimers);
    for &kind in planned.iter().skip(workers.started()) {
        let started = match kind {
            WorkerKind::Handler { index, cpu } => {
                let start = HandlerStart { runtime, index, cpu };
                workers.spawn(&runtime.context, handler_entry, start, Some(cpu))
            }
            WorkerKind::Reclaimer => workers.spawn(&runtime.context, reclaimer_entry, ReclaimerStart { runtime }, None),
        };
        match started {
            Err(error) if error.lacks_threads() && workers.started() >= NEEDED_WORKERS => break,
            started => started?,
        }
    }
    let is_handler = |kind: &&WorkerKind| matches!(kind, WorkerKind::Handler { .. });
    Ok(planned.iter().take(workers.started()).filter(is_handler).count() as u32)
}

/// Opens the descriptors that the engine's ports need. In the child of a fork, the swap file may
/// come from the parent.
pub(crate) fn open_descriptors(runtime: &'static Runtime) -> Result<Descriptors, RuntimeError> {
    let Some(files) = &*runtime.context.files else { unreachable!("the monitor opens it first") };
    let control = runtime.context.budget.control();
    let mut swap_file = None;
    if control.swap().clusters() > 0 {
        // SAFETY: a descriptor is handed over only while the forking thread waits for this monitor,
        // which takes it once.
        let handed = unsafe { runtime.fork.swap_file.receive() };
        let given = || control.knock().and_then(|given| given.swap_file);
        let opened = handed.map_or_else(|| control.swap().open(), Ok);
        match opened.or_else(|errno| given().ok_or(errno)) {
            Ok(file) => swap_file = Some(file),
            // Without the shared store, a process only keeps its pieces for itself.
            Err(errno) if control.swap().medium() == Medium::Disk && control.swap().is_news(Event::Open) => {
                control.notice(format_args!(
                    "a process cannot open the swap file: {}: it goes on without it",
                    ErrnoText(errno)
                ));
            }
            Err(_) => {}
        }
    }
    let program = Userfaultfd::open_through(files.userfaultfd.as_ref(), Features { events: true })?;
    if let Some(own) = offering_companion(runtime) {
        control.process(runtime.context.budget.slot()).offer.make(control.custody(), own, &program);
    }
    let opened = files.memory.lock().take();
    let MemoryFiles { pagemap, memory } = opened.map_or_else(|| MemoryFiles::open(&files.proc), Ok)?;
    Ok(Descriptors { program, pagemap, maps: runtime.context.open("self/maps")?, memory, swap_file })
}

/// Returns the companion, if it offers its userfaultfd. The companion offers none if the process
/// uses its parent's slot, or if the companion is nested: in the supervisor's pid namespace, the
/// companion's pid means another process.
fn offering_companion(runtime: &'static Runtime) -> Option<Pid> {
    let Context { budget, .. } = &runtime.context;
    let is_ours = || budget.control().is_slot_of(budget.slot(), runtime.companion.program()) && !identity::is_nested();
    runtime.companion.process().filter(|_| is_ours())
}

/// Waits until the supervisor holds a copy of the userfaultfd, or cannot have one. The copy keeps
/// swapped-out pages from reading as zeros if companion and guard are killed at once.
pub(crate) fn wait_for_custody(runtime: &'static Runtime) {
    let Context { budget, .. } = &runtime.context;
    if let Some(own) = offering_companion(runtime) {
        budget.own_slot().offer.wait(budget.control().custody(), own);
    }
}

/// Returns the configuration of the process's engine.
fn engine_config(context: &Context, ports: &LinuxPorts, arena_bytes: usize) -> EngineConfig {
    let max_pages = (context.settings.limit.most_bytes() / PAGE_BYTES as u64) as i64;
    let watermarks = Watermarks::of(context.budget.limit_pages());
    let pacing = context.pacing();
    let file_slots = if ports.swap.is_some() { context.budget.control().swap().clusters() * CLUSTER_SLOTS } else { 0 };
    let discard = context.budget.control().swap().discard();
    let backing = BackingConfig { slots: file_slots, discard, store_pages: watermarks.store_pages() };
    EngineConfig {
        granule: context.settings.granule,
        arena_frames: (arena_bytes / PAGE_BYTES) as u32,
        swap_slots: arena_size::swap_slots(max_pages, file_slots),
        strategy: Default::default(),
        swap_in: Default::default(),
        no_room: Default::default(),
        whole_out: OrderSet::ALL,
        keep_copies: true,
        make_ahead: !context.tracer.is_on(),
        pacing,
        compaction: Default::default(),
        protected_pages: watermarks.protected_pages(),
        backing: (file_slots > 0).then_some(backing),
        recompress_idle_ns: context.settings.recompress.map(|_| pacing.recompress_idle_ns()),
        cpus: handler_cpus().last().map_or(1, |&cpu| cpu as u16 + 1),
    }
}
