//! The start of a companion, by the program's first thread or by the child's thread after a fork.
//!
//! The starting thread waits until the monitor answers. It takes no lock; the monitor is the
//! companion's only thread until it has answered. The process itself is made by
//! [`foliomem_sys::companion_process`].

use crate::address_space::lent_pages::Table;
use crate::companion::activated::Activation;
use crate::companion::context::{Context, ProcFiles, open_device_and_memory, open_in, open_proc};
use crate::companion::dormancy::Dormancy;
use crate::companion::end::end_at_start;
use crate::companion::error::RuntimeError;
use crate::companion::held_faults::HeldFaults;
use crate::companion::memory_users::{self, User};
use crate::companion::monitor::{MONITOR_NICE, monitor};
use crate::companion::notices::Notices;
use crate::companion::placement::{Placement, own_thread};
use crate::companion::reclaimer::ReclaimRequests;
use crate::companion::shared_pages::SharedPages;
use crate::companion::workers::{STACK_BYTES, Workers, set_nice};
use crate::fork::child::take_over_engine;
use crate::fork::descriptor_hand_over::DescriptorHandOver;
use crate::fork::state::ForkState;
use crate::runtime::Runtime;
use foliomem_session::budget::BudgetProcess;
use foliomem_session::process_table::SlotIndex;
use foliomem_session::segment::Control;
use foliomem_sync::Mutex;
use foliomem_sys::agent_memory::AgentMemory;
use foliomem_sys::companion_process::{Adoption, Answer, Children, Companion, Stacks};
use foliomem_sys::cpus::{Urgency, set_urgency};
use foliomem_sys::process_exit_notice::ProcessExitNotice;
use foliomem_sys::seccomp::{self, Call};
use foliomem_sys::thread;
use foliomem_sys::thread_control_block;
use rustix::fd::OwnedFd;
use rustix::process::Pid;
use std::ffi::CStr;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

/// Starts the agent of the calling process, which has claimed `slot`: creates its companion, and
/// waits until the companion is ready. `device` is `/dev/userfaultfd`, if the door has given it.
/// Fails if the companion cannot start.
pub fn start(
    control: &'static Control,
    slot: SlotIndex,
    agent_memory: AgentMemory,
    device: Option<OwnedFd>,
) -> Result<&'static Runtime, RuntimeError> {
    thread_control_block::note_layout();
    let context = Context::new(control, slot, agent_memory);
    let fork_stack = context.reserve(STACK_BYTES)?;
    let [companion, intermediate, guard] = [(); 3].map(|()| context.reserve(STACK_BYTES));
    let stacks = Stacks { companion: companion?, intermediate: intermediate?, guard: guard? };
    let runtime = Box::leak(Box::new(Runtime {
        notices: Notices::new(context.budget.limit_pages()),
        context,
        companion: Companion::new(stacks),
        activation: Activation::default(),
        workers: Workers::default(),
        reclaim: ReclaimRequests::default(),
        placement: Placement::default(),
        sharing: SharedPages::default(),
        dormancy: Dormancy::default(),
        held_faults: HeldFaults::default(),
        exit_notice: ProcessExitNotice::default(),
        fork: ForkState::new(fork_stack, slot),
    }));
    // The program may have been executed by one that is a subreaper.
    if rustix::process::child_subreaper().is_ok_and(|adopts| adopts.is_some()) {
        control.note_subreaper();
    }
    device.into_iter().for_each(|device| runtime.fork.device.give(device));
    let started = start_companion(runtime, rustix::process::getpid(), Children::of_caller());
    runtime.fork.device.finish();
    started?;
    Ok(runtime)
}

/// Starts the companion of the calling process, which has the pid `own` and one thread, and waits
/// until its monitor is ready. Fails if the companion cannot start or was killed.
pub(crate) fn start_companion(runtime: &'static Runtime, own: Pid, children: Children) -> Result<(), RuntimeError> {
    let adoption =
        if runtime.context.budget.control().has_subreaper() { Adoption::ByProgram } else { Adoption::ByOthers };
    runtime.companion.expect_answer();
    runtime.workers.reset();
    let argument = std::ptr::from_ref(runtime).cast_mut().cast();
    // SAFETY: the runtime lives as long as the memory. Only the thread that starts the first
    // companion, or the only thread of a forked child, calls this.
    unsafe { runtime.companion.start(own, monitor_entry, argument, adoption, children) }
        .map_err(RuntimeError::Companion)?;
    match runtime.companion.wait_for_answer() {
        Some(Answer::Ready) => Ok(()),
        Some(Answer::Failed) => Err(RuntimeError::CompanionFailed),
        None => Err(RuntimeError::CompanionKilled),
    }
}

