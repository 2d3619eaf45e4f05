//! The memory cgroups that hold this process: its own and the ancestors.
//!
//! `/proc/self/cgroup` names the group of each hierarchy, `/proc/self/mountinfo` says where a
//! hierarchy is mounted, and from which group on. Version 1, version 2 and both side by side are
//! read. In a cgroup namespace, and where a container has only its own group mounted, the group may
//! lie above the mount: then the mount's own directory is the closest group that can be seen. A
//! group of version 1 also shows the lowest limit of all its ancestors, even of ancestors outside
//! the mount.
//!
//! Everything is read below a root directory, which is `/` but for tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Limits from this one up count as no limit: version 1 reports "no limit" as a number above all
/// memory.
const NO_LIMIT_BYTES: u64 = 1 << 60;
/// Mapped files in use count as not droppable up to this share of the limit (1/2^3): the kernel
/// could drop their pages, but the program would read them again at once.
const FILES_SHIFT: u32 = 3;

/// The version of a group's hierarchy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy for all controllers.
    V2,
}

/// One cgroup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cgroup {
    version: Version,
    /// The group's directory.
    directory: PathBuf,
    /// The group's path as people know it: below the mount of its hierarchy.
    name: String,
}

/// The parts of a group's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// All of it.
    pub all_bytes: u64,
    /// Files that the kernel drops where memory is short.
    pub droppable_bytes: u64,
}

impl Cgroup {
    /// Returns the group's path for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limit of the group itself, if it has one. `memory.high` counts, too: beyond it
    /// the kernel slows the group down.
    pub fn limit_bytes(&self) -> Option<u64> {
        let limits = match self.version {
            Version::V1 => {
                let ancestors = self.stat().get("hierarchical_memory_limit").copied();
                [self.number("memory.limit_in_bytes"), ancestors]
            }
            Version::V2 => [self.number("memory.max"), self.number("memory.high")],
        };
        limits.into_iter().flatten().min().filter(|&bytes| bytes < NO_LIMIT_BYTES)
    }

    /// Returns all memory that the group takes, in bytes.
    pub fn usage_bytes(&self) -> u64 {
        let file = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        self.number(file).unwrap_or(0)
    }

    /// Returns what the group takes of a limit of `limit_bytes`.
    pub fn usage(&self, limit_bytes: u64) -> Usage {
        let prefix = match self.version {
            Version::V1 => "total_",
            Version::V2 => "",
        };
        let stat = self.stat();
        let of = |name: &str| stat.get(format!("{prefix}{name}").as_str()).copied().unwrap_or(0);
        let [mapped, dirty, writeback] = match self.version {
            Version::V1 => ["mapped_file", "dirty", "writeback"],
            Version::V2 => ["file_mapped", "file_dirty", "file_writeback"],
        }
        .map(of);
        let (active, inactive) = (of("active_file"), of("inactive_file"));
        let in_use = (mapped.min(active) + dirty + writeback).min(limit_bytes >> FILES_SHIFT);
        Usage { all_bytes: self.usage_bytes(), droppable_bytes: (active + inactive).saturating_sub(in_use) }
    }

    /// Returns how many processes of the group the kernel has killed because memory was short.
    pub fn oom_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        self.table(file).get("oom_kill").copied()
    }

    fn stat(&self) -> BTreeMap<String, u64> {
        self.table("memory.stat")
    }

    /// Reads a file with a name and a number in each line.
    fn table(&self, file: &str) -> BTreeMap<String, u64> {
        let text = fs::read_to_string(self.directory.join(file)).unwrap_or_default();
        let entry = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        };
        text.lines().filter_map(entry).collect()
    }

    /// Reads a file with one number; `None` for `max`, and where there is no such file.
    fn number(&self, file: &str) -> Option<u64> {
        fs::read_to_string(self.directory.join(file)).ok()?.trim().parse().ok()
    }
}

/// The cgroups of this process, from its own on upwards.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cgroups {
    groups: Vec<Cgroup>,
}

impl Cgroups {
    /// Finds the groups of this process. `root` is the directory that has `proc` and the mounts.
    pub fn find(root: &Path) -> Cgroups {
        let text = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
        let mountinfo = text("proc/self/mountinfo");
        let mounts: Vec<Mount> = mountinfo.lines().filter_map(Mount::parse).collect();
        let of_line = |line: &str| {
            let (version, group) = hierarchy(line)?;
            // Of several mounts the one that shows most ancestors.
            let candidates = mounts.iter().filter(|mount| mount.version == version);
            let mount = candidates.min_by_key(|mount| (mount.below(group).is_none(), mount.group.len()))?;
            Some(mount.groups(root, group))
        };
        let groups = text("proc/self/cgroup").lines().filter_map(of_line).flatten().collect();
        Cgroups { groups }
    }

