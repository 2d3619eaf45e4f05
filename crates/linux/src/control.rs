//! The control segment: memory that the supervisor shares with the agent in every process of a run.
//!
//! A memfd that the supervisor keeps open; agents find it by `FOLIOMEM_CONTROL=/proc/<pid>/fd/<n>:<door>`. It
//! holds the configuration (written before the program starts, then constant), what the tree takes, and
//! the counters of every process. A process can be killed at any instruction: everything is atomics, no
//! state needs two writes, and the only lock (of the totals) names its owner so that it can be broken.
//!
//! A slot belongs to one memory: to the process whose pid it holds, until that ends or executes another program, which claims a slot of its
//! own. The companion marks the end (`death`), and the kernel does so where it was killed: what the process takes is not counted from
//! then on. The supervisor, or another process that needs a slot, folds the counters of ended processes into the totals.

use crate::codec::{Codec, ZSTD_MAX_LEVEL};
use crate::custody::{Calls, Offer};
use crate::door;
use crate::identity::{self, is_alive};
use crate::line::with_line;
use crate::pagemap;
use crate::process_exit_notice;
use crate::swap_space::SwapSpace;
use crate::trace_ring::TraceRing;
use foliomem_core::policy::SizePolicy;
use foliomem_core::stats::Counters;
use foliomem_core::units::{Order, PAGE_BYTES};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::Pid;
use std::ffi::CStr;
use std::fmt;
use std::num::NonZeroU32;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use thiserror::Error;

/// "foliomem", and the layout: changed whenever the layout is.
const MAGIC: u64 = u64::from_le_bytes(*b"foliomem");
const VERSION: u64 = 12;
/// What /proc calls it: `/memfd:` and this.
pub(crate) const SEGMENT_NAME: &CStr = c"foliomem-control";
/// Why a limit is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excess {
    /// What the engine has does not compress well enough.
    Incompressible,
    /// Much of what it has cannot be moved.
    Unevictable,
    /// Much is not the engine's.
    Unmanaged,
}

/// Processes of a run at one time. What those beyond have is not in the limit, which is said once.
pub const MOST_PROCESSES: usize = 1024;
/// Length of a message an agent may leave.
const MESSAGE_BYTES: usize = 512;
/// Messages of a run, beyond the one that ends it.
pub const MOST_NOTICES: usize = 16;
/// How often sizes that change all the time are looked at for two looks that agree.
const MOST_LOOKS: u32 = 16;

/// Room for the path of a [`door`], in words: more than a socket's address can have.
const DOOR_WORDS: usize = 16;
/// Room for the path of a descriptor under `/proc`.
const MAX_PATH_BYTES: usize = 64;

/// Nobody makes it smaller: who has it mapped would get SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::SEAL);

/// The companion ends by itself.
const ENDING: u32 = 1;
/// It writes to its slot no more.
const ENDED: u32 = 2;

/// Evict as much as possible, all the time.
const FLAG_TORTURE: u32 = 1 << 0;
/// Stop the tree rather than exceed the limit.
const FLAG_HARD: u32 = 1 << 1;
/// Tell what the processes do.
const FLAG_RECORD: u32 = 1 << 2;

/// Why the segment cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ControlError {
    /// A call failed.
    #[error("cannot {0} the control segment: {1}")]
    System(&'static str, Errno),
    /// It is not one, or of another version.
    #[error("the control segment is of another version of foliomem")]
    Version,
    /// Every slot is taken by a living process.
    #[error("more than {MOST_PROCESSES} processes in one run")]
    Full,
}

/// What the tree may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// So much.
    Bytes(u64),
    /// A share of the most that it has needed so far, compressed or not: it grows with that.
    OfNeed {
        /// The share is 1/divisor.
        divisor: NonZeroU32,
        /// It begins with as much.
        least_bytes: u64,
        /// It never grows beyond this.
        most_bytes: u64,
    },
}

impl Limit {
    /// The least that it can be.
    fn least_bytes(self) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::OfNeed { least_bytes, .. } => least_bytes,
        }
    }

    /// The most that it can be.
    pub fn most_bytes(self) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::OfNeed { most_bytes, .. } => most_bytes,
        }
    }
}

/// What the supervisor configures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Configuration {
    /// What the tree may take.
    pub limit: Limit,
    /// Which folio sizes there may be; what holds now is [`Control::sizes`].
    pub sizes: SizePolicy,
    /// How pieces are compressed.
    pub codec: Codec,
    /// How idle pieces are recompressed, if they are.
    pub recompress: Option<Codec>,
    /// The largest piece compressed as one.
    pub granule: Order,
    /// Threads that reclaim in the background; 0 for as many as suit the CPUs.
    pub reclaimers: u32,
    /// Evict as much as possible, all the time.
    pub torture: bool,
    /// Stop the tree rather than exceed the limit.
    pub hard: bool,
    /// Whether to tell what the processes do ([`Control::trace`]).
    pub records: bool,
}

