//! The agent's threads inside one process of the tree, and what they do.
//!
//! A process starts with one thread, the *keeper*: it samples the process's size and sleeps, the
//! shorter the nearer the tree is to its limit. Nothing is managed and nothing registered, so a program
//! that fits runs at its own speed. When the limit comes near, the keeper *engages*: it makes the arena
//! and the engine, starts a *handler* for each CPU and a *reclaimer* for every other one, registers the
//! program's memory and adopts what is in it. From then on it adopts new mappings as they appear, and
//! does little else: a program can touch a new mapping at memory speed before it is adopted, so the keeper
//! must get a CPU whenever it wakes. Where nothing has happened for a while it looks less often. Reclaimers compress,
//! from the low watermark to the high one.
//!
//! Handlers wait for messages of the program's userfaultfd. Messages are read one at a time under the lock of
//! the mappings ([`LinuxMachine::hold_mappings`]); a change of mappings is applied before the lock is released, so
//! that no fault that the program raises after the change can be served before it. Faults are served outside the lock.
//!
//! All threads are made by [`crate::thread`]: they have a descriptor table of their own, so the program
//! neither sees nor closes theirs, and no thread-local storage of the C library.
//!
//! Lock order: gate, mappings, then the engine's.

use crate::adopt::{adopt_growth, adopt_mappings, adopt_part, make_whole};
use crate::budget::Budget;
use crate::changes::{Change, Changes};
use crate::clock::{self, now_ns, timespec};
use crate::companion::{Adoption, Companion, Member, Stacks, Woken};
use crate::control::{Configuration, Control, SlotIndex};
use crate::control_block::{self, ControlBlocks};
use crate::copies::{self, Copies};
use crate::cpu_load;
use crate::death::DeathNotice;
use crate::filters::{self, Call};
use crate::fork_cell::ForkCell;
use crate::gate::Gate;
use crate::growth::{Growth, Told, What};
use crate::hand_over::{self, HandOver, Lending};
use crate::lenders::{Lenders, Table};
use crate::machine::{Descriptors, LinuxMachine, Worker};
use crate::maps;
use crate::memory_users::{self, User};
use crate::own::OwnMemory;
use crate::pagemap;
use crate::placement::{APART_AFTER_STARVING_NS, APART_WHILE_GROWING_NS, Follower, Place, Placement, Standby};
use crate::ranges::{Ranges, page, pages};
use crate::region::Region;
use crate::sizing;
use crate::still::Still;
use crate::swap_space::Event;
use crate::thread::{self, Kind, Spec};
use crate::tracer::Tracer;
use crate::uffd::{self, Features, Message, UffdError, Userfaultfd};
use crate::why::Why;
use foliomem_core::engine::{Attempt, BackingConfig, Engine, EngineConfig, Served};
use foliomem_core::machine::Machine;
use foliomem_core::policy::{Advice, SizePolicy};
use foliomem_core::stats::FaultKind;
use foliomem_core::sync::Mutex;
use foliomem_core::trace::Event as TraceEvent;
use foliomem_core::units::{CLUSTER_SLOTS, MAX_ORDER, Order, OrderSet, PAGE_BYTES, PageNumber};
use foliomem_core::watermark;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Access, Mode, OFlags, access};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use rustix::thread::futex;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{OnceLock, RwLockWriteGuard};
use std::time::Duration;
use thiserror::Error;

/// Why the agent cannot do its work. The program must not go on: it may have memory that only the agent
/// can give back to it.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// No userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UffdError),
    /// A file under /proc/self.
    #[error("cannot open /proc/{0}: {why}; is /proc mounted?", why = Why(*.1))]
    Proc(&'static str, Errno),
    /// Address space or memory for the agent itself.
    #[error("cannot reserve {0} MiB of address space: {why}; is there a limit on it (ulimit -v)?", why = Why(*.1))]
    Reserve(usize, Errno),
    /// A thread.
    #[error("cannot start a thread: {}", Why(*.0))]
    Thread(Errno),
    /// The companion process.
    #[error("cannot start the companion process: {}", Why(*.0))]
    Companion(Errno),
    /// It was killed.
    #[error("the companion process was killed at its start; does a filter for system calls (seccomp) do that?")]
    CompanionKilled,
    /// It has said why.
    #[error("the companion process could not start")]
    CompanionFailed,
    /// What a child of a fork has in the swap file is out of its reach.
    #[error("the child of a fork cannot reach the swap file, which has some of its memory: {}", Why(*.0))]
    SwapFile(Errno),
}

/// Handlers at most: beyond that, waking them all for each fault costs more than it brings.
const MOST_HANDLERS: usize = 16;
/// One reclaimer for so many CPUs: the program needs some, too.
const CPUS_PER_RECLAIMER: usize = 2;
/// Stack of one of the agent's threads; only what is used is resident.
const STACK_BYTES: usize = 512 << 10;
/// The keeper engages when less than 1/2^3 of the limit is left, but no later than for 24 MiB: what a
/// program touches at memory speed while the keeper sleeps.
const ENGAGE_SHIFT: u32 = 3;
const ENGAGE_MIN_PAGES: i64 = (24 << 20) / PAGE_BYTES as i64;
/// Every message wakes all handlers that listen, and the one on the program's own CPU takes it. A handler
/// that came too late this often in a row is on the wrong CPU and sleeps for a while: waking it costs
/// each fault of a one-threaded program 6 us (14.1 us instead of 8.5 us a fault of 4 KiB, measured with
/// two handlers and with one on the program's CPU). Under reclaim, which moves the program about, 32 in a row are
/// so rare that half of all reads were in vain.
const LOST_RACES: u32 = 4;
const PARK: Duration = Duration::from_millis(10);
/// Looks at a lock that nobody holds for more than some microseconds who has a CPU.
const LOCK_LOOKS: u32 = 50;
/// A few faults' time.
const GIVE_WAY: Duration = Duration::from_micros(50);
/// Looks in a row, as far apart, that find a message being heard before its hearer counts as kept from its CPU.
const HEARING_LOOKS: u32 = 4;
/// How fast a program can touch memory: 8 GiB/s, as pages per millisecond.
const TOUCH_PAGES_PER_MS: i64 = 2048;
/// Pieces that the keeper hears of before it does anything else.
const HEARD_AT_ONCE: usize = 8;
/// A thread that begins tells so again, so often and so far apart, where many do at once or the keeper has got no CPU for a tenth of a second.
const MOST_TELLINGS: u32 = 20_000;
const TELLING_PAUSE: Duration = Duration::from_millis(1);
/// How often it is looked whether anybody uses the memory still, where nothing tells.
const USERS_INTERVAL_NS: u64 = 20_000_000;
/// The companion's answer to whoever started it; 0 before.
const READY: u32 = 1;
const FAILED: u32 = 2;
/// From the clearing of the exit word to the end of its thread.
const EXIT_PAUSE: Duration = Duration::from_micros(200);
/// How often a thread that waits for the companion looks whether it is still there.
const READY_PAUSE: Duration = Duration::from_millis(20);
/// How often the kernel is asked for the shared part of the memory, which it walks for the answer.
const SHARED_INTERVAL_NS: u64 = 20_000_000;
/// The monitor's priority: it works for some microseconds at a time.
const MONITOR_NICE: i32 = -20;
/// The keeper's shortest and longest sleep.
const SLEEP_MIN: Duration = Duration::from_micros(500);
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// The shortest where all are together: for as long as the keeper is there the scheduler moves the program's thread to another CPU, and
/// all have to follow. What faults page by page grows by 11 MiB meanwhile, at most.
const SLEEP_TOGETHER: Duration = Duration::from_millis(2);
/// The longest while new mappings may need adopting soon, or the process has just changed its size.
const SLEEP_ENGAGED_MAX: Duration = Duration::from_millis(4);

/// A piece that has been in the store for so long is recompressed: what is touched again sooner is not worth it.
const IDLE_NS: u64 = 2_000_000_000;
/// After somebody wanted the CPU, or all pieces have been looked at.
const RECOMPRESS_PAUSE: Duration = Duration::from_millis(100);
/// A recorded process is managed from this size on, 4 MiB: of smaller ones it is known that they were there.
const RECORDED_PAGES: i64 = (4 << 20) / PAGE_BYTES as i64;
/// The longest sleep before that.
const SLEEP_RECORDING_MAX: Duration = Duration::from_millis(2);

/// So many looks in a row at which nothing has changed make a quiet process: it sleeps, or works on what it has. An
/// eighth of a second: on a busy machine a program that is about to grow may wait for a CPU for tens of ms.
const QUIET_LOOKS: u32 = 256;
/// What a quiet process may touch before the keeper looks again, though there is no room for it: 8 MiB and 1/2^6 of
/// the limit, half and a third of what a tree may be over its limit for a moment (16 MiB a process and a
/// twentieth). However many processes wake up at the same time, the machine's memory has one speed.
const QUIET_PAGES: i64 = (8 << 20) / PAGE_BYTES as i64;
const QUIET_SHIFT: u32 = 6;
/// A process that has looked the same so many times is not awake.
const AWAKE_LOOKS: u32 = 4;

/// What the keeper remembers from one look to the next.
#[derive(Default)]
struct Looks {
    /// Pages of the program that are not managed, as far as it has looked for them.
    unmanaged_pages: i64,
    /// The process's pages, the tree's room and the faults served, at the last look.
    seen: (i64, i64, u64),
    /// Looks in a row that saw the same.
    alike: u32,
    /// Looks in a row that saw the same of this process.
    idle: u32,
    /// The folio sizes there might be.
    sizes: SizePolicy,
}