    /// Iterates over the groups that have a limit, with their limits in bytes.
    pub fn limited(&self) -> impl Iterator<Item = (&Cgroup, u64)> {
        self.groups.iter().filter_map(|group| Some((group, group.limit_bytes()?)))
    }

    /// Returns the group with the lowest limit, and that limit in bytes.
    pub fn tightest(&self) -> Option<(&Cgroup, u64)> {
        self.limited().min_by_key(|(_, limit_bytes)| *limit_bytes)
    }

    /// Returns the process's own group.
    pub fn own(&self) -> Option<&Cgroup> {
        self.groups.first()
    }
}

/// Returns the version and the path of the cgroup that a line of `/proc/self/cgroup` names.
fn hierarchy(line: &str) -> Option<(Version, &str)> {
    let mut fields = line.splitn(3, ':');
    let (_number, controllers, group) = (fields.next()?, fields.next()?, fields.next()?);
    match controllers {
        "" => Some((Version::V2, group)),
        some => some.split(',').any(|controller| controller == "memory").then_some((Version::V1, group)),
    }
}

/// A mounted hierarchy that may have cgroups.
#[derive(PartialEq, Eq, Debug)]
struct Mount {
    version: Version,
    /// The group at the mount's own directory.
    group: String,
    point: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
    fn parse(line: &str) -> Option<Mount> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (group, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let mut fields = file_system.split(' ');
        let (kind, _source, options) = (fields.next()?, fields.next()?, fields.next()?);
        let version = match kind {
            "cgroup2" => Version::V2,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::V1,
            _ => return None,
        };
        Some(Mount { version, group, point: point.into() })
    }

    /// Returns the path of `group` below the mount; `None` if the mount does not show that group.
    fn below(&self, group: &str) -> Option<PathBuf> {
        let below = Path::new(group).strip_prefix(&self.group).ok()?;
        let is_below = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        is_below.then(|| below.to_owned())
    }

    /// Returns `group` and its ancestors, as far as the mount shows them.
    fn groups(&self, root: &Path, group: &str) -> Vec<Cgroup> {
        let point = root.join(self.point.strip_prefix("/").unwrap_or(&self.point));
        let below = self.below(group).unwrap_or_default();
        let group = |path: &Path| Cgroup {
            version: self.version,
            directory: point.join(path),
            name: format!("/{}", path.display()),
        };
        let limit_file = match self.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        let groups = below.ancestors().map(group);
        groups.filter(|group| group.directory.join(limit_file).exists()).collect()
    }
}

