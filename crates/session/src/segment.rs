//! The control segment: memory that the supervisor shares with the agent in every process of a run.
//!
//! The segment is a memfd that the supervisor keeps open. Agents find it by the variable
//! `FOLIOMEM_CONTROL=/proc/<pid>/fd/<n>:<door>`. It holds the settings (written before the program
//! starts), the process table, messages, the ownership of the swap file's clusters, and trace
//! rings.
//!
//! Invariant: all words are atomics and no state needs two writes, because a process can be killed
//! at any instruction. The only lock (of the totals, in [`crate::process_table`]) names its owner,
//! so that another process can break it.

use crate::cluster_ownership::SwapSpace;
use crate::configuration::SettingWords;
use crate::content_sample::ContentSample;
use crate::custody::Calls;
use crate::door;
use crate::messages::{MAX_NOTICES, Message};
use crate::process_table::{MAX_PROCESSES, ProcessSlot};
use crate::trace_ring::TraceRing;
use foliomem_sys::shared_memory::Mapped;
use foliomem_sys::shared_words;
use foliomem_types::counters::Counters;
use foliomem_types::settings::Configuration;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use thiserror::Error;

/// "foliomem" in the byte order of the machine. [`VERSION`] changes with every change of the
/// layout.
const MAGIC: u64 = u64::from_le_bytes(*b"foliomem");
const VERSION: u64 = 29;
/// The segment's name: /proc shows it as `/memfd:` and this.
pub(crate) const SEGMENT_NAME: &CStr = c"foliomem-control";
/// Maximum length of the path of a [`door`], in words: more than a socket's address can have.
const DOOR_WORDS: usize = 16;
/// Maximum length of the path of a descriptor under `/proc`, in bytes.
const MAX_PATH_BYTES: usize = 64;

/// The seals of a segment: it cannot shrink, which would raise SIGBUS in every process that maps
/// it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::SEAL);

/// Why the segment cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ControlError {
    /// A system call failed.
    #[error("cannot {0} the control segment: {1}")]
    System(&'static str, Errno),
    /// The file is no segment, or one of another version.
    #[error("the control segment is of another version of foliomem")]
    Version,
    /// Every slot is taken by a living process.
    #[error("more than {MAX_PROCESSES} processes in one run")]
    Full,
}

shared_words! {
    /// The part of the segment with one value for the whole run.
    pub(crate) struct Header {
        pub(crate) magic: AtomicU64,
        pub(crate) version: AtomicU64,
        pub(crate) settings: SettingWords,
        /// The current limit of the tree.
        pub(crate) limit_bytes: AtomicU64,
        /// The limit that is wanted by hand ([`crate::wanted_limit`]), and the one that the
        /// supervisor has applied last.
        pub(crate) wanted_limit: AtomicU64,
        pub(crate) applied_limit: AtomicU64,
        pub(crate) hellos: AtomicU32,
        /// Number of slots that were ever claimed.
        pub(crate) slots_used: AtomicU32,
        pub(crate) processes: AtomicU32,
        pub(crate) limit_exceeded: AtomicU32,
        /// Whether somebody was told of a core dump with zeros.
        pub(crate) core_dump_announced: AtomicU32,
        /// 1 once a process found no free slot.
        pub(crate) is_crowded: AtomicU32,
        /// 1 once a process of the program has become a subreaper.
        pub(crate) has_subreaper: AtomicU32,
        /// The path of the [`door`], up to its first 0 byte; empty without a door.
        pub(crate) door: [AtomicU64; DOOR_WORDS],
        /// Why the run must end.
        pub(crate) failure: Message,
        pub(crate) notices_used: AtomicU32,
        pub(crate) notices: [Message; MAX_NOTICES],
        /// The pid of the process that holds the lock of `totals`, the counters of ended processes;
        /// 0 if the lock is free.
        pub(crate) totals_owner: AtomicU32,
        /// The supervisor's exit notice: the kernel marks this word when the supervisor ends.
        pub(crate) supervisor: AtomicU32,
        /// 1 once the supervisor has ended the run.
        pub(crate) is_over: AtomicU32,
        /// The maximum of the tree's need, in bytes, if the limit follows the need.
        pub(crate) need_peak_bytes: AtomicU64,
        /// When a process of the tree was last seen to shrink, in nanoseconds.
        pub(crate) shrunk_ns: AtomicU64,
        /// The maximum size of ended processes at their last measurement, in bytes.
        pub(crate) ended_peak_bytes: AtomicU64,
        /// The peaks of the tree's size and of its need, in bytes, as the supervisor has sampled
        /// them.
        pub(crate) taken_peak_bytes: AtomicU64,
        pub(crate) needed_peak_bytes: AtomicU64,
        /// The start of the program, on the monotonic clock.
        pub(crate) started_ns: AtomicU64,
        /// The memory of processes without an agent, which the supervisor measures, in bytes.
        pub(crate) unmanaged_bytes: AtomicU64,
        /// The memory of the shared store, which the supervisor measures, in bytes.
        pub(crate) shared_store_bytes: AtomicU64,
        /// Number of families so far.
        pub(crate) families: AtomicU32,
        /// The time that the run has waited for memory, as the supervisor samples it, how many
        /// times it has begun to thrash, and how many times a process was held.
        pub(crate) memory_stall_ns: AtomicU64,
        pub(crate) thrashing: AtomicU64,
        pub(crate) turns: AtomicU64,
        /// The inode of the supervisor's pid namespace; 0 if unknown.
        pub(crate) pid_namespace: AtomicU64,
        pub(crate) custody: Calls,
    }

    /// The control segment.
    pub struct Control {
        pub(crate) header: Header,
        pub(crate) totals: Counters,
        pub(crate) processes: [ProcessSlot; MAX_PROCESSES],
        /// The content sample of each slot. Unwritten samples take no memory.
        pub(crate) samples: [ContentSample; MAX_PROCESSES],
        pub(crate) swap: SwapSpace,
        /// The trace ring of each slot. Unwritten rings take no memory.
        pub(crate) traces: [TraceRing; MAX_PROCESSES],
    }
}

