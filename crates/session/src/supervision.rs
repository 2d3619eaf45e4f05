//! Supervision: how the supervisor and the companions learn that the other has ended.
//!
//! The kernel marks a word of the segment when the supervisor ends, and one when a companion ends
//! ([`foliomem_sys::process_exit_notice`]). There is no lock.

use crate::custody::Calls;
use crate::process_table::{SlotIndex, is_running};
use crate::segment::Control;
use foliomem_sys::identity::{self, is_alive};
use foliomem_sys::{pagemap, process_exit_notice};
use rustix::process::Pid;
use std::sync::atomic::Ordering;

impl Control {
    /// Makes the end of the calling thread known to all agents: the kernel then marks a word of the
    /// segment. If the thread ends before [`Control::end_run`], the run is abandoned, so it must
    /// live as long as the supervisor.
    pub fn supervise(&'static self) {
        let notice = Box::leak(Box::<process_exit_notice::ProcessExitNotice>::default());
        notice.leave(&self.header.supervisor, rustix::thread::gettid());
        self.header.pid_namespace.store(own_pid_namespace(), Ordering::Relaxed);
        self.header.custody.attend();
    }

    /// Returns the words by which companions call the custodian.
    pub fn custody(&self) -> &Calls {
        &self.header.custody
    }

    /// Notes that the supervisor has seen the run to its end. Remaining processes go on by
    /// themselves.
    pub fn end_run(&self) {
        // Release pairs with the Acquire in `is_abandoned`.
        self.header.is_over.store(1, Ordering::Release);
    }

    /// Returns whether the supervisor has ended, or has seen the run to its end.
    pub fn has_ended(&self) -> bool {
        // Acquire pairs with the Release in `end_run`.
        process_exit_notice::is_marked(&self.header.supervisor) || self.header.is_over.load(Ordering::Acquire) != 0
    }

    /// Returns whether the processes of the run must end by themselves. They must if the supervisor
    /// was killed, or if it ends the run and does not know their pids, which belong to another pid
    /// namespace.
    pub fn must_end(&self) -> bool {
        self.is_abandoned() || identity::is_nested() && self.header.failure.is_written()
    }

    fn is_abandoned(&self) -> bool {
        // Acquire pairs with the Release in `is_over`.
        process_exit_notice::is_marked(&self.header.supervisor) && self.header.is_over.load(Ordering::Acquire) == 0
    }

    /// Notes that a process of the program is a subreaper, which would adopt companions.
    pub fn note_subreaper(&self) {
        // Relaxed: a fork, or the start of a program, orders it before the next companion.
        self.header.has_subreaper.store(1, Ordering::Relaxed);
    }

    /// Returns whether a process of the program has become a subreaper.
    pub fn has_subreaper(&self) -> bool {
        self.header.has_subreaper.load(Ordering::Relaxed) != 0
    }

    /// Learns whether the calling process is in another pid namespace than the supervisor.
    pub fn learn_pid_namespace(&self) {
        let (theirs, own) = (self.header.pid_namespace.load(Ordering::Relaxed), own_pid_namespace());
        if theirs != 0 && own != 0 && theirs != own {
            identity::set_nested();
        }
    }

    /// Returns whether a program has ended and its companion has not.
    pub fn has_companion_left(&self) -> bool {
        self.living().any(|process| !is_alive(process.pid.load(Ordering::Relaxed)))
    }

    /// Returns a process whose companion was killed, if there is one: nothing keeps its limit any
    /// more.
    pub fn unattended(&self) -> Option<Pid> {
        let is_unattended = |&slot: &SlotIndex| {
            let (process, pid) = (self.process(slot), self.pid(slot));
            let is_marked =
                pid != 0 && !identity::is_of_nested(pid) && process_exit_notice::is_marked(&process.exit_notice);
            // The kernel also marks the word of a companion that ends by itself. Acquire pairs with
            // the Release in `mark_ended`.
            let is_lost = is_marked && process.ended.load(Ordering::Acquire) == 0 && is_running(pid);
            // The supervisor learns of a crash only when it has reaped the companion.
            is_lost && pagemap::process_field(process.companion.load(Ordering::Relaxed), 4) != Some(std::process::id())
        };
        self.slots().find(is_unattended).and_then(|slot| Pid::from_raw(self.pid(slot) as i32))
    }

    /// Notes that an agent has started.
    pub fn hello(&self) {
        self.header.hellos.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of agents that have started.
    pub fn hellos(&self) -> u32 {
        self.header.hellos.load(Ordering::Relaxed)
    }
}

/// Returns the inode of the caller's pid namespace; 0 if /proc does not show it.
fn own_pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}
