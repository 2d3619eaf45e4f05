//! Sets up the kernel's own swap for a measurement: zram with lz4, one mTHP size, a memory control
//! group.
//!
//! Every change is recorded in an [`Undo`] before it is made. The device is the first unused zram
//! device, or a new one. The cgroup is of version 1 or 2, as found. *Not* changed: the machine's
//! other swap devices (this one has the highest priority), swappiness, and khugepaged.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::undo::{Undo, quote};
use crate::{Error, MIB};

/// The root of the machine's settings: `/`, or a similar directory in tests.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// Uses settings below `dir` instead of `/`.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.join(below)
    }

    fn thp(&self) -> PathBuf {
        self.path("sys/kernel/mm/transparent_hugepage")
    }

    /// Returns the directory of one mTHP size's controls and counters; `None` for 4K, which is no
    /// mTHP size.
    #[must_use]
    pub fn mthp(&self, size_kib: u64) -> Option<PathBuf> {
        (size_kib > 4).then(|| self.thp().join(format!("hugepages-{size_kib}kB")))
    }
}

/// zram's counters (`mm_stat`), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmStat {
    /// Uncompressed size of the stored pages.
    pub orig_data_size: u64,
    /// Compressed size of the stored pages.
    pub compr_data_size: u64,
    /// Memory of the stored pages, with the allocator's waste.
    pub mem_used_total: u64,
    /// Peak of the memory in use.
    pub mem_used_max: u64,
}

impl MmStat {
    /// Reads a device's `mm_stat` file.
    ///
    /// # Errors
    /// Fails if the file does not exist or has too few fields.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read(path)?;
        Self::parse(&text).ok_or_else(|| Error::parse(path.display().to_string(), &text))
    }

    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<u64> = text.split_whitespace().map_while(|f| f.parse().ok()).collect();
        match fields[..] {
            [orig_data_size, compr_data_size, mem_used_total, _limit, mem_used_max, ..] => {
                Some(Self { orig_data_size, compr_data_size, mem_used_total, mem_used_max })
            }
            _ => None,
        }
    }
}

/// The memory that gets folios of the size that is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Folios {
    /// All memory of the machine.
    Everywhere,
    /// Only memory with `MADV_HUGEPAGE`.
    WhereAdvised,
}

/// The machine with zram swap and one folio size. Its settings are restored on drop, and when this
/// process dies.
#[derive(Debug)]
pub struct KernelSwap {
    undo: Undo,
    mm_stat: PathBuf,
    groups: u32,
    root: Root,
}

impl KernelSwap {
    /// Sets up zram swap with lz4 and folios of `size_kib` (4: single pages only). Returns `None`
    /// if that is impossible: not root, no zram, or a kernel without folios of this size.
    ///
    /// # Errors
    /// Fails if a step fails that should work here. All changes until then are restored.
    pub fn set_up(root: &Root, size_kib: u64, folios: Folios) -> Result<Option<Self>, Error> {
        let zram = root.path("sys/class/zram-control").is_dir() || root.path("sys/block/zram0").is_dir();
        let known = root.mthp(size_kib).is_none_or(|dir| dir.join("enabled").is_file());
        if !rustix::process::geteuid().is_root() || !zram || !known {
            return Ok(None);
        }
        let mut undo = Undo::new()?;
        set_folio_size(root, size_kib, folios, &mut undo)?;
        // No readahead: the usual setting for zram, and the kernel's fastest. Synchronous swap-in
        // of a slot with one owner ignores it.
        set_plain(&root.path("proc/sys/vm/page-cluster"), "0", &mut undo)?;
        let Some(device) = set_up_zram(root, &mut undo)? else { return Ok(None) };
        let mm_stat = root.path(&format!("sys/block/{device}/mm_stat"));
        Ok(Some(Self { undo, mm_stat, groups: 0, root: root.clone() }))
    }

    /// Returns the path of the device's `mm_stat`.
    #[must_use]
    pub fn mm_stat_path(&self) -> &Path {
        &self.mm_stat
    }

    /// Creates a cgroup that limits memory, without swap, to `limit` bytes. Returns `None` if no
    /// memory controller is usable here.
    ///
    /// # Errors
    /// Fails if the group cannot be created or refuses the limit.
    pub fn group(&mut self, limit: u64) -> Result<Option<Group>, Error> {
        self.groups += 1;
        make_group(&self.root, self.groups, limit, &mut self.undo)
    }

    /// Restores everything now and returns whether that worked. A drop restores everything too, but
    /// only prints a message on failure.
    ///
    /// # Errors
    /// Fails with [`Error::NotRestored`].
    pub fn restore(self) -> Result<(), Error> {
        self.undo.restore()
    }
}

