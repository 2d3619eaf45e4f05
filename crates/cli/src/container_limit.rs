//! The limit `container`: what the cgroups around a run leave for it.
//!
//! A group's limit covers more than the run's anonymous memory: files that the kernel cannot drop,
//! kernel memory, shared memory, foliomem itself, and processes that have nothing to do with the
//! run. The run gets the rest, less a margin. [`CgroupsLimit`] measures the rest again and again.
//!
//! | part | where the figure comes from |
//! |---|---|
//! | all that the group takes | `memory.usage_in_bytes` or `memory.current` |
//! | files that the kernel drops | `memory.stat` |
//! | what the run takes | the control segment: agents and the supervisor measure it |
//!
//! The run's figure is the one that its agents keep below the limit, so an error in it cancels out.

use crate::cgroups::{Cgroup, Cgroups};
use crate::knob::Machine;
use foliomem_types::settings::Limit;
use foliomem_types::size::format_mib;
use std::time::{Duration, Instant};

/// The limit that follows the cgroups around the run, as a word.
pub const CONTAINER: &str = "container";
/// Smallest limit in bytes. Below it, the protected minimum of resident pages and the agent's own
/// memory take most of the limit.
pub const MIN_LIMIT_BYTES: u64 = 16 << 20;
/// The margin that is left below a group's limit. 1/2^5 of the limit is for a tree that exceeds its
/// limit for a moment. 4 MiB are for the kernel, which charges in batches, and charges page tables
/// and files, too.
const MARGIN_SHIFT: u32 = 5;
const FIXED_MARGIN_BYTES: u64 = 4 << 20;
/// The groups' details are read again after this time at the latest, or when the usage has changed
/// by 1/2^8 of the limit.
const INTERVAL: Duration = Duration::from_millis(250);
const CHANGE_SHIFT: u32 = 8;
/// The memory that the cgroups around this process allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Container {
    /// The lowest limit of them, in bytes.
    pub limit_bytes: u64,
    /// What they leave for a run, in bytes.
    pub left_bytes: u64,
}

impl Container {
    /// Looks at the groups, before the run takes anything. Returns `None` if no group has a limit
    /// below `ram_bytes`.
    pub fn of(groups: &Cgroups, ram_bytes: u64) -> Option<Container> {
        let (_, limit_bytes) = groups.tightest().filter(|(_, limit_bytes)| *limit_bytes < ram_bytes)?;
        let left = groups.limited().map(|(group, limit_bytes)| left_bytes(group, limit_bytes, 0));
        let left_bytes = left.min().unwrap_or(limit_bytes).max(MIN_LIMIT_BYTES);
        Some(Container { limit_bytes, left_bytes })
    }
}

impl Machine {
    /// Returns this machine, as the processes of these groups may use it.
    pub fn around(groups: &Cgroups) -> Machine {
        let ram_bytes = ram_bytes();
        let container = Container::of(groups, ram_bytes);
        Machine { memory_bytes: container.map_or(ram_bytes, |container| container.limit_bytes), container }
    }
}

/// Returns the memory of this machine in bytes.
fn ram_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    system.totalram * u64::from(system.mem_unit)
}

/// Returns what a group leaves for a run that takes `taken_bytes` of it.
fn left_bytes(group: &Cgroup, limit_bytes: u64, taken_bytes: u64) -> u64 {
    let usage = group.usage(limit_bytes);
    let others_bytes = usage.all_bytes.saturating_sub(usage.droppable_bytes).saturating_sub(taken_bytes);
    let margin_bytes = (limit_bytes >> MARGIN_SHIFT) + FIXED_MARGIN_BYTES;
    limit_bytes.saturating_sub(others_bytes).saturating_sub(margin_bytes)
}

/// Warns about a limit that is above that of a cgroup, or above all memory: it holds nothing back.
pub fn warn_if_above(limit: Limit, machine: Machine, groups: &Cgroups) {
    let Limit::Bytes(bytes) = limit else { return };
    // Then the groups need not be read again.
    if bytes <= machine.memory_bytes {
        return;
    }
    let (limit, ram_bytes) = (format_mib(bytes), ram_bytes());
    match groups.tightest() {
        Some((group, group_bytes)) if group_bytes < bytes => eprintln!(
            "foliomem: the limit of {limit} is above the {} of the cgroup {}: the kernel kills processes of the run \
             before foliomem has anything to do; use --limit {CONTAINER}",
            format_mib(group_bytes),
            group.name()
        ),
        _ if ram_bytes < bytes => eprintln!(
            "foliomem: the limit of {limit} is above the {} of this machine: the kernel kills processes before foliomem \
             has anything to do; use a smaller limit, such as 50%",
            format_mib(ram_bytes)
        ),
        _ => {}
    }
}

/// A group with a limit, as it was at the last look.
#[derive(Debug)]
struct Watched {
    group: Cgroup,
    limit_bytes: u64,
    usage_bytes: u64,
}

