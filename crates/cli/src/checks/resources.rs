//! Limits of the process and of its cgroup, and `/proc`.

use crate::checks::{Amount, Finding, is_nested};
use crate::remedy::Cause;
use foliomem_sys::errno_text::ErrnoText;
use foliomem_sys::system_checks::resources as probes;
use foliomem_sys::system_checks::steps::{By, Step};
use foliomem_types::settings::ARENA_MIN_BYTES;
use foliomem_types::units::PAGE_BYTES;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::fs;

/// Descriptors that the supervisor opens beside those that it is started with: fewer end a run at
/// its start.
const MIN_DESCRIPTORS: u32 = 12;
/// Enough descriptors for most programs.
const GOOD_DESCRIPTORS: u32 = 64;
/// Processes and threads of a run of one process, on two CPUs: fewer end it.
const MIN_PROCESSES: u32 = 12;
/// Enough processes for a small tree.
const GOOD_PROCESSES: u32 = 64;
/// Address space for the agent's heap and stacks, in bytes.
const AGENT_BYTES: usize = 160 << 20;

/// Returns the finding of a check whose child process could not be started.
pub fn no_child(what: &'static str, errno: Errno) -> Finding {
    let found = format!("cannot be checked, as no process can be started: {}", ErrnoText(errno));
    Finding::missing(what, found, processes_cause(MIN_PROCESSES))
}

/// Checks the files below `/proc` that agents read. Agents can do without the descriptors of other
/// processes.
pub fn proc(amount: Amount, by: By) -> Finding {
    const WHAT: &str = "/proc";
    let proc = match probes::probe_proc(by) {
        Ok(proc) => proc,
        Err(errno) => return no_child(WHAT, errno),
    };
    let missing = |found: String| Finding::missing(WHAT, found, Cause::Proc);
    if proc.is_foreign {
        return missing("is not mounted, or is another file system".to_owned());
    }
    if let Some((file, step)) = proc.files.iter().find(|(_, step)| !step.is_done()) {
        return missing(format!("{file} cannot be opened{}", reason(*step)));
    }
    if amount == Amount::Good {
        match probes::open_parents_descriptor() {
            Ok(Step::Done(_)) => {}
            Ok(step) => {
                let found = format!("descriptors of other processes cannot be opened{}", reason(step));
                return Finding::drawback(WHAT, found, Cause::Other("let this user read the executable of foliomem"));
            }
            Err(errno) => return no_child(WHAT, errno),
        }
    }
    Finding::fine(WHAT, "is mounted, and shows what agents read")
}

fn reason(step: Step) -> String {
    step.errno()
        .map_or_else(|| ": a filter (seccomp) kills the process".to_owned(), |errno| format!(": {}", ErrnoText(errno)))
}

/// Checks how many descriptors a process can open.
pub fn open_files(amount: Amount, by: By) -> Finding {
    const WHAT: &str = "open files";
    let wanted = match amount {
        Amount::Needed => MIN_DESCRIPTORS,
        Amount::Good => GOOD_DESCRIPTORS,
    };
    let (count, refused) = match probes::open_descriptors(wanted as usize, by) {
        Ok(found) => found,
        Err(errno) => return no_child(WHAT, errno),
    };
    let Some(errno) = refused else { return Finding::fine(WHAT, format!("{count} and more can be open")) };
    let found = format!("{count} more can be open: {} (ulimit -n)", ErrnoText(errno));
    let cause = Cause::OpenFiles;
    if count < MIN_DESCRIPTORS { Finding::missing(WHAT, found, cause) } else { Finding::drawback(WHAT, found, cause) }
}

/// Checks how many processes can be started.
pub fn processes(amount: Amount, by: By) -> Finding {
    const WHAT: &str = "processes";
    let wanted = match amount {
        Amount::Needed => MIN_PROCESSES,
        Amount::Good => GOOD_PROCESSES,
    };
    let (count, refused) = match probes::start_processes(wanted as usize, by) {
        Ok(found) => found,
        Err(errno) => return no_child(WHAT, errno),
    };
    let cause = match refused {
        None => return Finding::fine(WHAT, format!("{count} and more can be started")),
        Some(Errno::AGAIN) => processes_cause(wanted),
        Some(Errno::NOMEM) => address_cause(),
        Some(_) => Cause::Filter("clone"),
    };
    let which = match cause {
        Cause::GroupProcesses => " (pids.max of the cgroup)",
        Cause::Processes => " (ulimit -u)",
        _ => "",
    };
    let found = format!(
        "{count} more can be started: {}{which}",
        refused.map(|errno| ErrnoText(errno).to_string()).unwrap_or_default()
    );
    if count < MIN_PROCESSES { Finding::missing(WHAT, found, cause) } else { Finding::drawback(WHAT, found, cause) }
}

