//! What filters for system calls of the program do to the companion.
//!
//! A companion that is started in the child of a fork inherits the filters of the forking thread (seccomp(2)). A filter
//! that answers a call with an error, or by SIGSYS, is an error here, too: the companion's handler of SIGSYS turns the
//! second into the first. A filter that kills would kill the companion. If a companion has ended at its start, a
//! *rehearsal* finds out which calls do that: a short-lived process makes each call that the companion can do without,
//! and the companion makes none of those that killed it.
//!
//! No locks: one thread at a time starts a companion.

use crate::companion_process::Companion;
use crate::thread::{self, syscall4};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl::PR_SET_NAME;
use std::arch::global_asm;
use std::sync::atomic::{AtomicU32, Ordering};

/// A call that the companion can do without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Call {
    /// A session of its own.
    Setsid,
    /// A directory of its own.
    Chdir,
    /// A name.
    SetName,
    /// Its own urgency.
    Getpriority,
    /// The same.
    Setpriority,
    /// On which CPUs it may run.
    SchedGetaffinity,
    /// The same.
    SchedSetaffinity,
    /// To run only where nobody else wants to.
    SchedSetscheduler,
    /// That its end is marked.
    SetRobustList,
    /// That the program's end is told.
    PidfdOpen,
    /// To sleep on two words.
    FutexWaitv,
    /// Pages that a fork needs.
    Mlock,
    /// Their release.
    Munlock,
    /// Its own number under `/proc`.
    Readlinkat,
    /// Where the control block of a thread is.
    GetRobustList,
    /// Whether the program has disabled huge pages.
    GetThpDisable,
    /// Whether nobody else uses the memory.
    Unshare,
    /// To sleep for microseconds.
    SetTimerSlack,
}

const ALL: [Call; 18] = [
    Call::Setsid,
    Call::Chdir,
    Call::SetName,
    Call::Getpriority,
    Call::Setpriority,
    Call::SchedGetaffinity,
    Call::SchedSetaffinity,
    Call::SchedSetscheduler,
    Call::SetRobustList,
    Call::PidfdOpen,
    Call::FutexWaitv,
    Call::Mlock,
    Call::Munlock,
    Call::Readlinkat,
    Call::GetRobustList,
    Call::GetThpDisable,
    Call::Unshare,
    Call::SetTimerSlack,
];

/// A bit for each call that kills its caller.
static DEADLY: AtomicU32 = AtomicU32::new(0);
/// The call that the rehearsal makes; as many as there are when it has made all.
static REHEARSED: AtomicU32 = AtomicU32::new(0);

/// Whether the companion may make `call`.
pub fn allow(call: Call) -> bool {
    DEADLY.load(Ordering::Relaxed) & 1 << call as u32 == 0
}

impl Call {
    /// Makes it, in a process that ends right afterwards, with arguments that change nothing of others.
    fn rehearse(self) {
        let name = c"foliomem".as_ptr().expose_provenance();
        let (number, arguments) = match self {
            Call::Setsid => (raw::__NR_setsid, [0; 4]),
            Call::Chdir => (raw::__NR_chdir, [c"/".as_ptr().expose_provenance(), 0, 0, 0]),
            Call::SetName => (raw::__NR_prctl, [PR_SET_NAME as usize, name, 0, 0]),
            Call::Getpriority => (raw::__NR_getpriority, [0; 4]),
            Call::Setpriority => (raw::__NR_setpriority, [0; 4]),
            Call::SchedGetaffinity => (raw::__NR_sched_getaffinity, [0; 4]),
            Call::SchedSetaffinity => (raw::__NR_sched_setaffinity, [0; 4]),
            Call::SchedSetscheduler => (raw::__NR_sched_setscheduler, [0; 4]),
            Call::SetRobustList => (raw::__NR_set_robust_list, [0; 4]),
            Call::PidfdOpen => (raw::__NR_pidfd_open, [0; 4]),
            Call::FutexWaitv => (raw::__NR_futex_waitv, [0; 4]),
            Call::Mlock => (raw::__NR_mlock, [0; 4]),
            Call::Munlock => (raw::__NR_munlock, [0; 4]),
            Call::Readlinkat => (raw::__NR_readlinkat, [0; 4]),
            Call::GetRobustList => (raw::__NR_get_robust_list, [0; 4]),
            Call::SetTimerSlack => (raw::__NR_prctl, [linux_raw_sys::prctl::PR_SET_TIMERSLACK as usize, 1, 0, 0]),
            Call::Unshare => (raw::__NR_unshare, [raw::CLONE_VM as usize, 0, 0, 0]),
            Call::GetThpDisable => (raw::__NR_prctl, [linux_raw_sys::prctl::PR_GET_THP_DISABLE as usize, 0, 0, 0]),
        };
        let [a, b, c, d] = arguments;
        // SAFETY: the calls change this process only, or are refused for their arguments: no null pointer is read.
        unsafe { syscall4(number as usize, a, b, c, d) };
    }
}

/// Finds out which calls kill a process that the calling thread starts; whether there are any.
pub fn rehearse(companion: &'static Companion) -> bool {
    DEADLY.store(0, Ordering::Relaxed);
    REHEARSED.store(0, Ordering::Relaxed);
    loop {
        // SAFETY: the entry takes no argument, and ends its process.
        if unsafe { companion.run_intermediate(rehearsal_entry, std::ptr::null_mut()) }.is_err() {
            return false;
        }
        // Acquire pairs with the Release of the rehearsing process.
        let ended_at = REHEARSED.load(Ordering::Acquire);
        if ended_at as usize >= ALL.len() {
            return DEADLY.load(Ordering::Relaxed) != 0;
        }
        DEADLY.fetch_or(1 << ended_at, Ordering::Relaxed);
        REHEARSED.store(ended_at + 1, Ordering::Relaxed);
    }
}

extern "C" fn rehearsal_entry(_: *mut u8) {
    answer_filters();
    let first = REHEARSED.load(Ordering::Relaxed) as usize;
    for call in &ALL[first..] {
        // Release pairs with the Acquire in `rehearse`.
        REHEARSED.store(*call as u32, Ordering::Release);
        call.rehearse();
    }
    // Release pairs with the Acquire in `rehearse`.
    REHEARSED.store(ALL.len() as u32, Ordering::Release);
    thread::exit_thread();
}

/// The kernel's `struct sigaction`.
#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

global_asm!(
    ".hidden foliomem_companion_sigreturn",
    ".globl foliomem_companion_sigreturn",
    "foliomem_companion_sigreturn:",
    "mov eax, 15",
    "syscall",
    "ud2",
);

unsafe extern "C" {
    fn foliomem_companion_sigreturn();
}

/// Has the calling process, which has signal handlers of its own, take a call that a filter answers by SIGSYS for one that is not
/// there.
pub fn answer_filters() {
    let action = Action {
        handler: on_sigsys as *const () as usize,
        flags: u64::from(raw::SA_SIGINFO | raw::SA_RESTORER),
        restorer: foliomem_companion_sigreturn as *const () as usize,
        mask: 0,
    };
    let (number, address) = (raw::__NR_rt_sigaction as usize, (&raw const action).expose_provenance());
    // SAFETY: reads the action, of 8 bytes of mask. The handler changes nothing but the result of a call.
    unsafe { syscall4(number, raw::SIGSYS as usize, address, 0, size_of::<u64>()) };
}

extern "C" fn on_sigsys(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes the registers of the interrupted thread, which are this handler's own.
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS) };
}
