//! CPUs: their number, their load, and the affinity and the scheduling policy of threads.
//!
//! `/proc/loadavg` contains the number of runnable threads of the machine. A filter of the program
//! may forbid a call; then the companion does without it ([`crate::seccomp`]). There is no lock.

use crate::process_limits;
use crate::seccomp::{self, Call};
use crate::thread::syscall3;
use linux_raw_sys::general as raw;
use rustix::fd::AsFd;
use rustix::thread::CpuSet;

/// Returns whether more threads are runnable, including the calling one, than this process has
/// CPUs. `loadavg` is `/proc/loadavg`. Returns `true` if the number cannot be read.
pub fn is_contended(loadavg: impl AsFd) -> bool {
    let mut text = [0u8; 128];
    let read = rustix::io::pread(loadavg, &mut text, 0).unwrap_or(0);
    runnable(&text[..read]).is_none_or(|runnable| runnable > cpus())
}

/// Returns the number of CPUs that the calling thread may use; 0 if it is unknown.
pub fn cpus() -> u32 {
    allowed_cpus().count()
}

/// Returns the CPUs that the calling thread may use; an empty set if they are unknown.
pub fn allowed_cpus() -> CpuSet {
    let asked = seccomp::allow(Call::SchedGetaffinity).then(|| rustix::thread::sched_getaffinity(None));
    asked.and_then(Result::ok).unwrap_or_default()
}

/// Returns a CPU on which the calling thread may run, but not `cpu`. `None` if there is no other.
pub fn another_than(cpu: u32) -> Option<u32> {
    let allowed = allowed_cpus();
    (0..CpuSet::MAX_CPU as u32).find(|&other| other != cpu && allowed.is_set(other as usize))
}

/// Binds the calling thread to `cpu`.
pub fn run_on(cpu: u32) {
    let mut only = CpuSet::new();
    only.set(cpu as usize);
    set_affinity(&only);
}

/// Binds the calling thread to `cpus`. The affinity stays unchanged if the kernel refuses, for
/// example because none of them is online.
pub fn set_affinity(cpus: &CpuSet) {
    if seccomp::allow(Call::SchedSetaffinity) {
        let _ = rustix::thread::sched_setaffinity(None, cpus);
    }
}

/// The scheduling class of a thread of the agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// SCHED_OTHER, like other threads.
    Normal,
    /// SCHED_IDLE: runs only on a CPU that no other thread wants.
    Idle,
    /// SCHED_RR: runs before all others.
    RealTime,
}

/// Sets the scheduling class of a thread of this process. Its nice value stays. Threads that it
/// creates from then on are [`Urgency::Normal`]. Failures are ignored.
pub fn set_urgency(thread: u32, urgency: Urgency) {
    // The priority is the kernel's `struct sched_param`.
    let (policy, priority) = match urgency {
        Urgency::Idle => (libc::SCHED_IDLE, 0i32),
        Urgency::Normal => (libc::SCHED_OTHER, 0),
        Urgency::RealTime => (libc::SCHED_RR, 1),
    };
    // Without CAP_SYS_NICE, a thread cannot get rid of the flag, and would stay in its class.
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    let is_allowed = seccomp::allow(Call::SchedSetscheduler);
    if !is_allowed || urgency == Urgency::RealTime && process_limits::limits_real_time() {
        return;
    }
    let (number, address) = (raw::__NR_sched_setscheduler as usize, (&raw const priority).expose_provenance());
    // SAFETY: the call only reads `priority`. If the thread has ended, it fails and changes
    // nothing.
    unsafe { syscall3(number, thread as usize, policy as usize, address) };
}

/// Returns the number before the slash in `0.20 0.18 0.12 1/80 11206`.
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
        fn noise_is_not_a_number(noise in prop::collection::vec(any::<u8>(), 0..60)) {
            let slash = noise.contains(&b'/');
            prop_assert!(slash || runnable(&noise).is_none());
        }
    }

    fn policy() -> i32 {
        // SAFETY: reads the calling thread's policy.
        unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK }
    }

    #[test]
    fn a_class_can_be_left_again_and_is_not_inherited() {
        if rustix::process::geteuid().as_raw() != 0 {
            return;
        }
        let check = || {
            let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            for urgency in [Urgency::RealTime, Urgency::Normal, Urgency::Idle, Urgency::RealTime] {
                set_urgency(own, urgency);
                let wanted = match urgency {
                    Urgency::RealTime => libc::SCHED_RR,
                    Urgency::Normal => libc::SCHED_OTHER,
                    Urgency::Idle => libc::SCHED_IDLE,
                };
                assert_eq!(policy(), wanted);
            }
            assert_eq!(std::thread::spawn(policy).join().unwrap(), libc::SCHED_OTHER);
        };
        std::thread::spawn(check).join().unwrap();
    }

    #[test]
    fn the_reading_thread_is_runnable() {
        let text = std::fs::read("/proc/loadavg").unwrap();
        assert!(runnable(&text).unwrap() >= 1);
    }
}
