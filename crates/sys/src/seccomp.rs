//! Effects of the program's system call filters (seccomp(2)) on the companion.
//!
//! A companion that starts in the child of a fork inherits the filters of the forking thread. A
//! filter may answer a call with an error, or with SIGSYS, which the companion's handler turns into
//! an error. A filter that kills would kill the companion. If a companion ended at its start, a
//! *rehearsal* finds the calls that do that: a short-lived process makes each call that the
//! companion can do without. The companion then makes none of the calls that killed it.
//!
//! There is no lock: one thread at a time starts a companion.

use crate::companion_process::{Children, Companion};
use crate::signals::{self, Action};
use crate::thread::{self, syscall4};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl::PR_SET_NAME;
use std::arch::global_asm;
use std::sync::atomic::{AtomicU32, Ordering};

/// A system call that the companion can do without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Call {
    /// setsid(2): begins a session of its own.
    Setsid,
    /// chdir(2): leaves the program's directory.
    Chdir,
    /// prctl(2), `PR_SET_NAME`: sets the name of a thread.
    SetName,
    /// getpriority(2): reads the nice value of a thread.
    Getpriority,
    /// setpriority(2): sets the nice value of a thread.
    Setpriority,
    /// sched_getaffinity(2): reads the CPUs that a thread may use.
    SchedGetaffinity,
    /// sched_setaffinity(2): sets the CPUs that a thread may use.
    SchedSetaffinity,
    /// sched_setscheduler(2): sets the scheduling class of a thread.
    SchedSetscheduler,
    /// set_robust_list(2): registers the words that the kernel marks when a thread ends.
    SetRobustList,
    /// pidfd_open(2): gives a descriptor that reports the end of the program.
    PidfdOpen,
    /// futex_waitv(2): sleeps on two words.
    FutexWaitv,
    /// mlock(2): keeps pages resident that a fork needs.
    Mlock,
    /// munlock(2): releases these pages.
    Munlock,
    /// readlinkat(2): reads the own number under `/proc`.
    Readlinkat,
    /// get_robust_list(2): finds the control block of a thread.
    GetRobustList,
    /// prctl(2), `PR_GET_THP_DISABLE`: reads whether the program has disabled huge pages.
    GetThpDisable,
    /// unshare(2): checks whether another process uses the memory.
    Unshare,
    /// prctl(2), `PR_SET_TIMERSLACK`: makes short sleeps precise.
    SetTimerSlack,
    /// kcmp(2): checks whether a process uses the memory.
    Kcmp,
    /// prlimit64(2): reads limits of the program, and adopts one.
    Prlimit,
    /// prctl(2), `PR_SET_THP_DISABLE`: disables huge pages during a fork.
    SetThpDisable,
    /// openat(2): opens files under `/proc` and the userfaultfd device.
    Openat,
}

/// All calls, in the order of their numbers.
const ALL: [Call; 22] = [
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
    Call::Kcmp,
    Call::Prlimit,
    Call::SetThpDisable,
    Call::Openat,
];

/// The calls that kill their caller, one bit each.
static DEADLY: AtomicU32 = AtomicU32::new(0);
/// Index of the call that the rehearsal makes; the length of `ALL` when it has made all.
static REHEARSED: AtomicU32 = AtomicU32::new(0);

/// Returns whether the companion may make `call`.
pub fn allow(call: Call) -> bool {
    DEADLY.load(Ordering::Relaxed) & 1 << call as u32 == 0
}

impl Call {
    /// Makes the call, in a process that ends right afterwards, with arguments that affect no other
    /// process.
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
            Call::Kcmp => (raw::__NR_kcmp, [0; 4]),
            Call::Prlimit => (raw::__NR_prlimit64, [0; 4]),
            Call::Unshare => (raw::__NR_unshare, [raw::CLONE_VM as usize, 0, 0, 0]),
            Call::GetThpDisable => (raw::__NR_prctl, [linux_raw_sys::prctl::PR_GET_THP_DISABLE as usize, 0, 0, 0]),
            // No descriptor has this number.
            Call::Openat => (raw::__NR_openat, [usize::MAX, name, 0, 0]),
            // The kernel refuses a fourth argument, before it changes anything.
            Call::SetThpDisable => (raw::__NR_prctl, [linux_raw_sys::prctl::PR_SET_THP_DISABLE as usize, 1, 0, 1]),
        };
        let [a, b, c, d] = arguments;
        // SAFETY: each call changes only this process, or fails because of its arguments. No call
        // reads a null pointer.
        unsafe { syscall4(number as usize, a, b, c, d) };
    }
}

/// Finds the calls that kill a process that the calling thread starts. Returns whether there are
/// any.
pub fn rehearse(companion: &'static Companion) -> bool {
    DEADLY.store(0, Ordering::Relaxed);
    REHEARSED.store(0, Ordering::Relaxed);
    loop {
        // SAFETY: `rehearsal_entry` ignores its argument and ends its process; one thread at a time
        // starts a companion.
        if unsafe { companion.run_intermediate(rehearsal_entry, std::ptr::null_mut(), Children::Some) }.is_err() {
            return false;
        }
        // Acquire pairs with the Release in `rehearsal_entry`.
        let ended_at = REHEARSED.load(Ordering::Acquire);
        if ended_at as usize >= ALL.len() {
            return DEADLY.load(Ordering::Relaxed) != 0;
        }
        DEADLY.fetch_or(1 << ended_at, Ordering::Relaxed);
        REHEARSED.store(ended_at + 1, Ordering::Relaxed);
    }
}

/// First function of the rehearsing process: makes the calls that are left.
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

/// Installs a SIGSYS handler, which makes a call fail with `ENOSYS` that a filter answers with
/// SIGSYS. The calling process has signal handlers of its own.
pub fn answer_filters() {
    let action = Action {
        handler: on_sigsys as *const () as usize,
        flags: u64::from(raw::SA_SIGINFO | raw::SA_RESTORER),
        restorer: foliomem_companion_sigreturn as *const () as usize,
        mask: 0,
    };
    // SAFETY: the handler changes only the result of a call.
    unsafe { signals::set_action(raw::SIGSYS, &action) };
}

/// The SIGSYS handler: the interrupted call returns `ENOSYS`.
extern "C" fn on_sigsys(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes the registers of the interrupted thread, which nobody else uses
    // while the handler runs.
    unsafe { (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS) };
}
