//! Limits of a process: on resources that the companion shares with its program, and on huge pages.
//!
//! A limit on address space belongs to a process, the address space to all that share it: what the companion maps counts
//! when the program maps more, but only the companion's own limit refuses the companion's mapping.

use crate::thread::syscall4;
use foliomem_types::size_policy::Disabled;
use linux_raw_sys::general::__NR_prlimit64;
use rustix::process::Pid;

/// Makes the soft limit of the calling process on `resource` that of `program`, if the kernel tells it.
pub fn adopt(resource: u32, program: Pid) {
    let [mut theirs, mut ours] = [[0u64; 2]; 2];
    let get = |pid: i32, limits: &mut [u64; 2]| {
        let address = limits.as_mut_ptr().expose_provenance();
        // SAFETY: writes a soft and a hard limit.
        unsafe { syscall4(__NR_prlimit64 as usize, pid as usize, resource as usize, 0, address) == 0 }
    };
    if !get(program.as_raw_nonzero().get(), &mut theirs) || !get(0, &mut ours) {
        return;
    }
    ours[0] = theirs[0].min(ours[1]);
    let address = ours.as_ptr().expose_provenance();
    // SAFETY: reads both limits; changes no memory.
    unsafe { syscall4(__NR_prlimit64 as usize, 0, resource as usize, address, 0) };
}

/// Returns whether the process has disabled huge pages (PR_SET_THP_DISABLE).
pub fn disabled_huge_pages() -> Disabled {
    /// Except in ranges for which the program has asked for them (Linux 6.18).
    const EXCEPT_ADVISED: i32 = 1 << 1;
    if !rustix::thread::transparent_huge_pages_are_disabled().unwrap_or(false) {
        return Disabled::No;
    }
    // SAFETY: takes numbers, changes nothing, and has just succeeded, so that it leaves errno alone.
    let flags = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    if flags & EXCEPT_ADVISED != 0 { Disabled::ExceptAdvised } else { Disabled::Yes }
}