/// Tells which limit keeps processes below `wanted` more.
fn processes_cause(wanted: u32) -> Cause {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let directories = pids_directories(&groups);
    let number = |directory: &str, file: &str| -> Option<u64> {
        fs::read_to_string(format!("{directory}/{file}")).ok()?.trim().parse().ok()
    };
    let is_full = |directory: &String| {
        number(directory, "pids.max")
            .zip(number(directory, "pids.current"))
            .is_some_and(|(most, current)| most < current + u64::from(wanted))
    };
    // The kernel does not count root's processes.
    let is_uncounted = rustix::process::getuid().is_root() && !is_nested();
    if is_uncounted || getrlimit(Resource::Nproc).current.is_none() || directories.iter().any(is_full) {
        Cause::GroupProcesses
    } else {
        Cause::Processes
    }
}

/// Returns the directories of the groups that count processes, of this process's own up to the
/// root, from the text of `/proc/self/cgroup`.
fn pids_directories(groups: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            list if list.split(',').any(|name| name == "pids") => "/sys/fs/cgroup/pids",
            _ => continue,
        };
        let mut path = path.trim_end_matches('/');
        loop {
            found.push(format!("{root}{path}"));
            match path.rfind('/') {
                Some(slash) => path = &path[..slash],
                None => break,
            }
        }
    }
    found
}

/// The address space that an agent reserves.
pub fn address_space(by: By) -> Finding {
    const WHAT: &str = "address space";
    let limits = [(Resource::As, "ulimit -v"), (Resource::Data, "ulimit -d")];
    let mut limited = limits.iter().filter_map(|&(resource, name)| Some((getrlimit(resource).current?, name)));
    match (probes::reserve(ARENA_MIN_BYTES, AGENT_BYTES, by), limited.next()) {
        (Ok(()), None) => Finding::fine(WHAT, "unlimited"),
        (Ok(()), Some((bytes, name))) => {
            let found = format!(
                "limited to {} MiB ({name}): foliomem reserves 1 GiB or four times the limit of `run`, whichever is more, and \
                 some 128 MiB",
                bytes >> 20
            );
            Finding::drawback(WHAT, found, address_cause())
        }
        (Err(Errno::NOMEM), limited) => {
            let limit =
                limited.map_or_else(String::new, |(bytes, name)| format!(", limited to {} MiB ({name})", bytes >> 20));
            let found = format!("{} MiB cannot be reserved{limit}", (ARENA_MIN_BYTES + AGENT_BYTES) >> 20);
            Finding::missing(WHAT, found, address_cause())
        }
        (Err(errno), _) => no_child(WHAT, errno),
    }
}

/// Tells which limit address space has.
fn address_cause() -> Cause {
    if getrlimit(Resource::As).current.is_some() {
        Cause::AddressSpace
    } else if getrlimit(Resource::Data).current.is_some() {
        Cause::Data
    } else {
        Cause::Overcommit
    }
}

/// Checks whether address space is charged as memory.
pub fn overcommit() -> Finding {
    const STRICT: &str = "2";
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    let found = format!("vm.overcommit_memory={}", mode.trim());
    if mode.trim() == STRICT {
        Finding::drawback("overcommit", format!("{found}: address space is charged as memory"), Cause::Overcommit)
    } else {
        Finding::fine("overcommit", found)
    }
}

/// Checks how many mappings a process may have.
pub fn mappings() -> Finding {
    const DEFAULT: u64 = 65530;
    let most = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default().trim().parse().unwrap_or(DEFAULT);
    let found = format!("vm.max_map_count={most}");
    if most >= DEFAULT {
        Finding::fine("mappings", found)
    } else {
        Finding::drawback("mappings", format!("{found}: some programs need more"), Cause::Mappings)
    }
}

/// Checks how much memory a process may lock: a fork locks two pages of the forking thread for a
/// moment.
pub fn locked_memory() -> Finding {
    const WHAT: &str = "locked memory";
    match getrlimit(Resource::Memlock).current {
        Some(bytes) if bytes < 16 * PAGE_BYTES as u64 => {
            let found = format!("limited to {} KiB (ulimit -l): forks need 64 KiB", bytes >> 10);
            Finding::drawback(WHAT, found, Cause::LockedMemory)
        }
        Some(bytes) => Finding::fine(WHAT, format!("up to {} KiB", bytes >> 10)),
        None => Finding::fine(WHAT, "unlimited"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_count_processes_are_found_up_to_the_root() {
        assert_eq!(
            pids_directories("8:pids:/a/b\n4:memory:/x\n0::/c\n"),
            [
                "/sys/fs/cgroup/pids/a/b",
                "/sys/fs/cgroup/pids/a",
                "/sys/fs/cgroup/pids",
                "/sys/fs/cgroup/c",
                "/sys/fs/cgroup"
            ]
        );
        assert_eq!(pids_directories("0::/\n"), ["/sys/fs/cgroup"]);
        assert!(pids_directories("noise\n:\n").is_empty());
    }
}
