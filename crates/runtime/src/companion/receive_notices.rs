//! The monitor's side of the notices of the program's threads ([`crate::companion::notices`]).
//!
//! Lock order: called inside the gate; takes the lock of the mappings.

use crate::address_space::adopt::{adopt_part, join_mappings};
use crate::address_space::allocation_notice::{Notice, NoticeKind};
use crate::address_space::program_code;
use crate::companion::activate::activate;
use crate::companion::activated::Activated;
use crate::companion::end::cannot_activate;
use crate::companion::memory_users;
use crate::runtime::Runtime;
use foliomem_sys::memory_advice;
use foliomem_sys::thread_control_block;
use foliomem_sys::unseen_calls;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::ops::Range;

/// Maximum number of notices that the monitor receives before it does anything else.
const MAX_NOTICES_AT_ONCE: usize = 8;

/// Receives the notices of waiting threads. Returns whether the monitor must sample at once.
pub(crate) fn receive_notices(runtime: &'static Runtime) -> bool {
    let mut is_due = false;
    for notice in (0..MAX_NOTICES_AT_ONCE).map_while(|_| runtime.notices.allocations.receive()) {
        match notice.what {
            NoticeKind::Allocated => is_due |= receive_allocation(runtime, notice),
            NoticeKind::JoinMappings => {
                if let Some(events) = runtime.mapping_events() {
                    join_mappings(events, &notice.range);
                }
                notice.answer();
            }
            NoticeKind::ThreadStarted(thread) => {
                pin_control_block(runtime, &notice.range, thread);
                // The control block may have been swapped out before it was pinned. The creating
                // thread cannot touch it: the addresses may be unmapped, and a filter may forbid
                // the thread's system calls. So the monitor maps the pages in.
                thread_control_block::pages(&notice.range).into_iter().for_each(memory_advice::map_in_page);
                notice.answer();
            }
            NoticeKind::ObjectsChanged => {
                search_code(runtime);
                notice.answer();
            }
        }
    }
    is_due
}

/// Searches new code, and takes precautions if it can make unseen calls.
pub(crate) fn search_code(runtime: &'static Runtime) {
    let could_before = unseen_calls::can_be_made();
    if program_code::search(&runtime.context, &runtime.activation.searched_code).is_err() {
        unseen_calls::assume();
    }
    if unseen_calls::can_be_made() && !could_before {
        runtime.context.budget.counters().vm.unseen_callers.inc();
    }
    if unseen_calls::can_be_made()
        && let Some(Activated { engine }) = runtime.activation.get()
        && engine.ports().space.begin_to_mark()
    {
        engine.expect_unheard_discards();
        engine.mark_all();
        engine.ports().space.miss_marks();
    }
}

/// Receives the notice that a thread has allocated memory. Activates if there may be no room for
/// it. Returns whether the monitor must look at all mappings at once: the agent has activated, or
/// the range is only the last of many new ones.
fn receive_allocation(runtime: &'static Runtime, notice: Notice<'_>) -> bool {
    let (range, finds) = (notice.range.clone(), notice.finds);
    let is_one_of_many = !runtime.notices.allocations.is_much(&range);
    let is_activating = runtime.activation.activated.get().is_none();
    if is_activating {
        runtime.context.budget.sample();
        let context = &runtime.context;
        if !context.lacks_room(range.len()) || context.is_small() || !runtime.activation.may_try() {
            notice.answer();
            return false;
        }
        if let Err(error) = activate(runtime) {
            cannot_activate(runtime, &error);
            notice.answer();
            return false;
        }
    }
    let Some(events) = runtime.mapping_events() else { unreachable!("it has activated") };
    if adopt_part(events, &range, || notice.answer()) {
        runtime.notices.allocations.note_found();
    } else {
        runtime.notices.allocations.note_futile(&range, finds);
    }
    is_activating || is_one_of_many
}

/// Pins the control blocks of all threads that exist at activation.
pub(crate) fn pin_control_blocks(runtime: &'static Runtime) {
    let Some(files) = &*runtime.context.files else { unreachable!("the monitor opens it first") };
    // The directory does not exist if the program has just ended.
    memory_users::find_id(&files.proc, format_args!("{}/task", runtime.companion.program_number()), |number| {
        let id = memory_users::own_pid_of(&files.proc, number)?;
        pin_control_block(runtime, &thread_control_block::of_thread(id)?, id);
        None::<()>
    });
}

/// Keeps the control block of `thread` resident and unprotected from now on.
fn pin_control_block(runtime: &'static Runtime, block: &Range<usize>, thread: Pid) {
    let activated = runtime.activation.activated.get();
    // A thread that swaps out a page reads the list of control blocks under this lock.
    let _guard = activated.map(|activated| activated.engine.ports().space.hold_mappings());
    runtime.notices.control_blocks.keep(block, thread, |thread| test_kill_process(thread) == Err(Errno::SRCH));
    // A write waits for a handler where this fails.
    let _ = activated.map(|activated| activated.unprotect(&thread_control_block::pages(block)));
}
