//! System calls that a filter (seccomp) or a security module may refuse.

use crate::checks::{Amount, Finding, resources};
use crate::remedy::Cause;
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::system_checks::calls::{self, Call, Fate};
use foliomem_sys::system_checks::steps::{self, By, Step};
use foliomem_sys::system_checks::{self, resources as probes};
use rustix::io::Errno;
use std::fs;

/// Checks whether the memory that the processes of a run share can be made (memfd_create(2)).
pub fn shared_memory(by: By) -> Finding {
    const WHAT: &str = "shared memory";
    match calls::probe(Call::MemfdCreate, by) {
        Ok(Fate::Passes) => Finding::fine(WHAT, "memfd_create(2) works"),
        Ok(fate) => Finding::missing(WHAT, refused(Call::MemfdCreate, fate), Cause::Filter("memfd_create")),
        Err(errno) => resources::no_child(WHAT, errno),
    }
}

/// Says what becomes of a call.
fn refused(call: Call, fate: Fate) -> String {
    let name = call.name();
    match fate {
        Fate::Passes => format!("{name} works"),
        Fate::Deadly => format!("a filter (seccomp) kills callers of {name}"),
        Fate::Absent if !steps::is_filtered() => format!("the kernel has no {name}"),
        Fate::Absent | Fate::Refused(_) if steps::is_filtered() => format!("a filter (seccomp) refuses {name}"),
        Fate::Absent => format!("{name} does not exist"),
        Fate::Refused(errno) => format!("{name} fails: {}", ErrnoText(errno)),
    }
}

/// Checks whether forks can be managed where the C library cannot be patched.
pub fn fork(by: By) -> Finding {
    const WHAT: &str = "fork";
    match calls::probe(Call::SyscallUserDispatch, by) {
        Ok(Fate::Passes) => Finding::fine(WHAT, "system calls can be dispatched (PR_SET_SYSCALL_USER_DISPATCH)"),
        Ok(fate) => {
            let found = format!(
                "{}: programs that fork, and whose C library cannot be patched, stop with SIGSEGV in the child",
                refused(Call::SyscallUserDispatch, fate)
            );
            Finding::drawback(WHAT, found, Cause::Filter("prctl"))
        }
        Err(errno) => resources::no_child(WHAT, errno),
    }
}

/// Checks whether a process can take another one's descriptor: Yama allows it to ancestors only, or
/// to nobody. A run does without, unless a filter kills the process that tries.
pub fn descriptors(amount: Amount, by: By) -> Finding {
    const WHAT: &str = "pidfd_getfd";
    const EFFECT: &str = "forks hand descriptors over by a socket, which is slower";
    let fine = Finding::fine(WHAT, "a process can take another one's descriptor");
    match (calls::probe(Call::PidfdGetfd, by), amount) {
        (Ok(Fate::Passes), Amount::Needed) => return fine,
        (Ok(Fate::Passes), Amount::Good) => {}
        (Ok(fate), _) => return done_without(WHAT, Call::PidfdGetfd, fate, EFFECT),
        (Err(errno), _) => return resources::no_child(WHAT, errno),
    }
    match probes::take_parents_descriptor() {
        Ok(Step::Done(_)) => fine,
        Ok(step) => {
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            let found = format!("{}: {EFFECT}", forbidden_by(scope.trim(), step.errno().unwrap_or(Errno::PERM)));
            Finding::drawback(WHAT, found, Cause::Yama)
        }
        Err(errno) => resources::no_child(WHAT, errno),
    }
}

/// Returns the fate of a call that a filter refuses. The agent does without the call, with
/// `effect`, unless the filter kills the caller.
fn done_without(what: &'static str, call: Call, fate: Fate, effect: &str) -> Finding {
    let cause = Cause::Filter(call.name());
    match fate {
        Fate::Deadly => Finding::missing(what, refused(call, fate), cause),
        _ => Finding::drawback(what, format!("{}: {effect}", refused(call, fate)), cause),
    }
}