/// Runs `measure` in a new group of `limit` bytes over a new swap device, so that both peaks belong
/// to `measure` alone. Returns its result and the sum of both peaks in bytes; `None` if such a
/// group is impossible here.
///
/// # Errors
/// Fails if `measure` fails, or if something cannot be set up, read or restored.
pub fn in_group<T>(
    size_kib: u64,
    limit: u64,
    measure: impl FnOnce(&Group) -> Result<T, Error>,
) -> Result<Option<(T, u64)>, Error> {
    let Some(mut swap) = KernelSwap::set_up(&Root::default(), size_kib, Folios::Everywhere)? else { return Ok(None) };
    let Some(group) = swap.group(limit)? else { return Ok(None) };
    let measured = measure(&group)?;
    let total = group.peak()? + MmStat::read(swap.mm_stat_path())?.mem_used_max;
    swap.restore()?;
    Ok(Some((measured, total)))
}

/// A maker of memory cgroups. They are removed when it is dropped, and when this process dies.
#[derive(Debug)]
pub struct GroupMaker {
    undo: Undo,
    root: Root,
    groups: u32,
}

impl GroupMaker {
    /// A maker of groups under `root`.
    ///
    /// # Errors
    /// Fails if no shell can be started.
    pub fn new(root: &Root) -> Result<Self, Error> {
        Ok(Self { undo: Undo::new()?, root: root.clone(), groups: 0 })
    }

    /// Creates a group that limits memory to `limit` bytes. Returns `None` if that is impossible
    /// here: not root, or no memory controller.
    ///
    /// # Errors
    /// Fails if the group cannot be created or refuses the limit.
    pub fn make(&mut self, limit: u64) -> Result<Option<Group>, Error> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        self.groups += 1;
        make_group(&self.root, self.groups, limit, &mut self.undo)
    }

    /// Removes all groups now and returns whether that worked.
    ///
    /// # Errors
    /// Fails with [`Error::NotRestored`].
    pub fn restore(self) -> Result<(), Error> {
        self.undo.restore()
    }
}

/// A memory cgroup. Its maker removes it.
#[derive(Debug, Clone)]
pub struct Group {
    dir: PathBuf,
    files: &'static GroupFiles,
}

/// Names of a group's files, and of lines in them.
#[derive(Debug)]
struct GroupFiles {
    limit: &'static str,
    peak: &'static str,
    /// Counts processes that the kernel killed, in a line `oom_kill`.
    kills: &'static str,
    /// Lines of `memory.stat` whose sum is anonymous and shared memory, with nested groups.
    anonymous: [&'static str; 2],
    /// The file that reclaims, and the text that asks for everything.
    reclaim: (&'static str, &'static str),
}

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    peak: "memory.max_usage_in_bytes",
    kills: "memory.oom_control",
    anonymous: ["total_rss", "total_shmem"],
    reclaim: ("memory.force_empty", "0"),
};
const VERSION_2: GroupFiles = GroupFiles {
    limit: "memory.max",
    peak: "memory.peak",
    kills: "memory.events",
    anonymous: ["anon", "shmem"],
    reclaim: ("memory.reclaim", "1T"),
};

impl Group {
    /// Returns a command that runs the program and arguments of `command` inside the group. The
    /// caller sets environment and working directory again.
    #[must_use]
    pub fn inside(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(self.dir.join("cgroup.procs"));
        shell.arg(command.get_program()).args(command.get_args());
        shell
    }

    /// Returns the peak of the group's charged memory in bytes, without swap.
    ///
    /// # Errors
    /// Fails if the kernel has no such figure.
    pub fn peak(&self) -> Result<u64, Error> {
        read_number(&self.dir.join(self.files.peak))
    }

    /// Returns the group's anonymous and shared memory in bytes.
    ///
    /// # Errors
    /// Fails if the kernel has no such figures.
    pub fn anonymous(&self) -> Result<u64, Error> {
        let path = self.dir.join("memory.stat");
        let text = read(&path)?;
        self.files.anonymous.into_iter().map(|name| line_number(&path, &text, name)).sum()
    }

    /// Returns how many processes of the group the kernel has killed because of its limit.
    ///
    /// # Errors
    /// Fails if the kernel has no such figure.
    pub fn kills(&self) -> Result<u64, Error> {
        let path = self.dir.join(self.files.kills);
        line_number(&path, &read(&path)?, "oom_kill")
    }

