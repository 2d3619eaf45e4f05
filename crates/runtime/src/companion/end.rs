//! The end of a companion, and of a program that cannot go on.
//!
//! Lock order: [`end`] closes the gate and keeps it closed; it is never called inside the gate.

use crate::companion::error::RuntimeError;
use crate::companion::guard::start_guard;
use crate::companion::memory_users::{self, Killed, User};
use crate::companion::placement::{SEPARATE_AFTER_STARVING_NS, own_thread};
use crate::ports::swap::Swap;
use crate::runtime::Runtime;
use foliomem_session::process_table::ProcessSlot;
use foliomem_sys::cpus::{Urgency, set_urgency};
use foliomem_sys::{memory_advice, thread};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// Exit code of a process that SIGKILL has ended, as shells show it.
const EXIT_KILLED: u8 = 128 + 9;

/// Stops the program and ends the companion: the program may have memory that can no longer be
/// mapped in.
pub(crate) fn fail(runtime: &'static Runtime, error: &RuntimeError) -> ! {
    runtime.context.budget.control().fail(format_args!("{error}"));
    stop_program(runtime);
    leave(runtime, ProcessSlot::mark_ended);
}

/// Handles a failed activation. If the kernel refuses another thread, often because the program has
/// too many, this function returns, and the monitor tries again later.
///
/// Otherwise the companion ends. If the kernel refuses what activation needs (the program has
/// become another user, or filters its system calls), the program goes on without the limit: all
/// its memory is resident. After any other error the program is stopped.
pub(crate) fn cannot_activate(runtime: &'static Runtime, error: &RuntimeError) {
    let (control, process) = (runtime.context.budget.control(), runtime.companion.program().as_raw_nonzero());
    if error.lacks_threads() && runtime.activation.get().is_none() && !runtime.context.settings.hard {
        if runtime.activation.put_off() {
            control.notice(format_args!(
                "process {process} goes on without the limit until the agent can start threads: {error}"
            ));
        }
        return;
    }
    let is_refused = matches!(error, RuntimeError::Userfaultfd(_) | RuntimeError::Proc(_, Errno::ACCESS | Errno::PERM));
    if !is_refused || runtime.activation.activated.get().is_some() || runtime.context.settings.hard {
        fail(runtime, error);
    }
    control.notice(format_args!("process {process} goes on without the limit: {error}"));
    // Release pairs with the Acquire of the hooks.
    runtime.fork.is_off.store(true, Ordering::Release);
    leave(runtime, ProcessSlot::mark_ended);
}

/// Ends the companion as an access to memory that the program has unmapped does: the program has
/// destroyed agent memory. The guard stops the program, and the supervisor says why.
pub(crate) fn crash() -> ! {
    let signal = rustix::process::Signal::SEGV;
    // The agent's threads block all signals.
    thread::restore_signals(!(1 << (signal.as_raw() - 1)));
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
    unreachable!("the kernel delivers the signal before the call returns")
}

/// Stops the program from one of its own threads, because `error` leaves it without its memory.
pub(crate) fn fail_in_program(runtime: &'static Runtime, error: &RuntimeError) -> ! {
    runtime.context.budget.control().fail(format_args!("{error}"));
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The first process of a pid namespace ignores the signal.
    thread::exit_process(EXIT_KILLED)
}

/// Ends the companion if no other process uses the memory, and stops the program if the run must
/// end. Starts a new guard if the guard was killed.
pub(crate) fn check_users(runtime: &'static Runtime, user: &mut User) {
    let Some(statm) = runtime.context.budget.statm() else { return };
    if !user.remains(statm) {
        match find_other(runtime, user) {
            Some(other) => *user = other,
            None => end(runtime, user),
        }
        // The kernel has cleared the exit word. Watching it any longer would notify nothing.
        runtime.companion.forget_exit_word();
    }
    if runtime.context.budget.control().must_end() {
        stop_program(runtime);
        end(runtime, user);
    }
    if runtime.activation.activated.get().is_some() && runtime.companion.guard().is_none() {
        // The guard was killed. If a new one cannot start now, the next call tries again.
        let _ = start_guard(runtime);
    }
}

/// Returns whether a process uses the memory: `user`, or another one. Only the end of `user` counts
/// here: sizes that change all the time cannot show that it executes another program.
pub(crate) fn is_used(runtime: &'static Runtime, user: &User) -> bool {
    user.lives() || find_other(runtime, user).is_some()
}