extern "C" fn monitor_entry(argument: *mut u8) {
    // SAFETY: `start_companion` passes the runtime, which lives as long as the memory.
    let runtime: &'static Runtime = unsafe { &*argument.cast::<Runtime>() };
    // Leave the program's session, terminal and directory. If a filter forbids a call, the
    // companion goes on without it.
    seccomp::answer_filters();
    if seccomp::allow(Call::Setsid) {
        let _ = rustix::process::setsid();
    }
    if seccomp::allow(Call::Chdir) {
        let _ = rustix::process::chdir(c"/");
    }
    set_name(c"foliomem");
    let nice = seccomp::allow(Call::Getpriority).then(|| rustix::process::getpriority_process(None));
    runtime.workers.program_nice.store(nice.and_then(Result::ok).unwrap_or(0), Ordering::Relaxed);
    become_urgent();
    if seccomp::allow(Call::SetTimerSlack) {
        // The agent sleeps for microseconds. The threads that the monitor creates inherit the
        // value.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    }
    let user = match prepare_monitor(runtime) {
        Ok(user) => user,
        Err(error) => {
            explain(runtime, &error);
            runtime.companion.answer(Answer::Failed);
            end_at_start(runtime);
        }
    };
    runtime.companion.answer(Answer::Ready);
    monitor(runtime, user);
}

/// Gives the monitor a CPU whenever it wakes. A nice value is not enough: the companion has a
/// session of its own, with one share of a CPU for all its threads (`autogroup`). On a busy machine
/// a monitor of nice value -20 waited for up to half a second.
fn become_urgent() {
    set_nice(MONITOR_NICE);
    set_urgency(own_thread(), Urgency::RealTime);
}

/// Sets the name of the calling thread.
pub(crate) fn set_name(name: &CStr) {
    if seccomp::allow(Call::SetName) {
        let _ = rustix::thread::set_name(name);
    }
}

/// Opens the files of this process's agent. In the child of an activated parent, takes over the
/// engine. Fails if a file cannot be opened.
fn prepare_monitor(runtime: &'static Runtime) -> Result<User, RuntimeError> {
    // The descriptor table is a copy of the program's: the companion must not keep its descriptors
    // open.
    thread::close_descriptors_but(runtime.fork.handed_over().map(DescriptorHandOver::descriptor));
    // SAFETY: a descriptor is handed over only while the forking thread waits for this monitor,
    // which takes it once.
    let handed = unsafe { runtime.fork.proc.receive() };
    let proc = handed.map_or_else(open_proc, Ok)?;
    // SAFETY: the same holds for the device.
    let device = unsafe { runtime.fork.device.receive() };
    let statm = open_in(&proc, "self/statm")?;
    let Some(slot) = SlotIndex::new(runtime.fork.slot.load(Ordering::Relaxed)) else { unreachable!("our own slot") };
    let control = runtime.context.budget.control();
    runtime.companion.note_number(memory_users::own_number(&proc));
    let program = runtime.companion.program();
    let number = memory_users::number_of_program(&proc, program);
    runtime.companion.note_program_number(number);
    let user = User::open(&proc, program, number).map_err(|errno| RuntimeError::Proc("PID", errno))?;
    let stat = memory_users::open_in(&proc, format_args!("{number}/stat"));
    // A filter may answer `gettid`, so this uses the id that `clone` has stored.
    let own = runtime.companion.process().filter(|_| seccomp::allow(Call::SetRobustList));
    if let Some(own) = own.filter(|_| control.is_slot_of(slot, program)) {
        control.process(slot).companion.store(own.as_raw_nonzero().get() as u32, Ordering::Relaxed);
        runtime.exit_notice.leave(&control.process(slot).exit_notice, own);
    }
    let (userfaultfd, memory) = open_device_and_memory(device, &proc, control);
    let files = ProcFiles {
        smaps_rollup: open_in(&proc, "self/smaps_rollup")?,
        userfaultfd,
        memory: Mutex::new(memory),
        loadavg: runtime.context.settings.recompress.map(|_| open_in(&proc, "loadavg")).transpose()?,
        proc,
    };
    let table = Table::open(&files.proc, program, number);
    // SAFETY: the starting thread waits for this monitor; no other thread of the agent exists.
    unsafe {
        runtime.notices.lenders.arm(table);
        runtime.context.files.replace_forgetting(Some(files));
        let has_forked = runtime.context.budget.is_armed();
        let process = BudgetProcess { slot, statm: Some(statm), program: Some(program), stat };
        runtime.context.budget.process().replace_forgetting(process);
        if has_forked {
            runtime.notices.control_blocks.forked(runtime.fork.quiesce.needed(), program);
            runtime.sharing.forked(&runtime.context);
        } else {
            runtime.context.budget.sample();
        }
    }
    runtime.context.tracer.started(&runtime.context.budget);
    if runtime.activation.get().is_some() {
        take_over_engine(runtime)?;
    }
    Ok(user)
}

/// Reports that the companion cannot work. A program that has just started must not go on; a child
/// of a fork goes on without the limit. That a process was killed while it started is no failure.
fn explain(runtime: &'static Runtime, error: &RuntimeError) {
    let (control, program) = (runtime.context.budget.control(), runtime.companion.program());
    if memory_users::has_ended(program) {
        return;
    }
    let process = program.as_raw_nonzero();
    if runtime.fork.is_child.load(Ordering::Relaxed) {
        control.notice(format_args!("process {process} cannot have a companion: {error}"));
    } else {
        control.fail(format_args!("{error}"));
    }
}
