//! Why a run was killed. Exit code 137 can mean a hard limit, the kernel's OOM killer, or a signal
//! from outside; the counters of the cgroup tell which.
//!
//! The message line also names the largest processes. They are noted while the run takes nearly as
//! much as it ever did, because afterwards they are gone.

use crate::cgroups::Cgroups;
use crate::process_name::name_of;
use foliomem_session::segment::Control;
use foliomem_types::size::format_mib;
use std::fs;

/// The exit code of a program that SIGKILL has ended.
pub const EXIT_KILLED: u8 = 137;
/// Processes that are named.
const MAX_NAMED: usize = 3;
/// The largest processes are noted while the run takes more than 7/8 (1 - 1/2^3) of its peak.
const NEAR_PEAK_SHIFT: u32 = 3;

/// Counts the processes that the kernel kills for want of memory.
#[derive(Debug)]
pub struct OomKills {
    groups: Cgroups,
    before: u64,
}

impl OomKills {
    /// Counts from now on.
    pub fn count(groups: Cgroups) -> OomKills {
        let before = kills(&groups);
        OomKills { groups, before }
    }

    /// Returns how many processes of the run's cgroup the kernel has killed. Where the cgroup has
    /// no counter, those of the machine count.
    pub fn get(&self) -> u64 {
        kills(&self.groups).saturating_sub(self.before)
    }

    /// Returns which memory was short.
    fn shortage(&self) -> String {
        match self.groups.tightest() {
            Some((group, bytes)) => format!("the cgroup {} reached its limit of {}", group.name(), format_mib(bytes)),
            None => "the machine ran out of memory".to_owned(),
        }
    }
}

fn kills(groups: &Cgroups) -> u64 {
    groups.own().and_then(|group| group.oom_kills()).or_else(machine_kills).unwrap_or(0)
}

/// Returns how many processes the kernel has killed since it was booted.
fn machine_kills() -> Option<u64> {
    let counters = fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// A process of the run.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Named {
    pid: u32,
    name: String,
    bytes: u64,
}

/// The largest processes of a run at its peak.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Largest {
    peak_bytes: u64,
    processes: Vec<Named>,
}

impl Largest {
    /// Notes the largest processes if the run takes nearly as much as it ever did. `sizes` are pids
    /// and bytes.
    pub fn note(&mut self, mut sizes: Vec<(u32, u64)>) {
        let all_bytes: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
        self.peak_bytes = self.peak_bytes.max(all_bytes);
        if all_bytes == 0 || all_bytes <= self.peak_bytes - (self.peak_bytes >> NEAR_PEAK_SHIFT) {
            return;
        }
        sizes.sort_unstable_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        sizes.truncate(MAX_NAMED);
        let before = std::mem::take(&mut self.processes);
        let named = sizes.into_iter().map(|(pid, bytes)| {
            let known = before.iter().find(|process| process.pid == pid).map(|process| process.name.clone());
            Named { pid, name: name_of(pid).or(known).unwrap_or_default(), bytes }
        });
        self.processes = named.collect();
    }

    fn describe(&self) -> String {
        let processes: Vec<String> = self
            .processes
            .iter()
            .map(|Named { pid, name, bytes }| format!("{name} (process {pid}) {}", format_mib(*bytes)))
            .collect();
        if processes.is_empty() { "unknown".to_owned() } else { processes.join(", ") }
    }
}

/// The end of a run, as far as memory may be its cause.
pub struct End<'a> {
    /// The exit code.
    pub code: u8,
    /// The run's segment.
    pub control: &'a Control,
    /// Kills by the kernel.
    pub oom_kills: &'a OomKills,
    /// The largest processes.
    pub largest: &'a Largest,
}

impl End<'_> {
    /// Returns the line that says why processes were killed, if any were.
    pub fn explain(&self) -> Option<String> {
        let kills = self.oom_kills.get();
        let is_hard = self.control.configuration().hard && self.control.was_limit_exceeded();
        let cause = match kills {
            _ if is_hard => "foliomem stopped the run, whose limit is hard (--hard)".to_owned(),
            0 if self.code == EXIT_KILLED => {
                "exit code 137 comes neither from foliomem nor from the kernel's OOM killer: \
                                              another process sent SIGKILL, or the program returned it"
                    .to_owned()
            }
            0 => return None,
            1 => format!("the kernel's OOM killer has killed a process, because {}", self.oom_kills.shortage()),
            _ => format!("the kernel's OOM killer has killed {kills} processes, because {}", self.oom_kills.shortage()),
        };
        Some(format!(
            "foliomem: {cause}; needed {}, limit {}, largest: {}",
            format_mib(self.control.peaks().needed_bytes),
            format_mib(self.control.limit_bytes()),
            self.largest.describe()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_processes_are_those_near_the_peak() {
        let mut largest = Largest::default();
        let me = std::process::id();
        largest.note(vec![]);
        assert_eq!(largest.describe(), "unknown");
        largest.note(vec![(me, 50 << 20), (u32::MAX, 400 << 20), (u32::MAX - 1, 10), (u32::MAX - 2, 20)]);
        assert_eq!(
            largest.processes.iter().map(|process| process.bytes).collect::<Vec<_>>(),
            [400 << 20, 50 << 20, 20]
        );
        let own_name = name_of(me).unwrap();
        assert!(largest.describe().contains(&format!("{own_name} (process {me}) 50 MiB")), "{}", largest.describe());
        largest.note(vec![(me, 100 << 20)]);
        assert_eq!(largest.processes.len(), 3, "far from the peak");
        largest.note(vec![(me, 440 << 20)]);
        assert_eq!(largest.processes.len(), 1);
    }

    #[test]
    fn kills_are_counted_from_the_start() {
        let oom_kills = OomKills { groups: Cgroups::default(), before: 0 };
        assert_eq!(oom_kills.get(), machine_kills().unwrap());
        assert_eq!(oom_kills.shortage(), "the machine ran out of memory");
        assert_eq!(OomKills::count(Cgroups::default()).get(), 0);
    }
}