    /// Has the kernel swap out whatever memory of the group it can.
    ///
    /// # Errors
    /// Fails if the kernel has no such file.
    pub fn reclaim_all(&self) -> Result<(), Error> {
        let (name, everything) = self.files.reclaim;
        let path = self.dir.join(name);
        match std::fs::write(&path, everything) {
            // Version 2 says so if it got less than it was asked for.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            written => written.map_err(Error::at(&path)),
        }
    }

    /// Removes the group if no process is left in it. Otherwise the undo that [`make_group`] has
    /// registered removes it.
    pub fn remove(self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Returns the number in the line `name` of a file of names and numbers.
fn line_number(path: &Path, text: &str, name: &str) -> Result<u64, Error> {
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    number.ok_or_else(|| Error::parse(path.display().to_string(), text))
}

/// Creates a group of `limit` bytes. Returns `None` if no memory controller is usable here.
fn make_group(root: &Root, number: u32, limit: u64, undo: &mut Undo) -> Result<Option<Group>, Error> {
    let name = format!("foliomem-bench-{}-{number}", std::process::id());
    let Some((dir, files)) = group_files(root, &name) else { return Ok(None) };
    let d = quote(&dir.to_string_lossy());
    undo.push(&format!(
        "if [ -d {d} ]; then while read -r p; do kill -9 $p; done < {d}/cgroup.procs; \
         for i in 1 2 3 4 5 6 7 8 9 10; do rmdir {d} && break; sleep 0.3; done; [ ! -d {d} ]; fi"
    ))?;
    std::fs::create_dir(&dir).map_err(Error::at(&dir))?;
    let path = dir.join(files.limit);
    std::fs::write(&path, limit.to_string()).map_err(Error::at(&path))?;
    Ok(Some(Group { dir, files }))
}

/// Returns directory and files of a memory cgroup, for the version found.
fn group_files(root: &Root, name: &str) -> Option<(PathBuf, &'static GroupFiles)> {
    let v1 = root.path("sys/fs/cgroup/memory");
    if v1.join("memory.limit_in_bytes").is_file() || v1.join("memory.usage_in_bytes").is_file() {
        return Some((v1.join(name), &VERSION_1));
    }
    let v2 = root.path("sys/fs/cgroup");
    let controllers = std::fs::read_to_string(v2.join("cgroup.subtree_control")).ok()?;
    controllers.split_whitespace().any(|c| c == "memory").then(|| (v2.join(name), &VERSION_2))
}

/// Enables folios of `size_kib` and disables all other sizes.
fn set_folio_size(root: &Root, size_kib: u64, folios: Folios, undo: &mut Undo) -> Result<(), Error> {
    let wanted = root.mthp(size_kib);
    let enabled = match folios {
        Folios::Everywhere => "always",
        Folios::WhereAdvised => "madvise",
    };
    let thp = root.thp();
    let Ok(entries) = std::fs::read_dir(&thp) else { return Ok(()) };
    let mut sizes: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    // Sizes that only files can have (8K) have no `enabled` file.
    sizes.retain(|dir| dir.to_string_lossy().contains("/hugepages-") && dir.join("enabled").exists());
    sizes.sort();
    for dir in sizes {
        let path = dir.join("enabled");
        let text = read(&path)?;
        let before = chosen(&text).ok_or_else(|| Error::parse(path.display().to_string(), &text))?;
        undo.write(&path, if wanted.as_ref() == Some(&dir) { enabled } else { "never" }, before)?;
    }
    Ok(())
}

/// Makes a free zram device a swap device and returns its name.
fn set_up_zram(root: &Root, undo: &mut Undo) -> Result<Option<String>, Error> {
    let Some(device) = free_zram(root, undo)? else { return Ok(None) };
    let sys = root.path(&format!("sys/block/{device}"));
    let node = format!("/dev/{device}");
    let algorithm = sys.join("comp_algorithm");
    let text = read(&algorithm)?;
    let before = chosen(&text).ok_or_else(|| Error::parse(algorithm.display().to_string(), &text))?;
    undo.write(&algorithm, "lz4", before)?;
    let (reset, size) = (sys.join("reset"), sys.join("disksize"));
    let (r, s) = (quote(&reset.to_string_lossy()), quote(&size.to_string_lossy()));
    // A watcher of new block devices may hold the device open for a moment (EBUSY).
    undo.push(&format!(
        "for i in 1 2 3 4 5 6 7 8 9 10; do printf 1 > {r} && break; sleep 0.3; done; [ \"$(cat {s})\" = 0 ]"
    ))?;
    std::fs::write(&size, DISK_BYTES.to_string()).map_err(Error::at(&size))?;
    run(Command::new("mkswap").arg(&node))?;
    undo.push(&format!("if grep -q '^{node}[[:space:]]' /proc/swaps; then swapoff {node}; fi"))?;
    run(Command::new("swapon").args(["-p", "32767"]).arg(&node))?;
    Ok(Some(device))
}

/// Returns the first zram device without a size, or a new one.
fn free_zram(root: &Root, undo: &mut Undo) -> Result<Option<String>, Error> {
    let block = root.path("sys/block");
    let mut devices: Vec<String> = std::fs::read_dir(&block)
        .map_err(Error::at(&block))?
        .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| name.starts_with("zram"))
        .collect();
    devices.sort();
    for name in devices {
        if read_number(&block.join(&name).join("disksize"))? == 0 {
            return Ok(Some(name));
        }
    }
    let add = root.path("sys/class/zram-control/hot_add");
    let Ok(number) = std::fs::read_to_string(&add) else { return Ok(None) };
    let number: u32 = number.trim().parse().map_err(|_| Error::parse(add.display().to_string(), &number))?;
    let remove = root.path("sys/class/zram-control/hot_remove");
    undo.push(&format!("printf {number} > {}", quote(&remove.to_string_lossy())))?;
    Ok(Some(format!("zram{number}")))
}

/// Writes a setting whose file returns the value in the form in which it is written. Does nothing
/// if the file does not exist.
fn set_plain(path: &Path, value: &str, undo: &mut Undo) -> Result<(), Error> {
    if !path.exists() {
        return Ok(());
    }
    let before = read(path)?;
    undo.write(path, value, before.trim())
}

/// Returns the choice in brackets, `never` of `always [never]`. A file of one word is that word.
fn chosen(text: &str) -> Option<&str> {
    let bracketed = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(word, _)| word);
    bracketed.or_else(|| Some(text.trim()).filter(|t| !t.is_empty() && !t.contains(char::is_whitespace)))
}