impl Looks {
    fn see(&mut self, seen: (i64, i64, u64)) {
        self.alike = if seen == self.seen { self.alike.saturating_add(1) } else { 0 };
        self.idle = if seen.0 == self.seen.0 { self.idle.saturating_add(1) } else { 0 };
        self.seen = seen;
    }

    fn is_quiet(&self) -> bool {
        self.alike >= QUIET_LOOKS
    }

    /// While nothing is managed: what a program takes that soon ends is to be seen, and an idle one is not to be woken.
    fn longest_sleep(&self) -> Duration {
        SLEEP_ENGAGED_MAX.saturating_mul(1 << self.idle.min(8)).min(SLEEP_MAX)
    }

    /// Reclaimers that have freed nothing are asked again when something has changed, or now and then.
    fn may_free_more(&self) -> bool {
        !self.is_quiet() || self.alike.is_multiple_of(QUIET_LOOKS)
    }
}

/// What exists once the keeper has engaged.
pub(crate) struct Engaged {
    pub(crate) engine: Engine<LinuxMachine>,
}

/// Open files of this process's agent.
struct ProcFiles {
    /// `/proc`: the program may change its root.
    proc: OwnedFd,
    smaps_rollup: OwnedFd,
    statm: OwnedFd,
    /// The program may change its root before anything is managed.
    userfaultfd: Result<OwnedFd, Errno>,
    /// If pieces are recompressed.
    loadavg: Option<OwnedFd>,
}

/// The agent inside one process.
pub struct Runtime {
    pub(crate) settings: Configuration,
    pub(crate) gate: Gate,
    pub(crate) still: Still,
    pub(crate) growth: Growth,
    /// The swap file, while a fork goes on.
    pub(crate) hand_over: HandOver,
    /// `/proc`, while a fork goes on, where the child could not find it.
    pub(crate) proc_over: HandOver,
    /// The userfaultfd device, likewise.
    device_over: HandOver,
    lending: Lending,
    pub(crate) companion: Companion,
    pub(crate) budget: Budget,
    pub(crate) own: OwnMemory,
    pub(crate) engaged: OnceLock<Engaged>,
    files: ForkCell<Option<ProcFiles>>,
    death: DeathNotice,
    /// Bumped to wake the reclaimers.
    reclaim_kick: AtomicU32,
    /// The keeper's hello to whoever started it: 0 not yet, 1 ready, 2 failed.
    ready: AtomicU32,
    /// Where the hooks of a fork run.
    pub(crate) fork_stack: Region,
    stacks: Mutex<Vec<WorkerStack>>,
    stacks_used: AtomicU32,
    keeper_slot: AtomicU32,
    /// What somebody waits to see moved out.
    page_out_parts: Mutex<PageOutParts>,
    page_outs_wanted: AtomicU32,
    page_outs_done: AtomicU32,
    lenders: Lenders,
    said_unlocked: AtomicBool,
    /// The process is the child of a fork.
    is_child: AtomicBool,
    /// It goes on without the agent.
    is_off: AtomicBool,
    /// It may not use userfaultfd, and nor may its children.
    is_unmanageable: AtomicBool,
    /// See [`Runtime::is_filtered`].
    is_filtered: AtomicBool,
    manage_now: AtomicBool,
    /// 1 once everything that was there is adopted.
    managing: AtomicU32,
    /// The program's own.
    nice: AtomicI32,
    pub(crate) placement: Placement,
    copies: Copies,
    control_blocks: ControlBlocks,
    parked: AtomicU32,
    /// Bumped to wake a parked handler.
    unpark: AtomicU32,
    /// When `measure_shared` is to do so again.
    shared_due_ns: AtomicU64,
    pub(crate) tracer: Tracer,
}

/// Where a worker runs, and its thread's id.
#[derive(Debug)]
struct WorkerStack {
    region: Region,
    id: &'static AtomicU32,
}

/// A range that is moved out part by part, by as many reclaimers as there are.
#[derive(Debug)]
struct PageOutParts {
    /// What nobody has taken yet.
    rest: Range<usize>,
    /// Parts that are taken and not finished.
    under_way: u32,
}

impl PageOutParts {
    /// The next part. It ends where no folio lies across.
    fn take(&mut self) -> Option<Range<usize>> {
        if self.rest.is_empty() {
            return None;
        }
        let end = (self.rest.start + 1).next_multiple_of(MAX_ORDER.bytes()).min(self.rest.end);
        self.under_way += 1;
        Some(std::mem::replace(&mut self.rest.start, end)..end)
    }

    /// One part is done; whether that was the last.
    fn finish(&mut self) -> bool {
        self.under_way -= 1;
        self.rest.is_empty() && self.under_way == 0
    }
}

/// What a handler is started with.
struct HandlerStart {
    runtime: &'static Runtime,
    index: usize,
    cpu: usize,
    handlers: u32,
    /// For the first handler of the first process that engages, to measure what an interrupt costs.
    measured: Option<Region>,
}

