//! CPUs: how many there are, whether threads wait for one, where and how urgently a thread runs.
//!
//! `/proc/loadavg` shows how many threads of the machine run or want to. Filters of the program may
//! forbid the calls ([`crate::filters`]). There is no lock.

use crate::filters::{self, Call};
use rustix::fd::AsFd;
use rustix::thread::CpuSet;

/// Whether more threads want a CPU, the caller's own included, than there are for this process. So it is said where that cannot
/// be known.
pub fn is_contended(loadavg: impl AsFd) -> bool {
    let mut text = [0u8; 128];
    let read = rustix::io::pread(loadavg, &mut text, 0).unwrap_or(0);
    runnable(&text[..read]).is_none_or(|runnable| runnable > cpus())
}

/// How many CPUs this process may use; 0 where that cannot be known.
pub fn cpus() -> u32 {
    allowed_cpus().count()
}

/// The CPUs that the calling thread may use; none where that cannot be known.
pub fn allowed_cpus() -> CpuSet {
    let asked = filters::allow(Call::SchedGetaffinity).then(|| rustix::thread::sched_getaffinity(None));
    asked.and_then(Result::ok).unwrap_or_default()
}

/// Has the calling thread run on `cpu` alone.
pub fn run_on(cpu: u32) {
    let mut only = CpuSet::new();
    only.set(cpu as usize);
    set_affinity(&only);
}

/// Has the calling thread run on `cpus` alone. Where none of them is left, it stays where it is.
pub fn set_affinity(cpus: &CpuSet) {
    if filters::allow(Call::SchedSetaffinity) {
        let _ = rustix::thread::sched_setaffinity(None, cpus);
    }
}

/// How urgently a thread runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// Like other threads.
    Normal,
    /// Only on a CPU that no other thread wants (SCHED_IDLE).
    Idle,
}

/// Sets the urgency of a thread of this process. The thread keeps its nice value.
pub fn set_urgency(thread: u32, urgency: Urgency) {
    let policy = match urgency {
        Urgency::Idle => libc::SCHED_IDLE,
        Urgency::Normal => libc::SCHED_OTHER,
    };
    let parameters = libc::sched_param { sched_priority: 0 };
    if !filters::allow(Call::SchedSetscheduler) {
        return;
    }
    // SAFETY: reads the parameters; where it is refused, or the thread has ended, nothing changes.
    unsafe { libc::sched_setscheduler(thread as libc::pid_t, policy, &raw const parameters) };
}

/// The number before the slash: `0.20 0.18 0.12 1/80 11206`.
fn runnable(loadavg: &[u8]) -> Option<u32> {
    let field = loadavg.split(|&byte| byte == b' ').nth(3)?;
    let (runnable, _) = std::str::from_utf8(field).ok()?.split_once('/')?;
    runnable.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_number_of_runnable_threads_is_found(count: u32, all: u32, load in 0.0f64..1e4) {
            let text = format!("{load:.2} {load:.2} {load:.2} {count}/{all} 17\n");
            prop_assert_eq!(runnable(text.as_bytes()), Some(count));
        }

        #[test]
        fn noise_is_no_number(noise in prop::collection::vec(any::<u8>(), 0..60)) {
            let slash = noise.contains(&b'/');
            prop_assert!(slash || runnable(&noise).is_none());
        }
    }

    #[test]
    fn who_asks_is_runnable() {
        let text = std::fs::read("/proc/loadavg").unwrap();
        assert!(runnable(&text).unwrap() >= 1);
    }
}
