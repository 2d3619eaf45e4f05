//! Signal masks around the start of a thread, and what signals mean.

/// Calls `make_thread` with all signals blocked, so that the new thread receives none.
pub fn without_signals<R>(make_thread: impl FnOnce() -> R) -> R {
    // SAFETY: the sets are plain words that the calls read and write.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = make_thread();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    }
}

/// Whether `signal` ends a process whose memory was not there.
pub fn is_crash(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS)
}