impl Runtime {
    /// The agent of the calling process, which has claimed `slot`. Starts the keeper and waits until it
    /// is ready. `device` is `/dev/userfaultfd`, if it has been handed over.
    pub fn start(
        control: &'static Control,
        slot: SlotIndex,
        own: OwnMemory,
        device: Option<OwnedFd>,
    ) -> Result<&'static Runtime, RuntimeError> {
        let settings = control.configuration();
        let stack = || {
            let stack =
                Region::reserve(STACK_BYTES).map_err(|errno| RuntimeError::Reserve(STACK_BYTES >> 20, errno))?;
            own.add(stack.start()..stack.start() + stack.len());
            Ok::<_, RuntimeError>(stack)
        };
        let fork_stack = stack()?;
        let stacks = Stacks { companion: stack()?, intermediate: stack()?, guard: stack()? };
        let budget = Budget::new(control, slot);
        let runtime = Box::leak(Box::new(Runtime {
            tracer: Tracer::new(settings.records),
            settings,
            fork_stack,
            gate: Gate::default(),
            still: Still::default(),
            growth: Growth::new(budget.limit_pages()),
            hand_over: HandOver::default(),
            proc_over: HandOver::default(),
            device_over: HandOver::default(),
            lending: Lending::default(),
            companion: Companion::new(stacks),
            budget,
            own,
            engaged: OnceLock::new(),
            files: ForkCell::new(None),
            death: DeathNotice::default(),
            reclaim_kick: AtomicU32::new(0),
            ready: AtomicU32::new(0),
            stacks: Mutex::new(Vec::new()),
            stacks_used: AtomicU32::new(0),
            keeper_slot: AtomicU32::new(slot.get()),
            page_out_parts: Mutex::new(PageOutParts { rest: 0..0, under_way: 0 }),
            page_outs_wanted: AtomicU32::new(0),
            page_outs_done: AtomicU32::new(0),
            lenders: Lenders::default(),
            said_unlocked: AtomicBool::new(false),
            is_child: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
            is_unmanageable: AtomicBool::new(false),
            is_filtered: AtomicBool::new(false),
            manage_now: AtomicBool::new(false),
            managing: AtomicU32::new(0),
            nice: AtomicI32::new(0),
            placement: Placement::default(),
            copies: Copies::default(),
            control_blocks: ControlBlocks::default(),
            parked: AtomicU32::new(0),
            unpark: AtomicU32::new(0),
            shared_due_ns: AtomicU64::new(0),
        }));
        let adopts = rustix::process::child_subreaper().is_ok_and(|adopts| adopts.is_some());
        device.into_iter().for_each(|device| runtime.device_over.give(device));
        let started = runtime.start_companion(if adopts { Adoption::ByProgram } else { Adoption::ByOthers });
        runtime.device_over.finish();
        started?;
        Ok(runtime)
    }

    /// Starts the companion, and waits until its monitor is ready.
    pub(crate) fn start_companion(&'static self, adoption: Adoption) -> Result<(), RuntimeError> {
        self.ready.store(0, Ordering::Relaxed);
        self.stacks_used.store(0, Ordering::Relaxed);
        let argument = std::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the runtime lives as long as the memory; only the thread that starts it, or has forked, is here.
        unsafe { self.companion.start(monitor_entry, argument, adoption) }.map_err(RuntimeError::Companion)?;
        loop {
            match self.ready.load(Ordering::Acquire) {
                READY => return Ok(()),
                FAILED => return Err(RuntimeError::CompanionFailed),
                _ if self.companion.process().is_none() => return Err(RuntimeError::CompanionKilled),
                _ => {}
            }
            let _ = futex::wait(&self.ready, futex::Flags::PRIVATE, 0, Some(&timespec(READY_PAUSE)));
        }
    }

    /// In the child of a fork: starts its companion. If a filter for system calls kills that, it is started without the calls
    /// that do.
    pub(crate) fn start_childs_companion(&'static self) -> Result<(), RuntimeError> {
        match self.start_companion(Adoption::ByOthers) {
            Err(RuntimeError::CompanionKilled) if filters::rehearse(&self.companion) => {
                self.start_companion(Adoption::ByOthers)
            }
            started => started,
        }
    }

    /// The companion says whether it can work.
    fn be_ready(&self, state: u32) {
        self.ready.store(state, Ordering::Release);
        let _ = futex::wake(&self.ready, futex::Flags::PRIVATE, 1);
    }

    /// The companion cannot work: a program that has just been started is not to go on, a child of a fork is.
    fn explain(&self, error: &RuntimeError) {
        let (control, process) = (self.budget.control(), self.companion.program().as_raw_nonzero());
        if self.is_child.load(Ordering::Relaxed) {
            control.notice(format_args!("process {process} cannot have a companion: {error}"));
        } else {
            control.fail(format_args!("{error}"));
        }
    }

    /// In the child of a fork, which has no companion: brings all its memory back, and goes on without the agent and without
    /// the limit.
    pub(crate) fn go_on_alone(&self, error: &RuntimeError) {
        let (control, process) = (self.budget.control(), rustix::process::getpid());
        if let Some(engaged) = self.engaged.get() {
            let machine = engaged.engine.machine();
            if engaged.engine.file_slots() > 0 && self.hand_over.descriptor().is_none() {
                self.fail_in_program(&RuntimeError::SwapFile(Errno::NOENT));
            }
            // SAFETY: the companion has ended, and only this thread has come along in the fork.
            unsafe { machine.detach(self.hand_over.descriptor()) };
            // SAFETY: what has been handed over is open until the end of the fork.
            let handed = self.proc_over.descriptor().map(|proc| unsafe { BorrowedFd::borrow_raw(proc) });
            let maps = match handed {
                Some(proc) => open_in(proc, "self/maps"),
                None => open_proc().and_then(|proc| open_in(&proc, "self/maps")),
            };
            if let Ok(maps) = maps {
                self.forget_unmapped(engaged, &maps);
            }
            engaged.engine.bring_all_in(&mut machine.worker(self.settings.codec, self.settings.recompress));
            machine.leave_swap_file();
            machine.give_arena_back();
        }
        control.process(self.budget.slot()).has_ended();
        self.is_off.store(true, Ordering::Release);
        control.notice(format_args!(
            "process {process} goes on without the limit: {error}",
            process = process.as_raw_nonzero()
        ));
    }

    /// Whether the process goes on without the agent.
    pub fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Acquire)
    }

    /// In the child of a fork: the slot the keeper is to use.
    pub(crate) fn set_keeper_slot(&self, slot: SlotIndex) {
        self.is_child.store(true, Ordering::Relaxed);
        self.keeper_slot.store(slot.get(), Ordering::Relaxed);
    }

    /// Memory of the agent's own.
    fn reserve(&self, bytes: usize) -> Result<Region, RuntimeError> {
        let region = Region::reserve(bytes).map_err(|errno| RuntimeError::Reserve(bytes >> 20, errno))?;
        self.own.add(region.start()..region.start() + region.len());
        Ok(region)
    }

    fn spawn(&self, entry: extern "C" fn(*mut u8), argument: *mut u8, cpu: Option<usize>) -> Result<(), RuntimeError> {
        let index = self.stacks_used.fetch_add(1, Ordering::Relaxed) as usize;
        let mut stacks = self.stacks.lock();
        if index == stacks.len() {
            stacks.push(WorkerStack { region: self.reserve(STACK_BYTES)?, id: Box::leak(Box::default()) });
        }
        let WorkerStack { region, id } = &stacks[index];
        let spec = Spec { kind: Kind::Thread, stack: region, cpu, id };
        // SAFETY: the stack lives as long as the memory and belongs to this thread alone: in the child
        // of a fork the parent's threads do not exist, and their stacks are used again from the first on.
        unsafe { thread::spawn(&spec, entry, argument) }.map(|_| ()).map_err(RuntimeError::Thread)
    }

    /// The forking thread, before everything is still: has the companion lend what the child could not open, if it cannot be taken.
    pub(crate) fn ask_for_descriptors(&self) {
        let (Some(companion), Some(files)) = (self.companion.process(), &*self.files) else { return };
        let is_hidden = access("/proc/self/statm", Access::EXISTS).is_err()
            || files.userfaultfd.is_ok() && !hand_over::can_open(uffd::device());
        if !is_hidden && self.budget.control().swap().clusters() == 0 {
            return;
        }
        self.proc_over.take(companion, files.proc.as_raw_fd());
        if self.proc_over.descriptor().is_none() {
            self.lending.ask();
        } else if !is_hidden {
            self.proc_over.finish();
        } else if let Ok(device) = &files.userfaultfd {
            self.device_over.take(companion, device.as_raw_fd());
        }
    }

    /// The monitor, before everything is still: lends the forking thread what it has asked for.
    fn lend_descriptors(&self) {
        let Some(files) = &*self.files else { return };
        let machine = self.engaged.get().map(|engaged| engaged.engine.machine());
        let swap_file = machine.and_then(LinuxMachine::swap_file_descriptor);
        let device = files.userfaultfd.as_ref().ok().map(AsFd::as_fd);
        self.lending.lend(self.companion.program(), [Some(files.proc.as_fd()), device, swap_file]);
    }

    /// The forking thread, on both sides after the fork: closes what was taken along.
    pub(crate) fn finish_descriptors(&self) {
        [&self.proc_over, &self.device_over, &self.hand_over].into_iter().for_each(HandOver::finish);
    }

    /// The forking thread, while everything is still: takes along what the child could not open.
    pub(crate) fn take_descriptors(&self) {
        self.lending.take([&self.proc_over, &self.device_over, &self.hand_over]);
        let Some(companion) = self.companion.process().filter(|_| self.hand_over.descriptor().is_none()) else {
            return;
        };
        let machine = self.engaged.get().map(|engaged| engaged.engine.machine());
        if let Some(file) = machine.and_then(LinuxMachine::swap_file_descriptor) {
            self.hand_over.take(companion, file.as_raw_fd());
        }
    }

    /// Starts to manage now, however far the limit is, and returns when everything there is adopted.
    pub fn manage_now(&self) {
        self.manage_now.store(true, Ordering::Relaxed);
        while self.managing.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&self.managing, futex::Flags::PRIVATE, 0, None);
        }
    }

    /// Has what is managed in `range` moved out by the reclaimers (MADV_PAGEOUT), and waits for it. One thread at
    /// a time may call. (The callers' own descriptors are not those of the agent.)
    pub fn page_out(&self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        self.page_out_parts.lock().rest = range;
        self.page_outs_wanted.fetch_add(1, Ordering::Relaxed);
        self.wake_reclaimers();
        let wanted = self.page_outs_wanted.load(Ordering::Relaxed);
        loop {
            let done = self.page_outs_done.load(Ordering::Acquire);
            if done == wanted {
                return;
            }
            let _ = futex::wait(&self.page_outs_done, futex::Flags::PRIVATE, done, None);
        }
    }

    /// The program has said something about a mapping, and the kernel has heard it. For any thread, in any state.
    pub fn advised(&self, range: Range<usize>, advice: Advice) {
        if let Some(engaged) = self.engaged.get() {
            engaged.engine.machine().advices().tell(range, advice);
        }
    }

    /// The program has got `range`, which it may touch at once. If that is much, together with what it got before, and there may be
    /// no room for it, returns when it is managed. For any thread, in any state.
    pub fn grows(&self, range: Range<usize>) {
        if !self.may_tell() {
            return;
        }
        self.growth.wait_while_held();
        // Where nothing compresses, there will be no room however long a thread waits.
        let is_futile = self.engaged.get().is_some_and(|engaged| engaged.engine.reclaim_is_futile());
        if !is_futile && self.lacks_room(range.len()) && !self.growth.may_pass(&range) {
            self.growth.tell(What::Got, range, || self.still.wake_keeper());
        }
    }

    /// The kernel has refused something that concerns the mapping at `range` as a whole: returns when reserves there are as they
    /// were without us, and all of it is managed if some is. Whether the keeper has looked.
    pub fn is_made_whole(&self, range: Range<usize>) -> bool {
        self.may_tell() && self.growth.tell(What::Whole, range, || self.still.wake_keeper())
    }

    /// The calling thread begins: returns when its control block stays in the program, if anything may go out.
    pub fn thread_begins(&self) {
        if self.engaged.get().is_none() || !self.budget.is_armed() {
            return;
        }
        // Who waits for this thread would wait for ever, so a filter for system calls is no reason not to tell: one under which threads are made
        // allows the calls of a wait, which is all there is here.
        let begun = What::Begun(control_block::own_thread());
        let is_told = || self.growth.tell(begun, control_block::own(), || self.still.wake_keeper());
        for _ in 0..MOST_TELLINGS {
            if is_told() {
                // It may have gone out before.
                return control_block::touch_own();
            }
            let _ = futex::wait(&AtomicU32::new(0), futex::Flags::PRIVATE, 0, Some(&clock::timespec(TELLING_PAUSE)));
        }
    }

    /// Whether threads of the program may tell the keeper something, and wait for it: one that filters its calls may forbid those of
    /// a wait.
    fn may_tell(&self) -> bool {
        self.budget.is_armed() && !self.is_filtered.load(Ordering::Relaxed)
    }

    /// Whether [`grows`](Self::grows) is to be told of what ends at `end`, however small it is.
    #[inline]
    pub fn is_watched(&self, end: usize) -> bool {
        self.growth.is_watched(end)
    }

    /// Whether there may soon be no room if the program takes so many `bytes`.
    fn lacks_room(&self, bytes: usize) -> bool {
        self.budget.room_pages() - (bytes.div_ceil(PAGE_BYTES) as i64) < self.engage_pages()
    }

    /// Whether so many `bytes` are more than the limit.
    pub fn exceeds_limit(&self, bytes: usize) -> bool {
        bytes.div_ceil(PAGE_BYTES) as i64 > self.budget.limit_pages()
    }

    /// The same, for any thread, in any state.
    pub fn is_short_of_room(&self, bytes: usize) -> bool {
        self.budget.is_armed() && self.lacks_room(bytes)
    }

    /// The program lets a filter decide which system calls its threads may make: they make none of ours any more.
    pub fn is_filtered(&self) {
        self.is_filtered.store(true, Ordering::Relaxed);
    }

    /// The program wants all of its memory locked, which is not done: says so once in a process.
    pub fn wants_all_locked(&self) {
        if !self.said_unlocked.swap(true, Ordering::Relaxed) {
            let control = self.budget.control();
            control.notice(format_args!(
                "the program asks for all its memory to be locked (mlockall): the limit is kept instead"
            ));
        }
    }

    /// The program hands pages to the kernel by reference: from now on no frame is used again in place.
    pub fn pages_escape(&self) {
        self.lenders.found();
    }

    /// The companion stops the program: it may have memory that nobody can give back to it any more.
    pub(crate) fn fail(&self, error: &RuntimeError) -> ! {
        self.budget.control().fail(format_args!("{error}"));
        self.stop_program();
        self.end();
    }

    /// The program's own thread stops it, likewise.
    pub(crate) fn fail_in_program(&self, error: &RuntimeError) -> ! {
        self.budget.control().fail(format_args!("{error}"));
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::hint::spin_loop();
        }
    }

    fn low_pages(&self) -> i64 {
        watermark::low_pages(self.budget.limit_pages())
    }

    fn engage_pages(&self) -> i64 {
        let limit = self.budget.limit_pages();
        (limit >> ENGAGE_SHIFT).max(ENGAGE_MIN_PAGES).min(limit / 2)
    }

    // ---- the keeper ----

    fn monitor(&'static self) -> ! {
        let nice = filters::allow(Call::Getpriority).then(|| rustix::process::getpriority_process(None));
        self.nice.store(nice.and_then(Result::ok).unwrap_or(0), Ordering::Relaxed);
        be_nice(MONITOR_NICE);
        let mut user = match self.prepare_monitor() {
            Ok(user) => user,
            Err(error) => {
                self.explain(&error);
                self.be_ready(FAILED);
                self.end();
            }
        };
        self.be_ready(READY);
        let (mut looks, mut place) = (Looks::default(), Place::here());
        let (mut due_ns, mut users_due_ns) = (0, 0);
        loop {
            place.settle(&self.placement);
            let kicks = self.still.kicks();
            if self.still.is_requested() {
                self.hold_still();
                due_ns = 0;
            }
            if now_ns() >= users_due_ns {
                self.look_for_users(&mut user);
                users_due_ns = now_ns() + USERS_INTERVAL_NS;
            }
            {
                let _inside = self.gate.enter();
                if self.hear_growth() {
                    due_ns = 0;
                }
                if now_ns() >= due_ns {
                    let Some(sleep) = self.tick(&mut looks) else { continue };
                    let sleep = (sleep * self.crowd(&looks)).min(sleep.max(SLEEP_MAX));
                    due_ns = now_ns() + sleep.as_nanos() as u64;
                }
            }
            // Who told while others were heard has woken nobody.
            if self.growth.is_told() {
                continue;
            }
            let until_ns = due_ns.min(users_due_ns);
            let time = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
            if self.companion.doze(self.still.kick(), kicks, time) == Woken::Exit {
                // The program executes another one, or its first thread ends: maybe not at this very moment.
                clock::sleep(EXIT_PAUSE);
                users_due_ns = 0;
            }
        }
    }

    /// How many processes there are for each that can grow at full speed: the others wait for a CPU meanwhile, and so looks may be that
    /// much rarer. One that does not grow may wait for one, too, as all do where keepers leave nothing to anybody else: it is one of all
    /// that there are.
    fn crowd(&self, looks: &Looks) -> u32 {
        let control = self.budget.control();
        let is_awake = looks.idle < AWAKE_LOOKS;
        control.process(self.budget.slot()).awake.store(u32::from(is_awake), Ordering::Relaxed);
        let (awake, all) = control.awake_processes();
        let looking = if is_awake { awake } else { all };
        if looking <= 2 { 1 } else { (looking / (2 * cpu_load::cpus().max(1))).max(1) }
    }

    /// Hears what threads tell and wait for; whether to look around at once.
    fn hear_growth(&'static self) -> bool {
        let mut is_due = false;
        for told in (0..HEARD_AT_ONCE).map_while(|_| self.growth.next()) {
            match told.what {
                What::Got => is_due |= self.hear_got(told),
                What::Whole => {
                    if let Some(engaged) = self.engaged.get() {
                        make_whole(self, engaged, &told.range);
                    }
                    told.answer();
                }
                What::Begun(thread) => {
                    self.keep_control_block(&told.range, thread);
                    told.answer();
                }
            }
        }
        is_due
    }

    /// Looks at what a thread has got and waits to touch. If that may be too much, everything is managed from now on. Whether it
    /// was not before, or is to be looked for elsewhere: the piece is only the last of many.
    fn hear_got(&'static self, told: Told<'_>) -> bool {
        let (range, finds) = (told.range.clone(), told.finds);
        let is_one_of_many = !self.growth.is_much(&range);
        let engages = self.engaged.get().is_none();
        if engages {
            self.budget.sample();
            if !self.lacks_room(range.len()) {
                told.answer();
                return false;
            }
            if !self.can_engage() {
                told.answer();
                return false;
            }
        }
        let Some(engaged) = self.engaged.get() else { unreachable!("it has engaged") };
        if adopt_part(self, engaged, &range, || told.answer()) {
            self.growth.found();
        } else {
            self.growth.found_nothing(&range, finds);
        }
        engages || is_one_of_many
    }

    /// The same of all threads that there are.
    fn keep_control_blocks(&self) {
        let Some(files) = &*self.files else { unreachable!("the monitor opens it first") };
        let path = format_args!("{}/task", self.companion.program_number());
        // Where there is none, the program has just ended.
        let Some(tasks) = memory_users::open_in(&files.proc, path) else { return };
        let Ok(entries) = rustix::fs::Dir::read_from(&tasks) else { return };
        for entry in entries.flatten() {
            // Others are `.` and `..`.
            let number = entry.file_name().to_str().ok().and_then(|name| name.parse().ok());
            let id = number.and_then(|number| memory_users::own_pid_of(&files.proc, number));
            if let Some((id, block)) = id.and_then(|id| Some((id, control_block::of_thread(id)?))) {
                self.keep_control_block(&block, id);
            }
        }
    }

    /// From now on nobody moves the control block of `thread` out, or protects it.
    fn keep_control_block(&self, block: &Range<usize>, thread: Pid) {
        let engine = self.engaged.get().map(|engaged| &engaged.engine);
        // Who is moving something out has looked before.
        let _held = engine.map(|engine| engine.machine().hold_mappings());
        self.control_blocks.keep(block, thread, |thread| test_kill_process(thread) == Err(Errno::SRCH));
        for page in control_block::pages(block) {
            engine.into_iter().for_each(|engine| engine.unprotect(pages(&(page..page + PAGE_BYTES))));
        }
    }

    /// Stops the agent's other threads while a thread of the program forks. What a fork copies must be of one
    /// instant: so every change of mappings that is under way is heard before.
    fn hold_still(&self) {
        let needed = self.still.needed();
        // A follower that starves would keep the gate from closing.
        self.placement.come_apart(APART_WHILE_GROWING_NS);
        if let Some(engaged) = self.engaged.get() {
            // Handlers fetch them. What is not managed by now is not moved out before everything goes on.
            needed.iter().for_each(|&page| engaged.engine.unprotect(pages(&(page..page + PAGE_BYTES))));
            engaged.engine.machine().hold_in_place(&needed, true);
            engaged.engine.machine().hold_unsharing();
        }
        self.gate.close();
        // The child may keep open what the parent closes.
        self.lenders.look();
        let mut faults = Pending::default();
        if let Some(engaged) = self.engaged.get() {
            // What is left of a mapping that grew and was then unmapped in part is found like a new one.
            adopt_mappings(self, engaged);
            drop(self.hear_changes(engaged, &mut faults));
            engaged.engine.drop_all_lost();
            engaged.engine.machine().allow_forks(true);
            engaged.engine.lend_file();
            engaged.engine.machine().share_swap_file();
        }
        self.lend_descriptors();
        let forked = self.still.hold();
        if let Some(engaged) = self.engaged.get() {
            let machine = engaged.engine.machine();
            machine.shared_swap_file(forked);
            machine.allow_forks(false);
            // Threads that wait for faults that were heard raise them again.
            while let Some(fault) = faults.pop() {
                machine.fault_again(fault.page);
            }
            machine.hold_in_place(&needed, false);
            machine.release_unsharing();
        }
        if forked {
            self.forked();
        }
        self.gate.open();
        self.still.finish();
    }

    /// On either side of a fork: what is shared is known for now. (Measuring it costs more than a short child.)
    fn forked(&self) {
        self.budget.forked();
        self.copies.forked();
        self.shared_due_ns.store(now_ns() + SHARED_INTERVAL_NS, Ordering::Relaxed);
    }

    /// In the child of a fork: forgets what the parent has unmapped at the last instant.
    fn forget_unmapped(&self, engaged: &Engaged, maps: &OwnedFd) {
        let ranges = engaged.engine.machine().ranges();
        let mapped = Ranges::default();
        maps::for_each(maps, &mut |mapping| mapped.insert(mapping.start..mapping.end));
        for gone in ranges.snapshot().into_iter().flat_map(|range| mapped.missing(range)) {
            engaged.engine.machine().unmapped(gone.clone());
            engaged.engine.unmapped(pages(&gone));
        }
    }

    /// In the child of a fork: forgets what the kernel has wiped (MADV_WIPEONFORK), wherever it was. The program may have advised
    /// that by an inline system call, so only the kernel knows what it is. What was resident is known to be absent; to ask
    /// about the rest takes about as long as the kernel takes to copy the page tables.
    fn forget_wiped(&self, engaged: &Engaged) -> Result<(), RuntimeError> {
        if engaged.engine.has_content_out() {
            maps::for_each_flagged(&self.open("self/smaps")?, &mut |range, flags| {
                if flags.split(|&byte| byte == b' ').any(|flag| flag == b"wf") {
                    engaged.engine.unmapped(pages(&range));
                }
            });
        }
        Ok(())
    }

    /// Opens what this process's agent needs; in the child of a fork of an engaged parent, takes over
    /// the engine.
    fn prepare_monitor(&'static self) -> Result<User, RuntimeError> {
        // The table is a copy of the program's: none of its descriptors may be kept open here.
        let handed = [&self.hand_over, &self.proc_over, &self.device_over];
        thread::close_descriptors_but(handed.map(HandOver::descriptor));
        // SAFETY: there is one only while whoever has forked waits for this keeper, which takes it once.
        let handed = unsafe { self.proc_over.receive() };
        let proc = handed.map_or_else(open_proc, Ok)?;
        // SAFETY: as above.
        let device = unsafe { self.device_over.receive() };
        let statm = open_in(&proc, "self/statm")?;
        let Some(slot) = SlotIndex::new(self.keeper_slot.load(Ordering::Relaxed)) else { unreachable!("our own slot") };
        let control = self.budget.control();
        self.companion.note_number(Member::Companion, memory_users::own_number(&proc));
        let program = self.companion.program();
        let number = memory_users::number_of_program(&proc, program);
        self.companion.note_program_number(number);
        let user = User::open(&proc, program, number).map_err(|errno| RuntimeError::Proc("PID", errno))?;
        let stat = memory_users::open_in(&proc, format_args!("{number}/stat"));
        if control.is_of(slot, program) {
            if filters::allow(Call::SetRobustList) {
                self.death.leave(&control.process(slot).keeper);
            }
        }
        let files = ProcFiles {
            smaps_rollup: open_in(&proc, "self/smaps_rollup")?,
            statm: open_in(&proc, "self/statm")?,
            userfaultfd: device.map_or_else(uffd::device, Ok),
            loadavg: self.settings.recompress.map(|_| open_in(&proc, "loadavg")).transpose()?,
            proc,
        };
        let table = Table::open(&files.proc, program, number);
        // SAFETY: whoever started this thread waits for its hello; no other thread of the agent exists.
        unsafe {
            self.lenders.arm(table);
            self.files.replace_forgetting(Some(files));
            if self.budget.is_armed() {
                self.budget.arm(slot, statm, program, stat);
                self.control_blocks.forked(self.still.needed(), program);
                self.forked();
            } else {
                self.budget.arm(slot, statm, program, stat);
                self.budget.sample();
            }
        }
        self.tracer.started(&self.budget);
        if let Some(engaged) = self.engaged.get() {
            let descriptors = self.open_descriptors()?;
            if engaged.engine.machine().has_swap_file() {
                self.take_over_swap_file(engaged, &descriptors)?;
            }
            self.forget_unmapped(engaged, &descriptors.maps);
            self.forget_wiped(engaged)?;
            // SAFETY: as above.
            unsafe { engaged.engine.machine().rearm(descriptors)? };
            engaged.engine.mark_all();
            engaged.engine.machine().allow_forks(false);
            self.start_guard()?;
            self.start_workers()?;
        }
        Ok(user)
    }

    /// In the child of a fork: what the parent had in the swap file is the child's, too.
    fn take_over_swap_file(&self, engaged: &Engaged, descriptors: &Descriptors) -> Result<(), RuntimeError> {
        let engine = &engaged.engine;
        engine.borrow_file();
        let is_adopted = engine.machine().adopt_swap_file();
        let is_needed = engine.file_slots() > 0;
        if is_needed && (descriptors.swap_file.is_none() || !is_adopted) {
            return Err(RuntimeError::SwapFile(Errno::NOENT));
        }
        Ok(())
    }

    /// Opens a file under `/proc`, wherever that is by now.
    fn open(&self, path: &'static str) -> Result<OwnedFd, RuntimeError> {
        let Some(files) = &*self.files else { unreachable!("the keeper opens it first") };
        open_in(&files.proc, path)
    }

    fn open_descriptors(&self) -> Result<Descriptors, RuntimeError> {
        let Some(files) = &*self.files else { unreachable!("the monitor opens it first") };
        let control = self.budget.control();
        let mut swap_file = None;
        if control.swap().clusters() > 0 {
            // SAFETY: there is one only while whoever has forked waits for this keeper, which opens it once.
            let handed = unsafe { self.hand_over.receive() };
            match handed.map_or_else(|| control.swap().open(), Ok) {
                Ok(file) => swap_file = Some(file),
                Err(errno) if control.swap().is_news(Event::Open) => {
                    control.notice(format_args!(
                        "a process cannot open the swap file: {}: it goes on without it",
                        Why(errno)
                    ));
                }
                Err(_) => {}
            }
        }
        Ok(Descriptors {
            program: Userfaultfd::open_through(files.userfaultfd.as_ref(), Features { events: true })?,
            pagemap: self.open("self/pagemap")?,
            maps: self.open("self/maps")?,
            memory: self.open("self/mem")?,
            swap_file,
        })
    }

    /// One look around; `None` where there is more to do at once.
    fn tick(&'static self, looks: &mut Looks) -> Option<Duration> {
        self.measure_shared(looks);
        self.budget.sample();
        self.lenders.may_have_lent();
        looks.see((self.budget.own_pages(), self.budget.room_pages(), self.budget.counters().vm.pgfault.get()));
        let Some(engaged) = self.engaged.get() else {
            let room = self.budget.room_pages();
            let is_of_interest = self.tracer.is_on() && self.budget.own_pages() >= RECORDED_PAGES;
            let now = is_of_interest || self.settings.torture || self.manage_now.load(Ordering::Relaxed);
            if now || room < self.engage_pages() {
                if self.can_engage() {
                    return None;
                }
            }
            self.tracer.unmanaged(&self.budget, self.budget.own_pages());
            let most = if self.tracer.is_on() { SLEEP_RECORDING_MAX } else { looks.longest_sleep() };
            return Some(self.sleep_for(room - self.engage_pages(), most));
        };
        let engine = &engaged.engine;
        self.settle_limit(engine);
        self.copies.look(&self.budget, engine);
        if self.placement.cpu().is_some() && is_stuck_hearing(engine.machine()) {
            // The program that a change has just been read of keeps the follower from its CPU, and grows.
            self.placement.come_apart(APART_WHILE_GROWING_NS);
        }
        self.settle_changes(engaged);
        let managed = engine.resident_pages() as i64;
        let unmanaged = self.budget.own_pages() - managed;
        // New memory shows as growth of what nobody manages.
        if unmanaged > looks.unmanaged_pages + watermark::LOW_MIN_PAGES / 4 || self.settings.torture {
            if adopt_mappings(self, engaged) {
                self.growth.found();
            }
            looks.unmanaged_pages = self.budget.own_pages() - engine.resident_pages() as i64;
        }
        looks.unmanaged_pages = looks.unmanaged_pages.min(unmanaged);
        let unmanaged_pages = self.budget.own_pages() - engine.held_pages() as i64;
        self.budget.note_unmanaged(unmanaged_pages);
        self.tracer.unmanaged(&self.budget, unmanaged_pages);
        let sizes = self.budget.control().sizes();
        if std::mem::replace(&mut looks.sizes, sizes) != sizes {
            engine.machine().prepare_for_huge(0..usize::MAX);
        }
        engine.tend();
        Some(self.balance(engine, looks))
    }

    /// What follows from the limit, which may have grown.
    fn settle_limit(&self, engine: &Engine<LinuxMachine>) {
        let limit_pages = self.budget.limit_pages();
        self.growth.limit_is(limit_pages);
        engine.limit_is(watermark::floor_pages(limit_pages), sizing::store_pages(limit_pages));
        self.tracer.limit(&self.budget);
    }

    /// While a fork's other side lives, what is shared changes with every write: it is measured anew.
    fn measure_shared(&self, looks: &Looks) {
        let Some(files) = &*self.files else { return };
        let started = now_ns();
        if !self.budget.shares() || started < self.shared_due_ns.load(Ordering::Relaxed) {
            return;
        }
        let shared = pagemap::shared_anon_pages(&files.smaps_rollup);
        self.budget.set_shared_pages(shared.unwrap_or(0));
        let now = now_ns();
        // Measuring takes longer the more there is: a twentieth of the time at most.
        let pause_ns = (now - started).saturating_mul(20).max(SHARED_INTERVAL_NS);
        let next = now + pause_ns * u64::from(self.crowd(looks));
        self.shared_due_ns.store(next, Ordering::Relaxed);
    }

    /// Gives memory back when the tree needs it, and wakes who frees more.
    fn balance(&self, engine: &Engine<LinuxMachine>, looks: &Looks) -> Duration {
        let low = self.low_pages();
        let room = self.budget.room_pages();
        let free = i64::from(engine.free_frames());
        if room < 0 && free > low {
            engine.shrink(low as u32, (-room) as u32);
        }
        if looks.is_quiet() {
            // As much as reclaim makes free by itself is enough.
            engine.give_back_runs(2 * low as u32);
        }
        if (room + free < low && looks.may_free_more()) || self.settings.torture || engine.awaits_discard() {
            self.wake_reclaimers();
        }
        let unnoticed = if looks.is_quiet() { QUIET_PAGES + (self.budget.limit_pages() >> QUIET_SHIFT) } else { 0 };
        let sleep = self.sleep_for((room + free - low).max(unnoticed), SLEEP_ENGAGED_MAX);
        if self.placement.cpu().is_some() { sleep.max(SLEEP_TOGETHER) } else { sleep }
    }

    /// How long a program needs at least to touch `pages`.
    fn sleep_for(&self, pages: i64, most: Duration) -> Duration {
        let micros = (pages.max(0) * 1000 / TOUCH_PAGES_PER_MS) as u64;
        Duration::from_micros(micros).clamp(SLEEP_MIN, most)
    }

    /// Starts to manage; false where this process may not use userfaultfd, though the supervisor may: a sandbox hides the device
    /// or forbids the call. Nothing is swapped out yet, so the program goes on, which is said once.
    fn can_engage(&'static self) -> bool {
        if self.is_unmanageable.load(Ordering::Relaxed) {
            return false;
        }
        match self.engage() {
            Ok(()) => return true,
            Err(error @ RuntimeError::Userfaultfd(_)) if self.engaged.get().is_none() && !self.settings.hard => {
                let process = self.companion.program().as_raw_nonzero();
                self.budget.control().notice(format_args!("process {process} goes on without the limit: {error}"));
            }
            Err(error) => self.fail(&error),
        }
        self.is_unmanageable.store(true, Ordering::Relaxed);
        self.managing.store(1, Ordering::Release);
        let _ = futex::wake(&self.managing, futex::Flags::PRIVATE, i32::MAX as u32);
        false
    }

    /// Starts to manage.
    fn engage(&'static self) -> Result<(), RuntimeError> {
        let _held = self.growth.hold();
        let most_pages = (self.settings.limit.most_bytes() / PAGE_BYTES as u64) as i64;
        let [wanted_bytes, needed_bytes] = sizing::arena_bytes(most_pages);
        // Address space may be limited, or charged as memory (vm.overcommit_memory=2).
        let arena = Region::reserve_uncounted(wanted_bytes)
            .or_else(|_| Region::reserve_uncounted(needed_bytes))
            .map_err(|errno| RuntimeError::Reserve(needed_bytes >> 20, errno))?;
        let arena_bytes = arena.len();
        self.own.add(arena.start()..arena.start() + arena.len());
        let machine = LinuxMachine::new(
            arena,
            self.open_descriptors()?,
            &self.budget,
            &self.lenders,
            &self.control_blocks,
            &self.tracer,
        )?;
        let limit_pages = self.budget.limit_pages();
        let file_slots =
            if machine.has_swap_file() { self.budget.control().swap().clusters() * CLUSTER_SLOTS } else { 0 };
        let discard = self.budget.control().swap().discard();
        let backing = BackingConfig { slots: file_slots, discard, store_pages: sizing::store_pages(limit_pages) };
        let config = EngineConfig {
            granule: self.settings.granule,
            arena_frames: (arena_bytes / PAGE_BYTES) as u32,
            swap_slots: sizing::swap_slots(most_pages, file_slots),
            strategy: Default::default(),
            swap_in: Default::default(),
            no_room: Default::default(),
            whole_out: OrderSet::ALL,
            keep_copies: true,
            make_ahead: !self.tracer.is_on(),
            compaction: Default::default(),
            floor_pages: watermark::floor_pages(limit_pages),
            backing: (file_slots > 0).then_some(backing),
            recompress_idle_ns: self.settings.recompress.map(|_| if self.settings.torture { 0 } else { IDLE_NS }),
            cpus: handler_cpus().last().map_or(1, |&cpu| cpu as u16 + 1),
        };
        let engaged = Engaged { engine: Engine::new(machine, config) };
        if self.engaged.set(engaged).is_err() {
            unreachable!("only the keeper engages");
        }
        // From here on something may be swapped out.
        self.start_guard()?;
        // Those that begin from now on tell that.
        self.keep_control_blocks();
        self.start_workers()?;
        if let Some(engaged) = self.engaged.get() {
            // From now on what the program says about its mappings is heard; what it has said before is looked up.
            let advices = engaged.engine.machine().advices();
            maps::for_each_advised(&self.open("self/smaps")?, &mut |range, advice| advices.found(range, advice));
            adopt_mappings(self, engaged);
        }
        self.managing.store(1, Ordering::Release);
        let _ = futex::wake(&self.managing, futex::Flags::PRIVATE, i32::MAX as u32);
        Ok(())
    }

    // ---- the end ----

    /// Ends the companion if nobody uses the memory any more, and the program if its supervisor was killed.
    fn look_for_users(&'static self, user: &mut User) {
        let Some(files) = &*self.files else { return };
        if !user.remains(&files.statm) {
            match memory_users::find(&files.proc, &files.statm, user, &self.companion.numbers()) {
                Some(other) => *user = other,
                None => self.end(),
            }
            // It has been cleared, and tells nothing more.
            self.companion.forget_exit_word();
        }
        if self.budget.control().must_end() {
            self.stop_program();
            self.end();
        }
        if self.engaged.get().is_some() && self.companion.guard().is_none() {
            // Somebody has killed it. Another one is tried at the next look where there can be none now.
            let _ = self.start_guard();
        }
    }

    /// Kills all that use the memory, and waits for their end: what they read after the companion's would be zeros.
    fn stop_program(&self) {
        let Some(files) = &*self.files else { return };
        let Ok(mut user) = User::open(&files.proc, self.companion.program(), self.companion.program_number()) else {
            return;
        };
        loop {
            user.kill();
            match memory_users::find(&files.proc, &files.statm, &user, &self.companion.numbers()) {
                Some(other) => user = other,
                None => return,
            }
        }
    }

    /// Ends the companion and its guard. Nobody else uses the memory.
    fn end(&self) -> ! {
        self.companion.is_ending();
        // Nobody uses the swap file from here on, so what it holds there can be given up.
        self.gate.close();
        if let Some(engaged) = self.engaged.get() {
            engaged.engine.machine().leave_swap_file();
        }
        self.companion.end_guard();
        // Whoever waits for the end may unmount what the swap file is on; to give the memory back takes longer.
        thread::close_descriptors_but([]);
        let control = self.budget.control();
        if control.is_of(self.budget.slot(), self.companion.program()) {
            control.process(self.budget.slot()).has_ended();
        }
        thread::exit_process(0)
    }

    fn start_guard(&'static self) -> Result<(), RuntimeError> {
        let argument = std::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the runtime lives as long as the memory; only the monitor starts the guard, where there is none.
        unsafe { self.companion.start_guard(guard_entry, argument) }.map_err(RuntimeError::Companion)
    }

    /// The guard: waits until the companion ends. If that was killed, the program must not go on: its swapped-out memory is
    /// lost, and would read as zeros when the last userfaultfd is closed.
    fn guard(&self) -> ! {
        if let Some(files) = &*self.files {
            self.companion.note_number(Member::Guard, memory_users::own_number(&files.proc));
        }
        let Some(companion) = self.companion.process() else { self.stop_lost_program() };
        let Ok(pidfd) = pidfd_open(companion, PidfdFlags::empty()) else { self.stop_lost_program() };
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        while !poll(&mut ended, None).is_ok_and(|ready| ready > 0) {}
        if !self.companion.ends_by_itself() {
            self.stop_lost_program();
        }
        thread::exit_process(0)
    }

    fn stop_lost_program(&self) -> ! {
        self.budget.control().fail(format_args!(
            "the companion process of process {} was killed: stopped, because only that can bring back swapped-out memory",
            self.companion.program().as_raw_nonzero()
        ));
        self.stop_program();
        thread::exit_process(0)
    }

    // ---- the reclaimers ----

    /// Frees memory from the low watermark up to twice that, so that faults rarely have to.
    fn reclaim(&'static self) -> ! {
        let Some(engaged) = self.engaged.get() else { unreachable!("reclaimers start after engaging") };
        let engine = &engaged.engine;
        let mut worker = self.recompressing_worker(engaged);
        let mut place = Place::here();
        loop {
            place.settle(&self.placement);
            let kicked = self.reclaim_kick.load(Ordering::Relaxed);
            loop {
                let _inside = self.gate.enter();
                worker.train_if_due();
                let part = self.page_out_parts.lock().take();
                if let Some(part) = part {
                    engine.page_out(&mut worker, pages(&part));
                    if self.page_out_parts.lock().finish() {
                        self.page_outs_done.fetch_add(1, Ordering::Release);
                        let _ = futex::wake(&self.page_outs_done, futex::Flags::PRIVATE, 1);
                    }
                    continue;
                }
                if self.settings.torture {
                    engine.stage_oldest(watermark::BATCH_PAGES * 4);
                } else if self.budget.room_pages() + i64::from(engine.free_frames()) >= 2 * self.low_pages() {
                    break;
                }
                // What the store wastes is had for a copy.
                if engine.compact_wasteful_store() > 0 {
                    continue;
                }
                let freed = if self.settings.torture {
                    engine.reclaim(&mut worker, watermark::BATCH_PAGES)
                } else {
                    match engine.try_reclaim(&mut worker, watermark::BATCH_PAGES) {
                        Attempt::Freed(pages) => pages,
                        Attempt::Nothing | Attempt::Deferred => 0,
                    }
                };
                self.budget.counters().vm.pgsteal_kswapd.add(freed);
                if freed == 0 || self.settings.torture {
                    break;
                }
                self.give_way(engaged);
            }
            // Nobody needs memory.
            while self.reclaim_kick.load(Ordering::Relaxed) == kicked {
                let _inside = self.gate.enter();
                if !engine.discard_one() {
                    break;
                }
            }
            while self.reclaim_kick.load(Ordering::Relaxed) == kicked && self.compact(engine) {}
            let pause = self.recompress(engine, &mut worker, kicked);
            let _ = futex::wait(&self.reclaim_kick, futex::Flags::PRIVATE, kicked, pause.map(timespec).as_ref());
        }
    }

    /// Makes a free run of frames while there is nothing to reclaim; whether there may be more to do.
    fn compact(&self, engine: &Engine<LinuxMachine>) -> bool {
        let _inside = self.gate.enter();
        if self.settings.torture {
            engine.churn(MAX_ORDER);
            return false;
        }
        engine.compact_proactively()
    }

    /// Recompresses idle pieces as long as nobody needs memory or waits for a CPU; returns when to look again.
    fn recompress(&self, engine: &Engine<LinuxMachine>, worker: &mut Worker, kicked: u32) -> Option<Duration> {
        let loadavg = self.files.as_ref()?.loadavg.as_ref()?;
        loop {
            let _inside = self.gate.enter();
            let is_wanted = self.settings.torture || !cpu_load::is_contended(loadavg);
            if !is_wanted || !engine.recompress(worker) || self.reclaim_kick.load(Ordering::Relaxed) != kicked {
                return Some(RECOMPRESS_PAUSE);
            }
        }
    }

    /// Made inside the gate: a fork that copied the heap while it is locked would leave the child without one.
    fn worker(&self, engaged: &Engaged) -> Worker {
        let _inside = self.gate.enter();
        engaged.engine.machine().worker(self.settings.codec, self.settings.recompress)
    }

    /// One that can recompress, too.
    fn recompressing_worker(&self, engaged: &Engaged) -> Worker {
        let mut worker = self.worker(engaged);
        let _inside = self.gate.enter();
        if let Some(codec) = self.settings.recompress {
            engaged.engine.machine().let_recompress(&mut worker, codec);
        }
        worker
    }

    fn wake_reclaimers(&self) {
        self.reclaim_kick.fetch_add(1, Ordering::Relaxed);
        let _ = futex::wake(&self.reclaim_kick, futex::Flags::PRIVATE, MOST_HANDLERS as u32);
    }

    // ---- the handlers ----

    fn start_workers(&'static self) -> Result<(), RuntimeError> {
        // Torture is for everything at once, and never lets a follower have its CPU.
        self.placement.begin(be_nice(MONITOR_NICE) && !self.settings.torture);
        self.parked.store(0, Ordering::Relaxed);
        let cpus = handler_cpus();
        for (index, &cpu) in cpus.iter().enumerate() {
            let measures = index == 0 && cpus[0] != cpus[1] && self.placement.is_unknown();
            let measured = measures.then(|| self.reserve(PAGE_BYTES)).transpose()?;
            let handlers = cpus.len() as u32;
            let start = Box::leak(Box::new(HandlerStart { runtime: self, index, cpu, handlers, measured }));
            self.spawn(handler_entry, std::ptr::from_mut(start).cast(), Some(cpu))?;
        }
        let reclaimers = match self.settings.reclaimers {
            0 => cpus.len().div_ceil(CPUS_PER_RECLAIMER),
            some => some as usize,
        };
        for _ in 0..reclaimers {
            self.spawn(reclaimer_entry, std::ptr::from_ref(self).cast_mut().cast(), None)?;
        }
        Ok(())
    }

    /// In a new thread: it is as urgent as the program, not as the keeper, who has made it and must not wait for a CPU meanwhile.
    fn be_as_urgent_as_the_program(&self) {
        be_nice(self.nice.load(Ordering::Relaxed));
    }

    fn handle(&'static self, start: &HandlerStart) -> ! {
        let Some(engaged) = self.engaged.get() else { unreachable!("handlers start after engaging") };
        let mut worker = self.worker(engaged);
        let uffd = &engaged.engine.machine().descriptors().program;
        match &start.measured {
            Some(page) => self.placement.measure(page),
            None if start.index == 1 && self.placement.is_unknown() => self.placement.be_busy(),
            None => {}
        }
        let follows = start.index == 0 && self.placement.pays();
        let mut follower = follows.then(|| Follower::new(start.cpu as u32));
        let mut standby = Standby::default();
        let mut lost = 0;
        loop {
            if follower.is_none() && self.placement.cpu().is_some() {
                self.park(start.handlers);
                if !standby.sees_it_stuck(&self.placement, now_ns(), || uffd.has_message()) {
                    continue;
                }
                self.placement.come_apart(APART_AFTER_STARVING_NS);
            }
            if uffd.wait(None).is_err() {
                continue;
            }
            let mut served = 0;
            {
                let _inside = self.gate.enter();
                let mut pending = Pending::default();
                while let Some(fault) = self.hear(engaged) {
                    served += 1;
                    if let Some(follower) = &mut follower {
                        follower.follow(&self.placement);
                    }
                    self.serve(engaged, &mut worker, fault, &mut pending);
                    while let Some(fault) = pending.pop() {
                        self.serve(engaged, &mut worker, fault, &mut pending);
                    }
                    if let Some(follower) = &follower {
                        follower.has_served(&self.placement);
                    }
                }
            }
            lost = if served == 0 { lost + 1 } else { 0 };
            if lost == LOST_RACES {
                self.park(start.handlers);
                lost = 0;
            }
        }
    }

    /// Lets a follower that a reclaimer keeps from its CPU serve the faults that wait.
    fn give_way(&self, engaged: &Engaged) {
        if self.placement.cpu().is_some() && engaged.engine.machine().descriptors().program.has_message() {
            clock::sleep(GIVE_WAY);
        }
    }

    /// Sleeps without listening, if another handler still listens.
    fn park(&self, handlers: u32) {
        if self.parked.fetch_add(1, Ordering::Relaxed) + 1 < handlers {
            let time = timespec(PARK);
            let unpark = self.unpark.load(Ordering::Relaxed);
            let _ = futex::wait(&self.unpark, futex::Flags::PRIVATE, unpark, Some(&time));
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }

    /// Hears messages until one is a fault; applies what changes mappings on the way. `None` when there
    /// is nothing to hear.
    fn hear(&self, engaged: &Engaged) -> Option<Fault> {
        let machine = engaged.engine.machine();
        let uffd = &machine.descriptors().program;
        let mut changes = machine.hold_mappings();
        loop {
            let fault = match uffd.read_message() {
                Ok(Some(Message::Change(change))) => {
                    changes.hear(change, machine.registered(), |change| self.apply(engaged, change));
                    continue;
                }
                Ok(Some(Message::Fault { address, protected, thread })) => {
                    self.placement.heard(thread);
                    Some(Fault { page: page(address), is_protected: protected })
                }
                Ok(None) | Err(_) => None,
            };
            if (!changes.is_settled() || machine.has_unknown_growth()) && !uffd.mapping_is_changing() {
                changes.settle(|change| self.apply(engaged, change));
                machine.learn_growth();
            }
            return fault;
        }
    }

    /// A change that was heard while others were under way waits for the next message. Where none comes, nothing can be moved
    /// until somebody looks again.
    fn settle_changes(&self, engaged: &Engaged) {
        let machine = engaged.engine.machine();
        if machine.steady().is_some() {
            return;
        }
        while let Some(fault) = self.hear(engaged) {
            machine.fault_again(fault.page);
        }
    }

    /// Waits until no change of mappings is under way that has not been heard, and hears all that were;
    /// `pending` keeps the faults that came with them. The returned guard keeps others from hearing.
    pub(crate) fn hear_changes<'a>(
        &self,
        engaged: &'a Engaged,
        pending: &mut Pending,
    ) -> RwLockWriteGuard<'a, Changes> {
        let (mut looks, mut _held) = (0, None);
        loop {
            while let Some(fault) = self.hear(engaged) {
                pending.push(fault);
            }
            let hearing = engaged.engine.machine().hold_mappings();
            if hearing.is_applied() && !engaged.engine.machine().descriptors().program.mapping_is_changing() {
                return hearing;
            }
            drop(hearing);
            looks += 1;
            if looks < LOCK_LOOKS {
                std::thread::yield_now();
            } else {
                // Of many threads one is always at it, or who is at it gets no CPU beside us.
                _held = _held.or_else(|| Some(self.growth.hold()));
                clock::sleep(GIVE_WAY);
            }
        }
    }

    /// Fetches what the program will touch next, until it waits for something else; folios of which order, if any.
    fn read_ahead(&self, engaged: &Engaged, worker: &mut Worker, page: PageNumber) -> Option<Order> {
        let uffd = &engaged.engine.machine().descriptors().program;
        let (mut chunks, mut fetched) = (0, None);
        while let Some((ahead, order)) = engaged.engine.claim_ahead(page) {
            // Before: as others may fetch what comes behind it, it is told of in order.
            self.tracer.comes_ahead(&self.budget, &ahead, (chunks == 0).then(|| page.head(order).folio(order)));
            if !engaged.engine.read_ahead(worker, ahead, order) {
                break;
            }
            fetched = Some(order);
            if uffd.has_message() {
                break;
            }
            chunks += 1;
            if chunks == 1 && self.parked.load(Ordering::Relaxed) > 0 && self.placement.cpu().is_none() {
                // Meanwhile somebody else must listen.
                self.unpark.fetch_add(1, Ordering::Relaxed);
                let _ = futex::wake(&self.unpark, futex::Flags::PRIVATE, 1);
            }
        }
        fetched
    }

    /// The program writes to a page that a fork may have left shared, and waits for room for the copy.
    fn serve_copy(&self, engaged: &Engaged, worker: &mut Worker, page: PageNumber) {
        let machine = engaged.engine.machine();
        let started_ns = now_ns();
        let block = copies::block(machine, page);
        engaged.engine.charge_copies(worker, (block.len() / PAGE_BYTES) as u32);
        engaged.engine.unprotect(pages(&block));
        self.budget.counters().faults(FaultKind::Copy).record(now_ns() - started_ns);
        self.budget.counters().vm.pgfault.inc();
        machine.wake(pages(&block));
    }

    fn serve(&self, engaged: &Engaged, worker: &mut Worker, fault: Fault, pending: &mut Pending) {
        let Fault { page, is_protected } = fault;
        if is_protected {
            return self.serve_copy(engaged, worker, page);
        }
        let started_ns = now_ns();
        let machine = engaged.engine.machine();
        let (kind, waited_for) = loop {
            match engaged.engine.fault_unwoken(worker, page) {
                (Served::Done(kind), waited_for) => break (kind, waited_for),
                (Served::Again, waited_for) => {
                    machine.wake(waited_for);
                    if let Some(other) = self.hear(engaged) {
                        pending.push(other);
                    } else {
                        std::thread::yield_now();
                    }
                }
            }
        };
        if kind == FaultKind::Spurious && machine.ranges().containing(page.address() as usize).is_none() {
            adopt_growth(self, engaged, worker, page);
        }
        let counters = self.budget.counters();
        let took_ns = now_ns() - started_ns;
        counters.faults(kind).record(took_ns);
        counters.vm.pgfault.inc();
        self.tracer.served(&engaged.engine, page, kind);
        if kind == FaultKind::SwapIn {
            counters.vm.pgmajfault.inc();
        }
        // Where the thread that is woken takes the handler's place, it comes last.
        let is_last = self.placement.cpu().is_some();
        if !is_last {
            machine.wake(waited_for.clone());
        }
        let room = self.budget.room_pages() + i64::from(engaged.engine.free_frames());
        if room < self.low_pages() && !engaged.engine.reclaim_is_futile() {
            self.wake_reclaimers();
        }
        if matches!(kind, FaultKind::FirstTouch | FaultKind::SwapIn | FaultKind::Spurious) {
            let fetched = self.read_ahead(engaged, worker, page);
            if fetched.is_some() || kind != FaultKind::Spurious {
                // Reclaimers that compress for it would need the other CPU.
                self.placement.streams(fetched.filter(|_| room >= 2 * self.low_pages()));
            }
        }
        if is_last {
            self.placement.wakes();
            machine.wake(waited_for);
        }
    }

    /// Applies a change of the program's mappings to what is known of them. Called under the lock of the mappings.
    fn apply(&self, engaged: &Engaged, change: Change) {
        let (engine, ranges) = (&engaged.engine, engaged.engine.machine().ranges());
        // What was said before the change is about what was there then.
        engine.machine().advices().hear(ranges);
        self.tracer.tell(&self.budget, || match &change {
            Change::Discard(range) => TraceEvent::Discard(pages(range)),
            Change::Unmap(range) => TraceEvent::Unmap(pages(range)),
            Change::Remap { from, to } => TraceEvent::Remap(pages(from), page(*to)),
        });
        match change {
            Change::Discard(range) => {
                engine.machine().discarded(range.clone());
                engine.discarded(pages(&range));
            }
            Change::Unmap(range) => {
                self.growth.unmapped(&range);
                engine.machine().unmapped(range.clone());
                engine.unmapped(pages(&range));
            }
            Change::Remap { from, to } => {
                let len = from.len();
                engine.machine().moved(from.clone(), to);
                engine.remapped(page(from.start), page(to), (len / PAGE_BYTES) as u32);
                // The message tells the old length, whatever the new one is.
                engine.machine().may_have_grown(to);
            }
        }
    }
}

