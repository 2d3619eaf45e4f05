//! Signals: blocking and unblocking them, and their meaning. There is no lock.

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

/// Returns whether `signal` reports an access to memory that is missing.
pub fn is_crash(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS)
}
