//! The end of a companion, and of a program that cannot go on.
//!
//! Lock order: [`end`] closes the gate and keeps it closed; it is not called inside the gate.

use crate::companion::error::RuntimeError;
use crate::companion::guard::start_guard;
use crate::companion::memory_users::{self, Killed, User};
use crate::runtime::Runtime;
use foliomem_session::process_table::ProcessSlot;
use foliomem_sys::{memory_advice, thread};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// The exit code of a process that SIGKILL has ended, as shells show it.
const EXIT_KILLED: u8 = 128 + 9;

/// The companion stops the program, which may have memory that cannot be mapped in any more.
pub(crate) fn fail(runtime: &'static Runtime, error: &RuntimeError) -> ! {
    runtime.context.budget.control().fail(format_args!("{error}"));
    stop_program(runtime);
    leave(runtime, ProcessSlot::mark_ended);
}

/// The companion cannot activate. If the kernel refuses what that needs (the program has become another
/// user, or filters its system calls), the program goes on without the limit: all its memory is there. Else
/// it is stopped.
pub(crate) fn cannot_activate(runtime: &'static Runtime, error: &RuntimeError) -> ! {
    let is_refused = matches!(error, RuntimeError::Userfaultfd(_) | RuntimeError::Proc(_, Errno::ACCESS | Errno::PERM));
    if !is_refused || runtime.activation.activated.get().is_some() || runtime.context.settings.hard {
        fail(runtime, error);
    }
    let process = runtime.companion.program().as_raw_nonzero();
    runtime.context.budget.control().notice(format_args!("process {process} goes on without the limit: {error}"));
    // Release pairs with the Acquire of the hooks.
    runtime.fork.is_off.store(true, Ordering::Release);
    leave(runtime, ProcessSlot::mark_ended);
}

/// A thread of the program stops it, for the same reason.
pub(crate) fn fail_in_program(runtime: &'static Runtime, error: &RuntimeError) -> ! {
    runtime.context.budget.control().fail(format_args!("{error}"));
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    // The first process of a pid namespace ignores that.
    thread::exit_process(EXIT_KILLED)
}

/// Ends the companion if no process uses the memory any more, and the program if the run is to
/// end. Starts a new guard if the guard was killed.
pub(crate) fn look_for_users(runtime: &'static Runtime, user: &mut User) {
    let Some(statm) = runtime.context.budget.statm() else { return };
    if !user.remains(statm) {
        match find_other(runtime, user) {
            Some(other) => *user = other,
            None => end(runtime),
        }
        // It has been cleared, and says nothing more.
        runtime.companion.forget_exit_word();
    }
    if runtime.context.budget.control().must_end() {
        stop_program(runtime);
        end(runtime);
    }
    if runtime.activation.activated.get().is_some() && runtime.companion.guard().is_none() {
        // It was killed. If a new one cannot be started now, the next look tries again.
        let _ = start_guard(runtime);
    }
}

/// Whether a process uses the memory: `user`, or another one. Sizes that change all the time do not
/// say that `user` has left, as they may in [`look_for_users`]: only its end does.
pub(crate) fn is_used(runtime: &'static Runtime, user: &User) -> bool {
    user.lives() || find_other(runtime, user).is_some()
}

/// Another process that uses the memory, where `user` has left.
fn find_other(runtime: &'static Runtime, user: &User) -> Option<User> {
    let (Some(files), Some(statm)) = (&*runtime.context.files, runtime.context.budget.statm()) else {
        unreachable!("the monitor opens them first")
    };
    memory_users::find(&files.proc, statm, user, &runtime.companion.numbers())
}

/// Kills all processes that use the memory, and waits for their end: after the companion's end they
/// would read zeros. From one that does not end, the first process of a pid namespace, takes the
/// memory away.
pub(crate) fn stop_program(runtime: &'static Runtime) {
    let Some(files) = &*runtime.context.files else { return };
    let (program, number) = (runtime.companion.program(), runtime.companion.program_number());
    let Ok(mut user) = User::open(&files.proc, program, number) else { return };
    loop {
        if user.kill() == Killed::Remains {
            return take_memory_away(runtime);
        }
        match find_other(runtime, &user) {
            Some(other) => user = other,
            None => return,
        }
    }
}

/// Makes managed memory inaccessible. A process that a signal does not kill ends with SIGSEGV
/// instead: the kernel delivers that to the first process of a pid namespace, too.
fn take_memory_away(runtime: &'static Runtime) {
    let Some(activated) = runtime.activation.activated.get() else { return };
    for range in activated.engine.machine().ranges().snapshot() {
        // SAFETY: memory of the program, which is to end.
        unsafe { memory_advice::forbid_access(&range) };
    }
}

/// Ends the companion and its guard. No other process uses the memory.
pub(crate) fn end(runtime: &'static Runtime) -> ! {
    give_swap_file_up(runtime);
    leave(runtime, ProcessSlot::mark_ended);
}

/// The same before the program ends, which does nothing but that any more.
pub(crate) fn end_before_program(runtime: &'static Runtime) -> ! {
    give_swap_file_up(runtime);
    leave(runtime, ProcessSlot::mark_companion_ending);
}

/// From here on the swap file is not used, so its slots can be given up.
fn give_swap_file_up(runtime: &'static Runtime) {
    runtime.fork.gate.close();
    if let Some(activated) = runtime.activation.activated.get() {
        activated.engine.machine().leave_swap_file();
    }
}

/// Ends the companion and its guard, in the gate or not, and `tells` the slot of the program. What the companion holds of
/// the swap file is free when it has ended.
fn leave(runtime: &'static Runtime, tells: fn(&ProcessSlot)) -> ! {
    runtime.companion.note_end();
    runtime.companion.end_guard();
    // Whoever waits for the end may unmount what the swap file is on; to give the memory back takes
    // longer.
    thread::close_descriptors_but([]);
    let (control, slot) = (runtime.context.budget.control(), runtime.context.budget.slot());
    if control.is_slot_of(slot, runtime.companion.program()) {
        tells(control.process(slot));
    }
    thread::exit_process(0)
}