/// A thread of the program waits for a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) page: PageNumber,
    /// It is there, and write-protected.
    is_protected: bool,
}

/// Faults that were heard while something else was waited for.
#[derive(Default)]
pub(crate) struct Pending(Vec<Fault>);

impl Pending {
    fn push(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(crate) fn pop(&mut self) -> Option<Fault> {
        self.0.pop()
    }
}

/// Whether whoever hears a message has done so for a while. (Who looks sleeps meanwhile: where a thread is that may run, however
/// briefly, the scheduler puts none that wakes up.)
fn is_stuck_hearing(machine: &LinuxMachine) -> bool {
    machine.is_being_heard()
        && (0..HEARING_LOOKS).all(|_| {
            clock::sleep(GIVE_WAY);
            machine.is_being_heard()
        })
}

fn open_proc() -> Result<OwnedFd, RuntimeError> {
    rustix::fs::open("/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| RuntimeError::Proc("", errno))
}

fn open_in(proc: impl AsFd, path: &'static str) -> Result<OwnedFd, RuntimeError> {
    rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| RuntimeError::Proc(path, errno))
}

/// The CPUs handlers run on. Two at least, on one CPU if need be: one may have to hear what the other
/// waits for.
fn handler_cpus() -> Vec<usize> {
    let allowed = cpu_load::allowed_cpus();
    let mut cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(MOST_HANDLERS).collect();
    if cpus.len() < 2 {
        cpus.extend(cpus.first().copied().or(Some(0)));
    }
    cpus
}

extern "C" fn monitor_entry(argument: *mut u8) {
    // SAFETY: `start_companion` passes the runtime, which lives as long as the memory.
    let runtime: &'static Runtime = unsafe { &*argument.cast::<Runtime>() };
    // Not the program's session, terminal or directory. Where a filter forbids a call, it goes on as it is.
    filters::answer_filters();
    if filters::allow(Call::Setsid) {
        let _ = rustix::process::setsid();
    }
    if filters::allow(Call::Chdir) {
        let _ = rustix::process::chdir(c"/");
    }
    be_called(c"foliomem");
    runtime.monitor();
}

extern "C" fn guard_entry(argument: *mut u8) {
    // SAFETY: `start_guard` passes the runtime, which lives as long as the memory.
    let runtime: &'static Runtime = unsafe { &*argument.cast::<Runtime>() };
    be_called(c"foliomem-guard");
    runtime.guard();
}

fn be_called(name: &CStr) {
    if filters::allow(Call::SetName) {
        let _ = rustix::thread::set_name(name);
    }
}

extern "C" fn reclaimer_entry(argument: *mut u8) {
    // SAFETY: `start_workers` passes the runtime, which lives as long as the process.
    let runtime: &'static Runtime = unsafe { &*argument.cast::<Runtime>() };
    runtime.be_as_urgent_as_the_program();
    runtime.reclaim();
}

/// Sets the caller's priority; whether it may. On a busy machine a program grows by a hundred MiB while the keeper waits for
/// a CPU; where it may not be preferred, it waits.
fn be_nice(nice: i32) -> bool {
    filters::allow(Call::Setpriority) && rustix::process::setpriority_process(None, nice).is_ok()
}

extern "C" fn handler_entry(argument: *mut u8) {
    // SAFETY: `start_workers` passes a leaked start.
    let start: &'static HandlerStart = unsafe { &*argument.cast::<HandlerStart>() };
    start.runtime.be_as_urgent_as_the_program();
    start.runtime.handle(start);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_out_is_done_when_its_last_part_is() {
        const BLOCK: usize = MAX_ORDER.bytes();
        let mut parts = PageOutParts { rest: BLOCK - PAGE_BYTES..3 * BLOCK + PAGE_BYTES, under_way: 0 };
        let taken: Vec<_> = std::iter::from_fn(|| parts.take()).collect();
        assert_eq!(
            taken,
            [BLOCK - PAGE_BYTES..BLOCK, BLOCK..2 * BLOCK, 2 * BLOCK..3 * BLOCK, 3 * BLOCK..3 * BLOCK + PAGE_BYTES]
        );
        assert_eq!([(); 4].map(|()| parts.finish()), [false, false, false, true]);
        parts.rest = 0..2 * BLOCK;
        assert!(parts.take().is_some() && !parts.finish(), "there is another part");
        assert!(parts.take().is_some() && parts.finish());
    }
}
