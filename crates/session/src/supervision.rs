//! What supervisor and companions know of each other's life.
//!
//! The supervisor holds a word that the kernel marks when it ends, and so does each companion
//! ([`foliomem_sys::process_exit_notice`]). There is no lock.

use crate::custody::Calls;
use crate::process_table::SlotIndex;
use crate::segment::Control;
use foliomem_sys::identity::{self, is_alive};
use foliomem_sys::{pagemap, process_exit_notice};
use rustix::process::Pid;
use std::sync::atomic::Ordering;

impl Control {
    /// The supervisor's thread that runs for as long as the supervisor: the run is abandoned if it ends before [`Control::is_over`].
    pub fn supervise(&'static self) {
        let notice = Box::leak(Box::<process_exit_notice::ProcessExitNotice>::default());
        notice.leave(&self.header.supervisor, rustix::thread::gettid());
        self.header.pid_namespace.store(own_pid_namespace(), Ordering::Relaxed);
        self.header.custody.attend();
    }

    /// How companions reach the supervisor's thread that holds their userfaultfds, too.
    pub fn custody(&self) -> &Calls {
        &self.header.custody
    }

    /// The supervisor has seen the run to its end. Processes that are left go on by themselves.
    pub fn is_over(&self) {
        // Release pairs with the Acquire in `is_abandoned`.
        self.header.is_over.store(1, Ordering::Release);
    }

    /// Whether the processes of the run are to end by themselves: the supervisor was killed, or it
    /// ends the run and does not know their pids, which are of another pid namespace.
    pub fn must_end(&self) -> bool {
        self.is_abandoned() || identity::is_nested() && self.header.failure.is_written()
    }

    fn is_abandoned(&self) -> bool {
        // Acquire pairs with the Release in `is_over`.
        process_exit_notice::is_marked(&self.header.supervisor) && self.header.is_over.load(Ordering::Acquire) == 0
    }

    /// Finds out whether the calling process is in another pid namespace than the supervisor.
    pub fn learn_pid_namespace(&self) {
        let (theirs, own) = (self.header.pid_namespace.load(Ordering::Relaxed), own_pid_namespace());
        if theirs != 0 && own != 0 && theirs != own {
            identity::set_nested();
        }
    }

    /// Whether a companion has not ended yet though its program has.
    pub fn has_companion_left(&self) -> bool {
        self.living().any(|process| !is_alive(process.pid.load(Ordering::Relaxed)))
    }

    /// A process whose companion was killed, if there is one: nothing keeps its limit any more.
    pub fn unattended(&self) -> Option<Pid> {
        let is_unattended = |&slot: &SlotIndex| {
            let (process, pid) = (self.process(slot), self.pid(slot));
            let is_marked = pid != 0 && !identity::is_of_nested(pid) && process_exit_notice::is_marked(&process.keeper);
            // The kernel marks the word of a companion that ends by itself, too.
            // Acquire pairs with the Release in `has_ended`.
            let is_lost = is_marked && process.ended.load(Ordering::Acquire) == 0 && is_running(pid);
            // Whether it has crashed is known when the supervisor has taken its status.
            is_lost && pagemap::process_field(process.companion.load(Ordering::Relaxed), 4) != Some(std::process::id())
        };
        self.slots().find(is_unattended).and_then(|slot| Pid::from_raw(self.pid(slot) as i32))
    }

    /// An agent is at work.
    pub fn hello(&self) {
        self.header.hellos.fetch_add(1, Ordering::Relaxed);
    }

    /// How many agents have said hello.
    pub fn hellos(&self) -> u32 {
        self.header.hellos.load(Ordering::Relaxed)
    }
}

/// Whether there is a process of this number that has not ended.
fn is_running(pid: u32) -> bool {
    let state: Option<char> = pagemap::process_field(pid, 3);
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The inode of the caller's pid namespace; 0 where /proc does not show it.
fn own_pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}
