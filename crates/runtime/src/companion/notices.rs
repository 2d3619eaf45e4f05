//! Notices of the program's threads to the monitor: the state, and the program's side.
//!
//! The functions run in threads of the program, in any state: they allocate nothing, take no lock,
//! and wait only on futexes and with a time limit. [`crate::companion::receive_notices`] is the
//! monitor's side. The lock of the control blocks is a leaf.

use crate::address_space::allocation_notice::{AllocationNotices, NoticeKind};
use crate::address_space::lent_pages::Lenders;
use crate::address_space::thread_control_block::ControlBlocks;
use crate::companion::activated::Activated;
use crate::companion::context::Context;
use crate::fork::quiesce::Quiesce;
use foliomem_session::segment::Control;
use foliomem_sys::clock;
use foliomem_sys::interception::fork_call;
use foliomem_sys::thread_control_block;
use foliomem_sys::unseen_calls;
use rustix::process::Pid;
use rustix::thread::futex;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Maximum number of attempts to send a notice, and the pause between them. An attempt fails if
/// many threads send at once, or if the monitor gets no CPU for a tenth of a second.
const MAX_NOTICES: u32 = 20_000;
const NOTICE_PAUSE: Duration = Duration::from_millis(1);

/// The notices of the program's threads, and the state that the monitor derives from them.
pub(crate) struct Notices {
    pub(crate) allocations: AllocationNotices,
    pub(crate) lenders: Lenders,
    pub(crate) control_blocks: ControlBlocks,
    /// Whether a message has said that the program's memory is not locked.
    pub(crate) has_reported_unlocked: AtomicBool,
}

impl Notices {
    /// Creates the state without notices, for a process under a limit of `limit_pages`.
    pub(crate) fn new(limit_pages: i64) -> Notices {
        Notices {
            allocations: AllocationNotices::new(limit_pages),
            lenders: Lenders::default(),
            control_blocks: ControlBlocks::default(),
            has_reported_unlocked: AtomicBool::new(false),
        }
    }

    /// Notes that the program has allocated `range`. Waits until it is managed if there may be no
    /// room for it.
    pub(crate) fn allocated(
        &self,
        context: &Context,
        activated: Option<&Activated>,
        quiesce: &Quiesce,
        range: Range<usize>,
    ) {
        if !self.may_wait(context) {
            return;
        }
        self.allocations.wait_while_paused();
        // If nothing compresses, there will be no room however long a thread waits.
        let is_futile = activated.is_some_and(|activated| activated.engine.reclaim_is_futile());
        if !is_futile && context.lacks_room(range.len()) && !self.allocations.may_pass(&range) {
            self.allocations.notify(NoticeKind::Allocated, range, || quiesce.wake_monitor());
        }
    }

    /// Waits until the monitor has merged the mappings at `range`, because the kernel has refused a
    /// call that concerns the whole mapping. Returns whether the monitor has done so. The call
    /// fails in the program otherwise, so a monitor that gets no CPU for a while is waited for.
    pub(crate) fn join_mappings(&self, context: &Context, quiesce: &Quiesce, range: Range<usize>) -> bool {
        self.may_wait(context) && self.is_received(quiesce, NoticeKind::JoinMappings, range)
    }

    /// Notes that the calling thread starts while memory may be swapped out. Waits until its
    /// control block stays resident.
    ///
    /// The thread waits even under a system call filter: without the notice, a thread that joins it
    /// could hang. A filter that allows new threads allows futexes.
    pub(crate) fn thread_starts(&self, quiesce: &Quiesce) {
        self.keep_resident(quiesce, thread_control_block::own_thread(), thread_control_block::own());
    }

    /// Waits until `words` are resident and stay so until `thread` has ended.
    pub(crate) fn keep_resident(&self, quiesce: &Quiesce, thread: Pid, words: Range<usize>) {
        self.is_received(quiesce, NoticeKind::ThreadStarted(thread), words);
    }

    /// Notes that the loader has loaded or unloaded libraries. Waits until their code is searched.
    pub(crate) fn objects_changed(&self, quiesce: &Quiesce) {
        if !self.is_received(quiesce, NoticeKind::ObjectsChanged, 0..0) {
            unseen_calls::assume();
        }
    }

    /// Sends a notice until the monitor has received it. Returns whether it has.
    fn is_received(&self, quiesce: &Quiesce, what: NoticeKind, range: Range<usize>) -> bool {
        (0..MAX_NOTICES).any(|_| {
            let is_received = self.allocations.notify(what, range.clone(), || quiesce.wake_monitor());
            if !is_received {
                let pause = clock::timespec(NOTICE_PAUSE);
                let _ = futex::wait(&AtomicU32::new(0), futex::Flags::PRIVATE, 0, Some(&pause));
            }
            is_received
        })
    }

    /// Returns whether a thread of the program may send a notice and wait for the answer. A filter
    /// may forbid it to wait.
    fn may_wait(&self, context: &Context) -> bool {
        context.budget.is_armed() && !fork_call::has_filter()
    }

    /// Notes that the program wants to lock all of its memory, which the agent prevents. Warns once
    /// in a process.
    pub(crate) fn note_mlockall(&self, control: &Control) {
        if !self.has_reported_unlocked.swap(true, Ordering::Relaxed) {
            control.notice(format_args!(
                "the program asks for all its memory to be locked (mlockall): the limit is kept instead"
            ));
        }
    }
}