/// Reads the whole file as text.
pub(crate) fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(Error::at(path))
}

/// Reads the file's only number.
pub(crate) fn read_number(path: &Path) -> Result<u64, Error> {
    let text = read(path)?;
    text.trim().parse().map_err(|_| Error::parse(path.display().to_string(), &text))
}

/// Runs a command to its end and returns its stdout.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(Error::doing(&shown))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Command { command: shown, said: said(&output.status, &output.stderr) })
}

/// Formats an exit status and the last lines of stderr in one line.
pub(crate) fn said(status: &std::process::ExitStatus, stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = text.lines().collect();
    format!("{status}: {}", lines[lines.len().saturating_sub(3)..].join(" / "))
}

/// Bytes of the zram device, so many that no measurement fills the device. The device takes memory
/// only for its content.
const DISK_BYTES: u64 = 6 * 1024 * MIB;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Creates a directory tree like the machine's settings.
    fn fake(name: &str) -> (PathBuf, Root) {
        let dir = std::env::temp_dir().join(format!("foliomem-kernel-{}-{name}", std::process::id()));
        for (size, text) in [
            (64, "always inherit madvise [never]\n"),
            (2048, "always [inherit] madvise never\n"),
            (16, "[always] inherit madvise never\n"),
        ] {
            let mthp = dir.join(format!("sys/kernel/mm/transparent_hugepage/hugepages-{size}kB"));
            std::fs::create_dir_all(&mthp).unwrap();
            std::fs::write(mthp.join("enabled"), text).unwrap();
        }
        std::fs::create_dir_all(dir.join("proc/sys/vm")).unwrap();
        std::fs::write(dir.join("proc/sys/vm/page-cluster"), "3\n").unwrap();
        std::fs::create_dir_all(dir.join("sys/block/zram0")).unwrap();
        std::fs::write(dir.join("sys/block/zram0/disksize"), "1048576\n").unwrap();
        std::fs::create_dir_all(dir.join("sys/kernel/mm/transparent_hugepage/hugepages-8kB/stats")).unwrap();
        let root = Root::at(&dir);
        (dir, root)
    }

    fn enabled(root: &Root, size: u64) -> String {
        read(&root.mthp(size).unwrap().join("enabled")).unwrap()
    }

    #[test]
    fn one_size_is_enabled_and_all_sizes_are_restored() {
        let (dir, root) = fake("sizes");
        {
            let mut undo = Undo::new().unwrap();
            set_folio_size(&root, 64, Folios::Everywhere, &mut undo).unwrap();
            set_plain(&root.path("proc/sys/vm/page-cluster"), "0", &mut undo).unwrap();
            assert_eq!([64, 2048, 16].map(|s| enabled(&root, s)), ["always", "never", "never"]);
            assert_eq!(read(&root.path("proc/sys/vm/page-cluster")).unwrap(), "0");
        }
        assert_eq!([64, 2048, 16].map(|s| enabled(&root, s)), ["never", "inherit", "always"]);
        assert_eq!(read(&root.path("proc/sys/vm/page-cluster")).unwrap(), "3");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn single_pages_disable_every_size() {
        let (dir, root) = fake("pages");
        let mut undo = Undo::new().unwrap();
        set_folio_size(&root, 4, Folios::WhereAdvised, &mut undo).unwrap();
        assert_eq!([64, 2048, 16].map(|s| enabled(&root, s)), ["never", "never", "never"]);
        undo.restore().unwrap();
        let mut undo = Undo::new().unwrap();
        set_folio_size(&root, 2048, Folios::WhereAdvised, &mut undo).unwrap();
        assert_eq!([64, 2048, 16].map(|s| enabled(&root, s)), ["never", "madvise", "never"]);
        undo.restore().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_device_in_use_stays_and_a_new_one_is_removed() {
        let (dir, root) = fake("zram");
        let mut undo = Undo::new().unwrap();
        assert_eq!(free_zram(&root, &mut undo).unwrap(), None, "no hot_add here");
        let control = dir.join("sys/class/zram-control");
        std::fs::create_dir_all(&control).unwrap();
        std::fs::write(control.join("hot_add"), "1\n").unwrap();
        assert_eq!(free_zram(&root, &mut undo).unwrap().as_deref(), Some("zram1"));
        undo.restore().unwrap();
        assert_eq!(read(&control.join("hot_remove")).unwrap(), "1");
        std::fs::write(dir.join("sys/block/zram0/disksize"), "0\n").unwrap();
        let mut undo = Undo::new().unwrap();
        assert_eq!(free_zram(&root, &mut undo).unwrap().as_deref(), Some("zram0"));
        drop(undo);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_failure_half_way_restores_everything() {
        let (dir, root) = fake("half");
        // In the order of names, 16kB and 2048kB are changed before the unreadable 64kB.
        std::fs::write(root.mthp(64).unwrap().join("enabled"), "what is this").unwrap();
        {
            let mut undo = Undo::new().unwrap();
            assert!(matches!(set_folio_size(&root, 64, Folios::Everywhere, &mut undo), Err(Error::Parse { .. })));
            assert_eq!(enabled(&root, 16), "never");
        }
        assert_eq!([2048, 16].map(|s| enabled(&root, s)), ["inherit", "always"]);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_choice_is_in_brackets() {
        assert_eq!(chosen("lzo-rle [lz4] zstd"), Some("lz4"));
        assert_eq!(chosen("3\n"), Some("3"));
        assert_eq!(chosen("a b"), None);
        assert_eq!(chosen(""), None);
    }

    proptest! {
        #[test]
        fn mm_stat_parses_back(fields: [u64; 5], more in 0usize..5) {
            let [orig_data_size, compr_data_size, mem_used_total, limit, mem_used_max] = fields;
            let text = format!("{orig_data_size:>8} {compr_data_size} {mem_used_total} {limit} {mem_used_max}");
            let stat = MmStat { orig_data_size, compr_data_size, mem_used_total, mem_used_max };
            prop_assert_eq!(MmStat::parse(&(text + &" 7".repeat(more) + "\n")), Some(stat));
        }

        #[test]
        fn strange_kernel_files_are_errors_that_name_the_file(noise in prop::collection::vec(any::<u8>(), 0..80), text in "[0-9 a\\[\\]\n.-]{0,60}") {
            let path = std::env::temp_dir().join(format!("foliomem-strange-{}", std::process::id()));
            for content in [&noise[..], text.as_bytes()] {
                std::fs::write(&path, content).unwrap();
                let outcomes = [MmStat::read(&path).err(), read_number(&path).err()];
                for error in outcomes.into_iter().flatten() {
                    prop_assert!(error.to_string().contains("foliomem-strange"), "{error}");
                }
            }
            std::fs::remove_file(&path).unwrap();
            if let Some(word) = chosen(&text) {
                prop_assert!(text.contains(word));
            }
        }
    }

    #[test]
    fn mm_stat_fields_are_read_by_position() {
        let path = std::env::temp_dir().join(format!("foliomem-mm-stat-{}", std::process::id()));
        std::fs::write(&path, "  8192  100  4096  0  5000  0  0  0  0\n").unwrap();
        let stat = MmStat { orig_data_size: 8192, compr_data_size: 100, mem_used_total: 4096, mem_used_max: 5000 };
        assert_eq!(MmStat::read(&path).unwrap(), stat);
        std::fs::write(&path, "8192 x\n").unwrap();
        assert!(MmStat::read(&path).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
