//! The orderly end of a process: the companion ends first.
//!
//! A companion shares the program's memory, so the memory lasts until both have ended. The
//! program's parent must not notice. When the parent learns that the process has ended, it may
//! remove its cgroup, write its executable file, unmount a file system that it had mapped, or count
//! the attachments of a shared segment. So a process that ends itself (`exit_group(2)` by the C
//! library) asks its companion to end, and waits. Swapped-out memory is lost then, so no code of
//! the program may run any more: the program has one thread, with all signals blocked.
//!
//! The companion ends by itself, some milliseconds after the program, if a signal ends the program,
//! if the program has several threads, a system call filter or a debugger, or if another process
//! may use the memory.
//!
//! Locks are only tried, never waited for.

use crate::companion::end::end_before_program;
use crate::companion::memory_users::is_traced;
use crate::runtime::Runtime;
use foliomem_sys::clock::now_ns;
use foliomem_sys::interception::{entry, fork_call};
use foliomem_sys::{thread, unseen_calls};

/// Maximum wait for the companion, in nanoseconds: it may get no CPU, or wait for the swap file.
const MAX_WAIT_NS: u64 = 200_000_000;
/// Maximum wait for a companion that another process of the program would adopt otherwise.
const MAX_WAIT_FOR_CHILD_NS: u64 = 2_000_000_000;

/// Asks the companion to end, and waits, in a thread of the program that is about to end the
/// process. Returns early if the companion must end later.
pub(crate) fn take_leave(runtime: &'static Runtime) {
    let has_unknown_calls = fork_call::has_filter() || unseen_calls::can_be_made();
    if runtime.is_off() || has_unknown_calls || entry::has_shared_memory() {
        return;
    }
    // A child of vfork(2) is not the process that the companion serves.
    if rustix::process::getpid() != runtime.companion.program() {
        return;
    }
    thread::block_signals();
    let until_ns = now_ns() + if runtime.companion.is_child() { MAX_WAIT_FOR_CHILD_NS } else { MAX_WAIT_NS };
    if runtime.companion.ask_to_end(|| runtime.fork.quiesce.wake_monitor(), until_ns) {
        runtime.workers.wait_for_end(until_ns);
        runtime.companion.reap_children(until_ns);
    }
}

/// Answers a program that asks the companion to end. The monitor calls this.
pub(crate) fn answer(runtime: &'static Runtime) {
    let files = runtime.context.files.as_ref();
    // A debugger may stop the program at its very end, to look at its memory.
    let is_traced = files.is_some_and(|files| is_traced(&files.proc, runtime.companion.program()));
    if is_traced || !runtime.context.budget.has_one_thread() {
        return runtime.companion.decline_to_end();
    }
    let last_pages = runtime.companion.last_pages();
    if let Some(activated) = runtime.activation.activated.get() {
        // A thread would wait forever for a page that is swapped out when the agent has ended.
        activated.keep_resident(&last_pages);
    }
    // A short-lived program may not have been measured yet.
    let budget = &runtime.context.budget;
    budget.sample();
    budget.control().note_last_size(budget.slot());
    end_before_program(runtime, &last_pages)
}