/// The limit that the cgroups leave for a run, followed as that changes.
#[derive(Debug)]
pub struct CgroupsLimit {
    groups: Cgroups,
    watched: Vec<Watched>,
    due: Instant,
    target_bytes: u64,
    said_full: bool,
}

impl CgroupsLimit {
    /// Creates the limit that follows `groups`. The first call of
    /// [`target_bytes`](CgroupsLimit::target_bytes) measures it.
    pub fn new(groups: Cgroups) -> CgroupsLimit {
        CgroupsLimit { groups, watched: Vec::new(), due: Instant::now(), target_bytes: 0, said_full: false }
    }

    /// Returns what the groups leave for a run that takes `taken_bytes`.
    pub fn target_bytes(&mut self, taken_bytes: u64) -> u64 {
        let now = Instant::now();
        if now >= self.due || self.watched.iter().any(Watched::has_changed) {
            self.look(taken_bytes);
            self.due = now + INTERVAL;
        }
        self.target_bytes
    }

    fn look(&mut self, taken_bytes: u64) {
        let watched = self.groups.limited().map(|(group, limit_bytes)| {
            let usage_bytes = group.usage_bytes();
            Watched { group: group.clone(), limit_bytes, usage_bytes }
        });
        self.watched = watched.collect();
        let left = self.watched.iter().map(|watched| watched.left_bytes(taken_bytes)).min();
        // Without any limit the run keeps the last one.
        let Some(left_bytes) = left else { return };
        self.target_bytes = left_bytes.max(MIN_LIMIT_BYTES);
        if left_bytes < MIN_LIMIT_BYTES && !self.said_full {
            self.said_full = true;
            eprintln!(
                "foliomem: the cgroup leaves {} for the run, and {} are needed: files in use, kernel memory and \
                 other processes take the rest; raise the cgroup's limit",
                format_mib(left_bytes),
                format_mib(MIN_LIMIT_BYTES)
            );
        }
    }
}

impl Watched {
    /// Returns whether the group takes more or less than at the last look.
    fn has_changed(&self) -> bool {
        self.group.usage_bytes().abs_diff(self.usage_bytes) > self.limit_bytes >> CHANGE_SHIFT
    }

    fn left_bytes(&self, taken_bytes: u64) -> u64 {
        left_bytes(&self.group, self.limit_bytes, taken_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// A root with a group of version 2. Dropping it removes the directory.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Root {
            let root = Root(std::env::temp_dir().join(format!("foliomem-{name}-{}", std::process::id())));
            for directory in ["proc/self", "sys/fs/cgroup/x"] {
                fs::create_dir_all(root.0.join(directory)).unwrap();
            }
            root.write("proc/self/cgroup", "0::/x\n");
            root.write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
            root
        }

        fn write(&self, path: &str, content: &str) {
            fs::write(self.0.join(path), content).unwrap();
        }

        /// Sets limit, usage and droppable files, in MiB.
        fn set(&self, limit: u64, usage: u64, files: u64) {
            self.write("sys/fs/cgroup/x/memory.max", &format!("{}\n", limit << 20));
            self.write("sys/fs/cgroup/x/memory.current", &format!("{}\n", usage << 20));
            self.write("sys/fs/cgroup/x/memory.stat", &format!("inactive_file {}\n", files << 20));
        }

        fn groups(&self) -> Cgroups {
            Cgroups::find(&self.0)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_run_gets_what_the_group_leaves_less_a_margin() {
        let root = Root::new("container-left");
        root.set(256, 60, 40);
        let container = Container::of(&root.groups(), 1 << 34);
        assert_eq!(container, Some(Container { limit_bytes: 256 << 20, left_bytes: (256 - 20 - 12) << 20 }));
        assert_eq!(Container::of(&root.groups(), 256 << 20), None, "a limit that is no less than all memory");
        root.set(64, 60, 0);
        assert_eq!(Container::of(&root.groups(), 1 << 34).unwrap().left_bytes, MIN_LIMIT_BYTES);
        assert_eq!(Container::of(&Cgroups::find(Path::new("/nonexistent")), 1 << 34), None);
    }

    #[test]
    fn the_limit_follows_what_others_take_and_the_limit_of_the_group() {
        let (root, mib) = (Root::new("container-follow"), 1 << 20);
        root.set(256, 60, 40);
        let mut limit = CgroupsLimit::new(root.groups());
        limit.look(0);
        assert_eq!(limit.target_bytes, 224 * mib);
        root.set(256, 160, 40);
        assert!(limit.watched[0].has_changed());
        limit.look(100 * mib);
        assert_eq!(limit.target_bytes, 224 * mib, "what the run takes is its own");
        limit.look(0);
        assert_eq!(limit.target_bytes, 124 * mib);
        assert!(!limit.watched[0].has_changed());
        root.set(512, 160, 40);
        limit.look(0);
        assert_eq!(limit.target_bytes, (512 - 120 - 20) * mib);
        root.set(512, 510, 0);
        limit.look(0);
        assert_eq!((limit.target_bytes, limit.said_full), (MIN_LIMIT_BYTES, true));
    }
}