/// One line for the supervisor to print.
#[repr(C)]
struct Message {
    /// 0 none, 1 being written, 2 written, 3 taken.
    state: AtomicU32,
    len: AtomicU32,
    bytes: [AtomicU64; MESSAGE_BYTES / 8],
}

impl Message {
    fn write(&self, text: fmt::Arguments<'_>) {
        if self.state.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        with_line(text, |line| {
            for (word, bytes) in self.bytes.iter().zip(line.chunks(8)) {
                let mut padded = [0; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
            }
            self.len.store(line.len() as u32, Ordering::Relaxed);
        });
        // Release pairs with the Acquire in `read` and `take`: the message is whole.
        self.state.store(2, Ordering::Release);
    }

    fn is_written(&self) -> bool {
        // Acquire pairs with the Release in `write`.
        self.state.load(Ordering::Acquire) >= 2
    }

    fn read(&self) -> Option<String> {
        if !self.is_written() {
            return None;
        }
        let words = self.bytes.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let line: Vec<u8> = words.take(self.len.load(Ordering::Relaxed) as usize).collect();
        Some(String::from_utf8_lossy(&line).into_owned())
    }

    /// Reads a message once.
    fn take(&self) -> Option<String> {
        // Acquire pairs with the Release in `write`.
        let taken = self.state.compare_exchange(2, 3, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().and_then(|_| self.read())
    }
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU64,
    /// What the tree may take now; the most that can become of it, and which share of its need: 0 where that does not count.
    limit_bytes: AtomicU64,
    least_limit_bytes: AtomicU64,
    most_limit_bytes: AtomicU64,
    need_divisor: AtomicU32,
    sizes: AtomicU32,
    /// The most that the tree has needed, where the limit follows that.
    need_peak_bytes: AtomicU64,
    codec: AtomicU32,
    /// As `codec`, or [`NO_CODEC`].
    recompress: AtomicU32,
    granule: AtomicU32,
    reclaimers: AtomicU32,
    flags: AtomicU32,
    hellos: AtomicU32,
    /// Slots from here on were never claimed.
    slots_used: AtomicU32,
    processes: AtomicU32,
    limit_exceeded: AtomicU32,
    /// There were too many processes.
    is_crowded: AtomicU32,
    /// The path of the [`door`], to its first 0 byte; empty where there is none.
    door: [AtomicU64; DOOR_WORDS],
    /// Why the run must end.
    failure: Message,
    notices_used: AtomicU32,
    notices: [Message; MOST_NOTICES],
    /// Pid of who holds the totals' lock, 0 for nobody.
    totals_owner: AtomicU32,
    /// Held by the supervisor: marked when it ends.
    supervisor: AtomicU32,
    /// 1 once the supervisor has ended the run.
    is_over: AtomicU32,
    /// The inode of the supervisor's pid namespace; 0 where that is unknown.
    pid_namespace: AtomicU64,
    custody: Calls,
}

/// One process.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessSlot {
    pid: AtomicU32,
    /// Held by its keeper: marked when it ends.
    pub keeper: AtomicU32,
    /// [`ENDING`] and [`ENDED`] once its companion ends by itself.
    ended: AtomicU32,
    /// Its userfaultfd, for the supervisor.
    pub offer: Offer,
    /// Anonymous memory the process takes, at most: what it may have stopped sharing since that was measured
    /// counts as its own.
    pub anon_bytes: AtomicU64,
    /// The same with what it shared when that was measured: for reports.
    pub measured_bytes: AtomicU64,
    /// 1 while it changes its size: other processes may then be without a CPU.
    pub awake: AtomicU32,
    /// Its counters.
    pub counters: Counters,
}

impl ProcessSlot {
    /// The process takes nothing from here on, and the slot may be used again.
    pub fn has_ended(&self) {
        // Release pairs with the acquire in `unattended`: the mark is not a killed companion's.
        self.ended.store(ENDING, Ordering::Release);
        self.anon_bytes.store(0, Ordering::Relaxed);
        self.measured_bytes.store(0, Ordering::Relaxed);
        process_exit_notice::mark(&self.keeper);
        // Release pairs with the acquire in `is_gone`: nothing is written here after the slot is used again.
        self.ended.store(ENDED, Ordering::Release);
    }

