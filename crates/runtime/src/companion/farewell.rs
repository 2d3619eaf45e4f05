//! The orderly end of a process: the companion ends first.
//!
//! A companion shares the program's memory, so the memory lasts until both have ended. The program's
//! parent must not notice: when it is told that the process has ended, it may want to remove its
//! control group, write its executable file, unmount what it had mapped, or count the attachments
//! of a shared segment. So a process that ends itself (`exit_group(2)` by the C library) asks its
//! companion to end, and waits. What is swapped out is lost then, so nothing of the program may
//! run any more: the program has one thread, with all signals blocked.
//!
//! The companion ends by itself, some milliseconds after the program, if a signal ends the program,
//! if the program has several threads or a filter for its system calls, or if another process may
//! use the memory.
//!
//! It takes no lock that it would have to wait for.

use crate::companion::end::end_before_program;
use crate::runtime::Runtime;
use foliomem_sys::clock::now_ns;
use foliomem_sys::interception::entry;
use foliomem_sys::{thread, unseen_calls};
use std::sync::atomic::Ordering;

/// The longest wait for the companion: it may get no CPU, or wait for the swap file.
const MAX_WAIT_NS: u64 = 200_000_000;

/// A thread of the program that is about to end the process: returns when the companion has ended,
/// or ends later.
pub(crate) fn take_leave(runtime: &'static Runtime) {
    let makes_unknown_calls = runtime.notices.is_filtered.load(Ordering::Relaxed) || unseen_calls::can_be_made();
    if runtime.is_off() || makes_unknown_calls || entry::has_shared_memory() {
        return;
    }
    // A child of vfork(2) is not the process that the companion serves.
    if rustix::process::getpid() != runtime.companion.program() {
        return;
    }
    thread::block_signals();
    let until_ns = now_ns() + MAX_WAIT_NS;
    if runtime.companion.ask_to_end(|| runtime.fork.quiesce.wake_monitor(), until_ns) {
        runtime.workers.wait_for_end(until_ns);
    }
}

/// The monitor: the program asks the companion to end.
pub(crate) fn answer(runtime: &'static Runtime) {
    if !runtime.context.budget.has_one_thread() {
        return runtime.companion.decline_to_end();
    }
    if let Some(activated) = runtime.activation.activated.get() {
        // A page that is missing when the agent has ended would be waited for, for ever.
        activated.keep_resident(&runtime.companion.last_pages());
    }
    // A short program has not been measured before.
    let budget = &runtime.context.budget;
    budget.sample();
    budget.control().note_last_size(budget.slot());
    end_before_program(runtime)
}
