//! Signals: blocking and unblocking them, their actions, and their meaning. There is no lock.

use crate::thread::{block_signals, restore_signals, syscall4};
use linux_raw_sys::general as raw;

/// Calls `make_thread` with all signals blocked, so that the new thread receives none.
pub fn without_signals<R>(make_thread: impl FnOnce() -> R) -> R {
    // SAFETY: the sets are plain words on this stack, which the calls read and write.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = make_thread();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

/// Unblocks all signals of the calling thread.
pub fn unblock_all() {
    // SAFETY: the set is plain words on this stack, which the calls write and read.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Action {
    /// Address of the handler, or `SIG_DFL` or `SIG_IGN`.
    pub handler: usize,
    /// Flags `SA_*`.
    pub flags: u64,
    /// Address of the function that returns from the handler.
    pub restorer: usize,
    /// Signals that are blocked in the handler.
    pub mask: u64,
}

/// Changes the action of the calling process for `signal`, and returns the one before. It goes past
/// the C library, whose function the program may have replaced.
///
/// # Safety
/// The handler may be called at any instruction, with the C library's contract of a handler.
pub(crate) unsafe fn set_action(signal: u32, action: &Action) -> Action {
    let mut before = Action::default();
    let number = raw::__NR_rt_sigaction as usize;
    let [action, old] = [std::ptr::from_ref(action).expose_provenance(), (&raw mut before).expose_provenance()];
    // SAFETY: the kernel reads one action and writes the other, whose masks have 8 bytes.
    unsafe { syscall4(number, signal as usize, action, old, size_of::<u64>()) };
    before
}

/// Calls `act` while the calling process ignores SIGCHLD, so that the kernel reaps children that
/// end. A SIGCHLD that another process sends meanwhile is lost.
pub(crate) fn without_child_signals<R>(act: impl FnOnce() -> R) -> R {
    let ignored = Action { handler: libc::SIG_IGN, ..Action::default() };
    let unblocked = block_signals();
    // SAFETY: an ignored signal calls no handler.
    let before = unsafe { set_action(raw::SIGCHLD, &ignored) };
    let result = act();
    // SAFETY: the program has set this action itself.
    unsafe { set_action(raw::SIGCHLD, &before) };
    restore_signals(unblocked);
    result
}

/// Returns whether `signal` reports an access to memory that is missing.
pub fn is_crash(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS)
}