/// Returns another process that uses the memory, after `user` has left.
fn find_other(runtime: &'static Runtime, user: &User) -> Option<User> {
    let (Some(files), Some(statm)) = (&*runtime.context.files, runtime.context.budget.statm()) else {
        unreachable!("the monitor opens them first")
    };
    memory_users::find(&files.proc, statm, user, runtime.companion.processes())
}

/// Kills all processes that use the memory, and waits for their end: after the companion's end they
/// would read zeros. If one does not end (the first process of a pid namespace), makes the memory
/// inaccessible.
///
/// The guard calls this, too, after a companion that may have held locks: so this waits for none,
/// and does not allocate.
pub(crate) fn stop_program(runtime: &'static Runtime) {
    let Some(files) = &*runtime.context.files else { return };
    let (program, number) = (runtime.companion.program(), runtime.companion.program_number());
    let Ok(mut user) = User::open(&files.proc, program, number) else { return };
    loop {
        if user.kill() == Killed::Remains {
            if forbid_memory(runtime) {
                return;
            }
            continue;
        }
        match find_other(runtime, &user) {
            Some(other) => user = other,
            None => return,
        }
    }
}

/// Makes managed memory inaccessible, and returns whether it could. A process that a signal does
/// not kill then ends with SIGSEGV, which the kernel also delivers to the first process of a pid
/// namespace.
fn forbid_memory(runtime: &'static Runtime) -> bool {
    let Some(activated) = runtime.activation.activated.get() else { return true };
    activated.engine.ports().space.ranges().try_for_each(|range| {
        // SAFETY: the memory belongs to the program, which must end.
        unsafe { memory_advice::forbid_access(range) };
    })
}

/// Ends the companion and its guard, when no other process uses the memory. `last` has used it
/// last.
fn end(runtime: &'static Runtime, last: &User) -> ! {
    release_swap_file(runtime);
    let budget = &runtime.context.budget;
    let has_swapped_out = budget.has_own_slot() && budget.own_slot().swapped_out_bytes() > 0;
    give_memory_back(runtime, &[]);
    if let Some(files) = &*runtime.context.files
        && has_swapped_out
        && last.has_dumped_core(&files.proc)
    {
        budget.control().announce_core_dump(runtime.companion.program());
    }
    leave(runtime, ProcessSlot::mark_ended);
}

/// Ends a companion that could not start. The program goes on with its memory, if it can.
pub(crate) fn end_at_start(runtime: &'static Runtime) -> ! {
    release_swap_file(runtime);
    leave(runtime, ProcessSlot::mark_ended);
}

/// Ends the companion and its guard before the program ends. From now on the program only waits and
/// exits, and accesses none of its memory but `last_pages`.
pub(crate) fn end_before_program(runtime: &'static Runtime, last_pages: &[usize]) -> ! {
    release_swap_file(runtime);
    give_memory_back(runtime, last_pages);
    leave(runtime, ProcessSlot::mark_companion_ending);
}

/// Stops the use of the swap file, and releases its clusters.
fn release_swap_file(runtime: &'static Runtime) {
    runtime.fork.gate.close();
    if let Some(activated) = runtime.activation.activated.get() {
        activated.engine.leave_file();
        activated.engine.ports().swap.iter().for_each(Swap::leave);
    }
}

/// Gives the memory, except the pages `kept`, back to the system before other processes of the run
/// take it: on a busy machine it is some time until the last thread that shares it has ended. The
/// gate is closed, and no process accesses the rest.
fn give_memory_back(runtime: &'static Runtime, kept: &[usize]) {
    let Some(activated) = runtime.activation.activated.get() else { return };
    // Giving the memory back takes milliseconds, and no thread waits for it.
    set_urgency(own_thread(), Urgency::Normal);
    // SAFETY: no process accesses the rest, as the callers have checked. No thread of the agent is
    // inside the gate.
    unsafe { activated.engine.ports().discard_all(kept) };
}

/// Ends the companion and its guard, inside the gate or not. `mark` notes the reason in the
/// program's slot. The companion's clusters of the swap file are free when it has ended.
fn leave(runtime: &'static Runtime, mark: fn(&ProcessSlot)) -> ! {
    runtime.companion.note_end();
    runtime.companion.end_guard();
    // The memory exists until the last thread has ended, and a SCHED_IDLE thread may get no CPU.
    runtime.placement.separate(SEPARATE_AFTER_STARVING_NS);
    // A process that waits for this end may unmount the swap file's file system. Giving the memory
    // back takes longer than closing the descriptors.
    thread::close_descriptors_but([]);
    let (control, slot) = (runtime.context.budget.control(), runtime.context.budget.slot());
    if control.is_slot_of(slot, runtime.companion.program()) {
        mark(control.process(slot));
    }
    thread::exit_process(0)
}