fn map(fd: &OwnedFd) -> Result<Mapped<Control>, ControlError> {
    Mapped::new(fd).map_err(|errno| ControlError::System("map", errno))
}

impl Control {
    /// Creates a segment. The descriptor must stay open as long as processes may start. Fails if a
    /// system call fails.
    pub fn create(configuration: &Configuration) -> Result<(&'static Control, OwnedFd), ControlError> {
        let fd = memfd_create(SEGMENT_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| ControlError::System("create", errno))?;
        ftruncate(&fd, size_of::<Control>() as u64).map_err(|errno| ControlError::System("size", errno))?;
        fcntl_add_seals(&fd, SEALS).map_err(|errno| ControlError::System("seal", errno))?;
        let control = map(&fd)?.leak();
        let header = &control.header;
        header.settings.set(configuration);
        header.limit_bytes.store(configuration.limit.start_bytes(), Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        // Release pairs with the Acquire in `of`: the header is complete.
        header.magic.store(MAGIC, Ordering::Release);
        Ok((control, fd))
    }

    /// Maps the segment that `name` names: the path of the supervisor's descriptor under `/proc`
    /// and, after a colon, the path of a [`door`].
    ///
    /// If the segment came through the door, `/dev/userfaultfd` comes with it.
    pub fn find(name: &CStr) -> Result<(&'static Control, Option<OwnedFd>), ControlError> {
        let bytes = name.to_bytes();
        let Some(colon) = bytes.iter().position(|&byte| byte == b':') else {
            return Ok((Control::open(name)?, None));
        };
        let mut path = [0u8; MAX_PATH_BYTES];
        let path = path.get_mut(..colon + 1).ok_or(ControlError::System("open", Errno::NAMETOOLONG))?;
        path[..colon].copy_from_slice(&bytes[..colon]);
        let path = CStr::from_bytes_with_nul(path).map_err(|_| ControlError::System("open", Errno::INVAL))?;
        Control::open(path).map(|control| (control, None)).or_else(|_| {
            // The part after the colon ends with the same nul byte.
            let door = CStr::from_bytes_with_nul(&name.to_bytes_with_nul()[colon + 1..]);
            let door = door.map_err(|_| ControlError::System("open", Errno::INVAL))?;
            let given = door::knock(door).map_err(|errno| ControlError::System("open", errno))?;
            Ok((Control::of(given.segment)?, given.device))
        })
    }

    /// Publishes the path of a [`door`], if it is short enough for a socket. The supervisor calls
    /// this.
    pub fn set_door(&self, path: &Path) {
        let mut bytes = [0u8; DOOR_WORDS * 8];
        let path = path.as_os_str().as_bytes();
        // The last byte stays 0.
        let Some(room) = bytes[..DOOR_WORDS * 8 - 1].get_mut(..path.len()) else { return };
        room.copy_from_slice(path);
        for (word, bytes) in self.header.door.iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(std::array::from_fn(|index| bytes[index])), Ordering::Relaxed);
        }
    }

    /// Returns the descriptors that the door gives the calling process; `None` without a door that
    /// it can reach.
    pub fn knock(&self) -> Option<door::Given> {
        let mut bytes = [0u8; DOOR_WORDS * 8];
        for (word, bytes) in self.header.door.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let path = CStr::from_bytes_until_nul(&bytes).ok().filter(|path| !path.is_empty())?;
        door::knock(path).ok()
    }

    /// Maps the segment at `path`.
    pub fn open(path: &CStr) -> Result<&'static Control, ControlError> {
        let fd = rustix::fs::openat(rustix::fs::CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| ControlError::System("open", errno))?;
        Control::of(fd)
    }

    /// Maps the segment that `fd` refers to, for the life of the process. Fails with
    /// [`ControlError::Version`] if the file is no segment of this version.
    pub fn of(fd: OwnedFd) -> Result<&'static Control, ControlError> {
        Control::visit(fd).map(Mapped::leak)
    }

    /// Maps the segment like [`Control::of`], but only until the caller drops the mapping: the
    /// memory of an ended run is freed when nobody maps its segment.
    pub fn visit(fd: OwnedFd) -> Result<Mapped<Control>, ControlError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| ControlError::System("read", errno))?;
        let is_sealed = fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SEALS));
        if stat.st_size != size_of::<Control>() as i64 || !is_sealed {
            return Err(ControlError::Version);
        }
        let control = map(&fd)?;
        let header = &control.header;
        // Acquire pairs with the Release in `create`.
        let is_ours =
            header.magic.load(Ordering::Acquire) == MAGIC && header.version.load(Ordering::Relaxed) == VERSION;
        if !is_ours || !header.settings.have_codec() {
            return Err(ControlError::Version);
        }
        Ok(control)
    }

    /// Returns the part of the segment that is about the swap file.
    pub fn swap(&self) -> &SwapSpace {
        &self.swap
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_table::SlotIndex;
    use foliomem_sys::process_exit_notice;
    use foliomem_types::codec::{Codec, ZSTD_MAX_LEVEL};
    use foliomem_types::settings::Limit;
    use foliomem_types::size_policy::Enabled;
    use foliomem_types::size_policy::SizePolicy;
    use foliomem_types::units::{Order, PAGE_BYTES};
    use proptest::prelude::*;
    use rustix::fd::AsRawFd;
    use rustix::process::Pid;
    use std::num::NonZeroU32;
    use std::os::fd::AsFd;

    fn opened(fd: &OwnedFd) -> Result<&'static Control, ControlError> {
        Control::open(&std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap())
    }

    fn codecs() -> impl Strategy<Value = Codec> {
        prop_oneof![
            Just(Codec::Lz4),
            (1..=ZSTD_MAX_LEVEL, any::<bool>()).prop_map(|(level, dictionary)| Codec::Zstd { level, dictionary })
        ]
    }

    proptest! {
        // A segment stays mapped until the process ends: few cases keep the address space small.
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn settings_arrive_as_they_were_configured(
            least_bytes: u64,
            most_bytes: u64,
            divisor in prop_oneof![1 => Just(0), 2 => any::<u32>()],
            sizes: u32,
            codec in codecs(),
            recompress in prop::option::of(codecs()),
            granule in 0u8..10,
            torture: bool,
            hard: bool,
            records: bool,
            reclaimers: u32,
        ) {
            let (sizes, granule) = (SizePolicy::from_bits(sizes), Order::new(granule).unwrap());
            let limit = match NonZeroU32::new(divisor) {
                None if least_bytes % 2 == 0 => Limit::Bytes(most_bytes),
                None => Limit::Container { start_bytes: least_bytes, most_bytes },
                Some(divisor) => Limit::OfNeed { divisor, least_bytes, most_bytes },
            };
            let configuration =
                Configuration { limit, sizes, codec, recompress, granule, torture, hard, records, reclaimers };
            let (_, fd) = Control::create(&configuration).unwrap();
            prop_assert_eq!(opened(&fd).map(Control::configuration), Ok(configuration));
        }

        #[test]
        fn an_overwritten_segment_is_refused_or_usable(
            at in 0..size_of::<Header>(),
            noise in prop::collection::vec(any::<u8>(), 1..200),
        ) {
            let (control, fd) = Control::create(&configuration()).unwrap();
            control.fail(format_args!("no luck"));
            rustix::io::pwrite(&fd, &noise, at as u64).unwrap();
            match opened(&fd) {
                Err(error) => prop_assert_eq!(error, ControlError::Version),
                Ok(control) => {
                    let configuration = control.configuration();
                    prop_assert_eq!(configuration.codec.to_string().parse(), Ok(configuration.codec));
                    control.failure();
                    control.take_notices();
                    control.notice(format_args!("still there"));
                    control.processes_seen();
                    prop_assert!(control.pids().len() <= MAX_PROCESSES);
                }
            }
        }
    }

    fn configuration() -> Configuration {
        Configuration {
            limit: Limit::Bytes(1 << 30),
            sizes: SizePolicy::from_bits(0x14),
            codec: Codec::Zstd { level: 7, dictionary: true },
            recompress: Some(Codec::Zstd { level: 9, dictionary: false }),
            granule: Order::new(4).unwrap(),
            reclaimers: 3,
            torture: true,
            hard: false,
            records: true,
        }
    }

    fn pid(raw: i32) -> Pid {
        Pid::from_raw(raw).unwrap()
    }

    #[test]
    fn a_visitor_unmaps_the_segment_again() {
        let (_, fd) = Control::create(&configuration()).unwrap();
        let inode = format!(" {} ", rustix::fs::fstat(&fd).unwrap().st_ino);
        let count = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains(&inode) && line.contains("foliomem-control")).count()
        };
        let visited = Control::visit(fd.try_clone().unwrap()).unwrap();
        assert_eq!((count(), visited.configuration()), (2, configuration()));
        drop(visited);
        assert_eq!(count(), 1);
        Control::visit(fd).unwrap().leak();
        assert_eq!(count(), 2);
    }

    #[test]
    fn one_side_reads_what_the_other_writes() {
        let (control, fd) = Control::create(&configuration()).unwrap();
        let path = format!("/proc/self/fd/{}\0", fd.as_raw_fd());
        let other = Control::open(CStr::from_bytes_with_nul(path.as_bytes()).unwrap()).unwrap();
        assert_eq!(other.configuration(), configuration());
        assert_eq!(control.failure(), None);
        other.fail(format_args!("no {}", "luck"));
        other.fail(format_args!("more"));
        assert_eq!(control.failure().unwrap(), "foliomem: no luck\n");
    }

    #[test]
    fn a_segment_is_found_by_its_door_if_proc_shows_none() {
        let (control, fd) = Control::create(&configuration()).unwrap();
        let door = door::Door::open(fd.as_fd(), None).unwrap();
        let number = fd.as_raw_fd();
        control.fail(format_args!("this one"));
        assert!(control.knock().is_none(), "no door was published");
        control.set_door(door.path());
        assert!(control.knock().is_some());
        let found = |proc: &str, door: &str| {
            let name = std::ffi::CString::new(format!("{proc}{door}")).unwrap();
            Control::find(&name).map(|(control, _)| control.failure().unwrap())
        };
        let (path, this_one) = (format!(":{}", door.path().display()), "foliomem: this one\n".to_owned());
        assert_eq!(found(&format!("/proc/self/fd/{number}"), ""), Ok(this_one.clone()));
        assert_eq!(found(&format!("/proc/self/fd/{number}"), ":/nowhere"), Ok(this_one.clone()));
        assert_eq!(found("/proc/self/fd/99999", &path), Ok(this_one.clone()));
        assert_eq!(found("/dev/null", &path), Ok(this_one), "the path names no segment");
        assert!(found("/proc/self/fd/99999", ":/nowhere").is_err());
    }

    #[test]
    fn a_limit_that_follows_the_need_grows_up_to_its_maximum() {
        const PAGE: u64 = PAGE_BYTES as u64;
        let limit = |divisor| Limit::OfNeed {
            divisor: NonZeroU32::new(divisor).unwrap(),
            least_bytes: 100 * PAGE,
            most_bytes: 1000 * PAGE,
        };
        let (control, _fd) = Control::create(&Configuration { limit: limit(2), ..configuration() }).unwrap();
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        let limit_pages = |taken: u64, out: u64, copied: u64, used: u64| {
            me.measured_bytes.store(taken * PAGE, Ordering::Relaxed);
            me.counters.store.orig_data_size.set(out * PAGE);
            me.counters.vm.nr_swapcached.set(copied);
            me.counters.store.mem_used_total.set(used * PAGE);
            control.follow_need();
            control.limit_bytes() / PAGE
        };
        assert_eq!(limit_pages(150, 0, 0, 0), 100, "not below the minimum");
        assert_eq!(limit_pages(300, 500, 100, 50), 325, "a copy counts once, and compressed memory uncompressed");
        assert_eq!(limit_pages(200, 0, 0, 0), 325, "it never shrinks");
        assert_eq!(control.need_peak_bytes() / PAGE, 650);
        assert_eq!(limit_pages(9000, 0, 0, 0), 1000);
        assert_eq!(limit_pages(0, u64::MAX / PAGE, 0, u64::MAX / PAGE), 1000, "overwritten counters do no harm");
        let (fixed, _fd) = Control::create(&configuration()).unwrap();
        fixed.follow_need();
        assert_eq!(fixed.limit_bytes(), 1 << 30);
    }

    #[test]
    fn the_shared_store_is_a_part_of_the_tree() {
        const PAGE: u64 = PAGE_BYTES as u64;
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let process = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        process.measured_bytes.store(30 * PAGE, Ordering::Relaxed);
        process.anon_bytes.store(30 * PAGE, Ordering::Relaxed);
        process.counters.store.orig_data_size.set(100 * PAGE);
        process.counters.store.mem_used_total.set(10 * PAGE);
        control.set_shared_store_bytes(20 * PAGE);
        assert_eq!(control.tree_measured_bytes(), 50 * PAGE);
        assert_eq!(control.tree_anon_bytes(), (50 * PAGE, 1));
        assert_eq!(control.tree_needed_bytes(), 120 * PAGE, "what is stored counts uncompressed");
    }

    #[test]
    fn relatives_come_from_one_process_by_forks() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        // All slots have the living process of the test.
        let [parent, child, grandchild, other] =
            [(); 4].map(|()| control.claim_slot(rustix::process::getpid()).unwrap());
        assert!([parent, other].iter().all(|&slot| !control.has_relatives(slot)));
        control.note_fork(child, parent);
        control.note_fork(grandchild, child);
        assert!([parent, child, grandchild].iter().all(|&slot| control.has_relatives(slot)));
        assert!(!control.has_relatives(other));
        control.process(parent).mark_ended();
        control.process(child).mark_ended();
        assert!(!control.has_relatives(grandchild), "all others have ended");
    }

    #[test]
    fn overwritten_sizes_of_processes_do_no_harm() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        control.set_unmanaged_bytes(5);
        for _ in 0..2 {
            let slot = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
            slot.measured_bytes.store(u64::MAX, Ordering::Relaxed);
            slot.anon_bytes.store(u64::MAX - 1, Ordering::Relaxed);
            slot.awake.store(u32::MAX, Ordering::Relaxed);
        }
        assert_eq!(control.tree_measured_bytes(), u64::MAX);
        assert_eq!(control.tree_anon_bytes(), (u64::MAX, 2));
        assert_eq!(control.awake_processes(), (u32::MAX, 2));
        control.tree_needed_bytes();
        control.tree_compressed_bytes();
    }

    #[test]
    fn the_size_policy_changes_as_a_whole() {
        let (control, fd) = Control::create(&configuration()).unwrap();
        let other = opened(&fd).unwrap();
        std::thread::scope(|scope| {
            for order in Order::sizes() {
                scope.spawn(move || control.change_sizes(|sizes| sizes.with(order, Enabled::Madvise)));
            }
        });
        assert!(Order::sizes().all(|order| other.sizes().size(order) == Enabled::Madvise), "each change is kept");
        assert!(ftruncate(&fd, 0).is_err(), "the seal keeps the size");
    }

    #[test]
    fn a_file_that_is_no_segment_is_refused() {
        let fd = memfd_create(c"test", MemfdFlags::ALLOW_SEALING).unwrap();
        let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        assert_eq!(Control::open(&path).err(), Some(ControlError::Version));
        ftruncate(&fd, size_of::<Control>() as u64).unwrap();
        assert_eq!(Control::open(&path).err(), Some(ControlError::Version));
        fcntl_add_seals(&fd, SEALS).unwrap();
        assert_eq!(Control::open(&path).err(), Some(ControlError::Version));
    }

    #[test]
    fn an_ended_process_uses_no_memory_even_if_its_pid_is_alive() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        me.anon_bytes.store(4096, Ordering::Relaxed);
        let notice: &'static process_exit_notice::ProcessExitNotice = Box::leak(Box::default());
        std::thread::spawn(|| notice.leave(&me.exit_notice, rustix::thread::gettid())).join().unwrap();
        assert_eq!(control.tree_anon_bytes(), (0, 0));
        assert_eq!(control.reap(), 0);
    }

    #[test]
    fn a_process_that_outlives_its_companion_counts_until_its_end() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let slot = control.process(control.claim_slot(pid(child.id() as i32)).unwrap());
        slot.anon_bytes.store(4096, Ordering::Relaxed);
        slot.mark_companion_ending();
        process_exit_notice::mark(&slot.exit_notice);
        control.note_ended();
        assert_eq!(control.tree_anon_bytes(), (4096, 1), "it runs");
        child.kill().unwrap();
        while !std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().contains(") Z ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(control.tree_anon_bytes(), (4096, 1), "nobody has noticed");
        control.note_ended();
        assert_eq!(control.tree_anon_bytes(), (0, 0), "a zombie has no memory");
        child.wait().unwrap();
    }

    #[test]
    fn a_notice_says_once_that_slots_are_exhausted() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let sleep = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut children: Vec<_> = (0..MAX_PROCESSES + 2).map(|_| sleep()).collect();
        let claimed = children.iter().filter(|child| control.claim_slot(pid(child.id() as i32)).is_ok()).count();
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(claimed, MAX_PROCESSES);
        let notices = control.take_notices();
        assert!(matches!(&*notices, [one] if one.contains("more than 1024 processes")), "{notices:?}");
    }

    #[test]
    fn processes_that_start_at_once_get_different_slots() {
        const AT_ONCE: i32 = 8;
        for _ in 0..200 {
            let (control, _fd) = Control::create(&configuration()).unwrap();
            let all_there = std::sync::Barrier::new(AT_ONCE as usize);
            let slots: std::collections::BTreeSet<_> = std::thread::scope(|scope| {
                let claim = |number| {
                    all_there.wait();
                    control.claim_slot(pid(number)).map(SlotIndex::get).unwrap()
                };
                let threads: Vec<_> = (1..=AT_ONCE).map(|number| scope.spawn(move || claim(number))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(slots.len(), AT_ONCE as usize);
        }
    }

    #[test]
    fn slots_of_ended_processes_are_counted_and_reused() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let dead = pid(child.id() as i32);
        child.wait().unwrap();
        let me = rustix::process::getpid();
        let mine = control.claim_slot(me).unwrap();
        let theirs = control.claim_slot(dead).unwrap();
        assert_ne!(mine, theirs);
        control.process(theirs).counters.vm.pgfault.add(5);
        control.process(theirs).anon_bytes.store(4096, Ordering::Relaxed);
        control.process(mine).counters.vm.pgfault.add(2);
        assert_eq!(control.tree_anon_bytes(), (4096, 2));
        assert_eq!(control.reap(), 1);
        assert_eq!(control.tree_anon_bytes(), (0, 1));
        assert_eq!(control.sum().vm.pgfault.get(), 7);
        // After an exec, the old program keeps its slot until its companion ends.
        let next = control.claim_slot(me).unwrap();
        assert_ne!(next, mine);
        assert_eq!((control.reap(), control.processes_seen()), (0, 2));
        control.process(mine).mark_ended();
        assert_eq!(control.reap(), 1);
        assert_eq!(control.sum().vm.pgfault.get(), 7);
        assert_eq!(control.claim_slot(me).unwrap(), mine);
        assert_eq!(control.process(mine).counters.vm.pgfault.get(), 0);
    }

    #[test]
    fn what_the_program_held_at_its_end_is_kept_for_the_report() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let program = pid(child.id() as i32);
        while !crate::process_table::is_exiting(child.id()) {
            foliomem_sync::back_off();
        }
        let held = |slot| &control.process(slot).counters.store.mem_used_total;
        let ended = control.claim_slot(program).unwrap();
        held(ended).set(5);
        control.process(ended).mark_ended();
        assert_eq!((control.reap_except(program), held(ended).get()), (0, 5));
        child.wait().unwrap();
        // A program that executes another one in its place goes on.
        let me = rustix::process::getpid();
        let executed = control.claim_slot(me).unwrap();
        held(executed).set(7);
        control.process(executed).mark_ended();
        assert_eq!((control.reap_except(me), held(executed).get()), (2, 0));
    }
}