/// Returns why a process cannot take another one's descriptor, by Yama's setting.
fn forbidden_by(scope: &str, errno: Errno) -> String {
    match scope {
        "" | "0" => format!("a process cannot take another one's descriptor: {}", ErrnoText(errno)),
        scope => format!("Yama forbids to take another process's descriptor (kernel.yama.ptrace_scope={scope})"),
    }
}

/// Checks whether a companion can compare the memory of processes, to learn that no process uses
/// the program's memory any more.
pub fn memory_users(by: By) -> Finding {
    const WHAT: &str = "kcmp";
    match calls::probe(Call::Kcmp, by) {
        Ok(Fate::Passes) => Finding::fine(WHAT, "the memory of two processes can be compared"),
        Ok(fate) => {
            let effect = "the agent notices later that a process has executed another program";
            done_without(WHAT, Call::Kcmp, fate, effect)
        }
        Err(errno) => resources::no_child(WHAT, errno),
    }
}

/// Checks the calls that the agent, or the C library, can do without, unless a filter kills the
/// caller.
pub fn others(by: By) -> Finding {
    const WHAT: &str = "system calls";
    let effect = |call, fate| match (call, fate) {
        (_, Fate::Passes) | (Call::Clone3, Fate::Absent) => None,
        (_, Fate::Deadly) => Some("foliomem, or the C library, calls it"),
        (Call::Clone3, _) => Some("the C library may not start threads"),
        (Call::PidfdOpen, _) => Some("the end of a process is noticed later"),
        (Call::FutexWaitv, _) => Some("the end of a process is noticed later, by looking"),
        _ => None,
    };
    let mut refusals = Vec::new();
    for call in [Call::Clone3, Call::PidfdOpen, Call::FutexWaitv] {
        match calls::probe(call, by) {
            Ok(fate) => refusals.extend(effect(call, fate).map(|effect| (call, fate, effect))),
            Err(errno) => return resources::no_child(WHAT, errno),
        }
    }
    let Some((first, ..)) = refusals.first() else {
        return Finding::fine(WHAT, "no filter refuses what the agent calls");
    };
    let said: Vec<_> =
        refusals.iter().map(|&(call, fate, effect)| format!("{}: {effect}", refused(call, fate))).collect();
    let (found, cause) = (said.join("; "), Cause::Filter(first.name()));
    let is_deadly = refusals.iter().any(|&(_, fate, _)| fate == Fate::Deadly);
    if is_deadly { Finding::missing(WHAT, found, cause) } else { Finding::drawback(WHAT, found, cause) }
}

/// Checks whether io_uring works: it writes to a block device that serves as the swap file.
pub fn io_uring(by: By) -> Finding {
    const WHAT: &str = "io_uring";
    let effect = "a swap device is written with pwrite(2), and nothing compresses meanwhile";
    let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match calls::probe(Call::IoUringSetup, by) {
        Ok(Fate::Passes) => match system_checks::make_ring() {
            Ok(()) => Finding::fine(WHAT, "the next write to a swap device is made while one is under way"),
            Err(_) if steps::is_filtered() => {
                let found = format!("not used under a filter (seccomp), which rings would pass by: {effect}");
                Finding::drawback(WHAT, found, Cause::Other("nothing is wrong"))
            }
            Err(errno) => Finding::drawback(WHAT, format!("{}: {effect}", ErrnoText(errno)), Cause::IoUring),
        },
        Ok(Fate::Refused(Errno::PERM)) if !matches!(setting.trim(), "" | "0") => {
            let found = format!("kernel.io_uring_disabled={}: {effect}", setting.trim());
            Finding::drawback(WHAT, found, Cause::IoUring)
        }
        Ok(fate) => {
            let found = format!("{}: {effect}", refused(Call::IoUringSetup, fate));
            Finding::drawback(WHAT, found, Cause::Filter("io_uring_setup"))
        }
        Err(errno) => resources::no_child(WHAT, errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yama_is_named_where_it_forbids() {
        assert!(forbidden_by("1", Errno::PERM).contains("kernel.yama.ptrace_scope=1"));
        assert!(!forbidden_by("0", Errno::PERM).contains("yama"));
        assert!(!forbidden_by("", Errno::PERM).contains("yama"));
    }
}