/// Decodes a path of mountinfo, where `\040` is a space.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                whole.push(char::from(byte));
                whole.push_str(&part[3..]);
            }
            None => {
                whole.push('\\');
                whole.push_str(part);
            }
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A root directory with files. Dropping it removes the directory.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, cgroup: &str, mountinfo: &str, files: &[(&str, &str)]) -> Root {
            let root = Root(std::env::temp_dir().join(format!("foliomem-{name}-{}", std::process::id())));
            let all = [("proc/self/cgroup", cgroup), ("proc/self/mountinfo", mountinfo)];
            for (path, content) in all.iter().chain(files) {
                let path = root.0.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            root
        }

        fn limits(&self) -> Vec<(String, u64)> {
            let groups = Cgroups::find(&self.0);
            groups.limited().map(|(group, bytes)| (group.name().to_owned(), bytes)).collect()
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const NONE_V1: &str = "9223372036854771712\n";

    #[test]
    fn a_nested_group_of_version_1_and_its_ancestors_are_read() {
        let root = Root::new(
            "groups-v1",
            "9:name=systemd:/\n4:cpu,memory:/outer/in\\ner\n0::/\n",
            "35 31 0:32 / /sys/fs/cgroup/mem\\040ory rw,relatime - cgroup cgroup rw,cpu,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
            &[
                ("sys/fs/cgroup/mem ory/memory.limit_in_bytes", NONE_V1),
                ("sys/fs/cgroup/mem ory/outer/memory.limit_in_bytes", "268435456\n"),
                ("sys/fs/cgroup/mem ory/outer/in\\ner/memory.limit_in_bytes", NONE_V1),
                (
                    "sys/fs/cgroup/mem ory/outer/in\\ner/memory.oom_control",
                    "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
                ),
            ],
        );
        assert_eq!(root.limits(), [("/outer".to_owned(), 256 << 20)]);
        let groups = Cgroups::find(&root.0);
        assert_eq!(groups.own().unwrap().name(), "/outer/in\\ner");
        assert_eq!(groups.own().unwrap().oom_kills(), Some(3));
        assert_eq!(groups.tightest().unwrap().1, 256 << 20);
    }

    #[test]
    fn an_ancestor_that_cannot_be_seen_limits_a_group_of_version_1() {
        let root = Root::new(
            "groups-hidden",
            "4:memory:/docker/abc\n",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            &[
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", NONE_V1),
                ("sys/fs/cgroup/memory/memory.stat", "cache 1\nhierarchical_memory_limit 1048576\n"),
            ],
        );
        assert_eq!(root.limits(), [("/".to_owned(), 1 << 20)]);
    }

    #[test]
    fn a_group_of_version_2_is_limited_by_max_and_by_high() {
        let files = [
            ("sys/fs/cgroup/a/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/a/memory.high", "max\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.high", "536870912\n"),
            ("sys/fs/cgroup/a/b/memory.events", "low 0\nhigh 7\nmax 0\noom 1\noom_kill 1\n"),
        ];
        let mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let root = Root::new("groups-v2", "0::/a/b\n", mount, &files);
        assert_eq!(root.limits(), [("/a/b".to_owned(), 512 << 20), ("/a".to_owned(), 1 << 30)]);
        assert_eq!(Cgroups::find(&root.0).own().unwrap().oom_kills(), Some(1));
    }

    #[test]
    fn in_a_cgroup_namespace_the_mount_is_the_group() {
        let limit = [("sys/fs/cgroup/memory.max", "268435456\n")];
        // The namespace's own view; a process that was moved out of it; a mount from outside of it.
        for (name, cgroup, group) in [("own", "/", "/"), ("moved", "/../other", "/"), ("outside", "/x", "/../..")] {
            let mount = format!("30 23 0:26 {group} /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
            let root = Root::new(&format!("groups-{name}"), &format!("0::{cgroup}\n"), &mount, &limit);
            assert_eq!(root.limits(), [("/".to_owned(), 256 << 20)], "{name}");
        }
    }

    #[test]
    fn the_mount_that_shows_most_ancestors_is_used() {
        let root = Root::new(
            "groups-mounts",
            "4:memory:/a/b\n",
            "1 1 0:1 /a/b /inner rw - cgroup cgroup rw,memory\n2 1 0:1 / /whole rw - cgroup cgroup rw,memory\n\
             3 1 0:1 /c /other rw - cgroup cgroup rw,memory\n",
            &[("whole/a/memory.limit_in_bytes", "4096\n"), ("inner/memory.limit_in_bytes", "8192\n")],
        );
        assert_eq!(root.limits(), [("/a".to_owned(), 4096)]);
    }

    #[test]
    fn where_there_are_no_groups_there_is_no_limit() {
        assert_eq!(Cgroups::find(Path::new("/nonexistent")), Cgroups::default());
        let root = Root::new("groups-none", "0::/\n", "", &[]);
        assert_eq!(root.limits(), []);
    }

    #[test]
    fn files_that_are_in_use_count_up_to_an_eighth_of_the_limit() {
        let stat = "total_active_file 100\ntotal_inactive_file 1000\ntotal_mapped_file 300\ntotal_dirty 20\n";
        let files =
            [("m/memory.limit_in_bytes", "8000\n"), ("m/memory.usage_in_bytes", "5000\n"), ("m/memory.stat", stat)];
        let root = Root::new("groups-usage", "4:memory:/\n", "1 1 0:1 / /m rw - cgroup cgroup rw,memory\n", &files);
        let groups = Cgroups::find(&root.0);
        let usage = |limit| groups.own().unwrap().usage(limit);
        assert_eq!(usage(8000), Usage { all_bytes: 5000, droppable_bytes: 980 });
        assert_eq!(usage(80), Usage { all_bytes: 5000, droppable_bytes: 1090 });
    }

    proptest! {
        #[test]
        fn strange_files_name_no_group_outside_of_the_mounts(
            cgroup in "([0-9]:(memory)?:[/.a-z]{0,6}\n|[ -~]{0,20}\n){0,4}",
            mountinfo in "([0-9] [0-9] 0:1 [/.a-z]{0,4} /m[/.\\\\0-9a-z]{0,6} rw - cgroup2? c rw,memory\n|[ -~]{0,40}\n){0,4}",
        ) {
            let root = Root::new("groups-strange", &cgroup, &mountinfo, &[]);
            prop_assert_eq!(root.limits(), []);
        }
    }
}