    /// Whether the process and its companion have ended.
    fn is_gone(&self) -> bool {
        let pid = self.pid.load(Ordering::Acquire);
        let companion = self.keeper.load(Ordering::Relaxed);
        // Acquire pairs with the Release in `has_ended`.
        let has_ended = self.ended.load(Ordering::Acquire) == ENDED;
        if identity::is_of_nested(pid) {
            // The kernel marks the word also where it kills a whole pid namespace.
            return has_ended || process_exit_notice::is_marked(&self.keeper);
        }
        let has_companion = companion != 0 && !process_exit_notice::is_marked(&self.keeper) && is_alive(companion);
        pid != 0 && (has_ended || !is_alive(pid) && !has_companion)
    }

    /// In the child of a fork, which has claimed this slot: half of what the parent takes is the child's, until both have
    /// looked; at no time is it counted twice.
    pub fn inherit(&self, parent: &ProcessSlot) {
        self.counters.inherit_gauges(&parent.counters);
        for (ours, theirs) in [(&self.anon_bytes, &parent.anon_bytes), (&self.measured_bytes, &parent.measured_bytes)] {
            let keep = |bytes: u64| Some(bytes - bytes / 2);
            // AcqRel pairs with that of `publish` in the parent, and with the Acquire in
            // `tree_bytes`: the child's slot is claimed.
            let half = theirs.fetch_update(Ordering::AcqRel, Ordering::Relaxed, keep).unwrap_or(0) / 2;
            ours.store(half, Ordering::Relaxed);
        }
    }
}

/// The segment.
#[repr(C)]
pub struct Control {
    header: Header,
    totals: Counters,
    processes: [ProcessSlot; MOST_PROCESSES],
    swap: SwapSpace,
    /// One for each slot. What is never written takes no memory.
    traces: [TraceRing; MOST_PROCESSES],
}

/// Which slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// Slot number `index`, if there is one.
    pub fn new(index: u32) -> Option<SlotIndex> {
        ((index as usize) < MOST_PROCESSES).then_some(SlotIndex(index))
    }

    /// Its number.
    pub fn get(self) -> u32 {
        self.0
    }
}

fn map(fd: impl AsFd) -> Result<&'static Control, ControlError> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new shared mapping of a file of at least this size; it is never unmapped.
    let start =
        unsafe { mmap(std::ptr::null_mut(), size_of::<Control>(), protection, MapFlags::SHARED, fd.as_fd(), 0) }
            .map_err(|errno| ControlError::System("map", errno))?;
    // SAFETY: mapped for ever, page aligned, and all of it atomics, for which every bit pattern is a value.
    Ok(unsafe { &*start.cast::<Control>() })
}

impl Control {
    /// Makes a segment. The descriptor must stay open as long as processes may start.
    pub fn create(configuration: &Configuration) -> Result<(&'static Control, OwnedFd), ControlError> {
        let fd = memfd_create(SEGMENT_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| ControlError::System("create", errno))?;
        ftruncate(&fd, size_of::<Control>() as u64).map_err(|errno| ControlError::System("size", errno))?;
        fcntl_add_seals(&fd, SEALS).map_err(|errno| ControlError::System("seal", errno))?;
        let control = map(&fd)?;
        let header = &control.header;
        let set = |field: &AtomicU32, value: u32| field.store(value, Ordering::Relaxed);
        let limit = configuration.limit;
        header.limit_bytes.store(limit.least_bytes(), Ordering::Relaxed);
        header.least_limit_bytes.store(limit.least_bytes(), Ordering::Relaxed);
        header.most_limit_bytes.store(limit.most_bytes(), Ordering::Relaxed);
        if let Limit::OfNeed { divisor, .. } = limit {
            set(&header.need_divisor, divisor.get());
        }
        set(&header.sizes, configuration.sizes.bits());
        set(&header.codec, encode_codec(configuration.codec));
        set(&header.recompress, configuration.recompress.map_or(NO_CODEC, encode_codec));
        set(&header.granule, u32::from(configuration.granule.get()));
        set(&header.reclaimers, configuration.reclaimers);
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let flags = flag(configuration.torture, FLAG_TORTURE) | flag(configuration.hard, FLAG_HARD);
        set(&header.flags, flags | flag(configuration.records, FLAG_RECORD));
        header.version.store(VERSION, Ordering::Relaxed);
        // Release pairs with the Acquire in `of`: the header is whole.
        header.magic.store(MAGIC, Ordering::Release);
        Ok((control, fd))
    }

