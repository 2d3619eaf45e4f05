//! Limits of a process: on resources that the companion shares with its program, and on huge pages.
//!
//! The kernel counts mappings by address space, which the companion shares with the program, but
//! checks the count against the limit of the process that maps. So the companion's mappings count
//! when the program maps, and only the companion's own limit can refuse the companion a mapping.
//! There is no lock.

use crate::seccomp::{self, Call};
use crate::thread::syscall4;
use foliomem_types::size_policy::Disabled;
use linux_raw_sys::general::__NR_prlimit64;
use rustix::process::{Pid, Resource, getrlimit};

/// Sets the calling process's soft limit on `resource` to that of `program`. Nothing changes if the
/// kernel refuses.
pub fn adopt(resource: u32, program: Pid) {
    if !seccomp::allow(Call::Prlimit) {
        return;
    }
    let [mut theirs, mut ours] = [[0u64; 2]; 2];
    let get = |pid: i32, limits: &mut [u64; 2]| {
        let address = limits.as_mut_ptr().expose_provenance();
        // SAFETY: prlimit64(2) writes a soft and a hard limit to the array.
        unsafe { syscall4(__NR_prlimit64 as usize, pid as usize, resource as usize, 0, address) == 0 }
    };
    if !get(program.as_raw_nonzero().get(), &mut theirs) || !get(0, &mut ours) {
        return;
    }
    ours[0] = theirs[0].min(ours[1]);
    let address = ours.as_ptr().expose_provenance();
    // SAFETY: prlimit64(2) only reads both limits.
    unsafe { syscall4(__NR_prlimit64 as usize, 0, resource as usize, address, 0) };
}

/// Returns whether the kernel limits the time for which a real-time thread of the calling process
/// may run without a pause (RLIMIT_RTTIME), or whether that is unknown. It kills a process that
/// runs for longer.
pub fn limits_real_time() -> bool {
    !seccomp::allow(Call::Prlimit) || getrlimit(Resource::Rttime).current.is_some()
}

/// The bit of PR_SET_THP_DISABLE for: except in ranges for which the program has advised huge pages
/// (Linux 6.18).
const EXCEPT_ADVISED: i32 = 1 << 1;

/// Returns whether the process has disabled huge pages (PR_SET_THP_DISABLE). Asks the kernel each
/// time, because the program may have done so before an exec.
pub fn disabled_huge_pages() -> Disabled {
    if !seccomp::allow(Call::GetThpDisable) {
        return Disabled::No;
    }
    if !rustix::thread::transparent_huge_pages_are_disabled().unwrap_or(false) {
        return Disabled::No;
    }
    // SAFETY: prctl(2) takes numbers and changes nothing. The call above has just succeeded, so
    // this one does not write errno.
    let flags = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    if flags & EXCEPT_ADVISED != 0 { Disabled::ExceptAdvised } else { Disabled::Yes }
}

/// Disables huge pages for the process and for the children that it forks from now on, and returns
/// what [`restore_huge_pages`] restores. It stays [`Disabled::No`] if a filter forbids the change.
pub fn disable_huge_pages() -> Disabled {
    let before = disabled_huge_pages();
    if [Call::GetThpDisable, Call::SetThpDisable].into_iter().all(seccomp::allow) {
        let _ = rustix::thread::disable_transparent_huge_pages(true);
    }
    before
}

/// Undoes [`disable_huge_pages`], in the same process or in a child, unless the program has changed
/// the setting since.
pub fn restore_huge_pages(before: Disabled) {
    if before == Disabled::Yes || !seccomp::allow(Call::SetThpDisable) || disabled_huge_pages() != Disabled::Yes {
        return;
    }
    if before == Disabled::No {
        let _ = rustix::thread::disable_transparent_huge_pages(false);
    } else {
        // SAFETY: prctl(2) takes numbers. It has returned this setting, so it accepts it and does
        // not write errno.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, EXCEPT_ADVISED, 0, 0) };
    }
}
