//! Memory of this machine, for limits that are a share of it.

use std::fs;

/// Returns the memory of this machine, or of this process's memory group if it has less.
pub fn total_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    let ram_bytes = system.totalram * u64::from(system.mem_unit);
    let groups = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let group_bytes = groups.iter().find_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok());
    ram_bytes.min(group_bytes.unwrap_or(u64::MAX))
}