    /// Maps the segment that `name` names: what `/proc` shows of the supervisor's descriptor, and, behind a colon, the path of
    /// a [`door`].
    ///
    /// Where the door has been used, `/dev/userfaultfd` comes with it.
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
            // Behind the colon: what ends with the same nul.
            let door = CStr::from_bytes_with_nul(&name.to_bytes_with_nul()[colon + 1..]);
            let door = door.map_err(|_| ControlError::System("open", Errno::INVAL))?;
            let given = door::knock(door).map_err(|errno| ControlError::System("open", errno))?;
            Ok((Control::of(given.segment)?, given.device))
        })
    }

    /// The supervisor: there is a [`door`] at `path`, if that is short enough for a socket.
    pub fn has_door(&self, path: &Path) {
        let mut bytes = [0u8; DOOR_WORDS * 8];
        let path = path.as_os_str().as_bytes();
        // The last byte stays 0.
        let Some(room) = bytes[..DOOR_WORDS * 8 - 1].get_mut(..path.len()) else { return };
        room.copy_from_slice(path);
        for (word, bytes) in self.header.door.iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(std::array::from_fn(|index| bytes[index])), Ordering::Relaxed);
        }
    }

    /// What the door gives the calling process, if there is one that it finds.
    pub fn knock(&self) -> Option<door::Given> {
        let mut bytes = [0u8; DOOR_WORDS * 8];
        for (word, bytes) in self.header.door.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let path = CStr::from_bytes_until_nul(&bytes).ok().filter(|path| !path.is_empty())?;
        door::knock(path).ok()
    }

    /// Maps the segment that `path` names.
    pub fn open(path: &CStr) -> Result<&'static Control, ControlError> {
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| ControlError::System("open", errno))?;
        Control::of(fd)
    }

    /// Maps the segment that `fd` is of.
    pub fn of(fd: OwnedFd) -> Result<&'static Control, ControlError> {
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
        if !is_ours || decode_codec(header.codec.load(Ordering::Relaxed)).is_none() {
            return Err(ControlError::Version);
        }
        Ok(control)
    }

    /// What the supervisor has configured.
    pub fn configuration(&self) -> Configuration {
        let header = &self.header;
        let flags = header.flags.load(Ordering::Relaxed);
        let [least_bytes, most_bytes] =
            [&header.least_limit_bytes, &header.most_limit_bytes].map(|bytes| bytes.load(Ordering::Relaxed));
        Configuration {
            limit: match NonZeroU32::new(header.need_divisor.load(Ordering::Relaxed)) {
                None => Limit::Bytes(most_bytes),
                Some(divisor) => Limit::OfNeed { divisor, least_bytes, most_bytes },
            },
            sizes: self.sizes(),
            // The program may have written over what was a codec when the segment was opened.
            codec: decode_codec(header.codec.load(Ordering::Relaxed)).unwrap_or(Codec::Lz4),
            recompress: decode_codec(header.recompress.load(Ordering::Relaxed)),
            granule: Order::new(header.granule.load(Ordering::Relaxed) as u8).unwrap_or(Order::ZERO),
            reclaimers: header.reclaimers.load(Ordering::Relaxed),
            torture: flags & FLAG_TORTURE != 0,
            hard: flags & FLAG_HARD != 0,
            records: flags & FLAG_RECORD != 0,
        }
    }

    /// What the tree may take now.
    pub fn limit_bytes(&self) -> u64 {
        self.header.limit_bytes.load(Ordering::Relaxed)
    }

    /// Lets the limit grow with what the tree needs, if it does that.
    pub fn follow_need(&self) {
        if let Some(divisor) = NonZeroU32::new(self.header.need_divisor.load(Ordering::Relaxed)) {
            let needed_bytes = self.tree_needed_bytes();
            self.header.need_peak_bytes.fetch_max(needed_bytes, Ordering::Relaxed);
            let share_bytes = needed_bytes / u64::from(divisor.get());
            let most_bytes = self.header.most_limit_bytes.load(Ordering::Relaxed);
            self.header.limit_bytes.fetch_max(share_bytes.min(most_bytes), Ordering::Relaxed);
        }
    }

    /// The largest need that [`Control::follow_need`] has seen in any process; 0 where the limit is fixed.
    pub fn need_peak_bytes(&self) -> u64 {
        self.header.need_peak_bytes.load(Ordering::Relaxed)
    }

    /// Which folio sizes there may be now, in the whole tree.
    pub fn sizes(&self) -> SizePolicy {
        SizePolicy::from_bits(self.header.sizes.load(Ordering::Relaxed))
    }

    /// Changes that, at once and whoever else does so.
    pub fn change_sizes(&self, change: impl Fn(SizePolicy) -> SizePolicy) {
        let changed = |bits| Some(change(SizePolicy::from_bits(bits)).bits());
        // Never refused.
        let _ = self.header.sizes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }

    /// What there is about the swap file.
    pub fn swap(&self) -> &SwapSpace {
        &self.swap
    }

    /// The supervisor's thread that runs for as long as the supervisor: the run is abandoned if it ends before [`Control::is_over`].
    pub fn supervise(&'static self) {
        let notice = Box::leak(Box::<process_exit_notice::ProcessExitNotice>::default());
        notice.leave(&self.header.supervisor, rustix::thread::gettid());
        self.header.pid_namespace.store(own_pid_namespace(), Ordering::Relaxed);
        self.header.custody.attend();
    }

    /// How companions reach the supervisor's thread that holds their userfaultfds, too.
    pub fn custody(&self) -> &Calls {
        &self.header.custody
    }

    /// The supervisor has seen the run to its end. Processes that are left go on by themselves.
    pub fn is_over(&self) {
        // Release pairs with the Acquire in `is_abandoned`.
        self.header.is_over.store(1, Ordering::Release);
    }

    /// Whether the processes of the run are to end by themselves: the supervisor was killed, or it
    /// ends the run and does not know their pids, which are of another pid namespace.
    pub fn must_end(&self) -> bool {
        self.is_abandoned() || identity::is_nested() && self.header.failure.is_written()
    }

    /// The supervisor's pid, in its pid namespace.
    pub(crate) fn supervisor(&self) -> u32 {
        process_exit_notice::holder(&self.header.supervisor)
    }

    fn is_abandoned(&self) -> bool {
        // Acquire pairs with the Release in `is_over`.
        process_exit_notice::is_marked(&self.header.supervisor) && self.header.is_over.load(Ordering::Acquire) == 0
    }

    /// Finds out whether the calling process is in another pid namespace than the supervisor.
    pub fn learn_pid_namespace(&self) {
        let (theirs, own) = (self.header.pid_namespace.load(Ordering::Relaxed), own_pid_namespace());
        if theirs != 0 && own != 0 && theirs != own {
            identity::set_nested();
        }
    }

    /// Whether a companion has not ended yet though its program has.
    pub fn has_companion_left(&self) -> bool {
        self.living().any(|process| !is_alive(process.pid.load(Ordering::Relaxed)))
    }

    /// A process whose companion was killed, if there is one: nothing keeps its limit any more.
    pub fn unattended(&self) -> Option<Pid> {
        let is_unattended = |&slot: &SlotIndex| {
            let (process, pid) = (self.process(slot), self.pid(slot));
            let is_marked = pid != 0 && !identity::is_of_nested(pid) && process_exit_notice::is_marked(&process.keeper);
            // The kernel marks the word of a companion that ends by itself, too.
            // Acquire pairs with the Release in `has_ended`.
            is_marked && process.ended.load(Ordering::Acquire) == 0 && is_running(pid)
        };
        self.slots().find(is_unattended).and_then(|slot| Pid::from_raw(self.pid(slot) as i32))
    }

    /// An agent is at work.
    pub fn hello(&self) {
        self.header.hellos.fetch_add(1, Ordering::Relaxed);
    }

    /// How many agents have said hello.
    pub fn hellos(&self) -> u32 {
        self.header.hellos.load(Ordering::Relaxed)
    }

    /// Leaves the reason why the run must end; only the first one is kept.
    pub fn fail(&self, why: fmt::Arguments<'_>) {
        self.header.failure.write(why);
    }

    /// Why the run must end, if it must: a whole line.
    pub fn failure(&self) -> Option<String> {
        self.header.failure.read()
    }

    /// Leaves a line for the supervisor to print; those beyond [`MOST_NOTICES`] are dropped.
    pub fn notice(&self, text: fmt::Arguments<'_>) {
        let index = self.header.notices_used.fetch_add(1, Ordering::Relaxed) as usize;
        if let Some(notice) = self.header.notices.get(index) {
            notice.write(text);
        }
    }

    /// The lines that were left and not taken yet.
    pub fn take_notices(&self) -> Vec<String> {
        self.header.notices.iter().filter_map(Message::take).collect()
    }

    /// The limit cannot be kept. Ends the run if it is hard.
    pub fn limit_exceeded(&self, excess: Excess) {
        let before = self.header.limit_exceeded.swap(1, Ordering::Relaxed);
        if before == 0 && !self.configuration().hard {
            let why = match excess {
                Excess::Unevictable => "much of the memory is read-only, locked or pinned, which cannot be moved",
                Excess::Unmanaged => {
                    "much of the memory is not such as can be managed (private mappings of files that were written, stacks, \
                     memory that may be executed, or may only be written)"
                }
                Excess::Incompressible => "the data does not compress into the limit",
            };
            self.notice(format_args!("{why}: going over the limit rather than lose any (--hard stops instead)"));
        }
        if self.configuration().hard {
            self.fail(format_args!("the program needs more than the limit, and the limit is hard: stopped"));
        }
    }

    /// Whether the limit was exceeded.
    pub fn was_limit_exceeded(&self) -> bool {
        self.header.limit_exceeded.load(Ordering::Relaxed) != 0
    }

    /// Claims a slot for process `pid`: a free one, else that of a process that is gone.
    pub fn claim_slot(&self, pid: Pid) -> Result<SlotIndex, ControlError> {
        let pid = identity::of(pid);
        // Before an exec it had another one, which its companion still uses.
        let is_new = self.slots().all(|slot| self.pid(slot) != pid);
        loop {
            if let Some(slot) = self.slots().find(|&slot| self.try_claim(slot, 0, pid)) {
                self.header.processes.fetch_add(is_new.into(), Ordering::Relaxed);
                return Ok(slot);
            }
            // One more, which whoever looks for one may find.
            if SlotIndex::new(self.header.slots_used.fetch_add(1, Ordering::Relaxed)).is_some() || self.reap() > 0 {
                continue;
            }
            if self.header.is_crowded.swap(1, Ordering::Relaxed) == 0 {
                self.notice(format_args!(
                    "more than {MOST_PROCESSES} processes at a time: the memory of those beyond is not in the limit"
                ));
            }
            return Err(ControlError::Full);
        }
    }

    fn try_claim(&self, slot: SlotIndex, from: u32, pid: u32) -> bool {
        let word = &self.process(slot).pid;
        // AcqRel pairs with itself, and with the Acquire in `pid`: the slot is as its last owner,
        // or `retire`, has left it.
        word.compare_exchange(from, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Folds the slots of processes that are gone into the totals, and frees them; returns how many.
    ///
    /// A process of another pid namespace cannot tell which are gone, and frees none.
    pub fn reap(&self) -> usize {
        if identity::is_nested() {
            return 0;
        }
        let gone: Vec<SlotIndex> = self.slots().filter(|&slot| self.process(slot).is_gone()).collect();
        for &slot in &gone {
            let pid = self.pid(slot);
            if self.process(slot).is_gone() {
                self.retire(slot, pid);
                let _ = self.try_claim(slot, pid, 0);
            }
        }
        gone.len()
    }

    /// Folds what the process has counted so far into the totals, and starts its slot anew.
    fn retire(&self, slot: SlotIndex, pid: u32) {
        let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
        let owner = &self.header.totals_owner;
        // Acquire pairs with the Release of the holder before, below.
        while let Err(holder) = owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if !is_alive(holder) {
                // Killed in the middle: what it folded may be counted twice, which beats waiting for ever.
                // Relaxed: it continues the release sequence of the dead holder, which released
                // nothing.
                let _ = owner.compare_exchange(holder, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            std::hint::spin_loop();
        }
        let process = self.process(slot);
        if self.pid(slot) == pid {
            process.keeper.store(0, Ordering::Relaxed);
            process.ended.store(0, Ordering::Relaxed);
            process.offer.withdraw(&self.header.custody);
            process.anon_bytes.store(0, Ordering::Relaxed);
            process.measured_bytes.store(0, Ordering::Relaxed);
            process.awake.store(0, Ordering::Relaxed);
            process.counters.clear_gauges();
            process.counters.drain_into(&self.totals);
        }
        // Release pairs with the Acquire above, of the next holder.
        owner.store(0, Ordering::Release);
    }

    /// Whether a slot is that of process `pid`: where all are taken, a child shares its parent's.
    pub fn is_of(&self, slot: SlotIndex, pid: Pid) -> bool {
        self.pid(slot) == identity::of(pid)
    }

    fn pid(&self, slot: SlotIndex) -> u32 {
        // Acquire pairs with the AcqRel in `try_claim`.
        self.process(slot).pid.load(Ordering::Acquire)
    }

    fn slots(&self) -> impl Iterator<Item = SlotIndex> {
        let used = self.header.slots_used.load(Ordering::Relaxed).min(MOST_PROCESSES as u32);
        (0..used).map(SlotIndex)
    }

    /// A slot.
    pub fn process(&self, slot: SlotIndex) -> &ProcessSlot {
        &self.processes[slot.0 as usize]
    }

    /// What the process of a slot tells.
    pub fn trace(&self, slot: SlotIndex) -> &TraceRing {
        &self.traces[slot.0 as usize]
    }

    /// Every slot that was ever claimed, and whether its process lives.
    pub fn each_slot(&self) -> impl Iterator<Item = (SlotIndex, bool)> {
        self.slots().map(|slot| {
            let process = self.process(slot);
            (slot, process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.keeper))
        })
    }

    /// Pids of the processes that have a slot and are in the supervisor's pid namespace.
    pub fn pids(&self) -> Vec<u32> {
        let pids = self.slots().map(|slot| self.pid(slot));
        pids.filter(|&pid| pid != 0 && !identity::is_of_nested(pid)).collect()
    }

    /// The slots of processes that have not ended.
    fn living(&self) -> impl Iterator<Item = &ProcessSlot> {
        let processes = self.slots().map(|slot| self.process(slot));
        processes.filter(|process| {
            process.pid.load(Ordering::Relaxed) != 0 && !process_exit_notice::is_marked(&process.keeper)
        })
    }

    /// Anonymous memory of the tree, as its agents last saw it, and of how many processes.
    pub fn tree_anon_bytes(&self) -> (u64, u32) {
        self.tree_bytes(|process| &process.anon_bytes)
    }

    /// Living processes that change their size, and all.
    pub fn awake_processes(&self) -> (u32, u32) {
        let awake = self.living().map(|process| process.awake.load(Ordering::Relaxed));
        awake.fold((0, 0), |(awake, all), one| (awake + one, all + 1))
    }

    /// Anonymous memory of the tree as it was measured, for reports.
    pub fn tree_measured_bytes(&self) -> u64 {
        self.tree_bytes(|process| &process.measured_bytes).0
    }

    /// What the tree would take now if nothing of it were compressed.
    pub fn tree_needed_bytes(&self) -> u64 {
        let (out, used) = self.tree_store_bytes();
        self.tree_measured_bytes().saturating_add(out).saturating_sub(used)
    }

    /// The sum of a gauge over the living processes, and how many they are.
    fn tree_bytes(&self, gauge: impl Fn(&ProcessSlot) -> &AtomicU64) -> (u64, u32) {
        let sum = || {
            // Acquire pairs with the AcqRel of `ProcessSlot::inherit` and `publish`: of who has
            // halved it, the slot is seen.
            let each = self.living().map(|process| gauge(process).load(Ordering::Acquire));
            each.fold((0, 0), |(bytes, processes), process_bytes| (bytes + process_bytes, processes + 1))
        };
        // A child takes half of its parent's at once: seen before that in the one and after it in the other, it would count
        // twice. Of one instant is what is seen twice.
        let mut seen = sum();
        for _ in 0..MOST_LOOKS {
            let again = sum();
            if again == seen {
                break;
            }
            seen = again;
        }
        seen
    }

    /// What the stores of the tree hold, uncompressed and without copies of what is in memory, too; and what they take for it.
    fn tree_store_bytes(&self) -> (u64, u64) {
        self.living().map(|process| &process.counters).fold((0, 0), |(out, used), counters| {
            let Counters { store, vm, .. } = counters;
            // The program may have written over any of them.
            let copied = vm.nr_swapcached.get().saturating_mul(PAGE_BYTES as u64);
            let add = u64::saturating_add;
            (add(out, store.orig_data_size.get().saturating_sub(copied)), add(used, store.mem_used_total.get()))
        })
    }

    /// Processes that have claimed a slot so far.
    pub fn processes_seen(&self) -> u32 {
        self.header.processes.load(Ordering::Relaxed)
    }

    /// The counters of all processes, those gone included.
    pub fn sum(&self) -> Box<Counters> {
        let total = Box::new(Counters::default());
        self.totals.fold_into(&total);
        self.slots().for_each(|slot| self.process(slot).counters.fold_into(&total));
        total
    }
}

/// Whether there is a process of this number that has not ended.
fn is_running(pid: u32) -> bool {
    let state: Option<char> = pagemap::process_field(pid, 3);
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The inode of the caller's pid namespace; 0 where /proc does not show it.
fn own_pid_namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

/// No codec's.
const NO_CODEC: u32 = u32::MAX;

/// Bits 0..8 which codec, 8..16 its level, 16 whether it has dictionaries.
fn encode_codec(codec: Codec) -> u32 {
    match codec {
        Codec::Lz4 => 0,
        Codec::Zstd { level, dictionary } => 1 | u32::from(level) << 8 | u32::from(dictionary) << 16,
    }
}

fn decode_codec(word: u32) -> Option<Codec> {
    match (word & 0xff, (word >> 8) as u8, word >> 16) {
        (0, 0, 0) => Some(Codec::Lz4),
        (1, level @ 1..=ZSTD_MAX_LEVEL, dictionary @ 0..=1) => Some(Codec::Zstd { level, dictionary: dictionary == 1 }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foliomem_core::policy::Enabled;
    use proptest::prelude::*;
    use rustix::fd::AsRawFd;

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
        // A segment stays mapped for good.
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn what_is_configured_arrives(
            least_bytes: u64,
            most_bytes: u64,
            divisor: u32,
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
                None => Limit::Bytes(most_bytes),
                Some(divisor) => Limit::OfNeed { divisor, least_bytes, most_bytes },
            };
            let configuration =
                Configuration { limit, sizes, codec, recompress, granule, torture, hard, records, reclaimers };
            let (_, fd) = Control::create(&configuration).unwrap();
            prop_assert_eq!(opened(&fd).map(Control::configuration), Ok(configuration));
        }

        #[test]
        fn a_segment_written_over_is_refused_or_of_use(
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
                    prop_assert!(control.pids().len() <= MOST_PROCESSES);
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
    fn what_one_side_writes_the_other_reads() {
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
    fn a_segment_is_found_by_its_door_where_proc_shows_none() {
        let (control, fd) = Control::create(&configuration()).unwrap();
        let door = door::Door::open(fd.as_fd(), None).unwrap();
        let number = fd.as_raw_fd();
        control.fail(format_args!("this one"));
        assert!(control.knock().is_none(), "nobody has said where the door is");
        control.has_door(door.path());
        assert!(control.knock().is_some());
        let found = |proc: &str, door: &str| {
            let name = std::ffi::CString::new(format!("{proc}{door}")).unwrap();
            Control::find(&name).map(|(control, _)| control.failure().unwrap())
        };
        let (path, this_one) = (format!(":{}", door.path().display()), "foliomem: this one\n".to_owned());
        assert_eq!(found(&format!("/proc/self/fd/{number}"), ""), Ok(this_one.clone()));
        assert_eq!(found(&format!("/proc/self/fd/{number}"), ":/nowhere"), Ok(this_one.clone()));
        assert_eq!(found("/proc/self/fd/99999", &path), Ok(this_one.clone()));
        assert_eq!(found("/dev/null", &path), Ok(this_one), "what is no segment");
        assert!(found("/proc/self/fd/99999", ":/nowhere").is_err());
    }

    #[test]
    fn a_limit_that_follows_the_need_grows_with_it_and_no_further_than_it_may() {
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
        assert_eq!(limit_pages(150, 0, 0, 0), 100, "no less than at first");
        assert_eq!(limit_pages(300, 500, 100, 50), 325, "a copy counts once, and compressed memory uncompressed");
        assert_eq!(limit_pages(200, 0, 0, 0), 325, "it never shrinks");
        assert_eq!(control.need_peak_bytes() / PAGE, 650);
        assert_eq!(limit_pages(9000, 0, 0, 0), 1000);
        assert_eq!(limit_pages(0, u64::MAX / PAGE, 0, u64::MAX / PAGE), 1000, "whatever is written there");
        let (fixed, _fd) = Control::create(&configuration()).unwrap();
        fixed.follow_need();
        assert_eq!(fixed.limit_bytes(), 1 << 30);
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
        assert!(ftruncate(&fd, 0).is_err(), "who has it mapped relies on its size");
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
    fn what_has_ended_takes_nothing_though_its_number_is_still_there() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let me = control.process(control.claim_slot(rustix::process::getpid()).unwrap());
        me.anon_bytes.store(4096, Ordering::Relaxed);
        let notice: &'static process_exit_notice::ProcessExitNotice = Box::leak(Box::default());
        std::thread::spawn(|| notice.leave(&me.keeper, rustix::thread::gettid())).join().unwrap();
        assert_eq!(control.tree_anon_bytes(), (0, 0));
        assert_eq!(control.reap(), 0);
    }

    #[test]
    fn that_there_are_more_processes_than_slots_is_said_once() {
        let (control, _fd) = Control::create(&configuration()).unwrap();
        let sleep = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut children: Vec<_> = (0..MOST_PROCESSES + 2).map(|_| sleep()).collect();
        let claimed = children.iter().filter(|child| control.claim_slot(pid(child.id() as i32)).is_ok()).count();
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(claimed, MOST_PROCESSES);
        let notices = control.take_notices();
        assert!(matches!(&*notices, [one] if one.contains("more than 1024 processes")), "{notices:?}");
    }

    #[test]
    fn each_of_many_that_begin_at_once_has_a_slot() {
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
    fn slots_of_the_dead_are_counted_and_used_again() {
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
        // After an exec the memory before it has its slot until its companion ends.
        let next = control.claim_slot(me).unwrap();
        assert_ne!(next, mine);
        assert_eq!((control.reap(), control.processes_seen()), (0, 2));
        control.process(mine).has_ended();
        assert_eq!(control.reap(), 1);
        assert_eq!(control.sum().vm.pgfault.get(), 7);
        assert_eq!(control.claim_slot(me).unwrap(), mine);
        assert_eq!(control.process(mine).counters.vm.pgfault.get(), 0);
    }
}
